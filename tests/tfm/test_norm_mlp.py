"""Norms (E14-E17) and the MLPs (E12) against the slow reference."""

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_tokens
import translate
from cases import B, D, F, N
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh
from tfm import mlp, norm, shapes

NORMS = {"token": norm.token, "token_plain": norm.token_plain, "rms": norm.rms}
NORMS |= {"batch": norm.batch, "instance": norm.instance}
LEAVES = {"token": {"gain_D", "shift_D"}, "token_plain": set(), "rms": {"gain_D"}, "instance": {"gain_D", "shift_D"}}
LEAVES |= {"batch": {"gain_D", "shift_D", "mean_D", "var_D"}}


def norm_params(name: str) -> dict:
    """Random parameters; a variance is positive."""
    params = cases.drawn(lambda key: NORMS[name].init(key, D=D))
    return params | ({"var_D": jnp.square(params["var_D"]) + 0.1} if name == "batch" else {})


def slow_norm(name: str, params: dict, X, *, eps: float):
    """The reference of one sequence."""
    p = {key: np.asarray(leaf, np.float64) for key, leaf in params.items()}
    if name == "rms":
        return reference_tokens.rms_norm(X, p["gain_D"], eps)
    if name == "batch":
        return reference_tokens.batch_norm(X, p["mean_D"], p["var_D"], p["gain_D"], p["shift_D"], eps)
    if name == "instance":
        return reference_tokens.instance_norm(X, p["gain_D"], p["shift_D"], eps)
    return translate.norm(params, X, eps=eps)


@pytest.mark.parametrize(("name", "eps"), [*itertools.product(NORMS, [0.0, 1e-5, 0.7])])
@cases.float64()
def test_norms_equal_the_reference(name, eps):
    params = norm_params(name)
    assert set(params) == LEAVES[name]
    x_BND = cases.normal(1, B, N, D) * 3 + 2
    y_BND = NORMS[name].apply(params, x_BND, eps=eps)
    for b in range(B):
        cases.close(y_BND[b], slow_norm(name, params, translate.columns(x_BND[b]), eps=eps).T)


@cases.float64()
def test_three_papers_one_norm():
    """E14 with gamma = 1, beta = 0 is E15, and E16 with epsilon = 0 is E14."""
    X, one, zero = np.asarray(cases.normal(1, D, N)), np.ones(D), np.zeros(D)
    gamma, beta = np.asarray(cases.normal(2, D)), np.asarray(cases.normal(3, D))
    cases.close(reference.token_norm(X, one, zero), reference.standardised(X))
    cases.close(reference.layer_norm(X, gamma, beta, 0), reference.token_norm(X, gamma, beta))


