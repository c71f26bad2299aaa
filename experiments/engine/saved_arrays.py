"""The arrays in one checkpoint, read by Orbax only after they were found to be what was saved and what is wanted."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from experiments.engine import disk, disk_errors, errors, manifest
from tfm import shapes

OLD = "default"  # where the arrays lay before there was a manifest
STATE = "state"
_OF_MEMORY = (MemoryError, jax.errors.JaxRuntimeError)  # the host's or a device's; never what a disk says


def restored(saved: pathlib.Path, like: Any) -> Any:
    """The state in the folder of a checkpoint that is `verified`, with the tree, types and layout of `like`.

    Raises manifest.Damaged (a UserError; in the old format), RunError where what is whole cannot be read now (out of
    memory, a disk that fails), and UserError where it holds other arrays than `like`.
    """
    inside = _inside(saved)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with _reading(saved, inside):
        _check(saved, _described(ocp.PyTreeCheckpointHandler().metadata(inside).tree), _described(abstract))
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            return reader.restore(inside, args=ocp.args.StandardRestore(abstract))


def parameters(saved: pathlib.Path, step: int) -> dict:
    """The parameters in the folder of the checkpoint of `step`, as numpy arrays. Raises as `verified`."""
    inside, handler = verified(saved, step), ocp.PyTreeCheckpointHandler()
    with _reading(saved, inside):
        tree = handler.metadata(inside).tree["params"]
        like = {"params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)}
        plain = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), like)
        wanted = ocp.args.PyTreeRestore(item=like, restore_args=plain, partial_restore=True)
        return handler.restore(inside, args=wanted)["params"]


def verified(saved: pathlib.Path, step: int) -> pathlib.Path:
    """Where Orbax put the arrays, after every file was found to be what was saved.

    Raises manifest.Damaged (a UserError), and RunError where that cannot be known now.
    """
    inside = _inside(saved)
    if inside.name == STATE:
        manifest.verify(saved, step=step)
    else:
        with _reading(saved, inside):
            _read_through(inside)
            ocp.PyTreeCheckpointHandler().metadata(inside)
    return inside


def _inside(saved: pathlib.Path) -> pathlib.Path:
    """Where Orbax put the arrays."""
    new = not (saved / OLD).is_dir() or any((saved / name).exists() for name in (STATE, manifest.FILE))
    return saved / (STATE if new else OLD)


def _read_through(inside: pathlib.Path) -> None:
    """ValueError where the bytes of an array are not all there (of a checkpoint without a manifest).

    Orbax reads many at once; after the first that fails, the others write tracebacks of an event loop that is closed.
    """
    for file in inside.rglob("*"):
        if not file.is_dir():
            disk.opened(file).close()  # tensorstore would wait for a pipe
    base = {"driver": "file", "path": f"{inside}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    for name in store.list().result():
        store.read(name).result()


@contextlib.contextmanager
def _reading(saved: pathlib.Path, inside: pathlib.Path) -> Iterator[None]:
    """Within this, a failure is Damaged in the old format only, where nothing else tells of damage; else a RunError."""
    try:
        yield
    except (*disk_errors.NOT_READ, MemoryError) as error:
        if inside.name == OLD and not isinstance(error, _OF_MEMORY):
            raise manifest.Damaged(f"the checkpoint {saved} is damaged ({type(error).__name__})") from error
        raise errors.RunError(
            f"the checkpoint {saved} is not damaged, but could not be read: {disk_errors.reason(error)}"
        ) from error


def _described(tree: Any) -> dict[str, str]:
    """{'params/head/G_CD': 'float32 (3, 25)'}; a random key by the numbers in it, as Orbax has it."""
    leaves = {"/".join(shapes.names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    for name, leaf in leaves.items():
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[name] = jax.eval_shape(jax.random.key_data, leaf)
    return {name: f"{leaf.dtype} {tuple(leaf.shape)}" for name, leaf in leaves.items()}


def _check(saved: pathlib.Path, there: dict[str, str], here: dict[str, str]) -> None:
    """UserError, naming the first that differs, where a checkpoint holds other arrays than are wanted."""
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise errors.UserError(
                f"the checkpoint {saved} is of another model or optimiser:"
                f" {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
            )
