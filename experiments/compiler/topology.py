"""TPU chips that need not be there: libtpu holds the whole compiler of a TPU, and compiles for chips it is told of.

Nothing can be placed on such chips or run. Usable memory is what the compiler itself says of a program that is too
large (libtpu 0.0.23 and 0.0.50); peaks and clocks are Google's (cloud.google.com/tpu/docs, v4 to v6e).
"""

import contextlib
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.engine import compilation, errors

GIB = 2**30
AT_ONCE = 2  # programs: compiling one takes one core
INSTALL = 'pip install -e ".[aot]"'
# libtpu looks for chips, and for others that use them, unless it is told not to; and warns of what it is not told.
ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_SKIP_MDS_QUERY": "1"}
ENVIRONMENT |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


class Chip(NamedTuple):
    """One kind of chip."""

    hbm: float  # bytes that a program may use
    peak: float  # FLOP/s of products of bfloat16 numbers, which those of float32 numbers are by default too
    clock: float  # Hz
    ring: float  # bytes in a second to a chip from its neighbours in a ring: by two of its four links, or six (v4, v5p)


CHIPS = {
    "v4": Chip(30.75 * GIB, 275e12, 1.05e9, 100e9),
    "v5e": Chip(15.75 * GIB, 197e12, 1.5e9, 100e9),
    "v5p": Chip(95.73 * GIB, 459e12, 1.75e9, 200e9),
    "v6e": Chip(31.24 * GIB, 918e12, 1.75e9, 200e9),
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
# What the compiler says of a program that is too large, and of how much it needs and has: 15.75G, 512M or bytes.
NUMBER = r"([\d.]+)([BKMGT]?)"
TOO_LARGE = (  # of libtpu 0.0.23, twice, and 0.0.50
    rf"Used {NUMBER} of {NUMBER} hbm",
    rf"\(size={NUMBER}\) would exceed memory \(size={NUMBER}\)",
    rf"\({NUMBER}\) exceeds available HBM \({NUMBER}\)",
)


class Topology(NamedTuple):
    """The chips that are compiled for, in place of a run."""

    name: str
    chip: Chip
    devices: Sequence[Any]
    file: str | None  # what the compiler says is written there too, as JSON


class Request(NamedTuple):
    """A program to compile: the jitted `step` for these arguments, which are abstract and say where they lie.

    flops: of the matrix products that it needs, over all chips; of these kernel_flops in Pallas kernels.
    """

    name: str
    step: Callable
    arguments: tuple
    flops: float
    beside: bool = False  # as an evaluation is, beside what the chips are there for
    kernel_flops: float = 0.0


class Program(NamedTuple):
    """What was requested, compiled; or why not."""

    request: Request
    compiled: Any  # jax.stages.Compiled, or None
    reason: str  # '' where it is compiled
    seconds: float


@contextlib.contextmanager
def of(name: str, file: str | None = None) -> Iterator[Topology]:
    """Within this, meshes are made of these chips. UserError where they, libtpu or the folder of `file` are not."""
    if file is not None and not pathlib.Path(file).absolute().parent.is_dir():
        raise errors.UserError(f"--json={file}: there is no folder {pathlib.Path(file).absolute().parent}")
    devices = described(name)
    chips = Topology(name, CHIPS[name.partition("-")[0]], devices, file)
    token = compilation.described.set(chips)
    try:
        yield chips
    finally:
        compilation.described.reset(token)


def described(name: str) -> Sequence[Any]:
    """The chips of a topology as devices of JAX."""
    if name not in NAMES:
        raise errors.UserError(f'unknown --topology "{name}"; the right ones are: {", ".join(NAMES)}')
    if compilation.libtpu() is None:
        raise errors.UserError(f"--topology needs libtpu, the compiler for TPUs, which is not installed: {INSTALL}")
    jax.config.update("jax_platforms", "cpu")  # whatever this machine has, it is not asked
    compilation.keep_nothing()  # so that the seconds are those of compiling
    topology, more = NAMES[name]
    own = ENVIRONMENT.keys() - os.environ.keys()
    os.environ.update({variable: ENVIRONMENT[variable] for variable in own})  # which libtpu reads as it is loaded
    foreign = compilation.foreign()
    try:
        devices = topologies.get_topology_desc(topology, "tpu", **more).devices
    except RuntimeError as error:
        why = f"{foreign}: {INSTALL}" if foreign else str(error).strip().splitlines()[0]
        raise errors.UserError(f"libtpu cannot describe {name}: {why}") from error
    finally:
        for variable in own:
            del os.environ[variable]
    if foreign:
        print(f"{foreign}: what follows is of another compiler than its own", flush=True)
    return devices


def compiled(requests: Iterable[Request]) -> list[Program]:
    """The programs, compiled two at a time."""

    def program(request: Request, lowered: Any) -> Program:
        began, executable, why = time.perf_counter(), None, ""
        try:
            executable = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            why = reason(str(error))
        return Program(request, executable, why, time.perf_counter() - began)

    pool = futures.ThreadPoolExecutor(AT_ONCE)
    try:
        return [one.result() for one in [pool.submit(program, r, r.step.lower(*r.arguments)) for r in requests]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # where a person stops it, nobody waits


def reason(message: str) -> str:
    """Why the compiler refuses a program, in a part of a sentence."""
    for pattern in TOO_LARGE:
        if match := re.search(pattern, message):
            numbers = zip(match.groups()[::2], match.groups()[1::2], strict=True)
            needs, has = (float(n) * 1024.0 ** ("BKMGT".index(unit or "B") - 3) for n, unit in numbers)
            return f"needs {needs:,.2f} GiB of memory, and the chip has {has:.2f}"
    return f"is refused by the compiler: {message.strip().splitlines()[0]}"
