"""Logging: metrics.jsonl, the TensorBoard and W&B writers, and the progress bar."""

import contextlib
import importlib.util
import io
import json
import math
import os
import pathlib
import secrets
import socket
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
LEFT = ": {remaining} left"  # in a bar_format of tqdm


def say(text: str, end: str = "") -> None:
    """Print the text and flush. Control characters are escaped, as \\x1b; what stdout cannot encode becomes "?"."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = text.replace("\r\n", "\n").translate(ESCAPED)
    print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


class Log:
    """The log of a run that starts or resumes at step `start`. Existing rows of later steps are deleted first.

    writers: names in WRITERS; other names are ignored. Only process 0 writes. Raises OSError if the disk is full.
    """

    def __init__(self, folder: pathlib.Path, *, start: int, writers: Sequence[str] = ("tensorboard",)):
        self._open = contextlib.ExitStack()  # closes all files and writers, even if one of them fails
        self._writes = distributed.is_main()
        if not self._writes:
            return
        rows = [json.dumps(row) + "\n" for row in records.read_metrics(folder) if row["step"] <= start]
        disk.write(folder / records.METRICS, "".join(rows).encode())
        self._file = self._open.enter_context((folder / records.METRICS).open("a", encoding="utf-8"))
        self._writers = [WRITERS[name](folder, start) for name in writers if name in WRITERS]
        for writer in self._writers:
            self._open.callback(writer.close)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one line {"step": ..., name: value, ...}, with null for numbers that are not finite.

        TensorBoard and W&B get the finite numbers alone.
        """
        if not self._writes:
            return
        row = disk.finite({name: float(value) for name, value in values.items()})
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.write(step, {name: x for name, x in row.items() if x is not None})

    def close(self) -> None:
        """Flush and close the file and the writers."""
        self._open.close()


class Events:
    """A writer of TensorBoard events. It raises OSError if the disk is full.

    tensorboardX.SummaryWriter would then lose events and wait forever.
    """

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
    """A writer to Weights & Biases.

    wandb.init(sync_tensorboard=True) cannot replace it: that copies only the events of TensorBoard's own writers.
    """

    def __init__(self, folder: pathlib.Path, start: int):
        import wandb

        earlier = sorted(disk.folder(folder, "wandb").glob("*run-*"))  # offline-run-<time>-<id>: a resume continues it
        private = ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta")  # send only metrics and settings
        options = wandb.Settings(console="off", silent=True, x_save_requirements=False, **dict.fromkeys(private, True))
        run = {"id": earlier[0].name.rpartition("-")[2] if earlier else None, "resume": "allow", "reinit": "create_new"}
        run |= {"project": os.environ.get("WANDB_PROJECT", "tfm"), "name": "/".join(folder.absolute().parts[-2:])}
        try:
            config = records.read_config(folder)["config"]
            self._run = wandb.init(dir=folder, config=config, settings=options, **run)
        except wandb.Error as error:
            remedy = "Set WANDB_MODE=offline to log without a server"
            raise errors.UserError(f"log has wandb: {errors.line(error)}. {remedy}") from error
        self._run.define_metric("*", step_metric="step")  # wandb's own step cannot go back to that of a checkpoint
        self.close = self._run.finish

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step} | values)


SYMMETRY = "symmetry"
WRITERS = {"tensorboard": Events, "wandb": Wandb}
LOGS = ("jsonl", *WRITERS, SYMMETRY)  # values of the setting `log`; metrics.jsonl is always written


def check(names: Sequence[str]) -> None:
    """Raise UserError if a name is not in LOGS, or if wandb is requested but not installed."""
    for name in names:
        by_name.choose("log", str(name), dict.fromkeys(LOGS))
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise errors.UserError('log has wandb, which is not installed. Install it: pip install -e ".[wandb]"')


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


