"""Llama (Touvron et al. 2023): pre-norm with RMS norms, rotary positions, a gated MLP, no biases, shared key heads."""

from collections.abc import Mapping
from typing import Any

from experiments.pretrained import families, rope, tensors
from tfm import block as blocks

GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}  # activation -> the gated MLP
GATED = {"silu": "swiglu"} | {name: GATES[ours] for name, ours in families.ACTIVATIONS.items() if ours in GATES}
FIXED = {"sliding_window": None}  # fields for which one value is supported
# (attention_bias, mlp_bias) -> model.bias
BIAS = {(False, False): "none", (True, False): "attention", (False, True): "mlp", (True, True): "all"}


def read(
    config: families.HfConfig, settings: families.Settings, *, G: int = 0, K: int = 0, fixed: Mapping[str, Any] = FIXED
) -> families.Settings:
    """Return the settings with heads of keys, biases and rotary positions. G, K: defaults of their fields, or 0.

    fixed: further fields for which one value is supported.
    """
    families.expect(config, fixed)
    settings = settings | {"G": families.size(config, "num_key_value_heads", G or settings["H"])}
    if K or config.get("head_dim") is not None:
        settings["K"] = families.size(config, "head_dim", K)
    biases = tuple(families.choose(config, name, families.FALSE) for name in ("attention_bias", "mlp_bias"))
    return settings | {"bias": BIAS[biases], "relative_position": rope.read(config, settings["N"])}


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json that are not in the family's table."""
    D, H, architecture, biases = settings["D"], settings["H"], family.architecture, blocks.BIASES[settings["bias"]]
    divides = architecture != "Llama" or D % H == 0  # transformers' Llama requires this even with head_dim
    families.require(divides, "num_attention_heads", H, f"a divisor of hidden_size = {D}")
    window = settings["window"] if architecture not in ("Llama", "Gemma") else 0
    return rope.write(settings) | {
        "architectures": [f"{architecture}ForCausalLM"],
        "num_key_value_heads": settings["G"],
        "head_dim": settings["K"],
        "attention_bias": "output" in biases,
        "mlp_bias": "mlp" in biases,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors."""
    attention, feed, GK = "layers.{m}.self_attn.", "layers.{m}.mlp.", "GK" if settings["G"] < settings["H"] else "HK"
    score, output, mlp = (stage in blocks.BIASES[settings["bias"]] for stage in ("score", "output", "mlp"))
    qk_norms = "qk" if settings["score"] == "asymmetric_qknorm" else ""
    untied = [] if settings["tied_output"] else [tensors.Line("lm_head.weight", "W D", ("head/G_WD",))]
    return [
        tensors.Line("embed_tokens.weight", "W D", ("embed/E_WD",)),
        tensors.Line("layers.{m}.input_layernorm.weight", "D", ("blocks/norm1/gain_D",)),
        *tensors.pair(attention + "q_proj", "HK D; HK", "blocks/score/Uq_HKD", "bq_HK", biased=score),
        *tensors.pair(attention + "k_proj", f"{GK} D; {GK}", f"blocks/score/Uk_{GK}D", f"bk_{GK}", biased=score),
        *tensors.pair(attention + "v_proj", f"{GK} D; {GK}", f"blocks/value/Uv_{GK}D", f"bv_{GK}", biased=score),
        *tensors.pair(attention + "o_proj", "D HK; D", "blocks/value/Uo_HDK", "bo_D", biased=output),
        *(tensors.Line(f"{attention}{x}_norm.weight", "K", (f"blocks/score/gain{x}_K",)) for x in qk_norms),
        tensors.Line("layers.{m}.post_attention_layernorm.weight", "D", ("blocks/norm2/gain_D",)),
        *tensors.pair(feed + "gate_proj", "F D; F", "blocks/mlp/Wg_FD", "bg_F", biased=mlp),
        *tensors.pair(feed + "up_proj", "F D; F", "blocks/mlp/W1_FD", "b1_F", biased=mlp),
        *tensors.pair(feed + "down_proj", "D F; D", "blocks/mlp/W2_DF", "b2_D", biased=mlp),
        tensors.Line("norm.weight", "D", ("norm/gain_D",)),
        *untied,
    ]


FAMILY = families.Family(
    architecture="Llama",
    sizes=families.sizes(M=32, D=4096, H=32, F=11008, W=32000, N=2048),
    choices={"mlp": ("hidden_act", GATED), "tied_output": ("tie_word_embeddings", families.FALSE)},
    epsilon=("rms_norm_eps", 1e-6),
    plain=families.PLAIN | {"norm": "rms", "position": "none"},
    fixed={"partial_rotary_factor": 1.0},
    read=read,
    write=write,
    prefix="model.",
    lines=lines,
    tied={"lm_head.weight": "embed_tokens.weight"},
    buffers=("layers.{m}.self_attn.rotary_emb.inv_freq",),
)
