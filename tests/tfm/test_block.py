"""Blocks: biases, residual connections, statistics and dropout. test_transformer.py compares with the reference."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import B, D, F, H, K, N
from errors import raises
from jax.sharding import PartitionSpec as P

from experiments.devices import mesh as meshes
from tfm import block as blocks, layout as layouts, norm, shapes
from tfm.attention import heads as attentions, mask as masks

SIZES = dict(D=D, H=H, K=K, F=F, M=1, N=N, bias=True)


@pytest.mark.parametrize("bias", blocks.BIASES)
def test_the_setting_bias_selects_the_layers_with_biases(bias):
    """Cross-attention has the same biases. True and False mean "all" and "none"."""
    QKV, OUTPUT, MLP = {"bq_HK", "bk_HK", "bv_HK"}, {"bo_D"}, {"b1_F", "b2_D"}
    expected = {"all": QKV | OUTPUT | MLP, "none": set(), "attention": QKV | OUTPUT, "mlp": MLP, "qkv": QKV}[bias]

    def names(bias):
        call = {**SIZES, "bias": bias, "spec": cases.spec(), "cross": True}
        return [*shapes.flat(jax.eval_shape(functools.partial(blocks.init, **call), jax.random.key(0)))]

    biases = [path.rpartition("/")[2] for path in names(bias) if path.rpartition("/")[2].startswith("b")]
    assert set(biases) == expected and len(biases) == 2 * len(expected - MLP) + len(expected & MLP)
    assert bias not in ("all", "none") or names(bias) == names(bias == "all")


def test_a_term_without_a_residual_connection_begins_as_large_as_a_sum():
    """Its last matrices are sqrt(2 M) times as large as the matrices of 2 M added terms."""

    def initial(order: str) -> dict:
        spec = cases.spec(order=blocks.ORDERS[order])
        return shapes.flat(blocks.init(jax.random.key(0), spec=spec, **SIZES | {"M": 8}))

    residual, plain = jax.device_get(jax.jit(lambda: [initial(order) for order in ("pre_norm", "plain")])())
    for path, leaf in plain.items():
        times = 4 if path.endswith(("Uo_HDK", "W2_DF")) else 1
        np.testing.assert_allclose(leaf, times * residual[path], rtol=1e-6)


def test_in_training_a_block_returns_the_statistics_of_its_norms():
    """Every order of the block returns {norm: statistics}. Evaluation returns none, and no cache."""
    x_BND, key_B = cases.normal(1, B, N, D), keys(B)
    for name, order in blocks.ORDERS.items():
        spec = cases.spec(norm=norm.batch, order=order)
        params = cases.draw_params(functools.partial(blocks.init, spec=spec, **SIZES))

        def compute_aux(key_B=None, params=params, spec=spec):
            call = attentions.Call(mask=masks.causal, key_B=key_B)
            return spec.order.apply(params, x_BND, spec, call)[1]

        assert not any(jax.eval_shape(compute_aux).values())
        assert set(jax.eval_shape(compute_aux, key_B)["running"]) == {"norm1", "norm2"}
        if name == "pre_norm":
            compute_both = jax.jit(lambda key_B: (compute_aux(key_B)["running"]["norm1"], norm.batch.observe(x_BND)))
            cases.assert_trees_close(*compute_both(key_B), 1e-5)


@functools.partial(jax.jit, static_argnames=("rate", "layout"))
def drop(key_B, x_BND, rate, **call):
    return blocks.dropout("mlp", x_BND, cases.spec(dropout=rate), attentions.Call(key_B=key_B, **call))


def keys(n: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), n)


def test_dropout_makes_the_share_rate_of_zeros_and_keeps_the_mean(rate=0.1):
    """Other numbers become x / (1 - rate), in every example and at every position, within five standard deviations."""
    x_BND = np.full((7, 101, 61), 3, np.float32)
    y_BND = np.asarray(drop(keys(7), x_BND, rate))
    nonzero = y_BND != 0
    np.testing.assert_allclose(y_BND[nonzero], 3 / (1 - rate), rtol=1e-6)
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # nonzero numbers are 3 / (1 - rate), so this tests the mean
        count = np.prod([x_BND.shape[axis] for axis in axes])
        assert np.abs(nonzero.mean(axes) - (1 - rate)).max() < 5 * np.sqrt(rate * (1 - rate) / count)
    narrow = np.asarray(drop(keys(7), x_BND.astype(jnp.bfloat16), rate))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow != 0, nonzero)


def test_no_dropout_at_rate_zero_or_without_keys_and_invalid_rates_are_refused():
    x_BND = cases.normal(1, B, N, D)
    for rate, key_B in ((0.0, keys(B)), (0.5, None)):
        assert blocks.dropout("mlp", x_BND, cases.spec(dropout=rate), attentions.Call(key_B=key_B)) is x_BND
    for rate, key_B in itertools.product((-0.1, 1.0, float("nan")), (keys(B), None)):
        with raises(ValueError, rate):
            drop(key_B, x_BND, rate)


def test_the_zeros_of_an_example_depend_on_its_key_alone():
    """They do not depend on its index in the batch, on other examples or on its numbers."""
    x_BND, order = np.ones((5, N, D)), np.array([3, 1, 4, 0, 0])
    both = jax.jit(lambda key_B, x_BND: (drop(key_B, x_BND, 0.5), drop(key_B[order], -x_BND, 0.5)))
    y_BND, ordered_BND = jax.device_get(both(keys(5), x_BND))
    np.testing.assert_array_equal(ordered_BND, -y_BND[order])
    for i, j in itertools.combinations(range(5), 2):
        assert 0.3 < (y_BND[i] == y_BND[j]).mean() < 0.7


def test_dropout_on_eight_devices_equals_dropout_on_one():
    """Devices share the sequences of the batch, or the tokens of every sequence. Gradients are compared."""
    x_BND, w_D = cases.normal(1, 8, 16, D), cases.normal(2, D)

    def loss(w_D, x_BND, key_B, layout=layouts.ONE):
        return jnp.sum(jnp.sin(drop(key_B, x_BND * w_D, 0.3, layout=layout)))

    def sharded(layout, *in_specs):
        def local(w_D, *arrays):
            return jax.grad(lambda w_D: jax.lax.psum(loss(w_D, *arrays, layout), meshes.DATA))(w_D)

        return meshes.sharded(local, meshes.make(data=8), in_specs=in_specs)

    @jax.jit
    def differentiate(w_D, key_B):
        # Device i has the tokens i and 8 + i.
        striped_BND = x_BND.reshape(8, 2, 8, D).swapaxes(1, 2).reshape(8, 16, D)
        by_tokens = sharded(layouts.Layout(sequence="data"), P(), P(None, "data"), P())(w_D, striped_BND, key_B)
        by_sequences = sharded(layouts.ONE, P(), P("data"), P("data"))(w_D, x_BND, key_B)
        return by_tokens, by_sequences, jax.grad(loss)(w_D, x_BND, key_B)

    *results, expected_D = differentiate(w_D, keys(8))
    for result_D in results:
        cases.assert_close(result_D, expected_D, 1e-5)
