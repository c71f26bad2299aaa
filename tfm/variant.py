"""A variant: a pair of pure functions that a config selects by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

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


def split_measures(stage: Any, result: Any) -> tuple[Any, Measures]:
    """Return the arrays of a result of `stage.apply`, and its measures, {} if the stage declares none.

    Raises TypeError if the stage declares measures and returns none or no pairs, or returns some and declares none.
    """
    returned = isinstance(result, tuple) and isinstance(result[-1], dict)
    pairs = result[-1].values() if returned else ()
    if returned != bool(stage.measures) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("return (array, {name: (sum, count)}) if, and only if, the variant declares {name: weight}")
    return result if returned else (result, {})


def add_measures(*measures: Measures) -> Measures:
    """Return the sums over stages: two stages may have the same measure."""
    total: Measures = {}
    for stage in measures:
        for name, pair in stage.items():
            total[name] = jax.tree.map(jax.numpy.add, total[name], pair) if name in total else pair
    return total
