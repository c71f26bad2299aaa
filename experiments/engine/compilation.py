"""XLA: the backend, the cache of compiled programs, and what programs cost in FLOPs and memory."""

import contextlib
import importlib.metadata
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from experiments.engine import by_name, disk, distributed, errors

MOST_FAKE = 4096  # fake devices: each has threads of its own
UNLIMITED = 2**50  # bytes: no device has as many
FOLDER = "JAX_COMPILATION_CACHE_DIR"  # JAX's own variable
NO_TPU = (
    "A TPU belongs to one process: end the other one, or call launch.run in the notebook that has it, or restart its "
    "runtime (on Colab: Runtime > Change runtime type). --device=cpu trains on the CPU"
)


def start(device: str) -> None:
    """Select the backend: "any" takes what JAX finds; UserError if "cpu", "gpu" or "tpu" is not available."""
    by_name.choose("device", device, dict.fromkeys(["any", "cpu", "gpu", "tpu"]))
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        hint = f". {NO_TPU}" if "tpu" in str(error).lower() else ""
        raise errors.UserError(f"JAX cannot start: {str(error).splitlines()[0]}{hint}") from error
    if device not in ("any", found):
        available = f"{jax.device_count()} x {jax.devices()[0].device_kind} ({found})"
        hint = f". {NO_TPU}" if device == "tpu" else ""
        raise errors.UserError(f"--device={device}: JAX {jax.__version__} finds only {available}{hint}")
    if found == "cpu" and jax.process_count() > 1:
        # What XLA:CPU reads from a cache (JAX 0.10.2 and 0.12, not 0.8) forgets that its collectives have an order:
        # one process sums gradients while the other one gathers weights, and each waits for the other forever.
        keep_nothing()


def split(sizes: Mapping[str, int], device: str, *, fake: bool = False) -> list[jax.Device] | None:
    """Split the CPU into as many devices as a mesh of these sizes needs, up to its cores, unless several processes run
    or XLA_FLAGS sets their number. Call this before anything uses a device.

    fake: for a dry run, return that many fake CPU devices if JAX finds fewer; None otherwise. device: as of `start`.
    """
    n_devices = math.prod(n for n in sizes.values() if n > 1)
    if fake and n_devices > MOST_FAKE:
        raise errors.UserError(f"mesh: {n_devices} devices are too many for a dry run: at most {MOST_FAKE}")
    enough = fake or n_devices <= (os.cpu_count() or 1)
    if (
        enough
        and not distributed.joined_others()
        and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "")
    ):
        with contextlib.suppress(RuntimeError):  # JAX has started: the number of devices stays
            jax.config.update("jax_num_cpu_devices", max(n_devices, jax.config.jax_num_cpu_devices))
    if not fake:
        return None
    start(device)
    return None if n_devices <= jax.device_count() else jax.devices("cpu")[:n_devices]


