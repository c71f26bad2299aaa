"""Checkpoints with Orbax: written in the background, whole or not at all, and verified before they are used."""

import concurrent.futures
import contextlib
import errno
import hashlib
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.engine import disk, distributed, errors, manifest, mesh
from tfm import shapes

BETTER = {"loss": min, "accuracy": max, "explained": max}  # by the last part of a metric's name
# Devices that hold the same array each save a piece of it, cut off by a program that is compiled: too dear for small
# pieces. Orbax hands this on to nobody, and where it calls it otherwise, time is all that is lost.
ocp.type_handlers.get_type_handler(jax.Array)._min_slice_bytes_for_replica_parallel = 2**20


class Checkpoints:
    """The folder of a run's checkpoints, of which the newest `keep` and the best by the metric `best` ('': none) stay.

    With several processes each has one of these and calls all methods; the first of them writes manifests, renames and
    deletes. UserError where the folder cannot be used. What a run that was killed left half-done is removed, and said.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int, best: str = ""):
        self._folder, self._keep, self._best = folder.absolute(), keep, best
        self._main = distributed.main()
        try:
            if self._main:
                manifest.tidy(self._folder)
            steps = manifest.steps(self._folder)
            self._opened = os.open(self._folder, os.O_RDONLY) if self._main else -1
        except OSError as error:
            raise errors.UserError(f"{folder} cannot be used for checkpoints: {disk.reason(error)}") from error
        self.measured: dict[int, dict[str, float]] = {}  # what was, at the steps that are kept
        for step in steps:
            # A RunError where it cannot be read now: the best checkpoint could be taken for one too many.
            with contextlib.suppress(errors.UserError):  # it is said when the checkpoint is used
                self.measured[step] = {}
                self.measured[step] = manifest.read(self._folder / str(step), step=step)["metrics"]
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._under_way: tuple[int, concurrent.futures.Future] | None = None
        disk.quiet()

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None) -> None:
        """Copy the state to the host and write it in the background; a step already on disk is left as it is.

        Waits first for the save before, so that the memory never holds more than two copies of the state. RunError
        where that one failed, or this one cannot begin.
        """
        self.wait()
        if step in self.measured:
            return
        try:
            if self._main:
                self._check_folder()
                self._writing(step).mkdir()
            self._orbax.save(self._writing(step) / manifest.STATE, args=ocp.args.StandardSave(state))
        except disk.NOT_WRITTEN as error:
            raise self._failed(step, error) from error
        self.measured[step] = _finite(metrics or {})
        self._under_way = step, self._thread.submit(self._finish, step)

    def _finish(self, step: int) -> None:
        """In the background: wait for Orbax (in all processes), and make what it wrote a checkpoint."""
        self._orbax.wait_until_finished()
        if self._main:
            self._check_folder()
            manifest.write(self._writing(step), step=step, metrics=self.measured[step], versions=mesh.versions())
            self._writing(step).rename(self._folder / str(step))
            disk.flush(self._folder)
            self._remove_superfluous()

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Keep with the checkpoint of `step`, if there is one, what was measured behind its save; in the background.
        Where that fails, the next call that waits raises RunError."""
        _, before = self._under_way or (step, None)

        def note() -> None:
            if before is not None:
                before.result()
            self.measured[step] = _finite(metrics)
            if self._main:
                with contextlib.suppress(errors.UserError):  # it is said when the checkpoint is used
                    manifest.measured(self._folder / str(step), step=step, metrics=self.measured[step])
                self._remove_superfluous()

        if step in self.measured:
            self._under_way = step, self._thread.submit(note)

    def _remove_superfluous(self) -> None:
        for old in superfluous(self.measured, keep=self._keep, best=self._best):
            saved = self._folder / str(old)  # which is at no time there in part
            disk.remove(saved.rename(saved.with_name(saved.name + manifest.DELETING)))
            del self.measured[old]

    def _writing(self, step: int) -> pathlib.Path:
        return self._folder / f"{step}{manifest.WRITING}"

    def _check_folder(self) -> None:
        """FileNotFoundError where the folder has vanished, also where tensorstore has made the path anew."""
        if not self._folder.is_dir() or not os.path.samestat(os.fstat(self._opened), os.stat(self._folder)):
            raise FileNotFoundError(errno.ENOENT, "the folder was taken away")

    def _failed(self, step: int, error: BaseException) -> errors.RunError:
        self.measured.pop(step, None)
        ours = not isinstance(error, FileExistsError)
        if self._main and ours:
            shutil.rmtree(self._writing(step), ignore_errors=True)  # it may be what fills the disk
            try:
                self._check_folder()
            except OSError as vanished:
                error = vanished
                with contextlib.suppress(OSError):  # what tensorstore made, which is empty now
                    self._folder.rmdir()
                    self._folder.parent.rmdir()
        where = self._folder if ours else error.filename
        return errors.RunError(f"step {step:,} could not be saved in {where}: {disk.reason(error)}")

    def wait(self) -> None:
        """Return when the save under way is on the disk. Raises RunError where it failed."""
        step, future = self._under_way or (0, None)
        self._under_way = None
        if future is not None:
            try:
                future.result()
            except disk.NOT_WRITTEN as error:
                raise self._failed(step, error) from error

    def check(self) -> None:
        """Raise RunError where the save under way has failed by now."""
        if self._under_way is not None and self._under_way[1].done():
            self.wait()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._opened >= 0:
                with contextlib.suppress(OSError):  # of a drive that is gone
                    os.close(self._opened)
                self._opened = -1
            with contextlib.suppress(*disk.NOT_WRITTEN):  # what `wait` has told already
                self._orbax.close()

    def resume(self, like: Any, *, fall_back: bool) -> tuple[int, Any] | None:
        """The newest step, as process 0 finds it, and its state with the tree, types and layout of `like`, on whatever
        mesh that is now; None where there is no checkpoint.

        A damaged one is passed over, saying so, and put aside as <step>.damaged, with `fall_back` or where something is
        only missing; None too where that is so of the only one, and with `fall_back` of each. Else it is a UserError,
        as where it holds other arrays than `like`. One that cannot be read now (out of memory, a disk that fails) is a
        RunError in any case, and nothing is put aside.
        """
        self.wait()
        unshared = f"not every process sees the same checkpoints in {self._folder}: it must be one disk"
        if not distributed.same(newest(self._folder) or 0):
            raise errors.UserError(unshared)
        failures: dict[int, manifest.Damaged] = {}
        step = distributed.agree(self._newest_whole(failures, fall_back) if self._main else -1)
        if step >= 0:
            if not self._main and (damage := manifest.damage(self._folder / str(step), step=step)):
                raise errors.UserError(f"{unshared} ({damage})")
            state = _restored(self._folder / str(step), like)
        instead = f"step {step:,} is taken instead" if step >= 0 else "without another one the run begins anew"
        newer = sorted((bad for bad in self.measured if bad > step), reverse=True)
        for bad in newer:
            del self.measured[bad]
        with disk.writing(self._folder):
            for bad in newer if self._main else ():
                print(f"{failures.get(bad)}; it is put aside, and {instead}", flush=True)
                manifest.put_aside(self._folder / str(bad))
            if self._main and step >= 0:
                self._remove_superfluous()  # what a run that was killed behind its last save still had to
        return (step, state) if step >= 0 else None

    def _newest_whole(self, failures: dict[int, manifest.Damaged], fall_back: bool) -> int:
        """The newest step that is what was saved, -1 where the run may begin anew; `failures` gets the newer ones."""
        for step in sorted(self.measured, reverse=True):
            damage = manifest.damage(self._folder / str(step), step=step)
            if damage is None:
                return step
            if not (fall_back or isinstance(damage, manifest.Incomplete)):
                raise _refusal(damage, len(self.measured))
            failures[step] = damage
        first = next(iter(failures.values()), None)
        if not all(isinstance(damage, manifest.Incomplete) for damage in failures.values()):
            raise manifest.Damaged(f"no checkpoint is valid, choose another --workdir; the newest: {first}")
        if len(failures) > 1 and not fall_back:  # one alone is a first save that was cut off; more is work to be lost
            raise errors.UserError(
                f"no checkpoint is complete; the newest: {first}; --resume=latest_valid begins anew, at step 0"
            )
        return -1


