"""A step whose numbers went wrong, kept in a folder of its own, to be looked at again on one device.

The bundle holds what the step was made of: config.json (with versions), state.npz (the state before it, whole),
batch.npz, and info.json (what was wrong). `python launch.py --replay DIR` prepares the experiment of its config, and
looks at the step (`again`) in place of training.
"""

import contextlib
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine import checkpoint, disk, distributed, errors, mesh as meshes, step
from tfm import shapes

NEW = "updated parameters"
LISTED = 8  # numbers of examples in a sentence


class Failure(NamedTuple):
    """A step that went wrong, as it is known on the host."""

    step: int
    loss: float
    norm: float  # of the gradient
    batch: dict[str, np.ndarray]
    culprits: dict[str, int] = {}  # how many numbers are not finite, by path, in the order in which they arise

    def examples(self) -> list[int]:
        """Their numbers, in their order."""
        return self.batch["example_B"].tolist() if "example_B" in self.batch else []

    def __str__(self) -> str:
        scalars = {"the loss": self.loss, "the gradient norm": self.norm}
        wrong = [f"{name} ({value})" for name, value in scalars.items() if not np.isfinite(value)]
        wrong, first, numbers = wrong or ["an updated parameter"], next(iter(self.culprits), ""), self.examples()
        more = f", ... ({len(numbers)} in all)" if len(numbers) > LISTED else ""
        return (
            f"step {self.step:,}: {' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite"
            + (f", and the first such number is in {first}" if first else "")
            + (f"; the examples were {', '.join(map(str, numbers[:LISTED]))}{more}" if numbers else "")
        )


def examine(plan: step.Plan, n: int, state: step.State, batch: dict) -> Failure:
    """Compute step n from the state before it on `batch` (on the host) again, and look at every number of it."""
    propose = jax.jit(step.proposal(plan.task, plan.optimiser, plan.mesh, accumulation=plan.accumulation))
    params, _, norm, metrics, grads = propose(state, meshes.place_batch(plan.mesh, batch))
    parts = {"parameters": state.params, "batch": batch, "gradient": grads, NEW: params}
    counts = {
        f"{part}/{path}": int(np.sum(~np.isfinite(np.asarray(leaf, np.float32))))
        for part, tree in parts.items()
        for path, leaf in shapes.flat(distributed.fetch(tree)).items()
    }
    loss, norm = jax.device_get((metrics[step.LOSS], norm))
    return Failure(n, float(loss), float(norm), batch, {path: count for path, count in counts.items() if count})


def write(folder: pathlib.Path, failure: Failure, state: step.State) -> pathlib.Path:
    """The bundle of this step in the folder of its run, and its path. All processes call it, one writes.

    state: the one before the step. Raises RunError where the disk does not take it.
    """
    whole = shapes.flat(distributed.fetch(_plain(state)))
    bundle = folder / "replay" / f"step_{failure.step}"
    if not distributed.main():
        return bundle
    draft = bundle.with_name(bundle.name + ".writing")
    scalars = {"loss": str(failure.loss), "gradient_norm": str(failure.norm)}  # as text: JSON has no NaN
    try:
        disk.folder(folder, "replay")
        disk.remove(draft)
        draft.mkdir()
        shutil.copyfile(folder / "config.json", draft / "config.json")
        np.savez(draft / "batch.npz", **failure.batch)
        np.savez(draft / "state.npz", **whole)
        disk.write_json(draft / "info.json", {"step": failure.step, **scalars, "examples": failure.examples()})
        disk.remove(bundle)  # of the same step, from before a resume
        draft.rename(bundle)
    except OSError as error:
        raise errors.RunError(f"{failure}; {bundle} cannot be written: {error.strerror}") from error
    return bundle


def read(bundle: pathlib.Path, like: step.State) -> tuple[int, step.State, dict]:
    """(step, the state before it with the tree of `like`, its batch on the host). UserError where it is damaged."""
    n = disk.read_json(bundle / "info.json", says="which step went wrong").get("step")
    if not isinstance(n, int):
        raise errors.UserError(f"{bundle} is no replay bundle, or a damaged one: its info.json tells no step")
    batch, arrays = (disk.read_npz(bundle / name) for name in ("batch.npz", "state.npz"))
    plain = jax.eval_shape(_plain, like)
    expected = shapes.flat(plain)
    if {k: (v.shape, v.dtype) for k, v in arrays.items()} != {k: (v.shape, v.dtype) for k, v in expected.items()}:
        raise errors.UserError(f"the state in {bundle} is not that of the config beside it")
    state = jax.tree.unflatten(jax.tree.structure(plain), [arrays[name] for name in expected])
    return n, state.replace(key=jax.random.wrap_key_data(jnp.asarray(state.key))), batch


def _plain(state: step.State) -> step.State:
    return state.replace(key=jax.random.key_data(state.key))


def check(n: int, state: step.State) -> None:
    """RunError where the parameters behind step n are not finite, though the numbers of every step were: they must not
    be saved over a good checkpoint. Each process looks at its own part; all call it, and all raise."""
    own = (shard.data for leaf in jax.tree.leaves(state.params) for shard in leaf.addressable_shards)
    if distributed.agree(not all(np.isfinite(np.asarray(part, np.float32)).all() for part in own)):
        raise errors.RunError(
            f"step {n:,}: an updated parameter is not finite, which the optimiser made of finite numbers: nothing of it"
            " is saved, and the run can go on from its last checkpoint with a smaller optim.learning_rate"
        )


def abort(
    plan: step.Plan, folder: pathlib.Path, saves: checkpoint.Checkpoints, n: int, state: Any, batch: dict, metrics: dict
) -> None:
    """Raise RunError: what was not finite in step n, and where a bundle lies with which it can be looked at.

    The state before it is saved, so that the run can go on without this step, or look at it again.
    """
    check(n - 1, state)
    loss, norm = jax.device_get((metrics[step.LOSS], metrics["gradient_norm"]))
    failure = Failure(n, float(loss), float(norm), batch)
    bundle = write(folder, failure, state)
    place = "its beginning"
    if n > 1:
        try:
            saves.save(n - 1, state)
            saves.wait()
            place = f"step {n - 1:,}, which is saved"
        except errors.RunError as error:  # beside what went wrong before
            place = f"its last checkpoint ({error})"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the devices have no room for it beside the run
        failure = failure._replace(culprits=examine(plan, n, state, batch).culprits)
    raise errors.RunError(
        f"{failure}; python launch.py --replay {bundle} shows it again on one device, and the run can go on with"
        f" train.nan = skip from {place}"
    )


def again(bundle: pathlib.Path, plan: step.Plan) -> None:
    """Compute the step of the bundle again and tell every place that is not finite. Raises RunError where one is."""
    n, state, batch = read(bundle, step.abstract_state(plan.task, plan.optimiser, mesh=plan.mesh))
    failure = examine(plan, n, jax.device_put(state, meshes.replicated(plan.mesh)), batch)
    print(f"step {n:,} of {bundle}, computed again")
    print(f"  loss           {failure.loss}\n  gradient norm  {failure.norm}")
    for path, count in failure.culprits.items():
        print(f"  {path}: {count:,} not finite")
    if not np.isfinite([failure.loss, failure.norm]).all() or any(path.startswith(NEW) for path in failure.culprits):
        raise errors.RunError(str(failure))
    print("all of it is finite here, on this backend and with these versions of the libraries")
