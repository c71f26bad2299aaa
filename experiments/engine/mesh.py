"""Devices: the only file that arranges them and uses `shard_map` (distributed.py: several processes)."""

import contextlib
import functools
import importlib.metadata
import math
import os
import pathlib
import platform
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.engine import distributed, errors
from tfm import layout as layouts, shapes

DATA, FSDP, TENSOR, SEQUENCE = AXES = ("data", "fsdp", "tensor", "sequence")
SEED = "seed"  # an axis before these, where several runs are trained side by side (studies/vmapped_runs.py)
BATCH = (DATA, FSDP)  # the axes over which the examples of a batch are spread
WHOLE = PartitionSpec()  # every device holds all of it
# Flags of libtpu (0.0.23, 0.0.50). KiB beside the matrix units for one fusion, twice the usual: 3 % less is estimated
# for a step of GPT-2's 124 M (v5e-1; with twice as many again, as long as with the usual number).
MEMORY = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
# And for what passes along an axis of the mesh; docs/tpu.md has what they do.
BESIDE = {
    FSDP: (
        "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions",  # weights pass beside norms: a block begins so
        "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call",  # and beside the kernels of attention
    ),
    TENSOR: (  # sums of the backward pass are started, and done beside the products of weights' gradients
        "xla_enable_async_all_reduce",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    ),
}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")  # those that can change a number


@functools.cache
def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


@functools.cache
def processor() -> str:
    """The model of this machine's processor, as Linux tells it, or what Python knows of it."""
    with contextlib.suppress(OSError):
        if model := re.search(r"^model name\s*:\s*(.+)", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return model[1]
    return platform.processor() or platform.machine()


def shape(mesh: Mesh) -> str:
    """The axes that spread something, with their sizes."""
    return ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1 or axis == DATA)


def describe(mesh: Mesh, chips: Sequence[Any] | None = None) -> str:
    """Return the versions, the backend and the mesh in one line. chips: those of `make`, if not JAX's devices."""
    software = ", ".join(f"{name} {versions()[name]}" for name in ("jax", "flax", "optax"))
    used = f"{mesh.size} of {len(jax.devices() if chips is None else chips)} devices"
    kinds = [mesh.devices.flat[0].device_kind, *([processor()] if chips is None else [])]
    kind = f"{backend(mesh)} ({', '.join(kind for kind in kinds if kind != 'cpu')})"
    return f"Python {platform.python_version()}, {software} on {kind}: {used}, mesh {shape(mesh)}"


def backend(mesh: Mesh) -> str:
    """cpu, gpu or tpu: what programs for this mesh are compiled for, whatever else the machine has."""
    return mesh.devices.flat[0].platform


