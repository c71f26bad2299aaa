"""Room in memory, looked at before anything is allocated: too large a size is refused in a sentence."""

import os
import pathlib
import sys
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.engine import cost, errors

DESCRIBED = 2**50  # bytes of a device that is only described (--dry_run): none has as many
MEMINFO = pathlib.Path("/proc/meminfo")  # Linux
GROUP = pathlib.Path("/sys/fs/cgroup/memory.max")  # what a container or a batch system allows


def host() -> int:
    """Bytes of the host's memory that can still be taken; more than any machine has where nothing tells it."""
    return min(_available(), _allowed())


def _available() -> int:
    try:
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def _allowed() -> int:
    try:
        return int(GROUP.read_text())
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return sys.maxsize


def check(what: str, needed: float, there: float | None = None, remedy: str = "") -> None:
    """UserError where `what` needs more bytes than there are; without `there`: than the host has left."""
    there = host() if there is None else there
    if needed > there:
        raise errors.UserError(f"{what} needs {size(needed)} of memory, and there are {size(there)}{remedy}")


def check_state(state: Any, mesh: Mesh, *, described: bool) -> None:
    """UserError where parameters, gradients and optimiser do not fit: `state` is abstract, and nothing is made yet.

    Devices of the CPU share the host's memory. described: nothing will be made on these devices either, and only what
    fits into no device is refused.
    """
    each = cost.device_bytes(state) + cost.device_bytes(state.params)  # the gradient is as large as the parameters
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    limit = DESCRIBED if described else (local[0].memory_stats() or {}).get("bytes_limit")
    devices = len(local) if limit is None else 1
    what = "the model with its gradients and optimiser" + f" on {devices} devices of one memory" * (devices > 1)
    check(what, each * devices, limit, ": make model.D, model.M or another size smaller")


def check_step(compiled: Any, mesh: Mesh) -> None:
    """UserError where what a compiled step keeps meanwhile (the tokens of all layers) is more than the host has left.

    Other devices say so themselves when it is made; a host would give what it has, and then end the process.
    """
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    analysis = compiled.memory_analysis()
    if analysis is not None and not local[0].memory_stats():
        what = "a training step" + f" on {len(local)} devices of one memory" * (len(local) > 1)
        check(what, len(local) * analysis.temp_size_in_bytes, None, ": make train.batch_size or the model smaller")


def size(n: float) -> str:
    """12345678 as '11.8 MiB'."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:,.3g} {units[0]}" if n < 1000 else f"{n:,.0f} {units[0]}"
