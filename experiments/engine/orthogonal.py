"""The optax transformations of Muon and its variants (optim.muon), which orthogonalise the step of each matrix."""

import math
from typing import Any

import jax
import jax.numpy as jnp
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


def normalise_rows(decay: float) -> optax.GradientTransformation:
    """Return the transformation o_rc -> o_rc / sqrt(v_r), scaled back to the norm of o (Li et al. 2025, NorMuon).

    Row r has the weights of output r, and v_r is the moving average of its mean square. The paper scales the result to
    the norm 0.2 sqrt(rows columns) instead.
    """

    def follow(path: Any, v: jax.Array, step: jax.Array) -> jax.Array:
        return decay * v + (1 - decay) * jnp.mean(jnp.square(step), shapes.sides(path)[1], keepdims=True)

    def update(steps: Any, v: Any, params: Any = None) -> tuple[Any, Any]:
        v = jax.tree_util.tree_map_with_path(follow, v, steps)
        return match_norms(jax.tree.map(lambda step, v: step / (jnp.sqrt(v) + EPS), steps, v), steps), v

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def match_norms(steps: Any, like: Any) -> Any:
    """Scale each matrix of `steps` to the Frobenius norm of its matrix in `like`; a zero matrix stays zero."""

    def norm(path: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), sum(shapes.sides(path), ()), keepdims=True))

    def scale(path: Any, step: jax.Array, target: jax.Array) -> jax.Array:
        return step * (norm(path, target) / (norm(path, step) + EPS**2))

    return jax.tree_util.tree_map_with_path(scale, steps, like)


def keep_norms(steps: Any, params: Any) -> Any:
    """Return the steps, changed so that params + steps has the Frobenius norms of params."""
    new_params = match_norms(jax.tree.map(jnp.add, params, steps), params)
    return jax.tree.map(jnp.subtract, new_params, params)
