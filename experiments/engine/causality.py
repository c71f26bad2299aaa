"""Check numerically that a causal model with code of the user's does not read the tokens that it must predict."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config import errors, settings as configs
from experiments.devices import compilation, mesh as meshes
from experiments.engine import freeze, train_step
from tfm import shapes

SEQUENCES = 4  # each tests another token
NOISE = 0.1  # standard deviation added to all parameters, so that those that begin at 0 have an effect
ROUNDING = 1e-5  # relative change of a loss that may be a rounding error, as in a convolution by FFT


def check(settings: configs.Settings, task: train_step.Task) -> None:
    """Raise UserError if the loss at a token depends on later tokens or is not finite, in a model with the user's code.

    Other models (`list_code`), and tasks whose `causal` is (), are not checked. In each of a few sequences only one
    token has weight, and all tokens after it are replaced. The loss must stay equal, in training (with one random key)
    and in evaluation. Also raise UserError if a batch lacks weight_BN or the tokens that `causal` names.
    """
    users = list(list_code(settings))
    if not (task.causal and users):
        return
    label, (name, shift) = " and ".join(users), task.causal
    batch = {key: np.take(x, np.arange(SEQUENCES), 0, mode="wrap") for key, x in task.train[0].items()}
    if missing := {name, "weight_BN"} - batch.keys():
        lack = f"the test of causality needs {min(missing)} in a batch. Give it, or set Task.causal = (): no test"
        raise errors.UserError(f"{label}: {lack}")
    batch, changed = choose_tokens(batch, name, shift)
    key, options = jax.random.key(0), compilation.run_once_options(meshes.make(data=1))
    draw = jax.jit(functools.partial(draw_parameters, task), compiler_options=options)
    measure = jax.jit(functools.partial(measure_alone, task), compiler_options=options)
    for noise in (NOISE, 0.0):  # noise may make a loss infinite that is finite in training
        params = draw(key, noise)
        with train_step.device_errors():
            before, after = (np.asarray(measure(params, x, key), np.float64) for x in (batch, changed))
        if np.isfinite([before, after]).all():
            break
    else:
        raise errors.UserError(f"{label}: the loss of the initial parameters is not a finite number. Correct the code")
    difference = np.abs(after - before)
    if (difference > ROUNDING * np.maximum(np.abs(before), 1)).any():
        mode = "training" if difference[0].max() >= difference[1].max() else "evaluation"
        raise errors.UserError(
            f"{label}: the model is not causal. In {mode}, the loss at a token changes by {difference.max():.2g} if "
            "only later tokens change, so the model can read what it must predict. Correct the code"
        )


def list_code(settings: configs.Settings) -> Iterator[str]:
    """Yield "setting = value" for each part of the model, its loss or its experiment that is the user's code."""
    for key, text in configs.find_code("", settings.to_dict()):
        if key.startswith(("experiment", "model.", "train.loss")):
            yield f"{key} = {text}"


def choose_tokens(batch: dict, name: str, shift: int) -> tuple[dict, dict]:
    """Return the batch with weight at one token of each sequence, and the same batch with other later tokens.

    name, shift: Task.causal. The loss at token n may depend on batch[name] up to token n - shift; only later tokens are
    replaced. The tokens with weight are spread over the sequences, the first one at the beginning.
    """
    token_BN, weight_BN = batch[name], np.zeros_like(batch["weight_BN"])
    other_BN, rng = token_BN.copy(), np.random.default_rng(0)
    for b in range(SEQUENCES):
        n_P = np.flatnonzero(batch["weight_BN"][b])
        n_P = n_P[n_P - shift + 1 < token_BN.shape[1]]  # a token follows
        if n_P.size:
            n = n_P[n_P.size * b // SEQUENCES]
            later = other_BN[b, max(n - shift + 1, 0) :]
            weight_BN[b, n], later[:] = batch["weight_BN"][b, n], rng.choice(np.unique(token_BN), later.shape)
    return batch | {"weight_BN": weight_BN}, batch | {"weight_BN": weight_BN, name: other_BN}


def measure_alone(task: train_step.Task, params: Any, batch: dict, key: jax.Array) -> jax.Array:
    """Return the summed loss of each sequence, in training (random keys) and in evaluation: (2, SEQUENCES).

    For each, the model gets the whole batch, but the other sequences have weight 0.
    """
    keys = jax.random.split(key, SEQUENCES), None

    def measure(alone_B1: jax.Array) -> jax.Array:
        one = batch | {"weight_BN": batch["weight_BN"] * alone_B1}
        return jnp.stack([task.loss(params, one, key_B=key_B)[0][train_step.LOSS][0] for key_B in keys])

    return jax.vmap(measure, out_axes=1)(jnp.eye(SEQUENCES)[..., None])


def draw_parameters(task: train_step.Task, key: jax.Array, noise: float) -> Any:
    """Return initial parameters plus normal noise (noise: its std) in each trained one, also in those of zeros."""
    params = task.init(key)
    fixed, leaves = freeze.find_frozen(params, task.frozen), shapes.flat(params)
    for i, (path, leaf) in enumerate(leaves.items()):
        if path not in fixed and jnp.issubdtype(leaf.dtype, jnp.floating):
            leaves[path] = leaf + noise * jax.random.normal(jax.random.fold_in(key, i), leaf.shape).astype(leaf.dtype)
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())
