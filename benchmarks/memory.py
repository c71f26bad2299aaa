"""Memory of the long-context training step against the number of tokens N.

What XLA sets aside for intermediate values is told by the compiled program; what the whole process takes at its peak,
by the system, of a process that does nothing but take two steps.
"""

import math
import resource
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import alone, plans
from experiments.engine import distributed, mesh, run
from experiments.engine import step as steps

WORKLOAD, LENGTHS = "step_d", (1024, 2048, 4096, 8192, 16384)
WAYS = ("flash", "explicit")  # model.attention
MOST = 8 * 2**30  # bytes of intermediate values with which a step is still run


def measure(
    rounds: int | None = None, *, lengths: Sequence[int] = LENGTHS, name: str = WORKLOAD, **changes: Any
) -> dict:
    """{"N": [...], "flash": {"temporary_bytes": [...], "peak_bytes": [... or None], "power": p}, "explicit": ...}.

    temporary_bytes: XLA's intermediate values. peak_bytes: resident memory of a process; None where it was not run,
    because it would take too much. power: the intermediate values of the longest two grow like N^p.
    """
    found: dict[str, Any] = {"workload": name, "N": list(lengths)}
    for way in WAYS:
        more = [changes | {"text.N": N, "model.attention": way} for N in lengths]
        temporary = [compiled_bytes(name, **one) for one in more]
        peak = [
            peak_bytes(name, **one) if bytes_ <= MOST else None for one, bytes_ in zip(more, temporary, strict=True)
        ]
        found[way] = {"temporary_bytes": temporary, "peak_bytes": peak, "power": power(lengths, temporary)}
    return found


def power(lengths: Sequence[int], amounts: Sequence[float]) -> float:
    """p where the amounts grow like N^p between the longest two; nan where there are not two."""
    if len(lengths) < 2:
        return math.nan
    return math.log(amounts[-1] / amounts[-2]) / math.log(lengths[-1] / lengths[-2])


def compiled_bytes(name: str, **changes: Any) -> int:
    """Bytes of intermediate values of the compiled step, beside the state and the batch."""
    made = plans.made(name, **changes)
    state = steps.abstract_state(made.task, made.optimiser, mesh=made.mesh)
    batch = mesh.place_batch(made.mesh, made.task.train[0])
    alive = distributed.put(True, mesh.replicated(made.mesh))
    return made.step.lower(state, batch, alive).compile().memory_analysis().temp_size_in_bytes


def peak_bytes(name: str, **changes: Any) -> int:
    """Peak resident bytes of a process that starts, compiles, and takes two steps."""
    return alone.call("benchmarks.memory", "take_two_steps", name=name, changes=changes)


def take_two_steps(name: str, changes: dict[str, Any]) -> int:
    """The process's peak resident bytes after two steps."""
    made = plans.made(name, **changes)
    state = steps.initial_state(made.task, made.optimiser, seed=0, mesh=made.mesh)
    step, _ = run.compile_step(made, state)
    alive = distributed.put(True, mesh.replicated(made.mesh))
    for i in range(2):
        state, _ = jax.block_until_ready(step(state, mesh.place_batch(made.mesh, made.task.train[i]), alive))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def show(found: dict) -> str:
    """A table: a row for each N."""
    lines = [f"{found['workload']} with N tokens: MiB of intermediate values (peak of the whole process)"]
    lines.append(f"{'N':>8}" + "".join(f"{way:>24}" for way in WAYS))
    for i, N in enumerate(found["N"]):
        lines.append(f"{N:8,}" + "".join(f"{_cell(found[way], i):>24}" for way in WAYS))
    lines.append("grows like N to the power of" + ", ".join(f" {found[way]['power']:.2f} ({way})" for way in WAYS))
    return "\n".join(lines)


def _cell(way: dict, i: int) -> str:
    peak = way["peak_bytes"][i]
    return f"{way['temporary_bytes'][i] / 2**20:,.0f} ({'not run' if peak is None else f'{peak / 2**20:,.0f}'})"
