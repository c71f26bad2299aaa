"""The devices that JAX finds, simulates or is told of; and why a TPU cannot be had, each reason with its remedy.

What libtpu does is read from 0.0.23 and 0.0.50.1: it takes a POSIX lock on LOCK for as long as its process lives, and
leaves the file behind. JAX tells what it says in the error of `jax.devices("tpu")`.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments.engine import compilation, errors

PCI, DEV, PROC, LOCK = map(pathlib.Path, ("/sys/bus/pci/devices", "/dev", "/proc", "/tmp/libtpu_lockfile"))
GOOGLE, OTHERS = "0x1ae0", ("0x01", "0x02")  # a vendor, and what else it has in its machines: disks, network cards
LOCKED = re.compile("lockfile|already in use|busy", re.IGNORECASE)
SET = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}  # by JAX and libtpu themselves as they are imported
ONE = "a TPU belongs to one process"
MOST_SIMULATED = 4096  # each has threads of its own
simulated: list[int] = []  # not empty: `simulate` was called
_described: contextvars.ContextVar[tuple[str, Sequence[Any]] | None] = contextvars.ContextVar("described", default=None)


@contextlib.contextmanager
def of_described(name: str, devices: Sequence[Any]) -> Iterator[None]:
    """Within this, meshes are made of these devices, which need not be there: programs for them are not run."""
    token = _described.set((name, devices))
    try:
        yield
    finally:
        _described.reset(token)


def described() -> tuple[str, Sequence[Any]] | None:
    """The name and the devices of `of_described`; None: they are JAX's own."""
    return _described.get()


def present() -> Sequence[jax.Device]:
    """Those that a mesh is made of: JAX's, or chips that are only described."""
    return _described.get()[1] if _described.get() else jax.devices()


def start(device: str) -> None:
    """Select the backend: 'any' takes what JAX finds, 'cpu', 'gpu' or 'tpu' must be there (UserError).

    Where 'any' does not find the TPU that the machine has, that is said.
    """
    if device not in ("any", "cpu", "gpu", "tpu"):
        raise errors.UserError(f'unknown device "{device}"; the right ones are: any, cpu, gpu, tpu')
    if _described.get():
        return
    before = jax.config.jax_platforms
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if device in ("any", "tpu"):
        leave_out()
    backend, words = _backend(device)
    if device == "tpu" != backend:
        raise errors.UserError(f"a tpu was asked for: {why_no_tpu(words)}")
    if device not in ("any", backend):
        raise errors.UserError(f"a {device} was asked for, but JAX {jax.__version__} sees only {_seen()}")
    if device == "any" and backend == "cpu" != before and chips():
        print(f"warning: {why_no_tpu(words)}; the CPU is used", flush=True)
    if backend == "cpu" and jax.process_count() > 1:
        # What XLA:CPU reads from a cache (JAX 0.10.2 and 0.12, not 0.8) forgets that its collectives have an order:
        # one process sums gradients while the other one gathers weights, and each waits for the other forever.
        compilation.keep_nothing()


def _backend(device: str) -> tuple[str, str]:
    """What JAX starts, and what it says of the TPU, if that is not it. UserError where JAX cannot start at all."""
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        platforms = (jax.config.jax_platforms or "").split(",")
        if "tpu" in platforms and device == "tpu":
            return "", str(error)
        if "tpu" in platforms and device == "any" and "cpu" in platforms:  # JAX itself asks for both where chips are
            jax.config.update("jax_platforms", "cpu")
            return jax.default_backend(), str(error)
        raise errors.UserError(f"JAX cannot start: {str(error).splitlines()[0]}") from error
    try:
        return backend, "" if backend in ("tpu", "gpu") else str(jax.devices("tpu"))
    except RuntimeError as error:
        return backend, str(error)


def simulate(sizes: Mapping[str, int]) -> None:
    """From here on a mesh of these sizes may be made that the machine does not have: of simulated CPU devices.

    For programs that are compiled, but not run. To be called before anything has touched a device.
    """
    n_devices = math.prod(n for n in sizes.values() if n > 1)
    if n_devices > MOST_SIMULATED:
        raise errors.UserError(f"a mesh of {n_devices} devices cannot be simulated: at most {MOST_SIMULATED} can")
    simulated.append(n_devices)
    _cpu_devices(n_devices)


