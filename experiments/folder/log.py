"""Logging: metrics.jsonl, the TensorBoard and W&B writers, and the progress bar."""

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

import tqdm.auto

from experiments.config import by_name, disk, errors
from experiments.devices import distributed
from experiments.folder import records

# Characters that a terminal acts on: control characters, and those that reverse the direction of text.
CONTROL = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in CONTROL if chr(code) not in "\t\n"}
ESCAPED = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROL}
FLUSH_SECONDS = 30.0  # events reach the disk after at most this time
MIN_STEPS, MIN_SECONDS = 9, 10.0  # more than either, and the time left is predicted: the first steps may be slow
RECENT = 100  # the speed is the median over this many last steps


def say(text: str, end: str = "") -> None:
    """Print the text and flush. Control characters are escaped, as \\x1b; what stdout cannot encode becomes "?"."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = text.replace("\r\n", "\n").translate(ESCAPED)
    print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without the last if a crash has cut it off; [] if the file is missing."""
    return [*records.read_rows(folder / "metrics.jsonl", {"!step": records.COUNT, "*": records.NUMBER})]


def finite(value: float) -> float | None:
    """Return the number as a float, or None for infinity and NaN, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


class Log:
    """The log of a run that starts or resumes at step `start`. Existing rows of later steps are deleted first.

    writers: names in WRITERS; other names are ignored. Only process 0 writes. Raises OSError if the disk is full.
    """

    def __init__(self, folder: pathlib.Path, *, start: int, writers: Sequence[str] = ("tensorboard",)):
        self._open = contextlib.ExitStack()  # closes all files and writers, even if one of them fails
        self._writes = distributed.is_main()
        if not self._writes:
            return
        rows = [json.dumps(row) + "\n" for row in read(folder) if row["step"] <= start]
        disk.write(folder / "metrics.jsonl", "".join(rows).encode())
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context((folder / "metrics.jsonl").open("a", encoding="utf-8"))
            self._writers = [WRITERS[name](folder, start) for name in writers if name in WRITERS]
            for writer in self._writers:
                stack.callback(writer.close)
            self._open = stack.pop_all()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one line {"step": ..., name: value, ...}, with null for NaN; the writers get the finite values."""
        if not self._writes:
            return
        row = {name: finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.write(step, {name: x for name, x in row.items() if x is not None})

    def close(self) -> None:
        """Flush and close the file and the writers."""
        self._open.close()


class Events:
    """A writer of TensorBoard events. On a full disk, tensorboardX.SummaryWriter would lose events and wait forever."""

    def __init__(self, folder: pathlib.Path, start: int):
        # Imported here because tensorboardX imports PyTorch, which takes seconds, if it is installed.
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2

        # `start` orders the files that are created in the same second.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{start}.{secrets.token_hex(4)}"
        self._make_event = event_pb2.Event
        self._events = record_writer.RecordWriter(str(disk.folder(folder, "events") / name))
        self._flushed = -math.inf
        self._event(file_version="brain.Event:2")
        if start:  # TensorBoard then ignores the events of an earlier session after `start`
            self._event(step=start + 1, session_log={"status": event_pb2.SessionLog.START})

    def write(self, step: int, values: dict[str, float]) -> None:
        scalars = [{"tag": name, "simple_value": x} for name, x in values.items()]
        self._event(step=step, summary={"value": scalars})
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._events.flush()

    def _event(self, **fields: Any) -> None:
        self._events.write(self._make_event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        self._events.close()


class Wandb:
    """A writer to Weights & Biases, to the project $WANDB_PROJECT or "tfm". A resumed run continues its W&B run.

    WANDB_MODE=offline keeps all data in the run's folder, for `wandb sync`. No data on machine or code are sent.
    """

    def __init__(self, folder: pathlib.Path, start: int):
        import wandb

        options = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
        options |= {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}
        earlier = sorted(disk.folder(folder, "wandb").glob("*run-*-*"))  # offline-run-<time>-<id>
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tfm"),
                dir=folder,
                name="/".join(folder.absolute().parts[-2:]),
                id=earlier[0].name.partition("run-")[2].split("-")[1] if earlier else None,
                resume="allow",
                reinit="create_new",
                config=records.read_config(folder)["config"],
                settings=wandb.Settings(**options),
            )
        except wandb.Error as error:
            raise errors.UserError(
                f"log has wandb: {errors.line(error)}. Set WANDB_MODE=offline to log without a server"
            ) from error
        self._run.define_metric("*", step_metric="step")  # wandb's own step cannot go back to that of a checkpoint

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step} | values)

    def close(self) -> None:
        self._run.finish()


SYMMETRY = "symmetry"
WRITERS = {"tensorboard": Events, "wandb": Wandb}
LOGS = ("jsonl", *WRITERS, SYMMETRY)  # values of the setting `log`; metrics.jsonl is always written


