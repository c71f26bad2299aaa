"""The folder of a run: what ran is written there as JSON, and the same folder again means resume."""

import json
import os
import pathlib
import subprocess
from typing import Any

from experiments.engine import config as configs
from experiments.engine import errors, mesh

MAY_CHANGE = ("device", "mesh.data", "train.log_every", "train.keep")  # on resume; they do not change a number


def commit() -> str:
    """The git commit of the code that runs, '' where it is not a checkout."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def write(file: pathlib.Path, content: bytes) -> None:
    """The file with this content, never half-written: a draft is put in place by renaming."""
    draft = file.with_name(file.name + ".tmp")
    draft.write_bytes(content)
    os.replace(draft, file)


def as_json(value: Any) -> bytes:
    """The content of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()


def write_json(file: pathlib.Path, value: Any) -> None:
    """The value as JSON, never half-written."""
    write(file, as_json(value))


def new_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The path of a file that `write_new` is to write into the folder; nothing is made yet.

    Raises UserError where there is such a file already, or the folder cannot be written.
    """
    file = folder / name
    above = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "may not be written" if above.is_dir() else "is a file"
        raise errors.UserError(f"the workdir {folder} cannot be written: {above} {reason}")
    if file.exists():
        raise errors.UserError(f"{file} is there already: choose another --workdir")
    return file


def write_new(file: pathlib.Path, content: bytes) -> None:
    """The file with this content, in a folder that is made where it is not there. UserError where it cannot be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, content)
    except OSError as error:
        raise errors.UserError(f"{file} cannot be written: {error.strerror or error}") from error


def enter(folder: pathlib.Path, config: dict[str, Any]) -> bool:
    """Make the folder, or come back to it; True if its run is finished.

    Raises UserError where the folder cannot be written, or where it holds a run of another config (naming the keys).
    """
    saved = folder / "config.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if saved.exists():
            _same(json.loads(saved.read_text(encoding="utf-8"))["config"], config, folder)
        elif any(folder.iterdir()):
            raise errors.UserError(f"{folder} holds files, but no run to resume: choose another --workdir")
        finished = (folder / "summary.json").exists()
        if not finished:
            write_json(saved, {"config": config, "versions": mesh.versions(), "commit": commit()})
    except OSError as error:
        raise errors.UserError(f"the workdir {folder} cannot be written: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.UserError(
            f"{saved} is damaged, so this run cannot be resumed: choose another --workdir"
        ) from error
    return finished


def _same(old: dict[str, Any], new: dict[str, Any], folder: pathlib.Path) -> None:
    before, now = configs.flat(old), configs.flat(new)
    keys = [k for k in before.keys() | now.keys() if before.get(k) != now.get(k) and k not in MAY_CHANGE]
    if keys:
        changes = ", ".join(f"{k} ({before.get(k)!r} -> {now.get(k)!r})" for k in sorted(keys))
        raise errors.UserError(f"{folder} holds a run with another config, and resuming may not change {changes}")
