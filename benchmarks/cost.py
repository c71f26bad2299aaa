"""Time of our training step against the number of tokens N (one sequence) and against the number of layers M."""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import alone, ours, plans
from experiments.engine import distributed, mesh
from experiments.engine import step as training_step

OVER_N, LENGTHS = "step_d", (256, 512, 1024, 2048, 4096, 8192, 16384)
OVER_M, DEPTHS = "step_a", (1, 2, 4, 8, 16)
WAYS = {"flash": 16384, "explicit": 4096}  # model.attention, and up to which N it is measured
SECONDS, MOST, WARM = 1.5, 50, 2  # of steps at each size; steps at most; steps before
KEPT = 8  # batches


def measure(
    rounds: int | None = None, *, lengths: Sequence[int] = LENGTHS, depths: Sequence[int] = DEPTHS, **changes: Any
) -> dict:
    """{"N": [...], "flash": [seconds of a step], "explicit": [... or None], "M": [...], "layers": [seconds]}.

    rounds: the steps of each size whose median counts; None: as many as take about 1.5 seconds, at least three.
    """
    found: dict[str, Any] = {"over_N": OVER_N, "over_M": OVER_M, "N": list(lengths), "M": list(depths)}
    for way, most in WAYS.items():
        more = {"model.attention": way}
        every = [changes | more | {"text.N": N} for N in lengths if N <= most]
        found[way] = alone.call("benchmarks.cost", "seconds", name=OVER_N, steps=rounds, every=every)
        found[way] += [None] * (len(lengths) - len(every))
    every = [changes | {"model.M": M} for M in depths]
    found["layers"] = alone.call("benchmarks.cost", "seconds", name=OVER_M, steps=rounds, every=every)
    return found


def seconds(name: str, *, steps: int | None, every: list[dict[str, Any]]) -> list[float]:
    """The median time of a step, with every one of these changes to the config."""
    return [_seconds(plans.made(name, **changes), steps) for changes in every]


def _seconds(made: training_step.Plan, steps: int | None) -> float:
    batches = [mesh.place_batch(made.mesh, made.task.train[i]) for i in range(KEPT)]
    state, step = ours.started(made)
    alive = distributed.put(np.True_, mesh.replicated(made.mesh))
    taken: list[float] = []
    for n, batch in enumerate(itertools.cycle(batches)):
        began = time.perf_counter()
        state, metrics = step(state, batch, alive)
        jax.block_until_ready((state, metrics))
        if n >= WARM:
            taken.append(time.perf_counter() - began)
        if len(taken) >= (steps or MOST) or (steps is None and len(taken) >= 3 and sum(taken) > SECONDS):
            return statistics.median(taken)
    raise AssertionError("unreachable: the batches never end")


def show(found: dict) -> str:
    """Two tables, each with the factor from row to row."""
    lines = [f"{found['over_N']} with N tokens: milliseconds of a step (how many times those of the row above)"]
    lines.append(f"{'N':>8}" + "".join(f"{way:>20}" for way in WAYS))
    for i, N in enumerate(found["N"]):
        lines.append(f"{N:8,}" + "".join(f"{_cell(found[way], i):>20}" for way in WAYS))
    lines += ["", f"{found['over_M']} with M layers: milliseconds of a step"]
    lines += [f"{M:8}{_cell(found['layers'], i):>20}" for i, M in enumerate(found["M"])]
    return "\n".join(lines)


def _cell(times: list[float | None], i: int) -> str:
    if times[i] is None:
        return "-"
    return f"{1e3 * times[i]:,.1f} ({times[i] / times[i - 1]:.2f})" if i else f"{1e3 * times[i]:,.1f}"
