"""A small run, how it is stopped, and its results, for the tests of resumed runs."""

import json

import dots
import pytest
import tiny

from experiments.engine import log

STEPS, SAVE = 9, 3
SETTINGS = {"train__steps": STEPS, "train__save_every": SAVE, "train__log_every": 1, "train__evaluate_every": 4}
SETTINGS |= {"train__batch_size": 8, "mesh__data": 1}


class Stopped(Exception):
    """The machine goes away."""


def linear_task(growth=()):
    """Return a task of 20 noisy examples: an epoch is two and a half batches of 8."""
    return tiny.linear_task(n=20, n_evaluation=11, batch=8, growth=growth)


def run(folder, **changes):
    """Run the task above with the settings above."""
    task = linear_task(changes.get("train__growth", ()))
    return tiny.trained(folder, task, **(SETTINGS | changes))


def break_off(folder, step, **changes):
    """Start a run that fails when it requests the batch of this step."""

    def stop():
        raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        dots.at_batch(patch, step, stop)
        run(folder, **changes)


def alike(folder, straight):
    """Return True if both runs have the same parameters and the same log."""
    one, other = ((summary(run)["params_sha256"], log.read(run)) for run in (folder, straight))
    return one == other


def summary(folder):
    return json.loads((folder / "summary.json").read_text())
