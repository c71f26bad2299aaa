"""Loss and accuracy of words chunk by chunk: neither the logits of all tokens nor their gradient are ever made at once.

l_t = G x_t + b (E24, E27), or cap tanh(l_t / cap) of it. While the logits of a chunk are at hand, so is their gradient,
weight_t (softmax(l_t) - onehot(target_t)), times 1 - (l_t / cap)^2 where there is a cap, and with it what the chunk
adds to those of x, G and b: no product is made twice, and the backward pass only scales. T counts tokens, of a device
or of a chunk; sums and counts are as in loss.py.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import layout as layouts, linear, loss
from tfm.attention import block_mask, explicit

# Logits of a device from which on it makes them in chunks; of a chunk; and of one on a CPU.
# 8 x 1,024 tokens, D = 768, W = 50,304, bfloat16, loss and gradient as libtpu 0.0.50 estimates them for v5e-1, in the
# step of GPT-2's 124 M: in chunks of 2**26, 2**27, 2**28 logits 17.8, 15.6, 15.6 ms, with 2**27 in 0.9 GiB; at once, by
# loss.py, 27.5 ms and 2.3 GiB (each chunk reads and writes the sum of G's gradients: 0.5 ms).
# On a CPU, two cores (AMD EPYC), 4 x 256 tokens, D = 128: 0.49 s at once; 0.46, 0.46, 0.65 s in chunks of 2**24, 2**25,
# 2**26; with D = 512: 1.08 s; 1.03, 1.08, 1.23 s.
FROM, LOGITS, ON_CPU = 2**24, 2**27, 2**24
FEW = 4  # times smaller chunks where few tokens are asked, since half of the last chunk is for nothing

Sums = tuple[jax.Array, jax.Array]  # of losses, and of right answers


class Asked(NamedTuple):
    """What a model of words is asked: the target of each token, and its weight in the mean, 0 where it is not asked.
    few: whether that is so of many tokens, as of words that are not hidden; only chunks of the others are then made."""

    target_BN: jax.Array
    weight_BN: jax.Array
    few: bool = False


def measures(
    head: dict, x_BND: jax.Array, asked: Asked, *, cap: float = 0.0, layout: layouts.Layout = layouts.ONE
) -> dict[str, loss.Ratio]:
    """loss.cross_entropy and loss.accuracy of the logits that tokens have by the head's G_WD and, if there is one, b_W,
    softly capped (explicit.capped).

    Tokens of weight 0 may be anything, also NaN: they reach neither sum nor gradient. With layout.vocab each device has
    the rows of some words, in order.
    """
    T, matrix, wide = asked.target_BN.size, (head["G_WD"], head.get("b_W")), jnp.promote_types(x_BND.dtype, jnp.float32)
    W = len(matrix[0])
    if T * W < FROM:
        answer = explicit.capped(linear.answers(x_BND, *matrix), cap), asked.target_BN, asked.weight_BN
        measured = {"loss": loss.cross_entropy, "accuracy": loss.accuracy}
        return {name: of(*answer, vocab=layout.vocab) for name, of in measured.items()}
    most = min(LOGITS, ON_CPU) if layout.platform == "cpu" else LOGITS
    size = block_mask.size(T, max(8, most // (W * (FEW if asked.few else 1))))
    flat = x_BND.reshape(T, -1), asked.target_BN.ravel(), asked.weight_BN.ravel().astype(wide)
    chunks = None  # all
    if asked.few:  # they come first
        order_T = jnp.argsort(flat[-1] <= 0, stable=True)
        flat = tuple(a.at[order_T].get(unique_indices=True) for a in flat)
        chunks = -(-jnp.sum(flat[-1] > 0) // size)
        if layout.vocab:  # whose devices wait for each other in every chunk
            chunks = jax.lax.pmax(chunks, layout.tokens)
    flat = (jnp.pad(a, [(0, -T % size)] + [(0, 0)] * (a.ndim - 1)) for a in flat)
    x_TD, target_T, weight_T = flat
    weight_T += block_mask.zero((x_TD, target_T)).astype(wide)
    # All vary over the same devices from here on, so that what JAX sums over devices is the finished gradient.
    zero = block_mask.zero((x_TD, matrix, weight_T))
    x_TD, matrix = jax.tree.map(lambda a: a + zero.astype(a.dtype), (x_TD, matrix))
    how = size, layout.vocab, layout.platform != "cpu" and not cap, cap
    total, right = _sums(*how, x_TD, matrix, target_T, weight_T, chunks)
    count = jnp.sum(asked.weight_BN)
    return {"loss": (total, count), "accuracy": (right, count)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _sums(
    size: int, vocab: str | None, beside: bool, cap: float, x_TD, matrix: tuple, target_T, weight_T, chunks
) -> Sums:
    """The sums over the first so many chunks, or over all."""

    def step(i: jax.Array, sums: Sums) -> Sums:
        x_CD, target_C, weight_C = _cut(i, size, x_TD, target_T, weight_T)
        found = _logits(vocab, cap, matrix, x_CD, target_C)
        return _add(sums, _measured(vocab, found, found.e_TW.sum(-1), weight_C)[0])

    return jax.lax.fori_loop(0, _number(chunks, size, x_TD), step, _none_yet(weight_T))


def _forward(
    size: int, vocab: str | None, beside: bool, cap: float, x_TD, matrix: tuple, target_T, weight_T, chunks
) -> tuple[Sums, tuple]:
    """The sums, and the gradients of the first of them with respect to x_TD, and to G_WD and b_W.

    beside: that of x_t is weight_t (sum_w e_tw g_w / sum_w e_tw - g_target), and a column of ones beside G has one
    product make both sums, without a pass over the logits for the second, which on a CPU takes less than that product;
    nor with a cap, whose slope is another one for each logit. Of 16-bit tokens these e are 16-bit numbers too, which
    moves the loss by 1e-5 of it at most; `_sums`, without a gradient, adds up wide ones.
    """
    G_WD, b_W = matrix
    first = _first(vocab, G_WD)
    columns_WD = jnp.concatenate([G_WD, jnp.ones_like(G_WD[:, :1])], 1) if beside else None

    def step(i: jax.Array, carry: tuple) -> tuple:
        sums, dx_TD, dmatrix = carry
        x_CD, target_C, weight_C = _cut(i, size, x_TD, target_T, weight_T)
        found = _logits(vocab, cap, matrix, x_CD, target_C)
        product = functools.partial(jnp.matmul, preferred_element_type=found.e_TW.dtype)  # it adds up in float32
        y_CD = product(found.e_TW.astype(x_TD.dtype), columns_WD) if beside else None
        more, sum_C = _measured(vocab, found, y_CD[:, -1] if beside else found.e_TW.sum(-1), weight_C)
        is_target_CW = first + jnp.arange(len(G_WD)) == target_C[:, None]
        dl_CW = (weight_C / sum_C)[:, None] * found.e_TW - jnp.where(is_target_CW, weight_C[:, None], 0)
        dl_CW = dl_CW if found.slope_TW is None else dl_CW * found.slope_TW
        narrow_CW = dl_CW.astype(x_TD.dtype)
        if beside:
            own_CD = G_WD.at[target_C - first].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            dx_CD = weight_C[:, None] * (y_CD[:, :-1] / sum_C[:, None] - own_CD)
        else:
            dx_CD = product(narrow_CW, G_WD)
        dx_TD = jax.lax.dynamic_update_slice_in_dim(dx_TD, dx_CD.astype(x_TD.dtype), i * size, 0)
        dG_WD = product(narrow_CW.T, x_CD)
        return _add(sums, more), dx_TD, _add(dmatrix, (dG_WD, None if b_W is None else dl_CW.sum(0)))

    zeros = jnp.zeros_like(x_TD), jax.tree.map(lambda a: jnp.zeros_like(a, weight_T.dtype), matrix)
    carry = _none_yet(weight_T), *zeros
    sums, dx_TD, dmatrix = jax.lax.fori_loop(0, _number(chunks, size, x_TD), step, carry)
    return sums, (dx_TD, jax.tree.map(lambda d, a: d.astype(a.dtype), dmatrix, matrix))


def _backward(size: int, vocab: str | None, beside: bool, cap: float, gradients: tuple, incoming: Sums) -> tuple:
    """Right answers have no gradient, nor have weights."""
    return *jax.tree.map(lambda d: (incoming[0] * d).astype(d.dtype), gradients), None, None, None


_sums.defvjp(_forward, _backward)


def _number(chunks: jax.Array | None, size: int, x_TD: jax.Array) -> Any:
    """How many chunks; where it is all of them the program says so, and what it does can be counted."""
    return len(x_TD) // size if chunks is None else chunks


def _none_yet(weight_T: jax.Array) -> Sums:
    return (block_mask.zero(weight_T).astype(weight_T.dtype),) * 2


def _add(sums: tuple, more: tuple) -> tuple:
    return jax.tree.map(jnp.add, sums, more)


def _cut(i: jax.Array, size: int, x_TD: jax.Array, *of_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chunk i: its tokens (0 where nothing is asked), their targets and weights."""
    x_TD, target_T, weight_T = (jax.lax.dynamic_slice_in_dim(a, i * size, size) for a in (x_TD, *of_T))
    return jnp.where(weight_T[:, None] > 0, x_TD, 0), target_T, weight_T


