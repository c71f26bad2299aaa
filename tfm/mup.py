"""Maximal update parametrisation: the best learning rate is the same at every width (Yang et al. 2022).

r = D / D_0 is the width relative to a base width D_0. F and K grow with D; H and the sizes of the data (W, N, P, C) do
not. Compared with the base width (Yang et al. 2022, table 8, for Adam):

| parameters | axes that grow | initial scale | learning rate |
|---|---|---|---|
| embeddings, positions, class token | features | equal | equal |
| matrices inside the blocks | inputs and outputs | 1/sqrt(inputs) | times 1/r |
| output matrices | inputs | equal | equal |
| gains, shifts, biases | features | equal | equal |

In the forward pass the output matrices are multiplied by 1/r, and the attention logits by 1/sqrt(r): in training,
queries and keys align, so that their products grow with K and not with sqrt(K). A step of Muon has the right size at
every width without a factor. The letters in the name of a parameter state whether its inputs and outputs grow.

With depth: let s = M / M_0 be the number of layers relative to a base, and let every stage add 1/s^a of its output to
the residual stream. a = 1/2 is depth_mup (Yang et al. 2024), and a = 1 completep (Dey et al. 2025). Parameters of the
blocks then learn with s^(a-1) times the rate. The factor 1/s^a is no line of the forward pass, because Adam and Muon
take steps of a fixed size. Instead it multiplies the initial values and the rate of the parameters that a stage applies
last (`ends_branch`). The usual initial values 1/sqrt(2 M) of these matrices already contain a = 1/2.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from tfm import shapes

WIDTHS = "DFKV"  # letters of axes that grow with the width
CONSTANT = "MHGXNWPCRJE"  # letters of other axes
DEPTH = {"depth_mup": 0.5, "completep": 1.0}  # method -> a


class Growth(NamedTuple):
    """The width and the depth of a model relative to a base model."""

    width: float = 1.0  # r
    depth: float = 1.0  # s
    exponent: float = 0.5  # a: attention and MLP each add 1/s^a of their output to the residual stream

    @property
    def output_std(self) -> float:
        """Return depth^(1/2 - exponent), a factor on the initial values of the matrices that a stage applies last.

        With exponent 1/2 it is 1, because the std of these matrices already contains 1/sqrt(2 M).
        """
        return self.depth ** (0.5 - self.exponent)


BASE = Growth()


def grows(path: Any) -> tuple[bool, bool]:
    """Return (outputs, inputs): whether the outputs of the matrix at this path grow with the width, and its inputs.

    Raises ValueError if a letter of the matrix's axes (shapes.letters) is neither in WIDTHS nor in CONSTANT.
    """
    letters = shapes.letters(path)
    if unknown := set(letters) - {*WIDTHS, *CONSTANT}:
        name = "/".join(shapes.names(path))
        raise ValueError(
            f"whether the axis {min(unknown)} of {name} grows with the width is not known. "
            f"Use one of the letters {WIDTHS} for an axis that grows, or of {CONSTANT} for one that does not"
        )
    outputs, inputs = shapes.sides(path)
    return tuple(any(letters[axis] in WIDTHS for axis in side) for side in (outputs, inputs))


def ends_branch(path: Any) -> bool:
    """Return True for the last parameters of a stage: a matrix with outputs D of the value or the MLP, or its bias."""
    letters, stages = shapes.letters(path), {"value", "value_cross", "mlp"}
    if not stages & {*shapes.names(path)}:
        return False
    return "D" in {letters[axis] for axis in shapes.sides(path)[0]} if shapes.is_matrix(path) else letters[-1:] == "D"


def rate(path: Any, growth: Growth) -> float:
    """Return the factor on the learning rate of the parameter at this path."""
    factor = 1 / growth.width if shapes.is_matrix(path) and all(grows(path)) else 1.0
    if shapes.STACKED in shapes.names(path):
        factor *= growth.depth ** (growth.exponent - 1)
        factor *= growth.depth**-growth.exponent if ends_branch(path) else 1.0
    return factor


def scale_rates(updates: Any, growth: Growth) -> Any:
    """Return the updates of an optimiser, each multiplied by the factor on its parameter's learning rate (`rate`)."""

    def scale(path: Any, update: jax.Array) -> jax.Array:
        return rate(path, growth) * update

    return jax.tree_util.tree_map_with_path(scale, updates)


def check(params: Mapping, *, depth: bool = False) -> None:
    """Raise ValueError if a letter of a matrix's axes, such as in Uq_HKD, is neither in WIDTHS nor in CONSTANT.

    depth: also raise it if the value or the MLP has no parameters for which `ends_branch` is True (outputs D).
    """
    paths = [path for path in shapes.flat(params) if shapes.is_matrix(path)]
    for path in paths:
        grows(path)
    ends = {path.split("/")[-2] for path in paths if ends_branch(path)}
    for stage in ("value", "mlp"):
        if depth and stage not in ends:
            raise ValueError(
                f"model.mup_depth needs a matrix with outputs D, such as Uo_HDK or W2_DF, but model.{stage} has none. "
                f"Choose another model.{stage} or set model.mup_depth = ''"
            )
