"""The manifest of a checkpoint: the SHA-256 of each of its files, so that a restore detects any damage.

A folder of checkpoints holds <step>/state, which Orbax writes, and <step>/manifest.json. A checkpoint is written as
<step>.writing and deleted as <step>.deleting: so a folder named <step> is always complete.
"""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.config import disk, errors
from experiments.folder import records

FILE, STATE = "manifest.json", "state"
WRITING, DELETING = ".writing", ".deleting"


def steps(folder: pathlib.Path) -> set[int]:
    """Return the steps of the checkpoints in this folder, which may be missing."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return {int(name) for name in names if name.isdecimal()}


def tidy(folder: pathlib.Path) -> None:
    """Create the folder of checkpoints, and delete the incomplete checkpoints and half-written files of a killed run.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.suffix in (WRITING, DELETING):
            disk.remove(entry)
        elif entry.is_dir():
            disk.tidy(entry)


def write(checkpoint: pathlib.Path, *, metrics: Mapping[str, float], versions: Mapping[str, str]) -> None:
    """Write the manifest of a checkpoint, and wait until all its files are on the disk. Raises OSError."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    digests = {path.relative_to(checkpoint).as_posix(): _digest(path) for path in files}
    disk.write_json(checkpoint / FILE, {"metrics": metrics, "versions": versions, "files": digests})
    for path in (*checkpoint.rglob("*"), checkpoint):
        disk.flush(path)


def write_metrics(checkpoint: pathlib.Path, metrics: Mapping[str, float]) -> None:
    """Replace the metrics in the manifest of a checkpoint.

    Raises UserError if the manifest cannot be read, and OSError if it cannot be written.
    """
    content = _read(checkpoint)
    disk.write_json(checkpoint / FILE, content | {"metrics": metrics})
    disk.flush(checkpoint / FILE)


def metrics(checkpoint: pathlib.Path) -> dict[str, float]:
    """Return the metrics of a checkpoint; {} if its manifest is missing or damaged, which `verify` reports."""
    try:
        return _read(checkpoint)["metrics"]
    except errors.UserError:
        return {}


def verify(checkpoint: pathlib.Path) -> None:
    """Raise UserError if a file in the checkpoint's manifest is missing or has another SHA-256 than the manifest says.

    Also raise it if the manifest is missing or damaged.
    """
    for name, digest in _read(checkpoint)["files"].items():
        file = checkpoint / name
        with disk.reading(file):
            damaged = _digest(file) != digest
        errors.refuse((damaged, f"{file} is damaged: its SHA-256 differs from that in {FILE}"))


def _read(checkpoint: pathlib.Path) -> dict[str, Any]:
    content = records.read_object(checkpoint / FILE, {"!metrics": {"*": float}, "!files": records.TEXTS})
    errors.refuse((not content, f"{checkpoint / FILE} is missing, the manifest of a checkpoint"))
    return content


def _digest(file: pathlib.Path) -> str:
    with disk.open_regular(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
