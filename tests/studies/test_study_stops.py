"""Studies that are stopped, killed or get NaN: the same command resumes them, and results are equal bit for bit."""

import contextlib
import itertools
import json
import os
import shutil
import signal

import numpy as np
import pytest
import tiny_study
from tiny_study import ALL, ARMS, STEPS

from experiments.config import disk, errors
from experiments.devices import mesh as meshes
from experiments.engine import loop
from experiments.folder import checkpoint, records
from experiments.studies import programs, results

SECOND_PROGRAM, SECOND_PROGRAM_CHANGES = ALL[2:], {"study__arms": ARMS[1:]}
ALL_STEPS = list(range(1, STEPS + 1))


def watch(patch, method, notify):
    """Call `notify` with n whenever the loop calls Logs.log or Clock.pauses for step n."""
    owner = {"log": loop.Logs, "pauses": loop.Clock}[method]
    original = getattr(owner, method)

    def notify_and_call(self, n, *rest):
        notify(n)
        return original(self, n, *rest)

    patch.setattr(owner, method, notify_and_call)


def stop_after(folder, step):
    """Stop a study of the second program alone while it takes this step."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, "pauses", lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == step else None)
        assert tiny_study.run(folder, **SECOND_PROGRAM_CHANGES).code == 143
    assert [file.name for file in folder.glob("study/checkpoints/*/*")] == [str(step)]


def resume(folder, *flags, **changes):
    """Run the same command to its end. Return its outcome and the steps that it took."""
    steps_taken = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, "log", steps_taken.append)
        outcome = tiny_study.run(folder, *flags, **changes)
    assert (outcome.code, outcome.err) == (0, "")
    assert not list(folder.glob("study/checkpoints/*"))
    return outcome, steps_taken


def is_nth_call(n):
    """Return a function that is true in its n-th call, from 0."""
    calls = itertools.count()
    return lambda *_: next(calls) == n


# Consecutive stops of one study: (name, (owner, function, condition for a signal after it), number of finished runs,
# steps before the signal). Each evaluation has six batches.
STOPS = [
    ("second evaluation", (meshes, "place_batch", is_nth_call(6)), 0, [1, 2, 3]),  # after step 3
    ("first of two results", (disk, "write_json", lambda file, _: file.name == "summary.json"), 1, [4, 5, 6]),
    ("last save", (checkpoint.Checkpoints, "save", lambda _, step, *rest: step == STEPS), 2, ALL_STEPS),
]


def test_a_signal_outside_of_the_steps_stops_the_study_and_counts_the_runs_in_its_report(
    complete_study, tmp_path, signal_after
):
    report = tmp_path / "study" / "report.json"
    for moment, call, finished, expected_steps in STOPS:
        steps_taken = []
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, "log", steps_taken.append)
            signal_after(*call)
            outcome = tiny_study.run(tmp_path)
        assert outcome.code == 143 and "go on with" in outcome.err and steps_taken == expected_steps, moment
        second_program = list(tmp_path.glob("study/all/base/*/metrics.jsonl"))
        assert bool(second_program) == (moment == "last save"), moment
        assert len(tiny_study.summaries(tmp_path)) == finished, moment
        if finished:
            assert f"; {report.with_suffix('.md')} holds the {finished} of 6 runs" in outcome.err, moment
            assert json.loads(report.read_text(encoding="utf-8"))["finished_runs"] == finished
        else:
            assert "no run of the study is finished" in outcome.err and not report.exists()
        if moment == "second evaluation":  # imitates a kill after the first of four rows
            rows = records.read_metrics(complete_study / "study" / ALL[0])
            (row,) = (row for row in rows if row["step"] == 3 and "eval/loss" in row)
            with (tmp_path / "study" / ALL[0] / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    assert resume(tmp_path)[1] == []  # only the last evaluation and the results remain
    tiny_study.assert_equal_runs(tmp_path, complete_study, ALL)


def test_a_signal_during_the_last_report_stops_the_study_after_the_report(study_copy, signal_after):
    signal_after(results, "write")
    outcome = tiny_study.run(study_copy)
    assert outcome.code == 143 and "the report holds all of them; go on" in outcome.err
    assert str(study_copy / "study" / "report.html") in outcome.out


def test_a_study_that_fails_in_its_second_program_has_a_report_of_the_first(tmp_path, monkeypatch):
    original = programs.train

    def train(job, *arguments):
        if len(job.program.runs) > 2:
            raise errors.RunError("the device is gone")
        original(job, *arguments)

    monkeypatch.setattr(programs, "train", train)
    outcome = tiny_study.run(tmp_path)
    report = tmp_path / "study" / "report.md"
    message = f"error: the device is gone; {report} holds the 2 of 6 runs that are finished\n"
    assert (outcome.code, outcome.err) == (1, message) and report.is_file()


def test_a_row_that_has_diverged_stays_diverged_after_a_resume_with_another_log_interval(
    complete_study, tmp_path, monkeypatch
):
    train = loop.train

    def poison(training, step, state, batches, **options):
        def with_nan():  # in the batch of step 2 of the second run
            for n, batch_R in enumerate(batches, options["start"] + 1):
                bad = batch_R[1] | {"weight_B": np.full_like(batch_R[1]["weight_B"], np.nan)}
                yield [batch_R[0], bad, *batch_R[2:]] if n == 2 else batch_R

        return train(training, step, state, with_nan(), **options)

    monkeypatch.setattr(loop, "train", poison)
    stop_after(tmp_path, 4)
    outcome, steps_taken = resume(tmp_path, "--config.train.log_every=1", **SECOND_PROGRAM_CHANGES)
    assert steps_taken == [5, 6] and "diverged" in outcome.out  # the program does not start again
    results, expected = tiny_study.summaries(tmp_path), tiny_study.summaries(complete_study)
    assert [results[name]["diverged_at"] for name in SECOND_PROGRAM] == [None, 2, None, None]
    for name in SECOND_PROGRAM:
        assert (results[name]["params_sha256"] == expected[name]["params_sha256"]) == (name != SECOND_PROGRAM[1])
        assert "wall_seconds" not in results[name]  # unknown after an interruption
        rows = records.read_metrics(tmp_path / "study" / name)
        assert name == SECOND_PROGRAM[1] or [row["step"] for row in rows if "train/loss" in row] == [2, 4, 5, 6]
    rows = records.read_metrics(tmp_path / "study" / SECOND_PROGRAM[1])
    assert [row["eval/loss"] for row in rows if "eval/loss" in row][1:] == [results[SECOND_PROGRAM[1]]["eval/loss"]] * 2


def test_a_study_that_is_killed_resumes_bit_for_bit(complete_study, tmp_path):
    """A kill leaves the files of that moment, so the test copies the files while the study trains."""
    changes, killed_folder = SECOND_PROGRAM_CHANGES | {"train__save_every": 2}, tmp_path / "killed"

    def copy_files(n):
        if n == 5:
            with contextlib.suppress(shutil.Error):  # the save of step 4 may be renamed during the copy
                shutil.copytree(tmp_path / "study", killed_folder / "study")

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, "log", copy_files)
        assert tiny_study.run(tmp_path, **changes).code == 0
    names = {file.name for file in killed_folder.glob("study/checkpoints/*/*")}
    assert names & {"2", "4"} and not tiny_study.summaries(killed_folder)
    newest = max(int(name) for name in names if name.isdecimal())
    assert resume(killed_folder, **changes)[1] == list(range(newest + 1, STEPS + 1))
    tiny_study.assert_equal_runs(killed_folder, complete_study, SECOND_PROGRAM)
