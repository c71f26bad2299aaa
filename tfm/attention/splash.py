"""Flash attention on a TPU: jax's splash kernel, which passes over the blocks in which a mask allows nothing.

jax.experimental.pallas.ops.tpu.splash_attention. flash.py computes what the kernel cannot: a bias, own positions,
heads of many features, masks of arrays that the program is given (but padding). Of tokens that devices share the kernel
averages the keys of one device in each turn of the ring, under a causal mask and padding.
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

from tfm.attention import block_mask, chunked, explicit, flash, mask as masks, ring

LANES = 128  # a block's sides are multiples of these
SIDES = (512, 384, 256, 128)  # of a block, the first that divides the tokens: what published runs found fast is 512
FEATURES = 512  # of a head at most: more do not fit beside the matrix units
FEWEST = 256  # keys for which a kernel is worth its start; of fewer all weights are formed at once
BLIND = -1e30  # the logarithm of a sum over no key is below: the kernel masks logits with -2.4e38
Tree = Any


def attention(
    q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap=0.0, bias=None, n=None, axis: str | None = None, interpret: bool = False
) -> tuple[jax.Array, None]:
    """y_n = sum_s A_{n,s} v_s (E3); arguments as of flash.attention, which computes what the kernel cannot.

    Logits, weights and sums are float32 or, of wider numbers, flash.py's. Differentiable in reverse mode. interpret: in
    Pallas' interpreter, on any device, whatever the number of keys.
    """
    call = {"mask": mask, "bias": bias, "n": n, "axis": axis}
    if few(q_BHNK, k_BHSK, axis=axis) and not interpret:
        return _at_once(q_BHNK, k_BHSK, v_BHSV, mask=mask, scale=scale, cap=cap, bias=bias, n=n), None
    if refused(q_BHNK, k_BHSK, v_BHSV, **call, interpret=interpret):
        return flash.attention(q_BHNK, k_BHSK, v_BHSV, scale=scale, cap=cap, **call)
    how = {"cap": cap, "interpret": interpret}
    if axis is not None:
        return _around(q_BHNK, k_BHSK, v_BHSV, n, axis, mask=mask, scale=scale, **how), None
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    known, valid_BS = masks.known(mask, np.arange(S - N, S), np.arange(S))
    qkv = [_kept(x) for x in _filled(scale, q_BHNK, k_BHSK, v_BHSV)]
    shown_NS = np.zeros((qkv[0].shape[2], qkv[1].shape[2]), bool)
    shown_NS[:N, :S] = known
    ids = None
    if valid_BS is not None:  # queries are of segment 0, and so are the keys that may be seen
        rest = ((0, 0), (0, shown_NS.shape[1] - S))
        hidden_BS = jnp.pad(~valid_BS, rest, constant_values=True).astype(jnp.int32)
        ids = jnp.zeros_like(hidden_BS, shape=(len(hidden_BS), shown_NS.shape[0])), hidden_BS
    causal = mask is masks.causal and shown_NS.shape == (N, N)  # which the kernel forms by itself
    make = functools.partial(_kernel, splash.CausalMask((N, N)) if causal else splash.NumpyMask(shown_NS), **how)
    y_BHNV = _average(make, *qkv, ids)[:, :, :N].astype(v_BHSV.dtype)
    if valid_BS is None and known.any(-1).all():
        return y_BHNV, None
    seeing = mask(jnp.arange(S - N, S), jnp.arange(S)).any(-1)
    return jnp.where(seeing[..., None] if seeing.ndim == 1 else seeing[:, None, :, None], y_BHNV, 0), None


def few(q_BHNK: jax.Array, k_BHSK: jax.Array, *, axis: str | None = None) -> bool:
    """Whether there are so few keys and weights that all of these are formed at once."""
    S, weights = k_BHSK.shape[2], q_BHNK.size // q_BHNK.shape[-1] * k_BHSK.shape[2]
    return S < FEWEST and weights <= chunked.WEIGHTS and axis is None


def _at_once(*qkv: jax.Array, **call: Any) -> jax.Array:
    """By explicit.py, whose weights are formed again for the gradient: of 64, 128 and 192 tokens in 0.9, 0.5 and 0.5 of
    the time of the chunks that are fast on a CPU, as libtpu 0.0.50 estimates it (v5e; D = 128, H = 4, B = 12)."""
    y_BHNV = jax.checkpoint(lambda *qkv: explicit.attention(*qkv, **call)[0])(*qkv)
    return checkpoint_name(y_BHNV, "attention")


def refused(
    q_BHNK, k_BHSK, v_BHSV, *, mask, bias=None, n=None, axis: str | None = None, interpret: bool = False
) -> str:
    """Why flash.py computes these averages, in a part of a sentence; '' where the kernel does."""
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    around = axis is not None
    for holds, reason in (
        (bias is not None, "the score has a bias, which the kernel does not take"),
        (n is not None and not around, "the tokens stand at positions of their own"),
        (k_BHSK.dtype == jnp.float64, "numbers of 64 bits"),
        (max(q_BHNK.shape[-1], v_BHSV.shape[-1]) > FEATURES, f"more than {FEATURES} features of a head"),
        (S < FEWEST and not interpret, f"{S} keys, and the kernel is worth its start from {FEWEST} on"),
    ):
        if holds:
            return reason
    if around and any(getattr(term, "func", term) is not masks.causal for term in masks.parted(mask)[0]):
        return "devices share the tokens, and the mask is more than causal and padding"
    if around or mask in (None, masks.causal) or masks.known(mask, np.arange(S - N, S), np.arange(S))[0] is not None:
        return ""
    return "the mask depends on arrays that the program is given"


def _filled(scale: float, *qkv: jax.Array) -> list[jax.Array]:
    """Queries times the scale, keys and values: of as many heads as each needs, those of one being shared by all, and
    with tokens up to a multiple of LANES."""
    H, G = (max(x.shape[1] for x in arrays) for arrays in (qkv, qkv[1:]))
    queries = (scale * qkv[0].astype(jnp.float32)).astype(qkv[1].dtype)
    each = [
        jnp.broadcast_to(x, (len(x), heads, *x.shape[2:]))
        for x, heads in zip((queries, *qkv[1:]), (H, G, G), strict=True)
    ]
    return [jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES), (0, 0))) for x in each]


def _kept(x_BHNK: jax.Array) -> jax.Array:
    """What a loop over layers keeps for the gradient, with tokens along the lanes where a head does not fill these."""
    if x_BHNK.shape[3] % LANES == 0:
        return checkpoint_name(x_BHNK, "attention")
    return checkpoint_name(x_BHNK.swapaxes(2, 3), "attention").swapaxes(2, 3)


def _kernel(
    mask: Any, q_BHNK, k_BGSK, v_BGSV, ids: tuple | None, *, cap: float, interpret: bool, sums: bool = False
) -> Any:
    """y_BHNV of the kernel, and with `sums` the logarithms of the sums too, (y_BHNV, (lse_BHN,)).

    Tokens lie along the lanes where a head's features do not fill these: with GPT-2's there, half would be padding."""
    rows, keys = (next(side for side in SIDES if x.shape[2] % side == 0) for x in (q_BHNK, k_BGSK))
    narrow = q_BHNK.shape[3] % LANES or v_BGSV.shape[3] % LANES
    layout = splash.QKVLayout.SEQ_MINOR if narrow else splash.QKVLayout.HEAD_DIM_MINOR
    along = dict.fromkeys(("q_layout", "k_layout", "v_layout"), layout)
    names = [f"block_{name}" for name in "q q_dkv q_dq kv kv_compute kv_dkv kv_dkv_compute kv_dq".split()]
    sizes = splash.BlockSizes(**dict.fromkeys(names[:3], rows), **dict.fromkeys(names[3:], keys), **along)
    how = {"block_sizes": sizes, "save_residuals": sums, "attn_logits_soft_cap": cap or None, "interpret": interpret}
    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([mask] * q_BHNK.shape[1]), **how)
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
    return y_BHNV, _with(back, (q_BHNK, k_BGSK, v_BGSV), y_BHNV, lambda lse: checkpoint_name(lse, "attention"))


def _with(back: Callable, qkv: tuple, y_BHNV: jax.Array, lse: Callable) -> Callable:
    """The gradient of a kernel from these averages, and these logarithms of the sums, in place of those it made."""

    def other(x: jax.Array) -> jax.Array:
        if any(x is one for one in qkv) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return y_BHNV if x.shape == y_BHNV.shape else lse(x)

    return jax.tree.map(other, back)


def _backward(make: Callable, back: Callable, dy_BHNV: jax.Array) -> tuple:
    return *_elsewhere(lambda back, dy_BHNV: back(dy_BHNV), back, dy_BHNV), None


_average.defvjp(_forward, _backward)


def _around(q_BHNK, k_BHSK, v_BHSV, n, axis: str, *, mask, scale: float, **how: Any) -> jax.Array:
    """y_BHNV where devices share the tokens, at positions n of layout.positions: token a of device i stands at i + P a.
    In each turn (ring.py) the kernel averages the values of one device. With a causal mask token b of device j is seen
    where b <= a for j <= i, else where b < a: two masks that are known."""
    N, (terms, valid_BS), hidden_BS = q_BHNK.shape[2], masks.parted(mask), None
    qkv = _filled(scale, q_BHNK, k_BHSK, v_BHSV)
    size = qkv[0].shape[2]
    shown = (
        [splash.CausalMask((size, size), offset) for offset in (0, -1)] if terms else [splash.FullMask((size, size))]
    )
    if valid_BS is not None or not terms and size > N:
        valid_BS = jnp.ones((1, N), bool) if valid_BS is None else valid_BS[:, n]
        hidden_BS = jnp.pad(~valid_BS, ((0, 0), (0, size - N)), constant_values=True).astype(jnp.int32)
        hidden_BS = jnp.broadcast_to(hidden_BS, (len(q_BHNK), size)) + block_mask.zero(qkv)
    make = [functools.partial(_kernel, mask, **how) for mask in shown]
    key = {"k": qkv[1], "v": qkv[2], "hidden": hidden_BS, "device": jax.lax.axis_index(axis)}
    return _turns(make, axis, qkv[0], key)[:, :, :N].astype(v_BHSV.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _turns(make: list[Callable], axis: str, q_BHNK: jax.Array, key: dict) -> jax.Array:
    """y_BHNV from the keys of all devices; make: the kernel of keys of a device not behind this one, and of others."""
    return _turns_forward(make, axis, q_BHNK, key)[0]


def _turns_forward(make: list[Callable], axis: str, q_BHNK: jax.Array, key: dict) -> tuple[jax.Array, tuple]:
    """Of two sets of keys the averages are together e^(l1 - l) y1 + e^(l2 - l) y2, l = log(e^l1 + e^l2)."""

    def averages(kernel: Callable, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        y_BHNV, (lse_BHN,) = kernel(*arrays, sums=True)
        return y_BHNV, lse_BHN

    def turn(sums: tuple, key: dict) -> tuple:
        more = _one_turn(averages, make, axis, q_BHNK, key)
        lse_BHN = jnp.logaddexp(sums[1], more[1])
        return sum(y_BHNV * jnp.exp(lse - lse_BHN)[..., None] for y_BHNV, lse in (sums, more)), lse_BHN

    zero = block_mask.zero((q_BHNK, key)).astype(jnp.float32)
    nothing = jnp.full((*q_BHNK.shape[:3], key["v"].shape[3]), zero), jnp.full(q_BHNK.shape[:3], zero - jnp.inf)
    y_BHNV, lse_BHN = ring.around(turn, nothing, key, axis)
    blind_BHN = lse_BHN < BLIND
    y_BHNV, lse_BHN = jnp.where(blind_BHN[..., None], 0, y_BHNV), jnp.where(blind_BHN, jnp.inf, lse_BHN)
    y_BHNV, lse_BHN = (checkpoint_name(x, "attention") for x in (y_BHNV.astype(q_BHNK.dtype), lse_BHN))
    return y_BHNV, (q_BHNK, key, y_BHNV, lse_BHN)


def _turns_backward(make: list[Callable], axis: str, saved: tuple, dy_BHNV: jax.Array) -> tuple[jax.Array, dict]:
    """The kernel forms the weights again from the sums over the keys of all devices, so gradients only add up."""
    q_BHNK, key, *whole = saved

    def gradients(kernel: Callable, q_BHNK, k_BGSK, v_BGSV, ids, y_BHNV, lse_BHN, dy_BHNV) -> tuple:
        qkv = q_BHNK, k_BGSK, v_BGSV
        _, back = jax.vjp(lambda *qkv: kernel(*qkv, ids), *qkv)  # its own averages are not used, so not made
        return _with(back, qkv, y_BHNV, lambda _: lse_BHN)(dy_BHNV)

    def turn(carry: tuple, key: dict) -> tuple:
        dq_BHNK, dkv = carry
        more = _one_turn(gradients, make, axis, q_BHNK, key, *whole, dy_BHNV)
        dkv = jax.tree.map(jnp.add, ring.onward(dkv, axis), tuple(more[1:]))
        return dq_BHNK + more[0], dkv

    zero = block_mask.zero((q_BHNK, key, dy_BHNV)).astype(jnp.float32)
    nothing = jax.tree.map(lambda x: jnp.full(x.shape, zero), (q_BHNK, (key["k"], key["v"])))
    dq_BHNK, dkv = ring.around(turn, nothing, key, axis)
    dkv = {name: x.astype(key[name].dtype) for name, x in zip("kv", ring.onward(dkv, axis), strict=True)}
    return dq_BHNK.astype(q_BHNK.dtype), dict.fromkeys(key) | dkv


_turns.defvjp(_turns_forward, _turns_backward)


def _one_turn(function: Callable, make: list[Callable], axis: str, q_BHNK: jax.Array, key: dict, *more: Any) -> tuple:
    """function(kernel, q, k, v, ids, *more) by the kernel for the device whose keys these are."""
    hidden_BS = key["hidden"]
    ids = None if hidden_BS is None else (jnp.zeros_like(hidden_BS), hidden_BS)

    def chosen(later: jax.Array, *arrays: Any) -> Any:
        ways = [functools.partial(function, kernel) for kernel in make]
        return ways[0](*arrays) if len(ways) == 1 else jax.lax.cond(later, *ways[::-1], *arrays)

    return _elsewhere(chosen, key["device"] > jax.lax.axis_index(axis), q_BHNK, key["k"], key["v"], ids, *more)


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
