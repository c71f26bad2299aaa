"""Values (E8-E10) of full rank, of low rank and without parameters against the slow reference."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_tokens
import translate
from cases import B, D, H, K, N, S

from tfm.attention import explicit, value

VALUES = {"low_rank": value.low_rank, "full_rank": value.full_rank, "identity": value.identity}


def draw_score(name: str) -> dict:
    return cases.draw_params(lambda key: cases.SCORES[name].init(key, H=H, K=K, D=D, bias=True))


def attend(values: str, scores: str, params: dict, score_params: dict, x_BND, x_BSD):
    """Return y, as multi-head attention computes it from values, explicit averages and the output projection."""
    q_BHNK, k_BHSK = cases.SCORES[scores].apply(score_params, x_BND, x_BSD)
    v_BHSV = VALUES[values].apply(params, x_BSD)
    y_BHNV, _ = explicit.attention(q_BHNK, k_BHSK, v_BHSV, mask=None, scale=1.0)
    return VALUES[values].out_proj(params, y_BHNV)


@pytest.mark.parametrize("scores", ["asymmetric", "none"])
@cases.float64()
def test_values_of_full_rank_and_identity_values_equal_the_reference(scores):
    """The score `none` has one head for all values. (test_heads.py tests values of low rank.)"""
    x_BND, x_BSD = jax.device_get((cases.normal(2, B, N, D), cases.normal(3, B, S, D)))
    variants, score_params = [("full_rank", True), ("full_rank", False), ("identity", True)], draw_score(scores)
    trees = [
        cases.draw_params(lambda key, n=n, b=b: VALUES[n].init(key, H=H, K=K, D=D, M=1, bias=b), seed=1)
        for n, b in variants
    ]

    @jax.jit
    def attend_all(trees, *arrays):
        return [attend(name, scores, params, *arrays) for (name, _), params in zip(variants, trees, strict=True)]

    results = jax.device_get(attend_all(trees, score_params, x_BND, x_BSD))
    for (name, bias), params, y_BND in zip(variants, trees, results, strict=True):
        for b in range(B):
            X_query, X_key = translate.columns(x_BND[b]), translate.columns(x_BSD[b])
            A = translate.weights(scores, score_params, X_key, X_query, scale="1", allowed=None, heads=H)
            if name == "identity":
                Y = reference_tokens.identity_multi_head(X_key, A)
            else:
                Y = reference.multi_head(X_key, list(np.asarray(params["V_HDD"])), A)
                Y = reference.total(Y, [[beta] * N for beta in np.asarray(params["bo_D"])]) if bias else Y
            cases.assert_close(y_BND[b], Y.T)


@cases.float64()
def test_full_rank_low_rank_and_concatenated_heads_are_equal():
    """E8 with V_h := U_h U_{v,h} = E9 = E10, in the code as in the papers.

    For E10, column block h of Omega_c is U_h. The product of Omega_c with the stacked heads is then the sum over h of
    U_h times head h.
    """
    shapes = (D, H * K), (H, K, D), (1, N, D)
    Omega_c, U_v, x_BND = (np.asarray(cases.normal(i, *shape)) for i, shape in enumerate(shapes))
    U = reference_tokens.cut(Omega_c, H)
    V, X = [reference.product(U[h], U_v[h]) for h in range(H)], translate.columns(x_BND[0])
    score_params = draw_score("asymmetric")
    A = translate.weights("asymmetric", score_params, X, X, scale="1", allowed=None, heads=H)
    concatenated = reference.concatenated_multi_head(X, Omega_c, U_v, A)
    cases.assert_close(reference.low_rank_multi_head(X, U, U_v, A), concatenated)
    cases.assert_close(reference.multi_head(X, V, A), concatenated)
    params = {"low_rank": {"Uo_HDK": np.stack(U), "Uv_HKD": U_v}, "full_rank": {"V_HDD": np.stack(V)}}

    @jax.jit
    def attend_all(params, *arrays):
        return [attend(name, "asymmetric", params[name], *arrays) for name in params]

    for y_BND in attend_all(params, score_params, x_BND, x_BND):
        cases.assert_close(y_BND[0], concatenated.T)


@pytest.mark.parametrize("name", VALUES)
def test_values_keep_bfloat16(name):
    def compute():
        params = VALUES[name].init(jax.random.key(0), H=H, K=K, D=D, M=1, bias=True)
        params, x_BND = jax.tree.map(jnp.bfloat16, params), jnp.ones((1, 2, D), jnp.bfloat16)
        return VALUES[name].out_proj(params, VALUES[name].apply(params, x_BND))

    assert jax.eval_shape(compute).dtype == jnp.bfloat16
