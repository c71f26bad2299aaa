"""Checkpoints with Orbax: written in the background, complete or absent, and verified before they are used.

Orbax's CheckpointManager is not used. It accepts metrics only at the save, which here precedes the evaluation. And it
commits a checkpoint before a manifest of the files can be added.
"""

import concurrent.futures
import contextlib
import hashlib
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.config import disk, errors
from experiments.devices import distributed, mesh as meshes
from experiments.folder import manifest, records
from tfm import shapes

BETTER = {"loss": "less", "accuracy": "more", "explained": "more"}  # last part of a metric's name -> better values
FAILURES = (OSError, ValueError, RuntimeError)  # raised by Orbax, tensorstore and the system if a save fails


class Best(NamedTuple):
    """A metric, '' for none, and which of its values are better: "more" or "less"."""

    metric: str
    better: str


NONE = Best("", "more")


def choose_best(metric: str, better: Mapping[str, str], *, key: str = "train.keep_best") -> Best:
    """Return the metric, and which values are better: as in BETTER or `better`, or less for a further loss, loss_NAME.

    metric: '' for none. better: name of a metric of the user's -> "more" or "less" (Task.better). key: the setting, for
    the message.

    Raises UserError for another metric: neither its name nor the user says which values are better.
    """
    name = metric.rpartition("/")[2]
    direction = (BETTER | dict(better)).get(name, "less" if name.startswith("loss_") else "")
    if metric and not direction:
        names = ", ".join([*BETTER, *better])
        further = "or in the name of a further loss, such as loss_balance"
        raise errors.UserError(f'{key} = "{metric}" must end in one of {names}, {further}')
    return Best(metric, direction or "more")


