"""Batches: each is a function of (seed, step), so a run resumes at any step without saved data.

`fetch(index_B, rng) -> {name: array}` returns the examples with these indices; every array's first axis is B. Shuffling
permutes indices and moves no data.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from experiments.config import disk, errors

# With JAX below 0.11, as in Colab's image, Grain 0.2.18 warns on import about profiling processes that we never start.
logging.get_absl_logger().addFilter(lambda record: "worker profiling" not in str(record.msg))
import grain  # noqa: E402

GROWTH = "train.growth"
EXAMPLE = "write [[500, 128], [800, 256]] for batches of 128 from 500 steps on and of 256 from 800 on"
BUFFER = 8  # batches prepared in advance
Batch = dict[str, np.ndarray]
Fetch = Callable[[np.ndarray, np.random.Generator | None], Batch]


def train(fetch: Fetch, *, n: int, batch: int, seed: int, growth: Sequence = ()) -> grain.MapDataset:
    """Return the endless dataset of training batches, drawn from n examples: `dataset[step]` is the batch of that step.

    Each epoch (n consecutive examples) has every example once, in another order, also if the batch size changes. A
    batch has the additional array `example_B`, the indices of its examples. growth: pairs [step, size], as in
    train.growth. The `rng` of `fetch` depends only on (seed, step). Raises UserError if a batch is empty or larger
    than the training data, if `growth` is invalid, or if memory is too small for the buffer of batches.
    """
    sizes = parse_growth(batch, growth)
    largest, key = max(sizes.sizes), "train.batch_size" if n < batch else GROWTH
    too_many = f"{key} = {largest} exceeds the {n} examples of the training data. Choose at most {n}"
    errors.refuse((0 < n < largest, too_many))
    _check(fetch, np.random.default_rng(0), n=n, batch=batch, n_buffered=largest * (BUFFER + 2))
    stream = grain.MapDataset.range(n).seed(seed).shuffle().repeat()
    index_dtype = np.int32 if n <= 2**31 else np.int64

    def select(step: int, _: int) -> np.ndarray:
        return np.array([stream[i] for i in range(sizes.before(step), sizes.before(step + 1))], np.int64)

    def fetch_with_index(index_B: np.ndarray, rng: np.random.Generator) -> Batch:
        return fetch(index_B, rng) | {"example_B": index_B.astype(index_dtype)}

    return stream.map_with_index(select).random_map(fetch_with_index)


def evaluation(fetch: Fetch, *, n: int, batch: int) -> grain.MapDataset:
    """Return the ceil(n / batch) batches that hold every example exactly once, in order.

    All batches have `batch` rows, so one compiled function serves them: the last is padded with its last example, for
    which every array named `weight_...` is 0. `fetch` receives `rng=None`: it must not depend on a run. Raises
    UserError if n or batch is below 1, or if memory is too small for two batches.
    """
    _check(fetch, None, n=n, batch=batch, n_buffered=batch * 2)

    def fetch_padded(step: int) -> Batch:
        index_B = step * batch + np.arange(batch)
        arrays, padding_B = fetch(np.minimum(index_B, n - 1), None), index_B >= n
        weights = {name: array.copy() for name, array in arrays.items() if name.startswith("weight_")}
        for array in weights.values():
            array[padding_B] = 0
        return arrays | weights

    return grain.MapDataset.range(-(-n // batch)).map(fetch_padded)


def iterate(dataset: grain.MapDataset, *, start: int) -> Iterator[Batch]:
    """Return the batches dataset[start], dataset[start + 1], ...; a background thread prepares up to BUFFER of them."""
    return iter(dataset[start:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=BUFFER)))


def _check(fetch: Fetch, rng: np.random.Generator | None, *, n: int, batch: int, n_buffered: int) -> None:
    """Raise UserError if n or batch is below 1, or if memory is too small for the buffer.

    n_buffered: the number of examples in the buffer, each as large as the first example.
    """
    for name, number in (("the batch size", batch), ("the number of examples", n)):
        errors.refuse((number < 1, f"{name} is {number}. It must be at least 1"))
    size = sum(array.nbytes for array in fetch(np.zeros(1, np.int64), rng).values())
    disk.check_memory(f"the buffer of batches, {n_buffered} examples of {size} bytes,", n_buffered * size)


class Growth(NamedTuple):
    """Phases of training: after `firsts[i]` steps, batches have `sizes[i]` examples."""

    firsts: tuple[int, ...]
    sizes: tuple[int, ...]

    def before(self, step: int) -> int:
        """Return the number of examples before this step, which is the position of its batch in the stream."""
        phases = zip(self.firsts, (*self.firsts[1:], step), self.sizes, strict=True)
        return sum(size * max(0, min(step, end) - first) for first, end, size in phases)


def parse_growth(batch: int, pairs: Any = ()) -> Growth:
    """Return the Growth: batches of `batch` examples, and of `size` after `step` steps for each pair of train.growth.

    pairs: [[step, size], ...]. Raises UserError unless their numbers are integers of at least 1, the steps ascend, and
    each pair changes the size.
    """
    firsts, sizes = [0], [batch]
    for pair in pairs:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(number) is int for number in pair)
        rule = "must be [step, size], positive integers, with ascending steps and another size than before"
        invalid = not is_pair or pair[0] <= firsts[-1] or pair[1] < 1 or pair[1] == sizes[-1]
        errors.refuse((invalid, f"{GROWTH}: {pair!r} {rule}: {EXAMPLE}"))
        firsts.append(pair[0])
        sizes.append(pair[1])
    return Growth(tuple(firsts), tuple(sizes))
