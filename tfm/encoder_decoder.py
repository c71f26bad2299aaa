"""Sequence to sequence: an encoder reads one sequence, a decoder writes another and attends to the first (E26).

params = {embed, encoder, decoder, head}: both sides share the embedding (one vocabulary for both), and each is a
trunk of transformer.py, {position, blocks, norm}; the decoder's blocks also have cross-attention.
"""

from typing import Any

import jax

from tfm import block as blocks, initial, transformer
from tfm.attention import mask as masks
from tfm.attention.spec import Call, Memory
from tfm.decode import kv_cache


def init(key: jax.Array, *, D: int, spec: transformer.Spec, tied_output: bool = False, **trunk: Any) -> dict:
    """Return the parameter tree; with tied_output the head uses the embedding. trunk: as in transformer.init_trunk."""
    head = spec.head.init(initial.key(key, "head"), D=D)
    return {
        "embed": spec.embed.init(initial.key(key, "embed"), D=D),
        "encoder": transformer.init_trunk(initial.key(key, "encoder"), D=D, spec=spec, **trunk),
        "decoder": transformer.init_trunk(initial.key(key, "decoder"), D=D, spec=spec, cross=True, **trunk),
        "head": {name: leaf for name, leaf in head.items() if not (tied_output and name == "G_WD")},
    }


def side(params: dict, name: str) -> dict:
    """Return the encoder or the decoder as a tree of transformer.py: with the embedding and the head."""
    return {"embed": params["embed"], "head": params["head"]} | params[name]


def encode(params: dict, source_BS: jax.Array, valid_BS: jax.Array, spec: transformer.Spec, call: Call) -> tuple:
    """Return the memory, the source's tokens after M blocks, each attending to all real ones (valid_BS); and aux.
    Devices that share a target's tokens all read the whole source."""
    mask = masks.padding(valid_BS)
    own = Call(mask=mask, key_B=blocks.fold_name(call.key_B, "encoder"), layout=call.layout.whole)
    x_BSD, aux = transformer.hidden(side(params, "encoder"), source_BS, spec, own)
    return Memory(x_BSD, mask), aux


def hidden(
    params: dict, source_BS: jax.Array, valid_BS: jax.Array, w_BN: jax.Array, spec: transformer.Spec, call: Call
) -> tuple[jax.Array, dict]:
    """Return X^(M) of the decoder for the target's tokens w_BN, given the whole source (E26); aux has A_MBHNS and
    A_cross_MBHNS of the decoder with call.maps."""
    memory, of_encoder = encode(params, source_BS, valid_BS, spec, call)
    call = call._replace(mask=masks.causal, memory=memory, key_B=blocks.fold_name(call.key_B, "decoder"))
    x_BND, aux = transformer.hidden(side(params, "decoder"), w_BN, spec, call)
    running = {name: of["running"] for name, of in (("encoder", of_encoder), ("decoder", aux)) if "running" in of}
    return x_BND, aux | ({"running": running} if running else {})


def start(
    params: dict,
    source_BS: jax.Array,
    valid_BS: jax.Array,
    prompt_BN: jax.Array,
    length_B: jax.Array,
    *,
    capacity: int,
    spec: transformer.Spec,
    call: Call,
) -> tuple[jax.Array, dict]:
    """Return the logits_BW after each of the prompts (the token that begins a target), and the cache: the source is
    read once."""
    memory, _ = encode(params, source_BS, valid_BS, spec, call)
    call = call._replace(mask=masks.causal, memory=memory)
    own = side(params, "decoder")
    logits_BW, layers = kv_cache.start(own, prompt_BN, length_B, capacity=capacity, spec=spec, call=call)
    return logits_BW, {"layers": layers, "valid_BS": valid_BS}


def step(
    params: dict, cache: dict, w_B: jax.Array, n_B: jax.Array, *, spec: transformer.Spec
) -> tuple[jax.Array, dict]:
    """Read token w_B at position n_B of each target. Return the logits_BW of the next one, and the new cache."""
    call = Call(mask=masks.causal, memory=Memory(None, masks.padding(cache["valid_BS"])))
    own = side(params, "decoder")
    logits_BW, layers = kv_cache.step(own, cache["layers"], w_B, n_B, spec=spec, call=call)
    return logits_BW, cache | {"layers": layers}
