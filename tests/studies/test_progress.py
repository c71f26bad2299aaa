"""The time left in the progress bars of a run and of a study, against a simulated clock."""

import io
import re
import types

import pytest

from experiments.folder import log
from experiments.studies import programs, progress

STEP_SECONDS, COMPILE_SECONDS = 0.1, 20.0  # seconds
LINE = re.compile(r" ([\d:]+|\?) left")
IN_THE_STUDY = " left in the study, loss"


@pytest.fixture
def clock(monkeypatch):
    """Return a clock whose `now` is the time of tqdm and of time.perf_counter. Every step prints a plain line."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(log.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    monkeypatch.setattr(log.Line, "EVERY_SECONDS", -1.0)
    return clock


def parse_seconds(out):
    """Return the seconds left in every plain line: 3723.0 for '1:02:03', None for '?'."""
    texts = (text.split(":")[::-1] for text in LINE.findall(out))
    return [None if text == ["?"] else float(sum(60**i * int(part) for i, part in enumerate(text))) for text in texts]


def is_near(estimate, truth):
    """Return True if the estimate is within a factor of 1.5, plus a second because whole seconds are printed."""
    return estimate is not None and truth / 1.5 - 1 <= estimate <= 1.5 * truth + 1


@pytest.mark.parametrize(("start", "sizes", "evaluation"), [(0, [16] * 1000, 0), (800, [16] * 500 + [48] * 500, 2.0)])
def test_the_time_left_of_a_run_counts_larger_batches_and_evaluations(clock, capsys, start, sizes, evaluation):
    line, ends = log.Progress(lambda n: sum(sizes[:n]), start=start, steps=1000), []
    for n in range(start + 1, 1001):
        clock.now += STEP_SECONDS * sizes[n - 1] / 16 + COMPILE_SECONDS * (n == start + 1)
        line.advance(n, 1.5)
        ends.append(clock.now)
        if n % 20 == 0 and n < 1000:
            with line.pause():
                clock.now += evaluation
    line.close()
    out = capsys.readouterr().out
    estimates = parse_seconds(out)
    assert len(estimates) == len(ends) - 1 and f"step {start + 1}/1,000: ? left, loss 1.5000\n" in out
    assert all(is_near(*pair) for pair in zip(estimates[20:], [clock.now - end for end in ends[20:-1]], strict=True))
    assert "step 1,000/1,000, loss 1.5000, " in out.splitlines()[-1]  # no time left after the last step
    assert line.tokens_per_second() == pytest.approx(16 / STEP_SECONDS)  # of the steps alone


def test_the_live_line_has_the_same_numbers_and_closes_without_a_time_left(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("COLUMNS", raising=False)  # before pytest 9, workers set COLUMNS=80
    line = log.Progress(lambda n: 10 * n, start=0, steps=1000, flops=5.0, peak=lambda: 1000.0)
    line.measure()
    for n in range(1, 11):
        clock.now += STEP_SECONDS
        line.advance(n, 1.5 if n == 10 else None)
    line.say("a line above the live one")
    text = "loss 1.5000, 100 tokens/s, 50 % of matrix-product speed"
    assert f"step 10/1,000: 01:39 left, {text} |" in terminal.getvalue()
    line.close()
    assert f"step 10/1,000, {text} |" in terminal.getvalue().splitlines()[-1]


@pytest.mark.parametrize("is_main", [True, False])
def test_every_host_measures_its_devices_and_only_the_main_one_says_so(is_main, monkeypatch, capsys):
    monkeypatch.setattr(log.distributed, "is_main", lambda: is_main)
    measured = []
    line = log.Progress(lambda n: n, start=0, steps=2, flops=5.0, peak=lambda: measured.append(1) or 1e9)
    line.measure()
    assert measured == [1] and ("1 GFLOP/s" in capsys.readouterr().out) == is_main


def make_jobs(names=("small", "large"), *, tuning=False):
    """Return a program of each name. Those with the name "large" have twice the runs, and twice the FLOPs of a run."""
    jobs = []
    for name in names:
        n = 2 if name == "large" else 1
        program = types.SimpleNamespace(name=name, runs=range(n), tuning=tuning)
        jobs.append(programs.Checked(program, [], 300, 1, n))
    return jobs


def simulate_study(clock, jobs, line, *, start=0, power=1):
    """Simulate a study with the calls of ablation.py and programs.py. A step takes its FLOPs to the power `power`.

    Returns the time at the end of every step.
    """
    ends = []
    for number, job in enumerate(jobs):
        step_seconds, first = STEP_SECONDS * job.step_flops**power / 3, 0 if number else start
        line.begin(job)
        clock.now += 4 * COMPILE_SECONDS + 5 * step_seconds  # and the first evaluation
        line.start(first)
        for n in range(first + 1, job.steps + 1):
            clock.now += step_seconds
            line.advance(n, 1.5)
            ends.append(clock.now)
            if n % 25 == 0 and n < job.steps:
                with line.pause():
                    clock.now += 5 * step_seconds
    line.close()
    return ends


@pytest.mark.parametrize(("start", "power", "elsewhere"), [(0, 1, False), (200, 1, True), (0, 0.8, False)])
def test_the_time_left_of_a_study_counts_all_compilations_and_is_about_right(clock, capsys, start, power, elsewhere):
    """0.8: large arms have a higher FLOP rate."""
    jobs = make_jobs(3 * ("small", "large"))
    line = progress.Progress(jobs)
    if elsewhere:
        line.replace(jobs.pop(2), [])
    ends = simulate_study(clock, jobs, line, start=start, power=power)
    out = capsys.readouterr().out
    estimates = parse_seconds(out)
    assert len(estimates) == out.count(IN_THE_STUDY) == len(ends) - 1  # no time left after the last step
    assert f"\nprogram 2 of {len(jobs)}, large, step 300/300, " in out
    assert out.splitlines()[-1] == f"program {len(jobs)} of {len(jobs)}, large, step 300/300, loss 1.5000"
    assert out.count(", at most ") == (len(estimates) if elsewhere else 0)  # another process has trained a program
    for n, (estimate, now) in enumerate(zip(estimates, ends[:-1], strict=True)):
        assert is_near(estimate, clock.now - now), (n, estimate, clock.now - now)


def test_the_time_left_in_tuning_is_that_of_the_whole_study(clock, capsys):
    tuning, compared = make_jobs(4 * ("small",), tuning=True), make_jobs(4 * ("large",))
    ends = simulate_study(clock, tuning, progress.Progress(tuning, compared))
    out = capsys.readouterr().out
    assert "\ntuning program 4 of 4, small, step 300/300, " in out and out.count(IN_THE_STUDY) == len(ends)
    simulate_study(clock, compared, progress.Progress(compared))
    estimates, truths = parse_seconds(out)[20:], [clock.now - end for end in ends[20:]]
    assert all(is_near(*pair) for pair in zip(estimates, truths, strict=True))
