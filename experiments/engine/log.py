"""What a run writes while it trains (metrics.jsonl, TensorBoard events), and the live line of progress."""

import collections
import json
import math
import os
import pathlib
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tqdm
from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2, summary_pb2

from experiments.engine import disk, distributed, errors

CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def say(text: str, end: str = "") -> None:
    """Print at once; control characters, which may be commands to a terminal, as U+FFFD, what it cannot show as ?."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.translate(CONTROL).encode(encoding, "replace").decode(encoding), end=end, flush=True)


def read(folder: pathlib.Path, *, tells: bool = False) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without lines that are none; tells: say which these are, but for the last one.

    Raises UserError where the file is there, and cannot be read.
    """
    file = folder / "metrics.jsonl"
    try:
        with disk.opened(file) as opened:
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
    return row if whole and all(isinstance(x, int | float | None) for x in row.values()) else None


def finite(value: float) -> float | None:
    """The number as JSON can hold it: None for what is not finite."""
    return float(value) if math.isfinite(value) else None


class Log:
    """Writes metrics of a run that starts, or goes on, at step `start`: rows of later steps are taken back first.

    Of several processes, only the first writes.
    """

    def __init__(self, folder: pathlib.Path, *, start: int):
        self._writes = distributed.main()
        if not self._writes:
            return
        kept = [json.dumps(row) + "\n" for row in read(folder, tells=True) if row["step"] <= start]
        disk.write(folder / "metrics.jsonl", "".join(kept).encode())
        self._events = Events(folder / "events", start=start)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line {"step": ..., name: value, ...}, in which NaN is null; and what is finite to TensorBoard.

        Raises OSError where the disk takes no more.
        """
        if not self._writes:
            return
        values = {name: finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        self._events.write(step, {name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        if self._writes:
            try:
                self._file.close()
            finally:
                self._events.close()


class Events:
    """A new file of TensorBoard events in the folder, for a run that starts, or goes on, at step `start`.

    Methods raise the OSError of a disk that takes no more; tensorboardX's SummaryWriter, with a thread of its
    own, would lose that error and wait for its thread forever.
    """

    EVERY_SECONDS = 30.0  # what is written reaches the disk at least so often

    def __init__(self, folder: pathlib.Path, *, start: int):
        # `start` puts files of one second in order; nobody can have put a link under a name with random digits.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{start}.{secrets.token_hex(4)}"
        self._records = record_writer.RecordWriter(str(disk.folder(folder.parent, folder.name) / name))
        self._flushed = -self.EVERY_SECONDS
        self._add(file_version="brain.Event:2")
        if start:  # what an earlier session wrote of later steps does not count
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=start + 1, session_log=session)

    def write(self, step: int, values: dict[str, float]) -> None:
        """These scalars, by their names."""
        scalars = [value for name, x in values.items() for value in summary.scalar(name, x).value]
        self._add(step=step, summary=summary_pb2.Summary(value=scalars))
        if time.monotonic() - self._flushed >= self.EVERY_SECONDS:
            self._flushed = time.monotonic()
            self._records.flush()

    def _add(self, **parts) -> None:
        self._records.write(event_pb2.Event(wall_time=time.time(), **parts).SerializeToString())

    def close(self) -> None:
        """Write what is left; the file is closed also where that fails."""
        self._records.close()


class Rate:
    """Seconds per unit of work. The first piece does not count, once there is another: it may compile, and fills
    caches."""

    RECENT = 100  # pieces whose median counts, as some of them wait for something that the others do not

    def __init__(self) -> None:
        self.seconds, self.work = 0.0, 0.0  # of all pieces but the first
        self._added, self._recent = 0, collections.deque(maxlen=self.RECENT)

    def add(self, seconds: float, work: float) -> None:
        """A piece of this work is done."""
        if self._added == 1:
            self.seconds, self.work = 0.0, 0.0
        self._added += 1
        self.seconds, self.work = self.seconds + seconds, self.work + work
        if self._added > 1:
            self._recent.append(seconds / work)

    def recent(self) -> float | None:
        """Seconds per unit of work of late; None where nothing is known yet."""
        return statistics.median(self._recent) if self._recent else None


class Pace:
    """The rates of the steps and of the evaluations of a program, in the same unit of work."""

    def __init__(self) -> None:
        self.steps, self.evaluations = Rate(), Rate()
        self._before, self._since = 0.0, time.perf_counter()  # seconds of the step before a pause; the clock's start

    def step(self, work: float) -> None:
        """A step of this work is done, and the next one begins."""
        self.pause()
        self.steps.add(self._before, work)
        self._before = 0.0
        self.resume()

    def pause(self) -> None:
        """What follows (an evaluation, a save) is no part of a step; ends at `resume`."""
        self._before += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def timed(self, evaluate: Callable, work: float) -> Callable:
        """`evaluate`, whose seconds count for this work."""

        def timing(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = evaluate(*arguments)
            self.evaluations.add(time.perf_counter() - began, work)
            return found

        return timing

    def left(self, steps: float, evaluations: float) -> float | None:
        """Seconds that this much work in steps and in evaluations takes; None where nothing is known yet.

        Until a second evaluation is seen, they are thought to take as long for their work as steps do.
        """
        rate = self.steps.recent()
        return None if rate is None else steps * rate + evaluations * (self.evaluations.recent() or rate)


class Cell:
    """What tqdm writes below a notebook's cell: a line takes the place of the one before."""

    encoding = "utf-8"  # with which tqdm draws a smooth bar

    def __init__(self, display: Callable):
        self._shown = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        if text := text.strip():
            self._shown.update({"text/plain": text}, raw=True)

    def flush(self) -> None:
        """There is nothing to wait for."""


