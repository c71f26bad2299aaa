"""Device meshes: only this file arranges devices and uses `shard_map` (distributed.py: several processes)."""

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

from experiments.config import errors
from experiments.devices import distributed
from tfm import layout as layouts, shapes

DATA, FSDP, TENSOR, SEQUENCE = AXES = ("data", "fsdp", "tensor", "sequence")
SEED = "seed"  # an additional first axis, if several runs are trained together (studies/vmapped_runs.py)
BATCH = (DATA, FSDP)  # the axes that shard the examples of a batch
WHOLE = PartitionSpec()  # the spec of a replicated array
# Compiler options of libtpu (0.0.23, 0.0.50): the on-chip memory (VMEM, in KiB) of one fusion, twice the default. On
# v5e-1 the estimated step is 3 % shorter for GPT-2 (124 M), and 13 % for configs/colab_v5e.py (docs/tpu.md).
MEMORY = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")  # that can change a number


@functools.cache
def versions() -> dict[str, str]:
    """Return {package: version} of the packages on which the numbers of a run can depend."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


@functools.cache
def processor() -> str:
    """Return the model name of this machine's processor, or its kind, such as "x86_64", if the name is unknown."""
    with contextlib.suppress(OSError):
        if model := re.search(r"^model name\s*:\s*(.+)", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return model[1]
    return platform.processor() or platform.machine()


def shape(mesh: Mesh) -> str:
    """Return the sizes of the axis data and of other axes with more than one device, as "data=4, tensor=2"."""
    return ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1 or axis == DATA)


def describe(mesh: Mesh, chips: Sequence[Any] | None = None) -> str:
    """Return the versions, the backend and the mesh in one line. chips: the devices to compile for; None: JAX's."""
    software = ", ".join(f"{name} {versions()[name]}" for name in ("jax", "flax", "optax"))
    used = f"{mesh.size} of {len(jax.devices() if chips is None else chips)} devices"
    kinds = [mesh.devices.flat[0].device_kind, *([processor()] if chips is None else [])]
    kind = f"{backend(mesh)} ({', '.join(kind for kind in kinds if kind != 'cpu')})"
    return f"Python {platform.python_version()}, {software} on {kind}: {used}, mesh {shape(mesh)}"


def backend(mesh: Mesh) -> str:
    """Return the platform that programs for this mesh are compiled for: cpu, gpu or tpu."""
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
    """Return a mesh with the axes data, fsdp, tensor and sequence, and a first axis `seed` if its size is not 1.

    One size may be -1: all remaining devices. devices: None for JAX's. Raises UserError if the sizes do not fit.
    """
    devices = jax.devices() if devices is None else devices
    sizes = ({} if seed == 1 else {SEED: seed}) | {DATA: data, FSDP: fsdp, TENSOR: tensor, SEQUENCE: sequence}
    available = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    invalid = [axis for axis, n in sizes.items() if n < 1 and n != -1]
    remaining = [axis for axis, n in sizes.items() if n == -1]
    if invalid or len(remaining) > 1:
        values = ", ".join(f"mesh.{axis} = {sizes[axis]}" for axis in invalid or remaining)
        raise errors.UserError(
            f"{values}: choose at least 1, or -1 on one axis for the remaining devices of {available}"
        )
    product = math.prod(n for n in sizes.values() if n != -1)
    named_sizes = " x ".join(f"mesh.{axis} = {n}" for axis, n in sizes.items() if n not in (1, -1)) or "mesh.data = 1"
    total = len(devices)
    used = total if remaining else product
    errors.refuse(
        (
            product > total or (remaining and total % product),
            f"{named_sizes} does not fit JAX's devices, {available}. Choose sizes with a product that divides {total}",
        ),
        (used < total and jax.process_count() > 1, f"{named_sizes} must use all {total} devices of several processes"),
    )
    sizes |= {axis: total // product for axis in remaining}
    types = (AxisType.Auto,) * len(sizes)  # the default changed between JAX releases
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices[:used])


