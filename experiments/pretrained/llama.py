"""Llama (Touvron et al. 2023): pre-norm with RMS norms, rotary positions, a gated MLP, no biases, shared key heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import families, tensors

BASE = 10000.0  # of the rotary wavelengths, where none is given
ROTATED = ("Uq_HKD", "Uk_HKD")

LINES = (
    tensors.Line("embed_tokens.weight", "W D", ("embed/E_WD",)),
    tensors.Line("layers.{m}.input_layernorm.weight", "D", ("blocks/norm1/gain_D",)),
    tensors.Line("layers.{m}.self_attn.q_proj.weight", "HK D", ("blocks/score/Uq_HKD",)),
    tensors.Line("layers.{m}.self_attn.k_proj.weight", "GK D", ("blocks/score/Uk_HKD",)),
    tensors.Line("layers.{m}.self_attn.v_proj.weight", "GK D", ("blocks/value/Uv_HKD",)),
    tensors.Line("layers.{m}.self_attn.o_proj.weight", "D HK", ("blocks/value/Uo_HDK",)),
    tensors.Line("layers.{m}.post_attention_layernorm.weight", "D", ("blocks/norm2/gain_D",)),
    tensors.Line("layers.{m}.mlp.gate_proj.weight", "F D", ("blocks/mlp/Wg_FD",)),
    tensors.Line("layers.{m}.mlp.up_proj.weight", "F D", ("blocks/mlp/W1_FD",)),
    tensors.Line("layers.{m}.mlp.down_proj.weight", "D F", ("blocks/mlp/W2_DF",)),
    tensors.Line("norm.weight", "D", ("norm/gain_D",)),
    tensors.Line("lm_head.weight", "W D", ("head/G_WD",), "untied"),
)


def _frequencies(facts: Mapping[str, Any]) -> np.ndarray:
    return facts["rotary_base"] ** -(np.arange(0, facts["K"], 2) / facts["K"])


KNOWN = (
    tensors.Known("layers.{m}.self_attn.rotary_emb.inv_freq", "the rotary frequencies", tensors.constant(_frequencies)),
    tensors.Known("lm_head.weight", "a copy of embed_tokens.weight", tensors.copy_of("embed_tokens.weight"), "untied"),
)


def in_halves(params: Mapping, model: Mapping[str, Any]) -> tuple[dict, dict[str, Any]]:
    """The same model, its rotary positions turning the pairs (i, i + K/2) instead of (2i, 2i+1): queries and keys with
    the features K of each head in another order. params is our tree, `model` the fields of a config's `model`."""
    score = {
        name: _evens_first(array) if name in ROTATED else array for name, array in params["blocks"]["score"].items()
    }
    blocks = dict(params["blocks"]) | {"score": score}
    return dict(params) | {"blocks": blocks}, dict(model) | {"relative_position": "rotary_halves"}


def _evens_first(U_MHKD: np.ndarray) -> np.ndarray:
    return np.concatenate([U_MHKD[:, :, 0::2], U_MHKD[:, :, 1::2]], axis=2)


def base(config: families.Config) -> float:
    """The base of the rotary wavelengths, from rope_theta or rope_parameters. UserError where they are scaled."""
    theta = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict):
            raise errors.UserError(f"config.json: {name} must be an object, and is {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise errors.UserError(f"config.json: {name} asks for the type {kind!r}, and only 'default' is supported")
        families.one_of({"partial_rotary_factor": 1.0} | rope, "partial_rotary_factor", (1.0,))
        theta |= {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else {}
    return families.real(dict(config) | theta, "rope_theta", BASE)


def describe(config: families.Config) -> families.Description:
    """Our sizes and fields from its config.json. UserError for what it may ask and we do not have."""
    families.one_of(config, "hidden_act", ("silu", "swish"))
    for name in ("attention_bias", "mlp_bias"):
        families.one_of(config, name, (False, None))
    families.one_of(config, "sliding_window", (None,))
    families.one_of(config, "partial_rotary_factor", (1.0, None))
    D, H = families.whole(config, "hidden_size", 4096), families.whole(config, "num_attention_heads", 32)
    layers, G = families.whole(config, "num_hidden_layers", 32), families.whole(config, "num_key_value_heads", H)
    families.shared(H, G, ("num_attention_heads", "num_key_value_heads"))
    K = config.get("head_dim") and families.whole(config, "head_dim")
    K = K or families.shared(D, H, ("hidden_size", "num_attention_heads"))
    twice = families.flag(config, "layer_sharing", False)  # MobileLLM (Liu et al. 2024): every block is computed twice
    sizes = {
        "M": layers * (2 if twice else 1),
        "D": D,
        "H": H,
        "G": G,
        "K": K,
        "F": families.whole(config, "intermediate_size", 11008),
        "W": families.whole(config, "vocab_size", 32000),
    }
    model = {"eps": families.real(config, "rms_norm_eps", 1e-6), "rotary_base": base(config)}
    N, tied = (
        families.whole(config, "max_position_embeddings", 2048),
        families.flag(config, "tie_word_embeddings", False),
    )
    extras = {"W": sizes["W"], "N": N, "tied_output": tied, "key_heads": G}
    return families.Description(sizes, model, extras, layers)


def groups(description: families.Description, names: set[str]) -> set[str]:
    """The output matrix where it is not the embedding."""
    return set() if description.extras["tied_output"] else {"untied"}


def config(sizes: Mapping[str, int], model: Mapping[str, Any], extras: Mapping[str, Any], groups: set[str]) -> dict:
    """Its config.json: every head has its own keys and values, every layer its own numbers."""
    if "N" not in extras:
        raise errors.UserError("a Llama cannot be written without extras['N'], the longest text it was trained on")
    families.shared(sizes["D"], sizes["H"], ("hidden_size", "num_attention_heads"))  # they insist, whatever head_dim is
    rope = model.get("rotary_base", BASE)
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": sizes["W"],
        "max_position_embeddings": extras["N"],
        "hidden_size": sizes["D"],
        "num_hidden_layers": sizes["M"],
        "num_attention_heads": sizes["H"],
        "num_key_value_heads": sizes["H"],
        "head_dim": sizes["K"],
        "intermediate_size": sizes["F"],
        "hidden_act": "silu",
        "rms_norm_eps": model["eps"],
        "rope_theta": rope,  # read by transformers before 5
        "rope_parameters": {"rope_type": "default", "rope_theta": rope},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "untied" not in groups,
    }


FAMILY = families.Family(
    "llama", "model.", (), LINES, KNOWN, describe, groups, config, families.TEXT_IDS, ("lm_head.",), ("mobilellm",)
)
