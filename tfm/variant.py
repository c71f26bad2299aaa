"""A variant: a pair of pure functions that a config selects by name."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """`init(key, **sizes) -> params` and `apply(params, *arrays, layout) -> array`.

    takes_layout: True if `apply` uses `layout`, the devices that share the model (layout.py). Otherwise every device
    must hold all of its parameters.
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., Any]
    takes_layout: bool = False
