"""A user's experiment that compiles quickly, for tests of runs and studies: one matrix classifies points."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import pytest
import tiny
from ml_collections import ConfigDict

from experiments.engine import batches, run as runs, run_plan
from experiments.folder import records

# Every step is logged. The 29 held-out points are 6 batches.
CHANGES = {"train.batch_size": 16, "train.steps": 6, "train.log_every": 1, "mesh.data": 1}
CHANGES |= {"train.evaluate_every": 4, "optim.warmup_steps": 1}


def config():
    dots = ConfigDict()
    dots.bias = True  # whether logits have a bias b_C
    return {"dots": dots}


def prepare(settings, devices):
    t, bias = settings.train, settings.dots.bias
    linear = tiny.linear_task(batch=t.batch_size, evaluate_batch=5, seed=settings.seed)

    def init(key):
        params = linear.init(key)
        return params if bias else {"G_CD": params["G_CD"]}

    def apply(params, batch):
        return batch["x_BD"] @ params["G_CD"].T + params["b_C"]

    def loss(params, batch, *, key_B=None, layout=None):
        if key_B is not None:  # dropout: a resumed run needs the same keys
            keep_BD = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (tiny.D,)))(key_B)
            batch = batch | {"x_BD": batch["x_BD"] * keep_BD}
        return linear.loss({"b_C": jnp.zeros(tiny.C)} | params, batch)

    def probe(params):  # imitates a model with two layers
        return {f"symmetry/{m}": m * params["G_CD"].mean() for m in (1, 2)}

    task = linear._replace(init=init, loss=loss, probe=probe)
    fields = {"files": {"dots.txt": b"1"}, "lines": ["dots: 61 points"]}
    return runs.Work(task, lambda *arguments: figures(*arguments), apply, **fields)


def figures(work, params, folder, rows):
    return []


# Functions for tests that stop a run


def at_batch(monkeypatch, step, do):
    """Call `do` while the batch of this step, counted from 1, is prepared."""
    iterate_all = batches.iterate

    def iterate(dataset, *, start):
        for n, batch in enumerate(iterate_all(dataset, start=start), start + 1):
            if n == step:
                do()
            yield batch

    monkeypatch.setattr(batches, "iterate", iterate)


def signal_with_batch(monkeypatch, step, *numbers):
    """Send these signals while the batch of this step, counted from 1, is prepared."""
    at_batch(monkeypatch, step, lambda: [os.kill(os.getpid(), number) for number in numbers])


def change_plan(monkeypatch, **changes):
    """Change these fields of the plan of every run."""
    make_plan = run_plan.make_plan
    monkeypatch.setattr(run_plan, "make_plan", lambda *arguments: dataclasses.replace(make_plan(*arguments), **changes))


def launch_run(folder, *flags):
    """Run the experiment in folder / "run" with these flags, and return its Outcome."""
    file = tiny.config_file(folder, "dots", **CHANGES)
    return tiny.run("--config", file, "--workdir", str(folder / "run"), *flags)


def list_steps(folder):
    """Return the sorted steps of the saved checkpoints."""
    return sorted(int(file.name) for file in (folder / "run" / "checkpoints").iterdir())


def read_result(folder):
    """Return the sha256 of the last parameters and the rows of the log, which resuming must not change."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return summary["params_sha256"], records.read_metrics(folder / "run")


def finish_run(folder):
    """Repeat the command, assert that it finishes the run, and return the result."""
    assert launch_run(folder).code == 0
    return read_result(folder)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with tiny.without_figures():
        yield


@pytest.fixture(scope="session")
def unbroken_folder(make_once):
    """Return the folder of an uninterrupted run, "run" in it. Tests change only copies of it."""
    return make_once("unbroken", finish_run)


@pytest.fixture(scope="session")
def unbroken(unbroken_folder):
    """Return (sha256 of the last parameters, rows of the log) of the uninterrupted run."""
    return read_result(unbroken_folder)
