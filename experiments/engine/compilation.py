"""XLA here: the devices that it compiles for, what is compiled and kept, and what that takes; why a TPU is not there.

libtpu (0.0.23, 0.0.50.1) takes a POSIX lock on LOCK for as long as its process lives, and leaves the file behind.
"""

import contextlib
import contextvars
import fcntl
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from experiments.engine import disk, errors

PCI, DEV, PROC, LOCK = map(pathlib.Path, ("/sys/bus/pci/devices", "/dev", "/proc", "/tmp/libtpu_lockfile"))
GOOGLE, OTHERS = "0x1ae0", ("0x01", "0x02")  # a vendor, and what else it has in its machines: disks, network cards
SET = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}  # by JAX and libtpu themselves as they are imported
MOST_SIMULATED = 4096  # each has threads of its own
DESCRIBED = 2**50  # bytes of a device that is only described (--dry_run): none has as many
FOLDER = "JAX_COMPILATION_CACHE_DIR"  # JAX's own variable
simulated: list[int] = []  # not empty: `simulate` was called
_remarks: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("remarks", default=None)


@contextlib.contextmanager
def remarks() -> Iterator[None]:
    """What is said with `remark` of the programs that are made within this is printed once."""
    token = _remarks.set(set())
    try:
        yield
    finally:
        _remarks.reset(token)


def remark(line: str) -> None:
    """Say how the program that is being made computes something."""
    said = _remarks.get()
    if said is not None and line not in said:
        said.add(line)
        print(f"  {line}", flush=True)


def start(device: str) -> None:
    """Select the backend: 'any' takes what JAX finds, and says where that is not the TPU that the machine has; 'cpu',
    'gpu' or 'tpu' must be there (UserError)."""
    if device not in ("any", "cpu", "gpu", "tpu"):
        raise errors.UserError(f'unknown device "{device}"; the right ones are: any, cpu, gpu, tpu')
    before = jax.config.jax_platforms
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if device in ("any", "tpu"):
        leave_out()
    found, words = _backend(device)
    if device == "tpu" != found:
        raise errors.UserError(f"a tpu was asked for: {why_no_tpu(words)}")
    if device not in ("any", found):
        there = f"{jax.device_count()} x {jax.devices()[0].device_kind} ({found})"
        raise errors.UserError(f"a {device} was asked for, but JAX {jax.__version__} sees only {there}")
    if device == "any" and found == "cpu" != before and chips():
        print(f"warning: {why_no_tpu(words)}; the CPU is used", flush=True)
    if found == "cpu" and jax.process_count() > 1:
        # What XLA:CPU reads from a cache (JAX 0.10.2 and 0.12, not 0.8) forgets that its collectives have an order:
        # one process sums gradients while the other one gathers weights, and each waits for the other forever.
        keep_nothing()


def _backend(device: str) -> tuple[str, str]:
    """What JAX starts, and what it says of the TPU, if that is not it. UserError where JAX cannot start at all."""
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        platforms = (jax.config.jax_platforms or "").split(",")
        if "tpu" in platforms and device == "tpu":
            return "", str(error)
        if device == "any" and {"tpu", "cpu"} <= set(platforms):  # JAX itself asks for both where chips are
            jax.config.update("jax_platforms", "cpu")
            return jax.default_backend(), str(error)
        raise errors.UserError(f"JAX cannot start: {str(error).splitlines()[0]}") from error
    try:
        return found, "" if found in ("tpu", "gpu") else str(jax.devices("tpu"))
    except RuntimeError as error:
        return found, str(error)


def simulate(sizes: Mapping[str, int]) -> None:
    """From here on a mesh of these sizes may be made that the machine does not have: of simulated CPU devices, for
    programs that are not run. To be called, as `of_cores`, before anything has touched a device."""
    n_devices = math.prod(n for n in sizes.values() if n > 1)
    if n_devices > MOST_SIMULATED:
        raise errors.UserError(f"a mesh of {n_devices} devices cannot be simulated: at most {MOST_SIMULATED} can")
    simulated.append(n_devices)
    of_cores(sizes, cores=n_devices)


def of_cores(sizes: Mapping[str, int], cores: int | None = None) -> None:
    """From here on a CPU is at least as many devices as a mesh of these sizes needs, where it has a core for each and
    XLA_FLAGS does not say how many. To be called by a process that is alone."""
    n_devices = math.prod(n for n in sizes.values() if n > 1)
    if n_devices <= (cores or os.cpu_count() or 1) and not cpus_given():
        with contextlib.suppress(RuntimeError):  # JAX has started: then there are as many as there are
            jax.config.update("jax_num_cpu_devices", max(n_devices, jax.config.jax_num_cpu_devices))


def cpus_given() -> bool:
    return "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")


