"""An experiment as a user has it, for studies in tests: classification of points by one matrix, compiled in a blink."""

import jax
import jax.numpy as jnp
import tiny
from ml_collections import ConfigDict

from experiments.engine import run


def config():
    dots = ConfigDict()
    dots.bias = True  # whether a class has one
    return {"dots": dots}


def prepare(settings, devices):
    t, bias = settings.train, settings.dots.bias
    task = tiny.linear_task(batch=t.batch_size, evaluate_batch=t.evaluate_batch, seed=settings.seed)

    def init(key):
        params = task.init(key)
        return params if bias else {"G_CD": params["G_CD"]}

    def loss_and_metrics(params, batch, key_B, over=None):
        if key_B is not None:  # dropout, so that a run that goes on has to have its keys
            stays_BD = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (tiny.D,)))(key_B)
            batch = batch | {"x_BD": batch["x_BD"] * stays_BD}
        return task.loss_and_metrics({"b_C": jnp.zeros(tiny.C)} | params, batch, None)

    return run.Work(task._replace(init=init, loss_and_metrics=loss_and_metrics), lambda *arguments: figures(*arguments))


def figures(params, folder, rows):
    return []
