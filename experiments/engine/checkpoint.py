"""Checkpoints with Orbax: written in the background, restored onto whatever mesh the run has now."""

import hashlib
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from experiments.engine import errors
from tfm import shapes


class Checkpoints:
    """The folder of a run's checkpoints, one for each step saved; the newest `keep` are kept."""

    def __init__(self, folder: pathlib.Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """The newest step on disk."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Copy the state to the host and write it in the background; a step already on disk is left as it is."""
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at `step`, with the tree, types and layout of `like`."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        """Wait for writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()


def newest(folder: pathlib.Path) -> int | None:
    """The step of the newest whole checkpoint in this folder of checkpoints, which may be absent; None without one."""
    return max(ocp.utils.checkpoint_steps(folder.absolute()), default=None)


def parameters(folder: pathlib.Path, step: int) -> dict:
    """The parameters of the state saved at `step`, and nothing else of it, as numpy arrays, whatever devices it had.

    Raises UserError where the checkpoint is damaged.
    """
    saved, handler = folder.absolute() / str(step) / "default", ocp.PyTreeCheckpointHandler()
    try:
        _read_through(saved)
        tree = handler.metadata(saved).tree["params"]
        like = {"params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)}
        plain = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), like)
        wanted = ocp.args.PyTreeRestore(item=like, restore_args=plain, partial_restore=True)
        return handler.restore(saved, args=wanted)["params"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.UserError(f"the checkpoint {saved.parent} is damaged ({type(error).__name__})") from error


def _read_through(saved: pathlib.Path) -> None:
    """ValueError where the bytes of a parameter are not all there.

    Orbax reads many at once; after the first that fails, the others write tracebacks of an event loop that is closed.
    """
    base = {"driver": "file", "path": f"{saved}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    for name in store.list().result():
        if name.startswith(b"params."):
            store.read(name).result()


def digest(params: Any) -> str:
    """sha256 over the names and bytes of all parameters, in sorted order."""
    leaves = {"/".join(shapes.names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    total = hashlib.sha256()
    for name in sorted(leaves):
        total.update(name.encode())
        total.update(np.ascontiguousarray(jax.device_get(leaves[name])).tobytes())
    return total.hexdigest()
