"""The fields of a `config.json`, read with a sentence for each that is absent, of another kind, or not supported."""

from collections.abc import Collection, Mapping
from typing import Any

from experiments.engine import errors

Config = Mapping[str, Any]
# their name of the MLP's activation -> ours; one name of theirs for each of ours is written back
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def whole(config: Config, name: str, default: int | None = None) -> int:
    """A size: a whole number from 1. `null` counts as absent; without a default it must be there."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise errors.UserError(f"config.json lacks the field {name}, a whole number")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.UserError(f"config.json: {name} must be a whole number from 1, and is {value!r}")
    return value


def real(config: Config, name: str, default: float) -> float:
    """A finite number from 0."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise errors.UserError(f"config.json: {name} must be a number from 0, and is {value!r}")
    return float(value)


def flag(config: Config, name: str, default: bool) -> bool:
    """true or false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise errors.UserError(f"config.json: {name} must be true or false, and is {value!r}")
    return value


def text(config: Config, name: str, default: str) -> str:
    """Any text: of what is kept for others, and not used here."""
    value = config.get(name, default)
    if not isinstance(value, str):
        raise errors.UserError(f"config.json: {name} must be a text, and is {value!r}")
    return value


def only(config: Config, name: str, allowed: Collection[Any]) -> Any:
    """The value of a field that must be one of `allowed`; absent, it is the first of them."""
    value = config.get(name, next(iter(allowed)))
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        right = " or ".join(str(one) for one in allowed)
        raise errors.UserError(f"config.json: {name} = {value!r} is not supported here, only {right}")
    return value


def shared(all_features: int, heads: int, names: tuple[str, str]) -> int:
    """Features of a head: all, divided by the heads."""
    if all_features % heads:
        raise errors.UserError(f"config.json: {names[0]} = {all_features} is not divisible by {names[1]} = {heads}")
    return all_features // heads


def activation(mlp: str) -> str:
    """Their name of our MLP `mlp`, which is one of ACTIVATIONS."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == mlp)
