"""Sequence to sequence: an encoder reads one sequence, and a decoder generates another while attending to it (E26).

params = {embed, encoder, decoder, head}: encoder and decoder share the embedding and its vocabulary. Each has the
parameters {position, blocks, norm} of transformer.init_trunk; the decoder's blocks also have cross-attention.
"""

from typing import Any

import jax

from tfm import block as blocks, initial, transformer, variant
from tfm.attention import mask as masks
from tfm.attention.heads import Call, Memory
from tfm.decode import kv_cache


def init(key: jax.Array, *, D: int, spec: transformer.Spec, tied_output: bool = False, **trunk: Any) -> dict:
    """Return the parameters of an encoder-decoder: a tree with "embed", "encoder", "decoder" and "head".

    tied_output: the head uses the embedding as its matrix. trunk: further arguments of transformer.init_trunk.
    """
    head = spec.head.init(initial.key(key, "head"), D=D)
    return {
        "embed": spec.embed.init(initial.key(key, "embed"), D=D),
        "encoder": transformer.init_trunk(initial.key(key, "encoder"), D=D, spec=spec, **trunk),
        "decoder": transformer.init_trunk(initial.key(key, "decoder"), D=D, spec=spec, cross=True, **trunk),
        "head": {name: leaf for name, leaf in head.items() if not (tied_output and name == "G_WD")},
    }


def side(params: dict, name: str) -> dict:
    """Return the parameters of the "encoder" or "decoder", with embedding and head, as transformer.py takes them."""
    return {"embed": params["embed"], "head": params["head"]} | params[name]


def encode(params: dict, source_BS: jax.Array, valid_BS: jax.Array, spec: transformer.Spec, call: Call) -> tuple:
    """Return the Memory (the source's tokens after the encoder, and the mask of the valid ones) and the encoder's aux.

    aux: see transformer.hidden. source_BS: token ids. valid_BS: False at padding, which is at the end, and to which no
    token attends. If devices share the target's tokens, every device still encodes the whole source.
    """
    mask = masks.padding(valid_BS, at_end=True)
    encoder_call = Call(mask=mask, key_B=blocks.fold_name(call.key_B, "encoder"), layout=call.layout.whole)
    x_BSD, aux = transformer.hidden(side(params, "encoder"), source_BS, spec, encoder_call)
    return Memory(x_BSD, mask), aux


def hidden(
    params: dict, source_BS: jax.Array, valid_BS: jax.Array, w_BN: jax.Array, spec: transformer.Spec, call: Call
) -> tuple[jax.Array, dict]:
    """Return the decoder's X^(M) for the target's tokens w_BN, given the whole source (E26), and aux.

    X^(M) is after the last norm. aux: of the decoder (see transformer.hidden), but "running" has the batch statistics
    of both sides, {"encoder", "decoder"}, and "measures" the sums over both.
    """
    memory, encoder_aux = encode(params, source_BS, valid_BS, spec, call)
    call = call._replace(mask=masks.causal, memory=memory, key_B=blocks.fold_name(call.key_B, "decoder"))
    x_BND, aux = transformer.hidden(side(params, "decoder"), w_BN, spec, call)
    sides = {"encoder": encoder_aux, "decoder": aux}
    if running := {name: side_aux["running"] for name, side_aux in sides.items() if "running" in side_aux}:
        aux |= {"running": running}
    if measures := variant.add_measures(*(side_aux.get("measures", {}) for side_aux in sides.values())):
        aux |= {"measures": measures}
    return x_BND, aux


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
    """Encode the source, read the prompts, and return the logits_BW after each prompt and the cache for `step`.

    prompt_BN: the first length_B tokens of each target, right-padded; at least the token that begins a target.
    capacity: number of positions of the cache. Raises ValueError if the norm makes a token depend on later tokens.
    """
    memory, _ = encode(params, source_BS, valid_BS, spec, call)
    call = call._replace(mask=masks.causal, memory=memory)
    decoder = side(params, "decoder")
    logits_BW, layers = kv_cache.start(decoder, prompt_BN, length_B, capacity=capacity, spec=spec, call=call)
    return logits_BW, {"layers": layers, "valid_BS": valid_BS}


def step(
    params: dict, cache: dict, w_B: jax.Array, n_B: jax.Array, *, spec: transformer.Spec
) -> tuple[jax.Array, dict]:
    """Read token w_B at position n_B of each target. Return the logits_BW of the next token, and the new cache."""
    call = Call(mask=masks.causal, memory=Memory(None, masks.padding(cache["valid_BS"], at_end=True)))
    decoder = side(params, "decoder")
    logits_BW, layers = kv_cache.step(decoder, cache["layers"], w_B, n_B, spec=spec, call=call)
    return logits_BW, cache | {"layers": layers}
