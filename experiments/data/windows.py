"""Windows of N consecutive tokens of a text, and the tokens, or patches of an image, that a model has to predict."""

from collections.abc import Collection

import numpy as np

from experiments.config import errors
from experiments.engine import batches

# Shares of the masked positions that get the mask token (HIDE) or a random token (REPLACE). The others do not change.
HIDE, REPLACE = 0.8, 0.1
RATE = 0.15  # share of the positions that are masked


def causal(
    token_T: np.ndarray,
    *,
    N: int,
    prefix: int = 0,
    evaluation: bool = False,
    stride: int = 0,
    document_start: int | None = None,
) -> tuple[batches.Fetch, int]:
    """Return `(fetch, n)` for `batches`: `fetch(index_B, rng)` returns a batch with these of the n windows.

    A batch has `w_BN`, the next tokens `target_BN` (int32), and `weight_BN` (float32). A weight is 1, but 0 for targets
    in the padding, and in the prefix, which the model reads as a whole. In training a window may begin at any token:
    n = T - N. In an evaluation windows follow one another, n = ceil((T - 1) / N), and every token except the first is a
    target once. With 0 < stride < N, windows of an evaluation begin `stride` tokens apart. Then only the last `stride`
    targets of a window count, and all targets of the first window. Raises UserError for fewer than N + 1 tokens.

    document_start: the token at which a document begins (Tokenizer.document_start). A batch then also has
    `document_BN`, the number of each token's document in the window, and `n_BN`, its position in the window's part of
    this document (int32).
    """
    step, n = place(token_T, N=N, extra=1, evaluation=evaluation)
    if evaluation and 0 < stride < N:
        step, n = stride, 1 + -(-(len(token_T) - 1 - N) // stride)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * step + np.arange(N)
        repeat_BN = evaluation & (index_B[:, None] > 0) & (np.arange(N) < N - step)  # targets of the previous window
        is_target_BN = (position_BN < len(token_T) - 1) & ~repeat_BN & (np.arange(N) >= prefix - 1)
        batch = {"w_BN": take(token_T, position_BN), "target_BN": take(token_T, position_BN + 1)}
        if document_start is not None:
            is_start_BN, i_N = batch["w_BN"] == document_start, np.arange(N)
            first_BN = np.maximum.accumulate(np.where(is_start_BN, i_N, 0), axis=1)
            batch["document_BN"] = is_start_BN.cumsum(1, dtype=np.int32)
            batch["n_BN"] = (i_N - first_BN).astype(np.int32)
        return batch | {"weight_BN": is_target_BN.astype(np.float32)}

    return fetch, n


def masked(
    token_T: np.ndarray, *, N: int, W: int, special: Collection[int], mask_id: int, evaluation: bool = False
) -> tuple[batches.Fetch, int]:
    """Return `(fetch, n)` for `batches`: n windows with masked tokens, by BERT's rule (Devlin et al. 2019, sec. 3.1).

    Each position is masked with probability RATE, except `special` ids. Of the masked tokens, 80 % become `mask_id`,
    10 % a random id of the W ids that is not special, and 10 % do not change. `w_BN` is the model's input, `target_BN`
    the tokens before masking (int32), `weight_BN` 1 at masked positions, else 0 (float32), `valid_BS` False at padding.
    In training a window may begin at any token: n = T - N + 1. In an evaluation windows follow one another, n =
    ceil(T / N), and the masked positions depend only on the window's index. Raises UserError for fewer than N tokens.
    """
    stride, n = place(token_T, N=N, extra=0, evaluation=evaluation)
    special_W = np.isin(np.arange(W), [*special])
    ordinary = np.flatnonzero(~special_W).astype(np.int32)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        position_BN = index_B[:, None] * stride + np.arange(N)
        valid_BS, target_BN = position_BN < len(token_T), take(token_T, position_BN)
        mask_BN, action_BN, random_BN = draw(index_B, rng, rows=3, N=N)
        mask_BN = (mask_BN < RATE) & valid_BS & ~special_W[target_BN]
        w_BN = np.where(mask_BN & (action_BN < HIDE), np.int32(mask_id), target_BN)
        replace_BN = mask_BN & (action_BN >= HIDE) & (action_BN < HIDE + REPLACE)
        w_BN = np.where(replace_BN, ordinary[(random_BN * len(ordinary)).astype(np.int32)], w_BN)
        return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": mask_BN.astype(np.float32), "valid_BS": valid_BS}

    return fetch, n


def patches(fetch: batches.Fetch, *, N: int, share: float) -> batches.Fetch:
    """Return a `fetch` that masks a random set of round(share * N) of the N patches of each image.

    A batch has the patches `v_BNP`, `hidden_BN` (bool), and `weight_BN`, 1 for masked patches, else 0 (float32). With
    an `rng` (training) the set changes each time. Without one (evaluation) it depends only on the example's index.
    Raises UserError for a share that masks no patch or all of them.
    """
    count = round(share * N)
    problem = f"a share of {share} masks none or all patches of an image (N = {N})"
    errors.refuse((not 0 < count < N, f"{problem}. Choose a smaller image.patch."))

    def fetch_hidden(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        v_BNP = fetch(index_B, rng)["v_BNP"]
        hidden_BN = draw(index_B, rng, rows=1, N=N)[0].argsort(axis=-1).argsort(axis=-1) < count
        return {"v_BNP": v_BNP, "hidden_BN": hidden_BN, "weight_BN": hidden_BN.astype(np.float32)}

    return fetch_hidden


def place(token_T: np.ndarray, *, N: int, extra: int, evaluation: bool) -> tuple[int, int]:
    """Return the stride (in tokens) between windows of N tokens, and the number of windows.

    The stride is N in an evaluation, else 1. extra: tokens after a window that it needs for its targets. Raises
    UserError if the text has fewer than N + extra tokens.
    """
    if len(token_T) < N + extra:
        data = "held-out" if evaluation else "training"
        problem = f"the {data} data has {len(token_T)} tokens; a window needs {N + extra}"
        raise errors.UserError(f"{problem}. Give more text or a smaller text.N.")
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
