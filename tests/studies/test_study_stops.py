"""Studies that are stopped, killed or damaged at bad moments: the same command goes on, and nothing is another."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_study
from tiny_study import ALL, ARMS, STEPS

from experiments.engine import checkpoint, disk, errors, log, loop, mesh, train_step as steps
from experiments.studies import programs, results

SECOND, OF_SECOND = ALL[2:], {"study__arms": ARMS[1:]}
ALL_STEPS = list(range(1, STEPS + 1))


def watch(patch: pytest.MonkeyPatch, what: str, told: Callable[[int], None]) -> None:
    """The function is told n whenever the loop calls this of what is done beside step n: `log` or `pauses`."""
    usual = getattr(loop.Training, what)

    def and_tell(self: loop.Training, n: int, *more: Any) -> Any:
        told(n)
        return usual(self, n, *more)

    patch.setattr(loop.Training, what, and_tell)


def stop_behind(folder: pathlib.Path, step: int) -> None:
    """A study of the second program alone is stopped while it takes this step."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, "pauses", lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == step else None)
        assert tiny_study.run(folder, **OF_SECOND).code == 143
    assert [file.name for file in folder.glob("study/checkpoints/*/*")] == [str(step)]


@pytest.fixture(scope="module")
def at_step_4(tmp_path_factory):
    """The folder of such a study, stopped behind step 4, which is saved."""
    folder = tmp_path_factory.mktemp("stopped")
    stop_behind(folder, 4)
    return folder


@pytest.fixture
def stopped(at_step_4, tmp_path):
    """A copy of it."""
    shutil.copytree(at_step_4 / "study", tmp_path / "study")
    return tmp_path


def again(folder: pathlib.Path, *more: str, **changes: Any) -> tuple[tiny.Outcome, list[int]]:
    """The same command, which is to come to its end, and the steps that it took."""
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, "log", taken.append)
        outcome = tiny_study.run(folder, *more, **changes)
    assert (outcome.code, outcome.err) == (0, "")
    assert not list(folder.glob("study/checkpoints/*"))
    return outcome, taken


def nth(n: int) -> Callable[..., bool]:
    """Whether this is its call of this number, from 0."""
    calls = itertools.count()
    return lambda *_: next(calls) == n


# Stops of one study, each after the other: its name, (owner, name of a function, when a signal comes behind it), how
# many runs are finished then, the steps that were taken before it. Each evaluation has six batches.
STOPS = [
    ("second evaluation", (mesh, "place_batch", nth(6)), 0, [1, 2, 3]),  # behind step 3
    ("first of two results", (disk, "write_json", lambda file, _: file.name == "summary.json"), 1, [4, 5, 6]),
    ("last save", (checkpoint.Checkpoints, "save", lambda _, step, *rest: step == STEPS), 2, ALL_STEPS),
]


def test_a_signal_outside_of_the_steps_stops_the_study_and_says_what_its_report_holds(whole, tmp_path, signalled):
    report = tmp_path / "study" / "report.json"
    for moment, call, finished, before in STOPS:
        taken: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, "log", taken.append)
            signalled(*call)
            outcome = tiny_study.run(tmp_path)
        assert outcome.code == 143 and "go on with" in outcome.err, moment
        assert taken == before, moment
        begun = list(tmp_path.glob("study/all/base/*/metrics.jsonl"))
        assert bool(begun) == (moment == "last save"), moment  # else the next program is not begun
        assert len(tiny_study.summaries(tmp_path)) == finished, moment
        if finished:
            words = f"; {report.with_suffix('.md')} holds the {finished} of 6 runs that are finished; go on"
            assert words in outcome.err, moment
            assert json.loads(report.read_text(encoding="utf-8"))["finished_runs"] == finished
        else:
            assert "; no run of the study is finished, and there is no report yet; go on with: " in outcome.err
            assert not report.exists()
        if moment == "second evaluation":  # as if it was killed behind the first of four rows
            (row,) = (row for row in log.read(whole / "study" / ALL[0]) if row["step"] == 3 and "eval/loss" in row)
            with (tmp_path / "study" / ALL[0] / "metrics.jsonl").open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(row) + "\n")
    _, taken = again(tmp_path)
    assert taken == []  # but the evaluation behind the last step, and the results
    tiny_study.assert_alike(tmp_path, whole, ALL)


