"""Values (E8-E10) of full rank and without parameters against the slow reference; dropout."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_tokens
import translate
from cases import B, D, H, K, N, S
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh
from tfm import dropout, shapes
from tfm.attention import explicit, value

VALUES = {"low_rank": value.low_rank, "full_rank": value.full_rank, "identity": value.identity}


def value_params(name: str, bias: bool) -> dict:
    return cases.drawn(lambda key: VALUES[name].init(key, H=H, K=K, D=D, M=1, bias=bias), seed=1)


def attend(values: str, scores: str, params: dict, score_params: dict, x_BND, x_BSD):
    """Values, explicit average, combination: what multi-head attention does with a value path. Returns (y, A)."""
    q_BHNK, k_BHSK = cases.SCORES[scores].apply(score_params, x_BND, x_BSD)
    v_BHSV = VALUES[values].apply(params, x_BSD)
    y_BHNV, A_BHNS = explicit.attention(q_BHNK, k_BHSK, v_BHSV, mask=None, scale=1.0)
    return VALUES[values].combine(params, y_BHNV), A_BHNS


def slow(name: str, params: dict, X, A) -> np.ndarray:
    """The reference of one sequence from the paper's weights A_h."""
    p = {key: np.asarray(leaf, np.float64) for key, leaf in params.items()}
    if name == "identity":
        return reference_tokens.identity_multi_head(X, A)
    if name == "low_rank":
        return reference.low_rank_multi_head(X, p["Uo_HDK"], p["Uv_HKD"], A, p.get("bv_HK"), p.get("bo_D"))
    Y = reference.multi_head(X, list(p["V_HDD"]), A)
    return reference.total(Y, [[beta] * N for beta in p["bo_D"]]) if "bo_D" in p else Y


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("name", "scores", "bias"), [*itertools.product(VALUES, ["asymmetric", "none"], [True, False])]
)
@cases.float64()
def test_multi_head_attention_with_each_value_equals_the_reference(name, scores, bias):
    """The score `none` has one head for all: then also the averages of full-rank and identity values have one."""
    params, score_params = value_params(name, bias), cases.score_params(scores, bias)
    x_BND, x_BSD = cases.normal(2, B, N, D), cases.normal(3, B, S, D)
    y_BND, A_BHNS = attend(name, scores, params, score_params, x_BND, x_BSD)
    for b in range(B):
        X_query, X_key = translate.columns(x_BND[b]), translate.columns(x_BSD[b])
        A = translate.weights(scores, score_params, X_key, X_query, scale="1", allowed=None, heads=H)
        cases.close(y_BND[b], slow(name, params, X_key, A).T)
        cases.close(A_BHNS[b, 0], A[0].T)


@cases.float64()
def test_full_rank_low_rank_and_concatenated_heads_are_one():
    """E8 with V_h := U_h U_{v,h} = E9 = E10, in the code as in the papers.

    The proof of E10 begins with any Omega_c and cuts it into the U_h: column block h meets head h, so the product of
    Omega_c with the heads one under the other is the sum over heads of U_h with head h.
    """
    Omega_c, U_v = cases.normal(4, D, H * K), cases.normal(5, H, K, D)
    U = reference_tokens.cut(Omega_c, H)
    V = [reference.product(U[h], U_v[h]) for h in range(H)]
    score_params, x_BND = cases.score_params("asymmetric", True), cases.normal(2, 1, N, D)
    X = translate.columns(x_BND[0])
    A = translate.weights("asymmetric", score_params, X, X, scale="1", allowed=None, heads=H)
    concatenated = reference.concatenated_multi_head(X, Omega_c, U_v, A)
    cases.close(reference.low_rank_multi_head(X, U, U_v, A), concatenated)
    cases.close(reference.multi_head(X, V, A), concatenated)
    low_rank = {"Uo_HDK": jnp.asarray(np.stack(U)), "Uv_HKD": U_v}
    full_rank = {"V_HDD": jnp.asarray(np.stack(V))}
    for name, params in (("low_rank", low_rank), ("full_rank", full_rank)):
        y_BND, _ = attend(name, "asymmetric", params, score_params, x_BND, x_BND)
        cases.close(y_BND[0], concatenated.T)


@cases.float64()
def test_full_rank_values_that_are_the_identity_over_heads():
    """V_h = I / H, as D x D matrices and as no parameters at all."""
    V_HDD = jnp.broadcast_to(jnp.eye(D) / H, (H, D, D))
    y_BHND = cases.normal(1, B, H, N, D)
    cases.close(value.full_rank.combine({"V_HDD": V_HDD}, y_BHND), value.identity.combine({}, y_BHND))
    cases.close(value.identity.combine({}, y_BHND[:, :1]), y_BHND[:, 0])


@pytest.mark.parametrize("name", ["full_rank", "identity"])
def test_heads_that_average_alike_may_be_one(name):
    """A head axis of size one, as the score `none` has it, stands for H equal ones."""
    params, y_BHND = value_params(name, True), cases.normal(1, B, 1, N, D)
    combine = functools.partial(VALUES[name].combine, params)
    cases.close(combine(y_BHND), combine(jnp.repeat(y_BHND, H, axis=1)), 1e-5)


@pytest.mark.parametrize("name", VALUES)
def test_values_keep_their_dtype(name):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), value_params(name, True))
    x_BND = cases.normal(1, B, N, D).astype(jnp.bfloat16)
    v_BHNV = VALUES[name].apply(params, x_BND)
    assert v_BHNV.dtype == VALUES[name].combine(params, v_BHNV).dtype == jnp.bfloat16


