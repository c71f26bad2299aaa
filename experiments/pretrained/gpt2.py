"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, the output tied to the embedding."""

from experiments.pretrained import families, tensors


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors. A matrix in the file has the axes (input, output), the transpose of ours."""
    qkv = ("blocks/score/Uq_HKD", "blocks/score/Uk_HKD", "blocks/value/Uv_HKD")
    qkv_bias = ("blocks/score/bq_HK", "blocks/score/bk_HK", "blocks/value/bv_HK")
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
        *families.untied(settings, "lm_head"),
    ]


FAMILY = families.Family(
    architecture="GPT2",
    sizes={"M": ("n_layer", 12), "D": ("n_embd", 768), "H": ("n_head", 12)}
    | {"W": ("vocab_size", 50257), "N": ("n_positions", 1024)},
    choices={
        "mlp": ("activation_function", {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS),
        "scale": ("scale_attn_weights", {True: "1/sqrt(K)", False: "1"}),
        "tied_output": ("tie_word_embeddings", families.TRUE),
    },
    epsilon=("layer_norm_epsilon", 1e-5),
    fixed={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
    read=lambda config, settings: settings | {"F": families.size(config, "n_inner", 4 * settings["D"])},
    write=lambda settings, family: {"architectures": ["GPT2LMHeadModel"], "n_inner": settings["F"]},
    prefix="transformer.",
    lines=lines,
    tied={"lm_head.weight": "wte.weight"},
    buffers=("h.{m}.attn.bias", "h.{m}.attn.masked_bias"),
)
