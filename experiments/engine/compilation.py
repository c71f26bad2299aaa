"""Compiled programs: the training step before the first batch, and a cache from which a second start takes them."""

import functools
import os
import pathlib
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from experiments.data import download
from experiments.engine import errors

FOLDER = "JAX_COMPILATION_CACHE_DIR"  # JAX's own variable
_TROUBLE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': \w+: (.*)", re.DOTALL)


def keep_in(where: str) -> None:
    """Keep what is compiled from here on, also by later processes, in a folder.

    where: 'user' is `compiled` in the user's cache folder, or what JAX_COMPILATION_CACHE_DIR says; '' keeps nothing;
    else a path, which must be writable (UserError). A cache folder that is not is left alone, and said.
    """
    forget_folder()
    if not where:
        jax.config.update("jax_enable_compilation_cache", False)
    if not jax.config.jax_enable_compilation_cache:  # as JAX_ENABLE_COMPILATION_CACHE=false has it
        return
    folder = pathlib.Path(where)
    if where == "user":
        folder = pathlib.Path(os.environ.get(FOLDER) or download.cache_folder() / "compiled")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError):  # the latter for what is no path, such as half of a character
        writable = False
    if not writable:
        if where != "user":
            raise errors.UserError(f"compilation_cache = {where}: the folder cannot be written")
        print(f"compiled programs are not kept: {folder} cannot be written", flush=True)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX leaves out what compiles in less than a second; of that, a small run is made.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.showwarning = functools.partial(_replace_damaged, folder, warnings.showwarning)


def forget_folder() -> None:
    """From here on JAX looks anew whether, and where, compiled programs are kept."""
    compilation_cache.reset_cache()


def _replace_damaged(folder: pathlib.Path, show: Callable, message: Warning | str, *place: Any, **more: Any) -> None:
    """Show a warning; but where it is of a program that could not be read or kept, tell it in a sentence.

    JAX writes a program where it stays, so a process that is killed, or a full disk, leaves a part of one there. JAX
    would warn of it at every start and never replace it. So it is deleted, before what is compiled now is written.
    """
    found = _TROUBLE.match(str(message))
    if found is None:
        return show(message, *place, **more)
    what, name, why = found.groups()
    for entry in folder.glob(f"{name}-*"):
        if not _whole(entry):
            entry.unlink(missing_ok=True)
    if what == "reading":
        print(f"the compiled program {name} was not kept whole, and is compiled anew", flush=True)
    else:
        print(f"the compiled program {name} cannot be kept: {why.splitlines()[0]}", flush=True)


def _whole(entry: pathlib.Path) -> bool:
    """Whether all of it is there. Never said of what Zstandard has packed, which JAX uses where that is installed."""
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(entry.read_bytes())
    except (OSError, zlib.error):
        return False
    return unpacker.eof


def for_one_run(mesh: Mesh) -> dict[str, int]:
    """`compiler_options` of jax.jit for a program that runs once: on CPUs it is compiled in a third of the time.

    LLVM does less, so that the program itself takes longer; the numbers are the same. A level in XLA_FLAGS stays.
    """
    level, cpu = "xla_backend_optimization_level", mesh.devices.flat[0].platform == "cpu"
    return {level: 1} if cpu and level not in os.environ.get("XLA_FLAGS", "") else {}


class Compiled(dict):
    """The compiled training step for each size of a batch; called, it takes the one for the batch that is given."""

    def __call__(self, state: Any, batch: dict, *rest: Any) -> Any:
        return self[batch["example_B"].shape[0]](state, batch, *rest)

    def largest(self) -> Any:
        """The one for the largest batch."""
        return self[max(self)]


def ahead(step: Callable, state: Any, batches: Iterable[dict], *rest: Any) -> tuple[Compiled, float]:
    """The jitted step(state, batch, *rest) compiled for each size among these batches, and the seconds it took."""
    began, compiled = time.perf_counter(), Compiled()
    for batch in batches:
        size = batch["example_B"].shape[0]
        if size not in compiled:
            compiled[size] = step.lower(state, batch, *rest).compile()
    return compiled, time.perf_counter() - began
