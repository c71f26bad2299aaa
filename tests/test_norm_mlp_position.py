"""Norms (E14-E16), the MLP (E12) and added positions (E21) against the slow reference."""

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, D, F, N

from tfm import mlp, norm, position, shapes


@pytest.mark.parametrize(("name", "eps"), [*itertools.product(cases.NORMS, [0.0, 1e-5, 0.7])])
@cases.float64()
def test_norms_equal_the_reference(name, eps):
    params = cases.drawn(lambda key: cases.NORMS[name].init(key, D=D))
    assert set(params) == ({"gain_D", "shift_D"} if name == "token" else set())
    x_BND = cases.normal(1, B, N, D) * 3 + 2
    y_BND = cases.NORMS[name].apply(params, x_BND, eps=eps)
    for b in range(B):
        cases.close(y_BND[b], translate.norm(params, translate.columns(x_BND[b]), eps=eps).T)


@cases.float64()
def test_three_papers_one_norm():
    """E14 with gamma = 1, beta = 0 is E15, and E16 with epsilon = 0 is E14."""
    X, one, zero = np.asarray(cases.normal(1, D, N)), np.ones(D), np.zeros(D)
    gamma, beta = np.asarray(cases.normal(2, D)), np.asarray(cases.normal(3, D))
    cases.close(reference.token_norm(X, one, zero), reference.standardised(X))
    cases.close(reference.layer_norm(X, gamma, beta, 0), reference.token_norm(X, gamma, beta))


