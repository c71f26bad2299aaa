"""Fuzz tests: the number of cases, the texts to try, and the bounds of time and memory for each case.

TFM_FUZZ=20 makes twenty times as many cases, and new ones each time; without it they are few, and the same.
"""

import contextlib
import io
import os
import pathlib
import resource
import signal
from collections.abc import Iterator

import hypothesis
import tiny
from hypothesis import strategies as st

import launch

TIMES = int(os.environ.get("TFM_FUZZ", "1"))
tried: dict[str, int] = {}  # cases, by the test's name and what became of them

# No "/" and no "~": what is drawn must not name a folder of this machine, which would be read.
LETTERS = st.text(st.characters(codec="utf-8", exclude_characters="/~"), max_size=12)
STRANGE = st.sampled_from(
    ["", " ", "\0", "a\0b", "a\nb", "\r\n\t", "x" * 5000, "9" * 5000, "é\u0301", "日本語", "\U0001f600", "\udcff"]
    + ["a\ud800", "\x1b[31m", "a b:c", *"- -- = .. [MASK] {} [ nan inf -inf 1e3 1e400 0x10 1_000 True None".split()]
    + ": a: :b .a:b ..:x os:sep os.path:join math:gelu json:loads".split()
)
TEXTS = st.one_of(STRANGE, LETTERS)


def settings(cases: int) -> hypothesis.settings:
    """Return Hypothesis' settings for this number of cases by default."""
    return hypothesis.settings(
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        max_examples=cases * TIMES,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def count(test: str, what: str) -> None:
    """Count one more case of `test` with this outcome."""
    tried[f"{test}: {what}"] = tried.get(f"{test}: {what}", 0) + 1


def tell() -> None:
    """Print the counts (pytest -s shows them)."""
    print("\n" + "\n".join(f"{n:7,} {what}" for what, n in sorted(tried.items())))


class Hangs(BaseException):
    """A case is not done in time. (A TimeoutError is an OSError, which a reader turns into a UserError.)"""


@contextlib.contextmanager
def bounded(*, seconds: float = 300, gigabytes: float = 4) -> Iterator[None]:
    """Context manager: raise Hangs after `seconds`, and MemoryError if the process grows by more than `gigabytes`."""

    def stop(*_: object) -> None:
        raise Hangs(f"not done after {seconds} s")

    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(gigabytes * 2**30), hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def launched(*arguments: str) -> tuple[int, str]:
    """Return (exit code, stderr) of the launcher in this process, whose stdout takes only UTF-8, like a terminal."""
    tiny.forget_flags()
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), bounded():
        code = launch.main(["launch.py", *arguments])
    err.flush()
    return code, err.buffer.getvalue().decode("utf-8")


def check_sentence(sentence: str) -> None:
    """Assert that it is one nonempty line and not a traceback."""
    assert sentence.strip() and "Traceback" not in sentence, sentence
    assert len(sentence.splitlines()) == 1, sentence
