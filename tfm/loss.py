"""Losses and metrics as (sum, count), which several devices add up before they divide.

`cross_entropy` and `accuracy` take logits (..., C), targets (...) and weights (...); `squared_error` takes patches.
Weight 0 marks padding, or a token without a target. vocab: the mesh axis over which the logits are sharded, in order of
the token ids. `next_token` takes hidden states instead of logits, and never holds the logits of all tokens at once.
"""

import functools

import jax
import jax.numpy as jnp

from tfm import layout as layouts, linear, shapes
from tfm.attention import block_mask, explicit

Ratio = tuple[jax.Array, jax.Array]

# `next_token` uses chunks from FROM logits a device on; LOGITS and ON_CPU are the logits of a chunk.
# 8 x 1,024 tokens, D = 768, W = 50,304, bfloat16, loss and gradient as libtpu 0.0.50 estimates them for v5e-1, in the
# step of GPT-2's 124 M: in chunks of 2**26, 2**27, 2**28 logits 17.8, 15.6, 15.6 ms, with 2**27 in 0.9 GiB; at once
# 27.5 ms and 2.3 GiB (each chunk reads and writes the sum of G's gradients: 0.5 ms).
# On a CPU, two cores (AMD EPYC), 4 x 256 tokens, D = 128: 0.49 s at once; 0.46, 0.46, 0.65 s in chunks of 2**24, 2**25,
# 2**26; with D = 512: 1.08 s; 1.03, 1.08, 1.23 s.
FROM, LOGITS, ON_CPU = 2**24, 2**27, 2**24
SPARSE = 4  # chunks are so many times smaller if few tokens are targets: half of the last chunk is padding


def cross_entropy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, vocab: str | None = None) -> Ratio:
    """Return the weighted sum of -log softmax(l)_target, in nats, and the sum of the weights."""
    logits, W = linear.to_float32(logits), logits.shape[-1]
    if vocab is None:
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        surprise = jax.nn.logsumexp(logits, axis=-1) - chosen
    else:  # log sum_w exp(l_w) - l_target with sums over the devices, after subtracting the largest logit
        highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), vocab)
        highest = jnp.where(jnp.isfinite(highest), highest, 0)[..., None]  # -inf - -inf would be NaN
        sums = jax.lax.psum(jnp.exp(logits - highest).sum(-1), vocab)
        local = target - jax.lax.axis_index(vocab) * W
        is_local = (local >= 0) & (local < W)
        chosen = jnp.take_along_axis(logits - highest, jnp.where(is_local, local, 0)[..., None], axis=-1)[..., 0]
        surprise = jnp.log(sums) - jax.lax.psum(jnp.where(is_local, chosen, 0), vocab)
    return jnp.sum(jnp.where(weight > 0, surprise * weight, 0)), jnp.sum(weight)


def accuracy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, vocab: str | None = None) -> Ratio:
    """Return the weighted number of targets with the largest logit, and the sum of the weights."""
    logits = jax.lax.stop_gradient(logits)
    best = jnp.argmax(logits, axis=-1)
    if vocab is not None:  # the first of several largest logits, as in argmax
        W, highest = logits.shape[-1], logits.max(-1)
        token, last = best + jax.lax.axis_index(vocab) * W, jnp.iinfo(best.dtype).max
        best = jax.lax.pmin(jnp.where(highest == jax.lax.pmax(highest, vocab), token, last), vocab)
    return jnp.sum((best == target) * weight), jnp.sum(weight)


def squared_error(prediction_BNP: jax.Array, target_BNP: jax.Array, weight_BN: jax.Array) -> Ratio:
    """Return the weighted sum of (v - v')^2 over the pixels of patches, and the weighted number of pixels (E26).

    Patches of weight 0 may hold any finite numbers.
    """
    weight_BN1 = linear.to_float32(weight_BN)[..., None]
    difference_BNP = linear.to_float32(prediction_BNP) - linear.to_float32(target_BNP)
    difference_BNP = jnp.where(weight_BN1 > 0, difference_BNP, 0)
    return jnp.sum(weight_BN1 * difference_BNP**2), jnp.sum(weight_BN) * target_BNP.shape[-1]


