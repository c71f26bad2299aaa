"""What a mask hides reaches no average, be it NaN, and what it shows does: in every way of computing attention."""

import functools
import itertools
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import B, H, K, N, S

from tfm import attention, kernels
from tfm.attention import explicit, flash, mask, nan_guard, relative_position

WAYS = attention.IMPLEMENTATIONS | {"flash": functools.partial(flash.attention, queries=4, keys=3)}
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
PLACES = {"key": (1,), "value": (2,), "both": (1, 2)}
PADDING = mask.padding(jnp.ones((B, S), bool).at[1, 7].set(False))
# They hide key 7 of sequence 1: from the first queries if causal, from all if it is padding.
MASKS = {"causal": mask.causal, "padding": PADDING, "both": mask.both(mask.causal, PADDING)}


def drawn_qkv() -> list[jax.Array]:
    return [cases.normal(i, B, H, length, K) for i, length in enumerate((N, S, S))]


def sees(name: str) -> jax.Array:
    """Which queries may see key 7 of sequence 1: (B, N)."""
    return jnp.broadcast_to(mask.dense(MASKS[name], N=N, S=S), (B, N, S))[:, :, 7].at[0].set(False)


@jax.jit
def averages_and_gradients(qkv: list) -> dict:
    """By way and mask: the gradient of the outputs of those queries that do not see the bad key, and y and A."""

    def loss(qkv: list, way: str, name: str) -> tuple:
        y_BHNK, A_BHNS = nan_guard.guarded(WAYS[way])(*qkv, mask=MASKS[name], scale=0.5)
        return jnp.where(sees(name)[:, None, :, None], 0.0, jnp.sin(y_BHNK)).sum(), (y_BHNK, A_BHNS)

    both = itertools.product(WAYS, MASKS)
    return {(way, name): jax.grad(loss, has_aux=True)(qkv, way, name) for way, name in both}


@pytest.mark.parametrize(("bad", "place"), [*itertools.product(BAD, PLACES)])
def test_nan_and_infinity_stay_behind_the_mask(bad, place):
    clean = drawn_qkv()
    dirty = [x.at[1, :, 7, 5].set(BAD[bad]) if i in PLACES[place] else x for i, x in enumerate(clean)]
    expected = averages_and_gradients(clean)
    for (way, name), (gradient, (y_BHNK, A_BHNS)) in averages_and_gradients(dirty).items():
        assert sees(name).any() == (name == "causal")
        clean_gradient, (clean_BHNK, clean_A_BHNS) = expected[way, name]
        hidden = np.broadcast_to(~sees(name)[:, None, :, None], y_BHNK.shape)
        np.testing.assert_array_equal(np.isfinite(y_BHNK), hidden, err_msg=f"{way}, {name}")
        np.testing.assert_array_equal(np.asarray(y_BHNK)[hidden], np.asarray(clean_BHNK)[hidden])
        if way == "explicit":
            np.testing.assert_array_equal(np.asarray(A_BHNS)[hidden[..., 0]], np.asarray(clean_A_BHNS)[hidden[..., 0]])
        jax.tree.map(np.testing.assert_array_equal, gradient, clean_gradient)


def test_of_many_keys_the_mask_is_asked_block_by_block():
    """Also where every sequence stands at its own positions; 11 keys are no multiple of 4."""
    q_BHNK, k_BHSK, v_BHSK = drawn_qkv()
    k_BHSK, v_BHSK = k_BHSK.at[1, 0, 7, 2].set(np.nan), v_BHSK.at[0, 1, 10, 3].set(np.inf).at[0, 0, 2, 0].set(np.nan)
    for n in (None, jnp.array([[9, 2, 5, 1, 0, 10, 7], [6, 7, 8, 3, 4, 10, 9]])):
        for name, the_mask in MASKS.items():
            call = dict(mask=the_mask, scale=0.5, n=n)
            expected, _ = nan_guard.guarded(explicit.attention)(q_BHNK, k_BHSK, v_BHSK, **call)
            with mock.patch.object(nan_guard, "KEYS", 4):
                found, _ = jax.jit(functools.partial(nan_guard.guarded(WAYS["flash"]), **call))(q_BHNK, k_BHSK, v_BHSK)
                sound, _ = jax.jit(functools.partial(nan_guard.guarded(WAYS["flash"]), **call))(*drawn_qkv())
            np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
            assert np.isnan(found).any() and np.isfinite(found).any() and np.isfinite(sound).all()


@pytest.mark.parametrize("bad", BAD)
def test_nan_and_infinity_reach_those_who_may_see_them(bad):
    q_BHNK, k_BHSK, v_BHSK = drawn_qkv()
    v_BHSK = v_BHSK.at[1, 2, 7, 5].set(BAD[bad])
    for the_mask in (None, mask.everything):
        y_BHNK, _ = nan_guard.guarded(explicit.attention)(q_BHNK, k_BHSK, v_BHSK, mask=the_mask, scale=0.5)
        assert not np.isfinite(y_BHNK[1, 2, :, 5]).any() and np.isfinite(y_BHNK[0]).all()


@pytest.mark.parametrize("shared", [False, True])
@cases.float64()
def test_attention_of_one_query_is_the_explicit_one_whatever_is_hidden(shared):
    """Of the newest words of a KV cache: keys and values are searched only where an answer is not finite."""
    q_BHNK = cases.normal(0, 2, 3, 1, 5)
    k_BHSK, v_BHSV = (cases.normal(i, 2, 1 if shared else 3, 7, K) for i, K in ((1, 5), (2, 11)))
    n, bias = jnp.array([[3], [5]]), jax.tree_util.Partial(functools.partial(relative_position.alibi.bias, H=3), {})
    call = dict(mask=mask.both(mask.causal, mask.window(3)), scale=0.3, bias=bias, n=n)
    plain = functools.partial(nan_guard.guarded(explicit.attention), **call)
    newest = jax.jit(functools.partial(kernels.few_queries, plain, functools.partial(explicit.by_keys, **call)))
    expected_BHNV, A_BHNS = explicit.attention(q_BHNK, k_BHSK, v_BHSV, **call)
    hidden = (k_BHSK.at[0, 0, 6].set(jnp.nan), v_BHSV.at[0, 0, 0].set(jnp.nan).at[1, 0, 6].set(jnp.inf))
    for kv in ((k_BHSK, v_BHSV), hidden):
        y_BHNV, found_BHNS = newest(q_BHNK, *kv)
        cases.close(y_BHNV, expected_BHNV, 1e-12)
        cases.close(found_BHNS, A_BHNS, 1e-12)
    y_BHNV, _ = newest(q_BHNK, k_BHSK, v_BHSV.at[0, 0, 2, 1].set(jnp.nan))
    assert np.isnan(y_BHNV[0]).all()
    cases.close(y_BHNV[1], expected_BHNV[1], 1e-12)