class Line:
    """A progress bar of tqdm on a terminal or in a notebook; elsewhere a plain line every ten seconds.

    The time left is tqdm's: from the mean speed since the start, with evaluations and saves.
    """

    EVERY_SECONDS = 10.0

    def __init__(self, form: str, *, total: float, done: float = 0, live: bool = True):
        """form: tqdm's bar_format, without the bar. total, done: in units of work. live: whether to show anything."""
        self._is_bar, self._live = in_notebook() or sys.stderr.isatty(), live
        options = {"file": io.StringIO(), "mininterval": math.inf}  # counts, and shows nothing
        if self._is_bar:
            form, options = form + " |{bar}|", {"dynamic_ncols": True}
        options |= {"smoothing": 0, "miniters": 1, "disable": not live}
        self._bar = tqdm.auto.tqdm(total=total, initial=done, bar_format=form, **options)
        self._printed, self._paused = time.perf_counter(), 0.0

    def _show(self, title: str, text: str, *, done: float, prints: bool) -> None:
        """Advance by `done`, and show title and text. prints: whether this may be printed if there is no bar."""
        self._bar.set_description_str(title, refresh=False)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done)
        if prints and self._live and not self._is_bar and time.perf_counter() - self._printed > self.EVERY_SECONDS:
            self._printed = time.perf_counter()
            print(self._bar, flush=True)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager: exclude the time of the block, an evaluation or a save, from the speed of the steps."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def measure(self) -> None:
        """Measure the devices' speed, if the bar shows a run's share of this speed. Call this while they are idle."""

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._bar.write(line)
        sys.stdout.flush()

    def hide_time_left(self) -> None:
        """Show no time left from now on."""
        if self._live:
            self._bar.bar_format = self._bar.bar_format.replace(LEFT, "")

    def close(self) -> None:
        """Close the bar, and remove the estimate of the time left from it."""
        self.hide_time_left()
        self._bar.close()


class Progress(Line):
    """The progress bar of a single run: steps, loss, tokens per second, and share of the matrix-product speed."""

    def __init__(
        self,
        tokens: Callable[[int], int],
        *,
        start: int,
        steps: int,
        flops: float = 0.0,
        peak: Callable[[], float] = lambda: 1.0,
    ):
        """tokens(n): the number of tokens in the first n steps. flops: of a token. peak() -> the devices' FLOP/s.

        start: the number of steps that were done before.
        """
        form = "{desc}" + LEFT + "{postfix}"  # the time comes first, because a narrow terminal cuts off the end
        super().__init__(form, total=tokens(steps), done=tokens(start), live=distributed.is_main())
        self._tokens, self._steps, self._text = tokens, steps, ""
        self._flops, self._peak, self._share = flops, peak, 0.0
        self._first = self._last = None  # (seconds, tokens) after the first and the last step of this session

    def measure(self) -> None:
        peak = self._peak()
        self._share = self._flops / peak
        if self._live:
            speed = f"{peak / 1e9:,.0f} GFLOP/s (100 % of matrix-product speed)"
            self.say(f"  for comparison: the devices multiply large float32 matrices at {speed}")

    def advance(self, step: int, loss: float | None) -> None:
        """Count the step, and show the progress. loss: None if it was not fetched; the last one stays on the bar."""
        done = self._tokens(step) - self._tokens(step - 1)
        self._last = time.perf_counter() - self._paused, self._tokens(step)
        if self._first is None:
            self._first = self._last
            if self._live:  # tqdm's speed leaves out the first step, too
                self._bar.initial += done
                self._bar.unpause()
        if loss is not None:
            speed, self._text = self.tokens_per_second(), f"loss {loss:.4f}"
            self._text += f", {speed:,.0f} tokens/s" * (speed > 0)
            self._text += f", {100 * speed * self._share:.0f} % of matrix-product speed" * (speed * self._share > 0)
        if step == self._steps:
            self.hide_time_left()
        self._show(f"step {step:,}/{self._steps:,}", self._text, done=done, prints=loss is not None)

    def tokens_per_second(self) -> float:
        """Return the throughput without compilation, evaluations, saves and the first step; 0 if it is unknown."""
        if self._first == self._last:
            return 0.0
        (began, before), (now, tokens) = self._first, self._last
        return (tokens - before) / (now - began)
