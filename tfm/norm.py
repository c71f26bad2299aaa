"""Norms: standardisation over some axes, then a gain and a shift per feature (E14-E17).

| name                          | over                                    | tokens exchange something               |
|-------------------------------|-----------------------------------------|-----------------------------------------|
| token, token_plain, rms       | the features of each token              | no                                      |
| batch                         | batch and sequence, for each feature    | in training; in evaluation nothing      |
| batch_features                | batch and features, for each position   | in training, with those of its place    |
| instance                      | the sequence, for each feature          | always                                  |
| layer_sequence                | the features and the sequence together  | always                                  |
| none                          | nothing: the tokens as they are         | no                                      |

Where tokens exchange something, no mask keeps any out: paddings count like words, later tokens like earlier ones (so a
model with a causal mask is causal no longer), and a NaN reaches the others. In evaluation `batch` uses an average of
the statistics of past batches, paddings and all; `instance` and `layer_sequence` have none, and cannot be decoded token
by token. Seed 003 calls the batch norm of transformers that over features and batch, `batch_features`; `batch` is what
it is in CNNs, as `layer_sequence` is their layer norm.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tfm import layout as layouts, linear, platform, shapes


def observe_nothing(x_BND: jax.Array, *, layout: layouts.Layout) -> dict[str, jax.Array]:
    """Return no statistics: those of a norm without running averages."""
    return {}


class Norm(NamedTuple):
    """`init(key, *, D) -> params` and `apply(params, x_BND, *, eps, layout) -> x_BND`.

    `observe(x_BND, *, layout) -> {name: statistic}` measures a batch, also one that devices share. In training the
    statistics are used at once, `apply(params | observe(x, layout=layout), x, ...)`, and a running average of them is
    kept in the parameters, where `apply` finds it in evaluation. takes_layout: as in variant.py. needs_all_tokens:
    whether it needs all tokens of a sequence at once, which a causal model does not have.
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., jax.Array]
    observe: Callable[..., dict[str, jax.Array]] = observe_nothing
    takes_layout: bool = False
    needs_all_tokens: bool = False


def _init(*names: str) -> Callable[..., dict[str, jax.Array]]:
    """Return the `init` of these leaves: gains and variances are 1, shifts and means 0. Leaves with an N need its size.
    E: of tokens with E features, as the leaves' names then say; 0: D."""

    def init(key: jax.Array, *, D: int, N: int = 0, E: int = 0) -> dict[str, jax.Array]:
        value, sizes = {"gain": jnp.ones, "var": jnp.ones}, {"D": D, "N": N, "E": E}
        own = [name.replace("_D", "_E") if E else name for name in names]
        return {name: value.get(name[:-2], jnp.zeros)(shapes.size(name, sizes)) for name in own}

    return init