def layout(mesh: Mesh, *, W: int = 0) -> layouts.Layout:
    """Return the layout of a model on this mesh.

    W: the vocabulary size. If mesh.tensor divides W, the vocabulary is sharded; 0: it is not.
    """
    axes = {axis: axis if mesh.shape[axis] > 1 else None for axis in (FSDP, TENSOR, SEQUENCE)}
    vocab = TENSOR if axes[TENSOR] and W and W % mesh.shape[TENSOR] == 0 else None
    return layouts.Layout(batch=BATCH, vocab=vocab, platform=backend(mesh), **axes)


def check_layout(mesh: Mesh, layout: layouts.Layout, params: Any, batch: dict) -> None:
    """Raise UserError if the parameters, or the tokens of a batch, do not divide evenly over the mesh.

    Also raise UserError if the mesh has several devices on an axis that the layout does not use.
    """
    for axis in (FSDP, TENSOR, SEQUENCE):
        if mesh.shape[axis] > 1 and getattr(layout, axis) is None:
            raise errors.UserError(
                f"mesh.{axis} = {mesh.shape[axis]} must be 1: this experiment supports mesh.data only"
            )
    shared = []  # (description, size, mesh axis)
    specs = jax.tree.leaves(shapes.specs(params, layout.rules), is_leaf=is_spec)
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True):
        sizes = zip(shapes.letters(path), leaf.shape, spec, strict=False)
        shared += [(f"{letter} = {n} ({'/'.join(shapes.names(path))})", n, axis) for letter, n, axis in sizes if axis]
    for name, array in batch.items():
        if "N" in shapes.letters(name):
            n = array.shape[shapes.letters(name).index("N")]
            shared.append((f"a sequence of N = {n} tokens ({name})", n, SEQUENCE))
    for description, n, axis in shared:
        if n % mesh.shape[axis]:
            raise errors.UserError(
                f"{description} does not divide evenly over mesh.{axis} = {mesh.shape[axis]}. Set mesh.{axis} to a "
                f"divisor of {n}"
            )


def check_batch(mesh: Mesh, name: str, *, batch: int, microbatches: int = 1) -> None:
    """Raise UserError unless a batch divides evenly over devices and microbatches. name: the setting."""
    n = math.prod(mesh.shape[axis] for axis in BATCH)
    if batch < 1 or batch % (n * microbatches):
        shards = f"{n} devices" + (f" x {microbatches} microbatches" if microbatches > 1 else "")
        multiple = mesh.shape[FSDP] * microbatches
        fewer = [d for d in range(1, mesh.shape[DATA]) if batch > 0 and batch % (d * multiple) == 0]
        remedy = f", or fewer devices with mesh.data = {fewer[-1]}" if fewer else ""
        raise errors.UserError(
            f"{name} = {batch} does not divide evenly over {shards}. Choose a multiple of {n * microbatches}{remedy}"
        )


def total(tree: Any, mesh: Mesh) -> Any:
    """Return the sums over all devices that hold different examples or tokens. Call this inside `sharded`."""
    for axes in (BATCH, SEQUENCE) if mesh.shape[SEQUENCE] > 1 else (BATCH,):
        # Leaf by leaf: JAX 0.7.2 cannot differentiate the psum of a tree.
        tree = jax.tree.map(functools.partial(jax.lax.psum, axis_name=axes), tree)
    return tree


def sharded(function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any = WHOLE) -> Callable:
    """Return the shard_map of a function: each device calls it with its shard of the arguments, given by the specs.

    This covers data parallelism, FSDP, tensor and sequence parallelism. Collectives inside are explicit and checked.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def side_by_side(mesh: Mesh) -> bool:
    """Return True if several runs are faster vectorised (vmap) than in sequence (lax.map).

    On a CPU they are slower, because batched products of small matrices take longer than single ones. For five seeds of
    configs/vit.py on two cores, the step of one seed takes 1.75 times as long with vmap as alone, 0.91 with lax.map.
    With JAX before 0.10, the result is False also for a mesh with an axis `seed`, where vmap fails.
    """
    if SEED in mesh.axis_names and jax.__version_info__ < (0, 10):  # vmap inside shard_map fails a type check
        return False
    return backend(mesh) != "cpu"


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Return the `compiler_options` of jax.jit for training on TPUs, without options unknown to this libtpu.

    Options that the user has set in XLA_FLAGS or LIBTPU_INIT_ARGS are omitted. On other platforms the result is {}.
    """
    if backend(mesh) != "tpu":
        return {}
    user_flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    return {flag: value for flag, value in MEMORY.items() if flag not in user_flags and _is_known({flag: value}, mesh)}


