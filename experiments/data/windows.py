"""Windows of N tokens cut from one long row of T tokens, and what of them, or of an image, is asked of a model."""

from collections.abc import Collection

import numpy as np

from experiments.engine import batches, errors

# Shares of the hidden positions that become the mask, or a random token; the others stay (see `masked`).
HIDE, REPLACE = 0.8, 0.1
RATE = 0.15  # of the positions that are hidden


def causal(
    token_T: np.ndarray, *, N: int, prefix: int = 0, evaluation: bool = False, stride: int = 0
) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: `fetch(index_B, rng)` cuts those of a batch out of n windows.

    `w_BN` and the next token at each of its positions, `target_BN` (int32); `weight_BN` 1 (float32), and 0 on padding
    and within a prefix, where a word is seen before it would be predicted. n = T - N: a window may start anywhere. For
    evaluation they follow one another, n = ceil((T - 1) / N), and every token but the very first is a target once; with
    a stride below N they overlap, and all but the first window ask for their last `stride` targets alone. UserError for
    fewer than N + 1 tokens.
    """
    step, n = _places(token_T, N=N, more=1, evaluation=evaluation)
    if evaluation and 0 < stride < N:
        step, n = stride, 1 + -(-(len(token_T) - 1 - N) // stride)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * step + np.arange(N)
        known_BN = evaluation & (index_B[:, None] > 0) & (np.arange(N) < N - step)  # asked by the window before
        asked_BN = (position_BN < len(token_T) - 1) & ~known_BN & (np.arange(N) >= prefix - 1)
        batch = {"w_BN": _at(token_T, position_BN), "target_BN": _at(token_T, position_BN + 1)}
        return batch | {"weight_BN": asked_BN.astype(np.float32)}

    return fetch, n


def masked(
    token_T: np.ndarray, *, N: int, W: int, special: Collection[int], mask_id: int, evaluation: bool = False
) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: n windows with hidden words, by BERT's rule (Devlin et al. 2019, section 3.1).

    Each position is hidden with probability RATE, but for those of `special` ids, which are never asked for; of the
    hidden ones 80 % become `mask_id`, 10 % any of the W ids that is not special, 10 % stay. `w_BN` is what the model
    sees, `target_BN` what stood there (int32), `weight_BN` 1 at hidden positions, else 0 (float32), `valid_BS` False at
    padding. n = T - N + 1: a window may start anywhere. For evaluation they follow one another, n = ceil(T / N), and
    what is hidden depends on the window's number only. UserError for fewer than N tokens.
    """
    stride, n = _places(token_T, N=N, more=0, evaluation=evaluation)
    special_W = np.isin(np.arange(W), [*special])
    ordinary = np.flatnonzero(~special_W).astype(np.int32)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * stride + np.arange(N)
        valid_BS, target_BN = position_BN < len(token_T), _at(token_T, position_BN)
        hidden_BN, kind_BN, other_BN = _uniforms(index_B, rng, rows=3, N=N)
        hidden_BN = (hidden_BN < RATE) & valid_BS & ~special_W[target_BN]
        w_BN = np.where(hidden_BN & (kind_BN < HIDE), np.int32(mask_id), target_BN)
        replaced_BN = hidden_BN & (kind_BN >= HIDE) & (kind_BN < HIDE + REPLACE)
        w_BN = np.where(replaced_BN, ordinary[(other_BN * len(ordinary)).astype(np.int32)], w_BN)
        return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": hidden_BN.astype(np.float32), "valid_BS": valid_BS}

    return fetch, n


def patches(fetch: batches.Fetch, *, N: int, share: float) -> batches.Fetch:
    """The images of `fetch`, each with a random set of round(share * N) of its N patches hidden.

    Gives `image_BYXZ` as it is, `hidden_BN` (bool), and `weight_BN`, 1 where a patch is hidden and 0 elsewhere
    (float32). With an `rng` (training) the set is new each time; without one (evaluation) it depends on the example's
    number only, so that every run is asked the same. UserError for a share that hides no patch or all of them.
    """
    count = round(share * N) if 0 <= share <= 1 else 0
    if not 0 < count < N:
        wrong = f"image.mask_ratio = {share} does not suit"
        raise errors.UserError(f"of {N} patches at least one must be hidden and one be seen: {wrong}")

    def fetch_hidden(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        image_BYXZ = fetch(index_B, rng)["image_BYXZ"]
        hidden_BN = _uniforms(index_B, rng, rows=1, N=N)[0].argsort(axis=-1).argsort(axis=-1) < count
        return {"image_BYXZ": image_BYXZ, "hidden_BN": hidden_BN, "weight_BN": hidden_BN.astype(np.float32)}

    return fetch_hidden


def _places(token_T: np.ndarray, *, N: int, more: int, evaluation: bool) -> tuple[int, int]:
    """From one window to the next, and how many there are. UserError where not one has N tokens and `more` after it."""
    if len(token_T) < N + more:
        part = f"the {'evaluation' if evaluation else 'training'} part has {len(token_T)} tokens"
        raise errors.UserError(f"{part}, and one window needs {N + more}: give more text or a smaller N")
    T = len(token_T) - more
    return (N, -(-T // N)) if evaluation else (1, T - N + 1)


def _at(token_T: np.ndarray, position_BN: np.ndarray) -> np.ndarray:
    """The tokens at these places, beyond the end the last, as int32: the long row may have smaller integers."""
    return token_T[np.minimum(position_BN, len(token_T) - 1)].astype(np.int32, copy=False)


def _uniforms(index_B: np.ndarray, rng: np.random.Generator | None, *, rows: int, N: int) -> np.ndarray:
    """Numbers in [0, 1), rows x B x N of them: without `rng`, a function of the number of the example alone."""
    if rng is not None:
        return rng.random((rows, len(index_B), N))
    own = [np.random.Generator(np.random.Philox(key=[0, index])) for index in index_B.tolist()]
    return np.stack([each.random((rows, N)) for each in own], axis=1)
