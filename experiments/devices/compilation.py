"""Compilation: the backend, the cache of compiled programs, and the FLOPs and memory of programs."""

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
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from experiments.config import by_name, disk, errors
from experiments.devices import distributed

MOST_FAKE = 4096  # largest number of fake devices: each starts threads
UNLIMITED = 2**50  # bytes: more than the memory of any device
FOLDER = "JAX_COMPILATION_CACHE_DIR"  # the environment variable of JAX for the folder of its cache
NO_TPU = (
    "A TPU belongs to one process: end the other one, or call launch.run in the notebook that has it, or restart its "
    "runtime (on Colab: Runtime > Change runtime type). --device=cpu trains on the CPU"
)


def start(device: str) -> None:
    """Start JAX on a device: "any", "cpu", "gpu" or "tpu". Raises UserError if it is unknown or not available."""
    by_name.choose("device", device, dict.fromkeys(["any", "cpu", "gpu", "tpu"]))
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        hint = f". {NO_TPU}" if "tpu" in str(error).lower() else ""
        raise errors.UserError(f"JAX cannot start: {str(error).splitlines()[0]}{hint}") from error
    if device not in ("any", backend):
        available = f"{jax.device_count()} x {jax.devices()[0].device_kind} ({backend})"
        hint = f". {NO_TPU}" if device == "tpu" else ". --device=any uses what JAX finds"
        raise errors.UserError(f"--device={device}: JAX {jax.__version__} finds only {available}{hint}")
    if backend == "cpu" and jax.process_count() > 1:
        # A program that XLA:CPU reads from a cache loses the order of its collectives (JAX 0.10.2 and 0.12, not 0.8):
        # one process sums gradients while another gathers weights, and both wait forever.
        disable_cache()


def split(sizes: Mapping[str, int], device: str, *, fake: bool = False) -> list[jax.Device] | None:
    """Split the CPU into as many devices as a mesh of these sizes needs, if it has that many cores.

    Call this before any use of a device. The CPU stays whole if several processes run, or if XLA_FLAGS sets the number
    of devices. fake: for a dry run, ignore the cores, start the device (`start`), and return that many fake CPU devices
    if JAX has fewer. Otherwise the result is None. Raises UserError for more than MOST_FAKE fake devices.
    """
    n_devices = math.prod(n for n in sizes.values() if n > 1)
    too_many = fake and n_devices > MOST_FAKE
    errors.refuse((too_many, f"mesh has {n_devices} devices. A dry run can have at most {MOST_FAKE}"))
    enough = fake or n_devices <= (os.cpu_count() or 1)
    split_already = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if enough and not split_already and not distributed.is_joined():
        with contextlib.suppress(RuntimeError):  # JAX has started and keeps its number of devices
            jax.config.update("jax_num_cpu_devices", max(n_devices, jax.config.jax_num_cpu_devices))
    if not fake:
        return None
    start(device)
    return None if n_devices <= jax.device_count() else jax.devices("cpu")[:n_devices]


def libtpu() -> str | None:
    """Return the version of the installed libtpu; without the package, $TPU_LIBRARY_PATH or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("libtpu")
    return os.environ.get("TPU_LIBRARY_PATH")


def describe_libtpu_mismatch() -> str:
    """Return a sentence if the installed libtpu is not the version that this JAX requires, else ''."""
    matches = (re.match(r"libtpu==([\w.*]+)", line) for line in importlib.metadata.requires("jax") or ())
    installed, required = libtpu(), next((match[1] for match in matches if match), "")
    if not required or installed is None or re.fullmatch(re.escape(required).replace(r"\*", ".*"), installed):
        return ""
    return f"libtpu {installed} is not the version for JAX {importlib.metadata.version('jax')}, which needs {required}"


def enable_cache() -> None:
    """Cache compiled programs in JAX_COMPILATION_CACHE_DIR or the user's cache folder. Print a line if this fails."""
    compilation_cache.reset_cache()  # so that JAX reads the setting again
    if not jax.config.jax_enable_compilation_cache:  # JAX_ENABLE_COMPILATION_CACHE=false
        return
    folder = pathlib.Path(os.environ.get(FOLDER) or disk.cache_folder() / "compiled")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # By default JAX keeps only programs that compile in more than a second; a small run has none.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            return
    print(f"compiled programs are not cached: {folder} cannot be written", flush=True)


def disable_cache() -> None:
    """Stop caching compiled programs."""
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)


