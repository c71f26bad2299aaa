"""Loss and accuracy of words chunk by chunk: neither the logits of all tokens nor their gradient are ever made at once.

l_t = G x_t + b (E24, E27). While the logits of a chunk are at hand, so is their gradient,
weight_t (softmax(l_t) - onehot(target_t)), and with it what the chunk adds to those of x, G and b: no product is made
twice, and the backward pass only scales. T counts tokens, of a device or of a chunk; sums and counts are as in loss.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tfm import layout as layouts
from tfm import linear, loss
from tfm.attention import block_mask

# Logits of a device from which on it makes them in chunks; of a chunk; and of one on a CPU.
# 8 x 1,024 tokens, D = 768, W = 50,304, bfloat16, loss and gradient as libtpu 0.0.50 estimates them for v5e-1: at once
# 27.5 ms and 2.30 GiB of temporaries; in chunks of 2**24, 2**25, 2**26, 2**27 logits 26.2, 23.5, 20.5, 21.1 ms, with
# 2**26 in 0.51 GiB (each chunk reads and writes the sum of G's gradients: 0.5 ms); as a scan of jax.checkpoint, which
# makes the logits twice, 33 to 36 ms. The step of GPT-2's 124 M: 153 instead of 160 ms, 5.2 instead of 9.1 GiB.
# On a CPU, two cores (AMD EPYC), 4 x 256 tokens, D = 128: 0.49 s at once; 0.46, 0.46, 0.65 s in chunks of 2**24, 2**25,
# 2**26; with D = 512: 1.08 s; 1.03, 1.08, 1.23 s.
FROM, LOGITS, ON_CPU = 2**24, 2**26, 2**24
FEW = 4  # times smaller chunks where few tokens are asked, since half of the last chunk is for nothing

Sums = tuple[jax.Array, jax.Array]  # of losses, and of right answers


class Asked(NamedTuple):
    """What a model of words is asked: the target of each token, and its weight in the mean, 0 where it is not asked.
    few: whether that is so of many tokens, as of words that are not hidden; only chunks of the others are then made."""

    target_BN: jax.Array
    weight_BN: jax.Array
    few: bool = False


def measures(
    head: dict, x_BND: jax.Array, asked: Asked, *, layout: layouts.Layout = layouts.ONE
) -> dict[str, loss.Ratio]:
    """loss.cross_entropy and loss.accuracy of the logits that tokens have by the head's G_WD and, if there is one, b_W.

    Tokens of weight 0 may be anything, also NaN: they reach neither sum nor gradient. With layout.vocab each device has
    the rows of some words, in order.
    """
    T, matrix, wide = asked.target_BN.size, (head["G_WD"], head.get("b_W")), jnp.promote_types(x_BND.dtype, jnp.float32)
    W = len(matrix[0])
    if T * W < FROM:
        answer = linear.answers(x_BND, *matrix), asked.target_BN, asked.weight_BN
        measured = {"loss": loss.cross_entropy, "accuracy": loss.accuracy}
        return {name: of(*answer, vocab=layout.vocab) for name, of in measured.items()}
    most = min(LOGITS, ON_CPU) if layout.platform == "cpu" else LOGITS
    size = block_mask.size(T, max(8, most // (W * (FEW if asked.few else 1))))
    flat = x_BND.reshape(T, -1), asked.target_BN.ravel(), asked.weight_BN.ravel().astype(wide)
    chunks = -(-T // size)
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
    total, right = _sums(size, layout.vocab, x_TD, matrix, target_T, weight_T, chunks)
    count = jnp.sum(asked.weight_BN)
    return {"loss": (total, count), "accuracy": (right, count)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(size: int, vocab: str | None, x_TD, matrix: tuple, target_T, weight_T, chunks) -> Sums:
    """The sums over the first so many chunks."""

    def step(i: jax.Array, sums: Sums) -> Sums:
        part = _cut(i, size, x_TD, target_T, weight_T)
        return _add(sums, _logits(vocab, matrix, *part)[0])

    return jax.lax.fori_loop(0, chunks, step, _none_yet(weight_T))


def _forward(size: int, vocab: str | None, x_TD, matrix: tuple, target_T, weight_T, chunks) -> tuple[Sums, tuple]:
    """The sums, and the gradients of the first of them with respect to x_TD, and to G_WD and b_W."""

    def step(i: jax.Array, carry: tuple) -> tuple:
        sums, dx_TD, dmatrix = carry
        part = _cut(i, size, x_TD, target_T, weight_T)
        more, l_TW, log_sum_T, is_target_TW = _logits(vocab, matrix, *part)
        dl_TW = part[-1][:, None] * (jnp.exp(l_TW - log_sum_T[:, None]) - is_target_TW)
        narrow_TW, wide = dl_TW.astype(x_TD.dtype), l_TW.dtype  # as wide as the products, which add up in float32
        dx_CD = jnp.matmul(narrow_TW, matrix[0], preferred_element_type=wide).astype(x_TD.dtype)
        dG_WD = jnp.matmul(narrow_TW.T, part[0], preferred_element_type=wide)
        dx_TD = jax.lax.dynamic_update_slice_in_dim(dx_TD, dx_CD, i * size, 0)
        return _add(sums, more), dx_TD, _add(dmatrix, (dG_WD, None if matrix[1] is None else dl_TW.sum(0)))

    zeros = jnp.zeros_like(x_TD), jax.tree.map(lambda a: jnp.zeros_like(a, weight_T.dtype), matrix)
    sums, dx_TD, dmatrix = jax.lax.fori_loop(0, chunks, step, (_none_yet(weight_T), *zeros))
    return sums, (dx_TD, jax.tree.map(lambda d, a: d.astype(a.dtype), dmatrix, matrix))


def _backward(size: int, vocab: str | None, gradients: tuple, incoming: Sums) -> tuple:
    """Right answers have no gradient, nor have weights."""
    return *jax.tree.map(lambda d: (incoming[0] * d).astype(d.dtype), gradients), None, None, None


_sums.defvjp(_forward, _backward)


def _none_yet(weight_T: jax.Array) -> Sums:
    return (block_mask.zero(weight_T).astype(weight_T.dtype),) * 2


def _add(sums: tuple, more: tuple) -> tuple:
    return jax.tree.map(jnp.add, sums, more)


def _cut(i: jax.Array, size: int, x_TD: jax.Array, *of_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chunk i: its tokens (0 where nothing is asked), their targets and weights."""
    x_TD, target_T, weight_T = (jax.lax.dynamic_slice_in_dim(a, i * size, size) for a in (x_TD, *of_T))
    return jnp.where(weight_T[:, None] > 0, x_TD, 0), target_T, weight_T