def _mean(x: jax.Array, axes: str | tuple[str, ...] | None, *, axis: Any, **keep: bool) -> jax.Array:
    """The mean, also over the devices of these mesh axes, which have as many numbers each. Divided before it is summed:
    a TPU's compiler makes a division of the sums a pass of its own, which takes as long as a small sum does."""
    own = jnp.sum(x * float(1 / np.take(x.shape, axis).prod()), axis=axis, **keep)
    return jax.lax.pmean(own, axes) if axes else own


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardise(x: jax.Array, eps: float, mean: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """(x - mean(x)) / sqrt(var + eps), var = mean((x - mean(x))^2); x in float32 or wider."""
    return _standardised(x, eps, mean)[0]


def _standardised(x: jax.Array, eps: float, mean: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The same, and 1 / sqrt(var + eps)."""
    centred = x - checkpoint_name(mean(x), "statistic")
    factor = checkpoint_name(jax.lax.rsqrt(mean(jnp.square(centred)) + eps), "statistic")
    return centred * factor, factor


@_standardise.defjvp
def _standardise_jvp(eps: float, mean: Callable[[jax.Array], jax.Array], primals: tuple, tangents: tuple) -> tuple:
    """dy = (dx - mean(dx) - y mean(y dx)) / sqrt(var + eps): its transpose is the same, of two means that one pass over
    x gives, where the derivative of each operation would ask for one mean after the other."""
    (x,), (dx,) = primals, tangents
    y, factor = _standardised(x, eps, mean)
    return y, factor * (dx - mean(dx) - y * mean(y * dx))


def _scale(params: dict, y_BND: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return y_{d,n} * gain_d + shift_d, each if the tree has it (E15 has neither), rounded once at the end.

    The gradients of gain and shift are summed over rows (linear.py): of three axes XLA:CPU sums them up to thirty times
    slower."""
    rows = y_BND.size // y_BND.shape[-1], y_BND.shape[-1]
    for stem, combine in (("gain", jnp.multiply), ("shift", jnp.add)):
        if (leaf_D := shapes.find(params, stem)) is not None:
            leaf_TD = jnp.broadcast_to(leaf_D.astype(y_BND.dtype), rows)  # whose gradient is rounded as a sum
            y_BND = combine(y_BND, leaf_TD.reshape(y_BND.shape))
    return y_BND.astype(dtype)


def apply(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """LayerNorm(X)_{d,n} = (x_{d,n} - mean(x_n)) / sqrt(var(x_n) + eps) * gain_d + shift_d (E14 with eps = 0, E16).
    Without gain and shift in the tree it is E15, where with eps = 0 a constant token is 0/0 = NaN."""
    products = layout.platform == "tpu" and x_BND.shape[1] > 1 and x_BND.shape[2] <= platform.SPREAD
    mean = platform.spread_mean if products else functools.partial(_mean, axes=None, axis=-1, keepdims=True)
    return _scale(params, _standardise(linear.to_float32(x_BND), eps, mean), x_BND.dtype)


def _rms(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """x_{d,n} / sqrt(mean_d x_{d,n}^2 + eps) * gain_d: E16 without mean and shift (Zhang and Sennrich 2019, eq. 4)."""
    x = linear.to_float32(x_BND)
    return _scale(params, x * jax.lax.rsqrt(_mean(jnp.square(x), None, axis=-1, keepdims=True) + eps), x_BND.dtype)


def _instance(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """(x_{d,n} - mean_n x_{d,n}) / sqrt(var_n x_{d,n} + eps) * gain_d + shift_d: E17, over the sequence."""
    mean = functools.partial(_mean, axes=layout.sequence, axis=-2, keepdims=True)
    return _scale(params, _standardise(linear.to_float32(x_BND), eps, mean), x_BND.dtype)


def _layer_sequence(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """(x_{d,n} - mean_{d,n} x) / sqrt(var_{d,n} x + eps) * gain_d + shift_d, one mean and one variance of all features
    of all tokens of a sequence: the layer norm of CNNs (seed 003)."""
    mean = functools.partial(_mean, axes=layout.sequence, axis=(-2, -1), keepdims=True)
    return _scale(params, _standardise(linear.to_float32(x_BND), eps, mean), x_BND.dtype)


def _batch(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """(x_{d,n} - mean_d) / sqrt(var_d + eps) * gain_d + shift_d: E17, with the statistics that stand in `params`, or
    with those of the position, mean_n and var_n. They are the batch's own where `observe` has just put them there
    (training), else the running averages (evaluation: each token by itself). They are to be in float32 also where x has
    fewer bits, since the mean is subtracted."""
    mean, variance = params.get("mean_D"), params.get("var_D")
    if mean is None:
        mean, variance = (params[name][: x_BND.shape[1], None] for name in ("mean_N", "var_N"))
    factor = jax.lax.rsqrt(linear.to_float32(variance) + eps)
    return _scale(params, (linear.to_float32(x_BND) - mean) * factor, x_BND.dtype)


def _observe(x_BND: jax.Array, *, positions=False, layout: layouts.Layout = layouts.ONE) -> dict[str, jax.Array]:
    """Mean and variance of each feature over all tokens of all sequences (E17), also those of the other devices. In
    float32 or wider; var divides by the number of tokens. The variance is taken around the mean over all devices, in a
    second pass: the mean of squares less the square of the mean loses every digit where the mean is large. positions:
    of each position, over all features of its tokens in all sequences (seed 003)."""
    x_BND, of = linear.to_float32(x_BND), "N" if positions else "D"
    mean = functools.partial(_mean, axes=layout.batch if positions else layout.tokens, axis=(0, 2 if positions else 1))
    mean_1ND = mean(x_BND, keepdims=True)
    return {f"mean_{of}": mean_1ND.ravel(), f"var_{of}": mean(jnp.square(x_BND - mean_1ND))}


def _keep(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    return x_BND


_norm = functools.partial(Norm, takes_layout=True)
token = _norm(_init("gain_D", "shift_D"), apply)  # TokenNorm with gain and shift: E14, E16
token_plain = _norm(_init(), apply)  # without: E15
rms = _norm(_init("gain_D"), _rms)
batch = _norm(_init("gain_D", "shift_D", "mean_D", "var_D"), _batch, _observe)
_observe_positions = functools.partial(_observe, positions=True)
batch_features = _norm(_init("gain_D", "shift_D", "mean_N", "var_N"), _batch, _observe_positions, needs_all_tokens=True)
instance = _norm(_init("gain_D", "shift_D"), _instance, needs_all_tokens=True)
layer_sequence = _norm(_init("gain_D", "shift_D"), _layer_sequence, needs_all_tokens=True)
none = _norm(_init(), _keep)
