"""Attention on a GPU by cuDNN's kernel, through `jax.nn.dot_product_attention`.

The kernel never stores the N x S weights. It computes some masks itself and skips the keys that they forbid. It reads
any other mask (`needs_array`) as an N x S array, which takes longer. JAX pull request 35114 reports 15.8 % of the peak
of the tensor cores with an array, and 40.6 % without; we have measured neither.
"""

import jax
import jax.numpy as jnp

from tfm.attention import groups, mask as masks

# Older versions lose the mesh axes over which the outputs vary (JAX issue 36008): 0.7.2 has the error, 0.10.2 has not.
MIN_JAX = 0, 10, 2


def find_limitation(q_BHNK, k_BHSK, v_BHSV, *, mask, bias: bool, cap: float) -> str:
    """Return the reason why cuDNN's kernel cannot compute this attention, or '' if it can.

    bias: whether the logits have a bias; JAX supports the gradient of a bias for some shapes only. The arrays may be
    jax.ShapeDtypeStruct. A mask that the kernel needs as an array (`needs_array`) needs even N and S.
    """
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    for applies, reason in (
        (cap > 0, "the logits are capped"),
        (bias, "the logits have a bias"),
        (q_BHNK.dtype not in (jnp.bfloat16, jnp.float16), "the numbers have more than 16 bits"),
        (max(q_BHNK.shape[-1], v_BHSV.shape[-1]) > 128, "a head has more than 128 features"),
        (
            needs_array(masks.as_mask(mask), N, S) and (N % 2 or S % 2),
            f"the mask has {N} queries and {S} keys, which must be even numbers",
        ),
        (
            jax.__version_info__ < MIN_JAX,
            "JAX {}.{}.{} cannot differentiate the kernel inside shard_map. Install JAX {}.{}.{}".format(
                *jax.__version_info__[:3], *MIN_JAX
            ),
        ),
    ):
        if applies:
            return reason
    return ""


def attention(q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap=0.0, bias=None, n=None) -> tuple[jax.Array, None]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and None for the weights. Other arguments: see explicit.attention.

    `find_limitation` must return '' for these arguments.
    """
    V, qkv = v_BHSV.shape[-1], (q_BHNK, k_BHSK, v_BHSV)
    # An integer 0 that varies over rows of jax.vmap if any of the arrays does. JAX before 0.12 cannot map the call if
    # some of its arguments vary over rows and others do not.
    zero_B = 0 * sum(jnp.isnan(x[:, 0, 0, 0]).astype(jnp.int32) for x in qkv)
    # A single head is repeated; groups of heads are not, because the kernel supports them. Zeros pad the features to a
    # multiple of 8: they do not change q . k, and are cut off the averages.
    heads, features = max(x.shape[1] for x in qkv), -(-max(x.shape[-1] for x in qkv) // 8) * 8
    groups_of_heads = groups.count(*qkv)
    G = groups_of_heads if groups_of_heads > 1 else heads
    padded = [jnp.pad(x, [(0, 0)] * 3 + [(0, features - x.shape[-1])]) for x in qkv]
    qkv_BNHK = [
        jnp.broadcast_to(x + zero_B[:, None, None, None].astype(x.dtype), (len(x), H, *x.shape[2:])).swapaxes(1, 2)
        for x, H in zip(padded, (heads, G, G), strict=True)
    ]
    options, has_keys_BHN1 = make_options(mask, n, zero_B, H=heads, N=q_BHNK.shape[2], S=k_BHSK.shape[2])
    backend = "cudnn" if jax.default_backend() == "gpu" else "xla"  # JAX traces cuDNN's call only if there is a GPU
    y_BNHV = jax.nn.dot_product_attention(*qkv_BNHK, **options, scale=scale, implementation=backend)
    y_BHNV = y_BNHV.swapaxes(1, 2)[..., :V].astype(v_BHSV.dtype)
    return (y_BHNV if has_keys_BHN1 is None else jnp.where(has_keys_BHN1, y_BHNV, 0)), None


def needs_array(mask: masks.Mask, N: int, S: int, n: jax.Array | None = None) -> bool:
    """Return whether the kernel needs the mask as an array, because it cannot compute it. n: as in `attention`.

    The kernel computes the causal mask of N = S tokens, windows of this mask, and padding at the end.
    """
    causal_or_all = mask.causal and n is None and N == S or not (mask.causal or mask.window)
    return (
        not causal_or_all
        or not mask.at_end
        or any(part is not None for part in (mask.prefix_B, mask.document_BS, mask.other))
    )


def make_options(mask, n, zero_B, *, H: int, N: int, S: int) -> tuple[dict, jax.Array | None]:
    """Return the arguments of jax.nn.dot_product_attention for a mask, and has_keys_BHN1.

    has_keys_BHN1: whether a query has an allowed key. None if every query has one because there is no padding and the
    kernel computes the mask. n: positions of the queries; None: the last N of S. zero_B: zeros, which vary over the
    rows of jax.vmap as the queries do.
    """
    mask = masks.as_mask(mask)
    if not needs_array(mask, N, S, n):
        options = {"is_causal": mask.causal} | ({"local_window_size": (mask.window - 1, 0)} if mask.window else {})
        if mask.valid_BS is None:
            return options, None
        length_B = mask.valid_BS.sum(-1, dtype=jnp.int32) + zero_B
        keys_B = jnp.maximum(length_B, 1)  # an average of no keys would be NaN
        queries_B = jnp.minimum(keys_B + (mask.window or N) - 1, N)  # the window of a later query has padding only
        has_keys_BN = (jnp.arange(N) < queries_B[:, None]) & (length_B > 0)[:, None]
        options |= {"query_seq_lengths": queries_B, "key_value_seq_lengths": keys_B}
        return options, has_keys_BN[:, None, :, None]
    allowed = mask(jnp.arange(S - N, S) if n is None else n, jnp.arange(S))
    allowed_BHNS = allowed[None, None] if allowed.ndim == 2 else allowed[:, None]
    has_keys_BHN1 = allowed_BHNS.any(-1, keepdims=True)
    mask_BHNS = allowed_BHNS | ~has_keys_BHN1  # a row without allowed keys would be NaN
    if allowed.ndim == 3:  # under jax.vmap cuDNN's call does not broadcast a mask over heads (JAX 0.12)
        mask_BHNS = jnp.broadcast_to(mask_BHNS & (zero_B == 0)[:, None, None, None], (len(zero_B), H, N, S))
    return {"mask": mask_BHNS}, has_keys_BHN1
