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

import tfm
from tfm import as_flax, mlp

init = jax.jit(functools.partial(mlp.gelu.init, D=3, F=5, M=1, bias=True))
X_TD, TARGET_TD = np.random.default_rng(1).standard_normal((2, 7, 3), np.float32)


def loss(y_TD: jax.Array) -> jax.Array:
    return ((y_TD - TARGET_TD) ** 2).mean()


@functools.partial(jax.jit, static_argnums=0)
def train(apply, params: dict) -> dict:
    """Return the parameters after three steps of AdamW."""
    state = (optimiser := optax.adamw(0.1)).init(params)
    for _ in range(3):
        grads = jax.grad(lambda params: loss(apply(params, X_TD)))(params)
        updates, state = optimiser.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@nnx.jit
def train_nnx(module) -> jax.Array:
    """Change the parameters as `train` does. Return the output with the new parameters."""
    optimiser = nnx.Optimizer(module, optax.adamw(0.1), wrt=nnx.Param)
    for _ in range(3):
        optimiser.update(module, nnx.grad(lambda module: loss(module(X_TD)))(module))
    return module(X_TD)


def check_equal(result: dict, expected: dict) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *jax.device_get((result, expected))
    )


def test_nnx_and_linen_modules_train_as_optax_alone():
    first, other = jax.device_get((init(jax.random.key(2)), init(nnx.Rngs(params=3).params())))
    last = train(mlp.gelu.apply, first)
    module = as_flax.NNX(init, mlp.gelu.apply, rngs=nnx.Rngs(params=3))
    for change in ({"W1_FD": np.ones((1, 3))}, {"more": np.ones(2)}):
        with raises(ValueError, next(iter(change))):
            module.load(first | change)
        check_equal(module.params(), other)
    assert (other["W1_FD"] != first["W1_FD"]).any()
    module.load(first)
    check_equal(module.params(), first)
    y_TD = train_nnx(module)
    check_equal(module.params(), last)
    np.testing.assert_allclose(y_TD, jax.jit(mlp.gelu.apply)(last, X_TD), rtol=1e-4, atol=1e-5)

    module = as_flax.Linen(init, mlp.gelu.apply)
    variables = jax.eval_shape(module.init, jax.random.key(0), X_TD)
    assert jax.tree.map(jnp.shape, variables) == {"params": jax.tree.map(jnp.shape, first)}
    check_equal(train(lambda params, x_TD: module.apply({"params": params}, x_TD), first), last)


def test_linen_modules_inside_another_module_have_different_parameters():
    """Two modules next to a layer of Linen have different parameters, and a gradient for each."""

    class TwoMlps(linen.Module):
        @linen.compact
        def __call__(self, x_TD):
            for name in ("one", "two"):
                x_TD = as_flax.Linen(init, mlp.gelu.apply, name=name)(x_TD)
            return linen.Dense(3)(x_TD)

    @jax.jit
    def compute(key):
        params = TwoMlps().init(key, X_TD)["params"]
        return params, jax.grad(lambda params: loss(TwoMlps().apply({"params": params}, X_TD)))(params)

    params, grads = jax.device_get(compute(jax.random.key(0)))
    assert params.keys() == {"one", "two", "Dense_0"} and np.any(params["one"]["W1_FD"] != params["two"]["W1_FD"])
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads))


# The models of the guide


@pytest.fixture
def guide(monkeypatch):
    """Return a function: name of a file of the guide -> its names after it has run with one layer, compiled."""
    make_model, make_module = tfm.language_model, as_flax.NNX.__init__
    monkeypatch.setattr(tfm, "language_model", lambda **sizes: tuple(map(jax.jit, make_model(**sizes))))
    monkeypatch.setattr(
        as_flax.NNX, "__init__", lambda module, init, *rest, **rngs: make_module(module, jax.jit(init), *rest, **rngs)
    )
    page = (pathlib.Path(__file__).parents[2] / "docs" / "guides" / "flax.md").read_text(encoding="utf-8")

    def follow(file: str) -> dict:
        (code,) = re.findall(rf"^```python\n(# {file}\n.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
        assert "M=2" in code
        exec(compile(code.replace("M=2", "M=1"), file, "exec"), names := {})
        return names

    return follow


def test_dropout_of_the_guide_uses_the_keys_of_flax(guide, capsys):
    names = guide("my_dropout.py")
    model, w_BN, apply = names["model"], names["w_BN"], names["apply"]
    key_B = jax.random.split(nnx.Rngs(params=0, dropout=1).dropout(), len(w_BN))
    trained_BNW, evaluated_BNW = map(np.asarray, (names["trained_BNW"], names["evaluated_BNW"]))
    np.testing.assert_allclose(trained_BNW, apply(model.params(), w_BN, key_B=key_B), atol=1e-6)
    np.testing.assert_allclose(evaluated_BNW, apply(model.params(), w_BN), atol=1e-6)
    difference = abs(trained_BNW - evaluated_BNW).max()
    assert difference > 0.1 and f"{difference:.2f}" in capsys.readouterr().out
    classify = functools.partial(names["classifier"].apply, names["variables"], w_BN)
    other_BC, logits_BC = map(np.asarray, (classify(train=True, rngs={"dropout": key_B[0]}), names["logits_BC"]))
    assert logits_BC.shape == (8, 3) and (other_BC != logits_BC).any()
    np.testing.assert_array_equal(classify(train=False), classify(train=False, rngs={"dropout": key_B[0]}))


def test_the_cache_of_the_guide_gives_the_logits_of_all_tokens(guide):
    names = guide("my_sampler.py")
    model, w_BN = names["model"], np.asarray(names["w_BN"])
    assert w_BN.shape == (2, 11) and names["length_B"].tolist() == [11, 10]
    n_B, rows = np.array([3, 2]), np.arange(2)

    @jax.jit
    def predict(w_BN):
        logits_BW, cache = model.start(w_BN[:, :3], n_B)
        return model(w_BN), logits_BW, model.step(cache, w_BN[rows, n_B], n_B)[0]

    every_BNW, started_BW, next_BW = jax.device_get(predict(w_BN))
    np.testing.assert_allclose(started_BW, every_BNW[rows, n_B - 1], atol=1e-5)
    np.testing.assert_allclose(next_BW, every_BNW[rows, n_B], atol=1e-5)
