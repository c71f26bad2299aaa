"""An experiment with sharded parameters (mesh.fsdp = 2): one matrix classifies points."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.devices import mesh as meshes
from experiments.engine import batches, run as runs, train_step
from tfm import layout as layouts, loss

D, C, ALL = 6, 3, 90  # features, classes, examples


def config():
    return {}


def prepare(settings, devices):
    rng, t = np.random.default_rng(0), settings.train
    x_BD, label_B = rng.standard_normal((ALL, D)).astype(np.float32), rng.integers(0, C, ALL).astype(np.int32)

    def fetch(index_B, rng):
        return {"x_BD": x_BD[index_B], "label_B": label_B[index_B]}

    def init(key):
        return {"G_CD": jax.random.normal(key, (C, D)), "b_C": jnp.zeros(C)}

    def mean(params, batch, *, key_B=None, layout=layouts.ONE):
        params = layouts.gather_features(params, layout)
        logits_BC, label_B = batch["x_BD"] @ params["G_CD"].T + params["b_C"], batch["label_B"]
        return {"loss": loss.cross_entropy(logits_BC, label_B, jnp.ones(len(label_B)))}, {}

    task = train_step.Task(
        init=init,
        loss=mean,
        train=batches.train(fetch, n=ALL, batch=t.batch_size, seed=settings.seed),
        evaluation=batches.evaluation(fetch, n=ALL, batch=t.batch_size),
        tokens_per_example=1,
        layout=meshes.layout(devices),
    )
    return runs.Work(task, lambda *arguments: [])
