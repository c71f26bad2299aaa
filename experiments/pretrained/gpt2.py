"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, the output tied to the embedding."""

from typing import Any

from experiments.build import model as models
from experiments.pretrained import families, tensors

SIZES = {"M": "n_layer", "D": "n_embd", "H": "n_head", "W": "vocab_size", "N": "n_positions"}
ACTIVATIONS = {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS
SCALES = {True: "1/sqrt(K)", False: "1"}
FIXED = {"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False}


def read(config: families.HfConfig) -> families.Settings:
    """Return the settings that config.json says."""
    families.expect(config, FIXED)
    settings = families.PLAIN | families.sizes(config, SIZES, (12, 768, 12, 50257, 1024))
    settings["F"] = families.size(config, "n_inner", 4 * settings["D"])
    settings["norm"] = families.norm(config, "layer_norm_epsilon", 1e-5)
    settings["mlp"] = families.choose(config, "activation_function", ACTIVATIONS)
    settings["scale"] = families.choose(config, "scale_attn_weights", SCALES)
    settings["tied_output"] = families.flag(config, "tie_word_embeddings", True)
    return families.heads(settings)


def write(settings: families.Settings) -> dict[str, Any]:
    """Return config.json: the inverse of `read`."""
    return FIXED | {
        "architectures": ["GPT2LMHeadModel"],
        **{name: settings[letter] for letter, name in SIZES.items()},
        "n_inner": settings["F"],
        "layer_norm_epsilon": families.norm_eps(settings),
        "activation_function": families.theirs(ACTIVATIONS, settings["mlp"]),
        "scale_attn_weights": families.theirs(SCALES, settings["scale"]),
        "tie_word_embeddings": settings["tied_output"],
    }


def lines(settings: families.Settings) -> list[tensors.Line]:
    """Return the rules of all tensors; matrices stand as (from, to), hence transposed."""
    qkv = ("blocks/score/Uq_HKD", "blocks/score/Uk_HKD", "blocks/value/Uv_HKD")
    qkv_bias = ("blocks/score/bq_HK", "blocks/score/bk_HK", "blocks/value/bv_HK")
    untied = [] if settings["tied_output"] else [tensors.Line("lm_head.weight", "W D", ("head/G_WD",))]
    return [
        tensors.Line("wte.weight", "W D", ("embed/E_WD",)),
        tensors.Line("wpe.weight", "N D", ("position/P_ND",)),
        *tensors.pair("h.{m}.ln_1", "D; D", "blocks/norm1/gain_D", "shift_D"),
        tensors.Line("h.{m}.attn.c_attn.weight", "D 3HK", qkv),
        tensors.Line("h.{m}.attn.c_attn.bias", "3HK", qkv_bias),
        *tensors.pair("h.{m}.attn.c_proj", "HK D; D", "blocks/value/Uo_HDK", "bo_D"),
        *tensors.pair("h.{m}.ln_2", "D; D", "blocks/norm2/gain_D", "shift_D"),
        *tensors.pair("h.{m}.mlp.c_fc", "D F; F", "blocks/mlp/W1_FD", "b1_F"),
        *tensors.pair("h.{m}.mlp.c_proj", "F D; D", "blocks/mlp/W2_DF", "b2_D"),
        *tensors.pair("ln_f", "D; D", "norm/gain_D", "shift_D"),
        *untied,
    ]


FAMILY = families.Family(
    kinds=("causal",),
    prefix="transformer.",
    unprefixed=("lm_head.",),
    ids=families.TEXT_IDS,
    read=read,
    write=write,
    lines=lines,
    head=lambda settings, arrays: {"head": "causal"},
    output=lambda kind, settings: models.name_head(settings["tied_output"], ""),
    copies=lambda settings: {"lm_head.weight": "wte.weight"} if settings["tied_output"] else {},
    buffers=("h.{m}.attn.bias", "h.{m}.attn.masked_bias"),
)
