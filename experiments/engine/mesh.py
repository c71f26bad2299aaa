"""Devices: the only file that touches them, `shard_map`, and differences between JAX versions."""

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.engine import errors

DATA = "data"  # the mesh axis over which the sequences of a batch are spread


def start(device: str) -> None:
    """Select the backend: 'any' takes what JAX finds, 'cpu', 'gpu' or 'tpu' must be there (UserError)."""
    if device not in ("any", "cpu", "gpu", "tpu"):
        raise errors.UserError(f'unknown device "{device}"; the right ones are: any, cpu, gpu, tpu')
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        raise errors.UserError(f"JAX cannot start: {str(error).splitlines()[0]}") from error
    if device not in ("any", backend):
        raise errors.UserError(f"a {device} was asked for, but JAX {jax.__version__} sees only {_seen()}")


def _seen() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})"


def versions() -> dict[str, str]:
    """The versions that can change a number."""
    return {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    }


def describe(mesh: Mesh) -> str:
    """Versions, backend and mesh in one line: what a person should see before anything else."""
    shape = ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    found = versions()
    software = ", ".join(f"{name} {found[name]}" for name in ("jax", "flax", "optax"))
    used = f"{mesh.size} of {len(jax.devices())} devices"
    return f"Python {platform.python_version()}, {software} on {jax.default_backend()} ({kind}): {used}, mesh {shape}"


def make(*, data: int) -> Mesh:
    """A mesh of `data` devices (-1: all) with the axis 'data', its type said explicitly, since the default changed."""
    devices = jax.devices()
    n = len(devices) if data == -1 else data
    if not 1 <= n <= len(devices):
        raise errors.UserError(f"mesh.data = {data}, but JAX sees {_seen()}: choose -1 or 1 to {len(devices)}")
    return Mesh(np.array(devices[:n]), (DATA,), axis_types=(AxisType.Auto,))


def check_batch(mesh: Mesh, name: str, *, batch: int, parts: int = 1) -> None:
    """UserError unless a batch divides evenly over the devices (and, there, over the parts of an accumulation)."""
    n = mesh.shape[DATA]
    if batch < 1 or batch % (n * parts):
        over = f"{n} devices" + (f" x {parts} accumulated parts" if parts > 1 else "")
        raise errors.UserError(f"{name} = {batch} does not divide evenly over {over}: choose a multiple of {n * parts}")


def over_data(function: Callable, mesh: Mesh, *, batched: tuple[bool, ...]) -> Callable:
    """Each device runs `function` on its share of the batched arguments; the others and all results are replicated."""
    in_specs = tuple(PartitionSpec(DATA) if b else PartitionSpec() for b in batched)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())


def keys(key: jax.Array, n: int) -> jax.Array:
    """Inside `over_data`: a random key for each of this device's n examples, from its place in the whole batch.

    What is random about an example thus does not depend on how many devices share the batch.
    """
    first = jax.lax.axis_index(DATA) * n
    return jax.vmap(lambda i: jax.random.fold_in(key, first + i))(np.arange(n))


def place_batch(mesh: Mesh, batch: Any) -> Any:
    """The batch on the devices, its first axis spread over 'data'."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The layout of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
