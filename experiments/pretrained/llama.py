"""Llama (Touvron et al. 2023): pre-norm with RMS norms, rotary positions, a gated MLP, no biases, shared key heads; and
its relatives: Mistral (a sliding window), Qwen2 (biases of queries, keys and values), Qwen3 (norms of queries and keys)
and Gemma (a gate of GELU; tokens times sqrt(D), norms whose gains are 1 + g)."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import families, rope, tensors
from tfm import block

GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}  # the MLP with such a gate
GATED = {"silu": "swiglu"} | {name: GATES[ours] for name, ours in families.ACTIVATIONS.items() if ours in GATES}
GEMMA_GATED = {"gelu_pytorch_tanh": "geglu_tanh"} | GATED | {"gelu": "geglu_tanh"}  # their gelu means the tanh form
# (attention_bias, mlp_bias) -> model.bias
BIAS = {(False, False): "none", (True, False): "attention", (False, True): "mlp", (True, True): "all"}
FIELDS = families.Fields(
    plain=families.PLAIN | {"norm": "rms", "position": "none"},
    sizes={
        "M": ("num_hidden_layers", 32),
        "D": ("hidden_size", 4096),
        "H": ("num_attention_heads", 32),
        "F": ("intermediate_size", 11008),
        "W": ("vocab_size", 32000),
        "N": ("max_position_embeddings", 2048),
    },
    choices={"mlp": ("hidden_act", GATED), "tied_output": ("tie_word_embeddings", families.FALSE)},
    epsilon=("rms_norm_eps", 1e-6),
    fixed={"partial_rotary_factor": 1.0},
)
MISTRAL_SIZES = {"F": ("intermediate_size", 14336), "N": ("max_position_embeddings", 131072)}
QWEN_SIZES = {
    "F": ("intermediate_size", 22016),
    "W": ("vocab_size", 151936),
    "N": ("max_position_embeddings", 32768),
}
GEMMA_FIELDS = FIELDS._replace(
    sizes={
        "M": ("num_hidden_layers", 28),
        "D": ("hidden_size", 3072),
        "H": ("num_attention_heads", 16),
        "F": ("intermediate_size", 24576),
        "W": ("vocab_size", 256000),
        "N": ("max_position_embeddings", 8192),
    },
    choices={"mlp": ("hidden_act", GEMMA_GATED), "tied_output": ("tie_word_embeddings", families.TRUE)},
)
GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False, "sliding_window": None}


def read_attention(
    config: families.HfConfig, settings: families.Settings, *, G: int | None = None, K: int | None = None
) -> families.Settings:
    """Return the settings with key heads, biases and rotary positions. G, K: the defaults of their fields."""
    settings = settings | {"G": families.size(config, "num_key_value_heads", G or settings["H"])}
    if K or config.get("head_dim") is not None:
        settings["K"] = families.size(config, "head_dim", K)
    biased = tuple(families.choose(config, name, families.FALSE) for name in ("attention_bias", "mlp_bias"))
    return settings | {"bias": BIAS[biased], "relative_position": rope.read(config, settings["N"])}


def llama(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings of a Llama."""
    families.expect(config, {"sliding_window": None})
    return read_attention(config, settings)


