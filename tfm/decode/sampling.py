"""From logits to a word (E24): filters, which are functions of logits and may follow each other, and a draw."""

import jax
import jax.numpy as jnp
import numpy as np

from tfm import linear

RIGHT = {  # whether a number is, and what to say
    "temperature": (lambda t: 0 <= t < np.inf, "the temperature must be 0 or a positive number"),
    "top_k": (lambda k: not isinstance(k, float) and k >= 0, "top_k must be a number of words, or 0 for all"),
    "top_p": (lambda p: 0 <= p <= 1, "top_p must be a probability between 0 and 1"),
    "min_p": (lambda p: 0 <= p <= 1, "min_p must be a probability between 0 and 1"),
    "repetition_penalty": (lambda x: 0 < x < np.inf, "the repetition penalty must be a positive number, 1 for none"),
}


def apply_temperature(logits_BW: jax.Array, temperature: float) -> jax.Array:
    """l / temperature (above 0), shifted so that the largest is 0 and no temperature is too low for it."""
    l_BW = logits_BW - logits_BW.max(axis=-1, keepdims=True)
    tiny = jnp.finfo(l_BW.dtype).tiny  # what is smaller still counts as 0 on most devices
    return l_BW / jnp.maximum(temperature, tiny)


def keep_top_k(logits_BW: jax.Array, k: int) -> jax.Array:
    """All but the k most likely words are -inf; of equally likely ones the lower ids stay; k = 0 keeps all."""
    if not 0 < k < logits_BW.shape[-1]:
        return logits_BW  # else on CPU, with W = 50257, the largest 40 take 0.07 ms and the whole order takes 11 ms
    return _first(logits_BW, jax.lax.top_k(logits_BW, k)[1], k)


def keep_top_p(logits_BW: jax.Array, p: float) -> jax.Array:
    """The nucleus (Holtzman et al. 2020): the smallest set of words whose probability reaches p; the others are -inf.
    The most likely word always stays, of equally likely ones the lower ids stay, and p = 1 keeps all."""
    if p == 1:
        return logits_BW
    order_BW = jnp.argsort(-logits_BW, axis=-1, stable=True)
    p_BW = jnp.take_along_axis(jax.nn.softmax(logits_BW, axis=-1), order_BW, axis=-1)
    before_BW = jnp.cumsum(p_BW, axis=-1) - p_BW
    return _first(logits_BW, order_BW, jnp.maximum(jnp.sum(before_BW < p, axis=-1, keepdims=True), 1))


def _first(logits_BW: jax.Array, order_BW: jax.Array, count: jax.Array | int) -> jax.Array:
    """The logits of the first `count`, a number or (B, 1), words of the order, -inf for all that come later."""
    last_B1 = jnp.take_along_axis(order_BW, jnp.broadcast_to(count, (len(order_BW), 1)) - 1, axis=-1)
    edge_B1 = jnp.take_along_axis(logits_BW, last_B1, axis=-1)
    level_BW = (logits_BW == edge_B1) & (jnp.arange(logits_BW.shape[-1]) <= last_B1)
    return jnp.where((logits_BW > edge_B1) | level_BW, logits_BW, -jnp.inf)


def keep_min_p(logits_BW: jax.Array, p: float) -> jax.Array:
    """Words at least p times as probable as the most likely one (min-p, Nguyen et al. 2024, section 3): l_w >= max_v
    l_v + log p; the others are -inf. p = 0 keeps all."""
    if p == 0:
        return logits_BW
    return jnp.where(logits_BW >= logits_BW.max(axis=-1, keepdims=True) + jnp.log(p), logits_BW, -jnp.inf)


def discourage(logits_BW: jax.Array, w_BN: jax.Array, length_B: jax.Array, penalty: float) -> jax.Array:
    """Of a word that occurs among the first length_B of w_BN, l_w / penalty where l_w > 0 (Keskar et al. 2019, section
    4.1), and l_w * penalty elsewhere, so that a penalty above 1 makes it less likely in both cases."""
    if penalty == 1:
        return logits_BW
    B, W = logits_BW.shape
    place_BN = jnp.where(jnp.arange(w_BN.shape[1]) < length_B[:, None], w_BN, W)  # W: dropped, as no word of the model
    said_BW = jnp.zeros((B, W), bool).at[jnp.arange(B)[:, None], place_BN].set(True, mode="drop")
    return jnp.where(said_BW, jnp.where(logits_BW > 0, logits_BW / penalty, logits_BW * penalty), logits_BW)


def filtered(
    logits_BW: jax.Array,
    w_BN: jax.Array | None = None,
    length_B: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> jax.Array:
    """The logits that a word is drawn from: those of the words so far, length_B of w_BN, `discourage`d; divided by the
    temperature; cut to the `top_k` most likely, of these to the nucleus of `top_p`, of these to `min_p`. Temperature 0
    neither divides nor cuts: `draw` takes the most likely word. ValueError for numbers out of range."""
    refuse(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty)
    l_BW = linear.to_float32(jnp.asarray(logits_BW))
    if repetition_penalty != 1:
        if w_BN is None or length_B is None:
            raise ValueError("a repetition penalty needs the words so far")
        l_BW = discourage(l_BW, w_BN, length_B, repetition_penalty)
    if temperature == 0:
        return l_BW
    return keep_min_p(keep_top_p(keep_top_k(apply_temperature(l_BW, temperature), top_k), top_p), min_p)


def draw(key: jax.Array, logits_BW: jax.Array, *words: jax.Array, **chance: float) -> jax.Array:
    """Words w_B from softmax(`filtered`(logits_BW, *words, **chance)), at temperature 0 the most likely word, and of
    equally likely ones the lowest id. `key` is one key for all, or key_B."""
    l_BW = filtered(logits_BW, *words, **chance)
    if chance.get("temperature") == 0:
        return l_BW.argmax(axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(one_per_sequence(key, len(l_BW)), l_BW).astype(jnp.int32)


def refuse(**chance: float) -> None:
    """ValueError unless temperature >= 0, top_k >= 0 is whole, 0 <= top_p, min_p <= 1 and repetition_penalty > 0."""
    for name, value in chance.items():
        right, words = RIGHT[name]
        if not right(value):
            raise ValueError(f"{words}, not {value}")


def one_per_sequence(key: jax.Array, B: int) -> jax.Array:
    """key_B as it is, and of one key a key for every sequence."""
    return key if key.ndim else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(B))
