"""A batch is a function of (seed, step): nothing to save, and a run resumes at any step by asking for that batch.

`fetch(index_B, rng) -> {name: array}` turns example numbers into arrays; every array's first axis is B. The numbers are
plain integers, so shuffling moves no data, and all array work is vectorised over the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from experiments.engine import disk, errors

# Beside JAX below 0.11, as in Colab's image, Grain 0.2.18 says as it is imported that processes which we never start
# could not be profiled.
logging.get_absl_logger().addFilter(lambda record: "worker profiling" not in str(record.msg))
import grain  # noqa: E402

GROWTH = "train.growth"
EXAMPLE = "write [[500, 128], [800, 256]] for batches of 128 from 500 steps on and of 256 from 800 on"
BUFFER = 8  # batches prepared ahead
Batch = dict[str, np.ndarray]
Fetch = Callable[[np.ndarray, np.random.Generator | None], Batch]


def train(fetch: Fetch, *, n: int, batch: int, seed: int, growth: Sequence = ()) -> grain.MapDataset:
    """Endless batches of `n` examples: `dataset[step]` is the batch of that step, with its examples' `example_B`.

    Every example comes once in each epoch (`n` consecutive examples), in an order of the epoch's own, also where the
    batch size changes (`growth`: pairs [step, size], as train.growth has them). The `rng` that `fetch` receives depends
    on (seed, step) only. UserError for a batch of no example, and for fewer examples than one batch.
    """
    sizes = growing(batch, growth)
    if 0 < n < max(sizes.sizes):
        key = "train.batch_size" if n < batch else GROWTH
        raise errors.UserError(
            f"the training part has {n} examples, fewer than one batch of {max(sizes.sizes)}: make {key} smaller"
        )
    _check(fetch, np.random.default_rng(0), n=n, batch=batch, ready=max(sizes.sizes) * (BUFFER + 2))
    stream = grain.MapDataset.range(n).seed(seed).shuffle().repeat()
    number = np.int32 if n <= 2**31 else np.int64

    def numbers(step: int, _: int) -> np.ndarray:
        return np.array([stream[i] for i in range(sizes.before(step), sizes.before(step + 1))], np.int64)

    def numbered(index_B: np.ndarray, rng: np.random.Generator) -> Batch:
        return fetch(index_B, rng) | {"example_B": index_B.astype(number)}

    return stream.map_with_index(numbers).random_map(numbered)


def evaluation(fetch: Fetch, *, n: int, batch: int) -> grain.MapDataset:
    """The ceil(n / batch) batches that hold every example exactly once, in order. UserError where there is none.

    All batches have `batch` rows, so one compiled function serves them: the last is filled up with its last example,
    and there every array named `weight_...` is 0. `fetch` is called with `rng=None`: it must not depend on a run.
    """
    _check(fetch, None, n=n, batch=batch, ready=batch * 2)

    def fetch_padded(step: int) -> Batch:
        index_B = step * batch + np.arange(batch)
        arrays, real_B = fetch(np.minimum(index_B, n - 1), None), index_B < n
        for name, array in arrays.items():
            if name.startswith("weight_"):  # in a copy: what `fetch` returned may be its own
                real = real_B.reshape(-1, *[1] * (array.ndim - 1))
                arrays = arrays | {name: np.where(real, array, np.zeros((), array.dtype))}
        return arrays

    return grain.MapDataset.range(-(-n // batch)).map(fetch_padded)


def iterate(dataset: grain.MapDataset, *, start: int) -> Iterator[Batch]:
    """The batches from position `start` on, up to BUFFER of them prepared ahead by a thread in the background."""
    return iter(dataset[start:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=BUFFER)))


def _check(fetch: Fetch, rng: np.random.Generator | None, *, n: int, batch: int, ready: int) -> None:
    """UserError for no example, or where so many ready ones, each as large as the first, would not fit into memory."""
    if batch < 1:
        raise errors.UserError(f"a batch needs at least 1 example, and {batch} was asked for")
    if n < 1:
        raise errors.UserError("there is not a single example to make a batch of")
    one = sum(array.nbytes for array in fetch(np.zeros(1, np.int64), rng).values())
    disk.check_memory(f"what is kept ready of batches, {ready} examples of {one} bytes,", ready * one)


class Growth(NamedTuple):
    """Phases of training: after `firsts[i]` steps, batches have `sizes[i]` examples."""

    firsts: tuple[int, ...]
    sizes: tuple[int, ...]

    def before(self, step: int) -> int:
        """Examples in all batches before the one of this step, which thus begins there in the stream of examples."""
        phases = zip(self.firsts, (*self.firsts[1:], step), self.sizes, strict=True)
        return sum(size * max(0, min(step, end) - first) for first, end, size in phases)

    def reached(self, steps: int) -> "Growth":
        """The phases that begin within so many steps: the others are for a longer run of the same config."""
        n = sum(first < steps for first in self.firsts)
        return Growth(self.firsts[:n], self.sizes[:n])


def growing(batch: int, pairs: Any = ()) -> Growth:
    """Batches of `batch` examples, and of `size` from `step` steps on, for each pair [step, size] of train.growth.

    Raises UserError unless the pairs are whole numbers, sizes at least 1, and steps ascend from 1 on.
    """
    firsts, sizes = [0], [batch]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or any(type(number) is not int for number in pair):
            raise errors.UserError(f"{GROWTH} holds {pair!r}, which is no pair of whole numbers: {EXAMPLE}")
        step, size = pair
        if step <= firsts[-1]:
            raise errors.UserError(f"the steps of {GROWTH} must ascend from 1 on, and {step} comes after {firsts[-1]}")
        if size < 1:
            raise errors.UserError(f"{GROWTH} asks for batches of {size} examples, and a batch needs at least 1")
        firsts.append(step)
        sizes.append(size)
    return Growth(tuple(firsts), tuple(sizes))
