"""Windows of N tokens cut from one long row of T tokens, for next-word and masked-word learning.

Each function gives `(fetch, n)` for `batches.train` or `batches.evaluation`: `n` windows, and `fetch(index_B, rng)`,
which cuts those of a batch. In training a window may start anywhere; in evaluation they follow one another.
"""

import numpy as np

from experiments.engine import batches, errors

# Shares of the hidden positions that become the mask, or a random token; the others stay (see `masked`).
HIDE, REPLACE = 0.8, 0.1


def causal(token_T: np.ndarray, *, N: int) -> tuple[batches.Fetch, int]:
    """T - N windows: `w_BN` and the next token at each of its positions, `target_BN` (int32); `weight_BN` 1 (float32).

    Raises:
      UserError: fewer than N + 1 tokens.
    """
    _check("training", token_T, N + 1)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] + np.arange(N)
        weight_BN = np.ones((len(index_B), N), np.float32)
        w_BN, target_BN = _at(token_T, position_BN), _at(token_T, position_BN + 1)
        return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": weight_BN}

    return fetch, len(token_T) - N


def causal_evaluation(token_T: np.ndarray, *, N: int) -> tuple[batches.Fetch, int]:
    """ceil((T - 1) / N) windows with every token but the very first as a target once; `weight_BN` is 0 on the padding.

    Raises:
      UserError: fewer than N + 1 tokens.
    """
    _check("evaluation", token_T, N + 1)
    last = len(token_T) - 1

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * N + np.arange(N)
        return {
            "w_BN": _at(token_T, np.minimum(position_BN, last)),
            "target_BN": _at(token_T, np.minimum(position_BN + 1, last)),
            "weight_BN": (position_BN < last).astype(np.float32),
        }

    return fetch, -(-last // N)


def masked(
    token_T: np.ndarray, *, N: int, W: int, ordinary: int, mask_id: int, rate: float = 0.15, seed: int = 0
) -> tuple[batches.Fetch, int]:
    """T - N + 1 windows with hidden words, by BERT's rule (Devlin et al. 2019, section 3.1).

    Each position is hidden with probability `rate`; of the hidden ones 80 % become `mask_id`, 10 % any of the first
    `ordinary` ids, 10 % stay. `w_BN` is what the model sees, `target_BN` what stood there (int32), `weight_BN` 1 at
    hidden positions and 0 elsewhere (float32), `valid_BS` True (bool). `seed` serves where `fetch` gets
    no `rng`.

    Raises:
      UserError: fewer than N tokens; a rate outside (0, 1]; ids beyond the vocabulary of W.
    """
    _check("training", token_T, N)
    fetch = _masked(token_T, stride=1, N=N, W=W, ordinary=ordinary, mask_id=mask_id, rate=rate, seed=seed)
    return fetch, len(token_T) - N + 1


def masked_evaluation(
    token_T: np.ndarray, *, N: int, W: int, ordinary: int, mask_id: int, rate: float = 0.15, seed: int = 0
) -> tuple[batches.Fetch, int]:
    """ceil(T / N) windows, as `masked`, in which every token lies once; padding has `valid_BS` False, `weight_BN` 0.

    What is hidden depends on `seed` and the window's number only. Leave `seed` alone, and every run is asked the same.

    Raises:
      UserError: fewer than N tokens; a rate outside (0, 1]; ids beyond the vocabulary of W.
    """
    _check("evaluation", token_T, N)
    fetch = _masked(token_T, stride=N, N=N, W=W, ordinary=ordinary, mask_id=mask_id, rate=rate, seed=seed)
    return fetch, -(-len(token_T) // N)


def _masked(
    token_T: np.ndarray, *, stride: int, N: int, W: int, ordinary: int, mask_id: int, rate: float, seed: int
) -> batches.Fetch:
    if not 0 < rate <= 1:
        raise errors.UserError(f"the rate of hidden words must be above 0 and at most 1, and {rate} is not")
    if not (0 < ordinary <= W and 0 <= mask_id < W):
        raise errors.UserError(f"a vocabulary of {W} ids cannot hold {ordinary} ordinary ones and the mask {mask_id}")

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * stride + np.arange(N)
        valid_BS = position_BN < len(token_T)
        target_BN = _at(token_T, np.minimum(position_BN, len(token_T) - 1))
        hidden_BN, kind_BN, other_BN = _uniforms(index_B, rng, N=N, seed=seed)
        hidden_BN = (hidden_BN < rate) & valid_BS
        w_BN = np.where(hidden_BN & (kind_BN < HIDE), np.int32(mask_id), target_BN)
        replaced_BN = hidden_BN & (kind_BN >= HIDE) & (kind_BN < HIDE + REPLACE)
        w_BN = np.where(replaced_BN, (other_BN * ordinary).astype(np.int32), w_BN)
        weight_BN = hidden_BN.astype(np.float32)
        return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": weight_BN, "valid_BS": valid_BS}

    return fetch


def _uniforms(index_B: np.ndarray, rng: np.random.Generator | None, *, N: int, seed: int) -> np.ndarray:
    """Three uniform numbers in [0, 1) for each of BN positions: without `rng`, a function of (seed, window) alone."""
    if rng is not None:
        return rng.random((3, len(index_B), N))
    windows = [np.random.Generator(np.random.Philox(key=[seed, index])) for index in index_B.tolist()]
    return np.stack([window.random((3, N)) for window in windows], axis=1)


def _at(token_T: np.ndarray, position_BN: np.ndarray) -> np.ndarray:
    """The tokens at these places, as int32: the long row may have smaller integers."""
    return token_T[position_BN].astype(np.int32, copy=False)


def _check(part: str, token_T: np.ndarray, needed: int) -> None:
    if len(token_T) < needed:
        raise errors.UserError(
            f"the {part} part has {len(token_T)} tokens, and one window needs {needed}: give more text or a smaller N"
        )