class _Found(NamedTuple):
    """Of a chunk: e_TW = exp(l_TW - highest_T), the logits of the targets, and which of these are the answer; and
    what a cap makes of a small change of each logit."""

    e_TW: jax.Array
    highest_T: jax.Array
    chosen_T: jax.Array
    right_T: jax.Array
    slope_TW: jax.Array | None


def _logits(vocab: str | None, cap: float, matrix: tuple, x_TD: jax.Array, target_T: jax.Array) -> _Found:
    """Of equal logits the first is the answer, as in argmax: of a word before the target the next larger number counts.
    So one largest number says both, and comes with the product; the numbers are compared as integers in their order.
    """
    l_TW, first = explicit.capped(linear.answers(x_TD, *matrix), cap), _first(vocab, matrix[0])
    slope_TW = 1 - jnp.square(l_TW / cap) if cap else None
    integer = jnp.dtype(f"int{8 * l_TW.dtype.itemsize}")

    def ordered(i: jax.Array) -> jax.Array:  # its own inverse
        return jnp.where(i < 0, i ^ jnp.iinfo(integer).max, i)

    def place(l_T: jax.Array) -> jax.Array:
        return ordered(jax.lax.bitcast_convert_type(l_T, integer))

    W, at_T1 = l_TW.shape[1], (target_T - first)[:, None]
    highest_T = (place(l_TW) + (jnp.arange(W) < at_T1)).max(-1)
    chosen_T = jnp.take_along_axis(l_TW, jnp.clip(at_T1, 0, W - 1), -1)[:, 0]
    if vocab is not None:
        own_T = (at_T1[:, 0] >= 0) & (at_T1[:, 0] < W)
        highest_T, chosen_T = jax.lax.pmax(highest_T, vocab), jax.lax.psum(jnp.where(own_T, chosen_T, 0), vocab)
    right_T, highest_T = place(chosen_T) == highest_T, jax.lax.bitcast_convert_type(ordered(highest_T), l_TW.dtype)
    return _Found(jnp.exp(l_TW - highest_T[:, None]), highest_T, chosen_T, right_T, slope_TW)


def _measured(vocab: str | None, found: _Found, sum_T: jax.Array, weight_T: jax.Array) -> tuple[Sums, jax.Array]:
    """The sums over a chunk, and sum_T over the words of all devices; sum_T: sum_w e_tw over a device's own."""
    sum_T = sum_T if vocab is None else jax.lax.psum(sum_T, vocab)
    loss_T = (found.highest_T + jnp.log(sum_T) - found.chosen_T) * weight_T
    return (jnp.where(weight_T > 0, loss_T, 0).sum(), (found.right_T * weight_T).sum()), sum_T


def _first(vocab: str | None, G_WD: jax.Array) -> Any:
    """The word of a device's first row of G."""
    return 0 if vocab is None else jax.lax.axis_index(vocab) * len(G_WD)
