"""What a run tells: metrics.jsonl and TensorBoard events, the live line, the tables before and after training."""

import collections
import contextlib
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

import jax
import tqdm
from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2

from experiments.engine import disk, distributed, errors
from tfm import shapes

CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}
FLUSH_SECONDS = 30.0  # events reach the disk at least so often
RECENT = 100  # pieces of work whose median speed counts, as some wait for something that the others do not


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

    Of several processes, the first writes. Raises the OSError of a disk that takes no more; tensorboardX's
    SummaryWriter, with a thread of its own, would lose it and wait for that thread forever.
    """

    def __init__(self, folder: pathlib.Path, *, start: int):
        self._writes = distributed.main()
        if not self._writes:
            return
        rows = [json.dumps(row) + "\n" for row in read(folder, tells=True) if row["step"] <= start]
        disk.write(folder / "metrics.jsonl", "".join(rows).encode())
        # `start` puts files of one second in order; nobody can have put a link under a name with random digits.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{start}.{secrets.token_hex(4)}"
        self._events = record_writer.RecordWriter(str(disk.folder(folder, "events") / name))
        self._flushed = -math.inf
        self._event(file_version="brain.Event:2")
        if start:  # what an earlier session wrote of later steps does not count
            self._event(step=start + 1, session_log={"status": event_pb2.SessionLog.START})
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line {"step": ..., name: value, ...}, in which NaN is null; and what is finite to TensorBoard."""
        if not self._writes:
            return
        row = {name: finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()
        scalars = [one for name, x in row.items() if x is not None for one in summary.scalar(name, x).value]
        self._event(step=step, summary={"value": scalars})
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._events.flush()

    def _event(self, **parts: Any) -> None:
        self._events.write(event_pb2.Event(wall_time=time.time(), **parts).SerializeToString())

    def close(self) -> None:
        """Write what is left; both files are closed also where that fails."""
        if self._writes:
            try:
                self._file.close()
            finally:
                self._events.close()


class Rate:
    """How fast work is done. Once there is another piece the first does not count: it may compile, and fills caches."""

    def __init__(self) -> None:
        self.seconds, self.work = 0.0, 0.0
        self._pieces, self._recent = 0, collections.deque(maxlen=RECENT)

    def add(self, seconds: float, work: float) -> None:
        """A piece of this work is done."""
        self._pieces += 1
        if self._pieces == 2:
            self.seconds, self.work = 0.0, 0.0
        if self._pieces > 1:
            self._recent.append(seconds / work)
        self.seconds, self.work = self.seconds + seconds, self.work + work

    def recent(self) -> float | None:
        """Seconds per unit of work of late; None where nothing is known yet."""
        return statistics.median(self._recent) if self._recent else None


class Pace:
    """The rates of the steps and of the evaluations of a program, in the same unit of work."""

    def __init__(self) -> None:
        self.steps, self.evaluations, self.since = Rate(), Rate(), time.perf_counter()

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
    """A live line on a terminal or below a notebook's cell; elsewhere a plain line every ten seconds.

    tqdm draws it. The time left is our own: that of tqdm counts compilation, evaluations and saves as steps.
    """

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
        """An evaluation has taken so long."""
        self._pace.evaluations.add(seconds, self._evaluation)

    def tokens_per_second(self) -> float:
        """Throughput of the steps alone, without compilation, evaluations, saves and, of several, the first step."""
        steps = self._pace.steps
        return self._tokens * steps.work / steps.seconds if steps.seconds else 0.0

    def close(self) -> None:
        self._bar.set_postfix_str(self._text, refresh=False)
        super().close()


def table(params: Any, trained: Sequence[bool] = ()) -> str:
    """One line per parameter: name, letters with their sizes, count; and the total. trained: which of them are, where
    not all: the others are marked as frozen."""
    rows, leaves = [], jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        sizes = " ".join(f"{letter}={n}" for letter, n in zip(shapes.letters(path), leaf.shape, strict=True))
        rows.append(("/".join(shapes.names(path)), sizes, f"{leaf.size:,}"))
    rows.append(("total", "", f"{shapes.total(params):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  {name:<{widths[0]}}  {sizes:<{widths[1]}}  {count:>{widths[2]}}" for name, sizes, count in rows]
    if not all(trained):
        lines = [line if own else f"{line}  frozen" for line, own in zip(lines, (*trained, True), strict=True)]
        count = sum(leaf.size for (_, leaf), own in zip(leaves, trained, strict=True) if own)
        lines[-1] += f", of which {count:,} are trained"
    return "\n".join([*lines[:-1], "  " + "-" * (sum(widths) + 4), lines[-1]])


def si(value: float, unit: str) -> str:
    """1.23e9, 'FLOP' -> '1.23 GFLOP'."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def result(summary: dict[str, Any], files: list[str]) -> str:
    """The block at the end of a run."""
    lines, guess = [""], summary.get("guess", {})
    for name, value in summary.items():
        if name.startswith(("eval/", "baseline/")):
            lines.append(f"  {name:<22} {value:.4f}  {guess.get(name.removeprefix('baseline/'), '')}".rstrip())
    lines.append(f"  {'time':<22} {summary['wall_seconds']:.1f} s, {summary['compile_seconds']:.1f} s of it compiling")
    if summary["tokens_per_second"]:  # 0 where a run was resumed behind its last step
        lines.append(f"  {'throughput':<22} {summary['tokens_per_second']:,.0f} tokens/s")
    return "\n".join([*lines, *(f"  {file}" for file in files)])
