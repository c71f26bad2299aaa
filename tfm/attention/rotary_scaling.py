"""Rotary positions for longer texts than a model was trained on: the angles of the pairs of features, made smaller.

A scaling is a function (n, K, base, *numbers) -> (angles, length): angle_{n,i} = n theta_i for the pairs of features
i = 0 ... K/2 - 1 at the positions n, in radians, and the factor on the length of queries and of keys. Unscaled,
theta_i = base^(-2i/K). N is the number of tokens of the texts before, and factor how many times longer they shall be. A
pair of the frequency theta makes N theta / (2 pi) turns in N tokens.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tfm import position

Angles = tuple[jax.Array, float]


def _frequencies(K: int, base: float) -> np.ndarray:
    return base ** (-np.arange(0, K, 2) / K)


def _angles(n: jax.Array, theta_I: np.ndarray, length: float = 1.0) -> Angles:
    return jnp.asarray(n)[..., None] * jnp.asarray(theta_I, float), length


def none(n: jax.Array, K: int, base: float) -> Angles:
    """n base^(-2i/K)."""
    return position.angles(n, K, base=base), 1.0


def linear(n: jax.Array, K: int, base: float, factor: float) -> Angles:
    """(n / factor) base^(-2i/K): positions interpolated (Chen et al. 2023, equation 4)."""
    return _angles(n, _frequencies(K, base) / factor)


def dynamic(n: jax.Array, K: int, base: float, factor: float, N: float) -> Angles:
    """n (base s^(K/(K-2)))^(-2i/K), s = max(1, factor (n+1)/N - factor + 1): the base grows with the text so far, and
    nothing changes within N tokens ("Dynamic NTK", Peng et al. 2023, section 3.3). Each token is turned once, by the
    length up to itself, as where a text is written word by word: a causal model with a cache is the same model."""
    s = jnp.maximum(1, factor * (jnp.asarray(n, float) + 1) / N - (factor - 1))
    angle, length = none(n, K, base)
    return angle * s[..., None] ** jnp.asarray(-np.arange(0, K, 2) / max(K - 2, 1), float), length


def llama3(n: jax.Array, K: int, base: float, factor: float, low: float, high: float, N: float) -> Angles:
    """theta_i ((1 - r_i) / factor + r_i), r_i = (turns_i - low) / (high - low) held within 0 and 1, turns_i = N
    theta_i / (2 pi): pairs of many turns stay as they are, and those of few are interpolated (Llama 3.1's code)."""
    theta_I = _frequencies(K, base)
    ramp_I = np.clip((N * theta_I / (2 * math.pi) - low) / (high - low), 0, 1)
    return _angles(n, theta_I * ((1 - ramp_I) / factor + ramp_I))


def yarn(
    n: jax.Array, K: int, base: float, factor: float, N: float, fast: float = 32, slow: float = 1, length: float = 0
) -> Angles:
    """theta_i ((1 - r_i) / factor + r_i), where r falls with i by a straight line from 1, at the last pair of at least
    `fast` turns in N tokens, to 0, at the first of at most `slow`; queries and keys are 0.1 ln(factor) + 1 times as
    long, or `length` times (YaRN, Peng et al. 2023, equations 17 to 22, the line over i as in the code published)."""

    def pair(turns: float) -> float:
        """i with N base^(-2i/K) = 2 pi turns."""
        return K * math.log(N / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), K - 1)
    ramp_I = 1 - np.clip((np.arange((K + 1) // 2) - first) / ((last - first) or 0.001), 0, 1)
    theta_I = _frequencies(K, base)
    longer = length or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return _angles(n, theta_I * ((1 - ramp_I) / factor + ramp_I), longer)


KINDS = {"none": none, "linear": linear, "dynamic": dynamic, "llama3": llama3, "yarn": yarn}