def check(names: Sequence[str]) -> None:
    """Raise UserError if a name is not in LOGS, or if wandb is requested but not installed."""
    for name in names:
        by_name.choose("log", str(name), dict.fromkeys(LOGS))
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise errors.UserError('log has wandb, which is not installed. Install it: pip install -e ".[wandb]"')


class Pace:
    """The speed of the steps. When the second step ends, the first is discarded: it may compile, and fills caches."""

    def __init__(self) -> None:
        self.seconds, self.work, self.since = 0.0, 0.0, time.perf_counter()
        self._steps, self._recent = 0, collections.deque(maxlen=RECENT)

    def step(self, work: float) -> None:
        """Count a step that ends now. work: its cost, in units that the caller chooses."""
        ends, self._steps = time.perf_counter(), self._steps + 1
        if self._steps == 2:
            self.seconds, self.work = 0.0, 0.0
        if self._steps > 1:
            self._recent.append((ends - self.since) / work)
        self.seconds, self.work, self.since = self.seconds + ends - self.since, self.work + work, ends

    def left(self, work: float) -> float | None:
        """Return the predicted seconds for this work; None if too few steps were measured."""
        is_known = len(self._recent) >= MIN_STEPS or (self._recent and self.seconds > MIN_SECONDS)
        return statistics.median(self._recent) * work if is_known else None


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


class Line:
    """A progress bar of tqdm on a terminal or in a notebook; elsewhere a plain line every ten seconds.

    The time left is computed here, because tqdm counts compilation, evaluations and saves as steps.
    """

    EVERY_SECONDS = 10.0

    def __init__(self, prefix: str, *, total: float, done: float = 0, live: bool = True):
        """prefix: the first part of tqdm's bar_format. total, done: in units of work. live: whether to show a bar."""
        self._bar = tqdm.auto.tqdm(
            total=total,
            initial=done,
            disable=not (live and (in_notebook() or sys.stderr.isatty())),
            bar_format=prefix + "{postfix} |{bar}|",
            dynamic_ncols=True,
        )
        self._pace, self._printed = Pace(), time.perf_counter()

    def _show(self, text: str, *, done: float, plain: str) -> None:
        """Advance the bar by `done`, and show the text after it. plain: the line without a bar; "" prints nothing."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done)
        if plain and self._bar.disable and time.perf_counter() - self._printed > self.EVERY_SECONDS:
            self._printed = time.perf_counter()
            print(plain, flush=True)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager: exclude the time of the block, an evaluation or a save, from the time of the steps."""
        began = time.perf_counter()
        yield
        self._pace.since += time.perf_counter() - began

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        self._bar.close()


def clock(seconds: float | None) -> str:
    """Return 61 as "01:01", and None as "?"."""
    return "?" if seconds is None else tqdm.auto.tqdm.format_interval(round(seconds))


class Progress(Line):
    """The progress of a single run."""

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
        """work(n): the cost of the first n steps, in units of the first step; more than n if batches have grown.

        evaluation: the cost of one evaluation, in the same unit. evaluations(n): the number of evaluations from step n
        on. peak: the FLOP/s of large matrix products; 0: unknown.
        """
        super().__init__("{n_fmt}/{total_fmt} steps", total=steps, done=start, live=distributed.is_main())
        self._steps, self._tokens, self._flops, self._peak = steps, tokens_per_step, flops_per_step, peak
        self._work, self._evaluation, self._evaluations = work, evaluation, evaluations
        self._last_step, self._text = start, ""

    def advance(self, step: int, loss: float | None) -> None:
        """Count the step, and show the progress. loss: None if it was not fetched; the last one stays on the bar."""
        self._pace.step(self._work(step) - self._work(self._last_step))
        self._last_step = step
        remaining = self._work(self._steps) - self._work(step)
        seconds_left = self._pace.left(remaining + self._evaluation * self._evaluations(step))
        if loss is not None:
            speed, self._text = self.tokens_per_second(), f"loss {loss:.4f}"
            if seconds_left is not None:
                self._text += f", {speed:,.0f} tokens/s"
            if seconds_left is not None and self._peak:
                share = self._flops * speed / self._tokens / self._peak
                self._text += f", {100 * share:.0f} % of matrix-product speed"
        # The time comes first, because a narrow terminal cuts off the end.
        line = ", ".join(filter(None, [f"{clock(seconds_left)} left", self._text]))
        self._show(line, done=1, plain=f"step {step:,}/{self._steps:,}: {line}" if loss is not None else "")

    def tokens_per_second(self) -> float:
        """Return the throughput without compilation, evaluations, saves and the first step."""
        return self._tokens * self._pace.work / self._pace.seconds if self._pace.seconds else 0.0

    def close(self) -> None:
        self._bar.set_postfix_str(self._text, refresh=False)
        super().close()
