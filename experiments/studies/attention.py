"""What a trained model's attention looks like: entropy, diagonal and asymmetry of its weights, and an example."""

import io
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.engine import disk, log, step
from tfm import symmetry

EXAMPLES = 32  # held-out examples over which the measures are means
TOKENS = 32  # of the example that is shown


def looking(task: step.Task) -> Callable[[Any], tuple[dict[str, list[float | None]], np.ndarray]]:
    """params -> (entropy, diagonal, asymmetry: a list over layers each, A_MHNN of the first held-out example)."""
    examples = {name: array[:EXAMPLES] for name, array in task.evaluation[0].items()}

    @jax.jit
    def measured(params: Any) -> tuple[dict, jax.Array]:
        def one(example: dict) -> tuple[dict, jax.Array]:  # alone: the weights of many might not fit into memory
            batch = {name: array[None] for name, array in example.items()}
            A_MBHNN = task.maps(params, batch)
            return symmetry.weights(A_MBHNN, batch.get("valid_BS")), A_MBHNN[:, 0, :, :TOKENS, :TOKENS]

        found, A_BMHNN = jax.lax.map(one, examples)
        return {name: symmetry.mean(x_BM, axis=0) for name, x_BM in found.items()}, A_BMHNN[0]

    def look(params: Any) -> tuple[dict, np.ndarray]:
        found, A_MHNN = jax.device_get(measured(params))
        return {name: [log.finite(x) for x in column] for name, column in found.items()}, A_MHNN

    return look


def save(file: pathlib.Path, A_MHNN: np.ndarray) -> None:
    """The weights as an .npz, whole or not at all."""
    content = io.BytesIO()
    np.savez_compressed(content, A_MHNS=A_MHNN)
    disk.write(file, content.getvalue())
