"""Llama (Touvron et al. 2023): pre-norm with RMS norms, rotary positions, a gated MLP, no biases, shared key heads; and
its relatives: Mistral (a sliding window), Qwen2 (biases of queries, keys and values), Qwen3 (norms of queries and keys)
and Gemma (a gate of GELU; tokens times sqrt(D), norms whose gains are 1 + g)."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import variants
from experiments.engine import errors
from experiments.pretrained import families, tensors
from experiments.pretrained.families import Field
from tfm import block
from tfm.attention import rotary_scaling

WHOLE_ROTARY = Field("partial_rotary_factor", "", families.only(1.0, None))
_LAYER = "layers.{m}."
_ATTENTION, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."
LINES = (
    tensors.Line("embed_tokens.weight", "W D", ("embed/E_WD",)),
    tensors.Line(_LAYER + "input_layernorm.weight", "D", ("blocks/norm1/gain_D",)),
    *tensors.pair(_ATTENTION + "q_proj", "HK D; HK", "blocks/score/Uq_HKD", "bq_HK", bias_group="score"),
    *tensors.pair(_ATTENTION + "k_proj", "GK D; GK", "blocks/score/Uk_GKD", "bk_GK", bias_group="score"),
    *tensors.pair(_ATTENTION + "v_proj", "GK D; GK", "blocks/value/Uv_GKD", "bv_GK", bias_group="value"),
    *tensors.pair(_ATTENTION + "o_proj", "D HK; D", "blocks/value/Uo_HDK", "bo_D", bias_group="output"),
    tensors.Line(_ATTENTION + "q_norm.weight", "K", ("blocks/score/gainq_K",), "qknorm"),
    tensors.Line(_ATTENTION + "k_norm.weight", "K", ("blocks/score/gaink_K",), "qknorm"),
    tensors.Line(_LAYER + "post_attention_layernorm.weight", "D", ("blocks/norm2/gain_D",)),
    *tensors.pair(_MLP + "gate_proj", "F D; F", "blocks/mlp/Wg_FD", "bg_F", bias_group="mlp"),
    *tensors.pair(_MLP + "up_proj", "F D; F", "blocks/mlp/W1_FD", "b1_F", bias_group="mlp"),
    *tensors.pair(_MLP + "down_proj", "D F; D", "blocks/mlp/W2_DF", "b2_D", bias_group="mlp"),
    tensors.Line("norm.weight", "D", ("norm/gain_D",)),
    tensors.Line("lm_head.weight", "W D", ("head/G_WD",), "untied"),
)


def _frequencies(facts: families.Facts) -> np.ndarray:
    return np.asarray(rotary_scaling.none(np.array(1), facts["K"], float(angles(facts)[0]))[0])


KNOWN = (
    tensors.constant(_ATTENTION + "rotary_emb.inv_freq", "the rotary frequencies", _frequencies),
    tensors.copy("lm_head.weight", "embed_tokens.weight", unless="untied"),
)


def fields(*sizes: int, G: Any = lambda facts: facts["H"], K: int | None = None, tied: dict = families.NO) -> tuple:
    """Those that all have. sizes: the defaults of M, D, H, F, W and N."""
    *body, W, N = sizes
    return (
        *families.sizes(*body),
        Field("num_key_value_heads", "G", G),
        Field("head_dim", "K", K),
        Field("vocab_size", "W", W),
        Field("max_position_embeddings", "N", N),
        Field("rms_norm_eps", "norm", 1e-6),
        Field("tie_word_embeddings", "tied_output", tied),
        WHOLE_ROTARY,
    )


# A type of scaled rotary positions -> the fields that say its numbers, in the order of rotary_scaling.py.
ORIGINAL = "original_max_position_embeddings"
SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor", "N"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
}
YARN = {"beta_fast": 32, "beta_slow": 1, "attention_factor": 0}  # what they are where nothing is said
# (attention_bias, mlp_bias) -> model.bias
BIAS = {(False, False): "none", (True, False): "attention", (False, True): "mlp", (True, True): "all"}


def in_halves(params: Mapping, model: Mapping[str, Any]) -> tuple[dict, dict[str, Any]]:
    """The same model, its rotary positions turning the pairs (i, i + K/2) instead of (2i, 2i+1): queries and keys with
    the features K of each head in another order. params is our tree, `model` the fields of a config's `model`."""
    score = dict(params["blocks"]["score"])
    for name, leaf in score.items():
        axis = name.partition("_")[2].index("K") + 1  # behind that of the layers
        pairs = [np.take(leaf, np.arange(start, leaf.shape[axis], 2), axis) for start in (0, 1)]
        score[name] = np.concatenate(pairs, axis)
    blocks = dict(params["blocks"]) | {"score": score}
    halves = model["relative_position"].replace("rotary", "rotary_halves")
    return dict(params) | {"blocks": blocks}, dict(model) | {"relative_position": halves}