def test_initial_full_rank_values():
    """V_h starts at 1/sqrt(2 M H D), no two heads alike; the bias is zero and changes no matrix."""
    sizes = dict(H=3, K=5, D=97, M=7)
    params = value.full_rank.init(jax.random.key(0), bias=True, **sizes)
    assert shapes.check(params) == {"H": 3, "D": 97}
    assert float(params["V_HDD"].std()) == pytest.approx((2 * 7 * 3 * 97) ** -0.5, rel=0.03)
    assert abs(np.corrcoef(params["V_HDD"][0].ravel(), params["V_HDD"][1].ravel())[0, 1]) < 0.05
    assert not params["bo_D"].any()
    without = value.full_rank.init(jax.random.key(0), bias=False, **sizes)
    assert set(without) == {"V_HDD"}
    np.testing.assert_array_equal(without["V_HDD"], params["V_HDD"])
    assert value.identity.init(jax.random.key(0), bias=True, **sizes) == {}


@pytest.mark.parametrize("name", ["low_rank", "full_rank"])
def test_a_residual_term_starts_at_one_over_2_M(name):
    """Where each head attends to another token of variance one, the output has variance 1 / (2 M)."""
    sizes, x_BND = dict(H=3, K=41, D=97, M=7, bias=True), cases.normal(1, 1, 499, 97)
    params = VALUES[name].init(jax.random.key(0), **sizes)
    v_BHNV = VALUES[name].apply(params, x_BND)
    independent = v_BHNV if v_BHNV.shape[1] == 3 else cases.normal(2, 1, 3, 499, 97)
    assert float(jnp.var(VALUES[name].combine(params, independent))) == pytest.approx(1 / 14, rel=0.1)


# ------------------------------------------------------------------------------------------------------------- dropout


def keys(n: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), n)


@pytest.mark.parametrize("rate", [0.1, 0.37, 0.9])
def test_dropout_makes_its_share_of_zeros_and_keeps_the_mean(rate):
    """What is left is x / (1 - rate), in every example and at every place. Bounds are five standard deviations."""
    x = jnp.full((7, 101, 61), 3.0)
    y = np.asarray(dropout.drop(keys(7), x, rate))
    left = y != 0
    np.testing.assert_allclose(y[left], 3 / (1 - rate), rtol=1e-6)
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        count = np.prod([x.shape[axis] for axis in axes])
        deviation = np.sqrt(rate * (1 - rate) / count)
        assert np.abs(left.mean(axes) - (1 - rate)).max() < 5 * deviation
        assert np.abs(y.mean(axes) - 3).max() < 5 * 3 * deviation / (1 - rate)


def test_no_dropout_at_rate_zero_or_without_keys():
    x_BND = cases.normal(1, B, N, D)
    assert dropout.drop(keys(B), x_BND, 0.0) is x_BND
    assert dropout.drop(None, x_BND, 0.5) is x_BND


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_wrong_rate_is_refused(rate):
    for keys_or_none in (keys(B), None):
        with pytest.raises(ValueError, match=f"a dropout rate of {rate}; it must be at least 0 and less than 1"):
            dropout.drop(keys_or_none, cases.normal(1, B, N, D), rate)


def test_the_zeros_of_an_example_depend_on_its_key_alone():
    """Not on its place in the batch, its neighbours, the numbers it has, or compilation; another key has others."""
    x_BND, key_B = jnp.ones((5, N, D)), keys(5)
    y_BND = np.asarray(dropout.drop(key_B, x_BND, 0.5))
    order = np.array([3, 1, 4, 0])
    np.testing.assert_array_equal(dropout.drop(key_B[order], x_BND[order], 0.5), y_BND[order])
    np.testing.assert_array_equal(dropout.drop(key_B[2:3], -x_BND[2:3], 0.5), -y_BND[2:3])
    np.testing.assert_array_equal(jax.jit(lambda key_B, x: dropout.drop(key_B, x, 0.5))(key_B, x_BND), y_BND)
    for one, other in itertools.combinations(range(5), 2):
        assert 0.3 < (y_BND[one] == y_BND[other]).mean() < 0.7


def test_dropout_on_eight_devices_is_dropout_on_one():
    x_BND, key_B = cases.normal(1, 16, N, D), keys(16)

    def loss(key_B, x_BND, w_D):
        return jnp.sum(jnp.sin(dropout.drop(key_B, x_BND * w_D, 0.3)))

    def local(key_B, x_BND, w_D):
        return jax.grad(lambda w_D: jax.lax.psum(loss(key_B, x_BND, w_D), mesh.DATA))(w_D)

    spread = jax.jit(mesh.sharded(local, mesh.make(data=8), in_specs=(P("data"), P("data"), P())))
    w_D = cases.normal(2, D)
    cases.close(spread(key_B, x_BND, w_D), jax.grad(loss, argnums=2)(key_B, x_BND, w_D), 1e-5)


def test_the_gradient_passes_where_the_number_did():
    x_BND, key_B = cases.normal(1, B, N, D), keys(B)
    gradient = jax.grad(lambda x: jnp.sum(dropout.drop(key_B, x, 0.25)))(x_BND)
    np.testing.assert_allclose(gradient, dropout.drop(key_B, jnp.ones_like(x_BND), 0.25))


def test_dropout_in_bfloat16():
    """The same zeros as in float32, and the dtype stays."""
    x_BND, key_B = cases.normal(1, B, N, D), keys(B)
    y_BND = dropout.drop(key_B, x_BND.astype(jnp.bfloat16), 0.1)
    exact = dropout.drop(key_B, x_BND, 0.1)
    assert y_BND.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y_BND == 0, exact == 0)
    np.testing.assert_allclose(y_BND.astype(np.float32), exact, rtol=2.0**-7)
