"""Windows of N tokens cut from one long row of T tokens, for next-word learning (masked-word learning: masking.py).

Each function gives `(fetch, n)` for `batches.train` or `batches.evaluation`: `n` windows, and `fetch(index_B, rng)`,
which cuts those of a batch. In training a window may start anywhere; in evaluation they follow one another.
"""

import numpy as np

from experiments.engine import batches, errors


def causal(token_T: np.ndarray, *, N: int) -> tuple[batches.Fetch, int]:
    """T - N windows: `w_BN` and the next token at each of its positions, `target_BN` (int32); `weight_BN` 1 (float32).

    Raises:
      UserError: fewer than N + 1 tokens.
    """
    check("training", token_T, N + 1)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] + np.arange(N)
        weight_BN = np.ones((len(index_B), N), np.float32)
        w_BN, target_BN = at(token_T, position_BN), at(token_T, position_BN + 1)
        return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": weight_BN}

    return fetch, len(token_T) - N


def causal_evaluation(token_T: np.ndarray, *, N: int) -> tuple[batches.Fetch, int]:
    """ceil((T - 1) / N) windows with every token but the very first as a target once; `weight_BN` is 0 on the padding.

    Raises:
      UserError: fewer than N + 1 tokens.
    """
    check("evaluation", token_T, N + 1)
    last = len(token_T) - 1

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * N + np.arange(N)
        return {
            "w_BN": at(token_T, np.minimum(position_BN, last)),
            "target_BN": at(token_T, np.minimum(position_BN + 1, last)),
            "weight_BN": (position_BN < last).astype(np.float32),
        }

    return fetch, -(-last // N)


def at(token_T: np.ndarray, position_BN: np.ndarray) -> np.ndarray:
    """The tokens at these places, as int32: the long row may have smaller integers."""
    return token_T[position_BN].astype(np.int32, copy=False)


def check(part: str, token_T: np.ndarray, needed: int) -> None:
    """UserError where the part has too few tokens for one window."""
    if len(token_T) < needed:
        raise errors.UserError(
            f"the {part} part has {len(token_T)} tokens, and one window needs {needed}: give more text or a smaller N"
        )
