"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, the output tied to the embedding."""

from experiments.pretrained import families

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
    write=lambda settings, family: {"n_inner": settings["F"]},
    prefix="transformer.",
    table={
        "wte.weight": "embed/E",
        "wpe.weight": "position/P",
        "h.{m}.ln_1.*": "blocks/norm1/gain shift",
        "h.{m}.attn.c_attn.weight": "blocks/score/Uq + blocks/score/Uk + blocks/value/Uv",
        "h.{m}.attn.c_attn.bias": "blocks/score/bq + blocks/score/bk + blocks/value/bv",
        "h.{m}.attn.c_proj.*": "blocks/value/Uo bo",
        "h.{m}.ln_2.*": "blocks/norm2/gain shift",
        "h.{m}.mlp.c_fc.*": "blocks/mlp/W1 b1",
        "h.{m}.mlp.c_proj.*": "blocks/mlp/W2 b2",
        "ln_f.*": "norm/gain shift",
    },
    heads={"causal": families.Head("LMHeadModel", "", {"lm_head.weight": "head/G"})},
    transposed=True,
    tied={"lm_head.weight": "wte.weight"},
    buffers=("h.{m}.attn.bias", "h.{m}.attn.masked_bias"),
)
