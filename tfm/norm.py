"""Norms: standardisation over some axes, then a gain and a shift per feature (E14-E17).

| name                          | statistics over                         | do tokens exchange information?         |
|-------------------------------|-----------------------------------------|-----------------------------------------|
| token, token_plain, rms       | the features of each token              | no                                      |
| batch                         | batch and sequence, for each feature    | only in training                        |
| batch_features                | batch and features, for each position   | only in training, at equal positions    |
| instance                      | the sequence, for each feature          | always                                  |
| layer_sequence                | the features and the sequence together  | always                                  |
| dyt                           | nothing: tanh of each element           | no                                      |
| none                          | nothing: the tokens as they are         | no                                      |

Masks do not apply to norms. If tokens exchange information, the statistics include padding and later tokens, so a model
with a causal mask is no longer causal. In evaluation `batch` and `batch_features` use running averages of the
statistics of training batches. `batch_features`, `instance` and `layer_sequence` need all tokens of a sequence at once,
so they cannot generate token by token. Turner 2023 describes `batch_features` as the batch norm of transformers.
`batch` and `layer_sequence` are the batch norm and layer norm of CNNs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tfm import layout as layouts, linear, platform, shapes, variant


class Norm(NamedTuple):
    """`init(key, *, D) -> params` and `apply(params, x_BND, *, eps, layout) -> x_BND`.

    `observe(x_BND, *, layout) -> {name: statistic}` measures a batch over all devices that share it; None if the norm
    has no running averages. Training normalises with these statistics, `apply(params | observe(x, layout=layout), x,
    ...)`, and updates the running averages in the parameters with them. Evaluation uses the running averages.
    per_position: True if `init` also takes N, the number of positions, each of which has statistics of its own.
    takes_layout: True if `apply` uses `layout`, the devices that share the model. needs_all_tokens: True if the norm
    needs all tokens of a sequence at once, so that causal models cannot use it. takes_eps: False if `apply` ignores
    eps. measures: {name: weight} of measures that `apply` also returns (variant.py).
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., jax.Array]
    observe: Callable[..., dict[str, jax.Array]] | None = None
    takes_layout: bool = False
    needs_all_tokens: bool = False
    takes_eps: bool = True
    measures: variant.Weights = ()
    per_position: bool = False


def _init(*names: str) -> Callable[..., dict[str, jax.Array]]:
    """Return an `init` that returns the leaves `names`: gains and variances are 1, shifts and means 0.

    N: number of positions, for leaves with an N.
    """

    def init(key: jax.Array, *, D: int, N: int = 0) -> dict[str, jax.Array]:
        value, sizes = {"gain": jnp.ones, "var": jnp.ones}, {"D": D, "N": N}
        return {name: value.get(name[:-2], jnp.zeros)(shapes.shape(name, sizes)) for name in names}

    return init


def _mean(x: jax.Array, axes: str | tuple[str, ...] | None, *, axis: Any, keepdims: bool) -> jax.Array:
    """Return the mean over `axis` and over the mesh axes `axes`, whose devices have equally many elements.

    Elements are divided before they are summed: on a TPU, dividing the sums would be a separate pass, which takes as
    long as a small sum.
    """
    mean = jnp.sum(x * float(1 / np.take(x.shape, axis).prod()), axis=axis, keepdims=keepdims)
    return jax.lax.pmean(mean, axes) if axes else mean


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _standardise(x: jax.Array, eps: float, mean: Callable[[jax.Array], jax.Array], one_pass: bool = False) -> jax.Array:
    """Return (x - mean(x)) / sqrt(var + eps), var = mean((x - mean(x))^2).

    x: float32 or float64. mean: a function x -> the mean of x over the axes of the norm, which broadcasts with x.
    one_pass: see `_with_factor`.
    """
    return _with_factor(x, eps, mean, one_pass)[0]