def _is_known(options: dict[str, str], mesh: Mesh) -> bool:
    """Return True if an empty program compiles with these options."""
    scalar = jax.ShapeDtypeStruct((), np.float32, sharding=replicated(mesh))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


def keys(key: jax.Array, n: int) -> jax.Array:
    """Return a random key for each of this device's n examples. Call this inside `sharded`.

    An example's key depends on its place in the global batch, and so not on the number of devices.
    """
    # The zero has the type of `key`, which varies over the runs of a study: JAX 0.8 requires equal types.
    zero = 0 * jax.random.key_data(key)[0].astype(np.int32)
    first = jax.lax.axis_index(BATCH) * n + zero
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first + np.arange(n))


def batch_specs(mesh: Mesh, batch: dict) -> dict:
    """Return the PartitionSpecs of a batch: examples B over data and fsdp, tokens N over sequence."""
    axis = {"B": BATCH, "N": SEQUENCE if mesh.shape[SEQUENCE] > 1 else None}
    return {name: PartitionSpec(*map(axis.get, shapes.letters(name) or "B")) for name in batch}


def place_batch(mesh: Mesh, batch: dict) -> dict:
    """Place the batch on the devices. Each of P devices that share a sequence has every P-th token (tfm/layout.py)."""
    return distributed.put(_stripe(mesh, batch), _batch_shardings(mesh, batch))


def place_rows(mesh: Mesh, batches: Sequence[dict]) -> dict:
    """Place the batches of several runs on the devices, as rows of the same arrays."""
    striped = [_stripe(mesh, batch) for batch in batches]
    rows = {name: np.stack([batch[name] for batch in striped]) for name in striped[0]}
    return distributed.put(rows, _batch_shardings(mesh, striped[0], rows=True))


def abstract_batch(mesh: Mesh, batch: dict, *, rows: int = 0) -> dict:
    """Return shapes, dtypes and shardings of the result of `place_batch`; with `rows` runs, that of `place_rows`."""
    shape = jax.eval_shape(lambda batch: batch, batch)  # JAX's dtypes, which may differ from NumPy's
    leading, places = (rows,) * bool(rows), _batch_shardings(mesh, batch, rows=bool(rows))
    return {name: jax.ShapeDtypeStruct(leading + x.shape, x.dtype, sharding=places[name]) for name, x in shape.items()}


def _batch_shardings(mesh: Mesh, batch: dict, *, rows: bool = False) -> dict:
    """Return the sharding of each array of a batch. rows: the arrays have a first axis with a row for each run."""
    specs = batch_specs(mesh, batch)
    return {name: NamedSharding(mesh, add_row_axis(mesh, spec) if rows else spec) for name, spec in specs.items()}


def add_row_axis(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """Return the spec with a first axis added, one row for each run, divided by the axis "seed" if the mesh has it."""
    return PartitionSpec(SEED if SEED in mesh.axis_names else None, *spec)


def _stripe(mesh: Mesh, batch: dict) -> dict:
    """Return the batch with tokens in the order 0, P, 2 P, ..., 1, P + 1, ...: every P-th for each of P devices."""
    striped = dict(batch)
    for name, x in batch.items():
        i = shapes.letters(name).find("N")
        if i >= 0 and mesh.shape[SEQUENCE] > 1:
            grid = x.reshape(*x.shape[:i], -1, mesh.shape[SEQUENCE], *x.shape[i + 1 :])
            striped[name] = grid.swapaxes(i, i + 1).reshape(x.shape)
    return striped


def shardings(mesh: Mesh, tree: Any, layout: layouts.Layout, *, rows: bool = False) -> Any:
    """Return the shardings of parameters, or of a state that contains them, from the axes in their names.

    rows: each array has one row for each run as its first axis.
    """

    def place(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, add_row_axis(mesh, spec) if rows else spec)

    return jax.tree.map(place, shapes.specs(tree, layout.rules), is_leaf=is_spec)


def is_spec(x: Any) -> bool:
    """Return True for a PartitionSpec."""
    return isinstance(x, PartitionSpec)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, WHOLE)
