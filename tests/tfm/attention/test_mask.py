"""Masks as literal 0/1 matrices: prefix, window, sums and products, and queries at positions of their own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.attention import mask

VALID_BS = jnp.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 1]], bool)


def test_prefix():
    np.testing.assert_array_equal(mask.dense(mask.prefix(2), N=3, S=4), [[1, 1, 0, 0]] * 3)
    by_hand = [[[1, 0, 0, 0]] * 3, [[1, 1, 1, 0]] * 3]
    np.testing.assert_array_equal(mask.dense(mask.prefix(jnp.array([1, 3])), N=3, S=4), by_hand)
    assert not mask.dense(mask.prefix(0), N=3, S=4).any() and mask.dense(mask.prefix(4), N=3, S=4).all()


def test_window():
    literal = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(mask.dense(mask.window(2), N=5, S=5), literal)
    np.testing.assert_array_equal(mask.dense(mask.window(1), N=5, S=5), np.eye(5))
    np.testing.assert_array_equal(mask.dense(mask.window(2), N=2, S=5), literal[3:])
    assert mask.dense(mask.window(5), N=5, S=5).all()


def test_a_window_without_a_token_is_refused():
    with pytest.raises(ValueError, match="^a window holds at least 1 token, the query's own, and 0 was asked for$"):
        mask.window(0)


def test_a_causal_window_sees_the_last_tokens():
    literal = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    np.testing.assert_array_equal(mask.dense(mask.both(mask.causal, mask.window(3)), N=5, S=5), literal)


def test_a_prefix_is_read_both_ways_and_the_rest_causally():
    literal = [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    for one, other in itertools.permutations([mask.causal, mask.prefix(3)]):
        np.testing.assert_array_equal(mask.dense(mask.either(one, other), N=5, S=5), literal)
    two = mask.dense(mask.either(mask.causal, mask.prefix(jnp.array([3, 0]))), N=5, S=5)
    np.testing.assert_array_equal(two, [literal, np.tri(5)])


def test_a_product_of_three():
    """Prefix of two read both ways, the rest causally, and nobody sees padding."""
    three = mask.both(mask.either(mask.causal, mask.prefix(2)), mask.padding(VALID_BS))
    literal = [
        [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 1]],
        [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]],
    ]
    np.testing.assert_array_equal(mask.dense(three, N=5, S=5), literal)


MASKS = {
    "everything": (mask.everything, [[[1, 1, 1]] * 2, [[1, 1, 1]] * 2]),
    "causal": (mask.causal, [[[1, 1, 1], [1, 0, 0]], [[1, 0, 0], [1, 1, 0]]]),
    "window": (mask.window(2), [[[0, 1, 1], [1, 1, 0]], [[1, 0, 0], [0, 1, 1]]]),
    "prefix": (mask.prefix(3), [[[1, 1, 0]] * 2, [[1, 1, 0]] * 2]),
    "prefixes": (mask.prefix(jnp.array([1, 4])), [[[1, 0, 0]] * 2, [[1, 1, 1]] * 2]),
    "padding": (mask.padding(VALID_BS), [[[1, 1, 0]] * 2, [[0, 1, 1]] * 2]),
    "both": (mask.both(mask.causal, mask.window(3)), [[[0, 1, 1], [1, 0, 0]], [[1, 0, 0], [1, 1, 0]]]),
    "either": (mask.either(mask.causal, mask.prefix(3)), [[[1, 1, 1], [1, 1, 0]], [[1, 1, 0], [1, 1, 0]]]),
}
N_BN, S_S = jnp.array([[3, 1], [0, 2]]), jnp.array([0, 2, 3])


@pytest.mark.parametrize("name", MASKS)
def test_queries_at_positions_of_their_own(name):
    """Sequence 0 asks from 3 and 1, sequence 1 from 0 and 2; keys at 0, 2 and 3. Alone, each sequence gets the same."""
    the_mask, literal = MASKS[name]
    np.testing.assert_array_equal(the_mask(N_BN, S_S), literal)
    assert the_mask(N_BN, S_S).dtype == bool
    np.testing.assert_array_equal(jax.jit(the_mask)(N_BN, S_S), literal)
    for b in range(2):
        alone = the_mask(N_BN[b], S_S)
        np.testing.assert_array_equal(alone[b] if alone.ndim == 3 else alone, literal[b])
        assert (alone.ndim == 3) == (name in ("prefixes", "padding"))
