"""Attention by its definition: weights and averages (E3, E22) against the slow reference."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import MASKS, B, H, K, N, S, paper_allowed
from jax.experimental import checkify

from tfm.attention import explicit, mask as masks


def draw_qkv() -> list[jax.Array]:
    return [cases.normal(i, B, H, length, K) for i, length in enumerate((N, S, S))]


@pytest.mark.parametrize("cap", [0.0, 0.9])
@cases.float64()
def test_weights_and_averages_equal_the_reference(cap):
    qkv = q_BHNK, k_BHSK, v_BHSK = draw_qkv()

    @jax.jit
    def compute_all(*qkv):
        attend = functools.partial(explicit.attention, *qkv, scale=0.3, cap=cap)
        last = functools.partial(explicit.attention, q_BHNK[:, :, -1:], *qkv[1:], scale=0.3, cap=cap)
        return {name: (attend(mask=the_mask), last(mask=the_mask)) for name, the_mask in MASKS.items()}

    results, single = ({name: pair[i] for name, pair in jax.device_get(compute_all(*qkv)).items()} for i in (0, 1))
    cases.assert_trees_close(single, jax.tree.map(lambda x: x[:, :, -1:], results))
    for name, b, h in itertools.product(MASKS, range(B), range(H)):
        y_BHNK, A_BHNS = results[name]
        L = 0.3 * reference.naive_logits(np.asarray(k_BHSK[b, h]).T, np.asarray(q_BHNK[b, h]).T)
        A = reference.attention_matrix(cap * np.tanh(L / cap) if cap else L, paper_allowed(name, b))
        cases.assert_close(A_BHNS[b, h], A.T)
        cases.assert_close(y_BHNK[b, h], reference.weighted_average(np.asarray(v_BHSK[b, h]).T, A).T)


def test_logits_in_bfloat16_are_rounded_and_their_exponentials_are_float32():
    """A weight is off by the rounding of q, l and l - max l. With bfloat16 sums, rows would not sum to one."""
    q_BHNK, k_BHSK, v_BHSK = (x.astype(jnp.bfloat16) for x in draw_qkv())

    @jax.jit
    def compute(*qkv):
        l_BHNS = explicit.logits(*qkv[:2], scale=0.3, dtype=jnp.bfloat16)
        wide_BHNS = explicit.logits(*qkv[:2], scale=0.3)
        weights = functools.partial(explicit.weights, allowed=jnp.tri(N, S, S - N, bool))
        return l_BHNS, wide_BHNS, weights(l_BHNS), weights(wide_BHNS), explicit.soft_cap(l_BHNS, 2.0)

    l_BHNS, wide_BHNS, A_BHNS, wide_A_BHNS, capped_BHNS = jax.device_get(compute(q_BHNK, k_BHSK, v_BHSK))
    assert l_BHNS.dtype == jnp.bfloat16 and wide_BHNS.dtype == A_BHNS.dtype == capped_BHNS.dtype == np.float32
    cases.assert_close(np.float32(l_BHNS), wide_BHNS, 2**-7)
    cases.assert_close(A_BHNS, wide_A_BHNS, 2**-6)
    cases.assert_close(A_BHNS.sum(-1), np.ones(A_BHNS.shape[:-1]), 1e-6)
    assert not A_BHNS[..., 0, S - N + 1 :].any()


def test_a_query_without_keys_gives_zeros_and_no_intermediate_nan():
    """Its gradient is zero, and checkify finds no NaN in any step of the computation."""

    def blind_mask(n_N, s_S):  # causal, but query 3 of the first sequence has no keys
        blind_BN = (jnp.arange(B) == 0)[:, None] & (n_N == S - N + 3)[None, :]
        return masks.causal(n_N, s_S) & ~blind_BN[:, :, None]

    def loss(qkv, weight):
        y_BHNK, A_BHNS = explicit.attention(*qkv, mask=blind_mask, scale=1.0)
        return jnp.sum(jnp.sin(y_BHNK + 1) * weight) + jnp.sum(jnp.sin(A_BHNS + 1) * weight), (y_BHNK, A_BHNS)

    gradient = jax.jit(checkify.checkify(jax.grad(loss, has_aux=True), errors=checkify.nan_checks))
    is_blind = np.zeros((B, 1, N, 1), np.float32)
    is_blind[0, :, 3] = 1
    (error, blind), (full_error, full) = (gradient(draw_qkv(), weight) for weight in (is_blind, np.ones_like(is_blind)))
    assert error.get() is None and full_error.get() is None
    (blind_gradient, (y_BHNK, A_BHNS)), (full_gradient, _) = jax.device_get((blind, full))
    assert not y_BHNK[0, :, 3].any() and not A_BHNS[0, :, 3].any() and y_BHNK[1, :, 3].all()
    assert not any(leaf.any() for leaf in blind_gradient) and all(leaf.any() for leaf in full_gradient)
