"""What a mask hides reaches no average, be it NaN, and what it shows does: in every way of computing attention."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import B, D, H, K, N, S
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh as meshes
from tfm import attention, kernels, layout as layouts
from tfm.attention import explicit, flash, heads, mask, nan_guard, relative_position, score, value

BLOCKS = functools.partial(flash.attention, queries=4, keys=3)
WAYS, PLATFORM = attention.IMPLEMENTATIONS | {"flash": BLOCKS, "chunked": flash.attention}, {"chunked": "tpu"}
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
PLACES = {"key": (1,), "value": (2,), "both": (1, 2)}
# Key 7 of sequence 1 is hidden from the first queries, and what is padding from all.
MASK = mask.both(mask.causal, mask.padding(jnp.ones((B, S), bool).at[0, 5].set(False)))


def drawn_qkv() -> list[jax.Array]:
    return [cases.normal(i, B, H, length, K) for i, length in enumerate((N, S, S))]


def sees(allowed_BNS: jax.Array) -> np.ndarray:
    """Which queries may see key 7 of sequence 1 or key 5 of sequence 0: (B, N)."""
    return np.stack([allowed_BNS[0, :, 5], allowed_BNS[1, :, 7]])


@jax.jit
def averages_and_gradients(qkv: list) -> dict:
    """By way: the gradient of the outputs of those queries that do not see a bad key, and y and A."""
    seeing_BN = jnp.stack([x[:, s] for x, s in zip(cases.dense(MASK, N=N, S=S), (5, 7), strict=True)])

    def loss(qkv: list, way: str) -> tuple:
        y_BHNK, A_BHNS = nan_guard.guarded(WAYS[way], platform=PLATFORM.get(way, ""))(*qkv, mask=MASK, scale=0.5)
        return jnp.where(seeing_BN[:, None, :, None], 0.0, jnp.sin(y_BHNK)).sum(), (y_BHNK, A_BHNS)

    return {way: jax.grad(loss, has_aux=True)(qkv, way) for way in WAYS}


@functools.cache
def of_clean_ones() -> tuple[list, np.ndarray, dict]:
    """Queries, keys and values, which queries see a bad key, and what is computed without any."""
    clean = [np.array(x) for x in drawn_qkv()]
    return clean, sees(cases.dense(MASK, N=N, S=S)), jax.device_get(averages_and_gradients(clean))


@pytest.mark.parametrize(("bad", "place"), [("nan", "key"), ("inf", "value"), ("-inf", "both")])
def test_nan_and_infinity_stay_behind_the_mask(bad, place):
    clean, seeing_BN, expected = of_clean_ones()
    dirty = [x.copy() for x in clean]
    for i in PLACES[place]:
        dirty[i][[0, 1], 2, [5, 7], 5] = BAD[bad]  # one number of one head
    assert not seeing_BN[0].any() and seeing_BN[1].any() and not seeing_BN[1].all()
    for way, (gradient, (y_BHNK, A_BHNS)) in jax.device_get(averages_and_gradients(dirty)).items():
        clean_gradient, (clean_BHNK, clean_A_BHNS) = expected[way]
        hidden = np.broadcast_to(~seeing_BN[:, None, :, None], y_BHNK.shape)
        np.testing.assert_array_equal(np.isfinite(y_BHNK), hidden, err_msg=way)
        np.testing.assert_array_equal(y_BHNK[hidden], clean_BHNK[hidden])
        if way == "explicit":
            np.testing.assert_array_equal(A_BHNS[hidden[..., 0]], clean_A_BHNS[hidden[..., 0]])
        cases.agree(gradient, clean_gradient, 0)


@pytest.mark.parametrize("n", [None, jnp.array([[9, 2, 5, 1, 0, 10, 7], [6, 7, 8, 3, 4, 10, 9]])])
def test_of_many_keys_the_mask_is_asked_block_by_block(n):
    """Also where every sequence stands at its own positions; 11 keys are no multiple of 4."""
    clean, dirty = ([np.array(x) for x in drawn_qkv()] for _ in range(2))
    dirty[1][1, 0, 7, 2] = dirty[2][0, 0, 5, 0] = np.nan
    dirty[2][0, 1, 10, 3] = np.inf
    ways = nan_guard.guarded(explicit.attention), nan_guard.guarded(BLOCKS, keys=4)
    run = jax.jit(lambda qkv: [compute(*qkv, mask=MASK, scale=0.5, n=n)[0] for compute in ways])
    expected, found = run(dirty)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert np.isnan(found).any() and np.isfinite(found).any()
    assert np.isfinite(run(clean)[1]).all()


@jax.jit
def of_all_keys(qkv: list) -> list[jax.Array]:
    """The averages where nothing is hidden."""
    compute = nan_guard.guarded(explicit.attention)
    return [compute(*qkv, mask=the_mask, scale=0.5)[0] for the_mask in (None, mask.prefix(S))]


@pytest.mark.parametrize("bad", BAD)
def test_nan_and_infinity_reach_those_who_may_see_them(bad):
    qkv = [np.array(x) for x in drawn_qkv()]
    qkv[2][1, 2, 7, 5] = BAD[bad]
    for y_BHNK in jax.device_get(of_all_keys(qkv)):
        assert not np.isfinite(y_BHNK[1, 2, :, 5]).any() and np.isfinite(y_BHNK[0]).all()


@pytest.mark.parametrize("shared", [False, True])
@cases.float64()
def test_attention_of_one_query_is_the_explicit_one_whatever_is_hidden(shared):
    """Of the newest words of a KV cache: keys and values are searched only where an answer is not finite."""
    q_BHNK = cases.normal(0, 2, 3, 1, 5)
    k_BHSK, v_BHSV = (np.array(cases.normal(i, 2, 1 if shared else 3, 7, K)) for i, K in ((1, 5), (2, 11)))
    n, bias = jnp.array([[3], [5]]), jax.tree_util.Partial(functools.partial(relative_position.alibi.bias, H=3), {})
    call = dict(mask=mask.both(mask.causal, mask.window(3)), scale=0.3, bias=bias, n=n)
    plain = functools.partial(nan_guard.guarded(explicit.attention), **call)
    by_keys = functools.partial(explicit.attention, by_keys=True, **call)
    newest = jax.jit(functools.partial(kernels.few_queries, plain, by_keys))
    expected_BHNV, A_BHNS = jax.device_get(
        jax.jit(functools.partial(explicit.attention, **call))(q_BHNK, k_BHSK, v_BHSV)
    )
    hidden = k_BHSK.copy(), v_BHSV.copy()
    hidden[0][0, 0, 6] = hidden[1][0, 0, 0] = np.nan
    hidden[1][1, 0, 6] = np.inf
    for kv in ((k_BHSK, v_BHSV), hidden):
        cases.agree(newest(q_BHNK, *kv), (expected_BHNV, A_BHNS), 1e-12)
    v_BHSV[0, 0, 2, 1] = np.nan
    y_BHNV = np.asarray(newest(q_BHNK, k_BHSK, v_BHSV)[0])
    assert np.isnan(y_BHNV[0]).all()
    cases.close(y_BHNV[1], expected_BHNV[1], 1e-12)


T, AT = 8, 5  # tokens, and the place of one of them in sequence 1 whose features are NaN
NEAR = mask.both(mask.causal, mask.window(2))
CALLS = {  # the way, the mask, relative positions, how many tokens come first (KV cache), devices of a ring
    "explicit": (explicit.attention, NEAR, "relative", 0, 1),
    "padding": (flash.attention, mask.padding(jnp.ones((2, T), bool).at[1, AT].set(False)), "buckets", 0, 1),
    "cached": (flash.attention, NEAR, "relative", 6, 1),
    "ring": (BLOCKS, NEAR, "relative", 0, 2),
}


@pytest.mark.parametrize("name", CALLS)
@cases.float64()
def test_a_token_of_nan_reaches_only_those_who_may_see_it(name):
    compute, the_mask, variant, first, devices = CALLS[name]
    positions, sizes = getattr(relative_position, variant), dict(H=H, K=K, D=D)
    parts = cases.parts(compute=compute, relative_position=positions).attention
    params = {
        "score": cases.drawn(lambda key: score.asymmetric.init(key, **sizes, bias=True)),
        "value": cases.drawn(lambda key: value.low_rank.init(key, **sizes, M=1, bias=True)),
        "relative_position": cases.drawn(lambda key: positions.init(key, H=H, K=K, N=T)),
    }
    over = layouts.Layout(sequence="sequence") if devices > 1 else layouts.ONE
    attend = functools.partial(heads.self_attention, params, parts=parts, mask=the_mask, layout=over)

    def run(x_BND):
        if not first:
            return attend(x_BND, n=layouts.positions(over, x_BND.shape[1]))[0]
        empty = {name: jnp.full((2, H, T, K), jnp.nan) for name in ("k_BHSK", "v_BHSV")}  # what no token has filled yet
        y_BND, _, cache = attend(x_BND[:, :first], n=jnp.arange(first), cache=empty)
        return jnp.concatenate([y_BND, attend(x_BND[:, first:], n=jnp.arange(first, T), cache=cache)[0]], axis=1)

    if devices > 1:
        tokens, mesh = P(None, "sequence"), meshes.make(data=1, sequence=devices)
        run = meshes.sharded(run, mesh, in_specs=tokens, out_specs=tokens)
    run, order = jax.jit(run), np.argsort(np.arange(T) % devices, kind="stable")
    clean = np.array(cases.normal(1, 2, T, D))
    dirty = clean.copy()
    dirty[1, AT] = np.nan
    expected, found = (jax.device_get(run(x_BND[:, order])) for x_BND in (clean, dirty))
    seeing_BN = np.broadcast_to(cases.dense(the_mask, N=T, S=T), (2, T, T))[:, :, AT] & [[False], [True]]
    assert seeing_BN.any() == (name != "padding") and np.isfinite(expected).all()
    seeing_BN[1, AT] = True  # by its own query
    np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(seeing_BN[:, order, None], found.shape))
    cases.close(np.where(np.isnan(found), expected, found), expected, 1e-12)
