"""Functions that start, stop and compare small runs, for tests of resumed runs."""

import json

import dots
import pytest
import tiny

from experiments.folder import records

STEPS, SAVE = 9, 3
SETTINGS = {"train__steps": STEPS, "train__save_every": SAVE, "train__log_every": 1, "train__evaluate_every": 4}
SETTINGS |= {"train__batch_size": 8, "mesh__data": 1}


class Stopped(Exception):
    """Raised to end a run at once, as if the machine stopped."""


def linear_task(growth=()):
    """Return a task of 20 examples with noise. An epoch is two and a half batches of 8."""
    return tiny.linear_task(n=20, n_evaluation=11, batch=8, growth=growth)


def run(folder, **changes):
    """Run the task above with the settings above."""
    task = linear_task(changes.get("train__growth", ()))
    return tiny.train(folder, task, **(SETTINGS | changes))


def break_off(folder, step, **changes):
    """Start a run that fails when it requests the batch of this step."""

    def raise_stopped():
        raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        dots.at_batch(patch, step, raise_stopped)
        run(folder, **changes)


def have_equal_results(folder, reference):
    """Return True if both runs have the same parameters and the same log."""
    first, second = ((summary(run)["params_sha256"], records.read_metrics(run)) for run in (folder, reference))
    return first == second


def summary(folder):
    return json.loads((folder / "summary.json").read_text())
