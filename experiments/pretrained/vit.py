"""The vision transformer (Dosovitskiy et al. 2021): pre-norm, patches, a class token that answers for the image; and
DeiT (Touvron et al. 2021), where a distillation token answers beside it."""

import re
from typing import Any

from experiments.engine import errors
from experiments.pretrained import families, tensors
from experiments.pretrained.families import Field

LINES = (
    *tensors.pair("embeddings.patch_embeddings.projection", "D Z Y X; D", "embed/W_DP", "b_D"),
    tensors.Line("embeddings.cls_token", "1 1 D", ("class/c_D",)),
    tensors.Line("embeddings.position_embeddings", "1 N D", ("position/P_ND",)),
    *families.layers(
        "encoder.layer.{m}.",
        "attention.attention.query attention.attention.key attention.attention.value attention.output.dense"
        " layernorm_before intermediate.dense output.dense layernorm_after",
        qkv_bias="query_bias",
    ),
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

HEADS = {"classifier": ("classifier.", "cls_classifier."), "distilled": "distillation_classifier.", "pooler": "pooler."}


FIELDS = (
    *families.sizes(12, 768, 12, 3072),
    Field("num_channels", "Z", 3),
    Field("hidden_act", "mlp", families.ACTIVATIONS),
    Field("layer_norm_eps", "norm", 1e-12),
    Field("qkv_bias", "query_bias", families.YES),
    Field("pooler_act", "pooler_act", "tanh"),
)


def complete(config: families.Config, facts: families.Facts) -> families.Facts:
    """The sides of an image and of a patch, and the names of the classes."""
    (Y, X), (patch, other) = (_sides(config, *field) for field in (("image_size", 224), ("patch_size", 16)))
    if patch != other:
        raise errors.UserError(f"config.json: patch_size = {[patch, other]} is not supported here, only square patches")
    names = families.labels(config)
    N, P = (Y // patch) * (X // patch) + (2 if config.get("model_type") == "deit" else 1), patch * patch * facts["Z"]
    sizes = {"Y": patch, "X": patch, "N": N, "P": P, "C": len(names)}
    return sizes | {"image": (Y, X), "patch": patch, "class_names": names, "problem_type": config.get("problem_type")}


def _sides(config: families.Config, name: str, default: int) -> tuple[int, int]:
    """Rows and columns, from one number or two."""
    said = config.get(name, default)
    both = said if isinstance(said, list) else [said, said]
    if len(both) != 2 or None in both:
        raise errors.UserError(f"config.json: {name} must be one number or two, and is {said!r}")
    rows, columns = (families.value({name: one}, Field(name, "", None)) for one in both)
    return rows, columns


def groups(facts: families.Facts, names: set[str]) -> set[str]:
    """The heads that the file holds, and whether queries, keys and values have biases."""
    heads = {group for group, named in HEADS.items() if any(name.startswith(named) for name in names)}
    return heads | ({"query_bias"} if facts["query_bias"] else set())


def extra(facts: families.Facts, groups: set[str]) -> dict[str, Any]:
    """What `complete` reads."""
    Y, X = facts["image"]
    return families.named(facts) | {
        "architectures": ["ViTForImageClassification" if "classifier" in groups else "ViTModel"],
        "image_size": Y if Y == X else [Y, X],
        "patch_size": facts["patch"],
    }


FAMILY = families.Family(
    "vit",
    kind="image",
    prefix="vit.",
    lines=LINES,
    known=(),
    model=families.SETTINGS,
    fields=FIELDS,
    extra=extra,
    groups=groups,
    complete=complete,
    ids=(),
    unprefixed=("classifier.",),
    spellings=SPELLINGS,
)


def two_answers(flat: tensors.Arrays, facts: families.Facts) -> tensors.Arrays:
    """A DeiT in which the class token alone answers: the mean of twice its answer and of nothing."""
    if "head/G_CD" not in flat or "head/Gd_CD" in flat:
        return flat
    own = {path: 2 * flat[path] for path in ("head/G_CD", "head/b_C")}
    return flat | own | {path.replace("_", "d_"): 0 * array for path, array in own.items()}


DEIT = FAMILY._replace(
    name="deit",
    prefix="deit.",
    lines=(
        *(line._replace(theirs=re.sub(r"^classifier", "cls_classifier", line.theirs)) for line in LINES),
        tensors.Line("embeddings.distillation_token", "1 1 D", ("class/d_D",)),
        *tensors.pair("distillation_classifier", "C D; C", "head/Gd_CD", "bd_C", "distilled"),
    ),
    extra=lambda facts, groups: (
        extra(facts, groups)
        | {"architectures": ["DeiTForImageClassificationWithTeacher" if "distilled" in groups else "DeiTModel"]}
    ),
    spellings=(*SPELLINGS, (r"^classifier\.", "cls_classifier.")),
    unprefixed=("classifier.", "cls_classifier.", "distillation_classifier."),
    answer="distilled",
    ours=two_answers,
)
