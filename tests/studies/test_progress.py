"""The time left in the progress bars of a run and of a study, against a simulated clock."""

import io
import itertools
import re
import types

import pytest
import tiny

from experiments.engine import log, run_plan
from experiments.studies import programs, progress

STEP, COMPILING = 0.1, 20.0  # seconds
SIZES = [16] * 300 + [32] * 300 + [48] * 400  # of batches
LINE = re.compile(r"step ([\d,]+)/.*? ([\d:]+|\?) left(?:, loss.*)?$", re.M)


@pytest.fixture
def clock(monkeypatch):
    """Return the clock: `now` is the time of time.perf_counter. Every step prints a plain line."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(log.time, "perf_counter", lambda: clock.now)
    for line in (log.Progress, progress.Progress):
        monkeypatch.setattr(line, "EVERY_SECONDS", -1.0)
    return clock


def parse_seconds(text):
    """Return 3723.0 for '1:02:03', None for '?'."""
    return None if text == "?" else float(sum(60**i * int(part) for i, part in enumerate(text.split(":")[::-1])))


def near(estimate, truth):
    """Return True within a factor of 1.5, or half a second, because whole seconds are printed."""
    return estimate is not None and truth / 1.5 - 0.5 <= estimate <= 1.5 * truth + 0.5


def parse_lines(out):
    """Return [(step, seconds left)] of every plain line."""
    return [(int(n.replace(",", "")), parse_seconds(left)) for n, left in LINE.findall(out)]


def simulate_run(clock, *, steps=1000, start=0, every=0, evaluation=0.0, worth=0.0, grows=False, slow=0):
    """Return step -> clock of a run, with the calls of experiments/engine/loop.py. The first step and the first
    evaluation compile. evaluation: seconds; worth: the steps that it counts as."""
    line = log.Progress(
        start=start,
        steps=steps,
        tokens_per_step=64,
        flops_per_step=32,
        peak=0.0,
        work=(lambda n: sum(SIZES[:n]) / SIZES[0]) if grows else float,
        evaluation=worth,
        evaluations=lambda n: run_plan.count_due(n, every=every, steps=steps) if worth else 0,
    )
    compiling, ends = iter([COMPILING]), {}
    for n in range(start + 1, steps + 1):
        clock.now += STEP * (SIZES[n - 1] / SIZES[0] if grows else 1) * (3 if n - start <= slow else 1)
        clock.now += COMPILING * (n == start + 1)
        line.advance(n, 1.5)
        ends[n] = clock.now
        if worth and run_plan.is_due(n, every=every, steps=steps):
            with line.pause():
                took = evaluation + next(compiling, 0.0)
                clock.now += took
                clock.now += 7 * (n == 500)  # a save
    line.close()
    return ends


@pytest.mark.parametrize(
    "run",
    [
        {},
        {"steps": 10_000},
        {"start": 800},
        {"grows": True},
        {"slow": 4},  # in their first steps some machines find the memory
        {"every": 50, "evaluation": 2.0, "worth": 20.0},
        {"every": 5, "evaluation": 2.0, "worth": 16.0},  # the first evaluation comes before the tenth step
        {"every": 100, "evaluation": 9.0, "worth": 80.0, "start": 300},
    ],
)
def test_after_ten_steps_the_time_left_is_about_right(clock, capsys, run):
    ends = simulate_run(clock, **run)
    out, start = capsys.readouterr().out, run.get("start", 0)
    estimates = dict(parse_lines(out))
    assert out.splitlines()[0].endswith("? left, loss 1.5000")  # without throughput, because the step compiles
    assert {estimates[start + n] for n in range(1, 10)} == {None} and len(estimates) == len(ends)
    for n, end in list(ends.items())[9:]:
        compiling = COMPILING if n <= start + run.get("every", 0) else 0.0
        assert near(estimates[n], clock.now - end - compiling), f"after step {n}"


def test_the_live_line_announces_the_same(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("COLUMNS", raising=False)  # before pytest 9 its workers have one, of 80
    line = log.Progress(start=0, steps=1000, tokens_per_step=10, flops_per_step=5, peak=100.0)
    for n in range(1, 11):
        clock.now += COMPILING if n == 1 else STEP
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


def simulate_study(clock, waiting, *, power, start):
    """Return [(program, step, seconds of steps and evaluations so far)] and all their seconds, with the calls of
    ablation.py and programs.py. A step takes its FLOPs to this power."""
    line, records, trained = progress.Progress(waiting), [], 0.0
    for number, job in enumerate(waiting):
        line.begin(job)
        took, first = STEP * (job.flops * len(job.program.runs)) ** power, start if number == 0 else 0
        clock.now += COMPILING  # of the step; the first evaluation compiles its own program
        line.go_on(first)
        for n in range(first, job.steps + 1):
            if n > first:
                clock.now, trained = clock.now + took, trained + took
                line.advance(n, 1.5)
                records.append((number, n, trained))
            if n == first or run_plan.is_due(n, every=job.every, steps=job.steps):
                with line.pause():
                    clock.now += COMPILING * (n == first) + job.evaluation * took
                    trained += job.evaluation * took
        clock.now += 1  # results
    line.close()
    return records, trained


@pytest.mark.parametrize(("power", "start"), [(1, 0), (1, 200), (0.8, 0)])  # large arms come nearer to the peak
def test_after_ten_steps_the_time_left_of_a_study_is_about_right(clock, capsys, power, start):
    waiting = [
        programs.Checked(types.SimpleNamespace(name=name, runs=range(n)), [], 300, 1, flops, evaluation=5.0, every=25)
        for _ in range(3)
        for name, n, flops in (("small", 1, 1), ("large", 2, 2))
    ]
    records, trained = simulate_study(clock, waiting, power=power, start=start)
    estimates = parse_lines(capsys.readouterr().out)
    assert len(estimates) == len(records) and estimates[0][1] is None
    for (number, n, so_far), (_, estimate) in zip(records[9:], estimates[9:], strict=True):
        assert near(estimate, trained - so_far), f"after step {n} of program {number}"