def test_a_signal_while_the_last_report_is_drawn_is_told_behind_it(copy, signalled):
    signalled(results, "write")
    outcome = tiny_study.run(copy)
    assert outcome.code == 143 and "the report holds all of them; go on" in outcome.err
    assert str(copy / "study" / "report.html") in outcome.out


def test_a_study_that_fails_in_its_second_program_has_a_report_of_the_first(tmp_path, monkeypatch):
    usual = programs.train

    def train(one, *arguments, **options):
        if len(one.program.runs) > 2:
            raise errors.RunError("the device is gone")
        usual(one, *arguments, **options)

    monkeypatch.setattr(programs, "train", train)
    outcome = tiny_study.run(tmp_path)
    report = tmp_path / "study" / "report.md"
    held = f"error: the device is gone; {report} holds the 2 of 6 runs that are finished\n"
    assert (outcome.code, outcome.err) == (1, held) and report.is_file()


def test_what_may_change_does_not_begin_a_program_anew(whole, stopped):
    _, taken = again(stopped, "--config.train.log_every=1", **OF_SECOND)
    assert taken == [5, 6]
    found, right = tiny_study.summaries(stopped), tiny_study.summaries(whole)
    for name in SECOND:
        assert found[name]["params_sha256"] == right[name]["params_sha256"]
        assert "wall_seconds" not in found[name]  # it would be that of the last part
        assert [row["step"] for row in log.read(stopped / "study" / name) if "train/loss" in row] == [2, 4, 5, 6]


def test_a_damaged_checkpoint_is_named_and_without_it_its_program_begins_anew(whole, stopped):
    (saved,) = stopped.glob("study/checkpoints/*/4")
    file = max((file for file in saved.glob("state/**/*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    outcome = tiny_study.run(stopped, **OF_SECOND)
    assert outcome.code == 2 and str(file) in outcome.err and str(saved.parent) in outcome.err
    shutil.rmtree(saved.parent)
    _, taken = again(stopped, **OF_SECOND)
    assert taken == ALL_STEPS
    tiny_study.assert_alike(stopped, whole, SECOND)


def test_a_row_that_has_diverged_stays_so_in_a_study_that_goes_on(whole, tmp_path, monkeypatch):
    train = loop.train

    def poisoned(beside: Any, step: Callable, state: steps.State, batches: Any, **options: Any) -> steps.State:
        def one_bad() -> Any:  # the batch of step 2 of the second run is none, all others are good
            for n, batch_R in enumerate(batches, options["start"] + 1):
                bad = batch_R[1] | {"weight_B": np.full_like(batch_R[1]["weight_B"], np.nan)}
                yield [batch_R[0], bad, *batch_R[2:]] if n == 2 else batch_R

        return train(beside, step, state, one_bad(), **options)

    monkeypatch.setattr(loop, "train", poisoned)
    stop_behind(tmp_path, 4)
    outcome, taken = again(tmp_path, **OF_SECOND)
    assert taken == [5, 6] and "diverged" in outcome.out
    found, right = tiny_study.summaries(tmp_path), tiny_study.summaries(whole)
    assert [found[name]["diverged_at"] for name in SECOND] == [None, 2, None, None]
    for name in SECOND:
        assert (found[name]["params_sha256"] == right[name]["params_sha256"]) == (name != SECOND[1])
    rows = log.read(tmp_path / "study" / SECOND[1])
    assert [row["eval/loss"] for row in rows if "eval/loss" in row][1:] == [found[SECOND[1]]["eval/loss"]] * 2


def test_a_study_that_is_killed_goes_on_to_the_bit(whole, tmp_path):
    """A kill leaves what is in the files at that moment: a copy of them, made while the study is trained."""
    changes, left = OF_SECOND | {"train__save_every": 2}, tmp_path / "left"

    def copied(n: int) -> None:
        if n == 5:
            with contextlib.suppress(shutil.Error):  # the save of step 4 may just be renamed
                shutil.copytree(tmp_path / "study", left / "study")

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, "log", copied)
        assert tiny_study.run(tmp_path, **changes).code == 0
    names = {file.name for file in left.glob("study/checkpoints/*/*")}
    assert names & {"2", "4"} and not tiny_study.summaries(left)
    newest = max(int(name) for name in names if name.isdecimal())
    _, taken = again(left, **changes)
    assert taken == list(range(newest + 1, STEPS + 1))
    tiny_study.assert_alike(left, whole, SECOND)
