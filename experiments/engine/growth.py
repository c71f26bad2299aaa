"""The batch size of every step: one size, or sizes that grow during training (E30)."""

import bisect
import itertools
from typing import Any, NamedTuple

from experiments.engine import errors

KEY = "train.growth"
EXAMPLE = "write [[500, 128], [800, 256]] for batches of 128 from 500 steps on and of 256 from 800 on"


class Growth(NamedTuple):
    """Phases of training: after `firsts[i]` steps, batches have `sizes[i]` examples. `befores[i]` came before them."""

    firsts: tuple[int, ...]
    sizes: tuple[int, ...]
    befores: tuple[int, ...]

    def size(self, step: int) -> int:
        """Examples in the batch of this step; steps are counted from 0."""
        return self.sizes[bisect.bisect_right(self.firsts, step) - 1]

    def before(self, step: int) -> int:
        """Examples in all batches before the one of this step, which thus begins there in the stream of examples."""
        i = bisect.bisect_right(self.firsts, step) - 1
        return self.befores[i] + (step - self.firsts[i]) * self.sizes[i]

    def reached(self, steps: int) -> "Growth":
        """The phases that begin within so many steps: the others are for a longer run of the same config."""
        n = bisect.bisect_left(self.firsts, steps)
        return Growth(self.firsts[:n], self.sizes[:n], self.befores[:n])


def growth(batch: int, pairs: Any = ()) -> Growth:
    """Batches of `batch` examples, and of `size` from `step` steps on, for each pair [step, size] of train.growth.

    Raises UserError unless the pairs are whole numbers, sizes at least 1, and steps ascend from 1 on.
    """
    firsts, sizes = [0], [batch]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or any(type(number) is not int for number in pair):
            raise errors.UserError(f"{KEY} holds {pair!r}, which is no pair of whole numbers: {EXAMPLE}")
        step, size = pair
        if step <= firsts[-1]:
            raise errors.UserError(f"the steps of {KEY} must ascend from 1 on, and {step} comes after {firsts[-1]}")
        if size < 1:
            raise errors.UserError(f"{KEY} asks for batches of {size} examples, and a batch needs at least 1")
        firsts.append(step)
        sizes.append(size)
    grown = [size * (end - first) for first, end, size in zip(firsts, firsts[1:], sizes, strict=False)]
    return Growth(tuple(firsts), tuple(sizes), tuple(itertools.accumulate(grown, initial=0)))
