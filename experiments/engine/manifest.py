"""The list of a checkpoint's files, with size and sha256 of each, by which it is known to be what was saved."""

import errno
import fnmatch
import hashlib
import json
import os
import pathlib
from typing import Any

from experiments.engine import disk, disk_errors, errors

FILE = "manifest.json"
FORMAT = 1  # of what is in it
_NO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # what a mounted drive that cannot do it says
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # something else is in its place


class Damaged(errors.UserError):
    """A checkpoint that is not what was saved; the sentence names the file."""


class Incomplete(Damaged):
    """The same where only something is missing, as it is where a drive was taken away before it had all of it."""


def write(folder: pathlib.Path, *, step: int, metrics: dict[str, float], versions: dict[str, str]) -> None:
    """List all files below `folder` in its manifest, and return when the disk has them and it. Raises OSError."""
    files = {name: _described(folder / name) for name in sorted(_names(folder))}
    content = {"format": FORMAT, "step": step, "metrics": metrics, "versions": versions, "files": files}
    (folder / FILE).write_bytes(_signed(content))
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):  # what a folder holds before the folder
        flush(path)


def measured(folder: pathlib.Path, *, step: int, metrics: dict[str, float]) -> None:
    """Put these metrics into the manifest, at no time half of them. Raises OSError, and as `read`."""
    content = {name: value for name, value in read(folder, step=step).items() if name != "sha256"}
    disk.tidy(folder)
    with disk.draft(folder / FILE) as draft:
        draft.write(_signed(content | {"metrics": metrics}))
        draft.flush()
        flush(pathlib.Path(draft.name))
    flush(folder)


def flush(path: pathlib.Path) -> None:
    """Return when the disk has this file, or this folder's list of names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(opened)


def read(folder: pathlib.Path, *, step: int) -> dict[str, Any]:
    """The manifest of the checkpoint of `step` in this folder.

    Raises Damaged where it is not there or not the one that was written, UserError where a later version wrote it, and
    RunError where the system does not let it be read.
    """
    try:
        with disk.opened(folder / FILE) as opened:
            raw = opened.read()
        content = json.loads(raw)
        signed = _signed({k: v for k, v in content.items() if k != "sha256"})
    except OSError as error:
        raise _not_read(folder, FILE, error) from error
    except (ValueError, AttributeError, RecursionError) as error:
        kind = Damaged if raw.endswith(b"}\n") else Incomplete
        raise kind(_sentence(folder, FILE, "is not what was saved")) from error
    if raw != signed:
        raise Damaged(_sentence(folder, FILE, "is not what was saved"))
    if content["format"] != FORMAT:
        raise errors.UserError(f"{folder / FILE} has format {content['format']}, and this version knows only {FORMAT}")
    if content["step"] != step:
        raise Damaged(_sentence(folder, FILE, f"is that of step {content['step']:,}"))
    return content


def verify(folder: pathlib.Path, *, step: int) -> None:
    """Return when every file of the checkpoint of `step` in this folder is what was saved; else raises Damaged.

    RunError where the system does not let them be read, which says nothing about them.
    """
    told, name = read(folder, step=step)["files"], "."
    try:
        found = _names(folder)
        for name in sorted(told.keys() - found):
            raise Incomplete(_sentence(folder, name, "is missing"))
        for name in sorted(found - told.keys()):
            raise Damaged(_sentence(folder, name, "was not saved with it"))
        for name, file in told.items():  # quick, and what a full disk or a broken copy does
            size = (folder / name).stat().st_size
            if size != file["bytes"]:
                kind = Incomplete if size < file["bytes"] else Damaged
                raise kind(_sentence(folder, name, f"has {size:,} bytes, and {file['bytes']:,} were saved"))
        for name, file in told.items():
            if _described(folder / name) != file:
                raise Damaged(_sentence(folder, name, "is not what was saved"))
    except OSError as error:
        raise _not_read(folder, name, error) from error


def _not_read(folder: pathlib.Path, name: str, error: OSError) -> Damaged | errors.RunError:
    """Damaged where there is no such file; not where its reading fails or is forbidden, which may pass."""
    if error.errno == errno.ENOENT:
        return Incomplete(_sentence(folder, name, "is missing"))
    said = f"cannot be read ({disk_errors.reason(error)})"
    if error.errno in _NO_FILE:
        return Damaged(_sentence(folder, name, said))
    return errors.RunError(f"{error.filename or folder / name} {said}: whether that checkpoint is damaged is not known")


def _sentence(folder: pathlib.Path, name: str, how: str) -> str:
    return f"the checkpoint {folder} is damaged: {name} {how}"


def _names(folder: pathlib.Path) -> set[str]:
    """Everything below the folder that is not a folder, by its path from there, but for the manifest and its drafts.

    OSError where a folder cannot be read, which `rglob` would pass over.
    """

    def stop(error: OSError) -> None:
        raise error

    found = set()
    for where, folders, files in os.walk(folder, onerror=stop):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        found |= {(pathlib.Path(where) / name).relative_to(folder).as_posix() for name in (*files, *links)}
    return {name for name in found if not (name == FILE or fnmatch.fnmatch(name, f"{FILE}.*{disk.DRAFT}"))}


def _described(file: pathlib.Path) -> dict[str, Any]:
    with disk.opened(file) as opened:
        return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _signed(content: dict[str, Any]) -> bytes:
    """As JSON, ending with a digest of the rest; only these very bytes are accepted as the manifest later."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1) + "\n").encode()
