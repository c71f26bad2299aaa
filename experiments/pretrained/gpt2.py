"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, the output tied to the embedding. GPT-BigCode (SantaCoder,
Ben Allal et al. 2023) is the same with one head of keys and values (MQA), or with one for each head of queries."""

import numpy as np

from experiments.pretrained import families, tensors
from experiments.pretrained.families import Field

QKV = ("blocks/score/Uq_HKD", "blocks/score/Uk_GKD", "blocks/value/Uv_GKD")
QKV_BIAS = ("blocks/score/bq_HK", "blocks/score/bk_GK", "blocks/value/bv_GK")


def lines(qkv: str, out: str, up: str, down: str) -> tuple[tensors.Line, ...]:
    """All tensors, from the axes of those that differ: queries, keys and values, which are one, and what follows."""
    return (
        tensors.Line("wte.weight", "W D", ("embed/E_WD",)),
        tensors.Line("wpe.weight", "N D", ("position/P_ND",)),
        *tensors.pair("h.{m}.ln_1", "D; D", "blocks/norm1/gain_D", "shift_D"),
        tensors.Line("h.{m}.attn.c_attn.weight", qkv, QKV),
        tensors.Line("h.{m}.attn.c_attn.bias", qkv.replace("D", "").strip(), QKV_BIAS),
        *tensors.pair("h.{m}.attn.c_proj", f"{out}; D", "blocks/value/Uo_HDK", "bo_D"),
        *tensors.pair("h.{m}.ln_2", "D; D", "blocks/norm2/gain_D", "shift_D"),
        *tensors.pair("h.{m}.mlp.c_fc", f"{up}; F", "blocks/mlp/W1_FD", "b1_F"),
        *tensors.pair("h.{m}.mlp.c_proj", f"{down}; D", "blocks/mlp/W2_DF", "b2_D"),
        *tensors.pair("ln_f", "D; D", "norm/gain_D", "shift_D"),
        tensors.Line("lm_head.weight", "W D", ("head/G_WD",), "untied"),
    )


KNOWN = (
    tensors.constant("h.{m}.attn.bias", "the causal mask", lambda facts: np.tri(facts["N"])[None, None]),
    tensors.Known("h.{m}.attn.masked_bias", "minus infinity", lambda x, *_: x.size == 1 and x.item() <= -1e4),
    tensors.copy("lm_head.weight", "wte.weight", unless="untied"),
)
ACTIVATION = {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS
SIZES = (
    Field("n_layer", "M", 12),
    Field("n_embd", "D", 768),
    Field("n_head", "H", 12),
    Field("n_inner", "F", lambda facts: 4 * facts["D"]),
    Field("vocab_size", "W", 50257),
    Field("n_positions", "N", 1024),
    Field("layer_norm_epsilon", "norm", 1e-5),
    Field("scale_attn_weights", "scale", {True: "1/sqrt(K)", False: "1"}),
    Field("tie_word_embeddings", "tied_output", families.YES),
    Field("add_cross_attention", "", families.only(False)),
)
ALIASES = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
ALIASES |= {"n_ctx": "n_positions", "max_position_embeddings": "n_positions"}
FAMILY = families.Family(
    "gpt2",
    kind="causal",
    prefix="transformer.",
    lines=lines("D 3HK", "HK D", "D F", "F D"),  # matrices stand as (from, to), hence transposed
    known=KNOWN,
    model=families.SETTINGS | {"scale": ("1/sqrt(K)", "1")},
    fields=(
        *SIZES,
        Field("activation_function", "mlp", ACTIVATION),
        Field("scale_attn_by_inverse_layer_idx", "", families.only(False)),
    ),
    extra=lambda facts, groups: {"architectures": ["GPT2LMHeadModel"]},
    aliases=ALIASES,
)
BIGCODE = FAMILY._replace(
    name="gpt_bigcode",
    lines=lines("+K D", "D HK", "F D", "D F"),
    fields=(
        *SIZES,
        Field("activation_function", "mlp", {"gelu_pytorch_tanh": "gelu_tanh"} | ACTIVATION),
        Field("multi_query", "G", {True: 1, False: None}),  # None: as many as of queries
    ),
    extra=lambda facts, groups: {"architectures": ["GPTBigCodeForCausalLM"]},
)
