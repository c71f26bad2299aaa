"""Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal, is its step.

AdamW scales every number of a gradient by itself. A matrix is a map, and a step whose singular values are all alike
moves all of its directions equally far: U V^T, where U S V^T is the momentum. Embeddings, output matrices, gains and
biases stay with AdamW.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tfm import shapes

# x -> a x + b x^3 + c x^5 on all singular values, a few times, brings what is at most 1 near to 1: Jordan's numbers,
# which rise steeply at 0 and leave values between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7  # of the norm that it begins with: a gradient of zeros stays zeros


class Sides(NamedTuple):
    """The dimensions of a parameter that are copies of a matrix, its rows (outputs) and its columns (inputs)."""

    copies: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def hidden(path: Any) -> bool:
    """Whether a leaf is a matrix inside the blocks (read off the names): what Muon is for."""
    return shapes.STACKED in shapes.names(path)[:-1] and shapes.is_matrix(path)


def sides(path: Any) -> Sides:
    """How a leaf's dimensions make matrices. The heads' features side by side are one side, so H goes with them.

    Uq_HKD maps D to all (H, K), Uo_HDK adds up what it maps from all (H, K) to D, V_HDD likewise: one matrix each in
    every layer. A map of K to K belongs to one head, so that P_HKK is a matrix in every head.
    """
    letters = shapes.letters(path)
    out, into = len(letters) - 2, len(letters) - 1
    rest = tuple(range(out))
    if "H" not in letters or letters[out] == letters[into] != "D":
        return Sides(rest, (out,), (into,))
    h = letters.index("H")
    copies = tuple(i for i in rest if i != h)
    return Sides(copies, (out,), (h, into)) if letters[out] == "D" else Sides(copies, (h, out), (into,))


def orthogonal(x_LRC: jax.Array, *, ns_steps: int) -> jax.Array:
    """Near to U V^T for every matrix U S V^T of L, by steps of Newton-Schulz: X -> a X + (b X X^T + c (X X^T)^2) X."""
    if x_LRC.shape[-2] > x_LRC.shape[-1]:  # products of the shorter side
        return orthogonal(x_LRC.mT, ns_steps=ns_steps).mT
    x_LRC = x_LRC / (jnp.linalg.norm(x_LRC, axis=(-2, -1), keepdims=True) + EPS)
    for _ in range(ns_steps):
        square_LRR = x_LRC @ x_LRC.mT
        x_LRC = A * x_LRC + (B * square_LRR + C * square_LRR @ square_LRR) @ x_LRC
    return x_LRC


def step(path: Any, momentum: jax.Array, *, ns_steps: int) -> jax.Array:
    """sqrt(max(1, rows / columns)) U V^T for every matrix of a leaf, in the leaf's shape.

    With the factor, a step of a wide output moves each of its numbers as far as that of a square matrix.
    """
    made = sides(path)
    order = [i for side in made for i in side]
    R, S = (math.prod(momentum.shape[i] for i in side) for side in (made.rows, made.columns))
    moved = momentum.transpose(order)
    flat = orthogonal(moved.reshape(-1, R, S), ns_steps=ns_steps) * math.sqrt(max(1, R / S))
    return flat.reshape(moved.shape).transpose([order.index(i) for i in range(len(order))])


def orthogonalised(*, ns_steps: int) -> optax.GradientTransformation:
    """Updates become their orthogonal `step`; nothing is remembered."""

    def update(updates: Any, params: Any = None) -> Any:
        with jax.named_scope("muon"):
            return jax.tree_util.tree_map_with_path(functools.partial(step, ns_steps=ns_steps), updates)

    return optax.stateless(update)
