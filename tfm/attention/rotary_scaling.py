"""Scaled rotary positions: smaller rotation angles, for texts longer than those of training.

A scaling is a function (n, K, base, ...) -> (angles, length); further arguments differ. angles: n theta_i in radians
for the positions n and the pairs of features i = 0 ... K/2 - 1; the last axis counts pairs. length: a factor on the
norms of queries and keys. Without scaling, theta_i = base^(-2i/K). N is the number of tokens of a text in training.
`factor` is how many times longer a text may be. In N tokens, pair i makes N theta_i / (2 pi) turns.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tfm import position

Angles = tuple[jax.Array, float]


def _frequencies(K: int, base: float) -> np.ndarray:
    """Return theta_i = base^(-2i/K) in radians per position."""
    return base ** (-np.arange(0, K, 2) / K)


def _angles(n: jax.Array, theta_I: np.ndarray, length: float = 1.0) -> Angles:
    """Return the angles n theta_i, and `length`."""
    return jnp.asarray(n)[..., None] * jnp.asarray(theta_I, float), length


def none(n: jax.Array, K: int, base: float) -> Angles:
    """Return the angles n base^(-2i/K) of pairs i of features, and 1, the factor on the norms of queries and keys."""
    return position.angles(n, K, base=base), 1.0


def linear(n: jax.Array, K: int, base: float, factor: float) -> Angles:
    """Return the angles (n / factor) base^(-2i/K) of interpolated positions (Chen et al. 2023, equation 4), and 1.

    1 is the factor on the norms of queries and keys.
    """
    return _angles(n, _frequencies(K, base) / factor)


def dynamic(n: jax.Array, K: int, base: float, factor: float, N: float) -> Angles:
    """Return the angles n (base s^(K/(K-2)))^(-2i/K), and 1. s = max(1, factor (n+1)/N - factor + 1).

    1 is the factor on the norms of queries and keys. N: tokens of a text in training. For longer texts the base grows
    with the number of tokens ("Dynamic NTK", Peng et al. 2023, section 3.3). Here that number is n + 1 at position n,
    so the angle does not depend on later tokens, and a KV cache gives the same result.
    """
    s = jnp.maximum(1, factor * (jnp.asarray(n, float) + 1) / N - (factor - 1))
    angle, length = none(n, K, base)
    return angle * s[..., None] ** jnp.asarray(-np.arange(0, K, 2) / max(K - 2, 1), float), length


def llama3(n: jax.Array, K: int, base: float, factor: float, low: float, high: float, N: float) -> Angles:
    """Return the angles n theta_i ((1 - r_i) / factor + r_i), and 1. theta_i = base^(-2i/K).

    (Code of Llama 3.1.) 1 is the factor on the norms of queries and keys. N: tokens of a text in training.

    r_i = clip((turns_i - low) / (high - low), 0, 1), turns_i = N theta_i / (2 pi). The angles of pairs with at least
    `high` turns do not change. The angles of pairs with at most `low` turns are divided by `factor`.
    """
    theta_I = _frequencies(K, base)
    ramp_I = np.clip((N * theta_I / (2 * math.pi) - low) / (high - low), 0, 1)
    return _angles(n, theta_I * ((1 - ramp_I) / factor + ramp_I))


def yarn(
    n: jax.Array, K: int, base: float, factor: float, N: float, fast: float = 32, slow: float = 1, length: float = 0
) -> Angles:
    """Return the angles n theta_i ((1 - r_i) / factor + r_i), and `length`, or 0.1 ln(max(1, factor)) + 1 if it is 0.

    theta_i = base^(-2i/K). length: a factor on the norms of queries and keys. N: tokens of a text in training.

    r_i is 1 up to the last pair with at least `fast` turns in N tokens, and 0 from the first pair with at most `slow`
    turns. Between them it falls linearly in i, as in the authors' code (YaRN, Peng et al. 2023, equations 17 to 22).
    """

    def pair(turns: float) -> float:
        """Return the i, a fraction, of the pair that makes `turns` turns: N base^(-2i/K) = 2 pi turns."""
        return K * math.log(N / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), K - 1)
    ramp_I = 1 - np.clip((np.arange((K + 1) // 2) - first) / ((last - first) or 0.001), 0, 1)
    theta_I = _frequencies(K, base)
    length = length or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return _angles(n, theta_I * ((1 - ramp_I) / factor + ramp_I), length)


KINDS = {"none": none, "linear": linear, "dynamic": dynamic, "llama3": llama3, "yarn": yarn}
