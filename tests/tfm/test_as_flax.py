"""An (init, apply) as modules of Flax: they train as optax alone does, and parameters pass both ways."""

import functools

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


def check_equal(one: dict, other: dict) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one, other)


def test_both_train_as_optax_alone():
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


def test_linen_inside_another_module():
    """Two modules next to a layer of Linen have different parameters, and a gradient for each."""

    class Whole(linen.Module):
        @linen.compact
        def __call__(self, x_TD):
            for name in ("one", "two"):
                x_TD = as_flax.Linen(init, mlp.gelu.apply, name=name)(x_TD)
            return linen.Dense(3)(x_TD)

    params = jax.jit(Whole().init)(jax.random.key(0), X_TD)["params"]
    assert params.keys() == {"one", "two", "Dense_0"} and jnp.any(params["one"]["W1_FD"] != params["two"]["W1_FD"])
    grads = jax.jit(jax.grad(lambda params: loss(Whole().apply({"params": params}, X_TD))))(params)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(jax.device_get(grads)))
