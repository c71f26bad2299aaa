"""How symmetric and how directional a trained model's attention is: of a run made here, or of a published model.

python -m experiments.tools.symmetry --checkpoint=DIR
symmetry.run("DIR")

For every layer: s, from -1 (skew) over 0 (random) to 1 (symmetric), of each head's U_q^T U_k (mean and median over
heads) and of their sum, and the directionality d of the sum, less than 0 where the key's side dominates; then the
median over layers (Saponati et al. 2025).
"""

import os
import sys
from collections.abc import Callable

import jax
import numpy as np

from experiments import model as models
from experiments.engine import errors
from experiments.pretrained import open_model
from experiments.tools import command
from tfm import block, symmetry

TITLES = ("s, mean of heads", "s, median of heads", "s of their sum", "d of their sum")


@command.tool()
def run(
    checkpoint: str | os.PathLike,
    *,
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> str:
    """The table of the model's layers."""
    model = open_model.open(checkpoint, trust=trust)
    look = models.symmetries(model.fields)
    if look is None:
        score = f"model.score = {model.fields.score}"
        raise errors.UserError(f"the scores of {model.path}, {score}, have no matrix to look at")
    sizes, score = models.sizes(model.fields), models.block_parts(model.fields).attention.score
    options = {letter: sizes[letter] for letter in "HKD"} | {"bias": block.biased("score", model.fields.bias)}
    keys_M = jax.random.split(jax.random.key(0), sizes["M"] // model.fields.share)
    expected = jax.eval_shape(jax.vmap(lambda key: score.init(key, **options)), keys_M)
    sides = [model.params[side] for side in ("encoder", "decoder") if side in model.params]
    for part in sides or [model.params]:
        open_model.check(model.path, part.get("blocks", {}).get("score", {}), expected, "scores")
    return command.tell(table(jax.device_get(jax.jit(look)(model.params))), workdir, "symmetry.txt")


def table(layers: dict[str, symmetry.Layer]) -> str:
    """A line for each layer of each part of the model, and one with the medians over its layers."""
    lines = []
    for part, of in layers.items():
        heads = [[known(statistic, s_H) for s_H in of.symmetry_H] for statistic in (np.mean, np.median)]
        columns = np.stack([*heads, of.symmetry, of.directionality], axis=1)
        medians = [known(np.median, column) for column in columns.T]
        lines += [(f"{part}{layer}", row) for layer, row in [*enumerate(columns, 1), ("median", medians)]]
    width = max(len(layer) for layer, _ in lines)
    rows = [("layer", TITLES), *((layer, [f"{x:.3f}" for x in row]) for layer, row in lines)]
    aligned = [(layer, [x.rjust(len(title)) for x, title in zip(row, TITLES, strict=True)]) for layer, row in rows]
    return "\n".join("  ".join([layer.ljust(width), *cells]) for layer, cells in aligned)


def known(statistic: Callable, numbers: np.ndarray) -> float:
    """The statistic of what is not NaN; NaN where all is."""
    there = numbers[~np.isnan(numbers)]
    return float(statistic(there)) if there.size else float("nan")


if __name__ == "__main__":
    sys.exit(run.main(sys.argv))
