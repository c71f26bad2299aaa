"""Attention as it is defined: weights and averages (E3, E22) against the slow reference."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import B, H, K, N, S
from mask_cases import MASKS, paper_allowed

from tfm.attention import explicit, mask


def drawn_qkv(seed: int = 0) -> list[jax.Array]:
    return [cases.normal(seed + i, B, H, length, K) for i, length in enumerate((N, S, S))]


@pytest.mark.parametrize("cap", [0.0, 0.9])
@cases.float64()
def test_weights_and_averages_equal_the_reference(cap):
    qkv = q_BHNK, k_BHSK, v_BHSK = drawn_qkv()

    @jax.jit
    def every(*qkv):
        attend = functools.partial(explicit.attention, *qkv, scale=0.3, cap=cap)
        found = {name: attend(mask=the_mask) for name, the_mask in MASKS.items()}
        return found, attend(mask=MASKS["both"], by_keys=True)

    found, by_keys = jax.device_get(every(*qkv))
    cases.agree(by_keys, found["both"])
    for name, b, h in itertools.product(MASKS, range(B), range(H)):
        y_BHNK, A_BHNS = found[name]
        L = 0.3 * reference.naive_logits(np.asarray(k_BHSK[b, h]).T, np.asarray(q_BHNK[b, h]).T)
        L = cap * np.tanh(L / cap) if cap else L
        A = reference.attention_matrix(L, paper_allowed(name, b))
        cases.close(A_BHNS[b, h], A.T)
        cases.close(y_BHNK[b, h], reference.weighted_average(np.asarray(v_BHSK[b, h]).T, A).T)


def test_rows_sum_to_one_and_a_shift_of_all_logits_of_a_query_changes_nothing():
    """Logits and shifts are multiples of 1/64, so that the sums are exact; exp(1000) alone would be infinite."""
    l_BHNS = jnp.round(64 * cases.normal(0, B, H, N, S, std=10.0)) / 64
    shift_BHN1 = jnp.round(64 * cases.normal(1, B, H, N, 1, std=1000.0)) / 64
    for name in ("none", "both"):
        allowed = None if MASKS[name] is None else cases.dense(MASKS[name], N=N, S=S)
        weights = jax.jit(lambda l_BHNS, allowed=allowed: explicit.weights(l_BHNS, allowed))
        A_BHNS = weights(l_BHNS)
        assert A_BHNS.min() >= 0
        np.testing.assert_allclose(A_BHNS.sum(-1), 1, rtol=1e-6)
        np.testing.assert_array_equal(weights(l_BHNS + shift_BHN1), A_BHNS)


def test_bfloat16_queries_and_keys_give_float32_weights():
    qkv = [x.astype(jnp.bfloat16) for x in drawn_qkv()]
    attend = jax.jit(functools.partial(explicit.attention, mask=mask.causal, scale=1.0))
    y_BHNK, A_BHNS = attend(*qkv)
    assert A_BHNS.dtype == jnp.float32 and y_BHNK.dtype == jnp.bfloat16
    with cases.float64():
        exact, A_exact = attend(*cases.wide(qkv))
    cases.close(A_BHNS, A_exact, 1e-5)
    cases.close(y_BHNK.astype(jnp.float32), exact, 2e-2)


def shut(n_N: jax.Array, s_S: jax.Array) -> jax.Array:
    """The causal mask, but query 3 of the first sequence sees nothing."""
    blind_BN = (jnp.arange(B) == 0)[:, None] & (n_N == S - N + 3)[None, :]
    return mask.causal(n_N, s_S) & ~blind_BN[:, :, None]


def test_a_fully_masked_query_gives_zeros_with_zero_gradient():
    """Step by step, and no intermediate number is NaN."""

    def loss(qkv, only):
        y_BHNK, A_BHNS = explicit.attention(*qkv, mask=shut, scale=1.0)
        return jnp.sum(jnp.sin(y_BHNK + 1) * only) + jnp.sum(jnp.sin(A_BHNS + 1) * only), (y_BHNK, A_BHNS)

    the_query = jnp.zeros((B, 1, N, 1)).at[0, :, 3].set(1.0)
    with jax.debug_nans(True):
        weights = the_query, jnp.ones_like(the_query), 1 - the_query
        found = [jax.grad(loss, has_aux=True)(drawn_qkv(), only) for only in weights]
    (of_the_query, (y_BHNK, A_BHNS)), (of_all, _), (of_others, _) = found
    assert not y_BHNK[0, :, 3].any() and not A_BHNS[0, :, 3].any()
    assert y_BHNK[0, :, 2].any() and y_BHNK[1, :, 3].all()
    for zero, whole, rest in zip(of_the_query, of_all, of_others, strict=True):
        assert not zero.any() and jnp.isfinite(whole).all() and whole.any()
        np.testing.assert_array_equal(whole, rest)
