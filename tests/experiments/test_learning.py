"""Each experiment learns: on the evaluation split it is better than its baseline.

test_experiments.py and test_translation.py train text and translation with their commands. test_experiments.py compares
the loss of classes with a loss computed by hand.
"""

import jax
import numpy as np
import optax
import pytest
import tiny

RUNS = {  # {name: (experiment, changes, steps, largest share of the baseline's loss or errors)}
    "masked tokens": ("language", {"text.objective": "masked", "text.N": 16}, 60, 0.7),
    "hidden patches": ("masked_image", {}, 150, 0.97),
    "ring": ("synthetic", {"synthetic.task": "ring:4"}, 60, 0.5),
    "convolution": ("convolution", {"model.H": 5}, 60, 0.5),
}
SMALL = {"model.M": 1, "model.H": 1, "model.D": 32, "model.norm": "rms", "model.mlp": "relu", "model.bias": "none"}
SMALL |= {"model.attention": "explicit"}  # compiles quickly


@pytest.mark.parametrize("name", RUNS)
def test_an_experiment_learns(name, tmp_path):
    experiment, experiment_changes, steps, largest_share = RUNS[name]
    changes = {"mesh.data": 1, "train.steps": steps, "train.batch_size": 32}
    if experiment != "convolution":  # it has no layers
        changes |= SMALL
    if experiment == "language":
        (tmp_path / "text.txt").write_bytes(b"abcde" * 400)
        changes |= {"text.source": str(tmp_path / "text.txt")}
    task = tiny.task_of(tiny.settings(experiment, **changes | experiment_changes))
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1 if experiment == "convolution" else 0.01, 5, steps)
    optimiser = optax.adam(rate)

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            total, count = task.loss(params, batch)[0]["loss"]
            return total / count

        update, state = optimiser.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, update), state

    params = jax.device_get(jax.jit(task.init)(jax.random.key(0)))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(optimiser.init, params))
    for i in range(steps):
        params, state = step(params, state, task.train[i])
    measure = tiny.measure(task)
    parts = [jax.device_get(measure(params, batch)) for batch in task.evaluation]
    means = {name: sum(part[name][0] for part in parts) / sum(part[name][1] for part in parts) for name in parts[0]}
    if "loss" in tiny.baseline(task):
        assert 0 < means["loss"] < largest_share * tiny.baseline(task)["loss"]
    else:
        assert 1 - means["accuracy"] < largest_share * (1 - tiny.baseline(task)["accuracy"])
