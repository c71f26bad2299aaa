"""Output heads: next-token logits, masked-token logits, class logits, pixel predictions. All outputs are float32.

A head of tokens has its matrix G_WD, or takes the embedding's (tied output). `transform`, if there, is one more layer
before it (BERT's).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, linear, shapes
from tfm.variant import Variant


def _init(key: jax.Array, *, matrix: str, bias: str = "", **sizes: int) -> dict:
    """The matrix starts small (0.02), so that the first predictions are close to uniform: a loss of log W."""
    params = initial.normal(key, matrix, 0.02, **sizes)
    return params | (initial.zeros(bias, **sizes) if bias else {})


def _word(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """l_{n,w} = g_w^T x_n, whose softmax over w is p(w_{n+1} = w | x_n) (E24), or p(w_n = w | x_n) if the token was
    hidden and the tokens on both sides are seen (E27)."""
    return linear.logits(x_BND, shapes.find(params, "G"), shapes.find(params, "b"))


def _word_init(key: jax.Array, *, W: int, D: int, E: int = 0, bias: str = "") -> dict:
    """E: features of a row of the embedding, to which `transform` maps D (Lan et al. 2020); 0: D."""
    return _init(key, matrix="G_WE" if E else "G_WD", bias=bias, W=W, D=D, E=E)


def transformed_init(init: Callable[..., dict], key: jax.Array, *, D: int, norm: Any, E: int = 0) -> dict:
    """Return the parameters of `init` plus those of `transform`, and a bias for each token."""
    params, of = init(key, D=D, E=E), "E" if E else "D"
    layer = initial.normal(key, f"W_{of}D", D**-0.5, D=D, E=E) | initial.zeros(f"b_{of}", D=D, E=E)
    layer["norm"] = norm.init(initial.key(key, "norm"), D=D, E=E)
    return params | {"b_W": jnp.zeros(len(shapes.find(params, "G"))), "transform": layer}


def transform(
    params: dict,
    x_BND: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    norm: Any,
    eps: float,
    layout: layouts.Layout = layouts.ONE,
) -> jax.Array:
    """LN(a(W x_n + b)): one more layer before the output matrix (Devlin et al. 2019, in their code, a = gelu)."""
    y_BND = activation(linear.matmul(x_BND, shapes.find(params, "W"), shapes.find(params, "b")))
    return norm.apply(params["norm"], y_BND, eps=eps, layout=layout)


def _pooled(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """l_c = g_c^T mean_n x_n + b_c: the whole sequence is pooled (E25), also where devices have some tokens each."""
    mean_BD = linear.to_float32(x_BND).mean(axis=1)
    mean_BD = mean_BD if layout.sequence is None else jax.lax.pmean(mean_BD, layout.sequence)
    return linear.logits(mean_BD.astype(x_BND.dtype), params["G_CD"], params["b_C"])


def _class_token(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """l_c = g_c^T x_0 + b_c: the class token, which stands first, answers for all (E25)."""
    return linear.logits(x_BND[:, 0], params["G_CD"], params["b_C"])


def _distilled_init(key: jax.Array, *, D: int, C: int) -> dict:
    other = _init(initial.key(key, "distilled"), matrix="Gd_CD", bias="bd_C", D=D, C=C)
    return _class_init(key, D=D, C=C) | other


def _distilled(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """l_c = (g_c^T x_0 + b_c + g'_c^T x_1 + b'_c) / 2: the class token and the distillation token behind it answer with
    a matrix each (Touvron et al. 2021, section 3)."""
    other = {"G_CD": params["Gd_CD"], "b_C": params["bd_C"]}
    return (_class_token(params, x_BND) + _class_token(other, x_BND[:, 1:])) / 2


def _each_word(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """l_{n,c} = g_c^T x_n + b_c: the class of each word, or of C = 2 whether an answer begins and ends there (Devlin
    et al. 2019, section 4)."""
    return linear.logits(x_BND, params["G_CD"], params["b_C"])


def first_word_init(key: jax.Array, *, D: int, C: int) -> dict:
    """As of a class token, and with one more layer."""
    pooler = initial.normal(initial.key(key, "pooler"), "W_DD", D**-0.5, D=D) | initial.zeros("b_D", D=D)
    return _class_init(key, D=D, C=C) | {"pooler": pooler}


def first_word_of(activation: Callable[[jax.Array], jax.Array]) -> Variant:
    """l_c = g_c^T a(W x_0 + b) + b_c: the first word, which belongs to no text, answers for all through one more layer
    (Devlin et al. 2019, in their code, a = tanh)."""

    def apply(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        own = params["pooler"]
        y_BD = activation(linear.matmul(x_BND[:, 0], own["W_DD"], own["b_D"]))
        # Wide, since XLA:CPU has no product of 16-bit numbers in float32 right behind another one.
        return linear.logits(linear.to_float32(y_BD), params["G_CD"], params["b_C"])

    return Variant(first_word_init, apply)


def _pixels(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """v_n = W x_n + b, the predicted vec(patch_n), back from a token to pixels: E2 turned around (E26)."""
    return linear.logits(x_BND, params["W_PD"], params["b_P"])


_class_init = functools.partial(_init, matrix="G_CD", bias="b_C")
next_word = Variant(_word_init, _word)
masked_word = Variant(_word_init, _word)
pooled = Variant(_class_init, _pooled, takes_layout=True)
class_token = Variant(_class_init, _class_token)
distilled = Variant(_distilled_init, _distilled)
each_word = Variant(_class_init, _each_word)
first_word = first_word_of(jnp.tanh)
pixels = Variant(functools.partial(_init, matrix="W_PD", bias="b_P"), _pixels)
