"""Windows: N consecutive tokens of a text, and which of them, or of an image's patches, a model is to predict."""

from collections.abc import Collection

import numpy as np

from experiments.engine import batches, errors

# Shares of the masked positions that become the mask, or a random token; the others do not change (`masked`).
HIDE, REPLACE = 0.8, 0.1
RATE = 0.15  # share of the positions that are masked


def causal(
    token_T: np.ndarray, *, N: int, prefix: int = 0, evaluation: bool = False, stride: int = 0
) -> tuple[batches.Fetch, int]:
    """Return `(fetch, n)` for `batches`: `fetch(index_B, rng)` cuts the windows of a batch out of n windows.

    `w_BN` and the next token at each of its positions, `target_BN` (int32). `weight_BN` is 1 (float32), and 0 on
    padding and within a prefix, which the model reads before it would predict it. n = T - N: a window may begin
    anywhere. In an evaluation they follow one another, n = ceil((T - 1) / N), and every token except the first is a
    target once. With a stride < N they overlap, and all but the first have only their last `stride` targets. Raises
    UserError for fewer than N + 1 tokens.
    """
    step, n = place(token_T, N=N, extra=1, evaluation=evaluation)
    if evaluation and 0 < stride < N:
        step, n = stride, 1 + -(-(len(token_T) - 1 - N) // stride)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * step + np.arange(N)
        known_BN = evaluation & (index_B[:, None] > 0) & (np.arange(N) < N - step)  # targets of the previous window
        predicted_BN = (position_BN < len(token_T) - 1) & ~known_BN & (np.arange(N) >= prefix - 1)
        batch = {"w_BN": take(token_T, position_BN), "target_BN": take(token_T, position_BN + 1)}
        return batch | {"weight_BN": predicted_BN.astype(np.float32)}

    return fetch, n


def masked(
    token_T: np.ndarray, *, N: int, W: int, special: Collection[int], mask_id: int, evaluation: bool = False
) -> tuple[batches.Fetch, int]:
    """Return `(fetch, n)` for `batches`: n windows with masked tokens, by BERT's rule (Devlin et al. 2019, sec. 3.1).

    Each position is masked with probability RATE, except `special` ids. Of the masked ones, 80 % become `mask_id`, 10 %
    any of the W ids that is not special, 10 % do not change. `w_BN` is the model's input, `target_BN` the tokens before
    masking (int32), `weight_BN` 1 at masked positions, else 0 (float32), `valid_BS` False at padding. n = T - N + 1: a
    window may begin anywhere. In an evaluation they follow one another, n = ceil(T / N), and the masked positions
    depend only on the window's index. Raises UserError for fewer than N tokens.
    """
    stride, n = place(token_T, N=N, extra=0, evaluation=evaluation)
    special_W = np.isin(np.arange(W), [*special])
    ordinary = np.flatnonzero(~special_W).astype(np.int32)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * stride + np.arange(N)
        valid_BS, target_BN = position_BN < len(token_T), take(token_T, position_BN)
        hidden_BN, kind_BN, other_BN = draw(index_B, rng, rows=3, N=N)
        hidden_BN = (hidden_BN < RATE) & valid_BS & ~special_W[target_BN]
        w_BN = np.where(hidden_BN & (kind_BN < HIDE), np.int32(mask_id), target_BN)
        replaced_BN = hidden_BN & (kind_BN >= HIDE) & (kind_BN < HIDE + REPLACE)
        w_BN = np.where(replaced_BN, ordinary[(other_BN * len(ordinary)).astype(np.int32)], w_BN)
        return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": hidden_BN.astype(np.float32), "valid_BS": valid_BS}

    return fetch, n


def patches(fetch: batches.Fetch, *, N: int, share: float) -> batches.Fetch:
    """Return a `fetch` that masks a random set of round(share * N) of the N patches of each image.

    It returns `image_BYXZ` unchanged, `hidden_BN` (bool), and `weight_BN`, 1 for masked patches, else 0 (float32). With
    an `rng` (training) the set changes each time; without one (evaluation) it depends only on the example's index.
    Raises UserError for a share that masks no patch or all of them.
    """
    count = round(share * N) if 0 <= share <= 1 else 0
    if not 0 < count < N:
        raise errors.UserError(f"image.mask_ratio = {share} masks none or all of {N} patches: choose from (0, 1)")

    def fetch_hidden(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        image_BYXZ = fetch(index_B, rng)["image_BYXZ"]
        hidden_BN = draw(index_B, rng, rows=1, N=N)[0].argsort(axis=-1).argsort(axis=-1) < count
        return {"image_BYXZ": image_BYXZ, "hidden_BN": hidden_BN, "weight_BN": hidden_BN.astype(np.float32)}

    return fetch_hidden


def place(token_T: np.ndarray, *, N: int, extra: int, evaluation: bool) -> tuple[int, int]:
    """Return the stride between windows of N tokens (each needs `extra` more), and the number of windows.

    The stride is N in an evaluation, else 1. Raises UserError if the text is shorter than one window.
    """
    if len(token_T) < N + extra:
        data = "held-out" if evaluation else "training"
        problem = f"the {data} data has {len(token_T)} tokens; a window needs {N + extra}"
        raise errors.UserError(f"{problem}: give more text or a smaller text.N")
    T = len(token_T) - extra
    return (N, -(-T // N)) if evaluation else (1, T - N + 1)


def take(token_T: np.ndarray, position_BN: np.ndarray) -> np.ndarray:
    """Return the tokens at these positions as int32, and the last token for positions after the end."""
    return token_T[np.minimum(position_BN, len(token_T) - 1)].astype(np.int32, copy=False)


def draw(index_B: np.ndarray, rng: np.random.Generator | None, *, rows: int, N: int) -> np.ndarray:
    """Return rows x B x N random numbers in [0, 1). Without `rng` they depend only on each example's index."""
    if rng is not None:
        return rng.random((rows, len(index_B), N))
    generators = [np.random.Generator(np.random.Philox(key=[0, index])) for index in index_B.tolist()]
    return np.stack([generator.random((rows, N)) for generator in generators], axis=1)