def test_standardised_tokens_have_mean_zero_and_variance_one():
    y_BND = norm.standardise(cases.normal(1, B, N, D) * 5 + 3, eps=0.0)
    np.testing.assert_allclose(y_BND.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(jnp.var(y_BND, axis=-1), 1, atol=1e-5)


def test_a_constant_token_is_zero_with_eps():
    np.testing.assert_array_equal(norm.standardise(jnp.full((1, 1, D), 3.0), eps=1e-5), jnp.zeros((1, 1, D)))


def test_norms_start_as_standardisation():
    x_BND = cases.normal(1, B, N, D)
    for variant in cases.NORMS.values():
        params = variant.init(jax.random.key(0), D=D)
        np.testing.assert_array_equal(variant.apply(params, x_BND, eps=0.1), norm.standardise(x_BND, eps=0.1))


def test_bfloat16_tokens_keep_float32_statistics():
    """A mean of 9 hides the last bits of what bfloat16 would add up: only the result may be rounded."""
    x_BND = (cases.normal(1, 1, 3, 997) + 9).astype(jnp.bfloat16)
    y_BND = norm.standardise(x_BND, eps=1e-6)
    assert y_BND.dtype == jnp.bfloat16
    exact = translate.norm({}, translate.columns(x_BND[0]), eps=1e-6).T
    one_rounding = np.abs(exact) * 2.0**-8 + 1e-5
    assert (np.abs(np.asarray(y_BND[0], np.float64) - exact) <= one_rounding).all()


def test_float32_norm_is_close_to_float64():
    params, x_BND = cases.drawn(lambda key: norm.token.init(key, D=D)), cases.normal(1, B, N, D)
    narrow = norm.token.apply(params, x_BND, eps=1e-5)
    with cases.float64():
        wide = norm.token.apply(*cases.wide((params, x_BND)), eps=1e-5)
    assert narrow.dtype == np.float32 and wide.dtype == np.float64
    cases.close(narrow, wide, 1e-5)


# --------------------------------------------------------------------------------------------------------------- MLP


def mlp_params(name: str, bias: bool) -> dict:
    return cases.drawn(lambda key: cases.MLPS[name].init(key, D=D, F=F, M=1, bias=bias), std=0.5)


@pytest.mark.parametrize(("name", "bias"), [*itertools.product(cases.MLPS, [True, False])])
@cases.float64()
def test_mlp_equals_the_reference(name, bias):
    params, x_BND = mlp_params(name, bias), cases.normal(1, B, N, D)
    y_BND = cases.MLPS[name].apply(params, x_BND)
    for b in range(B):
        cases.close(y_BND[b], translate.feed(name, params, translate.columns(x_BND[b])).T)


@pytest.mark.parametrize("name", cases.MLPS)
def test_mlp_treats_every_token_alike_and_alone(name):
    params, x_BND = mlp_params(name, True), cases.normal(1, B, N, D)
    y_BND, order = cases.MLPS[name].apply(params, x_BND), np.random.default_rng(0).permutation(N)
    cases.close(cases.MLPS[name].apply(params, x_BND[:, order]), y_BND[:, order], 1e-6)
    cases.close(cases.MLPS[name].apply(params, x_BND[:, :1]), y_BND[:, :1], 1e-6)


@pytest.mark.parametrize("name", cases.MLPS)
def test_initial_mlp(name):
    """W1 keeps unit variance; W2 starts at 1/sqrt(2 M F); biases are zero, and their absence changes no matrix."""
    init, sizes = cases.MLPS[name].init, dict(D=97, F=211, M=7)
    params = init(jax.random.key(0), bias=True, **sizes)
    assert shapes.check(params) == {"D": 97, "F": 211}
    assert float(params["W1_FD"].std()) == pytest.approx(97**-0.5, rel=0.03)
    assert float(params["W2_DF"].std()) == pytest.approx((2 * 7 * 211) ** -0.5, rel=0.03)
    assert abs(np.corrcoef(params["W1_FD"].ravel(), params["W2_DF"].T.ravel())[0, 1]) < 0.04
    assert not params["b1_F"].any() and not params["b2_D"].any()
    without = init(jax.random.key(0), bias=False, **sizes)
    assert set(without) == {"W1_FD", "W2_DF"}
    for key in without:
        np.testing.assert_array_equal(without[key], params[key])


# --------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize(("n", "d"), [(N, D), (101, 16), (1, 2)])
def test_sinusoids_equal_the_reference(n, d):
    cases.close(position.sinusoids(n, d), reference.sinusoids(d, n).T, 1e-12)


def test_sinusoids_by_hand():
    """Position 0 is (0, 1, 0, 1); position 3 turns by 3 and by 3/100 radians."""
    by_hand = [[0, 1, 0, 1], [np.sin(3), np.cos(3), np.sin(0.03), np.cos(0.03)]]
    np.testing.assert_allclose(position.sinusoids(4, 4)[[0, 3]], by_hand, atol=1e-6)


@pytest.mark.parametrize("name", cases.POSITIONS)
@pytest.mark.parametrize("longest", [N, N + 4])
@cases.float64()
def test_added_positions_equal_the_reference(name, longest):
    params, x_BND = cases.drawn(lambda key: cases.POSITIONS[name].init(key, N=longest, D=D)), cases.normal(1, B, N, D)
    y_BND = cases.POSITIONS[name].apply(params, x_BND)
    table = {
        "learned": translate.columns(params.get("P_ND", np.zeros((N, D)))),
        "sinusoidal": reference.sinusoids(D, N),
        "none": np.zeros((D, N)),
    }[name]
    for b in range(B):
        cases.close(y_BND[b], reference.added_positions(translate.columns(x_BND[b]), table).T)


def test_more_tokens_than_learned_positions_are_refused():
    params = position.learned.init(jax.random.key(0), N=N, D=D)
    with pytest.raises(ValueError, match=f"{N + 1} tokens, but the position table holds {N}"):
        position.learned.apply(params, cases.normal(1, B, N + 1, D))


def test_sinusoidal_positions_keep_the_dtype():
    x_BND = cases.normal(1, B, N, D).astype(jnp.bfloat16)
    assert position.sinusoidal.apply({}, x_BND).dtype == jnp.bfloat16


def test_initial_positions():
    params = position.learned.init(jax.random.key(0), N=101, D=97)
    assert shapes.check(params) == {"N": 101, "D": 97}
    assert float(params["P_ND"].std()) == pytest.approx(97**-0.5, rel=0.03)
    assert (
        position.sinusoidal.init(jax.random.key(0), N=N, D=D) == position.none.init(jax.random.key(0), N=N, D=D) == {}
    )


@cases.float64()
def test_the_derivative_of_gelu_is_its_difference_quotient():
    x = jnp.linspace(-6, 6, 101)
    h = 1e-5
    slope = (mlp.exact_gelu(x + h) - mlp.exact_gelu(x - h)) / (2 * h)
    cases.close(jax.vmap(jax.grad(mlp.exact_gelu))(x), slope, 1e-8)
    cases.close(mlp.exact_gelu(x), jax.nn.gelu(x, approximate=False), 1e-12)
