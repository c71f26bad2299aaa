"""What lies in a folder of checkpoints, and what is known of each: by its manifest, that it is what was saved.

<step> is whole at any moment: it is made as <step>.writing, and goes away as <step>.deleting. <step>/state is Orbax's,
<step>/manifest.json lists its files with size and sha256. That is by hand, as Orbax keeps no such list: what a full
disk or a broken copy has left of a checkpoint is to be known before it is read.
"""

import contextlib
import errno
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

from experiments.engine import disk, errors

FILE, STATE = "manifest.json", "state"
FORMAT = 1  # of what is in it
WRITING, DELETING, DAMAGED = ".writing", ".deleting", ".damaged"
_STEP = re.compile("0|[1-9][0-9]*")
_LEFT = re.compile(rf"({_STEP.pattern})(\{WRITING}|\{DELETING})")
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # something else is in its place


class Damaged(errors.UserError):
    """A checkpoint that is not what was saved; the sentence names the file."""


class Incomplete(Damaged):
    """The same where only something is missing, as it is where a drive was taken away before it had all of it."""


def steps(folder: pathlib.Path) -> set[int]:
    """The steps of the checkpoints in this folder, which may be absent."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return {int(entry.name) for entry in entries if _STEP.fullmatch(entry.name) and entry.is_dir()}


def tidy(folder: pathlib.Path) -> None:
    """Make the folder, or remove from it what a run that was killed left half-done. OSError where it is a link, or
    where something else has the name of a checkpoint."""
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


def put_aside(saved: pathlib.Path) -> None:
    """Rename a checkpoint so that it is none, in place of what was put aside of this step before."""
    aside = saved.with_name(saved.name + DAMAGED)
    disk.remove(aside)
    saved.rename(aside)


def write(folder: pathlib.Path, *, step: int, metrics: dict[str, float], versions: dict[str, str]) -> None:
    """List all files below `folder` in its manifest, and return when the disk has them and it. Raises OSError."""
    described = {name: _described(folder / name) for name in sorted(_names(folder))}
    content = {"format": FORMAT, "step": step, "metrics": metrics, "versions": versions, "files": described}
    (folder / FILE).write_bytes(_signed(content))
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):  # what a folder holds before the folder
        disk.flush(path)


def measured(folder: pathlib.Path, *, step: int, metrics: dict[str, float]) -> None:
    """Put these metrics into the manifest, at no time half of them. Raises OSError, and as `read`."""
    content = read(folder, step=step) | {"metrics": metrics}
    disk.tidy(folder)
    with disk.draft(folder / FILE) as draft:
        draft.write(_signed(content))
        draft.flush()
        disk.flush(pathlib.Path(draft.name))
    disk.flush(folder)


def read(folder: pathlib.Path, *, step: int) -> dict[str, Any]:
    """What the manifest of the checkpoint of `step` in this folder says. Damaged where it is not there or not the one
    that was written, UserError where a later version wrote it, RunError where the system does not let it be read."""
    try:
        with disk.opened(folder / FILE) as file:
            raw = file.read()
        content = json.loads(raw)
        content.pop("sha256", None)
        if raw != _signed(content):
            raise Damaged(_sentence(folder, FILE, "is not what was saved"))
    except OSError as error:
        raise _not_there(folder, FILE, error) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        kind = Damaged if raw.endswith(b"}\n") else Incomplete
        raise kind(_sentence(folder, FILE, "is not what was saved")) from error
    if content["format"] != FORMAT:
        raise errors.UserError(f"{folder / FILE} has format {content['format']}, and this version knows only {FORMAT}")
    if content["step"] != step:
        raise Damaged(_sentence(folder, FILE, f"is that of step {content['step']:,}"))
    return content


def damage(folder: pathlib.Path, *, step: int) -> Damaged | None:
    """How a file of the checkpoint of `step` in this folder is not what was saved; None where all are.

    RunError where the system does not let them be read, which says nothing about them; UserError as `read`.
    """
    name = "."
    try:
        listed, present = read(folder, step=step)["files"], _names(folder)
        for name in sorted(listed.keys() - present):
            return Incomplete(_sentence(folder, name, "is missing"))
        for name in sorted(present - listed.keys()):
            return Damaged(_sentence(folder, name, "was not saved with it"))
        for name, file in listed.items():  # quick, and what a full disk or a broken copy does
            size = (folder / name).stat().st_size
            if size != file["bytes"]:
                kind = Incomplete if size < file["bytes"] else Damaged
                return kind(_sentence(folder, name, f"has {size:,} bytes, and {file['bytes']:,} were saved"))
        for name, file in listed.items():
            if _described(folder / name) != file:
                return Damaged(_sentence(folder, name, "is not what was saved"))
    except Damaged as error:
        return error
    except OSError as error:
        return _not_there(folder, name, error)
    return None


def _not_there(folder: pathlib.Path, name: str, error: OSError) -> Damaged:
    """That there is no such file. RunError where its reading fails or is forbidden, which may pass."""
    if error.errno == errno.ENOENT:
        return Incomplete(_sentence(folder, name, "is missing"))
    how = f"cannot be read ({disk.reason(error)})"
    if error.errno in _NO_FILE:
        return Damaged(_sentence(folder, name, how))
    what = f"{error.filename or folder / name} {how}"
    raise errors.RunError(f"{what}: whether that checkpoint is damaged is not known") from error


def _sentence(folder: pathlib.Path, name: str, how: str) -> str:
    return f"the checkpoint {folder} is damaged: {name} {how}"


def _names(folder: pathlib.Path) -> set[str]:
    """Everything below the folder that is not a folder, by its path from there, but for the manifest and its drafts.
    OSError where a folder cannot be read, which `rglob` would pass over."""

    def stop(error: OSError) -> None:
        raise error

    names = set()
    for where, folders, entries in os.walk(folder, onerror=stop):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        names |= {os.path.relpath(os.path.join(where, name), folder) for name in (*entries, *links)}
    return {name for name in names if not (name == FILE or fnmatch.fnmatch(name, f"{FILE}.*{disk.DRAFT}"))}


def _described(file: pathlib.Path) -> dict[str, Any]:
    with disk.opened(file) as content:
        n = os.fstat(content.fileno()).st_size
        return {"bytes": n, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _signed(content: dict[str, Any]) -> bytes:
    """As JSON, ending with a digest of the rest; only these very bytes are accepted as the manifest later."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1) + "\n").encode()
