"""Transformations of steps that Muon and its relatives consist of (optim.muon): each matrix becomes orthogonal."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from tfm import shapes

EPS = 1e-7  # added to the norm in Newton-Schulz, so that a zero gradient stays zero


def orthogonalise(*, ns_steps: int) -> optax.GradientTransformation:
    """Return a transformation of matrices to sqrt(max(1, outputs / inputs)) U V^T, by Newton-Schulz steps.

    The momentum comes before it: optax.contrib.muon corrects the bias of the first steps, Jordan's Muon does not.
    """

    dimensions = optax.contrib.MuonDimensionNumbers  # its `reduction_axis` are our rows, because it writes x W for W x

    def scale(path: Any, step: jax.Array) -> jax.Array:
        outputs, inputs = (math.prod(step.shape[i] for i in axes) for axes in shapes.sides(path))
        return math.sqrt(max(1, outputs / inputs)) * step

    def update(updates: Any, params: Any = None) -> Any:
        numbers = jax.tree_util.tree_map_with_path(lambda path, _: dimensions(*shapes.sides(path)), updates)
        newton_schulz = optax.contrib.scale_by_muon(
            ns_steps=ns_steps, beta=0.0, eps=EPS, nesterov=False, weight_dimension_numbers=numbers
        )
        with jax.named_scope("muon"):
            steps, _ = newton_schulz.update(updates, newton_schulz.init(updates))
            return jax.tree_util.tree_map_with_path(scale, steps)

    return optax.stateless(update)


def normalise_rows(decay: float) -> optax.GradientTransformation:
    """Return a transformation to o_rc / sqrt(v_r), scaled to the norm of o (Li et al. 2025, NorMuon).

    v_r is the moving average, with this decay, of the mean square of row r, of one output. NorMuon's norm is 0.2
    sqrt(rows columns).
    """

    def follow(path: Any, v: jax.Array, step: jax.Array) -> jax.Array:
        return decay * v + (1 - decay) * jnp.mean(jnp.square(step), shapes.sides(path)[1], keepdims=True)

    def update(steps: Any, v: Any, params: Any = None) -> tuple[Any, Any]:
        v = jax.tree_util.tree_map_with_path(follow, v, steps)
        return match_norms(jax.tree.map(lambda step, v: step / (jnp.sqrt(v) + EPS), steps, v), steps), v

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def match_norms(steps: Any, like: Any) -> Any:
    """Scale each matrix to the Frobenius norm of the other; a matrix of zeros does not change."""

    def norm(path: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), sum(shapes.sides(path), ()), keepdims=True))

    def scale(path: Any, step: jax.Array, model: jax.Array) -> jax.Array:
        return step * (norm(path, model) / (norm(path, step) + EPS**2))

    return jax.tree_util.tree_map_with_path(scale, steps, like)


def keep_norms(steps: Any, params: Any) -> Any:
    """Return the steps that keep the norm of each matrix."""
    ends = match_norms(jax.tree.map(jnp.add, params, steps), params)
    return jax.tree.map(jnp.subtract, ends, params)
