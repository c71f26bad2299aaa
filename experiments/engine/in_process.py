"""A run within another program's process, such as a notebook's: what that process was is what it stays."""

import contextlib
import importlib
import os
import pathlib
import sys
import warnings
from collections.abc import Iterable, Iterator

import jax

from experiments.engine import by_name, compilation, disk, errors


@contextlib.contextmanager
def unchanged(folder: pathlib.Path) -> Iterator[None]:
    """Within this, the user's own modules are imported anew: those of the working directory, of the project's folder
    and of that of the config. Behind it, all is as it was before; but what JAX has started and compiled stays.
    UserError where there is no working directory any more.
    """
    try:
        place = os.getcwd()
    except OSError as error:
        reason = disk.reason(error)
        raise errors.UserError(f"the working directory is gone ({reason}): os.chdir to one that is there") from error
    path, bytecode, flags = list(sys.path), sys.dont_write_bytecode, dict(jax.config.values)
    folders = (place, str(folder.absolute()), str(by_name.ROOT))
    before = {name: sys.modules.pop(name) for name in _edited(folders)}
    importlib.invalidate_caches()  # a file may have been written since the folder was last looked at
    unraisable = sys.unraisablehook
    sys.dont_write_bytecode = True  # it is told from a newer file by its seconds only
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stdout):
            yield
    finally:
        for name in _edited(folders):
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:], sys.dont_write_bytecode, sys.unraisablehook = path, bytecode, unraisable
        os.chdir(place)
        _set(flags)


def _edited(folders: Iterable[str]) -> list[str]:
    """The modules that are imported from one of these folders, and that the user may edit."""
    found = []
    for name, module in sys.modules.items():
        paths = (os.path.join(folder, *name.split(".")) for folder in folders)
        files = [path + end for path in paths for end in (".py", f"{os.sep}__init__.py")]
        if getattr(module, "__file__", None) in files and by_name.own(module.__file__):
            found.append(name)
    return found


def _set(flags: dict) -> None:
    """JAX's flags as they were."""
    changed = {name: value for name, value in flags.items() if jax.config.values[name] != value}
    for name, value in changed.items():
        with contextlib.suppress(RuntimeError):  # of a flag that counts only before JAX has started
            jax.config.update(name, value)
    if changed:
        compilation.forget_folder()
