"""What is left of every run of a study: summary.json, and an example of its attention."""

import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.engine import checkpoint, compilation, disk, log, mesh, step, workdir
from experiments.studies import attention, initial, preparing
from tfm import shapes


def write(
    ready: preparing.Ready,
    state: step.State,
    final: dict[str, np.ndarray],
    folder: pathlib.Path,
    *,
    measure: bool,
    begun: list[initial.Sketch],
    seconds: dict[str, float],
    before: Callable[[], None],
) -> None:
    """summary.json of every run, the last of what says that it is finished; of the first seed maps.npz.

    measure: look at attention too. begun: with which values, by row. seconds: wall_seconds, the run's share, and
    compile_seconds, of the program. before: called before each run's; what it raises ends it.
    """
    runs, task, common = ready.program.runs, ready.vmapped.task, _common(ready, state)
    taken_R = jax.device_get(state.step)
    look = attention.observer(task) if measure and task.maps else None
    for r, run in enumerate(runs):
        before()
        params = jax.device_get(jax.tree.map(lambda x, r=r: x[r], state.params))
        found, maps = look(params) if look else ({}, None)
        own = {
            "condition": run.condition,
            "arm": run.arm,
            "seed": run.seed,
            "params_sha256": checkpoint.digest(params),
            **{name: log.finite(column[r]) for name, column in final.items()},
            "diverged_at": None if taken_R[r] == ready.plan.steps else int(taken_R[r]) + 1,
            "training_crc32": crc32(ready.tasks[run.seed].train[0]),
            "initial": begun[r],
        }
        if maps is not None and run.seed == runs[0].seed:
            attention.save(folder / run.name / "maps.npz", maps)
        attended = {"attention": found} if found else {}
        disk.write_json(folder / run.name / "summary.json", own | common | seconds | attended)


def _common(ready: preparing.Ready, state: step.State) -> dict[str, Any]:
    """What the runs of a program have alike."""
    task, devices = ready.vmapped.task, ready.vmapped.mesh
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
    tokens = ready.plan.growth.sizes[0] * task.tokens_per_example
    return {
        "experiment": ready.program.runs[0].settings.experiment,
        "steps": ready.plan.steps,
        "params": shapes.total(params),
        "flops_per_token": compilation.flops(task.loss_and_metrics, params, task.train[0], None) / tokens,
        **{f"baseline/{name}": value for name, value in task.baseline.items()},
        "guess": dict(task.guess),
        "data": ready.lines,
        "evaluation_crc32": crc32(task.evaluation[0]) ^ crc32(task.evaluation[-1]) ^ len(task.evaluation),
        "together": len(ready.program.runs),
        "devices": devices.size,
        "device": mesh.describe(devices),
        "backend": mesh.backend(devices),
        "versions": mesh.versions(),
        "commit": workdir.commit(),
    }


def crc32(batch: dict[str, np.ndarray]) -> int:
    """A digest of a batch: names and numbers."""
    found = 0
    for name, array in sorted(batch.items()):
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(name.encode(), found))
    return found
