"""The vision transformer (Dosovitskiy et al. 2021): pre-norm, patches, a class token that answers for the image."""

import math
from collections.abc import Mapping
from typing import Any

from experiments.engine import errors
from experiments.pretrained import families, tensors

_LAYER = "encoder.layer.{m}."
LINES = (
    *tensors.pair("embeddings.patch_embeddings.projection", "D Z Y X; D", "embed/W_DP", "b_D"),
    tensors.Line("embeddings.cls_token", "1 1 D", ("class/c_D",)),
    tensors.Line("embeddings.position_embeddings", "1 N D", ("position/P_ND",)),
    *tensors.pair(_LAYER + "layernorm_before", "D; D", "blocks/norm1/gain_D", "shift_D"),
    tensors.Line(_LAYER + "attention.attention.query.weight", "HK D", ("blocks/score/Uq_HKD",)),
    tensors.Line(_LAYER + "attention.attention.query.bias", "HK", ("blocks/score/bq_HK",), "bias"),
    tensors.Line(_LAYER + "attention.attention.key.weight", "HK D", ("blocks/score/Uk_HKD",)),
    tensors.Line(_LAYER + "attention.attention.key.bias", "HK", ("blocks/score/bk_HK",), "bias"),
    tensors.Line(_LAYER + "attention.attention.value.weight", "HK D", ("blocks/value/Uv_HKD",)),
    tensors.Line(_LAYER + "attention.attention.value.bias", "HK", ("blocks/value/bv_HK",), "bias"),
    *tensors.pair(_LAYER + "attention.output.dense", "D HK; D", "blocks/value/Uo_HDK", "bo_D"),
    *tensors.pair(_LAYER + "layernorm_after", "D; D", "blocks/norm2/gain_D", "shift_D"),
    *tensors.pair(_LAYER + "intermediate.dense", "F D; F", "blocks/mlp/W1_FD", "b1_F"),
    *tensors.pair(_LAYER + "output.dense", "D F; D", "blocks/mlp/W2_DF", "b2_D"),
    *tensors.pair("layernorm", "D; D", "norm/gain_D", "shift_D"),
    *tensors.pair("classifier", "C D; C", "head/G_CD", "b_C", "classifier"),
    *tensors.pair("pooler.dense", "D D; D", "extras/pooler/W_DD", "b_D", "pooler"),
)
# The names that transformers 5 uses in memory; its files keep the older ones above.
SPELLINGS = (
    (r"^layers\.", "encoder.layer."),
    (r"attention\.q_proj\.", "attention.attention.query."),
    (r"attention\.k_proj\.", "attention.attention.key."),
    (r"attention\.v_proj\.", "attention.attention.value."),
    (r"attention\.o_proj\.", "attention.output.dense."),
    (r"mlp\.fc1\.", "intermediate.dense."),
    (r"mlp\.fc2\.", "output.dense."),
)


def _side(config: families.Config, name: str, default: int) -> tuple[int, int]:
    """Rows and columns, from one number or two."""
    value = config.get(name, default)
    both = value if isinstance(value, list) else [value, value]
    if len(both) != 2:
        raise errors.UserError(f"config.json: {name} must be one number or two, and is {value!r}")
    return families.whole({name: both[0]}, name), families.whole({name: both[1]}, name)


def describe(config: families.Config) -> families.Description:
    """Our sizes and fields from its config.json. UserError for what it may ask and we do not have."""
    activation = families.one_of(config, "hidden_act", ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"))
    D, H = families.whole(config, "hidden_size", 768), families.whole(config, "num_attention_heads", 12)
    image, patch = _side(config, "image_size", 224), _side(config, "patch_size", 16)
    if patch[0] != patch[1]:
        raise errors.UserError(f"config.json: patch_size = {list(patch)} is not supported here, only square patches")
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # theirs where there is none
    sizes = {
        "M": families.whole(config, "num_hidden_layers", 12),
        "D": D,
        "H": H,
        "K": families.shared(D, H, ("hidden_size", "num_attention_heads")),
        "F": families.whole(config, "intermediate_size", 3072),
        "Y": patch[0],
        "X": patch[1],
        "Z": families.whole(config, "num_channels", 3),
        "N": (image[0] // patch[0]) * (image[1] // patch[1]) + 1,
        "C": len(names),
    }
    model = {"mlp": families.ACTIVATIONS[activation], "eps": families.real(config, "layer_norm_eps", 1e-12)}
    extras = {
        "N": sizes["N"],
        "image": image,
        "patch": patch[0],
        "channels": sizes["Z"],
        "class_token": True,
        "class_names": _in_order(names),
        "query_bias": families.flag(config, "qkv_bias", True),
        "pooler_act": families.text(config, "pooler_act", "tanh"),
    }
    return families.Description(sizes | {"P": patch[0] * patch[1] * sizes["Z"]}, model, extras)


def _in_order(names: Any) -> list[str]:
    """The classes' names by their numbers."""
    if not isinstance(names, dict) or set(names) != {str(i) for i in range(len(names))}:
        raise errors.UserError("config.json: id2label must give every class from 0 a name")
    return [str(names[str(i)]) for i in range(len(names))]


def groups(description: families.Description, names: set[str]) -> set[str]:
    """The heads that the file holds."""
    heads = {group for group in ("classifier", "pooler") if any(name.startswith(group + ".") for name in names)}
    return heads | ({"bias"} if description.extras["query_bias"] else set())


def config(sizes: Mapping[str, int], model: Mapping[str, Any], extras: Mapping[str, Any], groups: set[str]) -> dict:
    """Its config.json. `extras` must tell the side of a patch; an image is square where they do not tell its sides."""
    if "patch" not in extras:
        raise errors.UserError("a ViT cannot be written without extras['patch'], the pixels of a patch's side")
    patch = extras["patch"]
    image = list(extras.get("image", [math.isqrt(sizes["N"] - 1) * patch] * 2))
    if (image[0] // patch) * (image[1] // patch) + 1 != sizes["N"] or sizes["P"] % patch**2:
        raise errors.UserError(
            f"images of {image[0]} x {image[1]} pixels in patches of {patch} x {patch} and a class token do not make "
            f"the {sizes['N']} positions and {sizes['P']} pixels of a patch of this model"
        )
    labels = extras.get("class_names") or [f"LABEL_{i}" for i in range(sizes.get("C", 2))]
    return {
        "architectures": ["ViTForImageClassification" if "classifier" in groups else "ViTModel"],
        "image_size": image[0] if image[0] == image[1] else image,
        "patch_size": patch,
        "num_channels": sizes["P"] // patch**2,
        "hidden_size": sizes["D"],
        "num_hidden_layers": sizes["M"],
        "num_attention_heads": sizes["H"],
        "intermediate_size": sizes["F"],
        "hidden_act": families.activation(model["mlp"]),
        "layer_norm_eps": model["eps"],
        "qkv_bias": "bias" in groups,
        "pooler_act": extras.get("pooler_act", "tanh"),
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


FAMILY = families.Family("vit", "vit.", SPELLINGS, LINES, (), describe, groups, config, (), ("classifier.",))
