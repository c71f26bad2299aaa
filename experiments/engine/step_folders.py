"""The names in a folder of checkpoints: what is a checkpoint, what is half-done, what is put aside.

<step> is whole at any moment: it is made as <step>.writing, and goes away as <step>.deleting.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil

from experiments.engine import disk

WRITING, DELETING, DAMAGED = ".writing", ".deleting", ".damaged"
_STEP = re.compile("0|[1-9][0-9]*")
_LEFT = re.compile(rf"({_STEP.pattern})(\{WRITING}|\{DELETING})")


def steps(folder: pathlib.Path) -> set[int]:
    """The steps of the checkpoints in this folder, which may be absent."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {int(entry.name) for entry in found if _STEP.fullmatch(entry.name) and entry.is_dir()}


def tidy(folder: pathlib.Path) -> None:
    """Make the folder, or remove from it what a run that was killed left half-done; nothing else is touched.

    OSError where the folder is a link, or where something else has the name of a checkpoint.
    """
    with contextlib.suppress(FileExistsError):
        folder.parent.mkdir(parents=True)
    disk.folder(folder.parent, folder.name)
    for entry in sorted(folder.iterdir()):
        if _STEP.fullmatch(entry.name) and not entry.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{entry.name} is no folder", str(entry))
        left = _LEFT.fullmatch(entry.name)
        if left and entry.is_dir() and not entry.is_symlink():
            if left[2] == WRITING:
                print(f"step {int(left[1]):,} was not saved completely and is left out", flush=True)
            shutil.rmtree(entry)


def remove(saved: pathlib.Path) -> None:
    """Delete a checkpoint, which is at no time there in part."""
    going = saved.with_name(saved.name + DELETING)
    os.rename(saved, going)
    disk.remove(going)


def put_aside(saved: pathlib.Path) -> None:
    """Rename a checkpoint so that it is none, in place of what was put aside of this step before."""
    aside = saved.with_name(saved.name + DAMAGED)
    disk.remove(aside)
    os.rename(saved, aside)
