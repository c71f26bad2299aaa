"""A variant: a pair of pure functions that a config selects by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from tfm import shapes

Measures = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
Weights = Mapping[str, float] | tuple[()]  # an empty tuple can be hashed, and so can a variant


class Variant(NamedTuple):
    """`init(key, **sizes) -> params` and `apply(params, *arrays, layout) -> array`.

    takes_layout: True if `apply` uses the argument `layout`, the devices that share the model (layout.py). Otherwise
    every device must hold all parameters of the variant.
    measures: {name: weight} if `apply` returns (array, {name: (sum, count)}). Every measure is logged as sum / count,
    and training adds weight * sum / count to the loss: {"loss_balance": 0.01, "idle_experts": 0}.
    output: the names of the last matrices of an MLP, whose initial values model.output_std scales: ("W2_DF",).
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., Any]
    takes_layout: bool = False
    measures: Weights = ()
    output: tuple[str, ...] = ()


def take_measures(stage: Any, result: Any, measures: Measures) -> Any:
    """Return the arrays in `result`, which `stage.apply` returned, and add its measures to those in `measures`.

    Raises TypeError if `result` has measures and the stage declares none, or it has none and the stage declares some.
    Also raises it if a measure is not a pair (sum, count).
    """
    returned = isinstance(result, tuple) and isinstance(result[-1], dict)
    arrays, new = result if returned else (result, {})
    valid = not new or all(isinstance(pair, tuple) and len(pair) == 2 for pair in new.values())
    if returned != bool(stage.measures) or not valid:
        name = shapes.describe_function(stage.apply)
        raise TypeError(
            f"{name} must return (result, {{name: (sum, count)}}) if its variant declares measures, else the result"
        )
    if new:
        measures |= add_measures(measures, new)
    return arrays


def add_measures(*measures: Measures) -> Measures:
    """Return one dict with the measures of several stages. Sums and counts of a name that they share are added."""
    total: Measures = {}
    for stage in measures:
        for name, pair in stage.items():
            total[name] = jax.tree.map(jax.numpy.add, total[name], pair) if name in total else pair
    return total


def check_shape(function: Callable, result: jax.Array, like: jax.Array) -> jax.Array:
    """Return `result`, which `function` has returned. Raises ValueError unless it has the shape of the array `like`.

    Without this check, an addition would broadcast a wrong shape, such as (B, N, 1), to the right one.
    """
    if jax.numpy.shape(result) != like.shape:
        difference = f"the shape {jax.numpy.shape(result)}, not {like.shape}"
        raise ValueError(f"{shapes.describe_function(function)} returns an array of {difference}")
    return result
