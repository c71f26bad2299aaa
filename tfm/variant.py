"""A choice that a config names: a pair of pure functions, as in optax."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """`init(key, **sizes) -> params` and `apply(params, *arrays, layout) -> array`.

    takes_layout: whether `apply` uses `layout`, the devices that share the model (layout.py). Without it every device
    must hold all of its parameters.
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., Any]
    takes_layout: bool = False
