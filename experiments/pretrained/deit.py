"""DeiT (Touvron et al. 2021): a ViT with a distillation token. The heads of both tokens are averaged."""

import functools

import numpy as np

from experiments.pretrained import families, tensors, vit


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors."""
    rules = vit.lines(settings, family)
    rules += [tensors.Line("embeddings.distillation_token", "1 1 D", ("class/d_D",))]
    if settings["head"]:
        rules += tensors.pair("distillation_classifier", "C D; C", "head/Gd_CD", "bd_C")
    return rules


def clean(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with both heads.

    If the file has only the head of the class token, double this head and set the other one to zero. Then their mean is
    the head in the file.
    """
    arrays = dict(arrays)
    for name in ("weight", "bias"):
        if (alone := arrays.pop(f"classifier.{name}", None)) is not None:
            arrays[f"cls_classifier.{name}"] = 2 * np.asarray(alone, np.float32)
            arrays[f"distillation_classifier.{name}"] = np.zeros_like(alone)
    return arrays


FAMILY = vit.FAMILY._replace(
    architecture="DeiTForImageClassificationWithTeacher",
    outputs={"image": "distilled"},
    read=functools.partial(vit.read, first=2),
    names={"head": "cls_classifier"},
    prefix="deit.",
    unprefixed=("cls_classifier.", "distillation_classifier."),
    lines=lines,
    clean=clean,
)
