"""A run that is killed and started again: what it has done by the files in its workdir, and what came of it."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parent.parent
START, COMPILING, STEPS, SAVING, DELETING, END = WHERE = (
    "while starting",
    "while compiling or restoring",
    "between steps",
    "while saving",
    "while deleting a checkpoint",
    "behind the last step",
)
PASSING = ("wall_seconds", "compile_seconds", "tokens_per_second")  # numbers that no two runs have alike


class Failed(Exception):
    """What the runs did not survive."""


@dataclasses.dataclass
class Run:
    """A workdir, and the command that trains in it."""

    folder: pathlib.Path
    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen | None = None
    began: float = 0.0
    steps_before: int = 0  # from which this start goes on
    events_before: int = 0
    limit: float = math.inf  # seconds of a start

    def start(self) -> None:
        """The very same command, once more."""
        self.steps_before, self.events_before = self.saved(), self.events()
        with self.told.open("wb") as out:
            self.process = subprocess.Popen(
                [*self.command, "--workdir", str(self.folder)],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.began = time.perf_counter()

    @property
    def told(self) -> pathlib.Path:
        """What the latest start printed."""
        return self.folder.with_name(self.folder.name + ".out")

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def names(self) -> list[str]:
        """What is in the folder of checkpoints."""
        try:
            return os.listdir(self.folder / "checkpoints")
        except FileNotFoundError:
            return []

    def saved(self) -> int:
        """The newest checkpoint, 0 for none."""
        return max((int(name) for name in self.names() if name.isdecimal()), default=0)

    def events(self) -> int:
        """Files of TensorBoard events: one for each start that came to the loop."""
        return len(list((self.folder / "events").glob("*")))

    def trains(self) -> bool:
        return self.events() > self.events_before

    def rows(self) -> list[str]:
        """Whole lines of metrics.jsonl."""
        file = self.folder / "metrics.jsonl"
        return file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []

    def step(self) -> int:
        """The last one in metrics.jsonl, 0 for none."""
        rows = self.rows()
        return json.loads(rows[-1])["step"] if rows else 0

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    def kill(self) -> None:
        """SIGKILL to the whole group of processes, which are ours."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> bool:
        """Whether the command came to its end by itself. Failed where that was not a good one."""
        if self.process.poll() is None:
            if self.seconds() > self.limit:
                raise Failed(f"{self.folder} is not at its end after {self.limit:.0f} seconds")
            return False
        said = self.told.read_text(encoding="utf-8", errors="replace")
        if self.process.returncode or "Traceback" in said or "Warning" in said:
            raise Failed(f"{self.folder} ended with code {self.process.returncode}:\n{said}")
        return True

    def place(self, steps: int) -> str:
        """Where it died, by what it left behind."""
        if not self.trains():
            said = self.told.read_text(encoding="utf-8", errors="replace")
            return COMPILING if "per step (3 x forward)" in said else START
        if any(name.endswith(".writing") for name in self.names()):
            return SAVING
        if any(name.endswith(".deleting") for name in self.names()):
            return DELETING
        return END if self.saved() == steps else STEPS


@dataclasses.dataclass
class Times:
    """Seconds that a start took until it trained, and from its last checkpoint to its end; those of the newest."""

    start: float = 0.0
    end: float = 0.0


def watch(run: Run, times: Times, due: Callable[[], bool] = lambda: False) -> bool:
    """Start the command and kill it when it is due. True where that was before it came to its end; sets the times."""
    run.start()
    saved, at, trained = run.steps_before, 0.0, False
    try:
        while not due():
            if run.ended():
                times.end = run.seconds() - at if at else times.end
                return False
            if not trained and run.trains():
                trained, times.start = True, run.seconds()
            if run.saved() > saved:
                saved, at = run.saved(), run.seconds()
            time.sleep(0.001)
        run.kill()
    finally:
        if run.process.poll() is None:
            run.kill()
    return run.process.returncode == -signal.SIGKILL or not run.ended()  # it may have been quicker


def differences(run: Run, whole: Run) -> list[str]:
    """What of a finished run is not as in the undisturbed one, in words."""
    mine, right = ({k: v for k, v in one.summary().items() if k not in PASSING} for one in (run, whole))
    found = [f"{key}: {mine.get(key)} instead of {right.get(key)}" for key in right if mine.get(key) != right[key]]
    rows, right_rows = run.rows(), whole.rows()
    wrong = [f"{a} instead of {b}" for a, b in zip(rows, right_rows, strict=False) if a != b]
    if wrong:
        found.append(f"{len(wrong)} rows of metrics.jsonl, the first: {wrong[0]}")
    if len(rows) != len(right_rows):
        found.append(f"{len(rows)} rows of metrics.jsonl instead of {len(right_rows)}")
    left = [name for name in run.names() if not name.isdecimal()]
    return found + [f"{name} is left in checkpoints" for name in left]
