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

# What may change on resume: where it runs, how long, what is logged, and what happens if something goes wrong.
# A name that ends with a dot stands for all settings below it.
MAY_CHANGE = tuple(
    "log study. mesh. train.steps train.log_every train.evaluate_every train.save_every train.keep_best "
    "train.nan".split()
)
REMEMBERS = "skip_spikes"  # a value of train.nan with a history in its checkpoints: nothing changes to it or from it
LOCK = "lock"
SOURCES, DIFF = "source", "checkout.diff"  # the folder of the user's own code, and the edits of ours in it
COMPUTES = ("jax", "jaxlib")
PATIENCE, PAUSE = 120.0, 0.1  # seconds that a study waits for its folder's lock, and between two attempts


def describe_commit() -> str:
    """Return the git commit of the code that runs, '' outside of a checkout; of an edited one it ends with -dirty. and
    16 digits of the SHA-256 of `git diff HEAD`."""
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
    """Another process holds the folder."""


@contextlib.contextmanager
def lock(folder: pathlib.Path, *, wait: float = 0.0) -> Iterator[None]:
    """Lock the folder, which is created if it is missing, against other runs during the block.

    Raises InUse if another process holds it for more than `wait` seconds, and UserError if it cannot be written. Not
    the filelock package: on a drive without locks its lock outlives a killed process.
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
    """Return a handle that holds the lock until it is closed. Raises InUse if another process has the lock."""
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

    devices: number and kind; if given, what differs from the training before is printed. data: what identifies the
    run's data (run.Work.data). resume: the step of the checkpoint to go on from. Raises UserError if the folder cannot
    be written, or holds a run of another config (naming the keys), of other classes or with more steps.
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
            (folder / "summary.json").unlink(missing_ok=True)  # what it tells will be another
        finished = is_finished(folder, config["train"]["steps"])
        facts = {"config": config, "versions": mesh.versions(), "devices": devices, "commit": describe_commit()}
        facts["data"] = data or before.get("data")
        if finished or before and checkpoint.newest(saves) is not None:
            check_data(folder, before.get("data"), facts["data"])
            for line in list_changes(before, facts) if devices and not finished else []:
                print(line, flush=True)
        if not finished:
            disk.write_json(saved, facts)
    return finished


def _check_config(folder: pathlib.Path, before: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UserError if a resume changes settings that it may not change."""
    old, now = configs.flat(before), configs.flat(config)
    differ = {k: (old.get(k), now.get(k)) for k in old | now if old.get(k) != now.get(k)}
    changed = sorted(k for k, pair in differ.items() if REMEMBERS in pair or not may_change(k))
    if changed:
        values = ", ".join("{} ({!r} -> {!r})".format(k, *differ[k]) for k in changed)
        allowed = ", ".join(key + "*" if key.endswith(".") else key for key in MAY_CHANGE)
        what = f"{folder} holds a run with another config"
        raise errors.UserError(f"{what}, and resuming may not change {values}; what may: {allowed}")


def _check_step(saves: pathlib.Path, step: int) -> None:
    if step not in (steps := manifest.steps(saves)):
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise errors.UserError(f"--resume={step}: {saves} has no checkpoint of this step, but of {there}")


def check_data(folder: pathlib.Path, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Print a warning if a run was trained on other data before. Raises UserError for other classes."""
    old, new = before or {}, now or {}
    was, are = (one.get("classes") or [] for one in (old, new))
    if was and are and was != are:
        differ = [f"class {i} was {a!r} and is {b!r}" for i, (a, b) in enumerate(zip(was, are, strict=False)) if a != b]
        count = f"{len(was)} classes before, {len(are)} now"
        raise errors.UserError(
            f"{folder} holds a run of other classes ({'; '.join([count, *differ[:3]])}): go on with the data that it"
            " began with, or choose another --workdir"
        )
    if None not in (digests := [one.get("sha256") for one in (old, new)]) and digests[0] != digests[1]:
        print(f"warning: the data are not those that {folder} was trained on before", flush=True)


def suggest_newest(folder: pathlib.Path, flag: str) -> str:
    """Return advice about a folder that is not a run: the newest run in it as the value of the flag, or another one."""
    runs = sorted(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    if not runs:
        return f": choose another {flag}"
    return f": the newest run in it is {flag}={shlex.quote(str(runs[-1].parent))}"


def is_finished(folder: pathlib.Path, steps: int) -> bool:
    """Return True if the run has its result after so many steps. Raises UserError if it has taken more already."""
    try:
        result = int(disk.read_json(folder / "summary.json", says="its result").get("steps", 0))
    except (errors.UserError, ValueError, TypeError):
        result = 0  # it is missing or damaged, and will be written again
    newest = max(result, checkpoint.newest(folder / "checkpoints") or 0)
    if newest > steps:
        raise errors.UserError(
            f"{folder} holds a run that has taken {newest:,} steps: train.steps = {steps:,} must not be less"
        )
    return result == steps


def may_change(key: str) -> bool:
    """Return True if a run may be resumed with another value of this setting."""
    return any(key == one or one[-1] == "." and key.startswith(one) for one in MAY_CHANGE)


def keep_sources(folder: pathlib.Path, files: Mapping[pathlib.Path, str], diff: bytes = b"") -> dict[str, str]:
    """Copy these files into the run's folder under their names, and the checkout's diff if there is one.

    Return the SHA-256 of each copy by its name. If a run goes on with another file, the first copy stays, and the other
    one has 8 digits of its SHA-256 in its name. Raises OSError if the folder cannot be written.
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
    """Return the lines to print about a run that goes on; before, now: its config.json."""
    lines, (old, new) = [], (one["config"]["train"]["steps"] for one in (before, now))
    optim = now["config"]["optim"]
    falls, grows = optim["schedule"] != "constant", min(old, new) <= optim["warmup_steps"]  # a warm-up that is derived
    if old != new and (falls or grows):
        lines.append(f"train.steps was {old} and is {new}: the rest of the learning rate's schedule is another one")
    pairs = [(f"with {name}", before["versions"].get(name), now["versions"][name]) for name in COMPUTES]
    pairs.append(("on", before.get("devices"), now["devices"]))
    others = [f"{how} {one}, now {other}" for how, one, other in pairs if one not in (None, other)]
    if others:
        lines.append(f"it was trained {'; '.join(others)}: numbers may differ in the last bits from here on")
    return lines
