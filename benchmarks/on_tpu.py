"""Measure training steps on this machine's chip, next to the times that the TPU's compiler expects.

python -m benchmarks.on_tpu [--steps=20]

Three steps of catalogue.py are compiled and run on the first device, in about five minutes. Please paste the output
into an issue, whatever the numbers are. Small stand-ins replace the data. On a CPU the models are tiny.
"""

import contextlib
import io
import math
import statistics
import time

import jax
import numpy as np

from benchmarks import catalogue, tpu_estimate
from experiments import command as commands
from experiments.config import errors
from experiments.devices import compilation, distributed, mesh as meshes
from experiments.engine import train_step
from experiments.folder import workdir as workdirs

HELP = {"steps": "The number of measured steps, of which the median is printed."}
WARM_UP = 3  # steps before the measured ones
# Names in catalogue.STEPS, by ascending memory because a device reports the peak of the process -> changes for a CPU.
STEPS = {
    "ViT-S/16": "model.M=1 train.batch_size=2",
    "GPT-2": "model.M=1 model.D=96 text.N=64 train.batch_size=2",
    "colab_v5e": "model.M=1 model.D=96 text.N=64 train.batch_size=8",
}
ROW = "{:<12}{:>14}{:>14}{:>18}{:>16}"


def run(*, steps: int = 20) -> None:
    """Print the versions, and a line for each of STEPS: its measured and estimated time and memory, or an error."""
    compilation.start("any")
    device = meshes.make().devices.flat[0]
    versions = ", ".join(f"{name} {version}" for name, version in meshes.versions().items())
    print(f"{device.device_kind}; {versions}, libtpu {compilation.libtpu()}; commit {workdirs.read_commit()[0]}")
    if device.platform == "cpu":
        print("This machine has only a CPU: the models are tiny, and there are no estimates of the time.")
    print(ROW.format("step", "measured, ms", "estimate, ms", "peak memory, MiB", "estimate, MiB"))
    for name, tiny in STEPS.items():
        command = f"{catalogue.STEPS[name]} {tiny if device.platform == 'cpu' else ''}"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                row = measure(command, device, steps)
        except Exception as error:  # of any kind: nobody has run these programs on a TPU yet
            print(f"{name:<12} none: {type(error).__name__}: {errors.line(error):.300}", flush=True)
            continue
        print(ROW.format(name, *("none" if math.isnan(x) else f"{x:,.2f}" for x in row)), flush=True)


def measure(command: str, device: jax.Device, steps: int) -> tuple[float, float, float, float]:
    """Return the median of a step's measured milliseconds, the estimate, the peak and the estimated memory in MiB.

    A number is NaN if the device reports no memory, or its compiler no cycles.
    """
    code, *changes = command.split()
    step = catalogue.load(code, [device], *changes)
    plan, (compiled, estimate) = step.plan, tpu_estimate.compile_step(step, [device])
    state = train_step.initial_state(plan.task, plan.optimiser, seed=plan.seed, mesh=plan.mesh)
    batch = meshes.place_batch(plan.mesh, plan.task.train[0])
    alive, seconds = distributed.put(np.True_, meshes.replicated(plan.mesh)), []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch, alive))
        seconds.append(time.perf_counter() - begin)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", math.nan)
    return 1e3 * statistics.median(seconds[WARM_UP:]), 1e3 * estimate.seconds, peak / 2**20, estimate.mebibytes


if __name__ == "__main__":
    commands.main(run, HELP)
