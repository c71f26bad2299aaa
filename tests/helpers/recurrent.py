"""A next-token model for tests of decoding. As in attention, its cache has an entry for every position.

The logits after w_0 ... w_n are G tanh(sum_s p_s * e_{w_s}), s <= n. As in a transformer, `start` writes the padding
into the cache, where the appended tokens must overwrite it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

W, D, LONGEST = 7, 5, 31
_random = np.random.default_rng(3)
P_ND = _random.standard_normal((LONGEST, D)).astype(np.float32)
E_WD = _random.standard_normal((W, D)).astype(np.float32)
G_WD = _random.standard_normal((W, D)).astype(np.float32)


class Incremental(NamedTuple):
    """Functions of decoding. `traces` has their names in the order of their traces (without jit, of their calls)."""

    start: Callable
    step: Callable
    traces: list[str]


def logits(text: Sequence[int]) -> np.ndarray:
    """Return the logits after the text, by the definition."""
    return G_WD @ np.tanh((P_ND[: len(text)] * E_WD[list(text)]).sum(axis=0))


def incremental() -> Incremental:
    """Return the model as `start` and `step`. The cache also counts the tokens that were read after the prompt."""
    traces = []

    def after(past_BND: jax.Array, n_B: jax.Array) -> jax.Array:
        seen_BN1 = (jnp.arange(LONGEST) <= n_B[:, None])[..., None]
        return jnp.tanh(jnp.where(seen_BN1, past_BND, 0).sum(axis=1)) @ G_WD.T

    def start(w_BN: jax.Array, length_B: jax.Array):
        traces.append("start")
        B, N = w_BN.shape
        past_BND = jnp.zeros((B, LONGEST, D)).at[:, :N].set(P_ND[:N] * jnp.asarray(E_WD)[w_BN])
        return after(past_BND, length_B - 1), {"past_BND": past_BND, "read_B": jnp.zeros(B, int)}

    def step(cache: dict, w_B: jax.Array, n_B: jax.Array):
        traces.append("step")
        new_BD = jnp.asarray(P_ND)[n_B] * jnp.asarray(E_WD)[w_B]
        past_BND = cache["past_BND"].at[jnp.arange(len(w_B)), n_B].set(new_BD)
        return after(past_BND, n_B), {"past_BND": past_BND, "read_B": cache["read_B"] + 1}

    return Incremental(start, step, traces)


def prompts(*lengths: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random prompts of these lengths, padded with tokens other than id 0, and the lengths."""
    w_BN = np.random.default_rng(seed).integers(1, W, (len(lengths), columns))
    return w_BN.astype(np.int32), np.array(lengths, np.int32)