def of_cores(sizes: Mapping[str, int]) -> None:
    """From here on a CPU is as many devices as a mesh of these sizes needs, where it has a core for each.

    To be called before anything has touched a device, by a process that is alone.
    """
    n_devices = math.prod(n for n in sizes.values() if n > 1)
    if n_devices <= (os.cpu_count() or 1):
        _cpu_devices(n_devices)


def _cpu_devices(n: int) -> None:
    """At least so many CPU devices, unless XLA_FLAGS says how many."""
    if not cpus_given():
        with contextlib.suppress(RuntimeError):  # JAX has started: then there are as many as there are
            jax.config.update("jax_num_cpu_devices", max(n, jax.config.jax_num_cpu_devices))


def cpus_given() -> bool:
    return "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")


def _seen() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})"


def chips() -> int:
    """The TPU chips of this machine, as its PCI bus or its device files tell."""
    on_bus = sum(
        _read(one / "vendor") == GOOGLE and not _read(one / "class").startswith(OTHERS) for one in PCI.glob("*")
    )
    return on_bus or len(list(DEV.glob("accel[0-9]*")))


def leave_out() -> None:
    """Where there is neither a TPU nor a plugin of JAX's, have JAX start the CPU at once.

    It would load libtpu, if that is installed to compile for a TPU elsewhere, and pass on what it says of the missing
    chips. Nothing happens where somebody has told JAX what to start, or where a TPU may be hidden from `chips`.
    """
    hints = {name for name in os.environ if name.startswith(("TPU_", "JAX_FORCE_TPU"))} - SET
    if jax.config.jax_platforms is None and importlib.util.find_spec("libtpu") and not hints:
        plugins = importlib.util.find_spec("jax_plugins") or importlib.metadata.entry_points(group="jax_plugins")
        if not plugins and not chips() and not list((DEV / "vfio").glob("[0-9]*")):
            jax.config.update("jax_platforms", "cpu")


def why_no_tpu(words: str) -> str:
    """Why there is no TPU here, and what to do; words: JAX's own words."""
    jax_version = importlib.metadata.version("jax")
    install = f'pip install "jax[tpu]=={jax_version}"'
    if not chips():
        return "this machine has no TPU (on Colab: Runtime > Change runtime type)"
    if libtpu() is None:
        return f"this machine has a TPU, but no libtpu, by which JAX uses it: {install}"
    if (holder := _holder(words)) is not None:
        who = f"process {holder}" if holder else "another process"
        return (
            f"the TPU is in use by {who}, and {ONE}: in a notebook call launch.run in place of this command, or"
            " restart its runtime; else end that process"
        )
    if LOCKED.search(words):
        return f"{LOCK} is left of a process that is no more, and keeps others from the TPU: sudo rm {LOCK}"
    if "Unknown backend" in words:
        return (
            f"JAX has started without the TPU in this process ({_platforms()}): restart it, or the notebook's runtime"
        )
    if foreign():
        return f"{foreign()}: {install} ({_first(words)})"
    return f"the TPU of this machine cannot be used: {_first(words)}"


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def libtpu() -> str | None:
    """The version of libtpu that is installed; None where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("libtpu")
    return os.environ.get("TPU_LIBRARY_PATH")


def foreign() -> str:
    """That libtpu does not belong to this JAX; '' where it does."""
    there, right = libtpu(), _wanted()
    if not right or there is None or re.fullmatch(re.escape(right).replace(r"\*", ".*"), there):
        return ""
    return f"libtpu {there} does not belong to JAX {importlib.metadata.version('jax')}, which needs {right}"


def _wanted() -> str:
    """The version of libtpu that this JAX asks for, as 0.0.23 or 0.0.50.*; '' where it does not say."""
    matches = (re.match(r"libtpu==([\w.*]+)", one) for one in importlib.metadata.requires("jax") or ())
    return next((match[1] for match in matches if match), "")


def _platforms() -> str:
    """What kept JAX from the TPU: its setting, or a run that is over."""
    setting = jax.config.jax_platforms or "tpu"
    return "a run before had device = cpu" if "tpu" in setting else f"JAX_PLATFORMS = {setting}"


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


def _first(words: str) -> str:
    return (words.strip().splitlines() or ["JAX does not say why"])[0]
