"""Attention by `jax.nn.dot_product_attention`: the backend's own kernels, which never form the N x S weights on a GPU,
for numbers of 16 bits (cuDNN); elsewhere XLA forms and averages them. A mask and a bias are N x S arrays here."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tfm.attention import groups, mask as masks


def attention(q_BHNK, k_BHSK, v_BHSV, *, mask, scale: float, bias=None, n=None) -> tuple[jax.Array, None]:
    """y_n = sum_s A_{n,s} v_s (E3); arguments as of explicit.py. The softmax is in float32, of 64-bit numbers too."""
    reason = refused(q_BHNK, k_BHSK, v_BHSV, mask=mask, bias=bias, n=n)
    N, S, V = q_BHNK.shape[2], k_BHSK.shape[2], v_BHSV.shape[-1]
    triangle = mask is masks.causal and n is None and N == S  # kernels know this one, and need no N x S array for it
    n, s_S = jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    allowed = mask_BHNS = b_BHNS = None
    if mask is not None:
        allowed = mask(n, s_S)
        seeing = allowed.any(-1, keepdims=True)
    if bias is not None:
        b_BHNS = bias(n, s_S).astype(jnp.promote_types(q_BHNK.dtype, jnp.float32))
        b_BHNS = b_BHNS if b_BHNS.ndim == 4 else b_BHNS[None]
    # As many heads and features as the largest: a head that all share repeated (the kernels know groups of heads),
    # features filled up with zeros, which change no product q . k and are cut off the averages, to a multiple of eight,
    # which is what cuDNN asks for.
    qkv = q_BHNK, k_BHSK, v_BHSV
    heads = max(1 if b_BHNS is None else b_BHNS.shape[1], *(x.shape[1] for x in qkv))
    features = -(-max(x.shape[-1] for x in qkv) // 8) * 8
    padded = [jnp.pad(x, [(0, 0)] * 3 + [(0, features - x.shape[-1])]) for x in qkv]
    each = heads, *[G if (G := groups.count(*qkv)) > 1 else heads] * 2
    rows = [jnp.broadcast_to(x, (len(x), H, *x.shape[2:])).swapaxes(1, 2) for x, H in zip(padded, each, strict=True)]
    if allowed is not None and not triangle:
        mask_BHNS = _heads(allowed | ~seeing)  # a row without a key may be NaN
        if allowed.ndim == 3 and not reason:  # jax.vmap of cuDNN's call takes no head that all share (to JAX 0.12)
            mask_BHNS = jnp.broadcast_to(mask_BHNS, (len(mask_BHNS), heads, N, S))
    y_BNHV = _averages(*rows, reason, bias=b_BHNS, mask=mask_BHNS, is_causal=triangle, scale=scale)
    y_BHNV = y_BNHV.swapaxes(1, 2)[..., :V].astype(v_BHSV.dtype)
    return (y_BHNV if allowed is None else jnp.where(_heads(seeing), y_BHNV, 0)), None


def refused(q_BHNK, k_BHSK, v_BHSV, *, mask, bias=None, n=None) -> str:
    """Why XLA computes these averages, in a part of a sentence; '' where cuDNN does: it takes numbers of 16 bits, up to
    128 features, no bias (JAX has its gradient, and that of several runs, for some shapes only) and, with an array of a
    mask, even lengths."""
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    arrays = not (mask is None or (mask is masks.causal and n is None and N == S))
    for holds, reason in (
        (bias is not None, "a bias"),
        (q_BHNK.dtype not in (jnp.bfloat16, jnp.float16), "numbers of more than 16 bits"),
        (max(q_BHNK.shape[-1], v_BHSV.shape[-1]) > 128, "more than 128 features of a head"),
        (arrays and (N % 2 or S % 2), f"{N} queries and {S} keys beside an array of a mask"),
    ):
        if holds:
            return reason
    return ""


def _averages(q_BNHK: jax.Array, k_BSHK: jax.Array, v_BSHV: jax.Array, reason: str, **how: Any) -> jax.Array:
    """By cuDNN on a GPU, where there is no reason against it."""
    attend = functools.partial(jax.nn.dot_product_attention, **how)
    xla, cudnn = (functools.partial(attend, implementation=name) for name in ("xla", "cudnn"))

    def wide(*qkv: jax.Array) -> jax.Array:  # XLA:CPU has no product of 16-bit numbers in 32 bits (jaxlib 0.8.0)
        return xla(*(x.astype(jnp.float32) for x in qkv)).astype(v_BSHV.dtype)

    if q_BNHK.dtype not in (jnp.bfloat16, jnp.float16):
        return xla(q_BNHK, k_BSHK, v_BSHV)
    there = jax.default_backend() == "gpu"  # where cuDNN is not, its call cannot even be traced
    own = {"cpu": wide, "cuda": cudnn} if there and not reason else {"cpu": wide}
    return jax.lax.platform_dependent(q_BNHK, k_BSHK, v_BSHV, **own, default=xla)


def _heads(allowed: jax.Array) -> jax.Array:
    """With an axis for the sequences, if there is none, and one for the heads."""
    return allowed[None, None] if allowed.ndim == 2 else allowed[:, None]
