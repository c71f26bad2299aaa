"""Attention by `jax.nn.dot_product_attention`: the backend's own kernels where it has them.

They never form the N x S weights on a GPU, for numbers of 16 bits (cuDNN); elsewhere XLA forms and averages them. A
mask and a bias, though, are N x S arrays here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tfm import mask as masks
from tfm import shield


def fused(
    q_BHNK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSV: jax.Array,
    *,
    mask: masks.Mask | None,
    scale: float,
    bias: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    n: jax.Array | None = None,
) -> tuple[jax.Array, None]:
    """y_n = sum_s A_{n,s} v_s (E3); arguments as of `explicit`. The softmax is in float32, of 64-bit numbers too."""
    N, S, V = q_BHNK.shape[2], k_BHSK.shape[2], v_BHSV.shape[-1]
    triangle = mask is masks.causal and n is None and N == S  # kernels know this one, and need no N x S array for it
    n, s_S = jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    allowed, seeing, b_BHNS = None, None, None
    if mask is not None:
        k_BHSK, v_BHSV, sound_BS = shield.clean(k_BHSK, v_BHSV)
        allowed = mask(n, s_S)
        seeing = allowed.any(-1, keepdims=True)
    if bias is not None:
        b_BHNS = bias(n, s_S).astype(jnp.promote_types(q_BHNK.dtype, jnp.float32))
        b_BHNS = b_BHNS if b_BHNS.ndim == 4 else b_BHNS[None]
    rows = _alike(q_BHNK, k_BHSK, v_BHSV, heads=1 if b_BHNS is None else b_BHNS.shape[1])
    y_BNHV = jax.nn.dot_product_attention(
        *rows,
        bias=b_BHNS,
        mask=None if allowed is None or triangle else _heads(allowed | ~seeing),  # no row without a key: it may be NaN
        is_causal=triangle,
        scale=scale,
        implementation=_implementation(rows[0], S, dense=bias is not None or (mask is not None and not triangle)),
    )
    y_BHNV = y_BNHV.swapaxes(1, 2)[..., :V].astype(v_BHSV.dtype)
    if allowed is None:
        return y_BHNV, None
    return shield.strike(jnp.where(_heads(seeing), y_BHNV, 0), shield.hit(allowed, sound_BS)), None


def _implementation(q_BNHK: jax.Array, S: int, *, dense: bool) -> str:
    """cuDNN averages numbers of 16 bits, up to 128 features and, beside a dense mask or bias, even lengths only."""
    _, N, _, K = q_BNHK.shape
    fits = q_BNHK.dtype in (jnp.bfloat16, jnp.float16) and K <= 128 and not (dense and (N % 2 or S % 2))
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


def _heads(allowed: jax.Array) -> jax.Array:
    """With an axis for the sequences, if there is none, and one for the heads."""
    return allowed[None, None] if allowed.ndim == 2 else allowed[:, None]


def _alike(*qkv: jax.Array, heads: int) -> list[jax.Array]:
    """x_BNHK with as many heads and features as the largest: shared heads repeated, features filled up with zeros.

    Zeros change no product q . k, and are cut off the averages. A multiple of eight is what cuDNN asks for.
    """
    heads = max(heads, *(x.shape[1] for x in qkv))
    features = -(-max(x.shape[-1] for x in qkv) // 8) * 8
    if jax.default_backend() == "cpu":  # XLA has no product of 16-bit numbers in 32 bits there (jaxlib 0.8.0)
        qkv = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in qkv]
    padded = [jnp.pad(x, [(0, 0)] * 3 + [(0, features - x.shape[-1])]) for x in qkv]
    return [jnp.broadcast_to(x, (x.shape[0], heads, *x.shape[2:])).swapaxes(1, 2) for x in padded]
