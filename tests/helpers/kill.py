"""python tests/helpers/kill.py FOLDER [--every N]: kill a run before each (N-th) change of a file in its workdir.

A kill at any moment leaves the files as they are between two changes. Every run is a fork of this process, which has
imported everything and computed nothing. It sends itself SIGKILL, and then the same command runs again.
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

import dots  # noqa: E402  imported before the forks, so that they need not
import tiny  # noqa: E402

import launch  # noqa: E402
from experiments.devices import compilation  # noqa: E402

MARK = "changes a file:"
NAMES = ("os.rename", "os.mkdir", "os.truncate", "os.link", "os.symlink")
REMOVALS = ("os.remove", "os.rmdir")


def changes(event: str, arguments: tuple, folder: str) -> bool:
    """Return True if this audit event changes a file in the folder."""
    if event == "open":
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(writes) and isinstance(path, str | os.PathLike) and str(path).startswith(folder)
    if event in REMOVALS and arguments[1] != -1:  # shutil.rmtree passes a path relative to an open folder
        return True
    return event in NAMES + REMOVALS and str(arguments[0]).startswith(folder)


def run(config: str, folder: pathlib.Path, dies_at: int | None) -> tuple[int, str]:
    """Train in a fork that kills itself before its change number `dies_at`. Return its exit code and its output."""
    output_file = folder.with_name(folder.name + ".out")
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, output_file.read_text(encoding="utf-8", errors="replace")
    out = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    count = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal count
        if changes(event, arguments, str(folder)):
            if count == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            os.write(2, f"{MARK} {event} {arguments[0]}\n".encode())

    sys.addaudithook(watch)
    with mock.patch.object(compilation, "measure_peak", lambda *, devices: 1e9):  # the measurement takes seconds
        code = launch.main(["launch.py", "--config", config, "--workdir", str(folder)])
    sys.stdout.flush()
    os._exit(code)


def result(folder: pathlib.Path) -> Any:
    """Return what a kill must not change: parameters, evaluation, the log, and the names of all files except events."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    numbers = {name: value for name, value in summary.items() if name.startswith(("params", "eval/", "steps"))}
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    files = {name for name in files if not name.startswith("events/") and "/state/" not in name}
    return numbers, (folder / "metrics.jsonl").read_text(encoding="utf-8"), sorted(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    folder, began = arguments.folder.absolute(), time.perf_counter()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    folder.mkdir(exist_ok=True)
    settings = {"train.steps": 3, "train.save_every": 1, "train.evaluate_every": 2, "train.accumulation": 2}
    config = tiny.config_file(folder, "dots", **dots.CHANGES | settings)
    code, output = run(config, folder / "undisturbed", None)
    if code:
        print(f"FAILED: the run without a kill:\n{output}")
        return 1
    file_changes = [line.removeprefix(MARK).strip() for line in output.splitlines() if line.startswith(MARK)]
    indices = range(arguments.every // 2, len(file_changes), arguments.every)
    failures, seconds = (
        sum(not survives(config, folder, n, file_changes[n]) for n in indices),
        time.perf_counter() - began,
    )
    print(f"killed before {len(indices)} of {len(file_changes)} changes of files: {failures} failed, {seconds:.0f} s")
    return 1 if failures else 0


def survives(config: str, folder: pathlib.Path, n: int, change: str) -> bool:
    """Kill a run before its change n, resume it and compare. If there is a difference, print it and return False."""
    workdir = folder / f"killed{n}"
    exit_code, first_output = run(config, workdir, n)
    if exit_code == 0 and first_output.count(MARK) == n:  # saves run in the background, so the number of changes varies
        print(f"a run that should be killed before change {n} made only {n} changes")
        exit_code = -signal.SIGKILL
    code, output = run(config, workdir, None)
    expected = result(folder / "undisturbed")
    actual = result(workdir) if (workdir / "summary.json").exists() else None
    if exit_code != -signal.SIGKILL or code or "Traceback" in output or "Warning" in output or actual != expected:
        print(
            f"FAILED: killed ({exit_code}) before {n}, {change}; then {code}, {actual}, not {expected}\n{output[-600:]}"
        )
        return False
    shutil.rmtree(workdir)
    return True


if __name__ == "__main__":
    sys.exit(main())
