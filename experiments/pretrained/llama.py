"""Llama (Touvron et al. 2023): pre-norm with RMS norms, rotary positions, a gated MLP, no biases, shared key heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import families, tensors
from experiments.pretrained.families import Field

WHOLE_ROTARY = Field("partial_rotary_factor", "", families.only(1.0, None))
LINES = (
    tensors.Line("embed_tokens.weight", "W D", ("embed/E_WD",)),
    tensors.Line("layers.{m}.input_layernorm.weight", "D", ("blocks/norm1/gain_D",)),
    tensors.Line("layers.{m}.self_attn.q_proj.weight", "HK D", ("blocks/score/Uq_HKD",)),
    tensors.Line("layers.{m}.self_attn.k_proj.weight", "GK D", ("blocks/score/Uk_GKD",)),
    tensors.Line("layers.{m}.self_attn.v_proj.weight", "GK D", ("blocks/value/Uv_GKD",)),
    tensors.Line("layers.{m}.self_attn.o_proj.weight", "D HK", ("blocks/value/Uo_HDK",)),
    tensors.Line("layers.{m}.post_attention_layernorm.weight", "D", ("blocks/norm2/gain_D",)),
    tensors.Line("layers.{m}.mlp.gate_proj.weight", "F D", ("blocks/mlp/Wg_FD",)),
    tensors.Line("layers.{m}.mlp.up_proj.weight", "F D", ("blocks/mlp/W1_FD",)),
    tensors.Line("layers.{m}.mlp.down_proj.weight", "D F", ("blocks/mlp/W2_DF",)),
    tensors.Line("norm.weight", "D", ("norm/gain_D",)),
    tensors.Line("lm_head.weight", "W D", ("head/G_WD",), "untied"),
)
KNOWN = (
    tensors.constant(
        "layers.{m}.self_attn.rotary_emb.inv_freq",
        "the rotary frequencies",
        lambda facts: facts["rotary_base"] ** -(np.arange(0, facts["K"], 2) / facts["K"]),
    ),
    tensors.copy("lm_head.weight", "embed_tokens.weight", unless="untied"),
)
FIELDS = (
    *families.sizes(32, 4096, 32, 11008),
    Field("num_key_value_heads", "G", lambda facts: facts["H"]),
    Field("head_dim", "K", None),
    Field("vocab_size", "W", 32000),
    Field("max_position_embeddings", "N", 2048),
    Field("rms_norm_eps", "eps", 1e-6),
    Field("tie_word_embeddings", "tied_output", families.NO),
    Field("hidden_act", "", families.only("silu", "swish")),
    Field("attention_bias", "", families.only(False, None)),
    Field("mlp_bias", "", families.only(False, None)),
    Field("sliding_window", "", families.only(None)),
    WHOLE_ROTARY,
)


def in_halves(params: Mapping, model: Mapping[str, Any]) -> tuple[dict, dict[str, Any]]:
    """The same model, its rotary positions turning the pairs (i, i + K/2) instead of (2i, 2i+1): queries and keys with
    the features K of each head in another order. params is our tree, `model` the fields of a config's `model`."""
    score = dict(params["blocks"]["score"])
    for name in score.keys() & {"Uq_HKD", "Uk_HKD", "Uk_GKD"}:
        score[name] = np.concatenate([score[name][:, :, 0::2], score[name][:, :, 1::2]], axis=2)
    blocks = dict(params["blocks"]) | {"score": score}
    return dict(params) | {"blocks": blocks}, dict(model) | {"relative_position": "rotary_halves"}


def complete(config: families.Config, facts: families.Facts) -> families.Facts:
    """The base of the rotary wavelengths, from rope_theta or rope_parameters."""
    theta = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict):
            raise errors.UserError(f"config.json: {name} must be an object, and is {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise errors.UserError(f"config.json: {name} asks for the type {kind!r}, and only 'default' is supported")
        families.value(rope, WHOLE_ROTARY)
        theta |= {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else {}
    return {"rotary_base": families.value({**config, **theta}, Field("rope_theta", "rotary_base", 10000.0))}


def extra(facts: families.Facts, groups: set[str]) -> dict[str, Any]:
    """What the fields do not say."""
    if facts["D"] % facts["H"]:  # they insist, whatever head_dim is
        wrong = f"hidden_size = {facts['D']} is not divisible by num_attention_heads = {facts['H']}"
        raise errors.UserError(f"config.json: {wrong}")
    rope = {"rope_type": "default", "rope_theta": facts["rotary_base"]}
    old = {"rope_theta": facts["rotary_base"]}  # read by transformers before 5
    return {"architectures": ["LlamaForCausalLM"], "rope_parameters": rope} | old


FAMILY = families.Family(
    "llama",
    kind="causal",
    prefix="model.",
    lines=LINES,
    known=KNOWN,
    model=families.SETTINGS
    | {"norm": ("rms",), "mlp": ("swiglu",), "position": ("none",), "relative_position": ("rotary_halves",)}
    | {"rotary_base": families.ANY, "bias": ("none",)},
    fields=FIELDS,
    extra=extra,
    complete=complete,
)
