"""A batch is a function of (seed, step): nothing to save, and a run resumes at any step by asking for that batch.

`fetch(index_B, rng) -> {name: array}` turns example numbers into arrays; every array's first axis is B. The numbers are
plain integers, so shuffling moves no data, and all array work is vectorised over the batch.
"""

from collections.abc import Callable, Iterator

import grain
import numpy as np

from experiments.engine import errors

Batch = dict[str, np.ndarray]
Fetch = Callable[[np.ndarray, np.random.Generator | None], Batch]


def train(fetch: Fetch, *, n: int, batch: int, seed: int) -> grain.MapDataset:
    """Endless batches of `n` examples: `dataset[step]` is the batch of that step.

    Every example comes once in each epoch (`n` consecutive examples), in an order of the epoch's own. The `rng` that
    `fetch` receives depends on (seed, step) only.

    Raises:
      UserError: a batch of no example, fewer examples than one batch, or a seed that does not fit in 32 bits.
    """
    _check(n=n, batch=batch)
    if n < batch:
        raise errors.UserError(
            f"the training part has {n} examples, fewer than one batch of {batch}: make train.batch smaller"
        )
    if not 0 <= seed < 2**32:
        raise errors.UserError(f"the seed must lie between 0 and 2**32 - 1, and {seed} does not")
    index_B = grain.MapDataset.range(n).seed(seed).shuffle().repeat().batch(batch)
    return index_B.random_map(fetch)


def evaluation(fetch: Fetch, *, n: int, batch: int) -> grain.MapDataset:
    """The ceil(n / batch) batches that hold every example exactly once, in order.

    All batches have `batch` rows, so one compiled function serves them: the last is filled up with its last example,
    and there every array named `weight_...` is 0. `fetch` is called with `rng=None`: it must not depend on a run.

    Raises:
      UserError: no example, or a batch of no example.
    """
    _check(n=n, batch=batch)

    def fetch_padded(step: int) -> Batch:
        index_B = step * batch + np.arange(batch)
        real_B = index_B < n
        arrays = fetch(np.minimum(index_B, n - 1), None)
        return {name: _blank(array, real_B) if name.startswith("weight_") else array for name, array in arrays.items()}

    return grain.MapDataset.range(-(-n // batch)).map(fetch_padded)


def iterate(dataset: grain.MapDataset, *, start: int, threads: int = 1, buffer: int = 8) -> Iterator[Batch]:
    """The batches from position `start` on, up to `buffer` of them prepared ahead by `threads` background threads.

    With no threads, each batch is made when it is asked for. The order is the same whatever the number of threads.
    """
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer if threads else 0)
    return iter(dataset[start:].to_iter_dataset(options))


def _check(*, n: int, batch: int) -> None:
    if batch < 1:
        raise errors.UserError(f"a batch needs at least 1 example, and {batch} was asked for")
    if n < 1:
        raise errors.UserError("there is not a single example to make a batch of")


def _blank(array: np.ndarray, real_B: np.ndarray) -> np.ndarray:
    """The array with the rows that are not real set to 0, in a copy: what `fetch` returned may be its own."""
    shape = (len(real_B),) + (1,) * (array.ndim - 1)
    return np.where(real_B.reshape(shape), array, np.zeros((), array.dtype))
