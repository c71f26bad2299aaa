"""Steps with NaN or infinity: stop the run, and name the step, the examples and the first array."""

import contextlib
import functools
import pathlib

import jax
import numpy as np

from experiments.engine import checkpoint, distributed, errors, mesh as meshes, optim, run_plan, train_step
from tfm import shapes

LISTED = 8  # examples that a message lists


def abort(
    plan: run_plan.Plan,
    folder: pathlib.Path,
    saves: checkpoint.Checkpoints,
    n: int,
    state: train_step.State,
    batch: dict,
    metrics: dict,
) -> None:
    """Save the state before step n, and raise RunError with the numbers that are not finite and a command to repeat it.

    A batch is a function of (seed, step), so resuming from there takes the same step.
    """
    check(n - 1, state)
    place = "its beginning"
    if n > 1:
        try:
            saves.save(n - 1, state)
            saves.wait()
            place = f"step {n - 1:,}, which is saved"
        except errors.RunError as error:  # report both errors
            place = f"its last checkpoint ({error})"
    command = f"python launch.py --config={folder / 'config.json'} --workdir={folder}"
    raise errors.RunError(
        f"{describe(plan, n, state, batch, metrics)}; JAX_DEBUG_NANS=1 {command} takes this step again and names the"
        f" operation, and the run can go on with train.nan = skip from {place}"
    )


def describe(plan: run_plan.Plan, n: int, state: train_step.State, batch: dict, metrics: dict) -> str:
    """Return a sentence about step n: which numbers are not finite, in which array first, and the examples."""
    names = {"the loss": train_step.LOSS, "the gradient norm": "gradient_norm", "the learning rate": "learning_rate"}
    values = {name: float(jax.device_get(metrics[key])) for name, key in names.items()}
    faults = [f"{name} ({value})" for name, value in values.items() if not np.isfinite(value)] or ["a statistic"]
    sentence = f"step {n:,}: {' and '.join(faults)} {'is' if len(faults) == 1 else 'are'} not finite"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the devices have no memory left for it
        if path := first_culprit(plan, state, batch):
            sentence += f", and the first such number is in {path}"
    numbers = np.asarray(batch.get("example_B", ())).tolist()
    rest = f", ... ({len(numbers)} in all)" if len(numbers) > LISTED else ""
    return sentence + (f"; the examples were {', '.join(map(str, numbers[:LISTED]))}{rest}" if numbers else "")


def first_culprit(plan: run_plan.Plan, state: train_step.State, batch: dict) -> str:
    """Compute the gradient again from the state before a step on its batch. Return the path of the first array with a
    number that is not finite: of the parameters, the batch, the gradient, the running statistics; or ''."""
    params, key = optim.training_params(state.params, state.opt_state), jax.random.fold_in(state.key, state.step)
    device_gradient = functools.partial(
        train_step.gradient, task=plan.task, mesh=plan.mesh, accumulation=plan.accumulation
    )
    mesh_gradient = meshes.sharded(
        device_gradient, plan.mesh, **train_step.gradient_specs(params, batch, plan.task, plan.mesh)
    )
    grads, _, running = jax.jit(mesh_gradient)(params, meshes.place_batch(plan.mesh, batch), key)
    stages = {"parameters": state.params, "batch": batch, "gradient": grads, "running statistics": running}
    return next(
        (
            f"{stage}/{path}"
            for stage, tree in stages.items()
            for path, leaf in shapes.flat(distributed.fetch(tree)).items()
            if not np.isfinite(np.asarray(leaf, np.float32)).all()
        ),
        "",
    )


def check(n: int, state: train_step.State) -> None:
    """Raise RunError if the parameters after step n are not finite, so that they are not saved.

    Each process checks the parameters on its devices. All call it, and all raise.
    """
    shards = (shard.data for leaf in jax.tree.leaves(state.params) for shard in leaf.addressable_shards)
    if distributed.agree(not all(np.isfinite(np.asarray(part, np.float32)).all() for part in shards)):
        raise errors.RunError(
            f"step {n:,}: an updated parameter is not finite, though loss and gradient are: this step is not saved."
            " Resume from the last checkpoint with a smaller optim.learning_rate"
        )
