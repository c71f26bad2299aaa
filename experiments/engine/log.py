"""What a run tells: metrics.jsonl and what is told beside it, the live line."""

import collections
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tqdm
from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2

from experiments.engine import by_name, disk, distributed, errors

# What a terminal acts on: control characters, and those that turn the direction of a text.
CONTROL = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in CONTROL if chr(code) not in "\t\n"}
FLUSH_SECONDS = 30.0  # events reach the disk at least so often
KNOWN, LONG = 9, 10.0  # pieces of work, or seconds of it, before which nothing is announced: the first may be slow
RECENT = 100  # pieces of work whose median speed counts, as some wait for something that the others do not


def say(text: str, end: str = "") -> None:
    """Print at once; control characters, which may be commands to a terminal, as U+FFFD, what it cannot show as ?."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(
        text.replace("\r\n", "\n").translate(CONTROL).encode(encoding, "replace").decode(encoding), end=end, flush=True
    )


def read(folder: pathlib.Path, *, tells: bool = False) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without lines that are none; tells: say which these are, but for the last one.

    Raises UserError where the file is there, and cannot be read.
    """
    file = folder / "metrics.jsonl"
    try:
        with file.open("rb") as opened:
            disk.check_memory(f"what {file} holds", 3 * os.fstat(opened.fileno()).st_size)
            rows = list(map(_row, opened.read().split(b"\n")))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise errors.UserError(f"{file} cannot be read: {disk.reason(error)}") from error
    damaged = [n for n, row in enumerate(rows[:-1], 1) if not row]  # the last is empty, or cut off by a crash
    if damaged and tells:
        more = f" (and {len(damaged) - 1:,} more)" if len(damaged) > 1 else ""
        print(f"line {damaged[0]:,}{more} of {file} is damaged, and left out", flush=True)
    return [row for row in rows if row]


def _row(line: bytes) -> dict[str, Any] | None:
    """The numbers by name in a line, {"step": ..., ...}; None where it is no such line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and type(row.get("step")) is int
    return (
        row
        if whole and all(isinstance(x, float | None) or type(x) is int and abs(x) < 2**63 for x in row.values())
        else None
    )


def finite(value: float) -> float | None:
    """The number as JSON can hold it: None for what is not finite."""
    return float(value) if math.isfinite(value) else None


class Log:
    """Writes metrics of a run that starts, or goes on, at step `start`: rows of later steps are taken back first.

    beside: who is told too, by names of BESIDE. Of several processes, the first writes. OSError of a full disk.
    """

    def __init__(self, folder: pathlib.Path, *, start: int, beside: Sequence[str] = ("tensorboard",)):
        self._open = contextlib.ExitStack()  # what is closed in the end, also where one fails
        self._writes = distributed.main()
        if not self._writes:
            return
        rows = [json.dumps(row) + "\n" for row in read(folder, tells=True) if row["step"] <= start]
        disk.write(folder / "metrics.jsonl", "".join(rows).encode())
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context((folder / "metrics.jsonl").open("a", encoding="utf-8"))
            self._beside = [BESIDE[name](folder, start) for name in beside if name in BESIDE]
            for one in self._beside:
                stack.callback(one.close)
            self._open = stack.pop_all()

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line {"step": ..., name: value, ...}, in which NaN is null; and what is finite to the others."""
        if not self._writes:
            return
        row = {name: finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()
        for one in self._beside:
            one.write(step, {name: x for name, x in row.items() if x is not None})

    def close(self) -> None:
        """Write what is left; all is closed also where that fails."""
        self._open.close()


class Events:
    """TensorBoard's. Its SummaryWriter would lose what a disk does not take, and wait for its thread forever."""

    def __init__(self, folder: pathlib.Path, start: int):
        # `start` puts files of one second in order; nobody can have put a link under a name with random digits.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{start}.{secrets.token_hex(4)}"
        self._events = record_writer.RecordWriter(str(disk.folder(folder, "events") / name))
        self._flushed = -math.inf
        self._event(file_version="brain.Event:2")
        if start:  # what an earlier session wrote of later steps does not count
            self._event(step=start + 1, session_log={"status": event_pb2.SessionLog.START})

    def write(self, step: int, values: dict[str, float]) -> None:
        scalars = [one for name, x in values.items() for one in summary.scalar(name, x).value]
        self._event(step=step, summary={"value": scalars})
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._events.flush()

    def _event(self, **parts: Any) -> None:
        self._events.write(event_pb2.Event(wall_time=time.time(), **parts).SerializeToString())

    def close(self) -> None:
        self._events.close()


class Wandb:
    """Weights & Biases: a run of the project WANDB_PROJECT or tfm; what goes on is the same run there. With
    WANDB_MODE=offline all stays in the run's folder, for `wandb sync`. Of the machine and of code nothing is told."""

    def __init__(self, folder: pathlib.Path, start: int):
        import wandb

        quiet = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
        quiet |= {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}
        before = sorted(disk.folder(folder, "wandb").glob("*run-*-*"))  # offline-run-<time>-<id>
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tfm"),
                dir=folder,
                name="/".join(folder.absolute().parts[-2:]),
                id=before[0].name.partition("run-")[2].split("-")[1] if before else None,
                resume="allow",
                reinit="create_new",
                config=disk.read_json(folder / "config.json", says="what runs")["config"],
                settings=wandb.Settings(**quiet),
            )
        except wandb.Error as error:
            raise errors.UserError(
                f"log has wandb, and {errors.line(error)}; WANDB_MODE=offline asks nobody"
            ) from error
        self._run.define_metric("*", step_metric="step")  # its own steps only grow, and ours go back to a checkpoint

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step} | values)

    def close(self) -> None:
        self._run.finish()


