"""Flax modules (NNX, Linen) of an (init, apply) pair: they train like optax alone, and exchange parameters."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises
from flax import linen, nnx

from tfm import as_flax, mlp

init = functools.partial(mlp.gelu.init, D=3, F=5, M=1, bias=True)
X_TD, TARGET_TD = jax.random.normal(jax.random.key(1), (2, 7, 3))


def loss(y_TD: jax.Array) -> jax.Array:
    return ((y_TD - TARGET_TD) ** 2).mean()


def train(apply, params: dict) -> dict:
    """Return the parameters after three steps of AdamW."""
    state = (optimiser := optax.adamw(0.1)).init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: loss(apply(params, X_TD)))(params)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    return params


def check_equal(result: dict, expected: dict) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), result, expected)


def test_nnx_and_linen_modules_train_as_optax_alone():
    first = init(jax.random.key(2))
    last = train(mlp.gelu.apply, first)
    module = as_flax.NNX(init, mlp.gelu.apply, rngs=nnx.Rngs(0))
    assert any(jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, (module.params(), first)), strict=True))
    module.load(first)
    check_equal(module.params(), first)
    optimiser = nnx.Optimizer(module, optax.adamw(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimiser):
        optimiser.update(module, nnx.grad(lambda module: loss(module(X_TD)))(module))

    for _ in range(3):
        step(module, optimiser)
    check_equal(module.params(), last)
    np.testing.assert_allclose(module(X_TD), mlp.gelu.apply(last, X_TD), rtol=1e-4, atol=1e-5)

    module = as_flax.Linen(init, mlp.gelu.apply)
    variables = module.init(jax.random.key(0), X_TD)
    assert jax.tree.map(jnp.shape, variables) == {"params": jax.tree.map(jnp.shape, first)}
    check_equal(train(lambda params, x_TD: module.apply({"params": params}, x_TD), first), last)


@pytest.mark.parametrize("change", [{"W1_FD": jnp.ones((1, 3))}, {"more": jnp.ones(2)}])
def test_nnx_draws_with_its_stream_of_keys_and_refuses_other_parameters(change):
    module = as_flax.NNX(init, mlp.gelu.apply, rngs=nnx.Rngs(params=3))
    params = init(nnx.Rngs(params=3).params())
    with raises(ValueError, next(iter(change))):
        module.load(params | change)
    check_equal(module.params(), params)


def test_linen_modules_inside_another_module_have_different_parameters():
    """Two modules next to a layer of Linen have different parameters, and a gradient for each."""

    class TwoMlps(linen.Module):
        @linen.compact
        def __call__(self, x_TD):
            for name in ("one", "two"):
                x_TD = as_flax.Linen(init, mlp.gelu.apply, name=name)(x_TD)
            return linen.Dense(3)(x_TD)

    params = jax.jit(TwoMlps().init)(jax.random.key(0), X_TD)["params"]
    assert params.keys() == {"one", "two", "Dense_0"} and jnp.any(params["one"]["W1_FD"] != params["two"]["W1_FD"])
    grads = jax.jit(jax.grad(lambda params: loss(TwoMlps().apply({"params": params}, X_TD))))(params)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(jax.device_get(grads)))


# The models of the guide


@pytest.fixture
def guide():
    """Return a function: name of a file of the guide -> its names after it has run."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "guides" / "flax.md").read_text(encoding="utf-8")

    def follow(file: str) -> dict:
        (code,) = re.findall(rf"^```python\n(# {file}\n.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
        exec(compile(code, file, "exec"), names := {})
        return names

    return follow


def test_dropout_of_the_guide_uses_the_keys_of_flax(guide, capsys):
    names = guide("my_dropout.py")
    model, w_BN, apply = names["model"], names["w_BN"], names["apply"]
    key_B = jax.random.split(nnx.Rngs(params=0, dropout=1).dropout(), len(w_BN))
    np.testing.assert_allclose(names["trained_BNW"], apply(model.params(), w_BN, key_B=key_B), atol=1e-6)
    np.testing.assert_allclose(names["evaluated_BNW"], apply(model.params(), w_BN), atol=1e-6)
    difference = float(abs(names["trained_BNW"] - names["evaluated_BNW"]).max())
    assert difference > 0.1 and f"{difference:.2f}" in capsys.readouterr().out
    classify = functools.partial(names["classifier"].apply, names["variables"], w_BN)
    other_BC = classify(train=True, rngs={"dropout": jax.random.key(2)})
    assert names["logits_BC"].shape == (8, 3) and jnp.any(other_BC != names["logits_BC"])
    np.testing.assert_array_equal(classify(train=False), classify(train=False, rngs={"dropout": jax.random.key(2)}))


def test_the_cache_of_the_guide_gives_the_logits_of_all_tokens(guide):
    names = guide("my_sampler.py")
    model, w_BN = names["model"], names["w_BN"]
    assert w_BN.shape == (2, 11) and names["length_B"].tolist() == [11, 10]
    n_B, rows = jnp.array([3, 2]), jnp.arange(2)

    @jax.jit
    def predict(w_BN):
        logits_BW, cache = model.start(w_BN[:, :3], n_B)
        return model(w_BN), logits_BW, model.step(cache, w_BN[rows, n_B], n_B)[0]

    every_BNW, started_BW, next_BW = predict(w_BN)
    np.testing.assert_allclose(started_BW, every_BNW[rows, n_B - 1], atol=1e-5)
    np.testing.assert_allclose(next_BW, every_BNW[rows, n_B], atol=1e-5)
