"""The time left in the progress bars of a run and of a study, against a simulated clock."""

import io
import itertools
import re
import types

import pytest
import tiny

from experiments.engine import run_plan
from experiments.folder import log
from experiments.studies import programs, progress

STEP_SECONDS, COMPILE_SECONDS = 0.1, 20.0  # seconds
SIZES = [16] * 300 + [32] * 300 + [48] * 400  # sizes of the batches
LINE = re.compile(r"step ([\d,]+)/.*? ([\d:]+|\?) left(?:, loss.*)?$", re.M)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock whose `now` is returned by time.perf_counter. Every step prints a plain line."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(log.time, "perf_counter", lambda: clock.now)
    for line in (log.Progress, progress.Progress):
        monkeypatch.setattr(line, "EVERY_SECONDS", -1.0)
    return clock


def parse_seconds(text):
    """Return 3723.0 for '1:02:03', None for '?'."""
    return None if text == "?" else float(sum(60**i * int(part) for i, part in enumerate(text.split(":")[::-1])))


def is_near(estimate, truth):
    """Return True if the estimate is within a factor of 1.5, plus half a second because whole seconds are printed."""
    return estimate is not None and truth / 1.5 - 0.5 <= estimate <= 1.5 * truth + 0.5


def parse_lines(out):
    """Return [(step, seconds left)] of every plain line."""
    return [(int(n.replace(",", "")), parse_seconds(left)) for n, left in LINE.findall(out)]


def simulate_run(clock, *, steps=1000, start=0, every=0, evaluation=0.0, evaluation_steps=0.0, grows=False, slow=0):
    """Simulate a run with the calls of experiments/engine/loop.py. Return {step: time at its end}.

    The first step and the first evaluation compile. evaluation: seconds of one evaluation; evaluation_steps: the
    number of steps that it counts as.
    """
    line = log.Progress(
        start=start,
        steps=steps,
        tokens_per_step=64,
        flops_per_step=32,
        peak=0.0,
        work=(lambda n: sum(SIZES[:n]) / SIZES[0]) if grows else float,
        evaluation=evaluation_steps,
        evaluations=lambda n: run_plan.count_due(n, every=every, steps=steps) if evaluation_steps else 0,
    )
    compiling, ends = iter([COMPILE_SECONDS]), {}
    for n in range(start + 1, steps + 1):
        clock.now += STEP_SECONDS * (SIZES[n - 1] / SIZES[0] if grows else 1) * (3 if n - start <= slow else 1)
        clock.now += COMPILE_SECONDS * (n == start + 1)
        line.advance(n, 1.5)
        ends[n] = clock.now
        if evaluation_steps and run_plan.is_due(n, every=every, steps=steps):
            with line.pause():
                seconds = evaluation + next(compiling, 0.0)
                clock.now += seconds
                clock.now += 7 * (n == 500)  # a save
    line.close()
    return ends


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 10_000},
        {"start": 800},
        {"grows": True},
        {"slow": 4},  # on some machines, the first steps allocate memory
        {"every": 50, "evaluation": 2.0, "evaluation_steps": 20.0},
        {"every": 5, "evaluation": 2.0, "evaluation_steps": 16.0},  # the first evaluation comes before the tenth step
        {"every": 100, "evaluation": 9.0, "evaluation_steps": 80.0, "start": 300},
    ],
)
def test_after_ten_steps_the_time_left_is_about_right(clock, capsys, options):
    ends = simulate_run(clock, **options)
    out, start = capsys.readouterr().out, options.get("start", 0)
    estimates = dict(parse_lines(out))
    assert out.splitlines()[0].endswith("? left, loss 1.5000")  # no throughput yet, because this step compiles
    assert {estimates[start + n] for n in range(1, 10)} == {None} and len(estimates) == len(ends)
    for n, end in list(ends.items())[9:]:
        compiling = COMPILE_SECONDS if n <= start + options.get("every", 0) else 0.0
        assert is_near(estimates[n], clock.now - end - compiling), f"after step {n}"


def test_the_live_line_has_the_same_numbers(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("COLUMNS", raising=False)  # before pytest 9, workers set COLUMNS=80
    line = log.Progress(start=0, steps=1000, tokens_per_step=10, flops_per_step=5, peak=100.0)
    for n in range(1, 11):
        clock.now += COMPILE_SECONDS if n == 1 else STEP_SECONDS
        line.advance(n, 1.5 if n == 10 else None)
    line.say("a line above the live one")
    text = "loss 1.5000, 100 tokens/s, 50 % of matrix-product speed"
    assert f"10/1000 steps, 01:39 left, {text} |" in terminal.getvalue()
    line.close()
    assert f"10/1000 steps, {text} |" in terminal.getvalue().splitlines()[-1]


def test_remaining_evaluations_are_counted():
    for every, steps in itertools.product(range(4), range(1, 9)):
        for n in range(1, steps + 1):
            due = sum(run_plan.is_due(m, every=every, steps=steps) for m in range(n, steps + 1))
            assert run_plan.count_due(n, every=every, steps=steps) == due
    task = tiny.linear_task(n_evaluation=29, evaluate_batch=8)  # 4 batches, forward only
    assert run_plan.evaluation_work(task, batch=16) == 4 * 8 / 3 / 16


def simulate_study(clock, jobs, *, power, start):
    """Simulate a study with the calls of ablation.py and programs.py. A step takes its FLOPs to the power `power`.

    Returns ([(program, step, seconds of steps and evaluations so far)], total seconds).
    """
    line, records, seconds = progress.Progress(jobs), [], 0.0
    for number, job in enumerate(jobs):
        line.begin(job)
        step_seconds, first = STEP_SECONDS * (job.flops * len(job.program.runs)) ** power, start if number == 0 else 0
        clock.now += COMPILE_SECONDS  # of the step; the first evaluation compiles its own program
        line.resume(first)
        for n in range(first, job.steps + 1):
            if n > first:
                clock.now, seconds = clock.now + step_seconds, seconds + step_seconds
                line.advance(n, 1.5)
                records.append((number, n, seconds))
            if n == first or run_plan.is_due(n, every=job.every, steps=job.steps):
                with line.pause():
                    clock.now += COMPILE_SECONDS * (n == first) + job.evaluation * step_seconds
                    seconds += job.evaluation * step_seconds
        clock.now += 1  # results
    line.close()
    return records, seconds


@pytest.mark.parametrize(("power", "start"), [(1, 0), (1, 200), (0.8, 0)])  # 0.8: large arms have a higher FLOP rate
def test_after_ten_steps_the_time_left_of_a_study_is_about_right(clock, capsys, power, start):
    jobs = [
        programs.Checked(types.SimpleNamespace(name=name, runs=range(n)), [], 300, 1, flops, evaluation=5.0, every=25)
        for _ in range(3)
        for name, n, flops in (("small", 1, 1), ("large", 2, 2))
    ]
    records, seconds = simulate_study(clock, jobs, power=power, start=start)
    estimates = parse_lines(capsys.readouterr().out)
    assert len(estimates) == len(records) and estimates[0][1] is None
    for (number, n, seconds_so_far), (_, estimate) in zip(records[9:], estimates[9:], strict=True):
        assert is_near(estimate, seconds - seconds_so_far), f"after step {n} of program {number}"
