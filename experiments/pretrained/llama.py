"""Llama (Touvron et al. 2023): pre-norm with RMS norms, rotary positions, a gated MLP, no biases, shared key heads; and
its relatives: Mistral (a sliding window), Qwen2 (biases of queries, keys and values), Qwen3 (norms of queries and keys)
and Gemma (a gate of GELU; tokens times sqrt(D), norms whose gains are 1 + g)."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.build import model as models
from experiments.engine import errors
from experiments.pretrained import families, rope, tensors
from tfm import block

SIZES = {"M": "num_hidden_layers", "D": "hidden_size", "H": "num_attention_heads", "F": "intermediate_size"}
SIZES |= {"W": "vocab_size", "N": "max_position_embeddings"}
PLAIN = families.PLAIN | {"norm": "rms", "mlp": "swiglu", "position": "none"}
GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}  # the MLP with such a gate
GATED = {"silu": "swiglu"} | {name: GATES[ours] for name, ours in families.ACTIVATIONS.items() if ours in GATES}
GEMMA_GATED = {"gelu_pytorch_tanh": "geglu_tanh"} | GATED | {"gelu": "geglu_tanh"}  # their gelu means the tanh form
# (attention_bias, mlp_bias) -> model.bias
BIAS = {(False, False): "none", (True, False): "attention", (False, True): "mlp", (True, True): "all"}


def decoder(
    config: families.HfConfig,
    sizes: tuple[int, ...],
    *,
    G: int | None = None,
    K: int | None = None,
    tied: bool = False,
    gates: Mapping[str, str] = GATED,
) -> families.Settings:
    """Return the settings that all relatives read in the same way. sizes, G, K, tied: the defaults of the fields."""
    families.expect(config, {"partial_rotary_factor": 1.0})
    settings = PLAIN | families.sizes(config, SIZES, sizes)
    settings["G"] = families.size(config, "num_key_value_heads", G or settings["H"])
    if K or config.get("head_dim") is not None:
        settings["K"] = families.size(config, "head_dim", K)
    settings["norm"] = families.norm(config, "rms_norm_eps", 1e-6, "rms")
    settings["mlp"] = families.choose(config, "hidden_act", gates)
    settings["tied_output"] = families.flag(config, "tie_word_embeddings", tied)
    settings["bias"] = BIAS[tuple(families.flag(config, name) for name in ("attention_bias", "mlp_bias"))]
    settings["relative_position"] = rope.read(config, settings["N"])
    return families.heads(settings)


def llama(config: families.HfConfig) -> families.Settings:
    """Return the settings of a Llama."""
    families.expect(config, {"sliding_window": None})
    return decoder(config, (32, 4096, 32, 11008, 32000, 2048))


def mistral(config: families.HfConfig) -> families.Settings:
    """Return the settings of a Mistral."""
    settings = decoder(config, (32, 4096, 32, 14336, 32000, 131072), G=8)
    return settings | {"bias": "none", "window": window(config, settings["M"])}


def qwen2(config: families.HfConfig) -> families.Settings:
    """Return the settings of a Qwen2."""
    settings = decoder(config, (32, 4096, 32, 22016, 151936, 32768), G=32)
    return settings | {"bias": "qkv", "window": window(config, settings["M"], used=False, full=28)}


def qwen3(config: families.HfConfig) -> families.Settings:
    """Return the settings of a Qwen3."""
    settings = decoder(config, (32, 4096, 32, 22016, 151936, 32768), G=32, K=128)
    return settings | {"score": "asymmetric_qknorm", "window": window(config, settings["M"], used=False, full=28)}


def gemma(config: families.HfConfig) -> families.Settings:
    """Return the settings of a Gemma (the first)."""
    fixed = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False, "sliding_window": None}
    families.expect(config, fixed)
    return decoder(config, (28, 3072, 16, 24576, 256000, 8192), G=16, K=256, tied=True, gates=GEMMA_GATED)


def window(config: families.HfConfig, M: int, *, used: bool = True, full: int = 0) -> int:
    """Return the sliding window of all M layers, 0 for none. used, full: the defaults of use_sliding_window, and of the
    number of first layers without a window. Raises UserError if layers differ."""
    config = {"sliding_window": 4096, "max_window_layers": full, **config}
    if config["sliding_window"] is None or not families.flag(config, "use_sliding_window", used):
        return 0
    full = families.number(config, "max_window_layers", full)
    kinds = {*(config.get("layer_types") or ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < M))}
    if len(kinds) > 1:
        raise errors.UserError("config.json: a sliding window is supported in all layers or in none, and not in some")
    return families.size(config, "sliding_window", 4096) if kinds == {"sliding_attention"} else 0


def write(settings: families.Settings, *, name: str, gates: Mapping[str, str] = GATED) -> dict[str, Any]:
    """Return config.json: the inverse of `read`. name: that of their class."""
    if name == "Llama" and settings["D"] % settings["H"]:  # they insist, whatever head_dim is
        raise families.refuse("num_attention_heads", settings["H"], f"a divisor of hidden_size = {settings['D']}")
    biases, window = block.BIASES[settings["bias"]], settings["window"] if name not in ("Llama", "Gemma") else 0
    return rope.write(settings) | {
        "architectures": [f"{name}ForCausalLM"],
        **{field: settings[letter] for letter, field in SIZES.items()},
        "num_key_value_heads": settings["G"],
        "head_dim": settings["K"],
        "rms_norm_eps": families.norm_eps(settings),
        "hidden_act": families.theirs(gates, settings["mlp"]),
        "tie_word_embeddings": settings["tied_output"],
        "attention_bias": "output" in biases,
        "mlp_bias": "mlp" in biases,
        "partial_rotary_factor": 1.0,
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


def rescaled(arrays: tensors.Arrays, settings: families.Settings, *, back: bool = False) -> tensors.Arrays:
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


def family(read: Callable, name: str) -> families.Family:
    """Return the family of their class NAMEForCausalLM."""
    return families.Family(
        kinds=("causal",),
        prefix="model.",
        unprefixed=("lm_head.",),
        ids=families.TEXT_IDS,
        read=read,
        write=functools.partial(write, name=name),
        lines=lines,
        head=lambda settings, arrays: {"head": "causal"},
        output=lambda kind, settings: models.name_head(settings["tied_output"], ""),
        copies=lambda settings: {"lm_head.weight": "embed_tokens.weight"} if settings["tied_output"] else {},
        buffers=("layers.{m}.self_attn.rotary_emb.inv_freq",),
    )


FAMILIES = {
    "llama": family(llama, "Llama"),
    "mistral": family(mistral, "Mistral"),
    "qwen2": family(qwen2, "Qwen2"),
    "qwen3": family(qwen3, "Qwen3"),
    "gemma": family(gemma, "Gemma")._replace(
        write=functools.partial(write, name="Gemma", gates=GEMMA_GATED),
        clean=rescaled,
        restore=functools.partial(rescaled, back=True),
    ),
}
