"""Low-rank adapters (LoRA, Hu et al. 2021): a trained matrix is frozen, and a low-rank change of it is learned.

    W' = W + (alpha / r) B A,    B: outputs x r, A: r x inputs; at first B = 0, and A ~ N(0, 1 / inputs)

The letters of a matrix state its sides (shapes.sides), so one function of the parameter tree adapts any matrix, and no
layer needs to know. The adapters have the same paths below `lora`: those of blocks/score/Uq_HKD are
lora/blocks/score/Uq_HKD/{A_DL, B_HKL}, with L = r. Both A and B are stored with r last.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, shapes

NODE = "lora"


def init(key: jax.Array, params: dict, *, rank: int, chosen: Callable[[str], bool]) -> dict:
    """Return the tree with new adapters of this rank for the matrices whose paths are chosen. The model's output is
    unchanged.
    """
    tree: dict[str, Any] = {**params, NODE: {}}
    for path, leaf in shapes.flat(params).items():
        if not chosen(path):
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
    """Return the tree of effective weights W', without adapters. layout: the devices that share the weights."""
    adapters, specs = params[NODE], shapes.specs(params, layout.rules)

    def adapt(path: Any, W: jax.Array, spec: Any) -> jax.Array:
        node, node_spec = adapters, specs[NODE]
        for name in shapes.names(path):
            if name not in node:
                return W
            node, node_spec = node[name], node_spec[name]
        wanted, parts = (*spec, *[None] * W.ndim), []
        for name, axes in zip(sorted(node), _axes(path), strict=True):
            parts.append((_gather_side(node[name], node_spec[name], [wanted[i] for i in axes]), [*axes, W.ndim]))
        (A, A_axes), (B, B_axes) = parts
        with jax.named_scope(NODE):
            change = jnp.einsum(B, B_axes, A, A_axes, [*range(W.ndim)], precision="highest")
            return W + (alpha / A.shape[-1]) * change

    base, base_specs = ({name: node for name, node in tree.items() if name != NODE} for tree in (params, specs))
    return jax.tree_util.tree_map_with_path(adapt, base, base_specs)


def _axes(path: Any) -> list[list[int]]:
    """Return the axes of a matrix that A has, and those that B has. Copies of the matrix are copies of both."""
    outputs, inputs = shapes.sides(path)
    return [[i for i in range(len(shapes.letters(path))) if i not in side] for side in (outputs, inputs)]


def _gather_side(part: jax.Array, spec: Any, wanted: list) -> jax.Array:
    """Return a side of an adapter, gathered over mesh axes that do not shard the matrix: F of W1_FD, D of its A_DL."""
    for i, axis in enumerate(spec):
        if axis and axis != wanted[i]:
            part = jax.lax.all_gather(part, axis, axis=i, tiled=True)
    return part
