"""Losses and metrics as pairs (sum, count): several devices add up the pairs before they divide.

`cross_entropy` and `accuracy` take logits (..., C), targets (...) and weights (...); `squared_error` takes patches.
Weight 0 marks padding, or a token without a target. vocab: the mesh axis over which the logits are sharded, in order of
the token ids. `in_chunks` takes tokens instead of logits: if there are many logits, it computes them in chunks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import layout as layouts, linear
from tfm.attention import block_mask

Ratio = tuple[jax.Array, jax.Array]  # (sum, count)

# `in_chunks` computes MIN_CHUNKED or more logits of a device in chunks of CHUNK logits, on a CPU of CHUNK_CPU.
# On a TPU v5e-1, loss and gradient in the training step of GPT-2 124 M (8 x 1,024 tokens, D = 768, W = 50,304,
# bfloat16) take 17.8, 15.6, 15.6 ms in chunks of 2**26, 2**27, 2**28 logits, and 0.9 GiB with 2**27; without chunks
# 27.5 ms and 2.3 GiB (estimates of libtpu 0.0.50, of a version whose `accuracy` took 5 ms more). Each chunk takes 0.5
# ms to read and write the summed gradient of G.
# On two CPU cores (AMD EPYC), 4 x 256 tokens with D = 128 take 0.46, 0.46, 0.65 s in chunks of 2**24, 2**25, 2**26, and
# 0.49 s without chunks; with D = 512 they take 1.03, 1.08, 1.23 s, and 1.08 s without chunks.
MIN_CHUNKED, CHUNK, CHUNK_CPU = 2**24, 2**27, 2**24
SPARSE = 4  # factor by which chunks are smaller if few tokens are targets: on average half of the last chunk is padding


def cross_entropy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, vocab: str | None = None) -> Ratio:
    """Return the weighted sum of -log softmax(l)_target, in nats, and the sum of the weights.

    vocab: the mesh axis over which the token ids of the logits are sharded, in order; None: no axis.
    """
    logits = linear.to_float32(logits)
    if vocab is None:
        surprise = jax.nn.logsumexp(logits, axis=-1) - _take_target(logits, target, None)[..., 0]
    else:  # log sum_w exp(l_w) - l_target with sums over the devices, after subtracting the largest logit
        highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), vocab)
        highest = jnp.where(jnp.isfinite(highest), highest, 0)[..., None]  # -inf - -inf would be NaN
        sums = jax.lax.psum(jnp.exp(logits - highest).sum(-1), vocab)
        surprise = jnp.log(sums) - _take_target(logits - highest, target, vocab)[..., 0]
    return jnp.sum(jnp.where(weight > 0, surprise * weight, 0)), jnp.sum(weight)


def _take_target(logits: jax.Array, target: jax.Array, vocab: str | None) -> jax.Array:
    """Return the logit of each target, with an axis of size 1 in place of the classes."""
    if vocab is None:
        return jnp.take_along_axis(logits, target[..., None], axis=-1)
    W = logits.shape[-1]
    local = (target - jax.lax.axis_index(vocab) * W)[..., None]
    is_local = (local >= 0) & (local < W)
    chosen = jnp.take_along_axis(logits, jnp.where(is_local, local, 0), axis=-1)
    return jax.lax.psum(jnp.where(is_local, chosen, 0), vocab)


def accuracy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, vocab: str | None = None) -> Ratio:
    """Return the weighted number of targets whose logit is the largest, and the sum of the weights.

    vocab: the mesh axis over which the token ids of the logits are sharded, in order; None: no axis. Of several largest
    logits the first counts, as in argmax. If a logit is NaN, its prediction is wrong. The logits above the target's are
    counted as floats, because a TPU then counts them while it sums the exponentials of the cross-entropy. With argmax,
    GPT-2's step takes 7 % longer (v5e, estimated).
    """
    logits = jax.lax.stop_gradient(logits)
    chosen, W = _take_target(logits, target, vocab), logits.shape[-1]
    first = 0 if vocab is None else jax.lax.axis_index(vocab) * W  # the class of this device's first logit
    index = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_behind = (logits < chosen) | ((logits == chosen) & (index >= target[..., None]))
    ahead = jnp.where(is_behind, 0.0, 1.0).sum(-1)
    ahead = ahead if vocab is None else jax.lax.psum(ahead, vocab)
    return jnp.sum((ahead == 0) * weight), jnp.sum(weight)


def smoothed_cross_entropy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, smoothing: float) -> Ratio:
    """Return the weighted sum of the cross-entropy with (1 - s) one-hot(target) + s / C, and the sum of the weights.

    s: smoothing, the share of the target that all C classes divide equally (Szegedy et al. 2016, section 7).
    """
    logits = linear.to_float32(logits)
    every = jax.nn.logsumexp(logits, axis=-1) - logits.mean(-1)  # the mean over all classes
    total, count = cross_entropy(logits, target, weight)
    return (1 - smoothing) * total + smoothing * jnp.sum(jnp.where(weight > 0, every * weight, 0)), count


def weighted_cross_entropy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, weight_C: jax.Array) -> Ratio:
    """Return `cross_entropy` with the weights weight * weight_C[target], where weight_C has a weight for each class."""
    return cross_entropy(logits, target, weight * jnp.asarray(weight_C)[target])


def top5(logits: jax.Array, target: jax.Array, weight: jax.Array) -> Ratio:
    """Return the weighted number of targets with one of the five largest logits, and the sum of the weights."""
    _, best = jax.lax.top_k(jax.lax.stop_gradient(logits), min(5, logits.shape[-1]))
    return jnp.sum((best == target[..., None]).any(-1) * weight), jnp.sum(weight)


def squared_error(prediction_BNP: jax.Array, target_BNP: jax.Array, weight_BN: jax.Array) -> Ratio:
    """Return the weighted sum of (v - v')^2 over the pixels of patches, and the weighted number of pixels (E26).

    Patches of weight 0 do not count, even if they hold NaN.
    """
    weight_BN1 = linear.to_float32(weight_BN)[..., None]
    difference_BNP = linear.to_float32(prediction_BNP) - linear.to_float32(target_BNP)
    difference_BNP = jnp.where(weight_BN1 > 0, difference_BNP, 0)
    return jnp.sum(weight_BN1 * difference_BNP**2), jnp.sum(weight_BN) * target_BNP.shape[-1]


def measure(logits: jax.Array, target: jax.Array, weight: jax.Array, *, vocab: str | None = None) -> dict[str, Ratio]:
    """Return {"loss": cross_entropy(...), "accuracy": accuracy(...)}, called with these arguments."""
    loss = cross_entropy(logits, target, weight, vocab=vocab)
    return {"loss": loss, "accuracy": accuracy(logits, target, weight, vocab=vocab)}


def in_chunks(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    x_BND: jax.Array,
    target_BN: jax.Array,
    weight_BN: jax.Array,
    *,
    sparse: bool = False,
    layout: layouts.Layout = layouts.ONE,
) -> dict[str, Ratio]:
    """Return {"loss", "accuracy"} of the logits of tokens x, l_t = logits(params, x_t), without storing all logits.

    Each is a pair (sum, count) of `measure`. Fewer than MIN_CHUNKED logits are computed at once (E24, E27).

    With layout.vocab the logits of a device are those of some token ids, in order. sparse: True if few tokens are
    targets (masked tokens); chunks without targets are then skipped. A chunk computes its loss and its gradient
    together. So the logits of all tokens never exist at once, and no product is computed twice.
    """
    T, W = target_BN.size, jax.eval_shape(logits, params, x_BND).shape[-1]
    if T * W < MIN_CHUNKED:
        return measure(logits(params, x_BND), target_BN, weight_BN, vocab=layout.vocab)
    chunk = min(CHUNK, CHUNK_CPU) if layout.platform == "cpu" else CHUNK
    size = block_mask.size(T, max(8, chunk // (W * (SPARSE if sparse else 1))))
    flat = x_BND.reshape(T, -1), target_BN.ravel(), linear.to_float32(weight_BN.ravel())
    count = None  # all chunks
    if sparse:  # sort the targets to the front, so that chunks without targets can be skipped
        order_T = jnp.argsort(flat[-1] <= 0, stable=True)
        flat = tuple(array.at[order_T].get(unique_indices=True) for array in flat)
        count = -(-jnp.sum(flat[-1] > 0) // size)
        if layout.vocab:  # every chunk has collectives, so all devices must compute the same number of chunks
            count = jax.lax.pmax(count, layout.tokens)
    x_ITD, target_IT, weight_IT = (block_mask.cut(array, 0, size) for array in flat)
    weight_IT = layouts.vary_alike(weight_IT, x_ITD, target_IT)
    # From here on all arrays vary over the same mesh axes. So JAX sums the gradient over devices once, not per chunk.
    x_ITD, params = layouts.vary_alike((x_ITD, params), weight_IT)

    def measure_chunk(params: Any, x_TD: jax.Array, target_T: jax.Array, weight_T: jax.Array) -> Ratio:
        measures = measure(logits(params, x_TD), target_T, weight_T, vocab=layout.vocab)
        return measures["loss"][0], measures["accuracy"][0]

    loss, correct = _sum_chunks(measure_chunk, params, x_ITD, target_IT, weight_IT, count)
    return {"loss": (loss, jnp.sum(weight_BN)), "accuracy": (correct, jnp.sum(weight_BN))}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_chunks(measure_chunk: Callable, params: Any, x_ITD, target_IT, weight_IT, count) -> Ratio:
    """Return loss and number of correct predictions, summed over the first `count` of I chunks (None: all chunks)."""

    def add(i: jax.Array, sums: Ratio) -> Ratio:
        loss, correct = measure_chunk(params, x_ITD[i], target_IT[i], weight_IT[i])
        return sums[0] + loss, sums[1] + correct

    zero = layouts.vary_alike(jnp.zeros((), weight_IT.dtype), weight_IT)
    return jax.lax.fori_loop(0, len(x_ITD) if count is None else count, add, (zero, zero))


def _sum_forward(measure_chunk: Callable, params: Any, x_ITD, target_IT, weight_IT, count) -> tuple:
    """Return the sums, and the gradients of the loss with respect to the parameters and x, for `_sum_backward`."""
    gradient = jax.value_and_grad(measure_chunk, (0, 1), has_aux=True)

    def add(i: jax.Array, carry: tuple) -> tuple:
        total_loss, total_correct, dparams, dx_ITD = carry
        (loss, correct), (chunk_dparams, dx_TD) = gradient(params, x_ITD[i], target_IT[i], weight_IT[i])
        dparams = jax.tree.map(lambda total, d: total + d.astype(total.dtype), dparams, chunk_dparams)
        return total_loss + loss, total_correct + correct, dparams, dx_ITD.at[i].set(dx_TD)

    zero = layouts.vary_alike(jnp.zeros((), weight_IT.dtype), weight_IT)
    zeros = jax.tree.map(lambda array: jnp.zeros_like(array, weight_IT.dtype), params), jnp.zeros_like(x_ITD)
    end, start = len(x_ITD) if count is None else count, (zero, zero, *zeros)
    loss, correct, dparams, dx_ITD = jax.lax.fori_loop(0, end, add, start)
    return (loss, correct), (jax.tree.map(lambda d, array: d.astype(array.dtype), dparams, params), dx_ITD)


def _sum_backward(measure_chunk: Callable, gradients: tuple, cotangents: Ratio) -> tuple:
    """Return the gradients of the parameters and x times the loss's cotangent, and None for each array after x."""
    return *jax.tree.map(lambda d: (cotangents[0] * d).astype(d.dtype), gradients), None, None, None


_sum_chunks.defvjp(_sum_forward, _sum_backward)
