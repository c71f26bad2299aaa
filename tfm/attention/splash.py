"""Flash attention on a TPU by JAX's splash kernel, which skips blocks in which the mask allows no key.

The kernel is jax.experimental.pallas.ops.tpu.splash_attention. It supports no bias, no explicit positions, no tokens
sharded over devices, no masks of traced arrays (except padding and documents), no 64-bit numbers, and at most
MAX_FEATURES per head.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tfm import layout as layouts
from tfm.attention import mask as masks

LANES = 128  # lanes of a TPU's vector registers; the sides of a block are multiples of this number
SIDES = (512, 384, 256, 128)  # a block has the first side that divides the number of tokens; published runs use 512
MAX_FEATURES = 512  # features of a head; more do not fit into the memory next to the matrix units
Tree = Any


def find_limitation(q_BHNK, k_BHSK, v_BHSV, *, mask, bias: bool) -> str:
    """Return the reason why the kernel cannot compute these averages, or '' if it can.

    bias: whether the logits have a bias. The arrays may be jax.ShapeDtypeStruct.
    """
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    for applies, reason in (
        (bias, "the logits have a bias, which the kernel does not support"),
        (k_BHSK.dtype == jnp.float64, "the numbers have 64 bits"),
        (max(q_BHNK.shape[-1], v_BHSV.shape[-1]) > MAX_FEATURES, f"a head has more than {MAX_FEATURES} features"),
        (_evaluate(masks.as_mask(mask), N, S) is None, "the mask depends on traced arrays"),
    ):
        if applies:
            return reason
    return ""


def attention(
    q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap=0.0, bias=None, n=None, interpret: bool = False
) -> tuple[jax.Array, None]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and None for the weights. Other arguments: see explicit.attention.

    Logits, weights and sums are float32. The result has gradients in reverse mode. interpret: run the interpreter of
    Pallas, which works on any device. Raises ValueError if n is not None or `find_limitation` gives a reason.
    """
    splash = _import_kernel()
    reason = find_limitation(q_BHNK, k_BHSK, v_BHSV, mask=mask, bias=bias is not None)
    if reason or n is not None:
        raise ValueError(f"splash.attention: {reason or 'n must be None'}. Use flash.attention.")
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    mask = masks.as_mask(mask)
    allowed_NS, document_BS, valid_BS = _evaluate(mask, N, S), mask.document_BS, mask.valid_BS
    qkv = [_save(x) for x in _pad(scale, q_BHNK, k_BHSK, v_BHSV)]
    padded_NS = np.zeros((qkv[0].shape[2], qkv[1].shape[2]), bool)
    padded_NS[:N, :S] = allowed_NS
    ids = _number_segments(document_BS, valid_BS, N=N, S=S, padded=padded_NS.shape)
    only_causal = mask.causal and mask.window is mask.prefix_B is mask.other is None
    is_causal = only_causal and padded_NS.shape == (N, N)  # the kernel computes this mask
    kernel_mask = splash.CausalMask((N, N)) if is_causal else splash.NumpyMask(padded_NS)
    run = functools.partial(_run_kernel, kernel_mask, cap=cap, interpret=interpret)
    y_BHNV = _average(run, *qkv, ids)[:, :, :N].astype(v_BHSV.dtype)
    if document_BS is not None:
        allowed_NS = allowed_NS & np.eye(N, S, S - N, dtype=bool)  # of its document, a query is sure to see only itself
    if valid_BS is None and allowed_NS.any(-1).all():
        return y_BHNV, None
    has_keys = mask(jnp.arange(S - N, S), jnp.arange(S)).any(-1)
    return jnp.where(has_keys[..., None] if has_keys.ndim == 1 else has_keys[:, None, :, None], y_BHNV, 0), None


