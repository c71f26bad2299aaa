"""Windows of N tokens cut from one long row of T tokens, for next-word learning (masked-word learning: masking.py)."""

import numpy as np

from experiments.engine import batches, errors


def causal(token_T: np.ndarray, *, N: int, evaluation: bool = False) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: `fetch(index_B, rng)` cuts those of a batch out of n windows.

    `w_BN` and the next token at each of its positions, `target_BN` (int32); `weight_BN` 1, and 0 on padding (float32).
    n = T - N: a window may start anywhere. For evaluation they follow one another, n = ceil((T - 1) / N), and every
    token but the very first is a target once. UserError for fewer than N + 1 tokens.
    """
    stride, n = places(token_T, N=N, more=1, evaluation=evaluation)
    last = len(token_T) - 1

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * stride + np.arange(N)
        return {
            "w_BN": at(token_T, np.minimum(position_BN, last)),
            "target_BN": at(token_T, np.minimum(position_BN + 1, last)),
            "weight_BN": (position_BN < last).astype(np.float32),
        }

    return fetch, n


def places(token_T: np.ndarray, *, N: int, more: int, evaluation: bool) -> tuple[int, int]:
    """From one window to the next, and how many there are. UserError where not one has N tokens and `more` after it."""
    if len(token_T) < N + more:
        part = "evaluation" if evaluation else "training"
        raise errors.UserError(
            f"the {part} part has {len(token_T)} tokens, and one window needs {N + more}: give more text or a smaller N"
        )
    T = len(token_T) - more
    return (N, -(-T // N)) if evaluation else (1, T - N + 1)


def at(token_T: np.ndarray, position_BN: np.ndarray) -> np.ndarray:
    """The tokens at these places, as int32: the long row may have smaller integers."""
    return token_T[position_BN].astype(np.int32, copy=False)