def angles(facts: families.Facts) -> list[str]:
    """What stands behind rotary_halves: the base, and maybe a scaling with its numbers."""
    return variants.split("relative_position", facts["relative_position"])[1].split(":")


def rotary(config: families.Config, facts: families.Facts) -> families.Facts:
    """The rotary positions with their base and scaling, from rope_theta, rope_scaling or rope_parameters."""
    theta, said = {}, []
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict):
            raise errors.UserError(f"config.json: {name} must be an object, and is {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        families.value(rope, WHOLE_ROTARY)
        theta |= {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else {}
        if kind != "default":
            said = [scaling(name, kind, rope, original=config.get(ORIGINAL), N=facts["N"])]
    base = families.value({**config, **theta}, Field("rope_theta", "", 10000.0))
    said = ":".join([variants.written(base), *said])
    return {"relative_position": variants.joined("relative_position", "rotary_halves", said)}


def scaling(name: str, kind: Any, rope: Mapping[str, Any], *, original: Any, N: int) -> str:
    """What stands behind the base for such an object of config.json, without trailing numbers that are defaults."""
    if not isinstance(kind, str) or kind not in SCALINGS:
        right = " or ".join(map(repr, ["default", *SCALINGS]))
        raise errors.UserError(f"config.json: {name} asks for the type {kind!r}, and only {right} are supported")
    unlike = {"mscale": (None, 0), "mscale_all_dim": (None, 0), "truncate": (None, True)}
    for one in (one for one, right in unlike.items() if rope.get(one) not in right):
        raise errors.UserError(f"config.json: {name}.{one} = {rope[one]!r} is not supported here")
    given = {ORIGINAL: N, **YARN, **{one: number for one, number in rope.items() if number is not None}, "N": N}
    given |= {} if original is None else {ORIGINAL: original}
    for one in (one for one in SCALINGS[kind] if one not in given):
        raise errors.UserError(f"config.json: {name} of the type {kind!r} needs {one}")
    numbers = {one: families.value(given, Field(one, "", 0.0)) for one in SCALINGS[kind]}
    while YARN.get(last := [*numbers][-1]) == numbers[last]:
        del numbers[last]
    return ":".join([kind, *map(variants.written, numbers.values())])


def complete(config: families.Config, facts: families.Facts, *, bias: str = "", **window: Any) -> families.Facts:
    """Rotary positions, biases, and the sliding window. bias: model.bias, where no field says it. window: the defaults
    of `sliding`."""
    biased = tuple(families.value(config, Field(name, "", families.NO)) for name in ("attention_bias", "mlp_bias"))
    return rotary(config, facts) | {"bias": bias or BIAS[biased], "window": sliding(config, facts["M"], **window)}


def sliding(config: families.Config, M: int, *, window: int | None = None, used: bool = True, first: int = 0) -> int:
    """The window of all M layers, 0 for none. window, used, first: the defaults of the fields that say it."""
    said = {"sliding_window": window, "use_sliding_window": used, "max_window_layers": first, **config}
    if said["sliding_window"] is None or not families.value(said, Field("use_sliding_window", "", families.YES)):
        return 0
    wide = families.value(said, Field("sliding_window", "", 1))
    full = families.value(said, Field("max_window_layers", "", 0.0))
    kinds = said.get("layer_types") or ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < M)
    if not isinstance(kinds, list) or any(kind != kinds[0] for kind in kinds):
        raise errors.UserError("config.json: a sliding window is supported in all layers or in none, and not in some")
    return wide if kinds[0] == "sliding_attention" else 0


def groups(facts: families.Facts, names: set[str]) -> set[str]:
    """The biases and norms that the fields say, and a matrix of the output's own."""
    normed = {"qknorm"} if facts["score"] == "asymmetric_qknorm" else set()
    return families.untied(facts, names) | {*block.BIASES[facts["bias"]]} | normed


def extra(facts: families.Facts, groups: set[str], *, kind: str) -> dict[str, Any]:
    """What the fields do not say."""
    if kind == "Llama" and facts["D"] % facts["H"]:  # they insist, whatever head_dim is
        wrong = f"hidden_size = {facts['D']} is not divisible by num_attention_heads = {facts['H']}"
        raise errors.UserError(f"config.json: {wrong}")
    base, *scaled = angles(facts)
    scaled, *numbers = scaled or ["default"]
    rope = {"rope_type": scaled, "rope_theta": float(base)}
    for name, number in zip(SCALINGS.get(scaled, ()), map(float, numbers), strict=False):
        rope |= {name: int(number) if name == ORIGINAL else number} if name != "N" else {}
    old = {"rope_theta": float(base)} | ({"rope_scaling": rope} if numbers else {})  # of transformers before 5
    wide, biases = facts["window"], block.BIASES[facts["bias"]]
    windows = {"sliding_window": wide or None, "use_sliding_window": bool(wide), "max_window_layers": 0}
    biased = {"attention_bias": "output" in biases, "mlp_bias": "mlp" in biases}
    return {"architectures": [f"{kind}ForCausalLM"], "rope_parameters": rope} | old | windows | biased


def scaled_tokens(flat: tensors.Arrays, facts: families.Facts, *, back: bool = False) -> dict[str, np.ndarray]:
    """Gemma's parameters as ours, or back: gains 1 + g are gains; the factor sqrt(D) on tokens is in the embedding, and
    where that is the output too, logits are what they were by the last gain divided by it."""
    factor, flat = np.float32(facts["D"] ** 0.5), dict(flat)
    last = factor if facts["tied_output"] else np.float32(1)
    flat["embed/E_WD"] = np.asarray(flat["embed/E_WD"]) * (1 / factor if back else factor)
    for path in ("blocks/norm1/gain_D", "blocks/norm2/gain_D", "norm/gain_D"):
        over = last if path == "norm/gain_D" else np.float32(1)
        flat[path] = np.asarray(flat[path]) * over - 1 if back else (1 + flat[path]) / over
    return flat


MODEL = families.SETTINGS | {
    **{"norm": ("rms",), "mlp": tuple(families.GATES.values()), "position": ("none",)},
    **{"relative_position": ("rotary_halves",), "window": families.ANY},
}
GATE, NO_WINDOW = Field("hidden_act", "mlp", families.GATED), Field("sliding_window", "", families.only(None))
FAMILY = families.Family(
    "llama",
    kind="causal",
    prefix="model.",
    lines=LINES,
    known=KNOWN,
    model=MODEL | {"window": (0,), "bias": ("none", "attention", "mlp", "all")},
    fields=(*fields(32, 4096, 32, 11008, 32000, 2048), GATE, NO_WINDOW),
    extra=functools.partial(extra, kind="Llama"),
    groups=groups,
    complete=complete,
)


def relative(name: str, kind: str, own: tuple[Field, ...], **more: Any) -> families.Family:
    """A family beside Llama; more: fields of Family, and `model` that differ."""
    model = MODEL | more.pop("model", {})
    return FAMILY._replace(name=name, model=model, fields=own, extra=functools.partial(extra, kind=kind), **more)


GELU = {"gelu_pytorch_tanh": "geglu_tanh"} | families.GATED | {"gelu": "geglu_tanh"}  # as gelu they mean the other one
RELATIVES = (
    relative(
        "mistral",
        "Mistral",
        (*fields(32, 4096, 32, 14336, 32000, 131072, G=8), GATE),
        model={"bias": ("none",)},
        complete=functools.partial(complete, window=4096, bias="none"),
    ),
    relative(
        "qwen2",
        "Qwen2",
        (*fields(32, 4096, 32, 22016, 151936, 32768, G=32), GATE),
        model={"bias": ("qkv",)},
        complete=functools.partial(complete, window=4096, used=False, first=28, bias="qkv"),
    ),
    relative(
        "qwen3",
        "Qwen3",
        (*fields(32, 4096, 32, 22016, 151936, 32768, G=32, K=128), GATE),
        model={"score": ("asymmetric_qknorm",), "bias": ("none", "attention")},
        complete=functools.partial(complete, window=4096, used=False, first=28),
    ),
    relative(
        "gemma",
        "Gemma",
        (
            *fields(28, 3072, 16, 24576, 256000, 8192, G=16, K=256, tied=families.YES),
            Field("hidden_act", "mlp", GELU),
            Field("hidden_activation", "", families.only(None, "gelu_pytorch_tanh")),
            Field("use_bidirectional_attention", "", families.only(None, False)),
            NO_WINDOW,
        ),
        model={"window": (0,), "bias": ("none", "attention")},
        ours=scaled_tokens,
        theirs=functools.partial(scaled_tokens, back=True),
    ),
)