def mistral(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings of a Mistral."""
    settings = read_attention(config, settings, G=8)
    return settings | {"bias": "none", "window": window(config, settings["M"])}


def qwen2(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings of a Qwen2."""
    settings = read_attention(config, settings, G=32)
    return settings | {"bias": "qkv", "window": window(config, settings["M"], used=False, full=28)}


def qwen3(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings of a Qwen3."""
    settings = read_attention(config, settings, G=32, K=128)
    return settings | {"score": "asymmetric_qknorm", "window": window(config, settings["M"], used=False, full=28)}


def gemma(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings of a Gemma (the first)."""
    families.expect(config, GEMMA_FIXED)
    return read_attention(config, settings, G=16, K=256)


def window(config: families.HfConfig, M: int, *, used: bool = True, full: int = 0) -> int:
    """Return the sliding window of all M layers, 0 for none. used, full: the defaults of use_sliding_window, and of the
    number of first layers without a window. Raises UserError if layers differ."""
    config = {"sliding_window": 4096, "max_window_layers": full, **config}
    default = families.TRUE if used else families.FALSE
    if config["sliding_window"] is None or not families.choose(config, "use_sliding_window", default):
        return 0
    full = families.number(config, "max_window_layers", full)
    kinds = {*(config.get("layer_types") or ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < M))}
    if len(kinds) > 1:
        raise errors.UserError("config.json: a sliding window is supported in all layers or in none, and not in some")
    return families.size(config, "sliding_window", 4096) if kinds == {"sliding_attention"} else 0


def write(settings: families.Settings, *, name: str) -> dict[str, Any]:
    """Return the rest of config.json. Their class begins with `name`."""
    if name == "Llama" and settings["D"] % settings["H"]:  # they insist, whatever head_dim is
        raise families.refuse("num_attention_heads", settings["H"], f"a divisor of hidden_size = {settings['D']}")
    biases, window = block.BIASES[settings["bias"]], settings["window"] if name not in ("Llama", "Gemma") else 0
    return rope.write(settings) | {
        "architectures": [f"{name}ForCausalLM"],
        "num_key_value_heads": settings["G"],
        "head_dim": settings["K"],
        "attention_bias": "output" in biases,
        "mlp_bias": "mlp" in biases,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def lines(settings: families.Settings) -> list[tensors.Line]:
    """Return the rules of all tensors."""
    G = "G" if settings["G"] < settings["H"] else "H"
    attention, mlp, biases = "layers.{m}.self_attn.", "layers.{m}.mlp.", block.BIASES[settings["bias"]]
    score, output = "score" in biases, "output" in biases
    rules = [tensors.Line("embed_tokens.weight", "W D", ("embed/E_WD",))]
    rules += [tensors.Line("layers.{m}.input_layernorm.weight", "D", ("blocks/norm1/gain_D",))]
    rules += tensors.pair(attention + "q_proj", "HK D; HK", "blocks/score/Uq_HKD", "bq_HK", biased=score)
    rules += tensors.pair(attention + "k_proj", f"{G}K D; {G}K", f"blocks/score/Uk_{G}KD", f"bk_{G}K", biased=score)
    rules += tensors.pair(attention + "v_proj", f"{G}K D; {G}K", f"blocks/value/Uv_{G}KD", f"bv_{G}K", biased=score)
    rules += tensors.pair(attention + "o_proj", "D HK; D", "blocks/value/Uo_HDK", "bo_D", biased=output)
    if settings["score"] == "asymmetric_qknorm":
        rules += [tensors.Line(f"{attention}{x}_norm.weight", "K", (f"blocks/score/gain{x}_K",)) for x in "qk"]
    rules += [tensors.Line("layers.{m}.post_attention_layernorm.weight", "D", ("blocks/norm2/gain_D",))]
    rules += tensors.pair(mlp + "gate_proj", "F D; F", "blocks/mlp/Wg_FD", "bg_F", biased="mlp" in biases)
    rules += tensors.pair(mlp + "up_proj", "F D; F", "blocks/mlp/W1_FD", "b1_F", biased="mlp" in biases)
    rules += tensors.pair(mlp + "down_proj", "D F; D", "blocks/mlp/W2_DF", "b2_D", biased="mlp" in biases)
    rules += [tensors.Line("norm.weight", "D", ("norm/gain_D",))]
    return rules + ([] if settings["tied_output"] else [tensors.Line("lm_head.weight", "W D", ("head/G_WD",))])


def in_halves(params: Mapping, model: Mapping[str, Any]) -> tuple[dict, dict[str, Any]]:
    """Return the same model with rotary positions that turn the pairs (i, i + K/2) instead of (2i, 2i+1): queries and
    keys have the features K of each head in another order. params is our tree, `model` the fields of a config's
    `model`."""
    score = dict(params["blocks"]["score"])
    for name, leaf in score.items():
        axis = name.partition("_")[2].index("K") + 1  # after that of the layers
        pairs = [np.take(leaf, np.arange(start, leaf.shape[axis], 2), axis) for start in (0, 1)]
        score[name] = np.concatenate(pairs, axis)
    halves = model["relative_position"].replace("rotary", "rotary_halves")
    return {**params, "blocks": {**params["blocks"], "score": score}}, {**model, "relative_position": halves}


def rescale(arrays: tensors.Arrays, settings: families.Settings, *, back: bool = False) -> tensors.Arrays:
    """Return Gemma's tensors as our equations have them, or back: gains 1 + g, tokens times sqrt(D) in the embedding.

    If the embedding is the output too, the last gain is divided by the factor, so that logits stay the same.
    """
    factor, changed = np.float32(settings["D"] ** 0.5), {}
    for name, array in arrays.items():
        array, last = np.asarray(array, np.float32), name == "norm.weight" and settings["tied_output"]
        if name == "embed_tokens.weight":
            changed[name] = array * (1 / factor if back else factor)
        elif name.endswith("norm.weight"):
            over = factor if last else np.float32(1)
            changed[name] = array * over - 1 if back else (1 + array) / over
    return {**arrays, **changed}


def family(read: Callable, name: str, fields: families.Fields) -> families.Family:
    """Return the family of their class NAMEForCausalLM."""
    return families.Family(
        outputs={"causal": ""},
        prefix="model.",
        unprefixed=("lm_head.",),
        ids=families.TEXT_IDS,
        fields=fields,
        read=read,
        write=functools.partial(write, name=name),
        lines=lines,
        head=lambda settings, arrays: {"head": "causal"},
        tied={"lm_head.weight": "embed_tokens.weight"},
        buffers=("layers.{m}.self_attn.rotary_emb.inv_freq",),
    )


FAMILIES = {
    "llama": family(llama, "Llama", FIELDS),
    "mistral": family(mistral, "Mistral", FIELDS._replace(sizes=FIELDS.sizes | MISTRAL_SIZES)),
    "qwen2": family(qwen2, "Qwen2", FIELDS._replace(sizes=FIELDS.sizes | QWEN_SIZES)),
    "qwen3": family(qwen3, "Qwen3", FIELDS._replace(sizes=FIELDS.sizes | QWEN_SIZES)),
    "gemma": family(gemma, "Gemma", GEMMA_FIELDS)._replace(
        clean=rescale, restore=functools.partial(rescale, back=True)
    ),
}