def make(
    *,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    seed: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Return a mesh with the axes data, fsdp, tensor and sequence, before them seed if it is not 1. One size may be -1:
    all remaining devices. devices: None for those of JAX. UserError if the sizes do not fit."""
    devices = jax.devices() if devices is None else devices
    sizes = ({} if seed == 1 else {SEED: seed}) | {DATA: data, FSDP: fsdp, TENSOR: tensor, SEQUENCE: sequence}
    available = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    wrong = [axis for axis, n in sizes.items() if n < 1 and n != -1]
    rest = [axis for axis, n in sizes.items() if n == -1]
    if wrong or len(rest) > 1:
        what = ", ".join(f"mesh.{axis} = {sizes[axis]}" for axis in wrong or rest)
        raise errors.UserError(f"{what}: choose at least 1, or for one axis -1, what is left of {available}")
    named = math.prod(n for n in sizes.values() if n != -1)
    named_sizes = " x ".join(f"mesh.{axis} = {n}" for axis, n in sizes.items() if n not in (1, -1)) or "mesh.data = 1"
    if named > len(devices) or (rest and len(devices) % named):
        raise errors.UserError(f"{named_sizes} does not fit JAX's devices, {available}")
    sizes |= {axis: len(devices) // named for axis in rest}
    used = devices[: math.prod(sizes.values())]
    if len(used) < len(devices) and jax.process_count() > 1:
        raise errors.UserError(
            f"{named_sizes} takes {len(used)} of {len(devices)} devices: several processes must use all"
        )
    types = (AxisType.Auto,) * len(sizes)  # the default changed between JAX releases
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=used)


def layout(mesh: Mesh, *, W: int = 0) -> layouts.Layout:
    """How a model of W words (0: it has none) is shared over this mesh; words are, where they divide evenly."""
    named = {axis: axis if mesh.shape[axis] > 1 else None for axis in (FSDP, TENSOR, SEQUENCE)}
    vocab = TENSOR if named[TENSOR] and W and W % mesh.shape[TENSOR] == 0 else None
    return layouts.Layout(batch=BATCH, vocab=vocab, platform=backend(mesh), **named)


def check_layout(mesh: Mesh, layout: layouts.Layout, params: Any, batch: dict) -> None:
    """UserError where the letters of the parameters, or the tokens of a batch, do not divide evenly over the mesh."""
    for axis in (FSDP, TENSOR, SEQUENCE):
        if mesh.shape[axis] > 1 and getattr(layout, axis) is None:
            raise errors.UserError(
                f"this experiment is not shared over mesh.{axis}, which must be 1 (mesh.data need not)"
            )
    shared = []  # what, its size, and the axis over which it is shared
    specs = jax.tree.leaves(shapes.specs(params, layout.rules), is_leaf=is_spec)
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True):
        sizes = zip(shapes.letters(path), leaf.shape, spec, strict=False)
        shared += [(f"{letter} = {n} ({'/'.join(shapes.names(path))})", n, axis) for letter, n, axis in sizes if axis]
    for name, array in batch.items():
        if "N" in shapes.letters(name):
            n = array.shape[shapes.letters(name).index("N")]
            shared.append((f"a sequence of N = {n} tokens ({name})", n, SEQUENCE))
    for what, n, axis in shared:
        if n % mesh.shape[axis]:
            raise errors.UserError(f"{what} does not divide evenly over mesh.{axis} = {mesh.shape[axis]}")


def check_batch(mesh: Mesh, name: str, *, batch: int, parts: int = 1) -> None:
    """UserError unless a batch divides evenly over the devices (and, there, over the parts of an accumulation)."""
    n = math.prod(mesh.shape[axis] for axis in BATCH)
    if batch < 1 or batch % (n * parts):
        over = f"{n} devices" + (f" x {parts} accumulated parts" if parts > 1 else "")
        fewer = [d for d in range(1, mesh.shape[DATA]) if batch > 0 and batch % (d * mesh.shape[FSDP] * parts) == 0]
        remedy = f", or fewer devices with mesh.data = {fewer[-1]}" if fewer else ""
        raise errors.UserError(
            f"{name} = {batch} does not divide evenly over {over}: choose a multiple of {n * parts}{remedy}"
        )


def total(tree: Any, mesh: Mesh) -> Any:
    """Inside `sharded`: the sums over all devices that have different examples or tokens, whatever each has of them."""
    tree = jax.tree.map(lambda x: jax.lax.psum(x, BATCH), tree)
    return jax.tree.map(lambda x: jax.lax.psum(x, SEQUENCE), tree) if mesh.shape[SEQUENCE] > 1 else tree


def sharded(function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any = WHOLE) -> Callable:
    """`function` on every device, each with its part of the arguments: data parallel, FSDP, tensor and sequence
    parallel, as the specs say. Collectives inside are explicit and checked."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def side_by_side(mesh: Mesh) -> bool:
    """Whether several runs are better computed in the same operations (vmap) than one after the other (lax.map).

    Not on a CPU, where batched products of small matrices take longer than as many single ones: the step of five seeds
    of configs/vit.py on two cores, 1.75 times as long for each seed as alone, and 0.91 times one after the other.
    """
    if SEED in mesh.axis_names and jax.__version_info__ < (0, 10):  # vmap inside shard_map takes types for wrong
        return False
    return backend(mesh) != "cpu"


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """`compiler_options` of jax.jit for training on TPU chips: those that this libtpu knows, of others it would compile
    nothing. What XLA_FLAGS or LIBTPU_INIT_ARGS say of one stays."""
    given = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    if backend(mesh) != "tpu":
        return {}
    axes = (axis for axis in BESIDE if mesh.shape.get(axis, 1) > 1)
    flags = MEMORY | {flag: "true" for axis in axes for flag in BESIDE[axis]}
    return {flag: value for flag, value in flags.items() if flag not in given and _known({flag: value}, mesh)}


def _known(options: dict[str, str], mesh: Mesh) -> bool:
    """Whether the compiler has such options: it is given them with a program of no work."""
    scalar = jax.ShapeDtypeStruct((), np.float32, sharding=replicated(mesh))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


def keys(key: jax.Array, n: int) -> jax.Array:
    """Inside `sharded`: a random key for each of this device's n examples, from its place in the whole batch, so that
    it does not depend on how many devices share that."""
    zero = 0 * jax.random.key_data(key)[0].astype(np.int32)  # differs, as far as types say, where runs do (JAX 0.8)
    first = jax.lax.axis_index(BATCH) * n + zero
    return jax.vmap(lambda i: jax.random.fold_in(key, first + i))(np.arange(n))


def batch_specs(mesh: Mesh, batch: dict) -> dict:
    """By the letters of the names: examples B over data and fsdp, tokens N over sequence; the rest is whole."""
    axis = {"B": BATCH, "N": SEQUENCE if mesh.shape[SEQUENCE] > 1 else None}
    return {name: PartitionSpec(*map(axis.get, shapes.letters(name) or "B")) for name in batch}


def place_batch(mesh: Mesh, batch: dict) -> dict:
    """The batch on the devices, its tokens dealt out like cards to those that share a sequence (tfm/layout.py)."""
    return distributed.put(_striped(mesh, batch), _places(mesh, batch))


def place_rows(mesh: Mesh, batches: Sequence[dict]) -> dict:
    """As `place_batch`, the batches of several runs, which become the rows of the same arrays."""
    each = [_striped(mesh, batch) for batch in batches]
    rows = {name: np.stack([batch[name] for batch in each]) for name in each[0]}
    return distributed.put(rows, _places(mesh, each[0], rows=True))


def abstract_batch(mesh: Mesh, batch: dict, *, rows: int = 0) -> dict:
    """Shapes, types and places of what `place_batch`, or `place_rows` of so many runs, makes of such a batch."""
    shape = jax.eval_shape(lambda batch: batch, batch)  # types as JAX has them, which need not be numpy's
    leading, places = (rows,) * bool(rows), _places(mesh, batch, rows=bool(rows))
    return {name: jax.ShapeDtypeStruct(leading + x.shape, x.dtype, sharding=places[name]) for name, x in shape.items()}


def _places(mesh: Mesh, batch: dict, *, rows: bool = False) -> dict:
    specs = batch_specs(mesh, batch)
    return {name: NamedSharding(mesh, of_rows(mesh, spec) if rows else spec) for name, spec in specs.items()}


def of_rows(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """Where arrays lie of which each run has one, as rows of another array."""
    return PartitionSpec(SEED if SEED in mesh.axis_names else None, *spec)


def _striped(mesh: Mesh, batch: dict) -> dict:
    """Of P devices that share a sequence, the tokens 0, P, 2 P, ..., then 1, P + 1, ...: the parts of one each."""
    striped = dict(batch)
    for name, x in batch.items():
        i = shapes.letters(name).find("N")
        if i >= 0 and mesh.shape[SEQUENCE] > 1:
            cut = x.reshape(*x.shape[:i], -1, mesh.shape[SEQUENCE], *x.shape[i + 1 :])
            striped[name] = cut.swapaxes(i, i + 1).reshape(x.shape)
    return striped


def shardings(mesh: Mesh, tree: Any, layout: layouts.Layout) -> Any:
    """Where the leaves of parameters, or of a state with them, lie: by the letters of their names."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), shapes.specs(tree, layout.rules), is_leaf=is_spec)


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def replicated(mesh: Mesh) -> NamedSharding:
    """The layout of what every device holds whole."""
    return NamedSharding(mesh, WHOLE)
