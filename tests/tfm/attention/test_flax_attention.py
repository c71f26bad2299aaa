"""Our attention and Flax's own, nnx and linen, with the same weights: self, cross, causal, and with a cache."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tfm.attention import (
    explicit,
    heads as attentions,
    mask as masks,
    relative_position,
    score,
    value,
)

B, N, S, D, H, K = 2, 5, 7, 12, 3, 4
SPEC = attentions.Spec(
    score.asymmetric, value.low_rank, relative_position.none, explicit.attention, score.SCALES["1/sqrt(K)"], H
)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def to_ours(flax_params: dict, suffix: str = "") -> dict:
    """Return Flax's weights under our names: its kernels map the last axis of the input, ours the first of the name."""
    leaves = {name: flax_params[name] for name in ("query", "key", "value", "out")}
    kernel = {name: np.asarray(leaf["kernel"]) for name, leaf in leaves.items()}
    bias = {name: np.asarray(leaf["bias"]) for name, leaf in leaves.items()}
    kernel_HKD = {name: np.moveaxis(kernel[name], 0, 2) for name in ("query", "key", "value")}
    scores = {"Uq_HKD": kernel_HKD["query"], "Uk_HKD": kernel_HKD["key"]}
    scores |= {"bq_HK": bias["query"], "bk_HK": bias["key"]}
    values = {"Uv_HKD": kernel_HKD["value"], "bv_HK": bias["value"]}
    values |= {"Uo_HDK": kernel["out"].swapaxes(1, 2), "bo_D": bias["out"]}
    return {f"score{suffix}": scores, f"value{suffix}": values, "relative_position": {}}


def make_nnx(**options):
    """Return an nnx attention with random weights and biases, and these as a dictionary."""
    module = nnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), **({"decode": False} | options))
    params = {}
    for seed, name in enumerate(("query", "key", "value", "out")):
        layer = getattr(module, name)
        layer.bias[...] = draw(*layer.bias[...].shape, seed=seed)
        params[name] = {"kernel": layer.kernel[...], "bias": layer.bias[...]}
    return module, params


def make_linen():
    """Return a function (x_q, x_kv, mask) of a linen attention with random weights and biases, and these."""
    module = linen.MultiHeadDotProductAttention(num_heads=H)
    params = jax.eval_shape(module.init, jax.random.key(0), draw(B, N, D), draw(B, S, D))["params"]
    params = {
        name: {leaf: draw(*params[name][leaf].shape, seed=seed) for leaf in ("kernel", "bias")}
        for seed, name in enumerate(sorted(params))
    }
    return jax.jit(lambda q, kv, mask: module.apply({"params": params}, q, kv, mask=mask)), params


def flax_attention(library):
    if library == "linen":
        return make_linen()
    module, params = make_nnx()
    return jax.jit(lambda q, kv, mask: module(q, kv, mask=mask)), params


@functools.partial(jax.jit, static_argnums=2)
def self_attention(params, x_BND, call):
    return attentions.self_attention(params, x_BND, SPEC, call, collections.defaultdict(dict))


@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention_equals_flax(library, is_causal):
    attend, params = flax_attention(library)
    x_BND = draw(B, N, D)
    expected = attend(x_BND, x_BND, np.tri(N, dtype=bool)[None, None] if is_causal else None)
    call = attentions.Call(mask=masks.causal if is_causal else None)
    y_BND = self_attention(to_ours(params), x_BND, call)
    np.testing.assert_allclose(y_BND, expected, atol=1e-5)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_cross_attention_equals_flax(library):
    attend, params = flax_attention(library)
    x_BND, x_BSD = draw(B, N, D), draw(B, S, D, seed=1)
    valid_BS = np.arange(S) < [[4], [7]]
    expected = attend(x_BND, x_BSD, np.broadcast_to(valid_BS[:, None, None], (B, 1, N, S)))

    @jax.jit
    def compute(params, x_BND, x_BSD, valid_BS):
        call = attentions.Call(memory=attentions.Memory(x_BSD, masks.padding(valid_BS)))
        return attentions.cross_attention(params, x_BND, SPEC, call, collections.defaultdict(dict))

    y_BND = compute(to_ours(params, "_cross"), x_BND, x_BSD, valid_BS)
    np.testing.assert_allclose(y_BND, expected, atol=1e-5)


def test_a_cache_equals_that_of_flax_token_by_token():
    module, params = make_nnx(decode=True)
    module.init_cache((B, N, D))
    x_BND, ours = draw(B, N, D), to_ours(params)
    cache = {"self": {name: np.zeros((B, H, N, K), np.float32) for name in ("k_BHSK", "v_BHSV")}}

    @jax.jit
    def step(params, x_B1D, n, cache):
        call, aux = attentions.Call(mask=masks.causal, n=n, cache=cache), collections.defaultdict(dict)
        return attentions.self_attention(params, x_B1D, SPEC, call, aux), aux["cache"]

    flax_step = nnx.jit(lambda module, x_B1D: module(x_B1D))
    for n in range(N):
        token_B1D = np.asarray(x_BND)[:, n : n + 1]
        expected = flax_step(module, token_B1D)
        y_B1D, cache = step(ours, token_B1D, np.array([n]), cache)
        np.testing.assert_allclose(y_B1D, expected, atol=1e-5)
