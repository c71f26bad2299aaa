"""Llamas with a sliding window: Mistral, Qwen2 (biases of queries, keys, values) and Qwen3 (norms of queries, keys)."""

import functools
from typing import Any

from experiments.pretrained import families, llama


def read(
    config: families.HfConfig,
    settings: families.Settings,
    *,
    G: int,
    K: int = 0,
    windowed: bool,
    full: int,
    **plain: Any,
) -> families.Settings:
    """Return the settings. G, K, windowed, full: defaults of fields. plain: settings that are not in config.json."""
    settings = llama.read(config, settings, G=G, K=K, fixed={})
    return settings | plain | {"window": read_window(config, settings["M"], windowed=windowed, full=full)}


def read_window(config: families.HfConfig, M: int, *, windowed: bool, full: int) -> int:
    """Return the sliding window of all M layers, 0 for none. Raises UserError if layers differ.

    windowed, full: the defaults of use_sliding_window, and of max_window_layers (the first layers have no window).
    """
    config = {"sliding_window": 4096, "max_window_layers": full, **config}
    uses = families.TRUE if windowed else families.FALSE
    if config["sliding_window"] is None or not families.choose(config, "use_sliding_window", uses):
        return 0
    full = families.number(config, "max_window_layers", full)
    kinds = {*(config.get("layer_types") or ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < M))}
    families.require(len(kinds) == 1, "layer_types", sorted(kinds), "a sliding window in all layers or in none")
    return families.size(config, "sliding_window", 4096) if kinds == {"sliding_attention"} else 0


MISTRAL = llama.FAMILY._replace(
    architecture="Mistral",
    sizes=llama.FAMILY.sizes | families.sizes(F=14336, N=131072),
    read=functools.partial(read, G=8, windowed=True, full=0, bias="none"),
)
QWEN2 = llama.FAMILY._replace(
    architecture="Qwen2",
    sizes=llama.FAMILY.sizes | families.sizes(F=22016, W=151936, N=32768),
    read=functools.partial(read, G=32, windowed=False, full=28, bias="qkv"),
)
QWEN3 = QWEN2._replace(
    architecture="Qwen3",
    read=functools.partial(read, G=32, K=128, windowed=False, full=28, score="asymmetric_qknorm"),
)
