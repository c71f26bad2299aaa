"""Our attention and Flax's own, nnx and linen, with the same weights: self, cross, causal, and with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from tfm.attention import (
    explicit,
    heads as attention_heads,
    mask as masks,
    relative_position,
    score,
    spec as attentions,
    value,
)

B, N, S, D, H, K = 2, 5, 7, 12, 3, 4
SPEC = attentions.Spec(
    score.asymmetric, value.low_rank, relative_position.none, explicit.attention, score.SCALES["1/sqrt(K)"], H
)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def to_ours(flax_params: dict, suffix: str = "") -> dict:
    """Return Flax's weights under our names: its kernels map the last axis of the input, ours the first of the name."""
    leaves = {name: flax_params[name] for name in ("query", "key", "value", "out")}
    kernel = {name: jnp.asarray(leaf["kernel"]) for name, leaf in leaves.items()}
    bias = {name: jnp.asarray(leaf["bias"]) for name, leaf in leaves.items()}
    kernel_HKD = {name: jnp.moveaxis(kernel[name], 0, 2) for name in ("query", "key", "value")}
    scores = {"Uq_HKD": kernel_HKD["query"], "Uk_HKD": kernel_HKD["key"]}
    scores |= {"bq_HK": bias["query"], "bk_HK": bias["key"]}
    values = {"Uv_HKD": kernel_HKD["value"], "bv_HK": bias["value"]}
    values |= {"Uo_HDK": jnp.swapaxes(kernel["out"], 1, 2), "bo_D": bias["out"]}
    return {f"score{suffix}": scores, f"value{suffix}": values, "relative_position": {}}


KERNELS = {"query": (D, H, K), "key": (D, H, K), "value": (D, H, K), "out": (H, K, D)}
BIASES = {"query": (H, K), "key": (H, K), "value": (H, K), "out": (D,)}
PARAMS = {
    name: {"kernel": draw(*KERNELS[name], seed=seed) / D**0.5, "bias": draw(*BIASES[name], seed=seed + 9)}
    for seed, name in enumerate(KERNELS)
}


def make_nnx(params: dict, **options) -> nnx.MultiHeadAttention:
    """Return an nnx attention with these weights and biases."""
    module = nnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), **({"decode": False} | options))
    for name, leaves in params.items():
        layer = getattr(module, name)
        layer.kernel[...], layer.bias[...] = leaves["kernel"], leaves["bias"]
    return module


LINEN = linen.MultiHeadDotProductAttention(num_heads=H)
LIBRARIES = {
    "nnx": lambda params, *qkv, mask: make_nnx(params)(*qkv, mask=mask),
    "linen": lambda params, *call, mask: linen.MultiHeadDotProductAttention(H).apply(
        {"params": params}, *call, mask=mask
    ),
}


def test_self_attention_and_cross_attention_equal_flax():
    valid_BS = np.arange(S) < [[4], [7]]

    @jax.jit
    def compute_all(params, x_BND, x_BSD, valid_BS):
        def attend_to_self(mask):
            return attention_heads.self_attention(to_ours(params), x_BND, SPEC, attentions.Call(mask=mask))[0]

        memory = attentions.Memory(x_BSD, masks.padding(valid_BS))
        cross = to_ours(params, "_cross"), x_BND, SPEC, attentions.Call(memory=memory)
        ours = [attend_to_self(None), attend_to_self(masks.causal), attention_heads.cross_attention(*cross)[0]]
        causal, padding = linen.make_causal_mask(x_BND[..., 0]), linen.make_attention_mask(jnp.ones((B, N)), valid_BS)
        calls = [(x_BND, x_BND, None), (x_BND, x_BND, causal), (x_BND, x_BSD, padding)]
        return ours, [[attend(params, q, kv, mask=mask) for q, kv, mask in calls] for attend in LIBRARIES.values()]

    ours, expected = compute_all(PARAMS, draw(B, N, D), draw(B, S, D, seed=1), valid_BS)
    for library, results in zip(LIBRARIES, expected, strict=True):
        for y_BND, expected_BND in zip(ours, results, strict=True):
            np.testing.assert_allclose(y_BND, expected_BND, atol=1e-5, err_msg=library)


def test_a_cache_equals_that_of_flax_token_by_token():
    @jax.jit
    def compute_all(params, x_BND):
        module, results = make_nnx(params, decode=True), []
        module.init_cache((B, N, D))
        cache = {"self": {name: jnp.zeros((B, H, N, K)) for name in ("k_BHSK", "v_BHSV")}}
        for n in range(N):
            token_B1D = x_BND[:, n : n + 1]
            call = attentions.Call(mask=masks.causal, n=jnp.array([n]), cache=cache)
            y_B1D, aux = attention_heads.self_attention(to_ours(params), token_B1D, SPEC, call)
            cache = {"self": aux["cache"]}
            results.append((y_B1D, module(token_B1D)))
        return results

    for y_B1D, expected in compute_all(PARAMS, draw(B, N, D)):
        np.testing.assert_allclose(y_B1D, expected, atol=1e-5)