def _refusal(damage: manifest.Damaged, many: int) -> errors.UserError:
    """Of the newest of so many checkpoints, with what to do."""
    earlier = "--resume=latest_valid goes on from the newest valid one before it"
    return errors.UserError(f"{damage}; {earlier if many > 1 else 'there is no other one: choose another --workdir'}")


def check_best(best: str, *, key: str = "train.keep_best") -> None:
    """UserError unless the value of this setting is '' or a metric of which one knows what is better."""
    if best and best.rpartition("/")[2] not in BETTER:
        raise errors.UserError(f'{key} = "{best}" must be a metric that ends in {", ".join(BETTER)}')


def superfluous(measured: Mapping[int, Mapping[str, float]], *, keep: int, best: str) -> list[int]:
    """Of the steps, with what was measured at each, those that are neither among the newest `keep` nor the best one:
    the newest of those that are equally good."""
    keepers = set(sorted(measured)[-keep:])
    scores = {step: score(values, best) for step, values in measured.items()}
    if max(scores.values(), default=-math.inf) > -math.inf:
        keepers.add(max(scores, key=lambda step: (scores[step], step)))
    return sorted(measured.keys() - keepers)


def score(values: Mapping[str, float], metric: str) -> float:
    """How good an evaluation is, larger for better; -inf where it says nothing about the metric."""
    value = values.get(metric, math.nan)
    if not math.isfinite(value):
        return -math.inf
    return -value if BETTER[metric.rpartition("/")[2]] is min else value


