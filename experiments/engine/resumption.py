"""What a run that goes on should be told: settings and versions that may change, and that change its numbers."""

import pathlib
from typing import Any

from experiments.engine import checkpoint, errors, json_file, mesh

COMPUTES = ("jax", "jaxlib")


def changes(folder: pathlib.Path, config: dict[str, Any]) -> list[str]:
    """Lines about the run in this folder that differs from `config` and from the versions here; none for a new one.

    Nothing about a config.json that is absent or damaged: that is refused elsewhere.
    """
    if checkpoint.newest(folder / "checkpoints") is None:
        return []
    try:
        saved = json_file.read(folder / "config.json", says="what was trained")
        before, versions = saved["config"], saved["versions"]
        steps, told = before["train"]["steps"], {name: versions.get(name) for name in COMPUTES}
    except (errors.UserError, KeyError, TypeError, AttributeError):
        return []
    lines, now, here = [], config["train"]["steps"], mesh.versions()
    if steps != now and config["optim"]["schedule"] != "constant":
        lines.append(f"train.steps was {steps} and is {now}: the rest of the learning rate's schedule is another one")
    others = [f"{name} {told[name]}, now {here[name]}" for name in COMPUTES if told[name] not in (None, here[name])]
    if others:
        lines.append(f"it was trained with {'; with '.join(others)}: numbers may differ in the last bits from here on")
    return lines
