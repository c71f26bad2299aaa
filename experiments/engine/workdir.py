"""The folder of a run: its config and sources, its lock, and the settings that a resume may change."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import pathlib
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.engine import checkpoint, config as configs, disk, errors, manifest, mesh

# Settings that a resume may change: devices, duration, logs, and the handling of failed steps.
# A name that ends with a dot means all settings below it.
MAY_CHANGE = tuple(
    "log study. mesh. train.steps train.log_every train.evaluate_every train.save_every train.keep_best "
    "train.nan".split()
)
REMEMBERS = "skip_spikes"  # a value of train.nan that stores a history in checkpoints: a resume cannot set or remove it
LOCK = "lock"
SOURCES, DIFF = "source", "checkout.diff"  # the folder of the user's own code, and the edits of ours in it
COMPUTES = ("jax", "jaxlib")
PATIENCE, PAUSE = 120.0, 0.1  # seconds that a study waits for its folder's lock, and between two attempts


def describe_commit() -> str:
    """Return the git commit of the code, '' outside a checkout.

    If files are edited, "-dirty." and 16 digits of the SHA-256 of `git diff HEAD` follow it.
    """
    return read_commit()[0]


@functools.cache
def read_commit() -> tuple[str, bytes]:
    """Return the commit, and `git diff HEAD`."""

    def git(*command: str) -> bytes:
        options = {"cwd": pathlib.Path(__file__).parent, "capture_output": True, "timeout": 10, "check": True}
        return subprocess.run(("git", "--no-optional-locks", *command), **options).stdout

    try:
        head = git("rev-parse", "HEAD").decode().strip()
        changes = git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
    except (OSError, subprocess.SubprocessError):
        return "", b""
    return f"{head}-dirty.{hashlib.sha256(changes).hexdigest()[:16]}" if changes else head, changes


class InUse(errors.UserError):
    """Another process has locked the folder."""


@contextlib.contextmanager
def lock(folder: pathlib.Path, *, wait: float = 0.0) -> Iterator[None]:
    """Context manager: lock the folder against other runs. Create it if it is missing.

    Raises InUse if another process keeps the lock for more than `wait` seconds, and UserError if the folder cannot be
    written. The filelock package is not used: on a drive without locks, its lock outlives a killed process.
    """
    until = time.monotonic() + wait
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                handle = _acquire(folder / LOCK)
                break
            except InUse:
                if time.monotonic() >= until:
                    raise
            time.sleep(PAUSE)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink()
        os.close(handle)


def _acquire(file: pathlib.Path) -> int:
    """Lock the file and return its handle: closing it unlocks. Raises InUse if another process has the lock."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 1000).decode(errors="replace").strip()
        os.close(handle)
        raise InUse(f"{file.parent} is in use by another run ({owner})") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(f"{file.parent}: this drive has no locks. Make sure that no other run uses it.", flush=True)
    if not (file.exists() and os.path.samestat(os.fstat(handle), file.stat())):  # its last owner has deleted it
        os.close(handle)
        return _acquire(file)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def open_run(
    folder: pathlib.Path,
    config: dict,
    devices: str | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    resume: int | None = None,
) -> bool:
    """Create the folder, or reopen it. Return True if its run is finished, with all steps of the config.

    devices: their number and kind, to print how they differ from the previous ones; None: print nothing. data: the
    identity of the data (run.Work.data). resume: the step of the checkpoint to resume from. Raises UserError if the
    folder cannot be written, or holds a run with another config, other classes or more steps.
    """
    saved, saves, before = folder / "config.json", folder / "checkpoints", {}
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        disk.tidy(folder)
        if saved.exists():
            before = disk.read_json(saved, says="its settings")
            with disk.reading(saved):
                _check_config(folder, before["config"], config)
        elif any(entry.name != LOCK for entry in folder.iterdir()):
            raise errors.UserError(f"{folder} holds files, but no run to resume{suggest_newest(folder, '--workdir')}")
        if resume is not None:
            _check_step(saves, resume)
            (folder / "summary.json").unlink(missing_ok=True)  # the result changes
        finished = is_finished(folder, config["train"]["steps"])
        content = {"config": config, "versions": mesh.versions(), "devices": devices, "commit": describe_commit()}
        content["data"] = data or before.get("data")
        if finished or before and checkpoint.newest(saves) is not None:
            check_data(folder, before.get("data"), content["data"])
            for line in list_changes(before, content) if devices and not finished else []:
                print(line, flush=True)
        if not finished:
            disk.write_json(saved, content)
    return finished


