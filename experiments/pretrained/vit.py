"""The vision transformer (Dosovitskiy et al. 2021): pre-norm, patches, a class token that answers for the image; and
DeiT (Touvron et al. 2021), where a distillation token answers in addition."""

import re
from typing import Any

import numpy as np

from experiments.pretrained import families, tensors

SIZES = {"M": "num_hidden_layers", "D": "hidden_size", "H": "num_attention_heads", "F": "intermediate_size"}
SIZES |= {"Z": "num_channels"}
LAYER = "attention.attention.query attention.attention.key attention.attention.value attention.output.dense"
LAYER += " layernorm_before intermediate.dense output.dense layernorm_after"


def read(config: families.HfConfig) -> families.Settings:
    """Return the settings that config.json says."""
    settings = families.PLAIN | families.sizes(config, SIZES, (12, 768, 12, 3072, 3))
    settings["norm"] = families.norm(config, "layer_norm_eps", 1e-12)
    settings["mlp"] = families.choose(config, "hidden_act", families.ACTIVATIONS)
    settings["query_bias"] = families.flag(config, "qkv_bias", True)
    settings["pooler_act"] = str(config.get("pooler_act") or "tanh")
    (Y, X), (patch, other) = _sides(config, "image_size", 224), _sides(config, "patch_size", 16)
    if patch != other:
        raise families.refuse("patch_size", [patch, other], "square patches")
    first = 2 if config.get("model_type") == "deit" else 1
    settings |= {"N": (Y // patch) * (X // patch) + first, "P": patch * patch * settings["Z"]}
    return families.heads(settings | {"Y": patch, "X": patch, "image": (Y, X), "patch": patch})


def _sides(config: families.HfConfig, name: str, default: int) -> tuple[int, int]:
    """Return rows and columns, from one number or two."""
    value = config.get(name, default)
    rows, columns = value if isinstance(value, list) else [value, value]
    return families.size({name: rows}, name, default), families.size({name: columns}, name, default)


def write(settings: families.Settings, *, architecture: str = "ViTForImageClassification") -> dict[str, Any]:
    """Return config.json: the inverse of `read`. architecture: their class of a model with a head."""
    Y, X = settings["image"]
    headless = re.sub("ForImage.*", "Model", architecture)
    return families.named(settings) | {
        "architectures": [architecture if settings["head"] else headless],
        **{name: settings[letter] for letter, name in SIZES.items()},
        "hidden_act": families.theirs(families.ACTIVATIONS, settings["mlp"]),
        "layer_norm_eps": families.norm_eps(settings),
        "qkv_bias": settings["query_bias"],
        "pooler_act": settings.get("pooler_act", "tanh"),
        "image_size": Y if Y == X else [Y, X],
        "patch_size": settings["patch"],
    }


def lines(settings: families.Settings, *, classifier: str = "classifier") -> list[tensors.Line]:
    """Return the rules of all tensors."""
    rules = tensors.pair("embeddings.patch_embeddings.projection", "D Z Y X; D", "embed/W_DP", "b_D")
    rules += [tensors.Line("embeddings.cls_token", "1 1 D", ("class/c_D",))]
    rules += [tensors.Line("embeddings.position_embeddings", "1 N D", ("position/P_ND",))]
    rules += families.layers("encoder.layer.{m}.", LAYER, qkv_bias=settings["query_bias"])
    rules += tensors.pair("layernorm", "D; D", "norm/gain_D", "shift_D")
    if settings["head"]:
        rules += tensors.pair(classifier, "C D; C", "head/G_CD", "b_C")
    return rules


def head(settings: families.Settings, arrays: tensors.Arrays) -> families.Settings:
    """Return whether the file holds a head, with its classes."""
    weights = [name for name in ("classifier.weight", "cls_classifier.weight") if name in arrays]
    return {"head": "image", "C": len(arrays[weights[0]])} if weights else {"head": ""}


def deit_lines(settings: families.Settings) -> list[tensors.Line]:
    """Return the rules of a DeiT."""
    rules = lines(settings, classifier="cls_classifier")
    rules += [tensors.Line("embeddings.distillation_token", "1 1 D", ("class/d_D",))]
    if settings["head"]:
        rules += tensors.pair("distillation_classifier", "C D; C", "head/Gd_CD", "bd_C")
    return rules


def deit_clean(arrays: tensors.Arrays, settings: families.Settings) -> tensors.Arrays:
    """Return the tensors with both heads. If the class token alone answers, its answer is the mean of twice its own and
    of zero."""
    arrays = dict(arrays)
    for name in ("weight", "bias"):
        if (own := arrays.pop(f"classifier.{name}", None)) is not None:
            arrays[f"cls_classifier.{name}"] = 2 * np.asarray(own, np.float32)
            arrays[f"distillation_classifier.{name}"] = np.zeros_like(own)
    return arrays


FAMILY = families.Family(
    kinds=("image",),
    prefix="vit.",
    unprefixed=("classifier.",),
    ids=(),
    read=read,
    write=write,
    lines=lines,
    head=head,
    output=lambda kind, settings: "class_token",
    aside=("pooler.",),
)
DEIT = FAMILY._replace(
    prefix="deit.",
    unprefixed=("cls_classifier.", "distillation_classifier."),
    write=lambda settings: write(settings, architecture="DeiTForImageClassificationWithTeacher"),
    lines=deit_lines,
    output=lambda kind, settings: "distilled",
    clean=deit_clean,
)
