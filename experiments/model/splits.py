"""Splits: batches of the training and the held-out data, and a third split for tuning, cut from the training data."""

from typing import Any

import numpy as np

from experiments.config import errors, settings as configs
from experiments.engine import batches

BLOCK, SHARE = 32, 10  # one block in SHARE is for tuning; a block has BLOCK examples that do not overlap
TOKENS = 2**14  # tokens in an evaluation batch; a larger batch would only need more memory
Examples = tuple[batches.Fetch, int]  # a function that fetches examples by index, and the number of examples


def make_splits(
    settings: configs.Settings, train: Examples, evaluation: Examples, *, tokens: int, stride: int = 1
) -> dict[str, Any]:
    """Return the fields `train`, `evaluation`, `tokens_per_example` and `tuning` of a Task.

    train, evaluation: the examples of both parts of the data. tokens: number of tokens in an example. stride: training
    examples do not overlap if their indices differ by this much (windows of N tokens: N). The field tuning is a
    function without arguments. It returns the other fields for two parts of the training examples.
    """

    def make_batches(train: Examples, evaluation: Examples) -> dict[str, Any]:
        t, (fetch, n), (fetch_evaluation, n_evaluation) = settings.train, train, evaluation
        batch = evaluation_batch_size(t, tokens, n_evaluation)
        return {
            "train": batches.train(fetch, n=n, batch=t.batch_size, seed=settings.seed, growth=t.growth),
            "evaluation": batches.evaluation(fetch_evaluation, n=n_evaluation, batch=batch),
            "tokens_per_example": tokens,
        }

    def make_tuning_batches() -> dict[str, Any]:
        return make_batches(*split_for_tuning(train, most=evaluation[1], stride=stride))

    return make_batches(train, evaluation) | {"tuning": make_tuning_batches}


def evaluation_batch_size(t: configs.Settings, tokens: int, n: int) -> int:
    """Return the number of examples in an evaluation batch: about TOKENS tokens, but no more than n needs.

    t: the section `train`. tokens: number of tokens in an example. n: number of examples. The batch is a multiple of a
    training microbatch, which fits into memory and which the devices share evenly.
    """
    microbatch = max(1, t.batch_size // max(1, t.accumulation))
    return microbatch * max(1, min(TOKENS // (microbatch * tokens), -(-n // microbatch)))


def split_for_tuning(train: Examples, *, most: int, stride: int = 1) -> tuple[Examples, Examples]:
    """Split the training examples into (training, tuning), two parts that do not overlap.

    One block in ten is for tuning: up to BLOCK examples, whose indices differ by `stride`. The tuning part has at most
    `most` of all these, evenly spaced. stride: examples whose indices differ by this much do not overlap. Raises
    UserError if there are too few examples.
    """
    fetch, n = train
    period = min(SHARE * BLOCK * stride, n)  # indices: training part, gap, block, gap
    block, gap = period // SHARE, stride - 1
    trained_per_period, per_block = period - block - 2 * gap, -(-block // stride)
    periods = n // period if period else 0
    if min(trained_per_period, block) < 1:
        raise errors.UserError(f"{n} training examples are too few for study.tune to use a part of them. Add examples")
    n_tuning = min(per_block * periods, most)

    def fetch_train(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        return fetch(index_B // trained_per_period * period + index_B % trained_per_period, rng)

    def fetch_tuning(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        index_B = index_B * (per_block * periods) // n_tuning
        place_B = trained_per_period + gap + index_B % per_block * stride  # in its period
        return fetch(index_B // per_block * period + place_B, rng)

    return (fetch_train, trained_per_period * periods), (fetch_tuning, n_tuning)
