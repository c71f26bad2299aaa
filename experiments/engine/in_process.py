"""A run within another program's process, such as a notebook's: what that process was is what it stays."""

import contextlib
import importlib
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import jax

from experiments.engine import compilation, config


@contextlib.contextmanager
def unchanged(folder: pathlib.Path) -> Iterator[None]:
    """Within this, the user's own modules are imported anew; behind it, all is as it was before.

    folder: that of the config. What JAX has started, and what it has compiled, stays.
    """
    place, path, bytecode, flags = os.getcwd(), list(sys.path), sys.dont_write_bytecode, dict(jax.config.values)
    folders = (place, str(folder.absolute()))
    before = {name: module for name, module in sys.modules.items() if _edited(module, folders)}
    for name in before:
        del sys.modules[name]
    importlib.invalidate_caches()  # a file may have been written since the folder was last looked at
    sys.dont_write_bytecode = True  # it is told from a newer file by its seconds only
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stdout):
            yield
    finally:
        for name in [name for name, module in sys.modules.items() if _edited(module, folders)]:
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:], sys.dont_write_bytecode = path, bytecode
        os.chdir(place)
        _set(flags)


def _edited(module: ModuleType, folders: tuple[str, ...]) -> bool:
    """Whether the module is from a file beside the config, or below the working directory, that the user may edit."""
    file = getattr(module, "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    return file.endswith(".py") and file.startswith(folders) and not installed and config.own(file)


def _set(flags: dict) -> None:
    """JAX's flags as they were."""
    changed = {name: value for name, value in flags.items() if jax.config.values[name] != value}
    for name, value in changed.items():
        with contextlib.suppress(RuntimeError):  # of a flag that counts only before JAX has started
            jax.config.update(name, value)
    if changed:
        compilation.forget_folder()