def _logits(
    vocab: str | None, matrix: tuple, x_TD: jax.Array, target_T: jax.Array, weight_T: jax.Array
) -> tuple[Sums, jax.Array, jax.Array, jax.Array]:
    """The sums over a chunk; its logits, the logarithm of the sum of their exponentials, and which the targets' are.

    A compiler makes two passes over the logits of it: the largest comes with the product, and the three sums together.
    Of equal logits the first is the answer, as in argmax: before_T counts those that would be it instead of the target.
    """
    l_TW = linear.answers(x_TD, *matrix)
    first = 0 if vocab is None else jax.lax.axis_index(vocab) * l_TW.shape[1]
    word_W, highest_T, target_T1 = first + jnp.arange(l_TW.shape[1]), l_TW.max(-1), target_T[:, None]
    highest_T = highest_T if vocab is None else jax.lax.pmax(highest_T, vocab)
    highest_T1, is_target_TW = highest_T[:, None], word_W == target_T1
    each_TW = jnp.exp(l_TW - highest_T1), jnp.where(is_target_TW, l_TW, 0), (l_TW == highest_T1) & (word_W < target_T1)
    sums = tuple(a_TW.sum(-1, dtype=l_TW.dtype) for a_TW in each_TW)
    sum_T, chosen_T, before_T = sums if vocab is None else jax.lax.psum(sums, vocab)
    log_sum_T, right_T = highest_T + jnp.log(sum_T), (chosen_T == highest_T) & (before_T == 0)
    measured = jnp.where(weight_T > 0, (log_sum_T - chosen_T) * weight_T, 0), right_T * weight_T
    return tuple(a_T.sum() for a_T in measured), l_TW, log_sum_T, is_target_TW
