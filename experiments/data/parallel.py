"""Sentence pairs as arrays: what an encoder reads, and what a decoder is to predict from what it has written so far."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import pairs, subwords
from experiments.engine import batches, disk, errors

PIECE = 10_000  # sentences encoded at a time: the library takes some kilobytes for each


class Rows(NamedTuple):
    """The pairs whose sides fit into N tokens: ids, [EOS], padding (int32)."""

    source_BS: np.ndarray
    target_BN: np.ndarray
    longer: int  # pairs that do not fit, and have no row


def padded(made: subwords.Subwords, sentences: Sequence[str], *, N: int) -> tuple[np.ndarray, np.ndarray]:
    """Each sentence as a row of its ids, [EOS] and [PAD]: (B, N) int32, and whether it fits, (B,) bool.

    One of more than N - 1 ids does not: its row is all padding, nothing is cut.
    """
    id_BN, fits_B = np.full((len(sentences), N), subwords.PAD, np.int32), np.zeros(len(sentences), bool)
    for first in range(0, len(sentences), PIECE):
        for b, id_T in enumerate(made.encode(sentences[first : first + PIECE]), first):
            fits_B[b] = len(id_T) < N
            if fits_B[b]:
                id_BN[b, : len(id_T)], id_BN[b, len(id_T)] = id_T, subwords.EOS
    return id_BN, fits_B


def rows(made: subwords.Subwords, some: Sequence[pairs.Pair], *, N: int) -> Rows:
    """The pairs as arrays, in their order, without those of which a side needs more than N tokens, its [EOS] included.

    Raises:
      UserError: not one pair fits; more than the memory has room for.
    """
    disk.check_memory(
        f"{len(some):,} pairs of 2 x {N} tokens", 4 * 4 * N * len(some)
    )  # int32, and those that fit once more
    source_BN, source_fits_B = padded(made, [source for source, _ in some], N=N)
    target_BN, target_fits_B = padded(made, [target for _, target in some], N=N)
    fits_B = source_fits_B & target_fits_B
    if not fits_B.any():
        raise errors.UserError(f"not one of {len(some)} pairs has at most N = {N} tokens a side: choose a larger N")
    return Rows(source_BN[fits_B], target_BN[fits_B], int(np.sum(~fits_B)))


def examples(made: Rows) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: `source_BS`, `valid_BS` (False: padding), `w_BN`, `target_BN` and `weight_BN`.

    `w_BN` is the target behind [BOS], one place later: what stands before each word that is to be predicted.
    `weight_BN` (float32) is 1 for every word of the target and its [EOS], and 0 for padding.
    """

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        source_BS, target_BN = made.source_BS[index_B], made.target_BN[index_B]
        begin_B1 = np.full((len(index_B), 1), subwords.BOS, np.int32)
        return {
            "source_BS": source_BS,
            "valid_BS": source_BS != subwords.PAD,
            "w_BN": np.concatenate([begin_B1, target_BN[:, :-1]], axis=1),
            "target_BN": target_BN,
            "weight_BN": (target_BN != subwords.PAD).astype(np.float32),
        }

    return fetch, len(made.source_BS)
