"""Low-rank adapters (LoRA, Hu et al. 2021): a trained matrix stays as it is, and a small change of it is learned.

    W' = W + (alpha / r) B A,    B: outputs x r, A: r x inputs; at first B = 0, and A ~ N(0, 1 / inputs)

The letters of a matrix tell its sides (shapes.sides), so one function of the parameter tree adapts any of them, and no
layer knows of it. A tree with adapters has them apart, at the same paths below `lora`: that of blocks/score/Uq_HKD is
lora/blocks/score/Uq_HKD/{A_DL, B_HKL}, with L = r. A is kept with its r last, as B is.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, shapes

NODE = "lora"


def init(key: jax.Array, params: dict, *, rank: int, chosen: Callable[[str], bool]) -> dict:
    """The tree with new adapters of this rank for the matrices whose paths are chosen: as a function it is the same."""
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


def merged(params: dict, *, alpha: float, layout: layouts.Layout = layouts.ONE) -> dict:
    """The tree of effective weights W', without adapters. layout: the devices that share them; each makes its part."""
    adapters, specs = params[NODE], shapes.specs(params, layout.rules)

    def changed(path: Any, W: jax.Array, spec: Any) -> jax.Array:
        node, own = adapters, specs[NODE]
        for name in shapes.names(path):
            if name not in node:
                return W
            node, own = node[name], own[name]
        wanted, parts = (*spec, *[None] * W.ndim), []
        for name, axes in zip(sorted(node), _axes(path), strict=True):
            parts.append((_whole(node[name], own[name], [wanted[i] for i in axes]), [*axes, W.ndim]))
        (A, of_A), (B, of_B) = parts
        with jax.named_scope(NODE):
            change = jnp.einsum(B, of_B, A, of_A, [*range(W.ndim)], precision="highest")
            return W + (alpha / A.shape[-1]) * change

    base, of_base = ({name: one for name, one in tree.items() if name != NODE} for tree in (params, specs))
    return jax.tree_util.tree_map_with_path(changed, base, of_base)


def _axes(path: Any) -> list[list[int]]:
    """The axes of a matrix that A has, and those that B has: copies of the matrix are copies of both."""
    outputs, inputs = shapes.sides(path)
    return [[i for i in range(len(shapes.letters(path))) if i not in others] for others in (outputs, inputs)]


def _whole(part: jax.Array, spec: Any, wanted: list) -> jax.Array:
    """A side of an adapter, gathered where devices share it and not the matrix: as F of W1_FD and D of its A_DL."""
    for i, axis in enumerate(spec):
        if axis and axis != wanted[i]:
            part = jax.lax.all_gather(part, axis, axis=i, tiled=True)
    return part
