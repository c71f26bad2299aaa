"""Attention, masks and values (E3, E8-E11, E22) against the slow reference; what a mask must keep out, and must not."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, D, H, K, N, S

from tfm import block
from tfm.attention import explicit, heads, mask, score, value

VALID_BS = np.arange(S)[None, :] < np.array([S, 8])[:, None]  # the second sequence ends with three paddings
VALID_BS[0, 2] = False
MASKS = {
    "none": None,
    "everything": mask.everything,
    "causal": mask.causal,
    "padding": mask.padding(jnp.asarray(VALID_BS)),
    "both": mask.both(mask.causal, mask.padding(jnp.asarray(VALID_BS))),
}


def paper_allowed(name: str, b: int):
    """The paper's mask [n', n] of sequence b."""
    if name in ("none", "everything"):
        return None
    triangle = reference.upper_triangular(S, N)
    allowed = triangle if name in ("causal", "both") else np.ones((S, N))
    return allowed * VALID_BS[b][:, None] if name in ("padding", "both") else allowed


def drawn_qkv(seed: int = 0):
    return cases.normal(seed, B, H, N, K), cases.normal(seed + 1, B, H, S, K), cases.normal(seed + 2, B, H, S, K)


# ------------------------------------------------------------------------------------------------------------ masks


def test_causal_mask_is_lower_triangular_in_rows():
    literal = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(mask.dense(mask.causal, N=4, S=4), literal)
    np.testing.assert_array_equal(mask.dense(mask.causal, N=4, S=4).T, reference.upper_triangular(4, 4))


def test_causal_mask_is_aligned_to_the_last_key():
    np.testing.assert_array_equal(mask.dense(mask.causal, N=2, S=5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(mask.dense(mask.causal, N=1, S=3), [[1, 1, 1]])


def test_padding_mask():
    valid_BS = jnp.array([[True, True, False], [False, True, True]])
    literal = [[[1, 1, 0], [1, 1, 0]], [[0, 1, 1], [0, 1, 1]]]
    np.testing.assert_array_equal(mask.dense(mask.padding(valid_BS), N=2, S=3), literal)


def test_both_masks():
    valid_BS = jnp.array([[True, True, False], [False, True, True]])
    literal = [[[1, 1, 0], [1, 1, 0]], [[0, 1, 0], [0, 1, 1]]]
    for one, other in itertools.permutations([mask.causal, mask.padding(valid_BS)]):
        np.testing.assert_array_equal(mask.dense(mask.both(one, other), N=2, S=3), literal)


def test_everything_mask():
    np.testing.assert_array_equal(mask.dense(mask.everything, N=2, S=3), np.ones((2, 3)))


def test_any_part_of_a_mask_can_be_asked_for():
    n_N, s_S = jnp.array([3, 1]), jnp.array([0, 2, 3])
    valid_BS = jnp.array([[True, True, True, False], [False, True, False, True]])
    np.testing.assert_array_equal(mask.causal(n_N, s_S), [[1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(mask.everything(n_N, s_S), np.ones((2, 3)))
    np.testing.assert_array_equal(mask.padding(valid_BS)(n_N, s_S), [[[1, 1, 0]] * 2, [[0, 0, 1]] * 2])


# ---------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("name", MASKS)
@cases.float64()
def test_weights_and_averages_equal_the_reference(name):
    q_BHNK, k_BHSK, v_BHSK = drawn_qkv()
    y_BHNK, A_BHNS = explicit.attention(q_BHNK, k_BHSK, v_BHSK, mask=MASKS[name], scale=0.3)
    assert y_BHNK.shape == (B, H, N, K) and A_BHNS.shape == (B, H, N, S)
    for b, h in itertools.product(range(B), range(H)):
        L = 0.3 * reference.naive_logits(np.asarray(k_BHSK[b, h]).T, np.asarray(q_BHNK[b, h]).T)
        A = reference.attention_matrix(L, paper_allowed(name, b))
        cases.close(A_BHNS[b, h], A.T)
        cases.close(y_BHNK[b, h], reference.weighted_average(np.asarray(v_BHSK[b, h]).T, A).T)


@pytest.mark.parametrize("name", MASKS)
def test_rows_of_the_weights_sum_to_one(name):
    allowed = None if MASKS[name] is None else mask.dense(MASKS[name], N=N, S=S)
    A_BHNS = explicit.weights(cases.normal(0, B, H, N, S, std=30.0), allowed)
    assert A_BHNS.min() >= 0
    np.testing.assert_allclose(A_BHNS.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_a_shift_of_all_logits_of_a_query_changes_nothing(name):
    """Logits and shifts are multiples of 1/64, so that the sums are exact; exp(1000) alone would be infinite."""
    allowed = None if MASKS[name] is None else mask.dense(MASKS[name], N=N, S=S)
    l_BHNS = jnp.round(64 * cases.normal(0, B, H, N, S)) / 64
    shift_BHN1 = jnp.round(64 * cases.normal(1, B, H, N, 1, std=1000.0)) / 64
    np.testing.assert_array_equal(explicit.weights(l_BHNS + shift_BHN1, allowed), explicit.weights(l_BHNS, allowed))


def test_bfloat16_queries_and_keys_give_float32_weights():
    q_BHNK, k_BHSK, v_BHSK = (x.astype(jnp.bfloat16) for x in drawn_qkv())
    y_BHNK, A_BHNS = explicit.attention(q_BHNK, k_BHSK, v_BHSK, mask=mask.causal, scale=1.0)
    assert A_BHNS.dtype == jnp.float32 and y_BHNK.dtype == jnp.bfloat16
    with cases.float64():
        exact, A_exact = explicit.attention(*cases.wide((q_BHNK, k_BHSK, v_BHSK)), mask=mask.causal, scale=1.0)
    cases.close(A_BHNS, A_exact, 1e-5)
    cases.close(y_BHNK.astype(jnp.float32), exact, 2e-2)


# ----------------------------------------------------------------------------------------- what a mask must keep out


def shut(n_N: jax.Array, s_S: jax.Array) -> jax.Array:
    """The causal mask, but query 3 of the first sequence sees nothing."""
    blind_BN = (jnp.arange(B) == 0)[:, None] & (n_N == S - N + 3)[None, :]
    return mask.causal(n_N, s_S) & ~blind_BN[:, :, None]


@pytest.mark.parametrize("debug_nans", [False, True])
def test_a_fully_masked_query_gives_zeros_with_zero_gradient(debug_nans):
    q_BHNK, k_BHSK, v_BHSK = drawn_qkv()

    def loss(q_BHNK, k_BHSK, v_BHSK, only):
        y_BHNK, A_BHNS = explicit.attention(q_BHNK, k_BHSK, v_BHSK, mask=shut, scale=1.0)
        return jnp.sum(jnp.sin(y_BHNK + 1) * only) + jnp.sum(jnp.sin(A_BHNS + 1) * only), (y_BHNK, A_BHNS)

    the_query = jnp.zeros((B, 1, N, 1)).at[0, :, 3].set(1.0)
    with jax.debug_nans(debug_nans):
        gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        gradient = gradient if debug_nans else jax.jit(gradient)  # step by step, no intermediate is NaN either
        of_the_query, (y_BHNK, A_BHNS) = gradient(q_BHNK, k_BHSK, v_BHSK, the_query)
        of_all, _ = gradient(q_BHNK, k_BHSK, v_BHSK, jnp.ones_like(the_query))
        of_others, _ = gradient(q_BHNK, k_BHSK, v_BHSK, 1 - the_query)
    assert not y_BHNK[0, :, 3].any() and not A_BHNS[0, :, 3].any()
    assert y_BHNK[0, :, 2].any() and y_BHNK[1, :, 3].all()
    for zero, whole, rest in zip(of_the_query, of_all, of_others, strict=True):
        assert not zero.any()
        assert jnp.isfinite(whole).all() and whole.any()
        np.testing.assert_array_equal(whole, rest)


BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
PLACES = {"key": (1,), "value": (2,), "both": (1, 2)}


def hiding(name: str) -> mask.Mask:
    """A mask that hides key 7 of sequence 1: from the first queries if causal, from all if it is padding."""
    padding = mask.padding(jnp.ones((B, S), bool).at[1, 7].set(False))
    return {"causal": mask.causal, "padding": padding, "both": mask.both(mask.causal, padding)}[name]


@functools.partial(jax.jit, static_argnames="name")
def averages_and_gradient(qkv: list, sees_BN, *, name: str):
    """y, A, and the gradient of the outputs of those queries that do not see the bad key."""

    def loss(qkv):
        y_BHNK, A_BHNS = explicit.attention(*qkv, mask=hiding(name), scale=0.5)
        return jnp.where(sees_BN[:, None, :, None], 0.0, jnp.sin(y_BHNK)).sum(), (y_BHNK, A_BHNS)

    gradient, (y_BHNK, A_BHNS) = jax.grad(loss, has_aux=True)(qkv)
    return y_BHNK, A_BHNS, gradient


@pytest.mark.parametrize(("bad", "place"), [*itertools.product(BAD, PLACES)])
@pytest.mark.parametrize("name", ["causal", "padding", "both"])
def test_nan_and_infinity_stay_behind_the_mask(bad, place, name):
    clean = drawn_qkv()
    dirty = [x.at[1, :, 7, 5].set(BAD[bad]) if i in PLACES[place] else x for i, x in enumerate(clean)]
    sees_BN = jnp.broadcast_to(mask.dense(hiding(name), N=N, S=S), (B, N, S))[:, :, 7].at[0].set(False)
    assert sees_BN.any() == (name == "causal")
    y_BHNK, A_BHNS, gradient = averages_and_gradient(dirty, sees_BN, name=name)
    clean_BHNK, clean_A_BHNS, clean_gradient = averages_and_gradient(list(clean), sees_BN, name=name)
    hidden = np.broadcast_to(~sees_BN[:, None, :, None], y_BHNK.shape)
    np.testing.assert_array_equal(np.isfinite(y_BHNK), hidden)
    np.testing.assert_array_equal(np.asarray(y_BHNK)[hidden], np.asarray(clean_BHNK)[hidden])
    np.testing.assert_array_equal(np.asarray(A_BHNS)[hidden[..., 0]], np.asarray(clean_A_BHNS)[hidden[..., 0]])
    for one, other in zip(gradient, clean_gradient, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bad", BAD)
def test_nan_and_infinity_reach_those_who_may_see_them(bad):
    q_BHNK, k_BHSK, v_BHSK = drawn_qkv()
    v_BHSK = v_BHSK.at[1, 2, 7, 5].set(BAD[bad])
    for the_mask in (None, mask.everything):
        y_BHNK, _ = explicit.attention(q_BHNK, k_BHSK, v_BHSK, mask=the_mask, scale=0.5)
        assert not np.isfinite(y_BHNK[1, 2, :, 5]).any()
        assert np.isfinite(y_BHNK[0]).all()


# ------------------------------------------------------------------------------------------------- multi-head, values


def drawn_params(name: str, bias: bool) -> dict:
    values = cases.drawn(lambda key: value.low_rank.init(key, H=H, K=K, D=D, M=1, bias=bias), seed=1)
    return {"score": cases.score_params(name, bias), "value": values}


def fast(name: str, params: dict, x_BND, x_BSD, the_mask, scale: str):
    design = cases.parts(score=cases.SCORES[name], scale=score.SCALES[scale]).attention
    return heads.cross_attention(params, x_BND, parts=design, memory=block.Memory(x_BSD, the_mask))[:2]


@pytest.mark.parametrize(
    ("name", "bias", "the_mask", "scale"),
    [*itertools.product(cases.SCORES, [True, False], MASKS, ["1/sqrt(K)"])]
    + [*itertools.product(cases.SCORES, [True], ["causal"], ["1/sqrt(D)", "1"])],
)
@cases.float64()
def test_multi_head_attention_equals_the_reference(name, bias, the_mask, scale):
    params, x_BND, x_BSD = drawn_params(name, bias), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    y_BND, A_BHNS = fast(name, params, x_BND, x_BSD, MASKS[the_mask], scale)
    for b in range(B):
        X_query, X_key = translate.columns(x_BND[b]), translate.columns(x_BSD[b])
        Y, A = translate.attend(name, params, X_key, X_query, scale=scale, allowed=paper_allowed(the_mask, b))
        cases.close(y_BND[b], Y.T)
        for h in range(A_BHNS.shape[1]):
            cases.close(A_BHNS[b, h], A[h].T)


@cases.float64()
def test_full_rank_low_rank_and_concatenated_heads_are_the_same():
    """E8 with V_h = U_h U_{v,h} = E9 = E10 with Omega_c = [U_1 ... U_H] = the code."""
    params, x_BND = drawn_params("asymmetric", False), cases.normal(1, 1, N, D)
    y_BND, _ = fast("asymmetric", params, x_BND, x_BND, None, "1/sqrt(K)")
    X, (U, U_v) = translate.columns(x_BND[0]), (np.asarray(params["value"][key]) for key in ("Uo_HDK", "Uv_HKD"))
    A = translate.weights("asymmetric", params["score"], X, X, scale="1/sqrt(K)", allowed=None, heads=H)
    Omega_c = np.concatenate(list(U), axis=1)
    cases.close(y_BND[0], reference.multi_head(X, [reference.product(U[h], U_v[h]) for h in range(H)], A).T)
    cases.close(y_BND[0], reference.low_rank_multi_head(X, U, U_v, A).T)
    cases.close(y_BND[0], reference.concatenated_multi_head(X, Omega_c, U_v, A).T)


@cases.float64()
def test_multi_head_attention_in_the_rows_of_seeds_002_and_004():
    params, x_BND = drawn_params("asymmetric", False), cases.normal(1, 1, N, D)
    Uq_HKD, Uk_HKD, Uv_HKD, Uo_HDK = (
        np.asarray(params[part][key])
        for part, key in (("score", "Uq_HKD"), ("score", "Uk_HKD"), ("value", "Uv_HKD"), ("value", "Uo_HDK"))
    )
    y_BND, _ = fast("asymmetric", params, x_BND, x_BND, None, "1/sqrt(K)")
    Q, K_, V = ([U.T for U in U_HKD] for U_HKD in (Uq_HKD, Uk_HKD, Uv_HKD))
    O = np.concatenate(list(Uo_HDK), axis=1)
    cases.close(y_BND[0], reference.row_multi_head(np.asarray(x_BND[0]), Q, K_, V, O))
    q_BHNK, k_BHSK = score.asymmetric.apply(params["score"], x_BND, x_BND)
    y_BHNK, _ = explicit.attention(q_BHNK, k_BHSK, value.low_rank.apply(params["value"], x_BND), mask=None, scale=1.0)
    for h in range(H):
        cases.close(y_BHNK[0, h], reference.row_attention(np.asarray(x_BND[0]), Q[h], K_[h], V[h]))


def test_float32_is_close_to_float64():
    arguments = drawn_params("asymmetric", True), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    narrow, _ = fast("asymmetric", *arguments, mask.causal, "1/sqrt(K)")
    with cases.float64():
        wide, _ = fast("asymmetric", *cases.wide(arguments), mask.causal, "1/sqrt(K)")
    assert narrow.dtype == np.float32 and wide.dtype == np.float64
    cases.close(narrow, wide, 1e-5)


def test_values_keep_their_dtype():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), drawn_params("asymmetric", True))
    x_BND = cases.normal(1, B, N, D).astype(jnp.bfloat16)
    y_BND, A_BHNS = fast("asymmetric", params, x_BND, x_BND, mask.causal, "1/sqrt(K)")
    assert y_BND.dtype == jnp.bfloat16 and A_BHNS.dtype == jnp.float32


def test_initial_values_and_output_projections():
    """Uv has unit variance; U_h starts at 1/sqrt(2 M H K); no two alike; biases zero; each as without biases."""
    sizes = dict(H=3, K=41, D=97, M=7)
    params = value.low_rank.init(jax.random.key(0), bias=True, **sizes)
    assert float(params["Uv_HKD"].std()) == pytest.approx(97**-0.5, rel=0.05)
    assert float(params["Uo_HDK"].std()) == pytest.approx((2 * 7 * 3 * 41) ** -0.5, rel=0.05)
    assert not params["bv_HK"].any() and not params["bo_D"].any()
    assert abs(np.corrcoef(params["Uv_HKD"].ravel(), params["Uo_HDK"].swapaxes(1, 2).ravel())[0, 1]) < 0.05
    for key, leaf in value.low_rank.init(jax.random.key(0), bias=False, **sizes).items():
        np.testing.assert_array_equal(leaf, params[key])
