"""Blocks (E13, E18, E19) against the slow reference, their residual connections, and dropout."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, D, F, H, K, N
from errors import raises
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh
from tfm import block, layout, norm, shapes
from tfm.attention import mask, spec

SIZES = dict(D=D, H=H, K=K, F=F, M=1, N=N, bias=True)


@pytest.mark.parametrize(("norm_name", "mlp_name"), [("token", "gelu"), ("token_plain", "relu")])
@cases.float64()
def test_blocks_equal_the_reference(norm_name, mlp_name):
    own, x_BND = dict(norm=cases.NORMS[norm_name], mlp=cases.MLPS[mlp_name]), cases.normal(1, 1, N, D)
    chosen = [*itertools.product(block.ORDERS, [0.0, 0.3])]
    params = cases.drawn(lambda key: block.init(key, spec=cases.spec(**own), **SIZES))

    @jax.jit
    def every(params):
        def one(order, eps):
            parts = cases.spec(**own, order=block.ORDERS[order], eps=eps)
            return block.choose(params, parts.order)(params, x_BND, parts, spec.Call(mask=mask.causal, maps=True))

        return [one(*pair) for pair in chosen]

    for (order, eps), (y_BND, seen) in zip(chosen, every(params), strict=True):
        settings = dict(order=order, score="asymmetric", mlp=mlp_name, scale="1/sqrt(K)", eps=eps)
        allowed = reference.upper_triangular(N, N)
        cases.close(y_BND[0], translate.block(params, translate.columns(x_BND[0]), allowed=allowed, **settings).T)
        assert seen["A"]["self"].shape == (1, H, N, N) and seen["running"] == {} and "cache" not in seen


@pytest.mark.parametrize("bias", block.BIASES)
def test_biases_are_where_the_setting_puts_them(bias):
    """They are in cross-attention, too; True and False mean "all" and "none"."""
    QKV, OUTPUT, MLP = {"bq_HK", "bk_HK", "bv_HK"}, {"bo_D"}, {"b1_F", "b2_D"}
    expected = {"all": QKV | OUTPUT | MLP, "none": set(), "attention": QKV | OUTPUT, "mlp": MLP, "qkv": QKV}[bias]

    def names(bias):
        call = {**SIZES, "bias": bias, "spec": cases.spec(), "cross": True}
        return [*shapes.flat(jax.eval_shape(functools.partial(block.init, **call), jax.random.key(0)))]

    biases = [path.rpartition("/")[2] for path in names(bias) if path.rpartition("/")[2].startswith("b")]
    assert set(biases) == expected and len(biases) == 2 * len(expected - MLP) + len(expected & MLP)
    assert bias not in ("all", "none") or names(bias) == names(bias == "all")


def test_a_term_without_a_residual_connection_begins_as_large_as_a_sum():
    """The last matrices begin sqrt(2 M) times as large as those of 2 M terms."""

    def initial(order: str) -> dict:
        spec = cases.spec(order=block.ORDERS[order])
        return shapes.flat(block.init(jax.random.key(0), spec=spec, **SIZES | {"M": 8}))

    residual = initial("pre_norm")
    for path, leaf in initial("plain").items():
        times = 4 if path.endswith(("Uo_HDK", "W2_DF")) else 1
        np.testing.assert_allclose(leaf, times * residual[path], rtol=1e-6)


def test_in_training_a_block_returns_the_statistics_of_its_norms():
    """Blocks of every order return those of each norm by its name; evaluation returns none."""
    x_BND, key_B = cases.normal(1, B, N, D), jax.random.split(jax.random.key(0), B)
    for order in block.ORDERS.values():
        parts = cases.spec(norm=norm.batch, order=order)
        params = cases.drawn(functools.partial(block.init, spec=parts, **SIZES))
        params = {name: part | ({"var_D": jnp.ones(D)} if "norm" in name else {}) for name, part in params.items()}

        @jax.jit
        def run(key_B=None, params=params, parts=parts):
            call = spec.Call(mask=mask.causal, key_B=key_B)
            return block.choose(params, parts.order)(params, x_BND, parts, call)[1]["running"]

        assert jax.eval_shape(run) == {} and set(jax.eval_shape(run, key_B)) == {"norm1", "norm2"}
        if order is block.ORDERS["pre_norm"]:
            cases.agree(run(key_B)["norm1"], norm.batch.observe(x_BND, layout=layout.ONE), 1e-5)


@functools.partial(jax.jit, static_argnames=("rate", "layout"))
def drop(key_B, x_BND, rate, **call):
    return block.dropout("mlp", x_BND, cases.spec(dropout=rate), spec.Call(key_B=key_B, **call))


def keys(n: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), n)


def test_dropout_makes_its_share_of_zeros_and_keeps_the_mean(rate=0.1):
    """Other numbers become x / (1 - rate), in every example and at every position, within five standard deviations."""
    x_BND = jnp.full((7, 101, 61), 3.0)
    y_BND = np.asarray(drop(keys(7), x_BND, rate))
    nonzero = y_BND != 0
    np.testing.assert_allclose(y_BND[nonzero], 3 / (1 - rate), rtol=1e-6)
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # where all others are 3 / (1 - rate), the mean follows
        count = np.prod([x_BND.shape[axis] for axis in axes])
        assert np.abs(nonzero.mean(axes) - (1 - rate)).max() < 5 * np.sqrt(rate * (1 - rate) / count)
    narrow = drop(keys(7), x_BND.astype(jnp.bfloat16), rate)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow != 0, nonzero)


def test_no_dropout_at_rate_zero_or_without_keys():
    x_BND = cases.normal(1, B, N, D)
    for rate, key_B in ((0.0, keys(B)), (0.5, None)):
        assert block.dropout("mlp", x_BND, cases.spec(dropout=rate), spec.Call(key_B=key_B)) is x_BND


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_an_invalid_rate_is_refused(rate):
    for key_B in (keys(B), None):
        with raises(ValueError, rate):
            drop(key_B, cases.normal(1, B, N, D), rate)


def test_the_zeros_of_an_example_depend_on_its_key_alone():
    """They do not depend on its place in the batch, its neighbours or its numbers; another key has other zeros."""
    x_BND, key_B = jnp.ones((5, N, D)), keys(5)
    y_BND = np.asarray(drop(key_B, x_BND, 0.5))
    order = np.array([3, 1, 4, 0, 0])
    np.testing.assert_array_equal(drop(key_B[order], -x_BND, 0.5), -y_BND[order])
    for one, other in itertools.combinations(range(5), 2):
        assert 0.3 < (y_BND[one] == y_BND[other]).mean() < 0.7


def test_dropout_on_eight_devices_is_dropout_on_one():
    """The devices share the sequences, or the tokens of each; the gradient passes where the number does."""
    x_BND, key_B, w_D = cases.normal(1, 8, 16, D), keys(8), cases.normal(2, D)

    def loss(w_D, x_BND, key_B, over=layout.ONE):
        return jnp.sum(jnp.sin(drop(key_B, x_BND * w_D, 0.3, layout=over)))

    expected_D = jax.jit(jax.grad(loss))(w_D, x_BND, key_B)
    striped_BND = x_BND.reshape(8, 2, 8, D).swapaxes(1, 2).reshape(8, 16, D)  # device i has the tokens i and 8 + i
    for over, given, specs in (
        (layout.ONE, x_BND, (P(), P("data"), P("data"))),
        (layout.Layout(sequence="data"), striped_BND, (P(), P(None, "data"), P())),
    ):

        def local(w_D, x_BND, key_B, over=over):
            return jax.grad(lambda w_D: jax.lax.psum(loss(w_D, x_BND, key_B, over), mesh.DATA))(w_D)

        spread = jax.jit(mesh.sharded(local, mesh.make(data=8), in_specs=specs))
        cases.close(spread(w_D, given, key_B), expected_D, 1e-5)
