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
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.config import disk, errors, settings as configs
from experiments.devices import distributed, mesh as meshes
from experiments.folder import checkpoint, records

# Settings that a resume may change: devices, duration, logs, and the handling of failed steps.
# A name that ends with a dot means all settings below it.
MAY_CHANGE = tuple(
    "log study. mesh. train.steps train.log_every train.evaluate_every train.save_every train.keep_best "
    "train.patience train.nan".split()
)
LOCK, OWNER = "lock", "process "  # the file, and the beginning of its content
SOURCES, DIFF = "source", "checkout.diff"  # folder of copies of the user's code; in it, `git diff HEAD` of ours
COMPUTES = ("jax", "jaxlib")  # packages whose version a resume compares with the previous one
SHARED_SECONDS = 60  # timeout for all processes to see a new file: NFS caches its absence for 30 s
PATIENCE, PAUSE = 120.0, 0.1  # seconds that a study waits for its folder's lock, and between two attempts


@functools.cache
def read_commit() -> tuple[str, bytes]:
    """Return the git commit of this project and the output of `git diff HEAD`; ('', b'') if git fails.

    Git fails outside a checkout. If files are edited, the commit has the suffix "-dirty." and 16 digits of the SHA-256
    of that output.
    """
    options = {"cwd": pathlib.Path(__file__).parent, "capture_output": True, "timeout": 10, "check": True}
    diff = "diff HEAD --no-ext-diff --no-textconv --no-color"
    try:
        commands = (["git", "--no-optional-locks", *command.split()] for command in ("rev-parse HEAD", diff))
        head, changes = (subprocess.run(command, **options).stdout for command in commands)
    except (OSError, subprocess.SubprocessError):
        return "", b""
    suffix = f"-dirty.{hashlib.sha256(changes).hexdigest()[:16]}" if changes else ""
    return head.decode().strip() + suffix, changes


class InUse(errors.UserError):
    """The error for a folder that another process has locked."""


