"""python tests/kill.py FOLDER [--every N]: kill a run before each (N-th) change of a file in its workdir.

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

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import launch  # noqa: E402
from experiments import language  # noqa: E402  what is imported here, a fork need not import
from experiments.engine import (
    compilation,  # noqa: E402, F401
)

MARK = "changes a file:"
NAMES = ("os.rename", "os.mkdir", "os.truncate", "os.link", "os.symlink")
REMOVALS = ("os.remove", "os.rmdir")


# More than one epoch, dropout, accumulation, and a batch that grows. The text's 151 windows are 9 batches of 16.
SMALL = {
    "experiment": "language",
    "model.M": 2,
    "model.D": 8,
    "model.H": 2,
    "model.unroll": 1,
    "model.dropout": 0.1,
    "text.N": 7,
    "optim.warmup_steps": 2,
    "train.steps": 60,
    "train.batch_size": 16,
    "train.growth": [[30, 24]],
    "train.accumulation": 2,
    "train.log_every": 1,
    "train.evaluate_every": 20,
    "train.evaluate_batch": 16,
    "train.save_every": 5,
    "sample.max_new_tokens": 5,
}
TEXT = (b"A king who reads is worth two kings who fight. " * 3 + bytes(range(32, 127))) * 5


def small_config(folder: pathlib.Path, **changes) -> pathlib.Path:
    """A config file in this folder, and the text it trains on. In changes, dots of keys are written as __."""
    (folder / "kings.txt").write_bytes(TEXT)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    wanted = SMALL | {"text.source": str(folder / "kings.txt")} | changes
    lines = [f"    config.{key} = {value!r}\n" for key, value in wanted.items()]
    head = 'from configs import base\n\n\ndef get_config():\n    config = base.get_config("language")\n'
    file = folder / "killed.py"
    file.write_text(head + "".join(lines) + "    return config\n", encoding="utf-8")
    return file


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
    with (
        mock.patch.object(compilation, "measured_peak", lambda *, devices: 1e9),  # seconds of work
        mock.patch.object(language, "figures", lambda *arguments: []),
    ):
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
    short = {"train__steps": 3, "train__growth": [], "train__save_every": 1}
    config = str(small_config(folder, **short, train__evaluate_every=2, optim__warmup_steps=1))
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