def libtpu() -> str | None:
    """Return the version of the installed libtpu, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("libtpu")
    return os.environ.get("TPU_LIBRARY_PATH")


def foreign() -> str:
    """Return a sentence if the installed libtpu is not the one that this JAX requires, else ''."""
    matches = (re.match(r"libtpu==([\w.*]+)", one) for one in importlib.metadata.requires("jax") or ())
    installed, required = libtpu(), next((match[1] for match in matches if match), "")
    if not required or installed is None or re.fullmatch(re.escape(required).replace(r"\*", ".*"), installed):
        return ""
    return f"libtpu {installed} does not belong to JAX {importlib.metadata.version('jax')}, which needs {required}"


def keep() -> None:
    """Keep compiled programs for later processes, in JAX_COMPILATION_CACHE_DIR or the user's cache folder. Print a line
    if it cannot be written."""
    compilation_cache.reset_cache()  # or JAX would not read the setting again
    if not jax.config.jax_enable_compilation_cache:  # JAX_ENABLE_COMPILATION_CACHE=false
        return
    folder = pathlib.Path(os.environ.get(FOLDER) or disk.cache_folder() / "compiled")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # JAX leaves out what compiles in less than a second; a small run is made of such programs.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            return
    print(f"compiled programs are not kept: {folder} cannot be written", flush=True)


def keep_nothing() -> None:
    """Keep no program that is compiled from here on."""
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)


def for_one_run(mesh: Mesh) -> dict[str, int]:
    """`compiler_options` of jax.jit for a program that runs once: on CPUs LLVM does less, in a third of the time, and
    the numbers are the same. A level in XLA_FLAGS stays."""
    level, cpu = "xla_backend_optimization_level", mesh.devices.flat[0].platform == "cpu"
    return {level: 1} if cpu and level not in os.environ.get("XLA_FLAGS", "") else {}


class Compiled(dict):
    """The compiled training step for each size of a batch; called, it takes the one for the batch that is given."""

    def __call__(self, state: Any, batch: dict, *rest: Any) -> Any:
        return self[len(next(iter(batch.values())))](state, batch, *rest)

    def largest(self) -> Any:
        """The one for the largest batch."""
        return self[max(self)]


def flops(function: Callable, *arguments: Any, kernels: bool = False) -> int:
    """Floating-point operations of all matrix products in function(*arguments), two per multiply-add, counted on the
    traced program (XLA's own analysis counts the body of a loop once). Arguments may be abstract. kernels: of those in
    Pallas kernels alone; there, as elsewhere, blocks that a mask hides count."""
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr, not kernels)


def _count(jaxpr: Any, counts: bool) -> int:
    total = 0
    for equation in jaxpr.eqns:
        kernel = equation.primitive.name == "pallas_call"
        if equation.primitive.name == "dot_general" and counts:
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        times = math.prod(equation.params["grid_mapping"].grid) if kernel else times
        for value in equation.params.values():  # a branch, of which the dearest counts, a body, or something else
            inner = [getattr(one, "jaxpr", one) for one in (value if isinstance(value, tuple) else (value,))]
            total += times * max((_count(one, counts or kernel) for one in inner if hasattr(one, "eqns")), default=0)
    return total


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, concrete or abstract, of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Bytes of a tree that one device holds, by the arrays' shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def measured_peak(*, devices: Mesh, repeats: int = 5) -> float:
    """The float32 matrix-product rate of these devices in FLOP/s: the best of a few large products on one of them. All
    CPU "devices" are the same processor, whose rate one product already takes whole."""
    one = devices.local_devices[0]
    size, several = (1536, 1) if one.platform == "cpu" else (8192, devices.size)
    a, product, best = jax.device_put(jnp.ones((size, size)), one), jax.jit(jnp.matmul), math.inf
    jax.block_until_ready(product(a, a))
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(product(a, a))
        best = min(best, time.perf_counter() - begin)
    return several * 2 * size**3 / best


def check_state(state: Any, mesh: Mesh, *, described: bool) -> None:
    """UserError where parameters, gradients and optimiser do not fit: `state` is abstract, and nothing is made yet.

    described: nor will it be, and only what fits into no device is refused. Devices of the CPU share one memory.
    """
    each = device_bytes(state) + device_bytes(state.params)  # the gradient is as large as the parameters
    local = mesh.local_devices
    limit = UNLIMITED if described else (local[0].memory_stats() or {}).get("bytes_limit")
    devices = len(local) if limit is None else 1
    what = "the model with its gradients and optimiser" + f" on {devices} devices of one memory" * (devices > 1)
    disk.check_memory(what, each * devices, limit, ": make model.D, model.M or another size smaller")


def check_step(compiled: Any, mesh: Mesh) -> None:
    """UserError where what a compiled step keeps meanwhile (the tokens of all layers) is more than the host has left:
    it would give what it has, and then end the process. Other devices say so themselves."""
    local, analysis = mesh.local_devices, compiled.memory_analysis()
    if analysis is not None and not local[0].memory_stats():
        what = "a training step" + f" on {len(local)} devices of one memory" * (len(local) > 1)
        remedy = ": make train.batch_size or the model smaller"
        disk.check_memory(what, len(local) * analysis.temp_size_in_bytes, None, remedy)
