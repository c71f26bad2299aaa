"""Sequence to sequence: an encoder reads one sequence, a decoder writes another and attends to the first (E26).

params = {embed, encoder, decoder, head}: both sides share the embedding (one vocabulary for both), and each is a
trunk of transformer.py, {position, blocks, norm}; the decoder's blocks also have cross-attention.
"""

from typing import Any

import jax

from tfm import block as blocks, initial, layout as layouts, transformer, word_loss
from tfm.attention import mask as masks
from tfm.decode import kv_cache


def init(key: jax.Array, *, D: int, parts: transformer.Parts, tied_output: bool = False, **trunk: Any) -> dict:
    """The parameter tree; with tied_output the head uses the embedding. trunk: as in transformer.trunk_init."""
    head = parts.head.init(initial.key(key, "head"), D=D)
    return {
        "embed": parts.embed.init(initial.key(key, "embed"), D=D),
        "encoder": transformer.trunk_init(initial.key(key, "encoder"), D=D, parts=parts, **trunk),
        "decoder": transformer.trunk_init(initial.key(key, "decoder"), D=D, parts=parts, cross=True, **trunk),
        "head": {name: leaf for name, leaf in head.items() if not (tied_output and name == "G_WD")},
    }


def side(params: dict, name: str) -> dict:
    """The encoder or the decoder as a tree of transformer.py: with the embedding, and the decoder with the head."""
    return {"embed": params["embed"], "head": params["head"]} | params[name]


def encode(
    params: dict,
    source_BS: jax.Array,
    valid_BS: jax.Array,
    *,
    layout: layouts.Layout = layouts.ONE,
    dtype: Any = None,
    key_B: jax.Array | None = None,
    **model: Any,
) -> tuple[blocks.Memory, dict]:
    """The memory: the source's tokens after M blocks, each attending to all real ones (valid_BS); and what was seen.
    Devices that share a target's tokens all read the whole source."""
    own, mask = transformer.cast(side(params, "encoder"), dtype), masks.padding(valid_BS)
    call = {"mask": mask, "key_B": blocks.keys(key_B, "encoder"), "layout": layout.whole}
    x_BSD, aux = transformer.hidden_states(own, source_BS, **call, **model)
    return blocks.Memory(x_BSD, mask), aux


def apply(
    params: dict,
    source_BS: jax.Array,
    valid_BS: jax.Array,
    w_BN: jax.Array,
    *,
    key_B: jax.Array | None = None,
    maps: bool = False,
    asked: word_loss.Asked | None = None,
    **model: Any,
) -> tuple[Any, dict]:
    """(logits_BNW, aux): the next word of the target after each of its words w_BN, given the whole source (E24, E26).
    The arguments are those of transformer.apply; aux has A_MBHNS and A_cross_MBHNS of the decoder with maps."""
    memory, at_encoder = encode(params, source_BS, valid_BS, key_B=key_B, **model)
    call = {"mask": masks.causal, "memory": memory, "key_B": blocks.keys(key_B, "decoder"), "maps": maps}
    answer, aux = transformer.apply(side(params, "decoder"), w_BN, asked=asked, **call, **model)
    running = {name: s["running"] for name, s in (("encoder", at_encoder), ("decoder", aux)) if "running" in s}
    return answer, aux | ({"running": running} if running else {})


def start(
    params: dict, source_BS: jax.Array, valid_BS: jax.Array, *prompts: jax.Array, capacity: int, **model: Any
) -> tuple[jax.Array, dict]:
    """The logits_BW after each of the prompts, prompt_BN and length_B (the word that begins a target), and the cache:
    the source is read once."""
    memory, _ = encode(params, source_BS, valid_BS, **model)
    call = {"mask": masks.causal, "memory": memory, "capacity": capacity}
    logits_BW, layers = kv_cache.start(side(params, "decoder"), *prompts, **call, **model)
    return logits_BW, {"layers": layers, "valid_BS": valid_BS}


def step(params: dict, cache: dict, w_B: jax.Array, n_B: jax.Array, **model: Any) -> tuple[jax.Array, dict]:
    """Word w_B at position n_B of each target: the logits_BW of the next one, and the cache with this one in it."""
    call = {"mask": masks.causal, "memory": blocks.Memory(None, masks.padding(cache["valid_BS"]))}
    logits_BW, layers = kv_cache.step(side(params, "decoder"), cache["layers"], w_B, n_B, **call, **model)
    return logits_BW, cache | {"layers": layers}
