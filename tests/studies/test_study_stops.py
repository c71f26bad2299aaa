"""Studies that are stopped, killed or damaged at bad moments: the same command goes on, and nothing is another."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_study
from tiny_study import ALL, ARMS, STEPS

from experiments import ablation
from experiments.engine import checkpoint, disk, log, loop, mesh
from experiments.engine import step as steps
from experiments.studies import preparing, training

ROOT = pathlib.Path(__file__).parents[2]
OWN = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}  # where dots.py is
SECOND, OF_SECOND = ALL[2:], {"study__arms": ARMS[1:]}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a study of the second program alone, stopped behind step 4, which is saved. To be copied."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        stop_behind(patch, 4)
        outcome = tiny_study.run(folder, **OF_SECOND)
    assert outcome.code == 143 and [file.name for file in folder.glob("study/checkpoints/*/*")] == ["4"]
    return folder


def signalled(patch: pytest.MonkeyPatch, owner: Any, name: str, due: Callable[..., bool]) -> None:
    """SIGTERM comes at the end of such a call, the first time that it is due."""
    usual, sent = getattr(owner, name), []

    def and_signal(*arguments: Any, **options: Any) -> Any:
        found = usual(*arguments, **options)
        if not sent and due(*arguments):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    patch.setattr(owner, name, and_signal)


def watch(patch: pytest.MonkeyPatch, what: str, told: Callable[[int], None]) -> None:
    """The function is told n whenever the loop calls this of what is done beside step n: `log` or `pauses`."""
    usual = getattr(loop.Training, what)

    def and_tell(self: loop.Training, n: int, *more: Any) -> Any:
        told(n)
        return usual(self, n, *more)

    patch.setattr(loop.Training, what, and_tell)


def stop_behind(patch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM comes while this step is taken."""
    watch(patch, "pauses", lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == step else None)


def again(folder: pathlib.Path, *more: str, **changes: Any) -> tuple[tiny.Outcome, list[int]]:
    """The same command, which is to come to its end, and the steps that it took."""
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, "log", taken.append)
        outcome = tiny_study.run(folder, *more, **changes)
    assert (outcome.code, outcome.err) == (0, "")
    assert not (folder / "study" / "checkpoints").exists() or not list((folder / "study" / "checkpoints").iterdir())
    return outcome, taken


def losses(run: pathlib.Path) -> list[float]:
    """Of all steps that were logged."""
    found = [row["train/loss"] for row in log.read(run) if "train/loss" in row]
    assert len(found) == 3
    return found


def copy(stopped: pathlib.Path, folder: pathlib.Path) -> None:
    """A study that was stopped, for this test to do with as it likes."""
    shutil.copytree(stopped / "study", folder / "study")


Moment = tuple[str, tuple[Any, str, Callable[..., bool]], int, list[int]]
ALL_STEPS = list(range(1, STEPS + 1))


def moments() -> list[list[Moment]]:
    """Stops of one study after the other, each: its name, (owner, name of a function, when a signal comes behind it),
    how many runs are finished then, the steps that were taken before it."""
    calls = [itertools.count() for _ in range(3)]
    evaluation = mesh, "place_batch"  # each has one batch
    after_each_other = [
        ("first evaluation", (*evaluation, lambda *_: True), 0, []),
        ("second evaluation", (*evaluation, lambda *_: next(calls[0]) == 1), 0, [1, 2, 3]),  # behind step 3
        ("last evaluation", (steps, "evaluate", lambda *_: next(calls[1]) == 1), 0, [4, 5, 6]),  # of the steps 3, 6
        ("first of two results", (disk, "write_json", lambda file, _: file.name == "summary.json"), 1, []),
        ("between two programs", (preparing, "prepare", lambda *_: next(calls[2]) == 1), 2, []),
        ("compilation of the next", (training, "_compiled", lambda *_: True), 2, []),
    ]
    last_save = checkpoint.Checkpoints, "save", lambda _, step, *rest: step == STEPS
    return [after_each_other, [("last save", last_save, 0, ALL_STEPS)]]


@pytest.mark.parametrize("stops", moments(), ids=["each after the other", "last save"])
def test_a_signal_outside_of_the_steps_stops_the_study_and_says_what_its_report_holds(whole, tmp_path, stops):
    for moment, call, finished, before in stops:
        taken: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, "log", taken.append)
            signalled(patch, *call)
            outcome = tiny_study.run(tmp_path)
        assert outcome.code == 143 and "go on with" in outcome.err, moment
        assert taken == before, moment
        assert not list(tmp_path.glob("study/all/base/*/metrics.jsonl"))  # the next program is not begun
        assert len(tiny_study.summaries(tmp_path)) == finished, moment
        report = tmp_path / "study" / "report.json"
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
    assert taken == ALL_STEPS  # of the next program
    tiny_study.assert_alike(tmp_path, whole, ALL)


def test_a_signal_while_the_last_report_is_drawn_is_told_behind_it(whole, tmp_path):
    copy(whole, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, ablation.reports, "write", lambda *_: True)
        outcome = tiny_study.run(tmp_path)
    assert outcome.code == 143 and "stopped behind the last run: the report holds all of them; go on" in outcome.err
    assert str(tmp_path / "study" / "report.html") in outcome.out