def newest(folder: pathlib.Path) -> int | None:
    """The step of the newest checkpoint in this folder, which may be absent, or None. UserError if it is unreadable."""
    try:
        return max(manifest.steps(folder), default=None)
    except OSError as error:
        raise errors.UserError(f"{folder} cannot be read: {disk.reason(error)}") from error


def best(folder: pathlib.Path, metric: Any) -> dict[str, Any] | None:
    """Return the step of the best checkpoint by this metric, with what was measured at it; None if none tells."""
    if not isinstance(metric, str) or metric.rpartition("/")[2] not in BETTER:
        return None
    found = []
    for step in manifest.steps(folder):
        with contextlib.suppress(errors.UserError):  # it is damaged, which is told if it is used
            found.append({"step": step, **manifest.read(folder / str(step), step=step)["metrics"]})
    found = [one for one in found if score(one, metric) > -math.inf]
    return max(found, key=lambda one: (score(one, metric), one["step"]), default=None)


def whole(folder: pathlib.Path, steps: int, *, fall_back: bool) -> bool:
    """Whether the newest checkpoint of a run that is finished after so many steps is what was saved, or there is none.

    False where the last one was put aside, and is not made again yet, or lacks something, and there is an earlier one.
    Without `fall_back`, one that is otherwise damaged, or missing behind earlier ones, is a UserError.
    """
    step = newest(folder)
    if step is None:
        return True
    if step < steps:
        if not (fall_back or (folder / f"{steps}{manifest.DAMAGED}").exists()):
            raise errors.UserError(
                f"{folder} lacks the checkpoint of step {steps:,}, with which this run was finished: "
                f"--resume=latest_valid goes on from step {step:,}"
            )
        return False
    damage, many = manifest.damage(folder / str(step), step=step), len(manifest.steps(folder))
    if damage and not (fall_back or (many > 1 and isinstance(damage, manifest.Incomplete))):
        raise _refusal(damage, many)
    return damage is None


def parameters(folder: pathlib.Path, step: int) -> dict:
    """The parameters saved at `step`, as numpy arrays. UserError: it is damaged. RunError: it cannot be read now."""
    saved, handler = folder.absolute() / str(step), ocp.PyTreeCheckpointHandler()
    if damage := manifest.damage(saved, step=step):
        raise errors.UserError(f"{damage}; take that folder away to use an earlier one")
    with _reading(saved):
        tree = handler.metadata(saved / manifest.STATE).tree["params"]
        like = {"params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)}
        plain = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), like)
        arguments = ocp.args.PyTreeRestore(item=like, restore_args=plain, partial_restore=True)
        return handler.restore(saved / manifest.STATE, args=arguments)["params"]


def _restored(saved: pathlib.Path, like: Any) -> Any:
    """The state of a checkpoint that is verified, laid out as `like`. UserError where it holds other arrays."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with _reading(saved):
        there = _arrays(ocp.PyTreeCheckpointHandler().metadata(saved / manifest.STATE).tree)
        here = _arrays(abstract)
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise errors.UserError(
                    f"the checkpoint {saved} is of another model or optimiser:"
                    f" {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
                )
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            return reader.restore(saved / manifest.STATE, args=ocp.args.StandardRestore(abstract))


def _arrays(tree: Any) -> dict[str, str]:
    """{'params/head/G_CD': 'float32 (3, 25)'}; a random key by the numbers in it, as Orbax has it."""
    leaves = shapes.flat(tree)
    for name, leaf in leaves.items():
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[name] = jax.eval_shape(jax.random.key_data, leaf)
    return {name: f"{leaf.dtype} {tuple(leaf.shape)}" for name, leaf in leaves.items()}


@contextlib.contextmanager
def _reading(saved: pathlib.Path) -> Iterator[None]:
    """Within this, a failure is a RunError."""
    try:
        yield
    except (*disk.NOT_WRITTEN, KeyError, TypeError, MemoryError) as error:  # also what they cannot make sense of
        reason = disk.reason(error)
        raise errors.RunError(f"the checkpoint {saved} is not damaged, but could not be read: {reason}") from error


def digest(params: Any) -> str:
    """sha256 over the names and bytes of all parameters, in sorted order."""
    leaves, total = shapes.flat(params), hashlib.sha256()
    for name in sorted(leaves):
        total.update(name.encode())
        total.update(np.ascontiguousarray(jax.device_get(leaves[name])).tobytes())
    return total.hexdigest()


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
