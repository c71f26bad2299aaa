"""Measure the symmetry and the directionality of a trained model's attention: a run, or a published model.

python -m experiments.tools.symmetry --checkpoint=DIR
symmetry.run("DIR")

The tool prints four numbers for each layer, and their medians over layers (Saponati et al. 2025). The symmetry s of
U_q^T U_k is -1 for a skew-symmetric, about 0 for a random and 1 for a symmetric matrix. The table has the mean and the
median of s over heads, and s of the heads' sum. The directionality d of this sum is negative if the key's side
dominates.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command as commands
from experiments.config import errors
from experiments.model import probe
from tfm import symmetry

TITLES = ("s, mean of heads", "s, median of heads", "s of their sum", "d of their sum")
HELP = {}


def run(
    checkpoint: commands.Path, *, trust: tuple[str, ...] = (), device: str = "any", workdir: commands.Path = ""
) -> str:
    """Print and return the table of the model's layers."""
    file, model = commands.output(workdir, "symmetry.txt"), commands.load(checkpoint, trust, device)
    measure = probe.symmetry_layers(model.fields)
    if measure is None or not {"blocks", "encoder"} & model.params.keys():
        raise errors.UserError(f"model.score = {model.fields.score} of {model.path} has no matrix U_q^T U_k")
    return commands.report(table(jax.device_get(jax.jit(measure)(model.params))), file)


def table(layers: dict[str, symmetry.Layer]) -> str:
    """Return a line for each layer of each part of the model, and a line with the medians over its layers."""
    rows = [("layer", TITLES)]
    for part, layer in layers.items():
        heads = [statistic(layer.symmetry_H, axis=1) for statistic in (jnp.nanmean, jnp.nanmedian)]
        columns = np.stack([*heads, layer.symmetry, layer.directionality], axis=1)
        for name, row in [*enumerate(columns, 1), ("median", jnp.nanmedian(columns, axis=0))]:
            cells = [f"{x:.3f}".rjust(len(title)) for x, title in zip(row, TITLES, strict=True)]
            rows.append((f"{part}{name}", cells))
    width = max(len(name) for name, _ in rows[1:])
    return "\n".join("  ".join([name.ljust(width), *cells]) for name, cells in rows)


if __name__ == "__main__":
    sys.exit(commands.main(run, HELP, sys.argv))
