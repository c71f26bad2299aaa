"""A choice that a config names: a pair of pure functions, as in optax."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """`init(key, **sizes) -> params` and `apply(params, *arrays, **settings) -> arrays`. shared: whether `apply` takes
    `layout`, which devices share the model (layout.py): without it, each must have all."""

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., Any]
    shared: bool = False
