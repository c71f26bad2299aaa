"""The optax transformation of Muon (optim.muon), which orthogonalises the step of each matrix."""

import math
from typing import Any

import jax
import optax
import optax.contrib

from tfm import shapes

EPS = 1e-7  # added to the norm in Newton-Schulz, so that a zero gradient stays zero


def orthogonalise(*, ns_steps: int) -> optax.GradientTransformation:
    """Return the transformation of matrices U S V^T -> sqrt(max(1, outputs / inputs)) U V^T.

    ns_steps: number of Newton-Schulz iterations. The caller applies the momentum first, because the momentum of
    optax.contrib.muon corrects the bias of the first steps, and that of Jordan's Muon does not.
    """

    # optax writes x W where we write W x, so its `reduction_axis` is the axes of our outputs.
    dimensions = optax.contrib.MuonDimensionNumbers

    def scale(path: Any, step: jax.Array) -> jax.Array:
        outputs, inputs = (math.prod(step.shape[i] for i in axes) for axes in shapes.sides(path))
        return math.sqrt(max(1, outputs / inputs)) * step

    def update(updates: Any, params: Any = None) -> Any:
        matrix_axes = jax.tree_util.tree_map_with_path(lambda path, _: dimensions(*shapes.sides(path)), updates)
        newton_schulz = optax.contrib.scale_by_muon(
            ns_steps=ns_steps, beta=0.0, eps=EPS, nesterov=False, weight_dimension_numbers=matrix_axes
        )
        with jax.named_scope("muon"):
            steps, _ = newton_schulz.update(updates, newton_schulz.init(updates))
            return jax.tree_util.tree_map_with_path(scale, steps)

    return optax.stateless(update)
