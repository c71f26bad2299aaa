"""Masks against literal 0/1 matrices: prefix, window, padding, documents, their intersections, and chosen positions."""

import jax
import numpy as np
from errors import raises

from tfm.attention import mask as masks

VALID_BS = jax.device_put(np.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 1]], bool))
DOCUMENT_BS = jax.device_put(np.array([[0, 0, 1, 1, 2], [4, 4, 4, 4, 0]]))
WINDOW = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
CAUSAL_WINDOW = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
CAUSAL_PREFIX = [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
PREFIX_AND_PADDING = [
    [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 1]],
    [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]],
]
prefix_and_padding = masks.both(masks.prefix(2), masks.padding(VALID_BS))


def every_second(n, s_S):
    """A user's own mask."""
    return (s_S - n[..., None]) % 2 == 0


FIVE_KEYS = [  # mask, queries, literal
    (masks.Mask(), 2, np.ones((2, 5))),
    (masks.causal, 5, np.tri(5)),
    (masks.prefix(0), 5, np.tri(5)),
    (masks.prefix(3), 5, CAUSAL_PREFIX),
    (masks.prefix(jax.device_put(np.array([3, 0]))), 5, [CAUSAL_PREFIX, np.tri(5)]),
    (masks.both(masks.prefix(4), masks.prefix(3)), 5, CAUSAL_PREFIX),
    (masks.both(masks.causal, masks.prefix(3)), 5, np.tri(5)),
    (masks.documents(DOCUMENT_BS), 2, [[[0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], [[1, 1, 1, 1, 0], [0, 0, 0, 0, 1]]]),
    (masks.window(2), 5, WINDOW),
    (masks.window(2), 2, WINDOW[3:]),  # the queries are the last tokens
    (masks.window(1), 5, np.eye(5)),
    (masks.window(5), 5, np.ones((5, 5))),
    (masks.both(masks.causal, masks.window(3)), 5, CAUSAL_WINDOW),
    (masks.both(masks.window(4), masks.both(masks.window(3), masks.causal)), 5, CAUSAL_WINDOW),
    (prefix_and_padding, 5, PREFIX_AND_PADDING),
    (masks.both(every_second, masks.causal), 3, [[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]),
    (masks.both(masks.both(every_second, masks.causal), lambda n, s_S: s_S > 0), 2, [[0, 1, 0, 1, 0], [0, 0, 1, 0, 1]]),
]


def test_masks_of_five_keys_are_these_matrices():
    @jax.jit
    def compute_all(n, s_S):
        return [the_mask(n[5 - N :], s_S) for the_mask, N, _ in FIVE_KEYS]

    for i, allowed in enumerate(compute_all(np.arange(5), np.arange(5))):
        np.testing.assert_array_equal(allowed, FIVE_KEYS[i][2], err_msg=f"row {i} of FIVE_KEYS")


def test_two_masks_of_documents_are_refused():
    with raises(ValueError, "documents"):
        masks.both(masks.documents(DOCUMENT_BS), masks.documents(DOCUMENT_BS))


def test_padding_is_at_the_end_only_if_all_parts_say_so():
    end, anywhere = masks.padding(VALID_BS, at_end=True), masks.padding(VALID_BS)
    assert masks.both(masks.causal, end).at_end and not masks.both(end, anywhere).at_end
    np.testing.assert_array_equal(masks.both(end, masks.padding(~VALID_BS)).valid_BS, np.zeros((2, 5)))


def test_a_window_of_no_token_is_refused():
    with raises(ValueError, "window", 0):
        masks.window(0)


MASKS = {
    "causal": (masks.causal, [[[1, 1, 1], [1, 0, 0]], [[1, 0, 0], [1, 1, 0]]]),
    "window": (masks.window(2), [[[0, 1, 1], [1, 1, 0]], [[1, 0, 0], [0, 1, 1]]]),
    "prefix": (masks.prefix(3), [[[1, 1, 1], [1, 1, 0]], [[1, 1, 0], [1, 1, 0]]]),
    "prefixes": (masks.prefix(jax.device_put(np.array([1, 3]))), [[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 0]]]),
    "documents": (masks.documents(DOCUMENT_BS), [[[0, 1, 1], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]]]),
    "padding": (masks.padding(VALID_BS), [[[1, 1, 0]] * 2, [[0, 1, 1]] * 2]),
    "both": (masks.both(masks.causal, masks.window(3)), [[[0, 1, 1], [1, 0, 0]], [[1, 0, 0], [1, 1, 0]]]),
}
N_BN, S_S = np.array([[3, 1], [0, 2]]), np.array([0, 2, 3])


def test_queries_may_have_other_positions_in_each_sequence():
    """Sequence 0 has queries at positions 3 and 1, sequence 1 at 0 and 2. Keys are at 0, 2 and 3.

    A single sequence has the same mask as in the batch.
    """

    @jax.jit
    def compute_all(n, s_S):
        return {name: (mask(n, s_S), [mask(n[b], s_S) for b in range(2)]) for name, (mask, _) in MASKS.items()}

    for name, (allowed_BNS, single) in compute_all(N_BN, S_S).items():
        literal = MASKS[name][1]
        np.testing.assert_array_equal(allowed_BNS, literal, err_msg=name)
        assert allowed_BNS.dtype == bool
        for b, allowed in enumerate(jax.device_get(single)):
            np.testing.assert_array_equal(allowed[b] if allowed.ndim == 3 else allowed, literal[b], err_msg=name)
            assert (allowed.ndim == 3) == (name in ("prefixes", "padding", "documents"))
