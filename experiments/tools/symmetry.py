"""How symmetric and how directional the scores of a trained model are, layer by layer."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments import model as models
from experiments.engine import config, errors, mesh, terminal, workdir
from experiments.engine import run as runs
from experiments.pretrained import open_model
from tfm import symmetry

WRITES = False  # nothing, unless --workdir is given
TITLES = ("s, mean of heads", "s, median of heads", "s of their sum", "d of their sum")


def run(settings: config.Settings, folder: pathlib.Path | None) -> runs.Result:
    """Print the table of the config's model."""
    mesh.start(settings.device)
    made = open_model.open(settings.checkpoint)
    fields = open_model.fields(made, config.beside(settings.model, made.model, made.path))
    look = models.symmetries(fields)
    settings.refuse_unused()
    if look is None:
        raise errors.UserError(f"the scores of {made.path}, model.score = {fields.score}, have no matrix to look at")
    file = workdir.new_file(folder, "symmetry.txt") if folder is not None else None
    told = table(jax.device_get(jax.jit(look)(checked(made, fields))))
    terminal.say(told, "\n")
    if file is not None:
        workdir.write_new(file, (told + "\n").encode())
    return runs.Result(folder, {"text": told})


def checked(made: open_model.Trained, fields: Any) -> dict:
    """The parameters. UserError where those of the scores are not what the model's config says, or not finite."""
    sizes, score = models.sizes(fields), models.design(fields).score
    each = {letter: sizes[letter] for letter in "HKD"} | {"bias": fields.bias}
    keys_M = jax.random.split(jax.random.key(0), sizes["M"])
    expected = open_model.flat(jax.eval_shape(jax.vmap(lambda key: score.init(key, **each)), keys_M))
    for part in [made.params[side] for side in ("encoder", "decoder") if side in made.params] or [made.params]:
        found = open_model.flat(part.get("blocks", {}).get("score", {}))
        faults = open_model.differences(found, expected) if "blocks" in part else ["there are no blocks"]
        if faults:
            told = open_model.listed(faults)
            raise errors.UserError(f"{made.path} does not hold the scores that its config.json describes: {told}")
        open_model.finite(made.path, found)
    return made.params


def table(found: dict[str, symmetry.Layer]) -> str:
    """A line for each layer of each part of the model, and one with the medians over its layers."""
    lines = []
    for part, of in found.items():
        heads = [[known(statistic, s_H) for s_H in of.symmetry_H] for statistic in (np.mean, np.median)]
        columns = np.stack([*heads, of.symmetry, of.directionality], axis=1)
        medians = [known(np.median, column) for column in columns.T]
        lines += [(f"{part}{layer}", row) for layer, row in [*enumerate(columns, 1), ("median", medians)]]
    width = max(len(layer) for layer, _ in lines)
    told = ["  ".join(["layer".ljust(width), *TITLES])]
    for layer, row in lines:
        numbers = [f"{x:.3f}".rjust(len(title)) for x, title in zip(row, TITLES, strict=True)]
        told.append("  ".join([layer.ljust(width), *numbers]))
    return "\n".join(told)


def known(statistic: Callable, numbers: np.ndarray) -> float:
    """The statistic of what is not NaN; NaN where all is."""
    there = numbers[~np.isnan(numbers)]
    return float(statistic(there)) if there.size else float("nan")
