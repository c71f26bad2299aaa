"""The batches of the training data and of the held-out data, and a third split of the training data for tuning."""

from typing import Any

import numpy as np

from experiments.engine import batches, config, errors

BLOCK, SHARE = 32, 10  # the tuning split is every SHARE-th block of BLOCK examples that do not overlap
TOKENS = 2**14  # in one batch of an evaluation; more only need memory
Examples = tuple[batches.Fetch, int]  # a function that fetches examples by index, and how many there are


def make_splits(
    settings: config.Settings, train: Examples, evaluation: Examples, *, tokens: int, stride: int = 1
) -> dict[str, Any]:
    """Return the fields `train`, `evaluation`, `tokens_per_example` and `tuning` of a Task.

    tokens: number of tokens in an example. stride: training examples this many indices apart do not overlap (windows
    of text: N).
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


def evaluation_batch_size(t: config.Settings, tokens: int, n: int) -> int:
    """Return the size of an evaluation batch: about TOKENS tokens, `tokens` for each example, or all n examples.

    It is rounded to whole microbatches of the section `t` (train), which devices share evenly and which fit into
    memory.
    """
    microbatch = max(1, t.batch_size // max(1, t.accumulation))
    return microbatch * max(1, min(TOKENS // (microbatch * tokens), -(-n // microbatch)))


def split_for_tuning(train: Examples, *, most: int, stride: int = 1) -> tuple[Examples, Examples]:
    """Split the training examples into a training and a tuning part, which do not overlap.

    The tuning part is every tenth block, of which at most `most` examples are evaluated. Raises UserError if there are
    too few examples.
    """
    fetch, n = train
    period = min(SHARE * BLOCK * stride, n)  # indices: training part, gap, block, gap
    block, gap = period // SHARE, stride - 1
    trained, per_block = period - block - 2 * gap, -(-block // stride)
    periods = n // period if period else 0
    if min(trained, block) < 1:
        raise errors.UserError(f"{n} training examples are too few to split off a part for study.tune")
    evaluated = min(per_block * periods, most)

    def fetch_train(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        return fetch(index_B // trained * period + index_B % trained, rng)

    def fetch_tuning(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        index_B = index_B * (per_block * periods) // evaluated
        return fetch(index_B // per_block * period + trained + gap + index_B % per_block * stride, rng)

    return (fetch_train, trained * periods), (fetch_tuning, evaluated)
