"""The time left that the live lines announce, of a run and of a study, against what a made-up clock then shows."""

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
    """.now is what time.perf_counter gives; every step is told in a plain line."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(log.time, "perf_counter", lambda: clock.now)
    for one in (log.Progress, progress.Progress):
        monkeypatch.setattr(one, "EVERY_SECONDS", -1.0)
    return clock


def seconds(told):
    """'1:02:03' -> 3723.0; None for '?'."""
    return None if told == "?" else float(sum(60**i * int(part) for i, part in enumerate(told.split(":")[::-1])))


def near(announced, truth):
    """Within a factor of 1.5, or half a second, as whole ones are told."""
    return announced is not None and truth / 1.5 - 0.5 <= announced <= 1.5 * truth + 0.5


def announced(out):
    """[(step, seconds left)] of every plain line."""
    return [(int(n.replace(",", "")), seconds(left)) for n, left in LINE.findall(out)]


def trained(clock, *, steps=1000, start=0, every=0, evaluation=0.0, worth=0.0, grows=False, slow=0):
    """{step: clock} of a run, as experiments/engine/loop.py tells its steps. The first one of the session compiles, and
    so does the first evaluation; they take so many seconds, and are said to be worth so many steps."""
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
    ("run", "known"),
    [
        ({}, 10),
        ({"steps": 10_000}, 10),
        ({"start": 800}, 10),
        ({"grows": True}, 10),
        ({"slow": 4}, 10),  # in their first steps some machines find the memory
        ({"every": 50, "evaluation": 2.0, "worth": 20.0}, 10),
        ({"every": 5, "evaluation": 2.0, "worth": 16.0}, 10),  # the first one is seen before the tenth step
        ({"every": 100, "evaluation": 9.0, "worth": 80.0, "start": 300}, 10),
    ],
)
def test_after_ten_steps_the_time_left_is_about_right(clock, capsys, run, known):
    ends = trained(clock, **run)
    out, start = capsys.readouterr().out, run.get("start", 0)
    said = dict(announced(out))
    assert out.splitlines()[0].endswith("? left, loss 1.5000")  # and no throughput, that of a step that compiles
    assert {said[start + n] for n in range(1, 10)} == {None} and len(said) == len(ends)
    for n, then in list(ends.items())[known - 1 :]:
        compiling = COMPILING if n <= start + run.get("every", 0) else 0.0
        assert near(said[n], clock.now - then - compiling), f"after step {n}"


def test_throughput_is_without_the_first_step_of_several(clock):
    line = log.Progress(start=7, steps=9, tokens_per_step=30, flops_per_step=1, peak=0.0)
    assert line.tokens_per_second() == 0
    for n, took, throughput in ((8, 15.0, 2), (9, 3.0, 10)):
        clock.now += took
        line.advance(n, None)
        assert line.tokens_per_second() == throughput


def test_the_live_line_announces_the_same(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("COLUMNS", raising=False)  # before pytest 9 its workers have one, of 80
    line = log.Progress(start=0, steps=1000, tokens_per_step=10, flops_per_step=5, peak=100.0)
    for n in range(1, 11):
        clock.now += COMPILING if n == 1 else STEP
        line.advance(n, 1.5 if n == 10 else None)
    line.say("a line, below which the live one is drawn anew")
    told = "loss 1.5000, 100 tokens/s, 50 % of matrix-product speed"
    assert f"10/1000 steps, 01:39 left, {told} |" in terminal.getvalue()
    line.close()
    assert f"10/1000 steps, {told} |" in terminal.getvalue().splitlines()[-1]


def test_the_evaluations_that_are_still_to_come():
    for every, steps in itertools.product(range(4), range(1, 9)):
        for n in range(1, steps + 1):
            due = sum(run_plan.is_due(m, every=every, steps=steps) for m in range(n, steps + 1))
            assert run_plan.count_due(n, every=every, steps=steps) == due
    task = tiny.linear_task(n_evaluation=29, evaluate_batch=8)  # 4 batches, forward only
    assert run_plan.evaluation_work(task, batch=16) == 4 * 8 / 3 / 16


def train_study(clock, line, waiting, *, power, start):
    """([(program, step, seconds of steps and evaluations so far)], their seconds), told as ablation.py and programs.py
    do. A step's seconds are as its FLOPs to this power."""
    told, trained = [], 0.0
    for number, one in enumerate(waiting):
        line.begin(one)
        took, first = STEP * (one.flops * len(one.program.runs)) ** power, start if number == 0 else 0
        clock.now += COMPILING  # of the step; that of the evaluation comes with the first one
        line.go_on(first)
        for n in range(first, one.steps + 1):
            if n > first:
                clock.now, trained = clock.now + took, trained + took
                line.advance(n, 1.5)
                told.append((number, n, trained))
            if n == first or run_plan.is_due(n, every=one.every, steps=one.steps):
                with line.pause():
                    clock.now += COMPILING * (n == first) + one.evaluation * took
                    trained += one.evaluation * took
        clock.now += 1  # results
    line.close()
    return told, trained


@pytest.mark.parametrize(("power", "start"), [(1, 0), (1, 200), (0.8, 0)])  # large arms come nearer to the peak
def test_after_ten_steps_the_time_left_of_a_study_is_about_right(clock, capsys, power, start):
    waiting = [
        programs.Checked(types.SimpleNamespace(name=name, runs=range(n)), [], 300, 1, flops, evaluation=5.0, every=25)
        for _ in range(3)
        for name, n, flops in (("small", 1, 1), ("large", 2, 2))
    ]
    told, trained = train_study(clock, progress.Progress(waiting), waiting, power=power, start=start)
    said = announced(capsys.readouterr().out)
    assert len(said) == len(told) and said[0][1] is None
    for (number, n, so_far), (_, left) in zip(told[9:], said[9:], strict=True):
        assert near(left, trained - so_far), f"after step {n} of program {number}"
