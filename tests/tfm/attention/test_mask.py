"""Masks as literal 0/1 matrices: prefix, window, sums and products, and queries at positions of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

from tfm.attention import mask

VALID_BS = jnp.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 1]], bool)
NEAR = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
LAST = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
READ = [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
THREE = [
    [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 1]],
    [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]],
]
three = mask.both(mask.either(mask.causal, mask.prefix(2)), mask.padding(VALID_BS))


@pytest.mark.parametrize(
    ("the_mask", "N", "literal"),
    [
        (mask.causal, 5, np.tri(5)),
        (mask.prefix(2), 3, [[1, 1, 0, 0, 0]] * 3),
        (mask.prefix(jnp.array([1, 3])), 2, [[[1, 0, 0, 0, 0]] * 2, [[1, 1, 1, 0, 0]] * 2]),
        (mask.prefix(0), 2, np.zeros((2, 5))),
        (mask.prefix(5), 2, np.ones((2, 5))),
        (mask.window(2), 5, NEAR),
        (mask.window(2), 2, NEAR[3:]),  # the queries are the last
        (mask.window(1), 5, np.eye(5)),
        (mask.window(5), 5, np.ones((5, 5))),
        (mask.both(mask.causal, mask.window(3)), 5, LAST),
        (mask.either(mask.causal, mask.prefix(3)), 5, READ),  # a prefix is read both ways and the rest causally
        (mask.either(mask.prefix(3), mask.causal), 5, READ),
        (mask.either(mask.causal, mask.prefix(jnp.array([3, 0]))), 5, [READ, np.tri(5)]),
        (three, 5, THREE),  # prefix of two read both ways, the rest causally, and nobody sees padding
    ],
)
def test_masks_of_five_keys_are_these_matrices(the_mask, N, literal):
    np.testing.assert_array_equal(the_mask(np.arange(5 - N, 5), np.arange(5)), literal)


def test_a_window_of_no_token_is_refused():
    with raises(ValueError, "window", 0):
        mask.window(0)


MASKS = {
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
    """Sequence 0 has queries at 3 and 1, sequence 1 at 0 and 2; keys are at 0, 2 and 3. Alone, each gets the same."""
    the_mask, literal = MASKS[name]
    np.testing.assert_array_equal(jax.jit(the_mask)(N_BN, S_S), literal)
    assert the_mask(N_BN, S_S).dtype == bool
    for b in range(2):
        alone = the_mask(N_BN[b], S_S)
        np.testing.assert_array_equal(alone[b] if alone.ndim == 3 else alone, literal[b])
        assert (alone.ndim == 3) == (name in ("prefixes", "padding"))
