"""What the tokens are asked: the next word, the hidden word, the class of an image. Logits are float32."""

import jax

from tfm import initial, linear
from tfm.variant import Variant


def _word_init(key: jax.Array, *, W: int, D: int) -> dict:
    """g_w starts small (0.02), so that the first predictions are close to uniform: a loss of log W."""
    return initial.normal(key, "G_WD", 0.02, W=W, D=D)


def _word(params: dict, x_BND: jax.Array) -> jax.Array:
    """l_{n,w} = g_w^T x_n, whose softmax over w is p(w_{n+1} = w | x_n) (E24), or p(w_n = w | x_n) where the word was
    hidden and the tokens on both sides are seen (E27)."""
    return linear.wide(linear.rows(x_BND, params["G_WD"]))


def _class_init(key: jax.Array, *, C: int, D: int) -> dict:
    return initial.normal(key, "G_CD", 0.02, C=C, D=D) | initial.zeros("b_C", C=C)


def _pooled(params: dict, x_BND: jax.Array) -> jax.Array:
    """l_c = g_c^T mean_n x_n + b_c: the whole sequence is pooled (E25)."""
    return linear.wide(linear.rows(x_BND.mean(axis=1), params["G_CD"], params["b_C"]))


def _class_token(params: dict, x_BND: jax.Array) -> jax.Array:
    """l_c = g_c^T x_0 + b_c: the class token, which stands first, answers for all (E25)."""
    return linear.wide(linear.rows(x_BND[:, 0], params["G_CD"], params["b_C"]))


next_word = Variant(_word_init, _word)
masked_word = Variant(_word_init, _word)
pooled = Variant(_class_init, _pooled)
class_token = Variant(_class_init, _class_token)
