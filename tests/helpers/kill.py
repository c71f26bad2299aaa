"""python tests/helpers/kill.py FOLDER [--every N]: kill a run before each (N-th) change of a file in its workdir.

What is left between two changes of files is all that a kill at any moment can leave. Every run is a fork of this
process, which has imported all and computed nothing, and dies by a SIGKILL of its own. Then the same command is run.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import sys
import time
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import dots  # noqa: E402  what is imported here, a fork need not import
import tiny  # noqa: E402

import launch  # noqa: E402
from experiments.engine import compilation  # noqa: E402

MARK = "changes a file:"
NAMES = ("os.rename", "os.mkdir", "os.truncate", "os.link", "os.symlink")
REMOVALS = ("os.remove", "os.rmdir")


def changes(event: str, arguments: tuple, folder: str) -> bool:
    """Whether this event of Python's is a change of a file in the folder."""
    if event == "open":
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(writes) and isinstance(path, str | os.PathLike) and str(path).startswith(folder)
    if event in REMOVALS and arguments[1] != -1:  # relative to an open folder, as shutil.rmtree does
        return True
    return event in NAMES + REMOVALS and str(arguments[0]).startswith(folder)


def run(config: str, folder: pathlib.Path, dies_at: int | None) -> tuple[int, str]:
    """Train in a fork that kills itself before its change number `dies_at`; its exit code, and what it printed."""
    said = folder.with_name(folder.name + ".out")
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, said.read_text(encoding="utf-8", errors="replace")
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    seen = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal seen
        if changes(event, arguments, str(folder)):
            if seen == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            os.write(2, f"{MARK} {event} {arguments[0]}\n".encode())

    sys.addaudithook(watch)
    with mock.patch.object(compilation, "measure_peak", lambda *, devices: 1e9):  # seconds of work
        code = launch.main(["launch.py", "--config", config, "--workdir", str(folder)])
    sys.stdout.flush()
    os._exit(code)


def result(folder: pathlib.Path) -> Any:
    """What must be alike: parameters, evaluation, the log, and the names of all files but the events."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in summary.items() if name.startswith(("params", "eval/", "steps"))}
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    files = {name for name in files if not name.startswith("events/") and "/state/" not in name}
    return kept, (folder / "metrics.jsonl").read_text(encoding="utf-8"), sorted(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    folder, began = given.folder.absolute(), time.perf_counter()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    folder.mkdir(exist_ok=True)
    short = {"train.steps": 3, "train.save_every": 1, "train.evaluate_every": 2, "train.accumulation": 2}
    config = tiny.config_file(folder, "dots", **dots.CHANGES | short)
    code, said = run(config, folder / "undisturbed", None)
    if code:
        print(f"FAILED: the run that nothing disturbs:\n{said}")
        return 1
    made = [line.removeprefix(MARK).strip() for line in said.splitlines() if line.startswith(MARK)]
    places = range(given.every // 2, len(made), given.every)
    bad = sum(not survives(config, folder, n, made[n]) for n in places)
    tried = len(places)
    print(f"killed before {tried} of {len(made)} changes of files: {bad} failed, {time.perf_counter() - began:.0f} s")
    return 1 if bad else 0


def survives(config: str, folder: pathlib.Path, n: int, what: str) -> bool:
    """Kill before change n, go on, and compare; what is wrong is printed."""
    workdir = folder / f"killed{n}"
    killed, _ = run(config, workdir, n)
    code, said = run(config, workdir, None)
    right = result(folder / "undisturbed")
    found = result(workdir) if (workdir / "summary.json").exists() else None
    if killed != -signal.SIGKILL or code or "Traceback" in said or "Warning" in said or found != right:
        print(f"FAILED: killed ({killed}) before {n}, {what}; then {code}, {found} instead of {right}\n{said[-600:]}")
        return False
    shutil.rmtree(workdir)
    return True


if __name__ == "__main__":
    sys.exit(main())
