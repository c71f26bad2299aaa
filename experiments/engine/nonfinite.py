"""Steps whose numbers are not finite: refuse to save them, and say which step, examples and parameter they began in."""

import contextlib
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.engine import checkpoint, distributed, errors, mesh as meshes, optim, train_step
from tfm import shapes

LISTED = 8  # numbers of examples in a sentence


class Failure(NamedTuple):
    """A step that went wrong, as it is known on the host."""

    step: int
    loss: float
    norm: float  # of the gradient
    batch: dict[str, np.ndarray]
    culprits: tuple[str, ...] = ()  # paths of arrays with such numbers, in the order in which they arise

    def __str__(self) -> str:
        scalars = {"the loss": self.loss, "the gradient norm": self.norm}
        wrong = [f"{name} ({value})" for name, value in scalars.items() if not np.isfinite(value)]
        wrong, numbers = wrong or ["an updated parameter"], np.asarray(self.batch.get("example_B", ())).tolist()
        more = f", ... ({len(numbers)} in all)" if len(numbers) > LISTED else ""
        return (
            f"step {self.step:,}: {' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite"
            + (f", and the first such number is in {self.culprits[0]}" if self.culprits else "")
            + (f"; the examples were {', '.join(map(str, numbers[:LISTED]))}{more}" if numbers else "")
        )


def examine(plan: train_step.Plan, n: int, state: train_step.State, batch: dict) -> Failure:
    """Compute step n again from the state before it on `batch` (on the host), and look at every number of it."""
    params, key = optim.trained_at(state.params, state.opt_state), jax.random.fold_in(state.key, state.step)
    of_device = functools.partial(train_step.gradient, task=plan.task, mesh=plan.mesh, accumulation=plan.accumulation)
    on_mesh = meshes.sharded(of_device, plan.mesh, **train_step.gradient_specs(params, batch, plan.task, plan.mesh))
    grads, metrics, running = jax.jit(on_mesh)(params, meshes.place_batch(plan.mesh, batch), key)
    stages = {"parameters": state.params, "batch": batch, "gradient": grads, "running statistics": running}
    culprits = [
        f"{stage}/{path}"
        for stage, tree in stages.items()
        for path, leaf in shapes.flat(distributed.fetch(tree)).items()
        if not np.isfinite(np.asarray(leaf, np.float32)).all()
    ]
    loss, norm = jax.device_get((metrics[train_step.LOSS], optax.tree.norm(grads)))
    return Failure(n, float(loss), float(norm), batch, tuple(culprits))


def check(n: int, state: train_step.State) -> None:
    """Raise RunError if the parameters after step n are not finite, though the numbers of every step were: they must
    not be saved over a good checkpoint. Each process looks at its own part; all call it, and all raise."""
    own = (shard.data for leaf in jax.tree.leaves(state.params) for shard in leaf.addressable_shards)
    if distributed.agree(not all(np.isfinite(np.asarray(part, np.float32)).all() for part in own)):
        raise errors.RunError(
            f"step {n:,}: an updated parameter is not finite, which the optimiser made of finite numbers: nothing of it"
            " is saved, and the run can go on from its last checkpoint with a smaller optim.learning_rate"
        )


def abort(
    plan: train_step.Plan,
    folder: pathlib.Path,
    saves: checkpoint.Checkpoints,
    n: int,
    state: Any,
    batch: dict,
    metrics: dict,
) -> None:
    """Raise RunError: what was not finite in step n, and the command that takes this step again.

    The state before it is saved. A batch is a function of (seed, step), so resuming from there takes the same step.
    """
    check(n - 1, state)
    loss, norm = jax.device_get((metrics[train_step.LOSS], metrics["gradient_norm"]))
    failure, place = Failure(n, float(loss), float(norm), batch), "its beginning"
    if n > 1:
        try:
            saves.save(n - 1, state)
            saves.wait()
            place = f"step {n - 1:,}, which is saved"
        except errors.RunError as error:  # in addition to what went wrong before
            place = f"its last checkpoint ({error})"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the devices have no memory left for it
        failure = examine(plan, n, state, batch)
    command = f"python launch.py --config={folder / 'config.json'} --workdir={folder}"
    raise errors.RunError(
        f"{failure}; JAX_DEBUG_NANS=1 {command} takes this step again and names the operation, and the run can go on"
        f" with train.nan = skip from {place}"
    )