def chips() -> int:
    """The TPU chips of this machine, as its PCI bus or its device files tell."""

    def read(file: pathlib.Path) -> str:
        with contextlib.suppress(OSError):
            return file.read_text().strip()
        return ""

    on_bus = [one for one in PCI.glob("*") if read(one / "vendor") == GOOGLE]
    return sum(not read(one / "class").startswith(OTHERS) for one in on_bus) or len(list(DEV.glob("accel[0-9]*")))


def leave_out() -> None:
    """Where there is neither a TPU nor a plugin of JAX's, have JAX start the CPU at once: it would load libtpu, if that
    is installed to compile for a TPU elsewhere, and pass on its complaints. Not where somebody has told JAX what to
    start, or where a TPU may be hidden from `chips`."""
    hints = {name for name in os.environ if name.startswith(("TPU_", "JAX_FORCE_TPU"))} - SET
    if jax.config.jax_platforms is None and importlib.util.find_spec("libtpu") and not hints:
        plugins = importlib.util.find_spec("jax_plugins") or importlib.metadata.entry_points(group="jax_plugins")
        if not plugins and not chips() and not list((DEV / "vfio").glob("[0-9]*")):
            jax.config.update("jax_platforms", "cpu")


def why_no_tpu(words: str) -> str:
    """Why there is no TPU here, and what to do; words: JAX's own words."""
    install = f'pip install "jax[tpu]=={importlib.metadata.version("jax")}"'
    first = (words.strip().splitlines() or ["JAX does not say why"])[0]
    if not chips():
        return "this machine has no TPU (on Colab: Runtime > Change runtime type)"
    if libtpu() is None:
        return f"this machine has a TPU, but no libtpu, by which JAX uses it: {install}"
    if (holder := _holder(words)) is not None:
        return (
            f"the TPU is in use by {f'process {holder}' if holder else 'another process'}, and a TPU belongs to one"
            " process: in a notebook call launch.run in place of this command, or restart its runtime; else end that"
            " process"
        )
    if re.search("lockfile|already in use|busy", words, re.IGNORECASE):
        return f"{LOCK} is left of a process that is no more, and keeps others from the TPU: sudo rm {LOCK}"
    if "Unknown backend" in words:
        setting = jax.config.jax_platforms or "tpu"
        kept = "a run before had device = cpu" if "tpu" in setting else f"JAX_PLATFORMS = {setting}"
        return f"JAX has started without the TPU in this process ({kept}): restart it, or the notebook's runtime"
    if foreign():
        return f"{foreign()}: {install} ({first})"
    return f"the TPU of this machine cannot be used: {first}"


def libtpu() -> str | None:
    """The version of libtpu that is installed; None where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("libtpu")
    return os.environ.get("TPU_LIBRARY_PATH")


def foreign() -> str:
    """That libtpu does not belong to this JAX, which asks for 0.0.23 or 0.0.50.*; '' where it does, or JAX does not."""
    matches = (re.match(r"libtpu==([\w.*]+)", one) for one in importlib.metadata.requires("jax") or ())
    there, right = libtpu(), next((match[1] for match in matches if match), "")
    if not right or there is None or re.fullmatch(re.escape(right).replace(r"\*", ".*"), there):
        return ""
    return f"libtpu {there} does not belong to JAX {importlib.metadata.version('jax')}, which needs {right}"


def _holder(words: str) -> int | None:
    """The process that has the TPU, 0 where it cannot be told which; None: nobody has it."""
    if named := re.search(r"pid (\d+)", words):
        return int(named[1])
    with contextlib.suppress(OSError), LOCK.open("rb") as file:
        query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # Linux's struct flock
        kind, *_, owner = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, query))
        if kind != fcntl.F_UNLCK:
            return max(owner, 0)
    for link in PROC.glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if re.match(rf"{DEV}/(accel|vfio/)\d", os.readlink(link)) and link.parts[-3] != str(os.getpid()):
                return int(link.parts[-3])
    return None


def keep() -> None:
    """Keep what is compiled from here on for later processes too: in JAX_COMPILATION_CACHE_DIR, or the user's cache
    folder. One that cannot be written is said."""
    compilation_cache.reset_cache()  # or JAX would not look at what is set anew
    if not jax.config.jax_enable_compilation_cache:  # as JAX_ENABLE_COMPILATION_CACHE=false has it
        return
    folder = pathlib.Path(os.environ.get(FOLDER) or disk.cache_folder() / "compiled")
    with contextlib.suppress(OSError, ValueError):  # the latter for what is no path, such as half of a character
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # JAX leaves out what compiles in less than a second; of that, a small run is made.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            return
    print(f"compiled programs are not kept: {folder} cannot be written", flush=True)


def keep_nothing() -> None:
    """What is compiled from here on is not kept."""
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
    limit = DESCRIBED if described else (local[0].memory_stats() or {}).get("bytes_limit")
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