def next_token(
    x_BND: jax.Array,
    head: dict,
    target_BN: jax.Array,
    weight_BN: jax.Array,
    *,
    cap: float = 0.0,
    sparse: bool = False,
    layout: layouts.Layout = layouts.ONE,
) -> dict[str, Ratio]:
    """Return {"loss": cross_entropy, "accuracy": accuracy} of the logits G x_t + b, softly capped (E24, E27).

    head: the output matrix G_WD and optionally b_W; with layout.vocab each device holds the rows of some tokens, in
    order. sparse: few tokens are targets, such as masked ones, and only chunks with targets are computed. Many logits
    are computed in chunks, and the gradient of a chunk together with its loss. So the logits of all tokens and their
    gradient never exist at once, and no product is computed twice.
    """
    matrix = shapes.find(head, "G"), shapes.find(head, "b")
    T, W = target_BN.size, len(matrix[0])
    if T * W < FROM:
        return _metrics(x_BND, matrix, target_BN, weight_BN, cap, layout.vocab)
    chunk = min(LOGITS, ON_CPU) if layout.platform == "cpu" else LOGITS
    size = block_mask.size(T, max(8, chunk // (W * (SPARSE if sparse else 1))))
    flat = x_BND.reshape(T, -1), target_BN.ravel(), linear.to_float32(weight_BN.ravel())
    count = None  # all chunks
    if sparse:  # targets first; chunks without targets are skipped
        order_T = jnp.argsort(flat[-1] <= 0, stable=True)
        flat = tuple(array.at[order_T].get(unique_indices=True) for array in flat)
        count = -(-jnp.sum(flat[-1] > 0) // size)
        if layout.vocab:  # these devices wait for each other in every chunk
            count = jax.lax.pmax(count, layout.tokens)
    x_ITD, target_IT, weight_IT = (block_mask.cut(array, 0, size) for array in flat)
    weight_IT += block_mask.zero((x_ITD, target_IT)).astype(weight_IT.dtype)
    # All arrays vary over the same devices from here on, so that JAX sums the finished gradient over devices.
    zero = block_mask.zero((x_ITD, matrix, weight_IT))
    x_ITD, matrix = jax.tree.map(lambda array: array + zero.astype(array.dtype), (x_ITD, matrix))
    loss, correct = _sum_chunks(cap, layout.vocab, x_ITD, matrix, target_IT, weight_IT, count)
    return {"loss": (loss, jnp.sum(weight_BN)), "accuracy": (correct, jnp.sum(weight_BN))}


def _metrics(x: jax.Array, matrix: tuple, target: jax.Array, weight: jax.Array, cap: float, vocab: str | None) -> dict:
    logits = explicit.soft_cap(linear.logits(x, *matrix), cap)
    loss = cross_entropy(logits, target, weight, vocab=vocab)
    return {"loss": loss, "accuracy": accuracy(logits, target, weight, vocab=vocab)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_chunks(cap: float, vocab: str | None, x_ITD, matrix: tuple, target_IT, weight_IT, count) -> Ratio:
    """Return the summed loss and number of correct predictions of the first `count` of I chunks (None: of all)."""

    def add(i: jax.Array, sums: Ratio) -> Ratio:
        metrics = _metrics(x_ITD[i], matrix, target_IT[i], weight_IT[i], cap, vocab)
        return sums[0] + metrics["loss"][0], sums[1] + metrics["accuracy"][0]

    zero = block_mask.zero(weight_IT).astype(weight_IT.dtype)
    return jax.lax.fori_loop(0, len(x_ITD) if count is None else count, add, (zero, zero))


def _sum_forward(cap: float, vocab: str | None, x_ITD, matrix: tuple, target_IT, weight_IT, count) -> tuple:
    """Return the sums, and the gradients of the loss with respect to x and the matrix."""

    def chunk_loss(x_TD: jax.Array, matrix: tuple, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        metrics = _metrics(x_TD, matrix, target_IT[i], weight_IT[i], cap, vocab)
        return metrics["loss"][0], metrics["accuracy"][0]

    def add(i: jax.Array, carry: tuple) -> tuple:
        total_loss, total_correct, dx_ITD, dmatrix = carry
        gradient = jax.value_and_grad(chunk_loss, (0, 1), has_aux=True)
        (loss, correct), (dx_TD, chunk_dmatrix) = gradient(x_ITD[i], matrix, i)
        dmatrix = jax.tree.map(lambda d, m: d + m.astype(d.dtype), dmatrix, chunk_dmatrix)
        return total_loss + loss, total_correct + correct, dx_ITD.at[i].set(dx_TD), dmatrix

    zero = block_mask.zero(weight_IT).astype(weight_IT.dtype)
    zeros = jnp.zeros_like(x_ITD), jax.tree.map(lambda array: jnp.zeros_like(array, weight_IT.dtype), matrix)
    end, start = len(x_ITD) if count is None else count, (zero, zero, *zeros)
    loss, correct, dx_ITD, dmatrix = jax.lax.fori_loop(0, end, add, start)
    return (loss, correct), (dx_ITD, jax.tree.map(lambda d, m: d.astype(m.dtype), dmatrix, matrix))


def _sum_backward(cap: float, vocab: str | None, gradients: tuple, incoming: Ratio) -> tuple:
    """Return the scaled gradients of x and the matrix; targets, weights and the count have none."""
    return *jax.tree.map(lambda d: (incoming[0] * d).astype(d.dtype), gradients), None, None, None


_sum_chunks.defvjp(_sum_forward, _sum_backward)
