"""Masks against literal 0/1 matrices: prefix, window, their unions and intersections, and chosen positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

from tfm.attention import mask as masks

VALID_BS = jnp.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 1]], bool)
DOCUMENT_BS = jnp.array([[0, 0, 1, 1, 2], [4, 4, 4, 4, 0]])
WINDOW = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
CAUSAL_WINDOW = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
CAUSAL_PREFIX = [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
PREFIX_AND_PADDING = [
    [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 1]],
    [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]],
]
prefix_and_padding = masks.both(masks.either(masks.causal, masks.prefix(2)), masks.padding(VALID_BS))


@pytest.mark.parametrize(
    ("the_mask", "N", "literal"),
    [
        (masks.causal, 5, np.tri(5)),
        (masks.prefix(2), 3, [[1, 1, 0, 0, 0]] * 3),
        (masks.prefix(jnp.array([1, 3])), 2, [[[1, 0, 0, 0, 0]] * 2, [[1, 1, 1, 0, 0]] * 2]),
        (masks.prefix(0), 2, np.zeros((2, 5))),
        (masks.prefix(5), 2, np.ones((2, 5))),
        (masks.documents(DOCUMENT_BS), 2, [[[0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], [[1, 1, 1, 1, 0], [0, 0, 0, 0, 1]]]),
        (masks.window(2), 5, WINDOW),
        (masks.window(2), 2, WINDOW[3:]),  # the queries are the last tokens
        (masks.window(1), 5, np.eye(5)),
        (masks.window(5), 5, np.ones((5, 5))),
        (masks.both(masks.causal, masks.window(3)), 5, CAUSAL_WINDOW),
        (
            masks.either(masks.causal, masks.prefix(3)),
            5,
            CAUSAL_PREFIX,
        ),  # the prefix is bidirectional and the rest causal
        (masks.either(masks.prefix(3), masks.causal), 5, CAUSAL_PREFIX),
        (masks.either(masks.causal, masks.prefix(jnp.array([3, 0]))), 5, [CAUSAL_PREFIX, np.tri(5)]),
        (
            prefix_and_padding,
            5,
            PREFIX_AND_PADDING,
        ),  # a bidirectional prefix of two, causal after it, and no padding
    ],
)
def test_masks_of_five_keys_are_these_matrices(the_mask, N, literal):
    np.testing.assert_array_equal(the_mask(np.arange(5 - N, 5), np.arange(5)), literal)


def test_the_mask_of_documents_is_split_from_the_others():
    documents, padding = masks.documents(DOCUMENT_BS), masks.padding(VALID_BS)
    other, document_BS = masks.split_documents(masks.both(masks.causal, documents))
    assert other is masks.causal and document_BS is DOCUMENT_BS
    other, document_BS = masks.split_documents(masks.both(masks.both(documents, masks.window(2)), padding))
    n = np.arange(5)
    np.testing.assert_array_equal(other(n, n), masks.both(masks.window(2), padding)(n, n))
    assert document_BS is DOCUMENT_BS and masks.split_documents(documents) == (None, DOCUMENT_BS)
    for mask in (None, masks.causal, padding, masks.either(masks.causal, documents)):
        assert masks.split_documents(mask) == (mask, None)


def test_a_window_of_no_token_is_refused():
    with raises(ValueError, "window", 0):
        masks.window(0)


MASKS = {
    "causal": (masks.causal, [[[1, 1, 1], [1, 0, 0]], [[1, 0, 0], [1, 1, 0]]]),
    "window": (masks.window(2), [[[0, 1, 1], [1, 1, 0]], [[1, 0, 0], [0, 1, 1]]]),
    "prefix": (masks.prefix(3), [[[1, 1, 0]] * 2, [[1, 1, 0]] * 2]),
    "prefixes": (masks.prefix(jnp.array([1, 4])), [[[1, 0, 0]] * 2, [[1, 1, 1]] * 2]),
    "documents": (masks.documents(DOCUMENT_BS), [[[0, 1, 1], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]]]),
    "padding": (masks.padding(VALID_BS), [[[1, 1, 0]] * 2, [[0, 1, 1]] * 2]),
    "both": (masks.both(masks.causal, masks.window(3)), [[[0, 1, 1], [1, 0, 0]], [[1, 0, 0], [1, 1, 0]]]),
    "either": (masks.either(masks.causal, masks.prefix(3)), [[[1, 1, 1], [1, 1, 0]], [[1, 1, 0], [1, 1, 0]]]),
}
N_BN, S_S = jnp.array([[3, 1], [0, 2]]), jnp.array([0, 2, 3])


@pytest.mark.parametrize("name", MASKS)
def test_queries_may_have_other_positions_in_each_sequence(name):
    """Sequence 0 has queries at positions 3 and 1, sequence 1 at 0 and 2. Keys are at 0, 2 and 3.

    A single sequence has the same mask as in the batch.
    """
    the_mask, literal = MASKS[name]
    np.testing.assert_array_equal(jax.jit(the_mask)(N_BN, S_S), literal)
    assert the_mask(N_BN, S_S).dtype == bool
    for b in range(2):
        allowed = the_mask(N_BN[b], S_S)
        np.testing.assert_array_equal(allowed[b] if allowed.ndim == 3 else allowed, literal[b])
        assert (allowed.ndim == 3) == (name in ("prefixes", "padding", "documents"))
