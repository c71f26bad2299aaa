"""Programs that are compiled here and now, whatever the cache of compiled programs holds."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Within this, nothing is taken from the cache: it saves the time, and its programs may tell older named scopes."""
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # else JAX goes by what it found at its first compilation
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
