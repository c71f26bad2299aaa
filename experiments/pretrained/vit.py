"""The vision transformer (Dosovitskiy et al. 2021): pre-norm, patches, a class token that predicts the class."""

from typing import Any

from experiments.pretrained import families, tensors

LAYER = "attention.attention.query attention.attention.key attention.attention.value attention.output.dense"
LAYER += " layernorm_before intermediate.dense output.dense layernorm_after"


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with the sizes of an image and of its patches."""
    (Y, X), (patch, width) = _read_sides(config, "image_size", 224), _read_sides(config, "patch_size", 16)
    families.require(patch == width, "patch_size", [patch, width], "square patches")
    settings |= {"N": (Y // patch) * (X // patch) + 1, "P": patch * patch * settings["Z"]}
    settings |= {"Y": patch, "X": patch, "image": (Y, X), "patch": patch}
    return settings | {"pooler_act": str(config.get("pooler_act") or "tanh")}


def _read_sides(config: families.HfConfig, name: str, default: int) -> tuple[int, int]:
    """Return rows and columns of a field that has one number or two."""
    value = config.get(name, default)
    rows, columns = value if isinstance(value, list) else [value, value]
    return families.size({name: rows}, name, default), families.size({name: columns}, name, default)


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json that are not in the family's table."""
    Y, X = settings["image"]
    return families.write_labels(settings) | {
        "architectures": [family.architecture + ("ForImageClassification" if settings["head"] else "Model")],
        "pooler_act": settings.get("pooler_act", "tanh"),
        "image_size": Y if Y == X else [Y, X],
        "patch_size": settings["patch"],
    }


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors."""
    rules = tensors.pair("embeddings.patch_embeddings.projection", "D Z Y X; D", "embed/W_DP", "b_D")
    rules += [tensors.Line("embeddings.cls_token", "1 1 D", ("class/c_D",))]
    rules += [tensors.Line("embeddings.position_embeddings", "1 N D", ("position/P_ND",))]
    rules += families.layers("encoder.layer.{m}.", LAYER, biases=families.STAGES[0 if settings["query_bias"] else 2 :])
    rules += tensors.pair("layernorm", "D; D", "norm/gain_D", "shift_D")
    return rules + (tensors.pair("classifier", "C D; C", "head/G_CD", "b_C") if settings["head"] else [])


def head(settings: families.Settings, arrays: tensors.Arrays, family: families.Family) -> families.Settings:
    """Return the head that the file holds ("" or "image"), with its number of classes."""
    weight = arrays.get("classifier.weight")
    return {"head": ""} if weight is None else {"head": "image", "C": len(weight)}


FAMILY = families.Family(
    architecture="ViT",
    outputs={"image": "class_token"},
    sizes=families.sizes(M=12, D=768, H=12, F=3072, Z=3),
    choices={"mlp": ("hidden_act", families.ACTIVATIONS), "query_bias": ("qkv_bias", families.TRUE)},
    epsilon=("layer_norm_eps", 1e-12),
    read=read,
    write=write,
    ids=(),
    prefix="vit.",
    unprefixed=("classifier.",),
    lines=lines,
    head=head,
    aside={"pooler.": f"{families.UNUSED}: ViT's classifier reads the class token itself"},
)
