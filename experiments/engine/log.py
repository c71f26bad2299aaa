"""What a run writes while it trains: metrics.jsonl, TensorBoard events, and the line a person watches."""

import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from experiments.engine import disk, distributed, errors, events, pace


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
        self._events = events.Events(folder / "events", start=start)
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


class Progress(pace.Line):
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
        cost.measured_peak has found.
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
        line = ", ".join(filter(None, [f"{pace.clock(left)} left", self._told]))  # a narrow terminal cuts the end off
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
