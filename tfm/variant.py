"""A choice that a config names: a pair of pure functions, as in optax."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """`init(key, **sizes) -> params` and `apply(params, *arrays, **settings) -> arrays`."""

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., Any]