class Checkpoints:
    """The checkpoints of a run: the newest `keep`, and the best by the metric that `best` names, if any.

    Every process must create an instance and call all methods. Process 0 writes manifests, renames and deletes.
    measured: step of each checkpoint -> metrics. Raises UserError if the folder cannot be read or written.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int, best: Best = NONE):
        self._folder, self._keep, self._best = folder.absolute(), keep, best
        self._step = -1  # step of the newest save
        with disk.writing(folder):
            if distributed.is_main():
                manifest.tidy(self._folder)
            self.measured = {n: manifest.metrics(self._folder / str(n)) for n in manifest.steps(self._folder)}
        # If several devices hold an array, one writes it. If each wrote a part, every shape would cost a compilation.
        types = ocp.type_handlers
        handler = types.ArrayHandler(use_replica_parallel=False)
        handlers = types.create_type_handler_registry((jax.Array, handler), (np.ndarray, types.NumpyHandler()))
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=handlers))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future | None = None

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None) -> None:
        """Copy the state to the host; write it and the metrics in the background. Skip a step that is saved already.

        Wait first for the previous save, so that memory never holds more than two copies of the state. Raises RunError
        if the previous save failed, or if this one cannot begin.
        """
        self.wait()
        if step in self.measured:
            return
        self._step, self.measured[step] = step, _finite(metrics or {})
        with self._writing(step):
            path = self._path(manifest.WRITING)
            if distributed.is_main():
                path.mkdir()
            self._orbax.save(path / manifest.STATE, args=ocp.args.PyTreeSave(_unwrap(state)))
        self._pending = self._thread.submit(self._finish)

    def _path(self, end: str = "") -> pathlib.Path:
        return self._folder / f"{self._step}{end}"

    def _finish(self) -> None:
        """Wait for Orbax in all processes, add the manifest, and rename the folder. Delete superfluous checkpoints.

        This runs in the background.
        """
        self._orbax.wait_until_finished()
        if distributed.is_main():
            manifest.write(self._path(manifest.WRITING), metrics=self.measured[self._step], versions=meshes.versions())
            self._path(manifest.WRITING).rename(self._path())
            disk.flush(self._folder)
        self._delete(superfluous(self.measured, keep=self._keep, best=self._best))

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Replace the metrics in the checkpoint of this step, if it exists. Raises RunError if this fails.

        Then delete the checkpoints that are neither among the newest `keep` nor the best.
        """
        self.wait()
        if step in self.measured:
            self.measured[step] = _finite(metrics)
            with self._writing(step):
                if distributed.is_main():
                    manifest.write_metrics(self._folder / str(step), self.measured[step])
                self._delete(superfluous(self.measured, keep=self._keep, best=self._best))

    def _delete(self, steps: list[int]) -> None:
        for step in steps:
            checkpoint = self._folder / str(step)
            if distributed.is_main():
                disk.remove(checkpoint.rename(checkpoint.with_name(checkpoint.name + manifest.DELETING)))
            del self.measured[step]

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Context manager: if the save of this step fails, delete its partial files, and raise RunError."""
        try:
            yield
        except FAILURES as error:
            self.measured.pop(step, None)
            if distributed.is_main():
                with contextlib.suppress(OSError):
                    disk.remove(self._path(manifest.WRITING))
            failed = f"step {step:,} could not be saved in {self._folder}: {disk.reason(error)}"
            raise errors.RunError(f"{failed}. The same command resumes from the last checkpoint.") from error

    def wait(self) -> None:
        """Wait until the newest save is on the disk. Raises RunError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._writing(self._step):
                pending.result()

    def check(self) -> None:
        """Raise RunError if the newest save has failed by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait for the newest save, and end the threads. Raises RunError if the save failed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            with contextlib.suppress(*FAILURES):  # `wait` has raised the same failure
                self._orbax.close()

    def resume(self, like: Any, step: int | None = None) -> tuple[int, Any] | None:
        """Return the step and the state of a checkpoint, on the mesh of `like`; None if there is no checkpoint.

        like: the tree, types and shardings of the state. step: the checkpoint to use; later ones are deleted. None: the
        newest. Raises UserError if the checkpoint is missing, damaged or holds other arrays than `like`, or if the
        processes see different checkpoints.
        """
        self.wait()
        newest = max(self.measured, default=-1)
        if not distributed.is_same(newest):
            raise errors.UserError(f"{self._folder}: the processes see different checkpoints. Use one shared disk.")
        if newest < 0:
            return None
        step = newest if step is None else step
        distributed.call_in_main(lambda: _verify(self._folder, step, self.measured))
        state = _restore(self._folder / str(step), like)
        self._delete([n for n in self.measured if n > step])
        self._delete(superfluous(self.measured, keep=self._keep, best=self._best))  # a killed run may leave too many
        return step, state


def _verify(folder: pathlib.Path, step: int, steps: Collection[int]) -> int:
    """Return the step. Raises UserError if its checkpoint is damaged; the message names the newest earlier one."""
    try:
        manifest.verify(folder / str(step))
    except errors.UserError as error:
        advice = f"There is no earlier checkpoint. Delete {folder} to start again from step 0."
        if earlier := [n for n in steps if n < step]:
            advice = f"Resume with --resume={max(earlier)}; in a study, delete {folder / str(step)}."
        raise errors.UserError(f"{error}. {advice}") from error
    return step


def superfluous(measured: Mapping[int, Mapping[str, float]], *, keep: int, best: Best) -> list[int]:
    """Return the steps that are neither among the newest `keep` nor the best by the metric `best`.

    If several steps are equally good, the newest is the best. measured: step -> metrics.
    """
    scores = sorted((score(values, best), step) for step, values in measured.items())
    best_steps = {step for value, step in scores[-1:] if value > -math.inf}
    return sorted(measured.keys() - best_steps - set(sorted(measured)[-keep:]))


def score(values: Mapping[str, float], best: Best) -> float:
    """Return the value of the metric, negated if less is better; -inf if it is missing or not finite."""
    value = values.get(best.metric, math.nan)
    if not math.isfinite(value):
        return -math.inf
    return -value if best.better == "less" else value


def newest(folder: pathlib.Path) -> int | None:
    """Return the step of the newest checkpoint in this folder, which may be missing; None if there is none."""
    with disk.reading(folder):
        return max(manifest.steps(folder), default=None)


def find_best(folder: pathlib.Path, best: Best) -> dict[str, Any] | None:
    """Return {"step": step, metric: value, ...} of the best checkpoint; None if none has a finite `best.metric`."""
    rows = ({"step": step, **manifest.metrics(folder / str(step))} for step in manifest.steps(folder))
    row = max(rows, key=lambda row: (score(row, best), row["step"]), default={})
    return row if score(row, best) > -math.inf else None


def choose_step(folder: pathlib.Path, best: Best, step: int | None, *, label: str = "") -> int:
    """Return the step of the checkpoint to open in a run's folder: `step`, or the best by `best`, or the newest.

    Raises UserError if there is no such checkpoint. label: the beginning of its message.
    """
    saves = folder / records.CHECKPOINTS
    steps, wanted = manifest.steps(saves), "checkpoint" if step is None else f"checkpoint of step {step}"
    if step is None and steps:
        step = (find_best(saves, best) or {"step": max(steps)})["step"]
        if step != max(steps):
            newest = f"the newest is {saves / str(max(steps))}"
            print(f"{folder}: opening step {step:,}, the best by {best.metric}; {newest}", flush=True)
    listed = ", ".join(map(str, sorted(steps))) or "none"
    errors.refuse((step not in steps, f"{label}{folder} has no {wanted}; its steps are: {listed}"))
    return step


def parameters(folder: pathlib.Path, step: int) -> dict:
    """Return the parameters of the checkpoint folder/step as numpy arrays. Raises UserError if it is damaged."""
    checkpoint, handler = folder.absolute() / str(step), ocp.PyTreeCheckpointHandler()
    manifest.verify(checkpoint)
    with disk.reading(checkpoint):
        tree = handler.metadata(checkpoint / manifest.STATE).tree["params"]
        like = {"params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)}
        plain = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), like)
        arguments = ocp.args.PyTreeRestore(item=like, restore_args=plain, partial_restore=True)
        return handler.restore(checkpoint / manifest.STATE, args=arguments)["params"]


def _restore(checkpoint: pathlib.Path, like: Any) -> Any:
    """Return the state of a verified checkpoint, sharded as `like`. Raises UserError if its arrays differ."""
    arrays = jax.eval_shape(_unwrap, like)
    needed = jax.tree.map(lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y.sharding), arrays, like)
    with disk.reading(checkpoint), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        saved = _describe_leaves(ocp.PyTreeCheckpointHandler().metadata(checkpoint / manifest.STATE).tree)
        expected = _describe_leaves(needed)
        for name in sorted(name for name, _ in saved.items() ^ expected.items()):
            has, needs = (leaves.get(name, "missing") for leaves in (saved, expected))
            fault = f"the checkpoint {checkpoint} has another model or optimiser than this config: {name} is {has}"
            remedy = "Use the config of this run, or another --workdir."
            raise errors.UserError(f"{fault} in the checkpoint, and {needs} in the config. {remedy}")
        state = reader.restore(checkpoint / manifest.STATE, args=ocp.args.StandardRestore(needed))
    return jax.tree.map(lambda x, y: jax.random.wrap_key_data(y) if _is_key(x) else y, like, state)


def _is_key(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _unwrap(tree: Any) -> Any:
    """Return the tree as it is saved: random keys replaced by their uint32 data."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _describe_leaves(tree: Any) -> dict[str, str]:
    """Return the dtype and shape of each leaf: {"params/head/G_CD": "float32 (3, 25)"}."""
    return {name: f"{leaf.dtype} {tuple(leaf.shape)}" for name, leaf in shapes.flat(tree).items()}


def digest(params: Any) -> str:
    """Return the SHA-256, in hexadecimal, of the names and bytes of all parameters, sorted by name."""
    leaves, total = shapes.flat(params), hashlib.sha256()
    for name in sorted(leaves):
        total.update(name.encode())
        total.update(np.ascontiguousarray(jax.device_get(leaves[name])).tobytes())
    return total.hexdigest()


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