def notebook() -> Callable | None:
    """IPython's `display` where this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython.display.display if hasattr(ipython and ipython.get_ipython(), "kernel") else None


class Line:
    """A live line on a terminal or below a notebook's cell; elsewhere a plain line every ten seconds."""

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
            bar_format=begins + "{postfix} |{bar:20}|",  # tqdm's own {remaining} counts all that waits
            dynamic_ncols=not display,
        )
        self._pace, self._spoke = Pace(), time.perf_counter()

    def _show(self, told: str, *, done: float, plain: str) -> None:
        """So much more is done. plain: the plain line, '' for none at this step."""
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update(done)
        if plain and self._bar.disable and time.perf_counter() - self._spoke > self.EVERY_SECONDS:
            self._spoke = time.perf_counter()
            print(plain, flush=True)

    def pause(self) -> None:
        """What follows (an evaluation, a save) is no part of a step; ends at `resume`."""
        self._pace.pause()

    def resume(self) -> None:
        self._pace.resume()

    def say(self, line: str) -> None:
        """A line that stays, above the live one."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        """End the live line."""
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

        evaluation: how many of them one is worth. evaluations(n): how many come from the end of step n on. peak: what
        compilation.measured_peak has found.
        """
        super().__init__("{n_fmt}/{total_fmt} steps", total=steps, done=start, live=distributed.main())
        self._steps, self._tokens, self._flops, self._peak = steps, tokens_per_step, flops_per_step, peak
        self._work, self._evaluation, self._evaluations = work, evaluation, evaluations
        self._at, self._told = start, ""

    def advance(self, step: int, loss: float | None) -> None:
        """A step is done; the loss is shown where it was fetched."""
        self._pace.step(self._work(step) - self._work(self._at))
        self._at = step
        left = self.left()
        if loss is not None:
            self._told = f"loss {loss:.4f}" + (f", {self._rates()}" if left is not None else "")
        line = ", ".join(filter(None, [f"{clock(left)} left", self._told]))  # a narrow terminal cuts the end off
        self._show(line, done=1, plain=f"step {step:,}/{self._steps:,}: {line}" if loss is not None else "")

    def _rates(self) -> str:
        """Tokens per second, and the FLOPs per second beside those of large matrix products alone."""
        rate = self.tokens_per_second()
        told = f"{rate:,.0f} tokens/s"
        share = 100 * self._flops * rate / self._tokens / self._peak if self._peak else 0.0
        return f"{told}, {share:.0f} % of matrix-product speed" if self._peak else told

    def left(self) -> float | None:
        """Seconds that steps and evaluations still take; None before two steps of this session, the first of which
        says nothing."""
        ahead = self._work(self._steps) - self._work(self._at)
        return self._pace.left(ahead, self._evaluation * self._evaluations(self._at))

    def timed(self, evaluate: Callable) -> Callable:
        """`evaluate`, whose seconds tell how long those to come will take."""
        return self._pace.timed(evaluate, self._evaluation)

    def tokens_per_second(self) -> float:
        """Throughput of the training steps alone: compilation, evaluations, saves and, of several, the first step of
        the session left out."""
        steps = self._pace.steps
        return self._tokens * steps.work / steps.seconds if steps.seconds else 0.0

    def close(self) -> None:
        self._bar.set_postfix_str(self._told, refresh=False)
        super().close()
