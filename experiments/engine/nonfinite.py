"""Errors of steps with NaN or infinity, which name the step, its examples and the first such array."""

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import NoReturn

import jax
import numpy as np

from experiments.config import errors
from experiments.devices import distributed, mesh as meshes
from experiments.engine import optim, run_plan, train_step
from experiments.folder import checkpoint
from tfm import shapes

LISTED = 8  # examples that a message lists


def abort(plan: run_plan.Plan, folder: pathlib.Path, saves: checkpoint.Checkpoints) -> Callable[..., NoReturn]:
    """Return the function to call if step n failed: (n, the state before it, its batch, its metrics).

    It saves the state (not for n = 1, nor a state that is not finite), and raises RunError with the non-finite numbers
    and a command to repeat the step. A batch is a function of (seed, step), so a run that resumes from this state takes
    the same step.
    """

    def on_failure(n: int, state: train_step.State, batch: dict, metrics: dict) -> NoReturn:
        check(n - 1, state)
        place = "the beginning"
        if n > 1:
            try:
                saves.save(n - 1, state)
                saves.wait()
                place = f"the checkpoint of step {n - 1:,}"
            except errors.RunError as error:  # report both errors
                place = f"the last checkpoint ({error})"
        command = f"python launch.py --config={folder / 'config.json'} --workdir={folder}"
        raise errors.RunError(
            f"{describe(plan, n, state, batch, metrics)}. To find the operation, repeat the step: JAX_DEBUG_NANS=1"
            f" {command}. To skip such steps, resume with train.nan = skip from {place}"
        )

    return on_failure


def describe(plan: run_plan.Plan, n: int, state: train_step.State, batch: dict, metrics: dict) -> str:
    """Return a sentence about step n: what is not finite, the first array where it is, and the batch's examples."""
    names = {"the loss": train_step.LOSS, "the gradient norm": "gradient_norm", "the learning rate": "learning_rate"}
    values = {name: float(jax.device_get(metrics[key])) for name, key in names.items()}
    faults = [f"{name} ({value})" for name, value in values.items() if not np.isfinite(value)] or ["a statistic"]
    sentence = f"step {n:,}: {' and '.join(faults)} {'is' if len(faults) == 1 else 'are'} not finite"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the devices may have no memory left
        if path := find_first_nonfinite(plan, state, batch):
            sentence += f", and the first such number is in {path}"
    numbers = np.asarray(batch.get("example_B", ())).tolist()
    rest = f", ... ({len(numbers)} in all)" if len(numbers) > LISTED else ""
    return sentence + (f"; the examples were {', '.join(map(str, numbers[:LISTED]))}{rest}" if numbers else "")


def find_first_nonfinite(plan: run_plan.Plan, state: train_step.State, batch: dict) -> str:
    """Return the path of the first array with NaN or infinity, or ''. state: the state before the step.

    The gradient is recomputed. The order is parameters, batch, gradient, running statistics.
    """
    params, key = optim.training_params(state.params, state.opt_state), jax.random.fold_in(state.key, state.step)
    options = {"task": plan.task, "mesh": plan.mesh, "accumulation": plan.accumulation}
    specs = train_step.gradient_specs(params, batch, plan.task, plan.mesh)
    gradient = meshes.sharded(functools.partial(train_step.gradient, **options), plan.mesh, **specs)
    grads, _, running = jax.jit(gradient)(params, meshes.place_batch(plan.mesh, batch), key)
    stages = {"parameters": state.params, "batch": batch, "gradient": grads, "running statistics": running}
    for stage, tree in stages.items():
        for path, leaf in shapes.flat(distributed.fetch(tree)).items():
            if not np.isfinite(np.asarray(leaf, np.float32)).all():
                return f"{stage}/{path}"
    return ""


def check(n: int, state: train_step.State) -> None:
    """Raise RunError if the parameters after step n are not finite, so that they are not saved.

    Each process checks the parameters on its devices. Every process must call this; if one fails, all raise.
    """
    shards = (shard.data for leaf in jax.tree.leaves(state.params) for shard in leaf.addressable_shards)
    fault = f"step {n:,}: an updated parameter is not finite, though loss and gradient are. This step is not saved. "
    if distributed.agree(not all(np.isfinite(np.asarray(part, np.float32)).all() for part in shards)):
        raise errors.RunError(f"{fault}Resume from the last checkpoint with a smaller optim.learning_rate")
