"""Compile for TPU chips that this machine does not have, with the compiler in libtpu.

Arrays cannot be placed on such chips, and programs cannot run. MEMORY_GIB holds the usable memory that the compiler
reports if a program is too large (libtpu 0.0.23 and 0.0.50).
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.config import errors
from experiments.devices import compilation

THREADS = 2  # programs compiled at once; each takes one core
INSTALL = 'pip install -e ".[aot]"'
MEMORY_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24}  # usable, of one device
# Without these variables libtpu searches for chips and their users on this machine, and prints warnings.
ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_SKIP_MDS_QUERY": "1"}
ENVIRONMENT |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
ONE_CHIP, EIGHT_CHIPS = {"chips_per_host_bounds": (1, 1, 1)}, {"chips_per_host_bounds": (2, 4, 1)}  # on one host
TWO_CORES = {"chip_config_name": "megacore"}  # the two cores of a chip form one device
# Google's name -> libtpu's name and options. The numbers of v4 and v5p count cores, two per chip.
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
NUMBER = r"([\d.]+)([BKMGT]?)"  # 15.75G, 512M or bytes
TOO_LARGE = (  # messages of libtpu 0.0.23 (two) and 0.0.50, with the needed and the available memory
    rf"Used {NUMBER} of {NUMBER} hbm",
    rf"\(size={NUMBER}\) would exceed memory \(size={NUMBER}\)",
    rf"\({NUMBER}\) exceeds available HBM \({NUMBER}\)",
)


class Topology(NamedTuple):
    """The chips to compile for: JAX devices, and the bytes of memory that a program can use on each."""

    name: str
    devices: Sequence[Any]
    memory: float


class Request(NamedTuple):
    """A program to compile: the jitted `function`, and abstract arguments with shardings."""

    name: str
    function: Callable
    arguments: tuple


class Program(NamedTuple):
    """The result of compiling a request: `compiled` (jax.stages.Compiled), or None and the compiler's reason."""

    request: Request
    compiled: Any
    reason: str


def describe(name: str) -> Topology:
    """Return the topology of this name in NAMES. After this call JAX uses the CPU and caches no compiled programs.

    Raises UserError if the name is unknown, or if libtpu is missing or fails, as that of another version of JAX does.
    """
    if name not in NAMES:
        raise errors.UserError(f'unknown --topology "{name}". Choose one of: {", ".join(NAMES)}')
    if compilation.libtpu() is None:
        raise errors.UserError(f"--topology={name} needs libtpu, which is not installed. Install it: {INSTALL}")
    jax.config.update("jax_platforms", "cpu")
    compilation.disable_cache()
    libtpu_name, options = NAMES[name]
    missing = {variable: value for variable, value in ENVIRONMENT.items() if variable not in os.environ}
    os.environ.update(missing)  # libtpu reads them when it loads
    try:
        devices = topologies.get_topology_desc(libtpu_name, "tpu", **options).devices
    except RuntimeError as error:
        mismatch = compilation.describe_libtpu_mismatch()
        reason = f"{mismatch}. Install the right one: {INSTALL}" if mismatch else str(error).strip().splitlines()[0]
        raise errors.UserError(f"the installed libtpu fails for --topology={name}: {reason}") from error
    finally:
        for variable in missing:
            del os.environ[variable]
    return Topology(name, devices, MEMORY_GIB[name.partition("-")[0]] * 2**30)


def compile_programs(requests: Iterable[Request]) -> list[Program]:
    """Compile the requested programs, THREADS at a time, and return them in order.

    If the compiler refuses a request, its Program has compiled = None and the reason.
    """

    def compile_one(request: Request, lowered: jax.stages.Lowered) -> Program:
        try:
            return Program(request, lowered.compile(), "")
        except jax.errors.JaxRuntimeError as error:
            return Program(request, None, refusal(str(error)))

    with futures.ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(compile_one, item, item.function.lower(*item.arguments)) for item in requests]
        return [job.result() for job in jobs]


def refusal(message: str) -> str:
    """Return why the compiler refused a program, from its message: "needs 20.00 GiB of memory, and the chip has ...".

    Of other messages, return "is refused by the compiler: " and the first line.
    """
    for pattern in TOO_LARGE:
        if match := re.search(pattern, message):
            numbers = zip(match.groups()[::2], match.groups()[1::2], strict=True)
            needs, has = (float(n) * 1024.0 ** ("BKMGT".index(unit or "B") - 3) for n, unit in numbers)
            return f"needs {needs:,.2f} GiB of memory, and the chip has {has:.2f} GiB"
    return f"is refused by the compiler: {message.strip().splitlines()[0]}"
