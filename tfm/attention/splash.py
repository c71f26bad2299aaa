"""Flash attention on a TPU by JAX's splash kernel, which skips blocks in which a mask allows nothing.

The kernel is jax.experimental.pallas.ops.tpu.splash_attention. `refuse` lists what it cannot compute: a bias, positions
other than 0 ... N-1, heads of many features, tokens sharded over devices, masks of traced arrays (except padding).
"""

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from tfm.attention import mask as masks

LANES = 128  # of a TPU; the sides of a block are multiples of it
SIDES = (512, 384, 256, 128)  # the side of a block is the first that divides the tokens; published runs use 512
FEATURES = 512  # the most of a head; more do not fit next to the matrix units
Tree = Any


def refuse(q_BHNK, k_BHSK, v_BHSV, *, mask, bias: bool, axis: str | None) -> str:
    """Return the reason why the kernel cannot compute these averages, or '' if it can.

    The arrays may be jax.ShapeDtypeStruct.
    """
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    for holds, reason in (
        (axis is not None, "devices share the tokens"),
        (bias, "the logits have a bias, which the kernel does not take"),
        (k_BHSK.dtype == jnp.float64, "the numbers have 64 bits"),
        (max(q_BHNK.shape[-1], v_BHSV.shape[-1]) > FEATURES, f"a head has more than {FEATURES} features"),
        (masks.evaluate(mask, np.arange(S - N, S), np.arange(S))[0] is None, "the mask depends on traced arrays"),
    ):
        if holds:
            return reason
    return ""


