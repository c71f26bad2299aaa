"""Inputs for the tests of tfm: sizes that are distinct primes, random arrays and parameters, float64, small models."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
import reference

from tfm import block as blocks, embed as embeds, head as heads, mlp, norm, position, transformer
from tfm.attention import (
    explicit,
    heads as attentions,
    mask as masks,
    relative_position,
    score,
    value,
)

B, M, H, N, S, K, D, F, W, C = 2, 3, 5, 7, 11, 13, 17, 19, 23, 29
ANY_N = np.array([9, 2, 5, 2, 0, 31, 7])  # N unordered positions, one of them twice
ANY_BN = np.stack([ANY_N, (3 * ANY_N + 1) % 37])
SCORES = {"none": score.none, "tied": score.tied, "asymmetric": score.asymmetric}
NORMS = {"token": norm.token, "token_plain": norm.token_plain}
MLPS = {"relu": mlp.relu, "gelu": mlp.gelu}


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Context manager and decorator: new arrays have 64 bits. (JAX 0.7 has enable_x64 in jax.experimental only.)"""
    enable_x64 = getattr(jax, "enable_x64", None)
    if enable_x64 is None:
        from jax.experimental import enable_x64
    with enable_x64(True):
        yield


def normal(seed: int, *shape: int, std: float = 1.0) -> jax.Array:
    """Draw normal numbers in the current precision."""
    return jax.device_put(std * np.random.default_rng(seed).standard_normal(shape))  # asarray compiles a program


def draw_params(init: Callable[[jax.Array], dict], seed: int = 0, std: float = 0.3) -> dict:
    """Return a tree with the shapes of `init(key)` and normal numbers on every leaf: no bias is 0 and no gain is 1."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(init, jax.random.key(0)))
    return jax.tree.unflatten(tree, [normal(1000 * seed + i, *leaf.shape, std=std) for i, leaf in enumerate(leaves)])


def to_float64(tree):
    """Convert a tree to float64. Call it inside `float64`, but draw with JAX before: there JAX draws other numbers."""
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf, np.float64)), tree)


def assert_close(fast, slow, tolerance: float = 1e-10) -> None:
    """Assert equality up to `tolerance`, absolute and relative to the largest number. The default suits float64."""
    fast, slow = np.asarray(fast), np.asarray(slow)
    assert fast.shape == slow.shape, f"{fast.shape} is not {slow.shape}"
    np.testing.assert_allclose(fast, slow, rtol=tolerance, atol=tolerance * max(1.0, np.abs(slow).max()))


def assert_trees_close(result, expected, tolerance: float = 1e-10) -> None:
    """Assert that the trees are equal, leaf by leaf, up to the tolerance of `assert_close`."""
    jax.tree.map(lambda fast, slow: assert_close(fast, slow, tolerance), result, expected)


def spec(**changes) -> blocks.Spec:
    """Return the spec of GPT-2's block with these changes to its fields or to the fields of its attention."""
    defaults = dict(score=score.asymmetric, value=value.low_rank, relative_position=relative_position.none, H=H)
    defaults |= dict(attend=explicit.attention, scale=score.SCALES["1/sqrt(K)"], cap=0.0)
    attention = attentions.Spec(**{name: changes.pop(name, default) for name, default in defaults.items()})
    return blocks.Spec(attention, **(dict(norm=norm.token, mlp=mlp.gelu, order=blocks.ORDERS["pre_norm"]) | changes))


def self_attention(params, x_BND, *, spec: attentions.Spec, cache=None, **call) -> tuple:
    """Return (y_BND, A_BHNS, keys and values)."""
    call, aux = attentions.Call(cache=cache and {"self": cache}, keep=True, **call), collections.defaultdict(dict)
    y_BND = attentions.self_attention(params, x_BND, spec, call, aux)
    return y_BND, aux["look"]["A"], aux["cache"]["self"]


def cross_attention(params, x_BND, *, spec: attentions.Spec, cache=None, **call) -> tuple:
    """Return (y_BND, A_BHNS, keys and values of the memory)."""
    params = {f"{name}_cross": leaves for name, leaves in params.items()}
    call, aux = attentions.Call(cache=cache and {"cross": cache}, keep=True, **call), collections.defaultdict(dict)
    y_BND = attentions.cross_attention(params, x_BND, spec, call, aux)
    return y_BND, aux["look"]["A_cross"], aux["cache"]["cross"]


def apply_model(params, inputs, *, spec: transformer.Spec, **call) -> tuple:
    """Call transformer.apply with an attention call that has these fields."""
    return transformer.apply(params, inputs, spec, attentions.Call(**call))


class Model(NamedTuple):
    """`init(key) -> params`, `apply(params, inputs, mask=...) -> logits`, and its spec."""

    init: Callable
    apply: Callable
    spec: transformer.Spec


def model(
    *, position=position.learned, head=heads.next_word, outputs: dict | None = None, bias=True, sizes=None, **changes
) -> Model:
    """Return a token model with the sizes above. It scans over its layers, which compiles fastest.

    changes: fields of the block's spec, or final_norm, class_token, tied_output.
    """
    shape = dict(M=M, D=D, N=N, H=H, K=K, F=F) | (sizes or {})
    fields = (*blocks.Spec._fields, *attentions.Spec._fields)
    block_spec = spec(H=shape["H"], **{name: changes.pop(name) for name in fields if name in changes})
    embed = embeds.words._replace(init=functools.partial(embeds.words.init, W=W))
    output = head._replace(init=functools.partial(head.init, **(outputs or {"W": W})))
    model_spec = transformer.Spec(embed, position, block_spec, output, unroll=1)

    def init(key: jax.Array) -> dict:
        return transformer.init(key, spec=model_spec, bias=bias, **(dict(final_norm=True) | changes | shape))

    @functools.partial(jax.jit, static_argnames="mask")
    def apply(params: dict, w_BN: jax.Array, *, mask=None):
        return apply_model(params, w_BN, mask=mask, spec=model_spec)[0]

    return Model(init, apply, model_spec)


def draw_token_ids(seed: int = 0, *, n: int = N, b: int = B) -> jax.Array:
    """Draw token ids w_BN."""
    return jax.device_put(np.random.default_rng(seed).integers(0, W, (b, n)))


# Masks by name, as the code and as the paper write them

VALID_BS = np.arange(S)[None, :] < np.array([S, 8])[:, None]  # the second sequence ends with three padding tokens
VALID_BS[0, 2] = False
MASKS = {"none": None, "causal": masks.causal, "padding": masks.padding(VALID_BS)}
MASKS |= {"both": masks.both(masks.causal, MASKS["padding"])}


def paper_allowed(name: str, b: int):
    """Return the paper's mask [n', n] of sequence b."""
    if name == "none":
        return None
    allowed = reference.upper_triangular(S, N) if name in ("causal", "both") else np.ones((S, N))
    return allowed * VALID_BS[b][:, None] if name in ("padding", "both") else allowed