def run_once_options(mesh: Mesh) -> dict[str, int]:
    """Return the `compiler_options` of jax.jit for a program that runs once.

    On a CPU, LLVM optimises less: the compilation takes a third of the time. A level in XLA_FLAGS has priority.
    """
    level, cpu = "xla_backend_optimization_level", mesh.devices.flat[0].platform == "cpu"
    return {level: 1} if cpu and level not in os.environ.get("XLA_FLAGS", "") else {}


def deterministic_options(mesh: Mesh, deterministic: bool) -> dict[str, bool]:
    """Return the `compiler_options` of jax.jit for a program of training or evaluation.

    deterministic: the setting train.deterministic. On a GPU, XLA then uses operations that give the same bits in every
    execution, and does not choose kernels by their measured times. (XLA_FLAGS would do so for all programs.)
    Otherwise return {}.
    """
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    return {"xla_gpu_deterministic_ops": True} if deterministic and is_gpu else {}


class Compiled(dict):
    """{batch size: compiled training step}. A call uses the step for the size of the batch in its arguments."""

    def __call__(self, state: Any, batch: dict, *rest: Any) -> Any:
        return self[len(next(iter(batch.values())))](state, batch, *rest)

    def largest(self) -> Any:
        """Return the step for the largest batch."""
        return self[max(self)]


def flops(function: Callable, *arguments: Any, kernels: bool = False) -> int:
    """Return the floating-point operations of all matrix products in function(*arguments), two for each multiply-add.

    The body of a scan counts in each step; XLA's analysis would count it once. That of a while_loop counts once, and of
    branches the most expensive one. kernels: count only products inside Pallas kernels, masked blocks included.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr, not kernels)


def _count(jaxpr: Any, outside_kernels: bool) -> int:
    """Return the FLOPs of the matrix products in a jaxpr. outside_kernels: also outside Pallas kernels."""
    total = 0
    for equation in jaxpr.eqns:
        is_kernel = equation.primitive.name == "pallas_call"
        if equation.primitive.name == "dot_general" and outside_kernels:
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        times = math.prod(equation.params["grid_mapping"].grid) if is_kernel else times
        for value in equation.params.values():  # the body of a loop; of branches the most expensive one
            inner = [getattr(item, "jaxpr", item) for item in (value if isinstance(value, tuple) else (value,))]
            costs = [_count(item, outside_kernels or is_kernel) for item in inner if hasattr(item, "eqns")]
            total += times * max(costs, default=0)
    return total


def tree_bytes(tree: Any) -> int:
    """Return the number of bytes of all arrays of a tree, concrete or abstract."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Return the bytes of a tree on one device, by the shardings of its arrays."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def measure_peak(*, devices: Mesh, repeats: int = 5) -> float:
    """Return the speed of large float32 matrix products on these devices, in FLOP/s: the best of a few repeats.

    One device is measured, and its speed multiplied by their number. This number counts as 1 on a CPU, whose "devices"
    share one processor.
    """
    device = devices.local_devices[0]
    size, count = (1536, 1) if device.platform == "cpu" else (8192, devices.size)
    a, product, best = jax.device_put(np.ones((size, size), np.float32), device), jax.jit(jnp.matmul), math.inf
    jax.block_until_ready(product(a, a))
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(product(a, a))
        best = min(best, time.perf_counter() - begin)
    return count * 2 * size**3 / best


def check_state(state: Any, mesh: Mesh, *, dry_run: bool) -> None:
    """Raise UserError if parameters, gradients and optimiser do not fit into a device's memory. `state` is abstract.

    dry_run: the limit is UNLIMITED, because this machine will not run the program.
    """
    needed = device_bytes(state) + device_bytes(state.params)  # the gradient is as large as the parameters
    limit = UNLIMITED if dry_run else (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    remedy = ". Make model.D, model.M or another size smaller"
    _check_memory("the model with its gradients and optimiser", needed, mesh, limit, remedy)


def check_step(compiled: Any, mesh: Mesh) -> None:
    """Raise UserError if the temporary arrays of a compiled step need more memory than the host has left.

    The operating system would kill the process. Devices with their own memory report an error themselves.
    """
    analysis = compiled.memory_analysis()
    if analysis is not None and not mesh.local_devices[0].memory_stats():
        remedy = ". Make train.batch_size or the model smaller"
        _check_memory("a training step", analysis.temp_size_in_bytes, mesh, None, remedy)


def _check_memory(label: str, needed: int, mesh: Mesh, limit: int | None, remedy: str) -> None:
    """Raise UserError if a device needs more bytes than the limit; None: than its share of the host's free memory."""
    devices = len(mesh.local_devices) if limit is None else 1
    label += f" on {devices} devices with a shared memory" * (devices > 1)
    disk.check_memory(label, needed * devices, limit, remedy)
