"""An experiment as a user has it, for studies in tests: classification of points by one matrix, compiled in a blink."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import pytest
import tiny
from ml_collections import ConfigDict

from experiments.engine import batches, log, run, run_plan

# A run of it, each of whose steps is logged. The 29 points that are held out are 6 batches.
CHANGES = {"train.batch_size": 16, "train.steps": 6, "train.log_every": 1, "mesh.data": 1}
CHANGES |= {"train.evaluate_every": 4, "optim.warmup_steps": 1}


def config():
    dots = ConfigDict()
    dots.bias = True  # whether a class has one
    return {"dots": dots}


def prepare(settings, devices):
    t, bias = settings.train, settings.dots.bias
    task = tiny.linear_task(batch=t.batch_size, evaluate_batch=5, seed=settings.seed)

    def init(key):
        params = task.init(key)
        return params if bias else {"G_CD": params["G_CD"]}

    def apply(params, batch):
        return batch["x_BD"] @ params["G_CD"].T + params["b_C"]

    def loss(params, batch, *, key_B=None, layout=None):
        if key_B is not None:  # dropout, so that a run that goes on has to have its keys
            stays_BD = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (tiny.D,)))(key_B)
            batch = batch | {"x_BD": batch["x_BD"] * stays_BD}
        return task.loss({"b_C": jnp.zeros(tiny.C)} | params, batch)

    def probe(params):  # as if there were two layers of scores
        return {f"symmetry/{m}": m * params["G_CD"].mean() for m in (1, 2)}

    def maps(params, batch):  # and two heads, of five tokens
        A_BNN = jax.nn.softmax(batch["x_BD"][:, :, None] * batch["x_BD"][:, None, :])
        return jnp.broadcast_to(A_BNN[:, None], (2, len(A_BNN), 2, tiny.D, tiny.D))

    whole = task._replace(init=init, loss=loss, probe=probe, maps=maps)
    return run.Work(
        whole, lambda *arguments: figures(*arguments), apply, files={"dots.txt": b"1"}, lines=["dots: 61 points"]
    )


def figures(params, folder, rows):
    return []


# What the tests that stop a run share


def at_batch(monkeypatch, step, do):
    """This is done while the batch of this step, counted from 1, is made."""
    whole = batches.iterate

    def iterate(dataset, *, start):
        for n, batch in enumerate(whole(dataset, start=start), start + 1):
            if n == step:
                do()
            yield batch

    monkeypatch.setattr(batches, "iterate", iterate)


def signal_with_batch(monkeypatch, step, *numbers):
    """These signals come while the batch of this step, counted from 1, is made."""
    at_batch(monkeypatch, step, lambda: [os.kill(os.getpid(), number) for number in numbers])


def planned(monkeypatch, **changes):
    """The plan of a run has these."""
    make_plan = run_plan.make_plan
    monkeypatch.setattr(run_plan, "make_plan", lambda *arguments: dataclasses.replace(make_plan(*arguments), **changes))


def launched(folder, *more):
    """What a person sees of the run in folder / 'run'."""
    file = tiny.config_file(folder, "dots", **CHANGES)
    return tiny.run("--config", file, "--workdir", str(folder / "run"), *more)


def saved(folder):
    return sorted(int(file.name) for file in (folder / "run" / "checkpoints").iterdir())


def result(folder):
    """What is alike where a run went on: the sha256 of the last parameters, the rows of the log."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return summary["params_sha256"], log.read(folder / "run")


def resumed(folder):
    """The result of the same command, after which nothing is left to do."""
    assert launched(folder).code == 0
    return result(folder)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with tiny.without_figures():
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(sha256 of the last parameters, rows of the log) of a run that nothing disturbed"""
    return resumed(tmp_path_factory.mktemp("unbroken"))
