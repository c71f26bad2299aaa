"""Flash attention on a TPU: jax's splash kernel, which passes over the blocks in which a mask allows nothing.

jax.experimental.pallas.ops.tpu.splash_attention. flash.py computes what the kernel cannot: a bias, own positions,
heads of many features, masks of arrays that the program is given (but padding).
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

from tfm.attention import flash
from tfm.attention import mask as masks

LANES = 128  # a block's sides are multiples of these
SIDES = (512, 384, 256, 128)  # of a block, the first that divides the tokens: what published runs found fast is 512
FEATURES = 512  # of a head at most: more do not fit beside the matrix units
FEWEST = 256  # keys for which a kernel is worth its start; fewer are written out (chunked.py)
Tree = Any


def attention(
    q_BHNK, k_BHSK, v_BHSV, *, mask, scale: float, bias=None, n=None, axis: str | None = None, interpret: bool = False
) -> tuple[jax.Array, None]:
    """y_n = sum_s A_{n,s} v_s (E3); arguments as of flash.attention, which computes what the kernel cannot.

    Logits, weights and sums are float32 or, of wider numbers, flash.py's. Differentiable in reverse mode. interpret: in
    Pallas' interpreter, on any device, whatever the number of keys.
    """
    call = {"mask": mask, "bias": bias, "n": n, "axis": axis}
    if refused(q_BHNK, k_BHSK, v_BHSV, **call, interpret=interpret):
        return flash.attention(q_BHNK, k_BHSK, v_BHSV, scale=scale, **call)
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    known, valid_BS = masks.known(mask, np.arange(S - N, S), np.arange(S))
    H, G = (max(x.shape[1] for x in arrays) for arrays in ((q_BHNK, k_BHSK, v_BHSV), (k_BHSK, v_BHSV)))
    q_BHNK = (scale * q_BHNK.astype(jnp.float32)).astype(k_BHSK.dtype)
    qkv = [_filled(x, heads) for x, heads in ((q_BHNK, H), (k_BHSK, G), (v_BHSV, G))]
    shown_NS = np.zeros((qkv[0].shape[2], qkv[1].shape[2]), bool)
    shown_NS[:N, :S] = known
    ids = None
    if valid_BS is not None:  # queries are of segment 0, and so are the keys that may be seen
        rest = ((0, 0), (0, shown_NS.shape[1] - S))
        hidden_BS = jnp.pad(~valid_BS, rest, constant_values=True).astype(jnp.int32)
        ids = jnp.zeros_like(hidden_BS, shape=(len(hidden_BS), shown_NS.shape[0])), hidden_BS
    causal = mask is masks.causal and shown_NS.shape == (N, N)  # which the kernel forms by itself
    make = functools.partial(_kernel, splash.CausalMask((N, N)) if causal else splash.NumpyMask(shown_NS), H, interpret)
    y_BHNV = _average(make, *qkv, ids)[:, :, :N].astype(v_BHSV.dtype)
    if valid_BS is None and known.any(-1).all():
        return y_BHNV, None
    seeing = mask(jnp.arange(S - N, S), jnp.arange(S)).any(-1)
    return jnp.where(seeing[..., None] if seeing.ndim == 1 else seeing[:, None, :, None], y_BHNV, 0), None


def refused(
    q_BHNK, k_BHSK, v_BHSV, *, mask, bias=None, n=None, axis: str | None = None, interpret: bool = False
) -> str:
    """Why flash.py computes these averages, in a part of a sentence; '' where the kernel does."""
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    for holds, reason in (
        (bias is not None, "the score has a bias, which the kernel does not take"),
        (axis is not None, "devices share the tokens"),
        (n is not None, "the tokens stand at positions of their own"),
        (k_BHSK.dtype == jnp.float64, "numbers of 64 bits"),
        (max(q_BHNK.shape[-1], v_BHSV.shape[-1]) > FEATURES, f"more than {FEATURES} features of a head"),
        (S < FEWEST and not interpret, f"{S} keys, and the kernel is worth its start from {FEWEST} on"),
    ):
        if holds:
            return reason
    if mask in (None, masks.causal) or masks.known(mask, np.arange(S - N, S), np.arange(S))[0] is not None:
        return ""
    return "the mask depends on arrays that the program is given"


def _filled(x_BHNK: jax.Array, heads: int) -> jax.Array:
    """So many heads, those of one being shared by all, and tokens up to a multiple of LANES."""
    x_BHNK = jnp.broadcast_to(x_BHNK, (len(x_BHNK), heads, *x_BHNK.shape[2:]))
    return jnp.pad(x_BHNK, ((0, 0), (0, 0), (0, -x_BHNK.shape[2] % LANES), (0, 0)))


def _kernel(mask: Any, H: int, interpret: bool, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None) -> jax.Array:
    """y_BHNV of the kernel. Tokens lie along the lanes, of which there are more than a head has features: with the
    features there, half of GPT-2's would be padding."""
    rows, keys = (next(side for side in SIDES if x.shape[2] % side == 0) for x in (q_BHNK, k_BGSK))
    along = dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.QKVLayout.SEQ_MINOR)
    names = (
        ("block_q", "block_q_dkv", "block_q_dq"),
        (
            "block_kv",
            "block_kv_compute",
            "block_kv_dkv",
            "block_kv_dkv_compute",
            "block_kv_dq",
        ),
    )
    sizes = splash.BlockSizes(**dict.fromkeys(names[0], rows), **dict.fromkeys(names[1], keys), **along)
    of_heads = splash.MultiHeadMask([mask] * H)
    kernel = splash.make_splash_mha_single_device(of_heads, block_sizes=sizes, interpret=interpret)
    if ids is None:
        return jax.vmap(kernel)(q_BHNK, k_BGSK, v_BGSV)
    return jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, splash.SegmentIds(*ids)))(q_BHNK, k_BGSK, v_BGSV, *ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(make: Callable, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None) -> jax.Array:
    return _elsewhere(make, q_BHNK, k_BGSK, v_BGSV, ids)


def _forward(make: Callable, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None) -> tuple[jax.Array, Callable]:
    def both(q_BHNK, k_BGSK, v_BGSV, ids):
        return jax.vjp(lambda *qkv: make(*qkv, ids), q_BHNK, k_BGSK, v_BGSV)

    y_BHNV, back = _elsewhere(both, q_BHNK, k_BGSK, v_BGSV, ids)
    y_BHNV = checkpoint_name(y_BHNV, "attention")

    def kept(x: jax.Array) -> jax.Array:  # the averages once, and the logarithms of the sums
        if any(x is one for one in (q_BHNK, k_BGSK, v_BGSV)) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return y_BHNV if x.shape == y_BHNV.shape else checkpoint_name(x, "attention")

    return y_BHNV, jax.tree.map(kept, back)


def _backward(make: Callable, back: Callable, dy_BHNV: jax.Array) -> tuple:
    return *_elsewhere(lambda back, dy_BHNV: back(dy_BHNV), back, dy_BHNV), None


_average.defvjp(_forward, _backward)


def _elsewhere(function: Callable, *arguments: Tree) -> Tree:
    """function(*arguments), also inside `jax.shard_map`, whose types the kernel does not know: it is traced in a thread
    of its own, where there are none, and its results are given the types that the arguments have."""
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
    """The axes of a device mesh over which x varies, inside `jax.shard_map`."""
    of = jax.typeof(x)
    return frozenset(of.vma if hasattr(of, "vma") else of.manual_axis_type.varying)  # the second from JAX 0.11 on
