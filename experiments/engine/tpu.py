"""Why a TPU cannot be had, each reason with its remedy.

What libtpu does is read from 0.0.23 and 0.0.50.1: it takes a POSIX lock on LOCK for as long as its process lives, and
leaves the file behind. JAX tells what it says in the error of `jax.devices("tpu")`.
"""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import struct

import jax

PCI, DEV, PROC, LOCK = map(pathlib.Path, ("/sys/bus/pci/devices", "/dev", "/proc", "/tmp/libtpu_lockfile"))
GOOGLE, OTHERS = "0x1ae0", ("0x01", "0x02")  # a vendor, and what else it has in its machines: disks, network cards
LOCKED = re.compile("lockfile|already in use|busy", re.IGNORECASE)
SET = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}  # by JAX and libtpu themselves as they are imported
ONE = "a TPU belongs to one process"


def chips() -> int:
    """The TPU chips of this machine, as its PCI bus or its device files tell."""
    found = sum(
        _read(one / "vendor") == GOOGLE and not _read(one / "class").startswith(OTHERS) for one in PCI.glob("*")
    )
    return found or len(list(DEV.glob("accel[0-9]*")))


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


def reason(said: str) -> str:
    """Why there is no TPU here, and what to do; said: JAX's own words."""
    jax_version = importlib.metadata.version("jax")
    install = f'pip install "jax[tpu]=={jax_version}"'
    if not chips():
        return "this machine has no TPU (on Colab: Runtime > Change runtime type)"
    if libtpu() is None:
        return f"this machine has a TPU, but no libtpu, by which JAX uses it: {install}"
    if (holder := _holder(said)) is not None:
        who = f"process {holder}" if holder else "another process"
        return (
            f"the TPU is in use by {who}, and {ONE}: in a notebook call launch.run in place of this command, or"
            " restart its runtime; else end that process"
        )
    if LOCKED.search(said):
        return f"{LOCK} is left of a process that is no more, and keeps others from the TPU: sudo rm {LOCK}"
    if "Unknown backend" in said:
        return (
            f"JAX has started without the TPU in this process ({_platforms()}): restart it, or the notebook's runtime"
        )
    if foreign():
        return f"{foreign()}: {install} ({_first(said)})"
    return f"the TPU of this machine cannot be used: {_first(said)}"


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
    there, wanted = libtpu(), _wanted()
    if not wanted or there is None or re.fullmatch(re.escape(wanted).replace(r"\*", ".*"), there):
        return ""
    return f"libtpu {there} does not belong to JAX {importlib.metadata.version('jax')}, which needs {wanted}"


def _wanted() -> str:
    """The version of libtpu that this JAX asks for, as 0.0.23 or 0.0.50.*; '' where it does not say."""
    found = (re.match(r"libtpu==([\w.*]+)", one) for one in importlib.metadata.requires("jax") or ())
    return next((match[1] for match in found if match), "")


def _platforms() -> str:
    """What kept JAX from the TPU: its setting, or a run that is over."""
    given = jax.config.jax_platforms or "tpu"
    return "a run before had device = cpu" if "tpu" in given else f"JAX_PLATFORMS = {given}"


def _holder(said: str) -> int | None:
    """The process that has the TPU, 0 where it cannot be told which; None: nobody has it."""
    if named := re.search(r"pid (\d+)", said):
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


def _first(said: str) -> str:
    return (said.strip().splitlines() or ["JAX does not say why"])[0]
