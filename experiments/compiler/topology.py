"""TPU chips that need not be there: libtpu holds the whole compiler of a TPU, and compiles for chips it is told of.

Nothing can be placed on such chips or run. Usable memory is what the compiler itself says of a program that is too
large (libtpu 0.0.23 and 0.0.50); peaks, clocks and bandwidths are Google's (cloud.google.com/tpu/docs, v4 to v6e).
"""

import contextlib
import contextvars
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.engine import errors, hardware

GIB = 2**30
AT_ONCE = 2  # programs: compiling one takes one core
INSTALL = 'pip install -e ".[aot]"'
# libtpu looks for chips, and for others that use them, unless it is told not to; and warns of what it is not told.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


class Chip(NamedTuple):
    """One kind of chip."""

    hbm: float  # bytes that a program may use
    peak: float  # FLOP/s of products of bfloat16 numbers, which those of float32 numbers are by default too
    clock: float  # Hz
    bandwidth: float  # bytes/s between its memory and its units


CHIPS = {
    "v4": Chip(30.75 * GIB, 275e12, 1.05e9, 1228e9),
    "v5e": Chip(15.75 * GIB, 197e12, 1.5e9, 819e9),
    "v5p": Chip(95.73 * GIB, 459e12, 1.75e9, 2765e9),
    "v6e": Chip(31.24 * GIB, 918e12, 1.75e9, 1600e9),
}
ONE_CHIP, EIGHT_CHIPS = {"chips_per_host_bounds": (1, 1, 1)}, {"chips_per_host_bounds": (2, 4, 1)}  # of one host
TWO_CORES = {"chip_config_name": "megacore"}  # which are one device
# As Google names them (v4 and v5p by their cores, two on a chip) -> what libtpu calls that.
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "v5e-1": ("v5e:1x1", ONE_CHIP),
    "v5e-4": ("v5e:2x2", {}),
    "v5e-8": ("v5e:2x4", EIGHT_CHIPS),
    "v5e-64": ("v5e:8x8", {}),
    "v5e-256": ("v5e:16x16", {}),
    "v6e-1": ("v6e:1x1", ONE_CHIP),
    "v6e-8": ("v6e:2x4", EIGHT_CHIPS),
    "v4-8": ("v4:2x2x1", TWO_CORES),
    "v5p-8": ("v5p:2x2x1", TWO_CORES),
}


class Topology(NamedTuple):
    """The chips that are compiled for."""

    name: str
    chip: Chip
    devices: Sequence[Any]
    file: str | None  # what is found is written there too, as JSON


class Request(NamedTuple):
    """A program to compile: the jitted `step` for these arguments, which are abstract and say where they lie."""

    name: str
    step: Callable
    arguments: tuple
    flops: float  # of the matrix products that it needs, over all chips
    beside: bool = False  # as an evaluation is, beside what the chips are there for


class Program(NamedTuple):
    """What was requested, compiled; or why not."""

    request: Request
    compiled: Any  # jax.stages.Compiled, or None
    reason: str  # '' where it is compiled
    seconds: float


_current: contextvars.ContextVar[Topology | None] = contextvars.ContextVar("topology", default=None)


def current() -> Topology | None:
    """The chips that programs are compiled for in place of a run; None: the machine's own."""
    return _current.get()


@contextlib.contextmanager
def of(name: str, file: str | None = None) -> Iterator[Topology]:
    """Within this, meshes are made of these chips. UserError where they, libtpu or the folder of `file` are not."""
    if file is not None and not pathlib.Path(file).absolute().parent.is_dir():
        raise errors.UserError(f"--json={file}: there is no folder {pathlib.Path(file).absolute().parent}")
    devices = described(name)
    token = _current.set(Topology(name, CHIPS[name.partition("-")[0]], devices, file))
    try:
        with hardware.of_described(name, devices):
            yield _current.get()
    finally:
        _current.reset(token)


def instead_of_training(name: str, file: str | None, run: Callable, *arguments: Any) -> None:
    """Call run(*arguments), which ends with what is compiled for these chips, and trains nothing."""
    with of(name, file):
        run(*arguments)


def described(name: str) -> Sequence[Any]:
    """The chips of a topology as devices of JAX."""
    if name not in NAMES:
        raise errors.UserError(f'unknown --topology "{name}"; the right ones are: {", ".join(NAMES)}')
    if hardware.libtpu() is None:
        raise errors.UserError(f"--topology needs libtpu, the compiler for TPUs, which is not installed: {INSTALL}")
    jax.config.update("jax_platforms", "cpu")  # whatever this machine has, it is not asked
    jax.config.update("jax_enable_compilation_cache", False)  # so that the seconds are those of compiling
    topology, more = NAMES[name]
    own = {variable: value for variable, value in ENVIRONMENT.items() if variable not in os.environ}
    os.environ.update(own)  # which libtpu reads as it is loaded
    try:
        devices = topologies.get_topology_desc(topology, "tpu", **more).devices
    except RuntimeError as error:
        why = f"{hardware.foreign()}: {INSTALL}" if hardware.foreign() else str(error).strip().splitlines()[0]
        raise errors.UserError(f"libtpu cannot describe {name}: {why}") from error
    finally:
        for variable in own:
            del os.environ[variable]
    if hardware.foreign():
        print(f"{hardware.foreign()}: what follows is of another compiler than its own", flush=True)
    return devices


def compiled(requests: Iterable[Request]) -> list[Program]:
    """The programs, compiled two at a time."""
    pool = futures.ThreadPoolExecutor(AT_ONCE)
    try:
        pairs = [(one, pool.submit(_compiled, one.step.lower(*one.arguments))) for one in requests]
        return [Program(one, *result.result()) for one, result in pairs]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # where a person stops it, nobody waits


def _compiled(lowered: Any) -> tuple[Any, str, float]:
    began = time.perf_counter()
    try:
        program, why = lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        program, why = None, reason(str(error))
    return program, why, time.perf_counter() - began


_TOO_LARGE = (  # of libtpu 0.0.23, twice, and 0.0.50
    re.compile(r"Used (?P<needs>[\d.]+\w?) of (?P<has>[\d.]+\w?) hbm"),
    re.compile(r"\(size=(?P<needs>\d+)\) would exceed memory \(size=(?P<has>\d+)\)"),
    re.compile(r"\((?P<needs>[\d.]+\w?)\) exceeds available HBM \((?P<has>[\d.]+\w?)\)"),
)


def reason(message: str) -> str:
    """Why the compiler refuses a program, in a part of a sentence."""
    for pattern in _TOO_LARGE:
        if found := pattern.search(message):
            needs, has = (_gib(found[name]) for name in ("needs", "has"))
            return f"needs {needs:,.2f} GiB of memory, and the chip has {has:.2f}"
    return f"is refused by the compiler: {message.strip().splitlines()[0]}"


def _gib(size: str) -> float:
    """15.75G, 512M or a number of bytes in GiB."""
    exponent = "BKMGT".find(size[-1])
    return float(size[:-1] if exponent >= 0 else size) * 1024.0 ** (max(exponent, 0) - 3)
