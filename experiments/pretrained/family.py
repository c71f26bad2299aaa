"""What a family of published models is: how its config.json is read and written, and its lines of tensors."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import errors
from experiments.pretrained import fields, tensors


class Description(NamedTuple):
    """A config.json in our words."""

    sizes: dict[str, int]  # by letter, as in the names of the parameters; G: heads of keys and values
    model: dict[str, Any]  # fields of a config's `model`
    extras: dict[str, Any]  # what else one must know to use it
    layers: int = 0  # stored layers, where not M


class Family(NamedTuple):
    """`name` is config.json's model_type; every tensor's name may begin with `prefix` or not."""

    name: str
    prefix: str
    spellings: tuple[tuple[str, str], ...]  # (regular expression, replacement): other names for the same tensors
    lines: tuple[tensors.Line, ...]
    known: tuple[tensors.Known, ...]
    describe: Callable[[fields.Config], Description]
    groups: Callable[[Description, set[str]], set[str]]  # (description, names of tensors) -> groups of lines to read
    config: Callable[
        [dict[str, int], Mapping, Mapping, set[str]], dict
    ]  # (sizes, model, extras, groups) -> config.json
    ids: tuple[str, ...] = ()  # the fields of config.json that are ids of words (token_ids.py)
    unprefixed: tuple[str, ...] = ()  # beginnings of names that stand outside of the prefix
    aliases: tuple[str, ...] = ()  # other model_types with the same tensors


def plain(family: Family, found: tensors.Arrays) -> dict[str, np.ndarray]:
    """The tensors under their names in the lines: without the prefix, and spelled as there."""
    named: dict[str, np.ndarray] = {}
    for name, array in found.items():
        short = name.removeprefix(family.prefix)
        for pattern, spelling in family.spellings:
            short = re.sub(pattern, spelling, short)
        if short in named:
            raise errors.UserError(f"the file has the tensor {short} twice, once of them as {name}")
        named[short] = array
    return named


def full(family: Family, names: Iterable[str]) -> dict[str, str]:
    """The names in the lines -> those in a file of a model with a head."""
    return {name: name if name.startswith(family.unprefixed) else family.prefix + name for name in names}
