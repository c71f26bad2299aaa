"""Translate rotary positions between config.json (rope_theta, rope_scaling, rope_parameters) and our settings."""

import dataclasses
from collections.abc import Mapping
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
    """Return model.relative_position: rotary_halves with the base and the scaling of config.json."""
    theta, scaling = config.get("rope_theta"), []
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        families.expect(rope, {"partial_rotary_factor": 1.0})
        theta = theta if rope.get("rope_theta") is None else rope["rope_theta"]
        kind = rope.get("rope_type", rope.get("type", "default"))
        families.require(kind in SCALINGS, f"{name}.type", kind, " or ".join(SCALINGS))
        for field, allowed in UNSUPPORTED.items():
            families.require(rope.get(field) in allowed, f"{name}.{field}", rope.get(field), str(allowed[1]))
        if kind != "default":
            positions = {ORIGINAL: config.get(ORIGINAL) or rope.get(ORIGINAL) or N, "N": N}
            scaling = [kind, *_read_numbers(kind, {**rope, **positions})]
    base = variants.format_number(families.number({"rope_theta": theta}, "rope_theta", 10000.0))
    return variants.join("relative_position", "rotary_halves", ":".join([base, *scaling]))


def _read_numbers(kind: str, rope: Mapping[str, Any]) -> list[str]:
    """Return the numbers of a scaling in our order, without the last numbers that are defaults."""
    numbers = {name: families.number(rope, name, YARN.get(name, -1.0)) for name in SCALINGS[kind]}  # -1 is invalid
    while YARN.get(last := [*numbers][-1]) == numbers[last]:
        del numbers[last]
    return [variants.format_number(number) for number in numbers.values()]


def write(settings: families.Settings) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read`. They include the fields before transformers 5."""
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
