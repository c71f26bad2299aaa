"""Seconds of compilation of our training step against the number of layers: written out, and as a loop."""

import time
from collections.abc import Sequence
from typing import Any

from benchmarks import fresh, plans
from experiments.engine import distributed, mesh, step

WORKLOAD, DEPTHS = "step_a", (4, 12, 48)
WAYS = {"written out": 0, "loop": 1}  # model.unroll


def measure(rounds: int | None = None, *, depths: Sequence[int] = DEPTHS, name: str = WORKLOAD, **changes: Any) -> dict:
    """{"M": [...], "written out": [{"trace_seconds", "compile_seconds"}, ...], "loop": ...}: the fastest
    of `rounds` times (1) each; nothing is taken from a compilation cache."""
    found: dict[str, Any] = {"workload": name, "M": list(depths)} | {way: [] for way in WAYS}
    for M in depths:
        for way, unroll in WAYS.items():
            more = changes | {"model.M": M, "model.unroll": unroll}
            times = [compiled(name, **more) for _ in range(rounds or 1)]
            found[way].append({what: min(one[what] for one in times) for what in times[0]})
    return found


def compiled(name: str, **changes: Any) -> dict[str, float]:
    """The seconds in which the step of this workload is traced, and in which it is compiled."""
    made = plans.made(name, **changes)
    state = step.abstract_state(made.task, made.optimiser, mesh=made.mesh)
    batch = mesh.place_batch(made.mesh, made.task.train[0])
    began = time.perf_counter()
    lowered = made.step.lower(state, batch, distributed.put(True, mesh.replicated(made.mesh)))
    traced = time.perf_counter()
    with fresh.compiled():
        lowered.compile()
    return {"trace_seconds": traced - began, "compile_seconds": time.perf_counter() - traced}


def show(found: dict) -> str:
    """A table: a row for each depth."""
    lines = [f"{found['workload']} with M layers: seconds to trace + to compile the training step"]
    lines.append(f"{'M':>4}" + "".join(f"{way:>24}" for way in WAYS))
    for i, M in enumerate(found["M"]):
        cells = [f"{found[way][i]['trace_seconds']:.1f} + {found[way][i]['compile_seconds']:.1f}" for way in WAYS]
        lines.append(f"{M:4}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)
