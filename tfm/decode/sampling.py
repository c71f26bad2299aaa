"""Sampling: filters change the logits, and `draw` draws a token from the result (E24)."""

import jax
import jax.numpy as jnp
import numpy as np

from tfm import linear

RANGES = {  # a test of each option, and the end of the message if it fails
    "temperature": (lambda t: 0 <= t < np.inf, "must be finite and at least 0. 0 takes the most likely token"),
    "top_k": (lambda k: not isinstance(k, float) and k >= 0, "must be an integer of at least 0. 0 keeps all tokens"),
    "top_p": (lambda p: 0 <= p <= 1, "must be a probability between 0 and 1. 1 keeps all tokens"),
    "min_p": (lambda p: 0 <= p <= 1, "must be a probability between 0 and 1. 0 keeps all tokens"),
    "repetition_penalty": (lambda x: 0 < x < np.inf, "must be finite and above 0. 1 changes nothing"),
}


def apply_temperature(logits_BW: jax.Array, temperature: float) -> jax.Array:
    """Return (l - max l) / temperature for a temperature above 0. No logit overflows, because the largest is 0."""
    l_BW = logits_BW - logits_BW.max(axis=-1, keepdims=True)
    tiny = jnp.finfo(l_BW.dtype).tiny  # most devices round smaller numbers to 0
    return l_BW / jnp.maximum(temperature, tiny)


def keep_top_k(logits_BW: jax.Array, k: int) -> jax.Array:
    """Return the logits, with -inf for all but the k largest. Lower ids win ties. k = 0 keeps all."""
    if not 0 < k < logits_BW.shape[-1]:
        return logits_BW
    # lax.top_k with k = 40 takes 0.07 ms on a CPU with W = 50,257; a full sort takes 11 ms.
    return _keep_first(logits_BW, jax.lax.top_k(logits_BW, k)[1], k)


def keep_top_p(logits_BW: jax.Array, p: float) -> jax.Array:
    """Return the logits, with -inf for tokens outside the nucleus (Holtzman et al. 2020).

    The nucleus is the smallest set of tokens whose probability reaches p. It always contains the most likely token.
    Lower ids win ties. p = 1 keeps all.
    """
    if p == 1:
        return logits_BW
    order_BW = jnp.argsort(-logits_BW, axis=-1, stable=True)
    p_BW = jnp.take_along_axis(jax.nn.softmax(logits_BW, axis=-1), order_BW, axis=-1)
    before_BW = jnp.cumsum(p_BW, axis=-1) - p_BW
    return _keep_first(logits_BW, order_BW, jnp.maximum(jnp.sum(before_BW < p, axis=-1, keepdims=True), 1))


def _keep_first(logits_BW: jax.Array, order_BW: jax.Array, count: jax.Array | int) -> jax.Array:
    """Return the logits, with -inf for all but the first `count` tokens of order_BW.

    order_BW: at least `count` token ids by falling logit, lower ids first in ties. count: a number, or (B, 1).
    """
    last_B1 = jnp.take_along_axis(order_BW, jnp.broadcast_to(count, (len(order_BW), 1)) - 1, axis=-1)
    edge_B1 = jnp.take_along_axis(logits_BW, last_B1, axis=-1)
    tie_BW = (logits_BW == edge_B1) & (jnp.arange(logits_BW.shape[-1]) <= last_B1)
    return jnp.where((logits_BW > edge_B1) | tie_BW, logits_BW, -jnp.inf)


def keep_min_p(logits_BW: jax.Array, p: float) -> jax.Array:
    """Return the logits, with -inf for tokens less than p times as probable as the most likely token.

    Token w stays if l_w >= max_v l_v + log p (min-p, Nguyen et al. 2024, section 3). p = 0 keeps all.
    """
    if p == 0:
        return logits_BW
    return jnp.where(logits_BW >= logits_BW.max(axis=-1, keepdims=True) + jnp.log(p), logits_BW, -jnp.inf)


def penalize_repetition(logits_BW: jax.Array, w_BN: jax.Array, length_B: jax.Array, penalty: float) -> jax.Array:
    """Return the logits, with l_w / penalty if l_w > 0, else l_w * penalty, for each token w that the text contains.

    The text is the first length_B tokens of w_BN. A penalty above 1 lowers the probability of its tokens (Keskar et al.
    2019, section 4.1, for l_w > 0).
    """
    if penalty == 1:
        return logits_BW
    B, W = logits_BW.shape
    w_BN = jnp.where(jnp.arange(w_BN.shape[1]) < length_B[:, None], w_BN, W)  # no id is W: mode="drop" ignores it
    earlier_BW = jnp.zeros((B, W), bool).at[jnp.arange(B)[:, None], w_BN].set(True, mode="drop")
    return jnp.where(earlier_BW, jnp.where(logits_BW > 0, logits_BW / penalty, logits_BW * penalty), logits_BW)


def filter_logits(
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
    """Return the logits after repetition penalty, temperature, top_k, top_p and min_p, in this order.

    w_BN, length_B: the text so far, for the repetition penalty. Temperature 0 returns the logits after the repetition
    penalty, because `draw` then takes the most likely token. Raises ValueError for an option outside its range,
    and for a repetition penalty other than 1 without the text.
    """
    check_options(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty)
    l_BW = linear.to_float32(jnp.asarray(logits_BW))
    if repetition_penalty != 1:
        if w_BN is None or length_B is None:
            raise ValueError(f"repetition_penalty = {repetition_penalty} needs the text. Pass w_BN and length_B.")
        l_BW = penalize_repetition(l_BW, w_BN, length_B, repetition_penalty)
    if temperature == 0:
        return l_BW
    return keep_min_p(keep_top_p(keep_top_k(apply_temperature(l_BW, temperature), top_k), top_p), min_p)


def draw(key: jax.Array, logits_BW: jax.Array, *text: jax.Array, **options: float) -> jax.Array:
    """Return tokens w_B from softmax(filter_logits(logits_BW, *text, **options)).

    At temperature 0, return the most likely tokens; lower ids win ties. key: one key for all sequences, or key_B.
    text: w_BN and length_B.
    """
    l_BW = filter_logits(logits_BW, *text, **options)
    if options.get("temperature") == 0:
        return l_BW.argmax(axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(split_key(key, len(l_BW)), l_BW).astype(jnp.int32)


def check_options(**options: float) -> None:
    """Raise ValueError unless every option is in its range (RANGES)."""
    for name, value in options.items():
        is_valid, requirement = RANGES[name]
        if not is_valid(value):
            raise ValueError(f"{name} = {value} {requirement}.")


def split_key(key: jax.Array, B: int) -> jax.Array:
    """Return a random key for each of B sequences: fold_in(key, b), or `key` itself if it is key_B already."""
    return key if key.ndim else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(B))
