"""Llama (Touvron et al. 2023): pre-norm with RMS norms, rotary positions, a gated MLP, no biases, shared key heads.

Relatives with a sliding window are Mistral, Qwen2 (biases of queries, keys, values) and Qwen3 (norms of queries, keys).
The first Gemma (Gemma Team 2024) has GELU gates, embeddings times sqrt(D), and gains 1 + g in norms.
"""

import functools
from typing import Any

import numpy as np

from experiments.pretrained import families, rope, tensors
from tfm import block as blocks

LAYER = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj input_layernorm"
LAYER += " mlp.up_proj mlp.down_proj post_attention_layernorm mlp.gate_proj"  # as families.name_layer takes them
GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}  # activation -> the gated MLP
GATED = {"silu": "swiglu"} | {name: GATES[ours] for name, ours in families.ACTIVATIONS.items() if ours in GATES}
GEMMA_GATED = {"gelu_pytorch_tanh": "geglu_tanh"} | GATED | {"gelu": "geglu_tanh"}  # Gemma's gelu is the tanh form
FIXED = {"partial_rotary_factor": 1.0}  # fields for which one value is supported
# (attention_bias, mlp_bias) -> model.bias
BIAS = {(False, False): "none", (True, False): "attention", (False, True): "mlp", (True, True): "all"}


def read(
    config: families.HfConfig, settings: families.Settings, *, G: int = 0, K: int = 0, **options: Any
) -> families.Settings:
    """Return the settings completed by G, K, bias, relative_position, and `options`.

    G, K: defaults of num_key_value_heads and head_dim; 0: H, and no K (`families.read` then sets D / H).
    """
    settings = settings | {"G": families.size(config, "num_key_value_heads", G or settings["H"])}
    if K or config.get("head_dim") is not None:
        settings["K"] = families.size(config, "head_dim", K)
    biases = tuple(families.choose(config, name, families.FALSE) for name in ("attention_bias", "mlp_bias"))
    return settings | {"bias": BIAS[biases], "relative_position": rope.read(config, settings["N"])} | options


def read_windowed(
    config: families.HfConfig, settings: families.Settings, *, windowed: bool, full: int, **options: Any
) -> families.Settings:
    """Return the settings of a family with a sliding window. Raises UserError if it differs between layers.

    windowed, full: the defaults of use_sliding_window, and of max_window_layers, the number of first layers without a
    window. options: further arguments of `read`.
    """
    settings = read(config, settings, **options)
    config = {"sliding_window": 4096, "max_window_layers": full, **config}
    uses = families.TRUE if windowed else families.FALSE
    if config["sliding_window"] is None or not families.choose(config, "use_sliding_window", uses):
        return settings
    full = families.number(config, "max_window_layers", full)
    assumed = ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < settings["M"])
    kinds = {*(config.get("layer_types") or assumed)}
    families.require(len(kinds) == 1, "layer_types", sorted(kinds), "a sliding window in all layers or in none")
    window = families.size(config, "sliding_window", 4096) if kinds == {"sliding_attention"} else 0
    return settings | {"window": window}


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return further fields of config.json, which the tables of `family` (sizes, choices, epsilon) do not give.

    Raises UserError if the family is Llama and H does not divide D.
    """
    D, H, architecture, biases = settings["D"], settings["H"], family.architecture, blocks.BIASES[settings["bias"]]
    divides = architecture != "Llama" or D % H == 0  # transformers' Llama requires this even with head_dim
    families.require(divides, "num_attention_heads", H, f"a divisor of hidden_size = {D}")
    window = settings["window"] if architecture not in ("Llama", "Gemma") else 0
    return rope.write(settings) | {
        "num_key_value_heads": settings["G"],
        "head_dim": settings["K"],
        "attention_bias": "output" in biases,
        "mlp_bias": "mlp" in biases,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def rescale(
    arrays: tensors.Arrays, settings: families.Settings, family: families.Family, *, back: bool = False
) -> tensors.Arrays:
    """Return Gemma's tensors with 1 added to the gains of norms, and the embedding times sqrt(D). back: the inverse.

    If the embedding is also the output, the last gain is divided by sqrt(D): logits stay the same.
    """
    factor, changed = np.float32(settings["D"] ** 0.5), {}
    for name, array in arrays.items():
        array = np.asarray(array, np.float32)
        if name == "embed_tokens.weight":
            changed[name] = array * (1 / factor if back else factor)
        elif name.endswith("norm.weight"):
            divisor = factor if name == "norm.weight" and settings["tied_output"] else np.float32(1)
            changed[name] = array * divisor - 1 if back else (1 + array) / divisor
    return {**arrays, **changed}


LLAMA = families.Family(
    architecture="Llama",
    sizes=families.name_sizes(M=32, D=4096, H=32, F=11008, W=32000, N=2048),
    choices={"mlp": ("hidden_act", GATED), "tied_output": ("tie_word_embeddings", families.FALSE)},
    epsilon=("rms_norm_eps", 1e-6),
    plain=families.PLAIN | {"norm": "rms", "position": "none"},
    fixed=FIXED | {"sliding_window": None},
    read=read,
    write=write,
    prefix="model.",
    table={
        "embed_tokens.weight": "embed/E",
        **families.name_layer("layers.{m}.", LAYER),
        "layers.{m}.self_attn.q_norm.weight": "blocks/score/gainq",
        "layers.{m}.self_attn.k_norm.weight": "blocks/score/gaink",
        "norm.weight": "norm/gain",
    },
    heads={"causal": families.Head("ForCausalLM", "", {"lm_head.weight": "head/G"})},
    tied={"lm_head.weight": "embed_tokens.weight"},
    buffers=("layers.{m}.self_attn.rotary_emb.inv_freq",),
)
MISTRAL = LLAMA._replace(
    architecture="Mistral",
    fixed=FIXED,
    sizes=LLAMA.sizes | families.name_sizes(F=14336, N=131072),
    read=functools.partial(read_windowed, G=8, windowed=True, full=0, bias="none"),
)
QWEN2 = MISTRAL._replace(
    architecture="Qwen2",
    sizes=LLAMA.sizes | families.name_sizes(F=22016, W=151936, N=32768),
    read=functools.partial(read_windowed, G=32, windowed=False, full=28, bias="qkv"),
)
QWEN3 = QWEN2._replace(
    architecture="Qwen3",
    read=functools.partial(read_windowed, G=32, K=128, windowed=False, full=28, score="asymmetric_qknorm"),
)
GEMMA = LLAMA._replace(
    architecture="Gemma",
    sizes=families.name_sizes(M=28, D=3072, H=16, F=24576, W=256000, N=8192),
    choices={"mlp": ("hidden_act", GEMMA_GATED), "tied_output": ("tie_word_embeddings", families.TRUE)},
    fixed=LLAMA.fixed | {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    read=functools.partial(read, G=16, K=256),
    clean=rescale,
    restore=functools.partial(rescale, back=True),
)
