"""Fuzz tests: the number of cases, the texts to try, and the limits of time and memory for each case.

TFM_FUZZ=20 tries twenty times as many cases and draws new ones in each run. By default, the cases are few and fixed.
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
counts: dict[str, int] = {}  # number of cases for each "test: outcome"

# No "/" and no "~": a text must not be the path of a real folder, because the project would read it.
LETTERS = st.text(st.characters(codec="utf-8", exclude_characters="/~"), max_size=12)
STRANGE = st.sampled_from(
    ["", " ", "\0", "a\0b", "a\nb", "\r\n\t", "x" * 5000, "9" * 5000, "é\u0301", "日本語", "\U0001f600", "\udcff"]
    + ["a\ud800", "\x1b[31m", "a b:c", *"- -- = .. [MASK] {} [ nan inf -inf 1e3 1e400 0x10 1_000 True None".split()]
    + ": a: :b .a:b ..:x os:sep os.path:join math:gelu json:loads".split()
)
TEXTS = st.one_of(STRANGE, LETTERS)


def settings(cases: int) -> hypothesis.settings:
    """Return Hypothesis settings that try cases * TFM_FUZZ examples."""
    return hypothesis.settings(
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        max_examples=cases * TIMES,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def count(test: str, outcome: str) -> None:
    """Count one more case of `test` with this outcome."""
    counts[f"{test}: {outcome}"] = counts.get(f"{test}: {outcome}", 0) + 1


def print_counts() -> None:
    """Print the counts (pytest -s shows them)."""
    print("\n" + "\n".join(f"{n:7,} {outcome}" for outcome, n in sorted(counts.items())))


class Hangs(BaseException):
    """Raised if a case takes too long. (TimeoutError is an OSError, and readers of files convert it to a UserError.)"""


@contextlib.contextmanager
def limit_resources(*, seconds: float = 300, gigabytes: float = 4) -> Iterator[None]:
    """Context manager: raise Hangs after `seconds`, and MemoryError if the process grows by more than `gigabytes`."""

    def stop(*_: object) -> None:
        raise Hangs(f"not done after {seconds} s")

    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(gigabytes * 2**30), hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_launcher(*arguments: str) -> tuple[int, str]:
    """Run the launcher in this process and return (exit code, stderr). Like a terminal, stdout is strict UTF-8."""
    tiny.forget_flags()
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limit_resources():
        code = launch.main(["launch.py", *arguments])
    err.flush()
    return code, err.buffer.getvalue().decode("utf-8")


def check_sentence(sentence: str) -> None:
    """Assert that an error message is one nonempty line and not a traceback."""
    assert sentence.strip() and "Traceback" not in sentence, sentence
    assert len(sentence.splitlines()) == 1, sentence
