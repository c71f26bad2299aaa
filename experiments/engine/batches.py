"""Batches: each is a function of (seed, step), so nothing is saved, and a run resumes at any step.

`fetch(index_B, rng) -> {name: array}` turns example numbers into arrays; every array's first axis is B. Shuffling
permutes integers and moves no data.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from experiments.engine import disk, errors

# With JAX below 0.11, as in Colab's image, Grain 0.2.18 warns on import about profiling processes that we never start.
logging.get_absl_logger().addFilter(lambda record: "worker profiling" not in str(record.msg))
import grain  # noqa: E402

GROWTH = "train.growth"
EXAMPLE = "write [[500, 128], [800, 256]] for batches of 128 from 500 steps on and of 256 from 800 on"
BUFFER = 8  # batches prepared ahead
Batch = dict[str, np.ndarray]
Fetch = Callable[[np.ndarray, np.random.Generator | None], Batch]


def train(fetch: Fetch, *, n: int, batch: int, seed: int, growth: Sequence = ()) -> grain.MapDataset:
    """Return endless batches of `n` examples: `dataset[step]` is the batch of that step, with the array `example_B`.

    Every example comes once in each epoch (`n` consecutive examples), in an order of the epoch's own, also if the batch
    size changes (`growth`: pairs [step, size], as in train.growth). The `rng` that `fetch` receives depends on (seed,
    step) only. UserError if a batch is empty or larger than the training part.
    """
    sizes = growing(batch, growth)
    if 0 < n < max(sizes.sizes):
        key = "train.batch_size" if n < batch else GROWTH
        raise errors.UserError(f"{key} = {max(sizes.sizes)} exceeds the training part, which has {n} examples")
    _check(fetch, np.random.default_rng(0), n=n, batch=batch, ready=max(sizes.sizes) * (BUFFER + 2))
    stream = grain.MapDataset.range(n).seed(seed).shuffle().repeat()
    number = np.int32 if n <= 2**31 else np.int64

    def numbers(step: int, _: int) -> np.ndarray:
        return np.array([stream[i] for i in range(sizes.before(step), sizes.before(step + 1))], np.int64)

    def numbered(index_B: np.ndarray, rng: np.random.Generator) -> Batch:
        return fetch(index_B, rng) | {"example_B": index_B.astype(number)}

    return stream.map_with_index(numbers).random_map(numbered)


def evaluation(fetch: Fetch, *, n: int, batch: int) -> grain.MapDataset:
    """Return the ceil(n / batch) batches that hold every example exactly once, in order.

    All batches have `batch` rows, so one compiled function serves them: the last is filled up with its last example,
    and there every array named `weight_...` is 0. `fetch` is called with `rng=None`: it must not depend on a run.
    """
    _check(fetch, None, n=n, batch=batch, ready=batch * 2)

    def fetch_padded(step: int) -> Batch:
        index_B = step * batch + np.arange(batch)
        arrays, real_B = fetch(np.minimum(index_B, n - 1), None), index_B < n
        for name, array in arrays.items():
            if name.startswith("weight_"):  # a copy: `fetch` may return its own array
                real = real_B.reshape(-1, *[1] * (array.ndim - 1))
                arrays = arrays | {name: np.where(real, array, np.zeros((), array.dtype))}
        return arrays

    return grain.MapDataset.range(-(-n // batch)).map(fetch_padded)


def iterate(dataset: grain.MapDataset, *, start: int) -> Iterator[Batch]:
    """Return the batches from position `start` on; a background thread prepares up to BUFFER of them ahead."""
    return iter(dataset[start:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=BUFFER)))


def _check(fetch: Fetch, rng: np.random.Generator | None, *, n: int, batch: int, ready: int) -> None:
    """Raise UserError if there is no example, or no memory for so many ready ones, each as large as the first."""
    for what, number in (("the batch size", batch), ("the number of examples", n)):
        if number < 1:
            raise errors.UserError(f"{what} is {number}, and must be at least 1")
    size = sum(array.nbytes for array in fetch(np.zeros(1, np.int64), rng).values())
    disk.check_memory(f"the buffer of batches, {ready} examples of {size} bytes,", ready * size)


class Growth(NamedTuple):
    """Phases of training: after `firsts[i]` steps, batches have `sizes[i]` examples."""

    firsts: tuple[int, ...]
    sizes: tuple[int, ...]

    def before(self, step: int) -> int:
        """Return how many examples all batches before the one of this step have, where it begins in the stream."""
        phases = zip(self.firsts, (*self.firsts[1:], step), self.sizes, strict=True)
        return sum(size * max(0, min(step, end) - first) for first, end, size in phases)


def growing(batch: int, pairs: Any = ()) -> Growth:
    """Return the phases with `batch` examples first, and then those of each pair [step, size] of train.growth.

    Raises UserError unless the pairs are whole numbers, sizes at least 1, and steps ascend from 1 on.
    """
    firsts, sizes = [0], [batch]
    for pair in pairs:
        whole = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not whole or pair[0] <= firsts[-1] or pair[1] < 1:
            raise errors.UserError(
                f"{GROWTH}: {pair!r} must be [step, size], both positive and steps ascending: {EXAMPLE}"
            )
        firsts.append(pair[0])
        sizes.append(pair[1])
    return Growth(tuple(firsts), tuple(sizes))
