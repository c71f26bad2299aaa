"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, the output tied to the embedding."""

import numpy as np

from experiments.pretrained import families, tensors
from experiments.pretrained.families import Field

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
    tensors.constant("h.{m}.attn.bias", "the causal mask", lambda facts: np.tri(facts["N"])[None, None]),
    tensors.Known("h.{m}.attn.masked_bias", "minus infinity", lambda x, *_: x.size == 1 and x.item() <= -1e4),
    tensors.copy("lm_head.weight", "wte.weight", unless="untied"),
)
FIELDS = (
    Field("n_layer", "M", 12),
    Field("n_embd", "D", 768),
    Field("n_head", "H", 12),
    Field("n_inner", "F", lambda facts: 4 * facts["D"]),
    Field("vocab_size", "W", 50257),
    Field("n_positions", "N", 1024),
    Field("activation_function", "mlp", {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS),
    Field("layer_norm_epsilon", "eps", 1e-5),
    Field("scale_attn_weights", "scale", {True: "1/sqrt(K)", False: "1"}),
    Field("tie_word_embeddings", "tied_output", families.YES),
    Field("scale_attn_by_inverse_layer_idx", "", families.only(False)),
    Field("add_cross_attention", "", families.only(False)),
)
FAMILY = families.Family(
    "gpt2",
    kind="causal",
    prefix="transformer.",
    lines=LINES,
    known=KNOWN,
    model=families.SETTINGS | {"scale": ("1/sqrt(K)", "1")},
    fields=FIELDS,
    extra=lambda facts, groups: {"architectures": ["GPT2LMHeadModel"]},
)