def _import_kernel() -> Any:
    """Return the module of the kernel. Only runs on a TPU need it, and it imports Pallas, which takes 0.1 s."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    return splash_attention


def _evaluate(mask: masks.Mask, N: int, S: int) -> np.ndarray | None:
    """Return allowed_NS without padding and documents; None if it depends on traced arrays or on the sequence."""
    common = dataclasses.replace(mask, valid_BS=None, document_BS=None)
    allowed = masks.evaluate(common, np.arange(S - N, S), np.arange(S))
    return None if allowed is None or allowed.ndim > 2 else allowed


def _number_segments(
    document_BS: jax.Array | None, valid_BS: jax.Array | None, *, N: int, S: int, padded: tuple[int, int]
) -> tuple[jax.Array, jax.Array] | None:
    """Return the segments of queries, the last N of S tokens, and of keys: a query attends to the keys of its segment.

    Return None if all tokens are in one segment.

    A segment is a document, or segment 0 if there are none. Invalid keys and padding are in segment -1. padded: the
    numbers of queries and keys with padding.
    """
    if document_BS is None and valid_BS is None:
        return None
    key_BS = jnp.zeros(valid_BS.shape, jnp.int32) if document_BS is None else document_BS
    query_BN = key_BS[:, S - N :]
    key_BS = key_BS if valid_BS is None else jnp.where(valid_BS, key_BS, -1)
    pairs = zip((query_BN, key_BS), padded, strict=True)
    return tuple(jnp.pad(x, ((0, 0), (0, n - x.shape[1])), constant_values=-1) for x, n in pairs)


def _pad(scale: float, *qkv: jax.Array) -> list[jax.Array]:
    """Return scale * q with H heads, and k and v with G heads: an axis of one head is repeated.

    Tokens are padded to a multiple of LANES. G is the larger number of heads of k and v.
    """
    H, G = max(x.shape[1] for x in qkv), max(x.shape[1] for x in qkv[1:])
    queries = (scale * qkv[0].astype(jnp.float32)).astype(qkv[1].dtype)
    arrays = zip((queries, *qkv[1:]), (H, G, G), strict=True)
    repeated = [jnp.broadcast_to(x, (len(x), heads, *x.shape[2:])) for x, heads in arrays]
    return [jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES), (0, 0))) for x in repeated]


def _save(x_BHNK: jax.Array) -> jax.Array:
    """Return x, named so that a loop over layers saves it for the gradient.

    x is saved with tokens along the lanes if the features of a head do not fill the lanes.
    """
    if x_BHNK.shape[3] % LANES == 0:
        return checkpoint_name(x_BHNK, "attention")
    return checkpoint_name(x_BHNK.swapaxes(2, 3), "attention").swapaxes(2, 3)


def _run_kernel(
    mask: Any,
    q_BHNK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSV: jax.Array,
    ids: tuple | None,
    *,
    cap: float,
    interpret: bool,
) -> jax.Array:
    """Return y_BHNV as the kernel computes it. ids: the segments of queries and keys (splash.SegmentIds), or None.

    Tokens lie along the lanes if the features of a head do not fill the lanes: GPT-2's 64 features fill half of them.
    """
    splash = _import_kernel()
    queries, keys = (next(side for side in SIDES if x.shape[2] % side == 0) for x in (q_BHNK, k_BGSK))
    narrow = q_BHNK.shape[3] % LANES or v_BGSV.shape[3] % LANES
    layout = splash.QKVLayout.SEQ_MINOR if narrow else splash.QKVLayout.HEAD_DIM_MINOR
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), layout)
    names = [f"block_{name}" for name in "q q_dkv q_dq kv kv_compute kv_dkv kv_dkv_compute kv_dq".split()]
    sizes = splash.BlockSizes(**dict.fromkeys(names[:3], queries), **dict.fromkeys(names[3:], keys), **layouts)
    options = {"block_sizes": sizes, "attn_logits_soft_cap": cap or None, "interpret": interpret}
    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([mask] * q_BHNK.shape[1]), **options)
    if ids is None:
        return jax.vmap(kernel)(q_BHNK, k_BGSK, v_BGSV)
    return jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, splash.SegmentIds(*ids)))(q_BHNK, k_BGSK, v_BGSV, *ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(run: Callable, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None) -> jax.Array:
    """Return the averages run(q, k, v, ids) of the kernel, with a gradient that works inside `jax.shard_map`."""
    return _trace_untyped(run, q_BHNK, k_BGSK, v_BGSV, ids)


def _forward(run: Callable, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None) -> tuple[jax.Array, Callable]:
    """Return y_BHNV, and the function of jax.vjp that `_backward` calls."""
    qkv = q_BHNK, k_BGSK, v_BGSV

    def run_vjp(q_BHNK, k_BGSK, v_BGSV, ids):
        return jax.vjp(lambda *qkv: run(*qkv, ids), q_BHNK, k_BGSK, v_BGSV)

    y_BHNV, vjp = _trace_untyped(run_vjp, *qkv, ids)
    y_BHNV = checkpoint_name(y_BHNV, "attention")

    def name_array(x: jax.Array) -> jax.Array:  # a loop over layers saves named arrays for the gradient
        if any(x is array for array in qkv) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return y_BHNV if x.shape == y_BHNV.shape else checkpoint_name(x, "attention")

    return y_BHNV, jax.tree.map(name_array, vjp)


def _backward(run: Callable, vjp: Callable, dy_BHNV: jax.Array) -> tuple:
    return *_trace_untyped(lambda vjp, dy_BHNV: vjp(dy_BHNV), vjp, dy_BHNV), None


_average.defvjp(_forward, _backward)


def _trace_untyped(function: Callable, *arguments: Tree) -> Tree:
    """Return function(*arguments), traced without the mesh axes over which types vary inside `jax.shard_map`.

    The kernel does not support such types. A new thread traces the function, because there the types have no mesh axes.
    Each result then varies over all axes over which an argument varies.
    """
    leaves = jax.tree.leaves(arguments)
    if not any(map(layouts.AXES, map(jax.typeof, leaves))):
        return function(*arguments)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with futures.ThreadPoolExecutor(1) as thread:
        program, result = thread.submit(jax.make_jaxpr(function, return_shape=True), *shapes).result()
    typed = layouts.vary_alike(jax.extend.core.jaxpr_as_fun(program)(*leaves), leaves)
    return jax.tree.unflatten(jax.tree.structure(result), typed)
