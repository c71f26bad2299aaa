"""Each experiment learns: on the held-out part it is better than its baseline.

Text learns in test_experiments.py and translation in test_translation.py, both from their commands on. The loss of
classes is compared with one by hand in test_experiments.py.
"""

import jax
import numpy as np
import optax
import pytest
import tiny

RUNS = {  # experiment, changes, steps, the largest share of the baseline's loss or errors
    "hidden words": ("language", {"text.objective": "masked", "text.N": 16}, 60, 0.7),
    "hidden patches": ("masked_image", {}, 150, 0.97),
    "ring": ("synthetic", {"synthetic.task": "ring:4"}, 60, 0.5),
    "convolution": ("convolution", {"model.H": 5}, 60, 0.5),
}
FEW = {
    "model.norm": "rms",
    "model.mlp": "relu",
    "model.bias": "none",
    "model.attention": "explicit",
}  # quick to compile


@pytest.mark.parametrize("name", RUNS)
def test_an_experiment_learns(name, tmp_path):
    experiment, own, steps, left = RUNS[name]
    changes = {"mesh.data": 1, "train.steps": steps, "train.batch_size": 32}
    if experiment != "convolution":  # which has no layers
        changes |= {"model.M": 1, "model.H": 1, "model.D": 32} | FEW
    if experiment == "language":
        (tmp_path / "text.txt").write_bytes(b"abcde" * 400)
        changes |= {"text.source": str(tmp_path / "text.txt")}
    task = tiny.task_of(tiny.settings(experiment, **changes | own))
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1 if experiment == "convolution" else 0.01, 5, steps)
    optimiser = optax.adam(rate)

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            metrics, _ = task.loss(params, batch)
            return metrics["loss"][0] / metrics["loss"][1], metrics

        gradient, metrics = jax.grad(loss, has_aux=True)(params)
        update, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, update), state, metrics

    params = jax.device_get(jax.jit(task.init)(jax.random.key(0)))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(optimiser.init, params))
    for i in range(steps):
        params, state, _ = step(params, state, task.train[i])
    parts = [jax.device_get(step(params, state, task.evaluation[i])[2]) for i in range(len(task.evaluation))]
    means = {name: sum(part[name][0] for part in parts) / sum(part[name][1] for part in parts) for name in parts[0]}
    if "loss" in task.baseline:
        assert 0 < means["loss"] < left * task.baseline["loss"]
    else:
        assert 1 - means["accuracy"] < left * (1 - task.baseline["accuracy"])
