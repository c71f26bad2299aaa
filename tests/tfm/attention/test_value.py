"""Values (E8-E10) of full rank, of low rank and without parameters against the slow reference."""

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

from tfm import kernels, shapes
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


@cases.float64()
def test_multi_head_attention_with_each_value_equals_the_reference():
    """The score `none` has one head for all: then also the averages of full-rank and identity values have one."""
    x_BND, x_BSD = cases.normal(2, B, N, D), cases.normal(3, B, S, D)
    chosen = [*itertools.product(VALUES, ["asymmetric", "none"], [True, False])]
    trees = [(value_params(name, bias), cases.score_params(scores, bias)) for name, scores, bias in chosen]

    @jax.jit
    def every(trees):
        return [attend(*chosen[i][:2], *both, x_BND, x_BSD) for i, both in enumerate(trees)]

    found = zip(chosen, trees, every(trees), strict=True)
    for ((name, scores, _), (params, score_params), (y_BND, A_BHNS)), b in itertools.product(found, range(B)):
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


def test_heads_that_average_alike_may_be_one_and_the_identity_is_a_matrix_too():
    """A head axis of size one, as the score `none` has it, stands for H equal ones; V_h = I / H is no parameters."""
    V_HDD, y_BHND = jnp.broadcast_to(jnp.eye(D) / H, (H, D, D)), cases.normal(1, B, H, N, D)
    cases.close(value.full_rank.combine({"V_HDD": V_HDD}, y_BHND), value.identity.combine({}, y_BHND), 1e-5)
    cases.close(value.identity.combine({}, y_BHND[:, :1]), y_BHND[:, 0])
    for name in ("full_rank", "identity"):
        combine = functools.partial(VALUES[name].combine, value_params(name, True))
        cases.close(combine(y_BHND[:, :1]), combine(jnp.repeat(y_BHND[:, :1], H, axis=1)), 1e-5)


@pytest.mark.parametrize("name", VALUES)
def test_values_keep_their_dtype(name):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), value_params(name, True))
    v_BHNV = VALUES[name].apply(params, cases.normal(1, B, N, D).astype(jnp.bfloat16))
    assert v_BHNV.dtype == VALUES[name].combine(params, v_BHNV).dtype == jnp.bfloat16


SIZES = dict(H=3, K=41, D=97, M=7)
STD = {
    "low_rank": {"Uv_HKD": 97**-0.5, "Uo_HDK": (2 * 7 * 3 * 41) ** -0.5},
    "full_rank": {"V_HDD": (2 * 7 * 3 * 97) ** -0.5},
    "identity": {},
}


@pytest.mark.parametrize("name", VALUES)
def test_initial_values(name):
    """A residual term has variance 1 / (2 M) where each head attends to another token of variance one.

    No two matrices are alike, biases are zero, and matrices as they are without them.
    """
    params = VALUES[name].init(jax.random.key(0), **SIZES, bias=True)
    without = VALUES[name].init(jax.random.key(0), **SIZES, bias=False)
    assert (
        without.keys() == STD[name].keys()
        and {"bo_D": 97, "bv_HK": 3}.items()
        >= {leaf: len(params[leaf]) for leaf in params.keys() - without.keys()}.items()
    )
    assert ("bo_D" in params) == (name != "identity") and ("bv_HK" in params) == (name == "low_rank")
    shapes.check(params)
    for leaf, numbers in params.items():
        np.testing.assert_array_equal(numbers, without.get(leaf, np.zeros_like(numbers)))
        assert float(numbers.std()) == pytest.approx(STD[name].get(leaf, 0), rel=0.03)
    matrices = [
        np.ravel(U) for leaf in STD[name] for U in (params[leaf] if leaf[1] != "o" else params[leaf].swapaxes(1, 2))
    ]
    for one, other in itertools.combinations(matrices, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    if name != "identity":
        v_BHNV = VALUES[name].apply(params, cases.normal(1, 1, 499, 97))
        independent = v_BHNV if v_BHNV.shape[1] == 3 else cases.normal(2, 1, 3, 499, 97)
        assert float(jnp.var(VALUES[name].combine(params, independent))) == pytest.approx(1 / 14, rel=0.1)


@pytest.mark.parametrize("tokens", [1, kernels.FEW, kernels.FEW + 1])
def test_few_tokens_heads_are_summed_as_many_are(tokens):
    y_BHNV, U_HDV = cases.normal(0, 1, H, tokens, K), cases.normal(1, H, D, K)
    expected = np.einsum("bhnv,hdv->bnd", y_BHNV, U_HDV)
    run = jax.jit(lambda y_BHNV: value.low_rank.combine({"Uo_HDK": U_HDV}, y_BHNV))
    np.testing.assert_allclose(run(y_BHNV), expected, rtol=1e-4, atol=1e-5)