def _check_config(folder: pathlib.Path, before: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UserError if a resume changes settings outside MAY_CHANGE."""
    old, new = configs.flat(before), configs.flat(config)
    differ = {k: (old.get(k), new.get(k)) for k in old | new if old.get(k) != new.get(k)}
    changed = sorted(k for k, pair in differ.items() if REMEMBERS in pair or not may_change(k))
    if changed:
        values = ", ".join("{} ({!r} -> {!r})".format(k, *differ[k]) for k in changed)
        allowed = ", ".join(key + "*" if key.endswith(".") else key for key in MAY_CHANGE)
        reason = f"{folder} holds a run with another config"
        raise errors.UserError(
            f"{reason}, and resuming may not change {values}: set the old values or choose another --workdir. It may "
            f"change {allowed}"
        )


def _check_step(saves: pathlib.Path, step: int) -> None:
    if step not in (steps := manifest.steps(saves)):
        available = ", ".join(map(str, sorted(steps))) or "none"
        raise errors.UserError(f"--resume={step}: {saves} has no checkpoint of this step. It has: {available}")


def check_data(folder: pathlib.Path, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Print a warning if the data of a resumed run have changed. Raises UserError if its classes have changed."""
    old, new = before or {}, now or {}
    was, are = old.get("classes") or [], new.get("classes") or []
    if was and are and was != are:
        differ = [f"class {i} was {a!r} and is {b!r}" for i, (a, b) in enumerate(zip(was, are, strict=False)) if a != b]
        count = f"{len(was)} classes before, {len(are)} now"
        raise errors.UserError(
            f"{folder} holds a run of other classes ({'; '.join([count, *differ[:3]])}): resume with the data of its"
            " first steps, or choose another --workdir"
        )
    digests = {old.get("sha256"), new.get("sha256")}
    if len(digests) > 1 and None not in digests:
        print(f"warning: the data are not those that {folder} was trained on before", flush=True)


def suggest_newest(folder: pathlib.Path, flag: str) -> str:
    """Return advice for a folder that is not a run: set the flag to the newest run in it, or to another folder."""
    runs = sorted(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    if not runs:
        return f": choose another {flag}"
    return f": the newest run in it is {flag}={shlex.quote(str(runs[-1].parent))}"


def is_finished(folder: pathlib.Path, steps: int) -> bool:
    """Return True if the run has its result after `steps`. Raises UserError if it has already taken more steps."""
    try:
        result = int(disk.read_json(folder / "summary.json", says="its result").get("steps", 0))
    except (errors.UserError, ValueError, TypeError):
        result = 0  # missing or damaged: the run writes it again
    newest = max(result, checkpoint.newest(folder / "checkpoints") or 0)
    if newest > steps:
        raise errors.UserError(
            f"{folder} holds a run that has taken {newest:,} steps: train.steps = {steps:,} must not be less"
        )
    return result == steps


def may_change(key: str) -> bool:
    """Return True if a run may be resumed with another value of this setting."""
    return key in MAY_CHANGE or key.startswith(tuple(name for name in MAY_CHANGE if name.endswith(".")))


def keep_sources(folder: pathlib.Path, files: Mapping[pathlib.Path, str], diff: bytes = b"") -> dict[str, str]:
    """Copy these files into the run's folder under their names, and the checkout's diff if there is one.

    Return the SHA-256 of each copy by its name. If a file has changed since the run began, the first copy stays, and
    the new one has 8 digits of its SHA-256 in its name. Raises OSError if the folder cannot be written.
    """
    contents = {name: file.read_bytes() for file, name in files.items() if file.is_file()}
    contents |= {DIFF: diff} if diff else {}
    digests = {}
    for name, content in contents.items():
        digest, copy = hashlib.sha256(content).hexdigest(), disk.folder(folder, SOURCES) / name
        if copy.exists() and copy.read_bytes() != content:
            first, copy = copy, copy.with_name(f"{copy.stem}.{digest[:8]}{copy.suffix}")
            print(f"{name} differs from {first}, with which the run began: it is kept as {copy}", flush=True)
        disk.write(copy, content)
        digests[copy.name] = digest
    return digests


def list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the lines to print about a run that resumes. before, now: the contents of its config.json."""
    lines, old, new = [], before["config"]["train"]["steps"], now["config"]["train"]["steps"]
    optim = now["config"]["optim"]
    falls, grows = optim["schedule"] != "constant", min(old, new) <= optim["warmup_steps"]  # a warm-up that is derived
    if old != new and (falls or grows):
        lines.append(f"train.steps was {old} and is {new}: the rest of the learning rate's schedule is another one")
    pairs = [(f"with {name}", before["versions"].get(name), now["versions"][name]) for name in COMPUTES]
    pairs.append(("on", before.get("devices"), now["devices"]))
    differ = [f"{name} {was}, now {value}" for name, was, value in pairs if was not in (None, value)]
    if differ:
        lines.append(f"it was trained {'; '.join(differ)}: numbers may differ in the last bits from here on")
    return lines
