"""What a mask hides must not reach an average even if it is NaN: a weight of zero does not keep it out (0 * NaN = NaN).

Keys that are not finite are replaced before the average, and queries that were allowed to see one get NaN after it.
"""

import jax
import jax.numpy as jnp


def clean(k_BHSK: jax.Array, v_BHSV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values with zeros for those that hold NaN or infinity, and which held none: sound_BS."""
    sound_BS = jnp.isfinite(k_BHSK).all((1, 3)) & jnp.isfinite(v_BHSV).all((1, 3))
    kept = sound_BS[:, None, :, None]
    return jnp.where(kept, k_BHSK, 0), jnp.where(kept, v_BHSV, 0), sound_BS


def hit(allowed: jax.Array, sound_BS: jax.Array) -> jax.Array:
    """The queries allowed to see a key that is not sound: (B, N). `allowed` is (N, S) or (B, N, S)."""
    return (allowed & ~sound_BS[:, None, :]).any(-1)


def strike(y_BHNV: jax.Array, hit_BN: jax.Array) -> jax.Array:
    """NaN for the averages of queries that were hit."""
    return jnp.where(hit_BN[:, None, :, None], jnp.nan, y_BHNV)
