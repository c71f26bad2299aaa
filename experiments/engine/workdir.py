"""The folder of a run: what ran is written there as JSON, and the same folder again means resume."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.engine import checkpoint, disk, disk_errors, errors, json_file, mesh, step_folders
from experiments.engine import config as configs

# What may change on resume: where it runs, how long, what is written down, and what is done when something goes wrong.
# A name that ends with a dot stands for all settings below it.
MAY_CHANGE = (
    "resume",
    "device",
    "compilation_cache",
    "study.",
    "mesh.",
    "debug.",
    "train.steps",
    "train.probe",
    "train.log_every",
    "train.evaluate_every",
    "train.evaluate_batch",
    "train.save_every",
    "train.save_minutes",
    "train.keep",
    "train.keep_best",
    "train.nan",
)
LOCK, OLD_DRAFT = "lock", "config.json.tmp"  # the latter of an older version that was killed as it began
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a mounted drive that has none says


@functools.cache
def commit() -> str:
    """The git commit of the code that runs, '' where it is not a checkout; asked once, as the code runs from then on.

    Where tracked files were edited it goes on with -dirty. and 16 digits of the SHA-256 of `git diff HEAD`, or with
    -unknown where git does not tell. Files that are not tracked have no part in it.
    """
    try:
        found = _git("rev-parse", "HEAD").decode().strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    try:
        changes = _git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
    except (OSError, subprocess.SubprocessError):
        return f"{found}-unknown"
    return f"{found}-dirty.{hashlib.sha256(changes).hexdigest()[:16]}" if changes else found


def _git(*command: str) -> bytes:
    """What git says of this checkout."""
    folder = pathlib.Path(__file__).parent
    command = ("git", "--no-optional-locks", *command)
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=10, check=True).stdout


def as_json(value: Any) -> bytes:
    """The content of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()


def write_json(file: pathlib.Path, value: Any) -> None:
    """The value as JSON, never half-written."""
    disk.write(file, as_json(value))


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
        disk.write(file, content)
    except OSError as error:
        raise errors.UserError(f"{file} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def hold(folder: pathlib.Path) -> Iterator[None]:
    """Inside, no other run can be in this folder, which is made where it is not there.

    Raises UserError where another run holds it (naming that one), or where the folder cannot be written. The system
    lets go of the lock when the process ends, however it does.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened, alone = _locked(folder)
    except OSError as error:
        raise _refusal(folder, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may have vanished
            if alone and _is_at(opened, folder / LOCK):  # not where it was moved, and another run has this path now
                os.unlink(folder / LOCK)  # before another one can have it
        with contextlib.suppress(OSError):  # a mounted drive may be gone
            os.close(opened)


def _is_at(opened: int, path: pathlib.Path) -> bool:
    return os.path.samestat(os.fstat(opened), os.stat(path))


def _locked(folder: pathlib.Path) -> tuple[int, bool]:
    """The open lock file of the folder, and whether this process has it alone: not on a drive without locks."""
    while True:
        opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise OSError(errno.ENXIO, "it is no file, or one that has another name too", str(folder / LOCK))
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(opened, folder / LOCK):
                alone = True
                break
            os.close(opened)  # the one who had it removed the file in between
        except FileNotFoundError:
            os.close(opened)
        except BlockingIOError:
            holder = os.read(opened, 1000).decode(errors="replace").strip() or "another process"
            os.close(opened)
            raise errors.UserError(f"{folder} is in use by a run that is under way ({holder})") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(opened)
                raise
            print(f"{folder} cannot be locked: see to it that no other run uses it", flush=True)
            alone = False
            break
    os.ftruncate(opened, 0)
    os.write(opened, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return opened, alone


def enter(
    folder: pathlib.Path, config: dict[str, Any], defaults: Mapping[str, Any] | None = None, devices: str | None = None
) -> bool:
    """Make the folder, or come back to it; True if its run is finished, with all the steps that the config wants.

    defaults: values, by whole keys, of settings that an older version did not have. devices: told in config.json.
    Raises UserError where the folder cannot be written, or where it holds a run of another config (naming the keys) or
    one with more steps.
    """
    saved, steps = folder / "config.json", config["train"]["steps"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk.tidy(folder)
        if saved.exists():
            before = json.loads(json_file.text(saved))["config"]
            _same(dict(defaults or {}) | configs.flat(before), configs.flat(config), folder)
        elif any(found.name not in (LOCK, OLD_DRAFT) for found in folder.iterdir()):
            raise errors.UserError(f"{folder} holds files, but no run to resume: choose another --workdir")
        fall_back = config.get("resume") == "latest_valid"
        over = finished(folder, steps) and checkpoint.whole(folder / "checkpoints", steps, fall_back=fall_back)
        if not over:
            told = {"config": config, "versions": mesh.versions(), "devices": devices, "commit": commit()}
            write_json(saved, told)
    except OSError as error:
        raise _refusal(folder, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise errors.UserError(
            f"{saved} is damaged, so this run cannot be resumed: choose another --workdir"
        ) from error
    return over


def _refusal(folder: pathlib.Path, error: OSError) -> errors.UserError:
    """What to say of a folder that cannot be used, or of what is in it and in the way."""
    reason = disk.LINK if error.errno == errno.ELOOP else disk_errors.reason(error)
    file = pathlib.Path(error.filename or folder)
    if file == folder or not os.path.lexists(file):
        return errors.UserError(f"the workdir {folder} cannot be written: {reason}")
    return errors.UserError(f"{file} cannot be used: {reason}; mend that, or choose another --workdir")


def finished(folder: pathlib.Path, steps: int) -> bool:
    """Whether the run has its result after so many steps. UserError where it has taken more already."""
    told = _steps_of_result(folder / "summary.json")
    taken = max(told, *step_folders.steps(folder / "checkpoints"), 0)
    if taken > steps:
        raise errors.UserError(
            f"{folder} holds a run that has taken {taken:,} steps: train.steps = {steps:,} must not be less"
        )
    return told == steps


def _steps_of_result(summary: pathlib.Path) -> int:
    """The steps of a finished run; -1 where there is no summary, or one that is of no use and will be made again."""
    try:
        told = json.loads(json_file.text(summary))["steps"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return -1
    return told if isinstance(told, int) else -1


def _same(before: dict[str, Any], now: dict[str, Any], folder: pathlib.Path) -> None:
    """UserError, naming all of them, where settings changed that may not."""
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k) and not may_change(k))
    if changed:
        changes = ", ".join(f"{k} ({before.get(k)!r} -> {now.get(k)!r})" for k in changed)
        right = ", ".join(key + "*" if key.endswith(".") else key for key in MAY_CHANGE)
        raise errors.UserError(
            f"{folder} holds a run with another config, and resuming may not change {changes}; what may: {right}"
        )


def may_change(key: str) -> bool:
    """Whether a run may be resumed with another value of this setting."""
    return any(key == right or (right.endswith(".") and key.startswith(right)) for right in MAY_CHANGE)
