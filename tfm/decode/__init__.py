"""Decoding: texts from a trained model, token by token, with a KV cache, by sampling or beam search."""

from tfm.decode import beam, generate, kv_cache, sampling  # noqa: F401
