"""The folder of a run: what ran is written there as JSON, and the same folder again means resume."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import pathlib
import shlex
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.engine import checkpoint, config as configs, disk, errors, manifest, mesh

# What may change on resume: where it runs, how long, what is written down, and what is done when something goes wrong.
# A name that ends with a dot stands for all settings below it.
MAY_CHANGE = tuple(
    "log study. mesh. train.steps train.log_every train.evaluate_every train.save_every train.keep_best "
    "train.nan".split()
)
REMEMBERS = "skip_spikes"  # the value of train.nan whose checkpoints hold a history: none changes to it or from it
LOCK = "lock"
SOURCES, DIFF = "source", "checkout.diff"  # the folder of the user's own code, and what it has of edits to ours
LARGEST_SOURCE = 2**20  # bytes of a file of it
COMPUTES = ("jax", "jaxlib")
PATIENCE, PAUSE = 120.0, 0.1  # seconds for which a study waits for its folder's lock, and between two attempts
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a mounted drive that has none says


def commit() -> str:
    """The git commit of the code that runs, '' where it is not a checkout. Where tracked files were edited it goes on
    with -dirty. and 16 digits of the SHA-256 of `git diff HEAD`, or with -unknown where git does not tell."""
    return checkout()[0]


@functools.cache
def checkout() -> tuple[str, bytes]:
    """The commit, and `git diff HEAD`."""

    def git(*command: str) -> bytes:
        options = {"cwd": pathlib.Path(__file__).parent, "capture_output": True, "timeout": 10, "check": True}
        return subprocess.run(("git", "--no-optional-locks", *command), **options).stdout

    digest = ""
    try:
        digest = git("rev-parse", "HEAD").decode().strip()
        changes = git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
    except (OSError, subprocess.SubprocessError):
        return digest and f"{digest}-unknown", b""
    return f"{digest}-dirty.{hashlib.sha256(changes).hexdigest()[:16]}" if changes else digest, changes


class InUse(errors.UserError):
    """Another process holds the folder."""


@contextlib.contextmanager
def hold(folder: pathlib.Path, *, wait: float = 0.0) -> Iterator[None]:
    """Inside, no other run can be in this folder, which is made where it is not there. InUse where another one (it is
    named) holds it for longer than so many seconds, UserError where it cannot be written. The lock ends with us."""
    until = time.monotonic() + wait
    try:
        new = [one for one in (folder, *folder.parents) if not os.path.exists(one)]
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock, alone = _locked(folder)
                break
            except InUse:
                if time.monotonic() >= until:
                    raise
            time.sleep(PAUSE)
    except OSError as error:
        raise _refusal(folder, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may have vanished
            if alone and _is_at(lock, folder / LOCK):  # not where it was moved, and another run has this path now
                os.unlink(folder / LOCK)  # before another one can have it
        with contextlib.suppress(OSError):  # a mounted drive may be gone
            os.close(lock)
            for one in new:  # which goes again, where nothing was put into it
                one.rmdir()


def _is_at(file: int, path: pathlib.Path) -> bool:
    return os.path.samestat(os.fstat(file), os.stat(path))


def _locked(folder: pathlib.Path) -> tuple[int, bool]:
    """The open lock file of the folder, and whether this process has it alone: not on a drive without locks."""
    while True:
        with contextlib.ExitStack() as stack:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            stack.callback(os.close, lock)
            status, alone = os.fstat(lock), True
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise OSError(errno.ENXIO, "it is no file, or one that has another name too", str(folder / LOCK))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(lock, folder / LOCK):
                    continue  # the one who had it removed the file in between
            except FileNotFoundError:
                continue
            except BlockingIOError:
                holder = os.read(lock, 1000).decode(errors="replace").strip() or "another process"
                raise InUse(f"{folder} is in use by a run that is under way ({holder})") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(f"{folder} cannot be locked: see to it that no other run uses it", flush=True)
                alone = False
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            stack.pop_all()
            return lock, alone


def enter(
    folder: pathlib.Path,
    config: dict,
    devices: str | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    fall_back: bool = False,
) -> bool:
    """Make the folder, or come back to it; True if its run is finished, with all the steps that the config wants.

    devices: how many of which kind; if they are given, what differs from what was trained here before is printed.
    data: what identifies the run's data (run.Work.data). fall_back: checkpoint.whole's. Raises UserError if the folder
    cannot be written, or holds a run of another config (naming the keys), of other classes or with more steps.
    """
    saved, steps, before = folder / "config.json", config["train"]["steps"], {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk.tidy(folder)
        if saved.exists():
            before = json.loads(disk.read_text(saved))
            old, now = configs.flat(before["config"]), configs.flat(config)
            differ = {k: (old.get(k), now.get(k)) for k in old | now if old.get(k) != now.get(k)}
            changed = sorted(k for k, pair in differ.items() if REMEMBERS in pair or not may_change(k))
            if changed:
                values = ", ".join("{} ({!r} -> {!r})".format(k, *differ[k]) for k in changed)
                right = ", ".join(key + "*" if key.endswith(".") else key for key in MAY_CHANGE)
                what = f"{folder} holds a run with another config"
                raise errors.UserError(f"{what}, and resuming may not change {values}; what may: {right}")
        elif any(entry.name != LOCK for entry in folder.iterdir()):
            raise errors.UserError(f"{folder} holds files, but no run to resume{newest(folder, '--workdir')}")
        over = finished(folder, steps) and checkpoint.whole(folder / "checkpoints", steps, fall_back=fall_back)
        facts = {"config": config, "versions": mesh.versions(), "devices": devices, "commit": commit()}
        facts["data"] = data or before.get("data")
        if over or before and checkpoint.newest(folder / "checkpoints") is not None:
            check_data(folder, before.get("data"), facts["data"])
            for line in changes(before, facts) if devices and not over else []:
                print(line, flush=True)
        if not over:
            disk.write_json(saved, facts)
    except OSError as error:
        raise _refusal(folder, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise errors.UserError(
            f"{saved} is damaged, so this run cannot be resumed: choose another --workdir"
        ) from error
    return over


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


def newest(folder: pathlib.Path, flag: str) -> str:
    """What to say where a folder is no run: the newest of the runs in it, behind its flag; else to choose another."""
    found = sorted(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    newest = shlex.quote(str(found[-1].parent)) if found else ""
    return f": the newest run in it is {flag}={newest}" if found else f": choose another {flag}"


def _refusal(folder: pathlib.Path, error: OSError) -> errors.UserError:
    """What to say of a folder that cannot be used, or of what is in it and in the way."""
    reason = disk.LINK if error.errno == errno.ELOOP else disk.reason(error)
    file = pathlib.Path(error.filename or folder)
    if file == folder or not os.path.lexists(file):
        return errors.UserError(f"the workdir {folder} cannot be written: {reason}")
    return errors.UserError(f"{file} cannot be used: {reason}; mend that, or choose another --workdir")


def finished(folder: pathlib.Path, steps: int) -> bool:
    """Whether the run has its result after so many steps. UserError where it has taken more already."""
    try:
        result = json.loads(disk.read_text(folder / "summary.json"))["steps"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        result = None  # there is none, or one that is of no use and will be made again
    newest = max(result if isinstance(result, int) else 0, *manifest.steps(folder / "checkpoints"), 0)
    if newest > steps:
        raise errors.UserError(
            f"{folder} holds a run that has taken {newest:,} steps: train.steps = {steps:,} must not be less"
        )
    return result == steps


def may_change(key: str) -> bool:
    """Whether a run may be resumed with another value of this setting."""
    return any(key == one or one[-1] == "." and key.startswith(one) for one in MAY_CHANGE)


def keep_sources(folder: pathlib.Path, files: Mapping[pathlib.Path, str], diff: bytes = b"") -> dict[str, str]:
    """Copies of these files in the run's folder, under the name beside each, and of the checkout's diff where there is
    one; returns the SHA-256 of each. What is there stays: where a run goes on with another file, that one is
    my_file.2.py, and it is said. OSError where the folder cannot be written."""
    place, kept = folder / SOURCES, {}
    contents = [(file, name, _content(file)) for file, name in files.items()]
    contents += [("git diff HEAD", DIFF, diff if len(diff) <= LARGEST_SOURCE else None)] if diff else []
    for file, name, content in contents:
        if content is None:
            fault = f"it cannot be read, or is larger than {LARGEST_SOURCE:,} bytes"
            print(f"{file} is not kept in {place}: {fault}", flush=True)
            continue
        disk.folder(folder, SOURCES)
        stem, end = os.path.splitext(name)
        copies = (place / one for one in itertools.chain([name], (f"{stem}.{n}{end}" for n in itertools.count(2))))
        copy = next(one for one in copies if not one.is_file() or _content(one) == content)
        if not copy.is_file():
            disk.write(copy, content)
            if copy.name != name:
                print(f"{file} is not what this began with, {place / name}: it is kept as {copy}", flush=True)
        kept[copy.name] = hashlib.sha256(content).hexdigest()
    return kept


def _content(file: pathlib.Path) -> bytes | None:
    try:
        return disk.read(file, LARGEST_SOURCE)
    except (OSError, ValueError):
        return None


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines about a run that goes on, as config.json told of it before and tells of it now."""
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