def test_standardised_tokens_have_mean_zero_and_variance_one():
    y_BND = norm.token_plain.apply({}, cases.normal(1, B, N, D) * 5 + 3, eps=0.0)
    np.testing.assert_allclose(y_BND.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(jnp.var(y_BND, axis=-1), 1, atol=1e-5)


def test_a_constant_token_is_zero_with_eps():
    np.testing.assert_array_equal(norm.token_plain.apply({}, jnp.full((1, 1, D), 3.0), eps=1e-5), jnp.zeros((1, 1, D)))


def test_norms_start_as_standardisation():
    """Over their own axes; rms divides by the root of the mean square, and batch knows no other batch yet."""
    x_BND = cases.normal(1, B, N, D)
    start = {name: NORMS[name].apply(NORMS[name].init(jax.random.key(0), D=D), x_BND, eps=0.1) for name in NORMS}
    by_hand = (x_BND - x_BND.mean(-1, keepdims=True)) / np.sqrt(np.var(x_BND, axis=-1, keepdims=True) + 0.1)
    cases.close(start["token"], by_hand, 1e-6)
    np.testing.assert_array_equal(start["token_plain"], start["token"])
    cases.close(start["instance"], norm.token_plain.apply({}, x_BND.swapaxes(1, 2), eps=0.1).swapaxes(1, 2), 1e-6)
    cases.close(start["batch"], x_BND / np.sqrt(1.1), 1e-6)
    cases.close(start["rms"], x_BND / np.sqrt(np.square(x_BND).mean(-1, keepdims=True) + 0.1), 1e-6)


def test_bfloat16_tokens_keep_float32_statistics():
    """A mean of 9 hides the last bits of what bfloat16 would add up: only the result may be rounded."""
    x_BND = (cases.normal(1, 1, 3, 997) + 9).astype(jnp.bfloat16)
    y_BND = norm.token_plain.apply({}, x_BND, eps=1e-6)
    assert y_BND.dtype == jnp.bfloat16
    exact = translate.norm({}, translate.columns(x_BND[0]), eps=1e-6).T
    one_rounding = np.abs(exact) * 2.0**-8 + 1e-5
    assert (np.abs(np.asarray(y_BND[0], np.float64) - exact) <= one_rounding).all()


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_bfloat16_tokens_are_rounded_once(name):
    """Gain and shift have more bits than the tokens; the batch norm takes the statistics of these very tokens."""
    x_BND = (cases.normal(1, B, 47, D) + 9).astype(jnp.bfloat16)
    params = norm_params(name)
    if name == "batch":
        params |= norm.batch.observe(x_BND)
    y_BND = NORMS[name].apply(params, x_BND, eps=1e-6)
    assert y_BND.dtype == jnp.bfloat16
    exact = slow_norm(name, params, translate.columns(x_BND[0]), eps=1e-6).T
    assert (np.abs(np.asarray(y_BND[0], np.float64) - exact) <= np.abs(exact) * 2.0**-8 + 1e-5).all()


@pytest.mark.parametrize("name", NORMS)
def test_float32_norm_is_close_to_float64(name):
    params, x_BND = norm_params(name), cases.normal(1, B, N, D)
    narrow = NORMS[name].apply(params, x_BND, eps=1e-5)
    with cases.float64():
        wide = NORMS[name].apply(*cases.wide((params, x_BND)), eps=1e-5)
    assert narrow.dtype == np.float32 and wide.dtype == np.float64
    cases.close(narrow, wide, 1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_which_tokens_a_norm_lets_meet(name):
    """Changing the last token changes it alone, except where the norm is over the sequence (and in that one only)."""
    x_BND, params = cases.normal(1, B, N, D), norm_params(name)
    y_BND = NORMS[name].apply(params, x_BND, eps=1e-5)
    other = NORMS[name].apply(params, x_BND.at[0, -1].add(1.0), eps=1e-5)
    changed_BN = (np.asarray(other) != np.asarray(y_BND)).any(-1)
    np.testing.assert_array_equal(changed_BN[0], np.ones(N) if name == "instance" else np.arange(N) == N - 1)
    assert not changed_BN[1:].any()


# --------------------------------------------------------------------------------------------------------------- MLP

MLPS = {name: getattr(mlp, name) for name in "relu gelu gelu_tanh two_hidden_relu two_hidden_gelu swiglu".split()}
MATRICES = dict.fromkeys(MLPS, {"W1_FD", "W2_DF"})
MATRICES |= {"two_hidden_relu": {"W1_FD", "Wh_FF", "W2_DF"}, "two_hidden_gelu": {"W1_FD", "Wh_FF", "W2_DF"}}
MATRICES |= {"swiglu": {"W1_FD", "Wg_FD", "W2_DF"}}


def mlp_params(name: str, bias: bool) -> dict:
    return cases.drawn(lambda key: MLPS[name].init(key, D=D, F=F, M=1, bias=bias), std=0.5)


def slow_mlp(name: str, params: dict, X):
    """The reference of one sequence; its matrices are transposed, since seed 004 writes x W_1."""

    def of(matrix: str, bias: str):
        W = np.asarray(params[matrix], np.float64)
        return W.T, np.asarray(params.get(bias, np.zeros(len(W))), np.float64)

    first, last = of("W1_FD", "b1_F"), of("W2_DF", "b2_D")
    if name == "swiglu":
        return reference_tokens.swiglu(X, *of("Wg_FD", "bg_F"), *first, *last)
    if name == "gelu_tanh":
        return reference.mlp(X, *first, *last, reference_tokens.gelu_tanh)
    activation = getattr(reference, name.removeprefix("two_hidden_"))
    if name.startswith("two_hidden"):
        return reference_tokens.two_hidden_mlp(X, *first, *of("Wh_FF", "bh_F"), *last, activation)
    return reference.mlp(X, *first, *last, activation)


@pytest.mark.parametrize(("name", "bias"), [*itertools.product(MLPS, [True, False])])
@cases.float64()
def test_mlp_equals_the_reference(name, bias):
    params, x_BND = mlp_params(name, bias), cases.normal(1, B, N, D)
    assert {key for key in params if key.startswith("W")} == MATRICES[name]
    assert len(params) == (2 if bias else 1) * len(MATRICES[name])
    y_BND = MLPS[name].apply(params, x_BND)
    for b in range(B):
        cases.close(y_BND[b], slow_mlp(name, params, translate.columns(x_BND[b])).T)


@pytest.mark.parametrize("name", MLPS)
def test_mlp_treats_every_token_alike_and_alone(name):
    params, x_BND = mlp_params(name, True), cases.normal(1, B, N, D)
    y_BND, order = MLPS[name].apply(params, x_BND), np.random.default_rng(0).permutation(N)
    cases.close(MLPS[name].apply(params, x_BND[:, order]), y_BND[:, order], 1e-6)
    cases.close(MLPS[name].apply(params, x_BND[:, :1]), y_BND[:, :1], 1e-6)


@pytest.mark.parametrize("name", MLPS)
def test_initial_mlp(name):
    """W1, Wh and Wg keep unit variance; W2 starts at 1/sqrt(2 M F); biases are zero and change no matrix."""
    init, sizes = MLPS[name].init, dict(D=97, F=211, M=7)
    params = init(jax.random.key(0), bias=True, **sizes)
    stds = {"W1_FD": 97**-0.5, "Wg_FD": 97**-0.5, "Wh_FF": 211**-0.5, "W2_DF": (2 * 7 * 211) ** -0.5}
    assert shapes.check(params) == {"D": 97, "F": 211}
    for key in MATRICES[name]:
        assert float(params[key].std()) == pytest.approx(stds[key], rel=0.03)
    assert abs(np.corrcoef(params["W1_FD"].ravel(), params["W2_DF"].T.ravel())[0, 1]) < 0.04
    if "Wg_FD" in params:
        assert abs(np.corrcoef(params["W1_FD"].ravel(), params["Wg_FD"].ravel())[0, 1]) < 0.04
    assert not any(params[key].any() for key in params.keys() - MATRICES[name])
    without = init(jax.random.key(0), bias=False, **sizes)
    assert set(without) == MATRICES[name]
    for key in without:
        np.testing.assert_array_equal(without[key], params[key])


def test_gradients_of_mlps_on_eight_devices_are_those_on_one():
    """Every activation can be differentiated inside shard_map, whichever JAX it is."""
    all_params, x_BND = {name: mlp_params(name, True) for name in MLPS}, cases.normal(1, 8, N, D)

    def loss(all_params, x_BND):
        return sum(jnp.sum(jnp.sin(MLPS[name].apply(params, x_BND))) for name, params in all_params.items())

    def local(all_params, x_BND):
        return jax.grad(lambda all_params: jax.lax.psum(loss(all_params, x_BND), mesh.DATA))(all_params)

    one = jax.jit(jax.grad(loss))(all_params, x_BND)
    eight = jax.jit(mesh.sharded(local, mesh.make(data=8), in_specs=(P(), P("data"))))(all_params, x_BND)
    jax.tree.map(lambda spread, single: cases.close(spread, single, 1e-5), eight, one)


@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_keeps_bfloat16(name):
    params, x_BND = mlp_params(name, True), cases.normal(1, B, N, D)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x_BND))
    y_BND = MLPS[name].apply(*narrow)
    assert y_BND.dtype == jnp.bfloat16
    cases.close(y_BND.astype(np.float32), MLPS[name].apply(params, x_BND), 0.05)


@cases.float64()
def test_the_derivative_of_gelu_is_its_difference_quotient():
    x = jnp.linspace(-6, 6, 101)
    h = 1e-5
    slope = (mlp.exact_gelu(x + h) - mlp.exact_gelu(x - h)) / (2 * h)
    cases.close(jax.vmap(jax.grad(mlp.exact_gelu))(x), slope, 1e-8)
    cases.close(mlp.exact_gelu(x), jax.nn.gelu(x, approximate=False), 1e-12)
