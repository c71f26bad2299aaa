"""The vision transformer (Dosovitskiy et al. 2021): pre-norm, patches, a class token that predicts the class."""

from typing import Any

import numpy as np

from experiments.pretrained import families, tensors

LAYER = "attention.attention.query attention.attention.key attention.attention.value attention.output.dense"
LAYER += " layernorm_before intermediate.dense output.dense layernorm_after"
KERNEL, CLASS = "embeddings.patch_embeddings.projection.weight", "embeddings.cls_token"
POSITIONS = "embeddings.position_embeddings"


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with pooler_act, patch, image = (Y, X), Y and X added: the sides of patches and images.

    Raises UserError if patches are not square, or a side is not a valid size.
    """
    (Y, X), (patch, width) = _read_sides(config, "image_size", 224), _read_sides(config, "patch_size", 16)
    families.require(patch == width, "patch_size", [patch, width], "square patches")
    pooler_act = str(config.get("pooler_act") or "tanh")
    return settings | {"image": (Y, X), "Y": Y, "X": X, "patch": patch, "pooler_act": pooler_act}


def _read_sides(config: families.HfConfig, name: str, default: int) -> tuple[int, int]:
    """Return rows and columns of a field that has one number or two."""
    value = config.get(name, default)
    rows, columns = value if isinstance(value, list) else [value, value]
    return families.size({name: rows}, name, default), families.size({name: columns}, name, default)


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json that `family` does not list: pooler_act, image_size and patch_size."""
    Y, X = settings["image"]
    sides = {"image_size": Y if Y == X else [Y, X], "patch_size": settings["patch"]}
    return {"pooler_act": settings.get("pooler_act", "tanh")} | sides


def clean(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with the axes of this project: a matrix of patches, and no batch axis.

    With qkv_bias = false, biases of queries, keys and values are added, all zero. Raises UserError if the file has such
    biases nevertheless, whatever their values.
    """
    zeros = {} if settings["query_bias"] else dict.fromkeys(_list_biases(settings), np.zeros(settings["D"], np.float32))
    families.require(zeros.keys().isdisjoint(arrays), "qkv_bias", False, "true for a file with these biases")
    kernel = arrays[KERNEL].transpose(0, 2, 3, 1).reshape(len(arrays[KERNEL]), -1)
    return {**arrays, **zeros, KERNEL: kernel, CLASS: arrays[CLASS][0, 0], POSITIONS: arrays[POSITIONS][0]}


def restore(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with the axes that published files have: the inverse of `clean`."""
    unused = () if settings["query_bias"] else _list_biases(settings)
    patch = settings["patch"]
    kernel = arrays[KERNEL].reshape(-1, patch, patch, settings["Z"]).transpose(0, 3, 1, 2)
    arrays = {name: x for name, x in arrays.items() if name not in unused}
    return {**arrays, KERNEL: kernel, CLASS: arrays[CLASS][None, None], POSITIONS: arrays[POSITIONS][None]}


def _list_biases(settings: families.Settings) -> list[str]:
    """Return the names of the biases of queries, keys and values, which a ViT may lack. Ours has zeros then."""
    return [f"encoder.layer.{m}.{name}.bias" for m in range(settings["M"]) for name in LAYER.split()[:3]]


FAMILY = families.Family(
    architecture="ViT",
    sizes=families.name_sizes(M=12, D=768, H=12, F=3072, Z=3),
    choices={"mlp": ("hidden_act", families.ACTIVATIONS), "query_bias": ("qkv_bias", families.TRUE)},
    epsilon=("layer_norm_eps", 1e-12),
    read=read,
    write=write,
    ids=(),
    prefix="vit.",
    unprefixed=("classifier.",),
    table={
        CLASS: "class/c",
        POSITIONS: "position/P",
        "embeddings.patch_embeddings.projection.*": "embed/W b",
        **families.name_layer("encoder.layer.{m}.", LAYER),
        "layernorm.*": "norm/gain shift",
    },
    heads={"image": families.Head("ForImageClassification", "class_token", {"classifier.*": "head/G b"})},
    clean=clean,
    restore=restore,
)