@contextlib.contextmanager
def lock(folder: pathlib.Path, *, wait: float = 0.0) -> Iterator[None]:
    """Context manager: lock the folder against other runs. Create it if it is missing.

    Raises InUse if another process keeps the lock for more than `wait` seconds, and UserError if the folder cannot be
    written. The filelock package is not used: on a drive without locks, its lock outlives a killed process.
    """
    deadline, handle = time.monotonic() + wait, None
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        while handle is None:
            try:
                handle = _acquire(folder / LOCK)
            except InUse:
                if time.monotonic() >= deadline:
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
    not_ours = f"{file} is not the lock of a run. Move it, or choose another --workdir"  # a lock is overwritten
    errors.refuse((file.is_symlink(), not_ours))
    handle = disk.open_handle(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    content, links = os.read(handle, 1000).decode(errors="replace").strip(), os.fstat(handle).st_nlink
    if links > 1 or not content.startswith(OWNER) and content:
        os.close(handle)
        raise errors.UserError(not_ours)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        remedy = "Wait until it ends, or choose another --workdir"
        raise InUse(f"{file.parent} is in use by another run ({content}). {remedy}") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(f"{file.parent}: this drive has no locks. Make sure that no other run uses it.", flush=True)
    if not (file.exists() and os.path.samestat(os.fstat(handle), file.stat())):  # its last owner has deleted it
        os.close(handle)
        return _acquire(file)
    os.ftruncate(handle, 0)
    os.write(handle, f"{OWNER}{os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def open_run(
    folder: pathlib.Path,
    config: dict,
    devices: str | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    resume: int | None = None,
) -> bool:
    """Create or reopen a run's folder, locked by the caller. Return True if its run has taken all steps of the config.

    Every process must call this. devices: their number and kind; if not None, print the changes since the previous
    session (`list_changes`). data: the identity of the data (runs.Work.data). resume: the step of the checkpoint to
    resume from; summary.json is then deleted. Raises UserError if the folder cannot be written or has other files, or
    if settings outside MAY_CHANGE differ from its run's. A run with other classes or more steps, a missing checkpoint
    of the step `resume`, and processes with different configs or without a shared disk raise it too.
    """
    differ = "the processes have different configs. Start all with the same command, except for --process"
    errors.refuse((not distributed.is_same(zlib.crc32(disk.as_json(config)) >> 1), differ))
    finished = distributed.call_in_main(lambda: _open(folder, config, devices, data, resume))
    deadline = time.monotonic() + SHARED_SECONDS
    hidden = f"a process does not see the files of process 0 in {folder}. Set --workdir to a shared disk"
    while not distributed.is_main() and not (folder / records.CONFIG).exists():
        errors.refuse((time.monotonic() > deadline, hidden))
        time.sleep(0.5)
    return bool(finished)


def _open(
    folder: pathlib.Path, config: dict, devices: str | None, data: Mapping[str, Any] | None, resume: int | None
) -> bool:
    """Do the work of `open_run` in one process."""
    with disk.writing(folder):
        disk.tidy(disk.folder(folder))
        if previous := records.read_config(folder):
            _check_config(folder, previous["config"], config)
        elif any(entry.name != LOCK for entry in folder.iterdir()):
            raise errors.UserError(f"{folder} holds files, but no run to resume{suggest_newest(folder, '--workdir')}")
        if resume is not None:
            checkpoint.choose_step(folder, checkpoint.NONE, resume, label=f"--resume={resume}: ")
            (folder / records.SUMMARY).unlink(missing_ok=True)  # the result changes
        finished = is_finished(folder, config["train"]["steps"])
        content = {"config": config, "versions": meshes.versions(), "devices": devices, "commit": read_commit()[0]}
        content["data"] = data or previous.get("data")
        if finished or previous and has_checkpoint(folder):
            _check_data(folder, previous.get("data") or {}, content["data"] or {})
            for line in list_changes(previous, content) if devices and not finished else []:
                print(line, flush=True)
        if not finished:
            disk.write_json(folder / records.CONFIG, content)
    return finished


def _check_config(folder: pathlib.Path, before: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UserError if a resume changes settings outside MAY_CHANGE."""
    old, new = configs.flat(before), configs.flat(config)
    changed = sorted(k for k in old | new if old.get(k) != new.get(k) and not may_change(k))
    values = ", ".join(f"{k} ({old.get(k)!r} -> {new.get(k)!r})" for k in changed)
    allowed = ", ".join(key + "*" if key.endswith(".") else key for key in MAY_CHANGE)
    fault = f"{folder} holds a run with another config, and resuming cannot change {values}. "
    fault += f"Set the old values or choose another --workdir. Resuming can change {allowed}"
    errors.refuse((changed, fault))


def _check_data(folder: pathlib.Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Print a warning if the data of a resumed run have changed. Raises UserError if the classes have changed."""
    old_names, new_names = old.get("classes") or [], new.get("classes") or []
    pairs = enumerate(zip(old_names, new_names, strict=False))
    differ = [f"class {i} was {a!r} and is {b!r}" for i, (a, b) in pairs if a != b]
    differ = "; ".join([f"{len(old_names)} classes before, {len(new_names)} now", *differ[:3]])
    fault = f"{folder} holds a run with other classes ({differ}). Resume with the same data as before"
    errors.refuse((old_names and new_names and old_names != new_names, f"{fault}, or choose another --workdir"))
    if None not in (digests := {old.get("sha256"), new.get("sha256")}) and len(digests) > 1:
        print(f"warning: the data differ from those that {folder} was trained on before", flush=True)


def locate(path: str | os.PathLike) -> tuple[pathlib.Path, int | None]:
    """Return a run's folder and a checkpoint's step, or None, from RUN, RUN/config.json or RUN/checkpoints/40."""
    place = pathlib.Path(os.path.expanduser(path))
    if place.parent.name == records.CHECKPOINTS and place.name.isdecimal():
        return place.parents[1], int(place.name)
    return place.parent if place.name == records.CONFIG else place, None


def suggest_newest(folder: pathlib.Path, flag: str) -> str:
    """Return the end of a message about a folder that is no run: the newest run in it, else "Choose another FLAG".

    flag: the command's flag for the folder, such as --workdir.
    """
    runs = sorted(folder.glob(f"*/{records.CONFIG}"), key=os.path.getmtime)
    newest = f"The newest run in it is {flag}={shlex.quote(str(runs[-1].parent))}" if runs else f"Choose another {flag}"
    return f". {newest}"


def is_finished(folder: pathlib.Path, steps: int) -> bool:
    """Return True if the run has a result after `steps` steps.

    Raises UserError if its result or newest checkpoint has more steps, and for a damaged summary.json.
    """
    try:
        result = records.read_summary(folder).get("steps", 0)
    except errors.UserError as error:
        raise errors.UserError(f"{error}. Delete this file, and the run writes a new one") from error
    newest = max(result, checkpoint.newest(folder / records.CHECKPOINTS) or 0)
    taken = f"{folder} holds a run that has taken {newest:,} steps"
    errors.refuse((newest > steps, f"{taken}. train.steps = {steps:,} must be at least {newest:,}"))
    return result == steps


def has_checkpoint(folder: pathlib.Path | None) -> bool:
    """Return True if the folder of a run has a checkpoint to resume from; False for None."""
    return folder is not None and checkpoint.newest(folder / records.CHECKPOINTS) is not None


def may_change(key: str) -> bool:
    """Return True if a run may be resumed with another value of this setting."""
    return key in MAY_CHANGE or key.startswith(tuple(name for name in MAY_CHANGE if name.endswith(".")))


def keep_sources(folder: pathlib.Path, files: Mapping[pathlib.Path, str], diff: bytes = b"") -> dict[str, str]:
    """Copy these files (path -> name) into the run's folder `source`, with the checkout's diff if there is one.

    Missing files are skipped. Return the SHA-256 of each copy by its name. If a file has changed since the run began,
    the first copy stays, and the new one has 8 digits of its SHA-256 in its name. Raises OSError if the folder cannot
    be written.
    """
    contents, digests = {name: disk.read_bytes(file) for file, name in files.items() if file.is_file()}, {}
    contents |= {DIFF: diff} if diff else {}
    if contents:
        disk.tidy(disk.folder(folder, SOURCES))
    for name, content in contents.items():
        digest, copy = hashlib.sha256(content).hexdigest(), folder / SOURCES / name
        if copy.exists() and disk.read_bytes(copy) != content:
            first, copy = copy, copy.with_name(f"{copy.stem}.{digest[:8]}{copy.suffix}")
            print(f"{name} differs from {first}, the copy from the run's start. It is saved as {copy}", flush=True)
        disk.write(copy, content)
        digests[copy.name] = digest
    return digests


def list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the lines to print if a resume changes the learning rates (by train.steps), JAX's version or the devices.

    before, now: the contents of config.json in the previous and in this session of the run.
    """
    lines, optim = [], now["config"]["optim"]
    old, new = configs.flat(before["config"]).get("train.steps", 0), now["config"]["train"]["steps"]
    # Both depend on train.steps: a schedule that decays, and a warm-up that is derived (optim.warmup_steps).
    if old != new and (optim["schedule"] != "constant" or min(old, new) <= optim["warmup_steps"]):
        lines.append(f"train.steps was {old} and is {new}: the rest of the learning rate's schedule changes too")
    pairs = [(f"with {name}", before.get("versions", {}).get(name), now["versions"][name]) for name in COMPUTES]
    pairs.append(("on", before.get("devices"), now["devices"]))
    if differ := [f"{name} {last}, now {value}" for name, last, value in pairs if last not in (None, value)]:
        lines.append(f"the run was trained {'; '.join(differ)}: numbers may differ in the last bits from here on")
    return lines