def test_a_signal_before_the_study_trains_leaves_its_report_as_it_was(whole, tmp_path):
    copy(whole, tmp_path)
    report = tmp_path / "study" / "report.json"
    before = report.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, preparing, "check", lambda *_, **__: True)
        more = {
            "study__arms": [
                *ARMS,
                ["slow", {"optim.learning_rate": 1e-4}],
                ["other", {"dots.bias": False, "optim.beta1": 0.8}],
            ]
        }
        outcome = tiny_study.run(tmp_path, **more)
    assert outcome.code == 143 and outcome.err.startswith(f"{ablation.TOO_EARLY}; go on with: ")
    assert report.read_bytes() == before


def test_a_result_that_is_missing_is_made_again_alone(whole, tmp_path):
    copy(whole, tmp_path)
    lost, *kept = SECOND
    (tmp_path / "study" / lost / "summary.json").unlink()
    before = {name: os.stat(tmp_path / "study" / name / "summary.json").st_mtime_ns for name in kept}
    outcome, taken = again(tmp_path)
    assert taken == list(range(1, STEPS + 1)) and "5 of them finished before" in outcome.out
    tiny_study.assert_alike(tmp_path, whole, kept)
    assert all(os.stat(tmp_path / "study" / n / "summary.json").st_mtime_ns == t for n, t in before.items())
    found, right = (tiny_study.summaries(folder)[lost] for folder in (tmp_path, whole))
    assert found["together"] == 1 and right["together"] == 4  # another program, where JAX may round otherwise
    assert found["eval/loss"] == pytest.approx(right["eval/loss"], rel=1e-6)
    ours, wanted = (losses(folder / "study" / lost) for folder in (tmp_path, whole))
    assert ours == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("change", ["train.log_every=1", "resume=latest_valid"])
def test_what_may_change_does_not_begin_a_program_anew(whole, stopped, tmp_path, change):
    copy(stopped, tmp_path)
    _, taken = again(tmp_path, f"--config.{change}", **OF_SECOND)
    assert taken == [5, 6]
    found, right = tiny_study.summaries(tmp_path), tiny_study.summaries(whole)
    for name in SECOND:
        assert found[name]["params_sha256"] == right[name]["params_sha256"]
        steps = [row["step"] for row in log.read(tmp_path / "study" / name) if "train/loss" in row]
        assert steps == ([2, 4, 5, 6] if "log_every" in change else [2, 4, 6])


def test_a_damaged_checkpoint_is_said_and_its_program_begun_anew(whole, stopped, tmp_path):
    copy(stopped, tmp_path)
    (saved,) = tmp_path.glob("study/checkpoints/*/4/state")
    file = max((file for file in saved.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    outcome, taken = again(tmp_path, **OF_SECOND)
    assert "damaged" in outcome.out and "anew" in outcome.out and file.name in outcome.out
    assert taken == list(range(1, STEPS + 1))
    tiny_study.assert_alike(tmp_path, whole, SECOND)


def test_a_row_that_has_diverged_stays_so_in_a_study_that_goes_on(whole, tmp_path):
    train = loop.train

    def poisoned(beside: Any, step: Callable, state: steps.State, batches: Any, **options: Any) -> steps.State:
        def one_bad() -> Any:  # the batch of step 2 of the second run is none, all others are good
            for n, batch_R in enumerate(batches, options["start"] + 1):
                bad = batch_R[1] | {"weight_B": np.full_like(batch_R[1]["weight_B"], np.nan)}
                yield [batch_R[0], bad, *batch_R[2:]] if n == 2 else batch_R

        return train(beside, step, state, one_bad(), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", poisoned)
        outcome, _ = again(tmp_path / "whole", **OF_SECOND)
        assert "diverged" in outcome.out
        with pytest.MonkeyPatch.context() as stop:
            stop_behind(stop, 4)
            assert tiny_study.run(tmp_path / "parts", **OF_SECOND).code == 143
        _, taken = again(tmp_path / "parts", **OF_SECOND)
    assert taken == [5, 6]
    tiny_study.assert_alike(tmp_path / "parts", tmp_path / "whole", SECOND)
    found, right = tiny_study.summaries(tmp_path / "parts"), tiny_study.summaries(whole)
    assert [found[name]["diverged_at"] for name in SECOND] == [None, 2, None, None]
    for name in SECOND:
        assert (found[name]["params_sha256"] == right[name]["params_sha256"]) == (name != SECOND[1])


KILLED = """
import os, signal, sys
import launch
from experiments.engine import loop
log = loop.Training.log
def killed(self, n, *more):
    alive = log(self, n, *more)
    if n == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return alive
loop.Training.log = killed
sys.exit(launch.main(sys.argv))
"""


def test_a_study_that_is_killed_goes_on_to_the_bit(whole, tmp_path):
    changes = OF_SECOND | {"train__save_every": 2}
    command = [sys.executable, "-c", KILLED, *tiny_study.command(tmp_path, **changes)]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | OWN, capture_output=True, text=True, timeout=300)
    assert found.returncode == -signal.SIGKILL, found.stderr
    names = {file.name for file in tmp_path.glob("study/checkpoints/*/*")}
    assert names & {"2", "4"} and not tiny_study.summaries(tmp_path)  # of step 4 it may be half
    newest = max(int(name) for name in names if name.isdecimal())
    _, taken = again(tmp_path, **changes)
    assert taken == list(range(newest + 1, STEPS + 1))
    tiny_study.assert_alike(tmp_path, whole, SECOND)