def _with_factor(
    x: jax.Array, eps: float, mean: Callable[[jax.Array], jax.Array], one_pass: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the standardised x, and the factor 1 / sqrt(var + eps).

    one_pass: the variance is mean(x^2) - mean(x)^2, so that x is read once.
    """
    mean_x = checkpoint_name(mean(x), "statistic")
    variance = jnp.maximum(mean(jnp.square(x)) - mean_x**2, 0) if one_pass else mean(jnp.square(x - mean_x))
    factor = checkpoint_name(jax.lax.rsqrt(variance + eps), "statistic")
    return (x - mean_x) * factor, factor


@_standardise.defjvp
def _standardise_jvp(eps: float, mean: Callable, one_pass: bool, primals: tuple, tangents: tuple) -> tuple:
    """Return y and its tangent dy = (dx - mean(dx) - y mean(y dx)) / sqrt(var + eps).

    The transpose of this formula also computes both means in one pass over x. If JAX differentiated each operation, the
    means would be computed one after the other.
    """
    (x,), (dx,) = primals, tangents
    y, factor = _with_factor(x, eps, mean, one_pass)
    return y, factor * (dx - mean(dx) - y * mean(y * dx))


def _scale(params: dict, y_BND: jax.Array, dtype: jnp.dtype, on_tpu: bool = False) -> jax.Array:
    """Return y_{d,n} * gain_d + shift_d, cast to `dtype` once at the end. The tree may lack gain or shift (E15).

    Gain and shift are broadcast to (T, D), so that their gradients are sums over one axis. Sums over two axes of (B, N,
    D) take XLA:CPU up to thirty times as long. On a TPU the rows would be a copy.
    """
    rows = y_BND.shape if on_tpu else (y_BND.size // y_BND.shape[-1], y_BND.shape[-1])
    for name, combine in (("gain_D", jnp.multiply), ("shift_D", jnp.add)):
        if name in params:
            leaf_TD = jnp.broadcast_to(params[name].astype(y_BND.dtype), rows)  # its gradient is rounded after the sum
            y_BND = combine(y_BND, leaf_TD.reshape(y_BND.shape))
    return y_BND.astype(dtype)


def apply(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return LN(X)_{d,n} = (x_{d,n} - mean(x_n)) / sqrt(var(x_n) + eps) * gain_d + shift_d (E14 with eps = 0, E16).

    Without gain and shift in the tree this is E15. With eps = 0 a constant token gives 0/0 = NaN.
    """
    on_tpu = layout.platform == "tpu"
    products = on_tpu and x_BND.shape[1] > 1 and x_BND.shape[2] <= platform.MAX_SPREAD
    mean = platform.spread_mean if products else functools.partial(_mean, axes=None, axis=-1, keepdims=True)
    # One pass suffices for bfloat16: if mean(x^2) - mean(x)^2 is inexact in float32, x itself is not exact enough. A
    # second pass takes 9 % of the step of two layers of ViT-S/16 (v5e, estimated).
    one_pass = on_tpu and not products and x_BND.dtype == jnp.bfloat16
    # The products before and after take rows. If the norm did not, XLA:CPU would not store the sum of gradients at a
    # residual connection: in every layer it would add those of all later layers again. On a TPU rows would be a copy.
    rows = x_BND if on_tpu else x_BND.reshape(-1, x_BND.shape[-1])
    y = _standardise(linear.to_float32(rows), eps, mean, one_pass)
    return _scale(params, y, x_BND.dtype, on_tpu).reshape(x_BND.shape)


def _rms(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return x_{d,n} / sqrt(mean_d x_{d,n}^2 + eps) * gain_d: E16 without mean and shift (Zhang and Sennrich 2019)."""
    x = linear.to_float32(x_BND)
    return _scale(params, x * jax.lax.rsqrt(_mean(jnp.square(x), None, axis=-1, keepdims=True) + eps), x_BND.dtype)


def _instance(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return (x_{d,n} - mean_n x_{d,n}) / sqrt(var_n x_{d,n} + eps) * gain_d + shift_d (E17 over the sequence)."""
    mean = functools.partial(_mean, axes=layout.sequence, axis=-2, keepdims=True)
    return _scale(params, _standardise(linear.to_float32(x_BND), eps, mean), x_BND.dtype)


def _layer_sequence(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return (x_{d,n} - mean_{d,n} x) / sqrt(var_{d,n} x + eps) * gain_d + shift_d.

    A sequence has one mean and one variance, over all features of all tokens: the layer norm of CNNs (Turner 2023).
    """
    mean = functools.partial(_mean, axes=layout.sequence, axis=(-2, -1), keepdims=True)
    return _scale(params, _standardise(linear.to_float32(x_BND), eps, mean), x_BND.dtype)


def _batch(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return (x_{d,n} - mean_d) / sqrt(var_d + eps) * gain_d + shift_d (E17), in batch_features with mean_n and var_n.

    The statistics are in `params`: in training those of the batch (`observe`), in evaluation running averages. They are
    float32 even if x has fewer bits, because the mean is subtracted.
    """
    mean, variance = params.get("mean_D"), params.get("var_D")
    if mean is None:
        mean, variance = (params[name][: x_BND.shape[1], None] for name in ("mean_N", "var_N"))
    factor = jax.lax.rsqrt(linear.to_float32(variance) + eps)
    return _scale(params, (linear.to_float32(x_BND) - mean) * factor, x_BND.dtype)


def _observe(x_BND: jax.Array, *, positions=False, layout: layouts.Layout = layouts.ONE) -> dict[str, jax.Array]:
    """Return {"mean_D", "var_D"}: mean and variance of each feature over all tokens of the batch (E17), in float32.

    positions: if True, return {"mean_N", "var_N"} of each position, over all features and sequences (Turner 2023). The
    batch is that of all devices. The variance takes a second pass over x, because the mean of squares minus the squared
    mean loses every digit if the mean is large.
    """
    x_BND, letter = linear.to_float32(x_BND), "N" if positions else "D"
    mean = functools.partial(_mean, axes=layout.batch if positions else layout.tokens, axis=(0, 2 if positions else 1))
    mean_1ND = mean(x_BND, keepdims=True)
    variance = mean(jnp.square(x_BND - mean_1ND), keepdims=False)
    return {f"mean_{letter}": mean_1ND.ravel(), f"var_{letter}": variance}


def _keep(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return x unchanged."""
    return x_BND


def _dyt_init(key: jax.Array, **sizes: int) -> dict[str, jax.Array]:
    """Return alpha = 0.5, gain 1 and shift 0 (Zhu et al. 2025, section 4)."""
    return {"alpha": jnp.full((), 0.5)} | _init("gain_D", "shift_D")(key, **sizes)


def _dyt(params: dict, x_BND: jax.Array, *, eps: float, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return tanh(alpha x_{d,n}) * gain_d + shift_d, with one alpha for each norm of each layer (Zhu et al. 2025)."""
    return _scale(params, jnp.tanh(params["alpha"] * linear.to_float32(x_BND)), x_BND.dtype)


_norm = functools.partial(Norm, takes_layout=True)
token = _norm(_init("gain_D", "shift_D"), apply)  # with gain and shift: E14, E16
token_plain = _norm(_init(), apply)  # without gain and shift: E15
rms = _norm(_init("gain_D"), _rms)
batch = _norm(_init("gain_D", "shift_D", "mean_D", "var_D"), _batch, _observe)
_observe_positions = functools.partial(_observe, positions=True)
batch_features = _norm(_init("gain_D", "shift_D", "mean_N", "var_N"), _batch, _observe_positions)
batch_features = batch_features._replace(needs_all_tokens=True, per_position=True)
instance = _norm(_init("gain_D", "shift_D"), _instance, needs_all_tokens=True)
layer_sequence = _norm(_init("gain_D", "shift_D"), _layer_sequence, needs_all_tokens=True)
dyt = _norm(_dyt_init, _dyt, takes_eps=False)  # dynamic tanh
none = _norm(_init(), _keep, takes_eps=False)