SYMMETRY = "symmetry"
BESIDE = {"tensorboard": Events, "wandb": Wandb}
LOGS = ("jsonl", *BESIDE, SYMMETRY)  # what the setting `log` may have; metrics.jsonl is written anyway


def check(names: Sequence[str]) -> None:
    """UserError where one of these is no log, or lacks what it is written with."""
    for name in names:
        by_name.choose("log", str(name), dict.fromkeys(LOGS))
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise errors.UserError('log has wandb, which is not installed: pip install -e ".[wandb]"')


class Rate:
    """How fast work is done. Once there is another piece the first does not count: it may compile, and fills caches."""

    def __init__(self, known: int = 1):
        self.seconds, self.work, self._known = 0.0, 0.0, known
        self._pieces, self._recent = 0, collections.deque(maxlen=RECENT)

    def add(self, seconds: float, work: float) -> None:
        self._pieces += 1
        if self._pieces == 2:
            self.seconds, self.work = 0.0, 0.0
        if self._pieces > 1:
            self._recent.append(seconds / work)
        self.seconds, self.work = self.seconds + seconds, self.work + work

    def recent(self) -> float | None:
        """Seconds per unit of work of late; None where nothing is known yet."""
        known = len(self._recent) >= self._known or (self._recent and self.seconds > LONG)
        return statistics.median(self._recent) if known else None


class Pace:
    """The rates of the steps and of the evaluations of a program, in the same unit of work."""

    def __init__(self) -> None:
        self.steps, self.evaluations, self.since = Rate(KNOWN), Rate(), time.perf_counter()

    def step(self, work: float) -> None:
        """A step of this work is done, and the next one begins."""
        now = time.perf_counter()
        self.steps.add(now - self.since, work)
        self.since = now

    def left(self, steps: float, evaluations: float) -> float | None:
        """Seconds that this much work in steps and evaluations takes; None where nothing is known yet. Until there is a
        second evaluation, they are thought to take as long for their work as steps do."""
        rate = self.steps.recent()
        return None if rate is None else steps * rate + evaluations * (self.evaluations.recent() or rate)


class Cell:
    """What tqdm writes below a notebook's cell: a line takes the place of the one before, without any widgets."""

    encoding = "utf-8"  # with which tqdm draws a smooth bar

    def __init__(self, display: Callable):
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        if text := text.strip():
            self._handle.update({"text/plain": text}, raw=True)

    def flush(self) -> None:
        """There is nothing to wait for."""


