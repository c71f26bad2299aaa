"""Compiled programs: the training step before the first batch, and a cache from which a second start takes them."""

import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from experiments.engine import disk

DESCRIBED = 2**50  # bytes of a device that is only described (--dry_run): none has as many
FOLDER = "JAX_COMPILATION_CACHE_DIR"  # JAX's own variable


def keep() -> None:
    """Keep what is compiled from here on, also by later processes, in a folder; one that cannot be written is said.

    It is `compiled` in the user's cache folder, or what JAX_COMPILATION_CACHE_DIR says.
    """
    forget_folder()
    if not jax.config.jax_enable_compilation_cache:  # as JAX_ENABLE_COMPILATION_CACHE=false has it
        return
    folder = pathlib.Path(os.environ.get(FOLDER) or disk.cache_folder() / "compiled")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError):  # the latter for what is no path, such as half of a character
        writable = False
    if not writable:
        print(f"compiled programs are not kept: {folder} cannot be written", flush=True)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX leaves out what compiles in less than a second; of that, a small run is made.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def keep_nothing() -> None:
    """What is compiled from here on is not kept."""
    forget_folder()
    jax.config.update("jax_enable_compilation_cache", False)


def forget_folder() -> None:
    """From here on JAX looks anew whether, and where, compiled programs are kept."""
    compilation_cache.reset_cache()


def for_one_run(mesh: Mesh) -> dict[str, int]:
    """`compiler_options` of jax.jit for a program that runs once: on CPUs it is compiled in a third of the time.

    LLVM does less, so that the program itself takes longer; the numbers are the same. A level in XLA_FLAGS stays.
    """
    level, cpu = "xla_backend_optimization_level", mesh.devices.flat[0].platform == "cpu"
    return {level: 1} if cpu and level not in os.environ.get("XLA_FLAGS", "") else {}


class Compiled(dict):
    """The compiled training step for each size of a batch; called, it takes the one for the batch that is given."""

    def __call__(self, state: Any, batch: dict, *rest: Any) -> Any:
        return self[_size(batch)](state, batch, *rest)

    def largest(self) -> Any:
        """The one for the largest batch."""
        return self[max(self)]


def _size(batch: dict) -> int:
    """Examples of a batch, of which every array has a row for each."""
    return next(iter(batch.values())).shape[0]


def ahead(step: Callable, state: Any, batches: Iterable[dict], *rest: Any) -> tuple[Compiled, float]:
    """The jitted step(state, batch, *rest) compiled for each size among these batches, and the seconds it took."""
    began, compiled = time.perf_counter(), Compiled()
    for batch in batches:
        size = _size(batch)
        if size not in compiled:
            compiled[size] = step.lower(state, batch, *rest).compile()
    return compiled, time.perf_counter() - began


def flops(function: Callable, *arguments: Any) -> int:
    """Floating-point operations of all matrix products in function(*arguments), two per multiply-add.

    Counted on the traced program, so it holds for every variant and every loop over layers (XLA's own cost analysis
    counts the body of a loop once). Arguments may be abstract (`jax.ShapeDtypeStruct`).
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():  # a branch, of which the dearest counts, a body, or something else
            inner = [getattr(one, "jaxpr", one) for one in (value if isinstance(value, tuple) else (value,))]
            total += times * max((_count(one) for one in inner if hasattr(one, "eqns")), default=0)
    return total


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, concrete or abstract, of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Bytes of a tree that one device holds, by the arrays' shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def measured_peak(*, devices: Mesh, repeats: int = 5) -> float:
    """The float32 matrix-product rate of these devices in FLOP/s: the best of a few large products on one of them.

    All CPU "devices" are the same processor, whose rate one product already takes whole.
    """
    one = devices.local_devices[0]
    size, several = (1536, 1) if one.platform == "cpu" else (8192, devices.size)
    a = jax.device_put(jnp.ones((size, size)), one)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(product(a, a))
        best = min(best, time.perf_counter() - begin)
    return several * 2 * size**3 / best


def check_state(state: Any, mesh: Mesh, *, described: bool) -> None:
    """UserError where parameters, gradients and optimiser do not fit: `state` is abstract, and nothing is made yet.

    Devices of the CPU share the host's memory. described: nothing will be made on these devices either, and only what
    fits into no device is refused.
    """
    each = device_bytes(state) + device_bytes(state.params)  # the gradient is as large as the parameters
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    limit = DESCRIBED if described else (local[0].memory_stats() or {}).get("bytes_limit")
    devices = len(local) if limit is None else 1
    what = "the model with its gradients and optimiser" + f" on {devices} devices of one memory" * (devices > 1)
    disk.check_memory(what, each * devices, limit, ": make model.D, model.M or another size smaller")


def check_step(compiled: Any, mesh: Mesh) -> None:
    """UserError where what a compiled step keeps meanwhile (the tokens of all layers) is more than the host has left.

    Other devices say so themselves when it is made; a host would give what it has, and then end the process.
    """
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    analysis = compiled.memory_analysis()
    if analysis is not None and not local[0].memory_stats():
        what = "a training step" + f" on {len(local)} devices of one memory" * (len(local) > 1)
        disk.check_memory(
            what, len(local) * analysis.temp_size_in_bytes, None, ": make train.batch_size or the model smaller"
        )
