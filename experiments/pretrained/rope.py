"""Translate rotary positions between config.json (rope_theta, rope_scaling, rope_parameters) and our settings."""

import dataclasses
from typing import Any

import numpy as np

from experiments.model import variants
from experiments.pretrained import families, trained

# Type of scaled rotary positions -> the fields with its numbers, in the order of rotary_scaling.py. N: the number of
# positions of the model.
ORIGINAL = "original_max_position_embeddings"
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "N"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
}
YARN = {"beta_fast": 32, "beta_slow": 1, "attention_factor": 0}  # the defaults of yarn
UNSUPPORTED = {"mscale": (None, 0), "mscale_all_dim": (None, 0), "truncate": (None, True)}  # field -> allowed values


def read(config: families.HfConfig, N: int) -> str:
    """Return model.relative_position: rotary_halves with the base and the scaling of config.json.

    N: tokens of the longest text. Raises UserError if the kind of scaling is not in SCALINGS, or if a number is
    invalid. A value that is not supported (UNSUPPORTED), and rotation of a part of the features, raise it too.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(name) or {}
    families.expect(rope, {"partial_rotary_factor": 1.0})
    kind = rope.get("rope_type", rope.get("type", "default"))
    families.require(kind in SCALINGS, f"{name}.type", kind, " or ".join(SCALINGS))
    for field, allowed in UNSUPPORTED.items():
        families.require(rope.get(field) in allowed, f"{name}.{field}", rope.get(field), str(allowed[1]))
    original = config.get(ORIGINAL) or rope.get(ORIGINAL) or N
    fields = {**config, **rope, ORIGINAL: original, "N": N}
    numbers = {field: families.number(fields, field, YARN.get(field, -1.0)) for field in SCALINGS[kind]}  # -1: invalid
    while numbers and YARN.get(last := [*numbers][-1]) == numbers[last]:  # the last numbers may be left out
        del numbers[last]
    base = families.number(fields, "rope_theta", 10000.0)
    texts = [kind, *map(variants.format_number, numbers.values())] if numbers else []
    return variants.join("relative_position", "rotary_halves", ":".join([variants.format_number(base), *texts]))


def write(settings: families.Settings) -> dict[str, Any]:
    """Return the fields of config.json that describe rotary positions, from which `read` returns these `settings`.

    They include the fields that transformers 4 reads.
    """
    base, *scaling = variants.split("relative_position", settings["relative_position"])[1].split(":")
    kind, *numbers = scaling or ["default"]
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": float(base)}
    for name, number in zip(SCALINGS.get(kind, ()), map(float, numbers), strict=False):
        rope |= {name: int(number) if name == ORIGINAL else number} if name != "N" else {}
    old = {"rope_scaling": rope} if numbers else {}
    return {"rope_parameters": rope, "rope_theta": float(base)} | old


def in_halves(model: trained.Trained) -> trained.Trained:
    """Return the same model with rotary positions that rotate the pairs (i, i + K/2) instead of (2i, 2i+1).

    The K features of queries and keys get another order. Models with other positions are returned unchanged.
    """
    if variants.split("relative_position", model.model["relative_position"])[0] != "rotary":
        return model
    score = dict(model.params["blocks"]["score"])
    for name, leaf in score.items():
        axis = name.partition("_")[2].index("K") + 1  # after the axis of the layers
        pairs = [np.take(leaf, np.arange(start, leaf.shape[axis], 2), axis) for start in (0, 1)]
        score[name] = np.concatenate(pairs, axis)
    params = {**model.params, "blocks": {**model.params["blocks"], "score": score}}
    halves = model.model["relative_position"].replace("rotary", "rotary_halves")
    return dataclasses.replace(model, params=params, model=model.model | {"relative_position": halves})
