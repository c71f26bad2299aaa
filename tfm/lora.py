"""Low-rank adapters (LoRA, Hu et al. 2021): a trained matrix is frozen, and a low-rank change of it is learned.

    W' = W + (alpha / r) B A,    B: outputs x r, A: r x inputs. At first B = 0, and A ~ N(0, 1 / inputs).

The letters of a matrix state which axes are inputs (shapes.sides). So one function of the parameter tree adapts any
matrix, and the layers have no code for adapters. The adapter of blocks/score/Uq_HKD is
lora/blocks/score/Uq_HKD/{A_DL, B_HKL}; L is the rank r, the last axis of both.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, shapes

NODE = "lora"


def init(key: jax.Array, params: dict, *, rank: int, select: Callable[[str], bool]) -> dict:
    """Return the tree with a new adapter of this rank for each matrix for which select(path) is True.

    Earlier adapters are dropped. The new ones do not change the model's output, because B = 0.
    """
    tree: dict[str, Any] = {**params, NODE: {}}
    for path, leaf in shapes.flat(params).items():
        if not select(path):
            continue
        node = tree[NODE]
        for name in shapes.names(path):
            node = node.setdefault(name, {})
        letters, (_, inputs) = shapes.letters(path), shapes.sides(path)
        std = {"A": 1 / math.sqrt(math.prod(leaf.shape[i] for i in inputs)), "B": 0.0}
        for side, axes in zip("AB", _axes(path), strict=True):
            name = f"{side}_{''.join(letters[i] for i in axes if letters[i] != 'M')}L"
            shape = [*(leaf.shape[i] for i in axes), rank]
            node[name] = std[side] * jax.random.normal(initial.key(key, f"{path}/{name}"), shape)
    return tree


def merge(params: dict, *, alpha: float, layout: layouts.Layout = layouts.ONE) -> dict:
    """Return the tree of weights W' = W + (alpha / r) B A, without adapters. layout: how devices share the weights."""
    adapters, specs = params[NODE], shapes.specs(params, layout.rules)

    def adapt(path: Any, W: jax.Array, spec: Any) -> jax.Array:
        node, node_spec = adapters, specs[NODE]
        for name in shapes.names(path):
            if name not in node:
                return W
            node, node_spec = node[name], node_spec[name]
        W_spec, factors = (*spec, *[None] * W.ndim), []
        for name, axes in zip(sorted(node), _axes(path), strict=True):
            factors.append((_gather_factor(node[name], node_spec[name], [W_spec[i] for i in axes]), [*axes, W.ndim]))
        (A, A_axes), (B, B_axes) = factors
        with jax.named_scope(NODE):
            change = jnp.einsum(B, B_axes, A, A_axes, [*range(W.ndim)], precision="highest")
            return W + (alpha / A.shape[-1]) * change

    base, base_specs = ({name: node for name, node in tree.items() if name != NODE} for tree in (params, specs))
    return jax.tree_util.tree_map_with_path(adapt, base, base_specs)


def _axes(path: Any) -> list[list[int]]:
    """Return the axes of a matrix that A has (inputs), and those that B has (outputs).

    Both also have the axes that count copies of the matrix, such as layers.
    """
    outputs, inputs = shapes.sides(path)
    return [[i for i in range(len(shapes.letters(path))) if i not in side] for side in (outputs, inputs)]


def _gather_factor(factor: jax.Array, spec: Any, W_spec: list) -> jax.Array:
    """Return A or B, gathered along axes that the matrix shards differently.

    spec, W_spec: the mesh axis of each axis of the factor, and of the same axis of the matrix.
    For example, without tensor parallelism fsdp shards axis F of W1_FD, but axis D of its A_DL.
    """
    for i, axis in enumerate(spec):
        if axis and axis != W_spec[i]:
            factor = jax.lax.all_gather(factor, axis, axis=i, tiled=True)
    return factor
