"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, the output tied to the embedding."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.pretrained import families, tensors

# Their matrices stand as (from, to), hence transposed; queries, keys and values are one.
LINES = (
    tensors.Line("wte.weight", "W D", ("embed/E_WD",)),
    tensors.Line("wpe.weight", "N D", ("position/P_ND",)),
    *tensors.pair("h.{m}.ln_1", "D; D", "blocks/norm1/gain_D", "shift_D"),
    tensors.Line(
        "h.{m}.attn.c_attn.weight", "D 3HK", ("blocks/score/Uq_HKD", "blocks/score/Uk_HKD", "blocks/value/Uv_HKD")
    ),
    tensors.Line("h.{m}.attn.c_attn.bias", "3HK", ("blocks/score/bq_HK", "blocks/score/bk_HK", "blocks/value/bv_HK")),
    *tensors.pair("h.{m}.attn.c_proj", "HK D; D", "blocks/value/Uo_HDK", "bo_D"),
    *tensors.pair("h.{m}.ln_2", "D; D", "blocks/norm2/gain_D", "shift_D"),
    *tensors.pair("h.{m}.mlp.c_fc", "D F; F", "blocks/mlp/W1_FD", "b1_F"),
    *tensors.pair("h.{m}.mlp.c_proj", "F D; D", "blocks/mlp/W2_DF", "b2_D"),
    *tensors.pair("ln_f", "D; D", "norm/gain_D", "shift_D"),
    tensors.Line("lm_head.weight", "W D", ("head/G_WD",), "untied"),
)
KNOWN = (
    tensors.Known("h.{m}.attn.bias", "the causal mask", tensors.constant(lambda facts: np.tri(facts["N"])[None, None])),
    tensors.Known(
        "h.{m}.attn.masked_bias",
        "the number that stands for minus infinity",
        lambda array, tensors, facts: array.size == 1 and array.item() <= -1e4,
    ),
    tensors.Known("lm_head.weight", "a copy of wte.weight", tensors.copy_of("wte.weight"), unless="untied"),
)


def describe(config: families.Config) -> families.Description:
    """Our sizes and fields from its config.json. UserError for what it may ask and we do not have."""
    families.one_of(config, "scale_attn_by_inverse_layer_idx", (False,))
    families.one_of(config, "add_cross_attention", (False,))
    D, H = families.whole(config, "n_embd", 768), families.whole(config, "n_head", 12)
    sizes = {
        "M": families.whole(config, "n_layer", 12),
        "D": D,
        "H": H,
        "K": families.shared(D, H, ("n_embd", "n_head")),
        "F": families.whole(config, "n_inner", 4 * D),
        "W": families.whole(config, "vocab_size", 50257),
        "N": families.whole(config, "n_positions", 1024),
    }
    activation = families.one_of(config, "activation_function", ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu"))
    model = {
        "mlp": families.ACTIVATIONS[activation],
        "eps": families.real(config, "layer_norm_epsilon", 1e-5),
        "scale": "1/sqrt(K)" if families.flag(config, "scale_attn_weights", True) else "1",
    }
    tied = families.flag(config, "tie_word_embeddings", True)
    return families.Description(sizes, model, {"W": sizes["W"], "N": sizes["N"], "tied_output": tied})


def groups(description: families.Description, names: set[str]) -> set[str]:
    """The output matrix where it is not the embedding."""
    return set() if description.extras["tied_output"] else {"untied"}


def config(sizes: Mapping[str, int], model: Mapping[str, Any], extras: Mapping[str, Any], groups: set[str]) -> dict:
    """Its config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": sizes["W"],
        "n_positions": sizes["N"],
        "n_embd": sizes["D"],
        "n_layer": sizes["M"],
        "n_head": sizes["H"],
        "n_inner": sizes["F"],
        "activation_function": families.activation(model["mlp"]),
        "layer_norm_epsilon": model["eps"],
        "scale_attn_weights": model.get("scale", "1/sqrt(K)") != "1",
        "tie_word_embeddings": "untied" not in groups,
    }


FAMILY = families.Family(
    "gpt2", "transformer.", (), LINES, KNOWN, describe, groups, config, families.TEXT_IDS, ("lm_head.",)
)
