"""What the tests of the core share: sizes that are distinct primes, random inputs and parameters, 64-bit precision."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from tfm import block, embed, head, mlp, norm, position, transformer
from tfm.attention import explicit, heads, relative_position, score, spec as attentions, value

B, M, H, N, S, K, D, F, W, C = 2, 3, 5, 7, 11, 13, 17, 19, 23, 29
ANY_N = np.array([9, 2, 5, 2, 0, 31, 7])  # N positions in no order, one of them twice
ANY_BN = np.stack([ANY_N, (3 * ANY_N + 1) % 37])
SCORES = {"none": score.none, "tied": score.tied, "asymmetric": score.asymmetric}
NORMS = {"token": norm.token, "token_plain": norm.token_plain}
MLPS = {"relu": mlp.relu, "gelu": mlp.gelu}
POSITIONS = {"learned": position.learned, "sinusoidal": position.sinusoidal, "none": position.none}


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Arrays made inside have 64 bits; also a decorator. (JAX 0.7 has enable_x64 in jax.experimental only.)"""
    enable_x64 = getattr(jax, "enable_x64", None)
    if enable_x64 is None:
        from jax.experimental import enable_x64
    with enable_x64(True):
        yield


def normal(seed: int, *shape: int, std: float = 1.0) -> jax.Array:
    """Normal numbers in the precision of the moment."""
    return jax.device_put(std * np.random.default_rng(seed).standard_normal(shape))  # asarray compiles a program


def drawn(init: Callable[[jax.Array], dict], seed: int = 0, std: float = 0.3) -> dict:
    """A tree as `init(key)` makes it, with normal numbers on every leaf: no bias is zero and no gain is one."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(init, jax.random.key(0)))
    return jax.tree.unflatten(tree, [normal(1000 * seed + i, *leaf.shape, std=std) for i, leaf in enumerate(leaves)])


def wide(tree):
    """The tree in 64 bits; inside `float64` only. (JAX draws other random numbers there, so nothing is drawn again.)"""
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf, np.float64)), tree)


def score_params(name: str, bias: bool) -> dict:
    """Parameters of a score."""
    return drawn(lambda key: SCORES[name].init(key, H=H, K=K, D=D, bias=bias))


def close(fast, slow, tolerance: float = 1e-10) -> None:
    """Equal up to `tolerance`, absolutely or relative to the largest number. For 64-bit numbers unless said."""
    fast, slow = np.asarray(fast), np.asarray(slow)
    assert fast.shape == slow.shape, f"{fast.shape} is not {slow.shape}"
    np.testing.assert_allclose(fast, slow, rtol=tolerance, atol=tolerance * max(1.0, np.abs(slow).max()))


def agree(found, expected, tolerance: float = 1e-10) -> None:
    """Two trees, each leaf close to its other."""
    jax.tree.map(lambda one, other: close(one, other, tolerance), found, expected)


def spec(**changes) -> block.Spec:
    """The spec of a block: GPT-2's, with these changes, also of its attention."""
    own = dict(score=score.asymmetric, value=value.low_rank, relative_position=relative_position.none, H=H)
    own |= dict(attend=explicit.attention, scale=score.SCALES["1/sqrt(K)"], cap=0.0)
    attention = attentions.Spec(**{name: changes.pop(name, part) for name, part in own.items()})
    usual = dict(norm=norm.token, mlp=mlp.gelu, order=block.ORDERS["pre_norm"])
    return block.Spec(attention, **(usual | changes))


def self_attention(params, x_BND, *, spec: attentions.Spec, cache=None, **call) -> tuple:
    """Return (y_BND, A_BHNS, keys and values)."""
    call = attentions.Call(cache=None if cache is None else {"self": cache}, **call)
    y_BND, seen = heads.self_attention(params, x_BND, spec, call)
    return y_BND, seen["A"], seen["cache"]


def cross_attention(params, x_BND, *, spec: attentions.Spec, cache=None, **call) -> tuple:
    """Return (y_BND, A_BHNS, keys and values of the memory)."""
    params = {f"{name}_cross": leaves for name, leaves in params.items()}
    call = attentions.Call(cache=None if cache is None else {"cross": cache}, **call)
    y_BND, seen = heads.cross_attention(params, x_BND, spec, call)
    return y_BND, seen["A"], seen["cache"]


def apply_block(params, x_BND, *, spec: block.Spec, **call) -> tuple:
    """Return the result of the block for a call with these fields."""
    return block.choose(params, spec.order)(params, x_BND, spec, attentions.Call(**call))


SPEC = ("dtype", "remat", "unroll", "share", "cap", "activation")  # fields of transformer.Spec that tests change


def split(spec: transformer.Spec, options: dict) -> tuple[transformer.Spec, attentions.Call]:
    """Return the spec with the options that are its fields, and the call with the others."""
    own = {name: options.pop(name) for name in SPEC if name in options}
    return spec._replace(**own), attentions.Call(**options)


def apply_model(params, inputs, *, spec: transformer.Spec, **options) -> tuple:
    """Return transformer.apply; options are fields of the spec or the call."""
    return transformer.apply(params, inputs, *split(spec, options))


def stack(layers, x_BND, *, spec: block.Spec, caches=None, **options) -> tuple:
    """Return transformer.stack, or decode_stack with caches; options are fields of the spec or the call."""
    whole, call = split(transformer.Spec(None, None, spec, None), options)
    if caches is not None:
        return transformer.decode_stack(layers, x_BND, whole, call, caches)
    return transformer.stack(layers, x_BND, whole, call)


class Model(NamedTuple):
    """`init(key) -> params`, `apply(params, inputs, mask=..., **) -> logits` (with maps: and A_MBHNS), and its spec."""

    init: Callable
    apply: Callable
    spec: transformer.Spec


def model(
    *, position=position.learned, head=head.next_word, outputs: dict | None = None, bias=True, sizes=None, **changes
) -> Model:
    """A model of tokens with the sizes above; `changes` are fields of the block's spec, final_norm, class_token and
    tied_output.

    Compiled, and with a loop over the layers, since that takes a test the least time.
    """
    shape = dict(M=M, D=D, N=N, H=H, K=K, F=F) | (sizes or {})
    own = {name: changes.pop(name) for name in (*block.Spec._fields, *attentions.Spec._fields) if name in changes}
    words = embed.words._replace(init=functools.partial(embed.words.init, W=W))
    output = head._replace(init=functools.partial(head.init, **(outputs or {"W": W})))
    made = transformer.Spec(words, position, spec(H=shape["H"], **own), output, share=changes.pop("share", 1))

    def init(key: jax.Array) -> dict:
        return transformer.init(key, spec=made, bias=bias, **(dict(final_norm=True) | changes | shape))

    @functools.partial(jax.jit, static_argnames=("mask", "unroll", "remat", "maps"))
    def apply(params: dict, w_BN: jax.Array, *, mask=None, unroll=1, maps=False, **settings):
        logits, aux = apply_model(params, w_BN, mask=mask, unroll=unroll, maps=maps, spec=made, **settings)
        return (logits, aux["A_MBHNS"]) if maps else logits

    return Model(init, apply, made)


def words(seed: int = 0, *, n: int = N, b: int = B) -> jax.Array:
    """Random words w_BN."""
    return jax.device_put(np.random.default_rng(seed).integers(0, W, (b, n)))


def dense(mask: Callable, *, N: int, S: int) -> jax.Array:
    """The whole mask for N queries, the last of S keys."""
    return mask(np.arange(S - N, S), np.arange(S))
