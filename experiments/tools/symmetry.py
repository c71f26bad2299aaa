"""How symmetric and how directional a trained model's attention is: of a run made here, or of a published model.

python -m experiments.tools.symmetry --checkpoint=DIR
symmetry.run("DIR")

For every layer: s, from -1 (skew) over 0 (random) to 1 (symmetric), of each head's U_q^T U_k (mean and median over
heads) and of their sum, and the directionality d of the sum, less than 0 where the key's side dominates; then the
median over layers (Saponati et al. 2025).
"""

import sys
from collections.abc import Callable

import jax
import numpy as np

from experiments.build import probe
from experiments.engine import errors
from experiments.tools import command
from tfm import symmetry

TITLES = ("s, mean of heads", "s, median of heads", "s of their sum", "d of their sum")
HELP = {}


def run(
    checkpoint: command.Path, *, trust: tuple[str, ...] = (), device: str = "any", workdir: command.Path = ""
) -> str:
    """Print and return the table of the model's layers."""
    model, file = command.load(checkpoint, trust, device), command.output(workdir, "symmetry.txt")
    measure = probe.symmetry_layers(model.fields)
    if measure is None or not {"blocks", "encoder"} & model.params.keys():
        raise errors.UserError(f"model.score = {model.fields.score} of {model.path} has no matrix U_q^T U_k")
    return command.report(table(jax.device_get(jax.jit(measure)(model.params))), file)


def table(layers: dict[str, symmetry.Layer]) -> str:
    """Return a line for each layer of each part of the model, and one with the medians over its layers."""
    lines = []
    for part, of in layers.items():
        heads = [[without_nan(statistic, s_H) for s_H in of.symmetry_H] for statistic in (np.mean, np.median)]
        columns = np.stack([*heads, of.symmetry, of.directionality], axis=1)
        medians = [without_nan(np.median, column) for column in columns.T]
        lines += [(f"{part}{layer}", row) for layer, row in [*enumerate(columns, 1), ("median", medians)]]
    width = max(len(layer) for layer, _ in lines)
    rows = [
        (layer, [f"{x:.3f}".rjust(len(title)) for x, title in zip(row, TITLES, strict=True)]) for layer, row in lines
    ]
    return "\n".join("  ".join([layer.ljust(width), *cells]) for layer, cells in [("layer", TITLES), *rows])


def without_nan(statistic: Callable, numbers: np.ndarray) -> float:
    """Return the statistic of the numbers that are not NaN; NaN if all are."""
    known = numbers[~np.isnan(numbers)]
    return float(statistic(known)) if known.size else float("nan")


if __name__ == "__main__":
    sys.exit(command.main(run, HELP, sys.argv))
