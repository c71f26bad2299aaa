"""Words from a trained model, one after the other: kept keys and values (KV cache), drawing, beam search."""

from tfm.decode import beam, generate, kv_cache, sampling  # noqa: F401