def notebook() -> Callable | None:
    """IPython's `display` where this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython.display.display if hasattr(ipython and ipython.get_ipython(), "kernel") else None


class Line:
    """A live line on a terminal or below a notebook's cell, drawn by tqdm; elsewhere a plain line every ten seconds.
    The time left is our own: that of tqdm counts compilation, evaluations and saves as steps."""

    EVERY_SECONDS = 10.0

    def __init__(self, begins: str, *, total: float, done: float = 0, live: bool = True):
        """begins: what tqdm writes before the rest. live: not where another process shows the line."""
        display, terminal = notebook() if live else None, sys.stderr.isatty()
        self._bar = tqdm.tqdm(
            total=total,
            initial=done,
            disable=not (live and (display or terminal)),
            file=Cell(display) if display else None,
            mininterval=0.5 if display else 0.1,
            bar_format=begins + "{postfix} |{bar:20}|",
            dynamic_ncols=not display,
        )
        self._pace, self._spoke = Pace(), time.perf_counter()

    def _show(self, text: str, *, done: float, plain: str) -> None:
        """So much more is done. plain: the plain line, '' for none at this step."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done)
        if plain and self._bar.disable and time.perf_counter() - self._spoke > self.EVERY_SECONDS:
            self._spoke = time.perf_counter()
            print(plain, flush=True)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What is within this (an evaluation, a save) is no part of a step."""
        began = time.perf_counter()
        yield
        self._pace.since += time.perf_counter() - began

    def say(self, line: str) -> None:
        """A line that stays, above the live one."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        self._bar.close()


def clock(seconds: float | None) -> str:
    """61 -> '01:01'; '?' where nothing is known yet."""
    return "?" if seconds is None else tqdm.tqdm.format_interval(round(seconds))


class Progress(Line):
    """The line of a single run."""

    def __init__(
        self,
        *,
        start: int,
        steps: int,
        tokens_per_step: int,
        flops_per_step: int,
        peak: float,
        work: Callable[[int], float] = float,
        evaluation: float = 0.0,
        evaluations: Callable[[int], int] = lambda n: 0,
    ):
        """work(n): how many first steps the first n steps are worth; more than n where batches have grown.

        evaluation: how many of them one is worth. evaluations(n): how many come from the end of step n on. peak: in
        FLOP/s, of large matrix products; 0: not known.
        """
        super().__init__("{n_fmt}/{total_fmt} steps", total=steps, done=start, live=distributed.main())
        self._steps, self._tokens, self._flops, self._peak = steps, tokens_per_step, flops_per_step, peak
        self._work, self._evaluation, self._evaluations = work, evaluation, evaluations
        self._at, self._text = start, ""

    def advance(self, step: int, loss: float | None) -> None:
        """A step is done; the loss is shown where it was fetched. Nothing is known of the time before two steps."""
        self._pace.step(self._work(step) - self._work(self._at))
        self._at = step
        ahead = self._work(self._steps) - self._work(step)
        left = self._pace.left(ahead, self._evaluation * self._evaluations(step))
        if loss is not None:
            speed, self._text = self.tokens_per_second(), f"loss {loss:.4f}"
            if left is not None:
                self._text += f", {speed:,.0f} tokens/s"
            if left is not None and self._peak:
                share = self._flops * speed / self._tokens / self._peak
                self._text += f", {100 * share:.0f} % of matrix-product speed"
        line = ", ".join(filter(None, [f"{clock(left)} left", self._text]))  # a narrow terminal cuts the end off
        self._show(line, done=1, plain=f"step {step:,}/{self._steps:,}: {line}" if loss is not None else "")

    def evaluated(self, seconds: float) -> None:
        self._pace.evaluations.add(seconds, self._evaluation)

    def tokens_per_second(self) -> float:
        """Throughput of the steps alone, without compilation, evaluations, saves and, of several, the first step."""
        steps = self._pace.steps
        return self._tokens * steps.work / steps.seconds if steps.seconds else 0.0

    def close(self) -> None:
        self._bar.set_postfix_str(self._text, refresh=False)
        super().close()
