"""From logits to a word (E24): filters, which are functions of logits and may follow each other, and a draw."""

import jax
import jax.numpy as jnp
import numpy as np

from tfm import linear

Number = float | jax.Array


def apply_temperature(logits_BW: jax.Array, temperature: Number) -> jax.Array:
    """l / temperature, shifted so that the largest is 0 and no temperature is too low for it.

    At temperature 0 all but the most likely word are -inf; of equally likely ones the lowest id stays.
    """
    l_BW = logits_BW - logits_BW.max(axis=-1, keepdims=True)
    coldest_BW = jnp.where(jnp.arange(l_BW.shape[-1]) == l_BW.argmax(axis=-1, keepdims=True), 0, -jnp.inf)
    tiny = jnp.finfo(l_BW.dtype).tiny  # what is smaller still counts as 0 on most devices
    return jnp.where(temperature > 0, l_BW / jnp.maximum(temperature, tiny), coldest_BW)


def keep_top_k(logits_BW: jax.Array, k: int | jax.Array) -> jax.Array:
    """All but the k most likely words are -inf; of equally likely ones the lower ids stay; k = 0 keeps all."""
    W = logits_BW.shape[-1]
    if isinstance(k, int):  # on CPU, with W = 50257, the largest 40 take 0.07 ms and the whole order takes 11 ms
        return _first(logits_BW, jax.lax.top_k(logits_BW, k)[1], k) if 0 < k < W else logits_BW
    return jax.lax.cond((k > 0) & (k < W), lambda l_BW: _first(l_BW, _order(l_BW), k), lambda l_BW: l_BW, logits_BW)


def keep_top_p(logits_BW: jax.Array, p: Number) -> jax.Array:
    """The nucleus (Holtzman et al. 2020): the smallest set of words whose probability reaches p; the others are -inf.

    The most likely word always stays, of equally likely ones the lower ids stay, and p = 1 keeps all.
    """

    def nucleus(l_BW: jax.Array) -> jax.Array:
        order_BW = _order(l_BW)
        p_BW = jnp.take_along_axis(jax.nn.softmax(l_BW, axis=-1), order_BW, axis=-1)
        before_BW = jnp.cumsum(p_BW, axis=-1) - p_BW
        return _first(l_BW, order_BW, jnp.maximum(jnp.sum(before_BW < p, axis=-1, keepdims=True), 1))

    return jax.lax.cond(p < 1, nucleus, lambda l_BW: l_BW, logits_BW)


def _order(logits_BW: jax.Array) -> jax.Array:
    """Ids from the most to the least likely word; equally likely ones by id."""
    return jnp.argsort(-logits_BW, axis=-1, stable=True)


def _first(logits_BW: jax.Array, order_BW: jax.Array, count: jax.Array | int) -> jax.Array:
    """The logits of the first `count`, a number or (B, 1), words of the order, -inf for all that come later."""
    last_B1 = jnp.take_along_axis(order_BW, jnp.broadcast_to(count, (len(order_BW), 1)) - 1, axis=-1)
    edge_B1 = jnp.take_along_axis(logits_BW, last_B1, axis=-1)
    level_BW = (logits_BW == edge_B1) & (jnp.arange(logits_BW.shape[-1]) <= last_B1)
    return jnp.where((logits_BW > edge_B1) | level_BW, logits_BW, -jnp.inf)


def draw(
    key: jax.Array,
    logits_BW: jax.Array,
    *,
    temperature: Number = 1.0,
    top_k: int | jax.Array = 0,
    top_p: Number = 1.0,
) -> jax.Array:
    """Words w_B from softmax(l / temperature), cut to the `top_k` most likely and of these to the nucleus of `top_p`.

    Temperature 0 takes the most likely word, and of equally likely ones the lowest id. `key` is one key for all, or
    key_B. Settings that are arrays may change without a compilation. ValueError for numbers out of range.
    """
    refuse(temperature=temperature, top_k=top_k, top_p=top_p)

    def by_chance(l_BW: jax.Array) -> jax.Array:
        kept_BW = keep_top_p(keep_top_k(apply_temperature(l_BW, temperature), top_k), top_p)
        w_B = jax.vmap(jax.random.categorical)(one_per_sequence(key, len(l_BW)), kept_BW)
        return w_B.astype(jnp.int32)

    def most_likely(l_BW: jax.Array) -> jax.Array:
        return l_BW.argmax(axis=-1).astype(jnp.int32)

    return jax.lax.cond(temperature > 0, by_chance, most_likely, linear.wide(jnp.asarray(logits_BW)))


def refuse(*, temperature: Number = 1.0, top_k: int | jax.Array = 0, top_p: Number = 1.0) -> None:
    """ValueError unless temperature >= 0, top_k >= 0 and 0 <= top_p <= 1; what is an array is not looked at."""
    if isinstance(temperature, int | float | np.number) and not 0 <= temperature < float("inf"):
        raise ValueError(f"the temperature must be 0 or a positive number, not {temperature}")
    if isinstance(top_k, float) or isinstance(top_k, int | np.number) and top_k < 0:
        raise ValueError(f"top_k must be a number of words, or 0 for all, not {top_k}")
    if isinstance(top_p, int | float | np.number) and not 0 <= top_p <= 1:
        raise ValueError(f"top_p must be a probability between 0 and 1, not {top_p}")


def one_per_sequence(key: jax.Array, B: int) -> jax.Array:
    """key_B as it is, and of one key a key for every sequence."""
    return key if key.ndim else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(B))