def attention(
    q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap=0.0, bias=None, n=None, axis=None, interpret: bool = False
) -> tuple[jax.Array, None]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and None for the weights; arguments as of explicit.attention.

    Logits, weights and sums are float32. Differentiable in reverse mode. interpret: run Pallas' interpreter, on any
    device. Raises ValueError for arguments that `refuse` names, and for positions n.
    """
    reason = refuse(q_BHNK, k_BHSK, v_BHSV, mask=mask, bias=bias is not None, axis=axis)
    if reason or n is not None:
        raise ValueError(f"splash attention: {reason or 'the positions must be 0 ... N-1'}")
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    known_NS, valid_BS = masks.evaluate(mask, np.arange(S - N, S), np.arange(S))
    qkv = [_save(x) for x in _pad(scale, q_BHNK, k_BHSK, v_BHSV)]
    shown_NS = np.zeros((qkv[0].shape[2], qkv[1].shape[2]), bool)
    shown_NS[:N, :S] = known_NS
    ids = None
    if valid_BS is not None:  # queries and valid keys have segment 0
        end = ((0, 0), (0, shown_NS.shape[1] - S))
        hidden_BS = jnp.pad(~valid_BS, end, constant_values=True).astype(jnp.int32)
        ids = jnp.zeros_like(hidden_BS, shape=(len(hidden_BS), shown_NS.shape[0])), hidden_BS
    causal = mask is masks.causal and shown_NS.shape == (N, N)  # the kernel computes this mask
    kernel_mask = splash.CausalMask((N, N)) if causal else splash.NumpyMask(shown_NS)
    run = functools.partial(_run_kernel, kernel_mask, cap=cap, interpret=interpret)
    y_BHNV = _average(run, *qkv, ids)[:, :, :N].astype(v_BHSV.dtype)
    if valid_BS is None and known_NS.any(-1).all():
        return y_BHNV, None
    seeing = mask(jnp.arange(S - N, S), jnp.arange(S)).any(-1)
    return jnp.where(seeing[..., None] if seeing.ndim == 1 else seeing[:, None, :, None], y_BHNV, 0), None


def _pad(scale: float, *qkv: jax.Array) -> list[jax.Array]:
    """Return scale * q, k and v, with tokens padded to a multiple of LANES and a single head repeated to H or G
    heads.
    """
    H, G = max(x.shape[1] for x in qkv), max(x.shape[1] for x in qkv[1:])
    queries = (scale * qkv[0].astype(jnp.float32)).astype(qkv[1].dtype)
    arrays = zip((queries, *qkv[1:]), (H, G, G), strict=True)
    repeated = [jnp.broadcast_to(x, (len(x), heads, *x.shape[2:])) for x, heads in arrays]
    return [jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES), (0, 0))) for x in repeated]


def _save(x_BHNK: jax.Array) -> jax.Array:
    """Name an array to be saved for the gradient by a loop over layers, with tokens along the lanes if a head does not
    fill these.
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
    """Return y_BHNV of the kernel.

    Tokens lie along the lanes if a head's features do not fill these: with GPT-2's, half would be padding.
    """
    rows, keys = (next(side for side in SIDES if x.shape[2] % side == 0) for x in (q_BHNK, k_BGSK))
    narrow = q_BHNK.shape[3] % LANES or v_BGSV.shape[3] % LANES
    layout = splash.QKVLayout.SEQ_MINOR if narrow else splash.QKVLayout.HEAD_DIM_MINOR
    along = dict.fromkeys(("q_layout", "k_layout", "v_layout"), layout)
    names = [f"block_{name}" for name in "q q_dkv q_dq kv kv_compute kv_dkv kv_dkv_compute kv_dq".split()]
    sizes = splash.BlockSizes(**dict.fromkeys(names[:3], rows), **dict.fromkeys(names[3:], keys), **along)
    options = {"block_sizes": sizes, "attn_logits_soft_cap": cap or None, "interpret": interpret}
    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([mask] * q_BHNK.shape[1]), **options)
    if ids is None:
        return jax.vmap(kernel)(q_BHNK, k_BGSK, v_BGSV)
    return jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, splash.SegmentIds(*ids)))(q_BHNK, k_BGSK, v_BGSV, *ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(run: Callable, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None) -> jax.Array:
    """Return run(q, k, v, ids), with a gradient that works inside `jax.shard_map`."""
    return _trace_apart(run, q_BHNK, k_BGSK, v_BGSV, ids)


def _forward(run: Callable, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None) -> tuple[jax.Array, Callable]:
    qkv = q_BHNK, k_BGSK, v_BGSV

    def both(q_BHNK, k_BGSK, v_BGSV, ids):
        return jax.vjp(lambda *qkv: run(*qkv, ids), q_BHNK, k_BGSK, v_BGSV)

    y_BHNV, back = _trace_apart(both, *qkv, ids)
    y_BHNV = checkpoint_name(y_BHNV, "attention")

    def name(x: jax.Array) -> jax.Array:  # a loop over layers saves named arrays for the gradient
        if any(x is array for array in qkv) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return y_BHNV if x.shape == y_BHNV.shape else checkpoint_name(x, "attention")

    return y_BHNV, jax.tree.map(name, back)


def _backward(run: Callable, back: Callable, dy_BHNV: jax.Array) -> tuple:
    return *_trace_apart(lambda back, dy_BHNV: back(dy_BHNV), back, dy_BHNV), None


_average.defvjp(_forward, _backward)


def _trace_apart(function: Callable, *arguments: Tree) -> Tree:
    """Return function(*arguments), also inside `jax.shard_map`, whose types the kernel does not support.

    The function is traced in a thread of its own, without these types; its results then get the types of the arguments.
    """
    leaves = jax.tree.leaves(arguments)
    axes = frozenset().union(*map(_varying, leaves))
    if not axes:
        return function(*arguments)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with futures.ThreadPoolExecutor(1) as thread:
        program, result = thread.submit(jax.make_jaxpr(function, return_shape=True), *shapes).result()
    vary = jax.lax.pvary if hasattr(jax.lax, "pvary") else functools.partial(jax.lax.pcast, to="varying")
    results = jax.extend.core.jaxpr_as_fun(program)(*leaves)
    typed = [vary(x, tuple(sorted(axes - _varying(x)))) if axes - _varying(x) else x for x in results]
    return jax.tree.unflatten(jax.tree.structure(result), typed)


def _varying(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes over which x varies, inside `jax.shard_map`."""
    kind = jax.typeof(x)
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying)  # the second: JAX 0.11 on
