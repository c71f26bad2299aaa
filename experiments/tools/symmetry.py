"""Measure the symmetry and the directionality of a trained model's attention: a run, or a published model.

python -m experiments.tools.symmetry --checkpoint=DIR
symmetry.run("DIR")

The table has a row for each layer, and the medians over layers (Saponati et al. 2025). The symmetry s of U_q^T U_k is
-1 for a skew-symmetric, about 0 for a random and 1 for a symmetric matrix. The directionality d of the heads' sum is
negative if the key's side dominates.
"""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command as commands
from experiments.config import errors
from experiments.model import probe
from experiments.studies import tables
from tfm import symmetry

HEAD = ["layer", "s, mean of heads", "s, median of heads", "s of their sum", "d of their sum"]
HELP = {}


def run(
    checkpoint: commands.Path, *, trust: tuple[str, ...] = (), device: str = "any", workdir: commands.Path = ""
) -> str:
    """Print and return a table of symmetry by layer. Raises UserError if the score has no matrix U_q^T U_k.

    workdir: folder for the file symmetry.txt; "": write no file.
    """
    file, model = commands.output(workdir, "symmetry.txt"), commands.load(checkpoint, trust, device)
    measure = probe.symmetry_layers(model.fields)
    if measure is None or not {"blocks", "encoder"} & model.params.keys():
        problem = f"model.score = {model.fields.score} of {model.path} has no matrix U_q^T U_k"
        raise errors.UserError(f"{problem}. Choose a model whose score has one, such as asymmetric or tied.")
    return commands.report(tables.align(tabulate(jax.device_get(jax.jit(measure)(model.params)))), file)


def tabulate(layers: dict[str, symmetry.Layer]) -> tables.Table:
    """Return a table: for each part of the model, a row for each layer, then a row of the medians over layers.

    layers: "encoder/" and "decoder/", or only "" -> the measures of the layers of this part.
    """
    rows = []
    for part, layer in layers.items():
        heads = [statistic(layer.symmetry_H, axis=1) for statistic in (jnp.nanmean, jnp.nanmedian)]
        columns = np.stack([*heads, layer.symmetry, layer.directionality], axis=1)
        for name, row in [*enumerate(columns, 1), ("median", jnp.nanmedian(columns, axis=0))]:
            rows.append([f"{part}{name}", *(f"{x:.3f}" for x in row)])
    return tables.Table(HEAD, rows)


if __name__ == "__main__":
    commands.main(run, HELP)
