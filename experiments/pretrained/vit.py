"""The vision transformer (Dosovitskiy et al. 2021): pre-norm, patches, a class token that answers for the image; and
DeiT (Touvron et al. 2021), where a distillation token answers in addition."""

import re
from typing import Any

import numpy as np

from experiments.pretrained import families, tensors

FIELDS = families.Fields(
    plain=families.PLAIN,
    sizes={
        "M": ("num_hidden_layers", 12),
        "D": ("hidden_size", 768),
        "H": ("num_attention_heads", 12),
        "F": ("intermediate_size", 3072),
        "Z": ("num_channels", 3),
    },
    choices={"mlp": ("hidden_act", families.ACTIVATIONS), "query_bias": ("qkv_bias", families.TRUE)},
    epsilon=("layer_norm_eps", 1e-12),
)
LAYER = "attention.attention.query attention.attention.key attention.attention.value attention.output.dense"
LAYER += " layernorm_before intermediate.dense output.dense layernorm_after"


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with the sizes of an image and of its patches."""
    (Y, X), (patch, other) = _sides(config, "image_size", 224), _sides(config, "patch_size", 16)
    if patch != other:
        raise families.refuse("patch_size", [patch, other], "square patches")
    first = 2 if config.get("model_type") == "deit" else 1
    settings |= {"N": (Y // patch) * (X // patch) + first, "P": patch * patch * settings["Z"]}
    settings |= {"Y": patch, "X": patch, "image": (Y, X), "patch": patch}
    return settings | {"pooler_act": str(config.get("pooler_act") or "tanh")}


def _sides(config: families.HfConfig, name: str, default: int) -> tuple[int, int]:
    """Return rows and columns, from one number or two."""
    value = config.get(name, default)
    rows, columns = value if isinstance(value, list) else [value, value]
    return families.size({name: rows}, name, default), families.size({name: columns}, name, default)


def write(settings: families.Settings, *, architecture: str = "ViTForImageClassification") -> dict[str, Any]:
    """Return the rest of config.json. architecture: their class of a model with a head."""
    Y, X = settings["image"]
    headless = re.sub("ForImage.*", "Model", architecture)
    return families.write_labels(settings) | {
        "architectures": [architecture if settings["head"] else headless],
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
    outputs={"image": "class_token"},
    prefix="vit.",
    unprefixed=("classifier.",),
    ids=(),
    fields=FIELDS,
    read=read,
    write=write,
    lines=lines,
    head=head,
    aside=("pooler.",),
)
DEIT = FAMILY._replace(
    outputs={"image": "distilled"},
    prefix="deit.",
    unprefixed=("cls_classifier.", "distillation_classifier."),
    write=lambda settings: write(settings, architecture="DeiTForImageClassificationWithTeacher"),
    lines=deit_lines,
    clean=deit_clean,
)
