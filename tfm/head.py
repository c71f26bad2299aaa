"""Output heads: next-token logits, masked-token logits, class logits, pixel predictions. All outputs are float32.

The matrix of a token head is G_WD, or the embedding (tied output). `after_layer` adds a layer before the matrix, as in
BERT.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, linear, loss as losses
from tfm.attention import explicit


class Head(NamedTuple):
    """The functions of a head: `init(key, **sizes) -> params`, `apply(params, x_BND, layout=layout) -> logits`.

    The fields `init` to `output` are those of variant.Variant. by_token: True if `apply` computes the logits of each
    token from this token alone, so that it can be called with any tokens x_TD; then `loss` never stores the logits of
    all tokens. before: a function (params, x_BND, layout=layout) -> y_BND that is computed once for all tokens.
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., jax.Array]
    takes_layout: bool = False
    measures: Any = ()
    output: tuple[str, ...] = ()
    by_token: bool = False
    before: Callable[..., jax.Array] | None = None

    def logits(
        self, params: dict, x: jax.Array, *, cap: float = 0.0, layout: layouts.Layout = layouts.ONE
    ) -> jax.Array:
        """Return the softly capped logits (cap = 0: no cap) of tokens x to which `before` was applied already."""
        return explicit.soft_cap(self.apply(params, x, layout=layout), cap)

    def loss(
        self,
        params: dict,
        x_BND: jax.Array,
        target: jax.Array,
        weight: jax.Array,
        *,
        cap: float = 0.0,
        sparse: bool = False,
        layout: layouts.Layout = layouts.ONE,
    ) -> dict[str, losses.Ratio]:
        """Return {"loss": cross-entropy, "accuracy"} of the logits of x_BND, as pairs (sum, count) (E24, E25, E27).

        x_BND: tokens to which `before` was applied already. target, weight: as in loss.py; one for each token, or for
        each sequence if the head gives one prediction for a sequence. sparse: True if few tokens are targets
        (loss.in_chunks).
        """
        logits = functools.partial(self.logits, cap=cap, layout=layout)
        if self.by_token:
            return losses.in_chunks(logits, params, x_BND, target, weight, sparse=sparse, layout=layout)
        return losses.measure(logits(params, x_BND), target, weight, vocab=layout.vocab)


def _init(key: jax.Array, *, matrix: str, bias: str = "", **sizes: int) -> dict:
    """Draw the matrix with std 0.02, so that the first predictions are nearly uniform (loss log W); biases are 0."""
    params = initial.normal(key, matrix, 0.02, **sizes)
    return params | (initial.zeros(bias, **sizes) if bias else {})


def _word(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return l_{n,w} = g_w^T x_n (+ b_w): the logits of token n + 1 (E24), or of token n if it was masked (E27)."""
    return linear.logits(x_BND, params["G_WD"], params.get("b_W"))


def after_layer(head: Head, activation: Callable[[jax.Array], jax.Array], norm: Any, *, eps: float) -> Head:
    """Return `head` with a layer LN(a(W x_n + b)) before its matrix, and with a bias for the logit of each token id.

    (In the code of Devlin et al. 2019, a = gelu.)
    """

    def init(key: jax.Array, *, D: int, **sizes: int) -> dict:
        params, layer = head.init(key, D=D, **sizes), initial.normal(key, "W_DD", D**-0.5, D=D)
        layer |= initial.zeros("b_D", D=D) | {"norm": norm.init(initial.key(key, "norm"), D=D)}
        return params | {"b_W": jnp.zeros(len(params["G_WD"])), "transform": layer}

    def before(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        layer = params["transform"]
        y_BND = activation(linear.matmul(x_BND, layer["W_DD"], layer["b_D"]))
        return norm.apply(layer["norm"], y_BND, eps=eps, layout=layout)

    return head._replace(init=init, before=before)


def _pooled(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return l_c = g_c^T mean_n x_n + b_c (E25). The mean is over all tokens, also if devices share a sequence."""
    mean_BD = linear.to_float32(x_BND).mean(axis=1)
    mean_BD = mean_BD if layout.sequence is None else jax.lax.pmean(mean_BD, layout.sequence)
    return linear.logits(mean_BD.astype(x_BND.dtype), params["G_CD"], params["b_C"])


def _class_token(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return l_c = g_c^T x_0 + b_c from the class token, which is the first token (E25)."""
    return linear.logits(x_BND[:, 0], params["G_CD"], params["b_C"])


def _each_word(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return l_{n,c} = g_c^T x_n + b_c for each token.

    With C = 2 these are the logits that an answer starts, or ends, at the token (Devlin et al. 2019, section 4).
    """
    return linear.logits(x_BND, params["G_CD"], params["b_C"])


def first_word_init(key: jax.Array, *, D: int, C: int) -> dict:
    """Draw the class matrix G_CD, b_C, and as "pooler" the layer W_DD, b_D before it."""
    pooler = initial.normal(initial.key(key, "pooler"), "W_DD", D**-0.5, D=D) | initial.zeros("b_D", D=D)
    return _class_init(key, D=D, C=C) | {"pooler": pooler}


def first_word_of(activation: Callable[[jax.Array], jax.Array]) -> Head:
    """Return the head l_c = g_c^T a(W x_0 + b) + b_c, from the first token, such as BERT's [CLS].

    (In the code of Devlin et al. 2019, a = tanh.)
    """

    def apply(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        pooler = params["pooler"]
        y_BD = activation(linear.matmul(x_BND[:, 0], pooler["W_DD"], pooler["b_D"]))
        # y is cast to float32 because XLA:CPU cannot compute a float32 product of 16-bit numbers right after a product.
        return linear.logits(linear.to_float32(y_BD), params["G_CD"], params["b_C"])

    return Head(first_word_init, apply)


def _pixels(params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return v_n = W x_n + b, the prediction of vec(patch_n): E2 from tokens to patches (E26)."""
    return linear.logits(x_BND, params["W_PD"], params["b_P"])


_word_init = functools.partial(_init, matrix="G_WD")
_class_init = functools.partial(_init, matrix="G_CD", bias="b_C")
next_word = Head(_word_init, _word, by_token=True)
masked_word = Head(_word_init, _word, by_token=True)
pooled = Head(_class_init, _pooled, takes_layout=True)
class_token = Head(_class_init, _class_token)
each_word = Head(_class_init, _each_word, by_token=True)
first_word = first_word_of(jnp.tanh)
pixels = Head(functools.partial(_init, matrix="W_PD", bias="b_P"), _pixels)
