"""Attention on a GPU by cuDNN's kernel, through `jax.nn.dot_product_attention`.

The kernel never forms the N x S weights; a mask other than causal is an N x S array.
"""

import jax
import jax.numpy as jnp

from tfm.attention import groups, mask as masks


def refuse(q_BHNK, k_BHSK, v_BHSV, *, mask, bias: bool, cap: float, axis: str | None) -> str:
    """Return the reason why cuDNN cannot compute these averages, or '' if it can.

    It takes 16-bit numbers, up to 128 features, no bias (JAX has its gradient for some shapes only) and, with the array
    of a mask, even lengths. The arrays may be jax.ShapeDtypeStruct.
    """
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    triangle = mask is masks.causal and N == S
    for holds, reason in (
        (axis is not None, "devices share the tokens"),
        (cap > 0, "the logits are capped"),
        (bias, "the logits have a bias"),
        (q_BHNK.dtype not in (jnp.bfloat16, jnp.float16), "the numbers have more than 16 bits"),
        (max(q_BHNK.shape[-1], v_BHSV.shape[-1]) > 128, "a head has more than 128 features"),
        (
            mask is not None and not triangle and (N % 2 or S % 2),
            f"the mask has {N} queries and {S} keys, which must be even numbers",
        ),
    ):
        if holds:
            return reason
    return ""


def attention(q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap=0.0, bias=None, n=None, axis=None) -> tuple[jax.Array, None]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and None for the weights; arguments as of explicit.attention, if `refuse` is
    ''.
    """
    N, S, V = q_BHNK.shape[2], k_BHSK.shape[2], v_BHSV.shape[-1]
    triangle = mask is masks.causal and n is None and N == S  # the kernel computes this mask
    allowed = None if mask is None else mask(jnp.arange(S - N, S) if n is None else n, jnp.arange(S))
    # A head that all share is repeated (the kernel supports groups of heads). Features are padded with zeros to a
    # multiple of 8: zeros change no product q . k and are cut off the averages.
    qkv = q_BHNK, k_BHSK, v_BHSV
    heads, features = max(x.shape[1] for x in qkv), -(-max(x.shape[-1] for x in qkv) // 8) * 8
    groups_of_heads = groups.count(*qkv)
    G = groups_of_heads if groups_of_heads > 1 else heads
    padded = [jnp.pad(x, [(0, 0)] * 3 + [(0, features - x.shape[-1])]) for x in qkv]
    rows = [
        jnp.broadcast_to(x, (len(x), H, *x.shape[2:])).swapaxes(1, 2)
        for x, H in zip(padded, (heads, G, G), strict=True)
    ]
    mask_BHNS = None
    if allowed is not None:
        seeing = allowed.any(-1, keepdims=True)
        if not triangle:
            mask_BHNS = _add_heads(allowed | ~seeing)  # a row without keys would be NaN
            if allowed.ndim == 3:  # under jax.vmap cuDNN's call takes no shared head (JAX 0.12)
                mask_BHNS = jnp.broadcast_to(mask_BHNS, (len(mask_BHNS), heads, N, S))
    backend = "cudnn" if jax.default_backend() == "gpu" else "xla"  # without a GPU its call cannot be traced
    options = {"mask": mask_BHNS, "is_causal": triangle, "scale": scale, "implementation": backend}
    y_BHNV = jax.nn.dot_product_attention(*rows, **options).swapaxes(1, 2)[..., :V].astype(v_BHSV.dtype)
    return (y_BHNV if allowed is None else jnp.where(_add_heads(seeing), y_BHNV, 0)), None


def _add_heads(allowed: jax.Array) -> jax.Array:
    """Return the mask with an axis for the heads, and one for the sequences if it has none."""
    return allowed[None, None] if allowed.ndim == 2 else allowed[:, None]
