"""What a family of published models is: how its config.json is read and written, which of our settings it has, and its
lines of tensors.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import errors
from experiments.pretrained import tensors

Config = Mapping[str, Any]
TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields of a model that writes text
# their name of the MLP's activation -> ours; one name of theirs for each of ours is written back
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


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
    describe: Callable[[Config], Description]
    groups: Callable[[Description, set[str]], set[str]]  # (description, names of tensors) -> groups of lines to read
    config: Callable[
        [dict[str, int], Mapping, Mapping, set[str]], dict
    ]  # (sizes, model, extras, groups) -> config.json
    ids: tuple[str, ...] = ()  # the fields of config.json that are ids of words (hub.py)
    unprefixed: tuple[str, ...] = ()  # beginnings of names that stand outside of the prefix
    aliases: tuple[str, ...] = ()  # other model_types with the same tensors


def plain(family: Family, arrays: tensors.Arrays) -> dict[str, np.ndarray]:
    """The tensors under their names in the lines: without the prefix, and spelled as there."""
    named: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
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


# The fields of a config.json, with a sentence for each that is absent, of another kind, or not supported.


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


def one_of(config: Config, name: str, allowed: Collection[Any]) -> Any:
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


# What becomes of the fields of a config's `model`: a row for every field, a column for every family. A model with a
# field that has no row is not written: whether the family has what it says is not known.


class Rule(NamedTuple):
    """The values that a family has (none: all), and whether config.json says which one it is.

    Where it does not, they are the same function of the parameters, and the first of them is what is read.
    """

    values: tuple[Any, ...]
    written: bool


def only(*values: Any) -> Rule:
    """One function, by each of its names here."""
    return Rule(values, written=False)


def written(*values: Any) -> Rule:
    """Into config.json, beside the tensors where it is a size."""
    return Rule(values, written=True)


WRITTEN = written()
ACTIVATION = written(*dict.fromkeys(ACTIVATIONS.values()))
FREE = None  # where a model begins, or how it is trained and computed: no matter to what the trained one says

DEFAULTS = {  # of the fields that are FREE: what a published model's files do not say, as base.py has them
    "score_std": 1.0,
    "output_std": 1.0,
    "rotary_base": 10000.0,
    "dropout": 0.0,
    "attention": "explicit",
    "compute_dtype": "float32",
    "remat": False,
    "unroll": 0,
}
COLUMNS = ("gpt2", "bert", "vit", "llama")
ROOT_K = only("1/sqrt(K)")
ROWS = {
    "M": (WRITTEN,) * 4,
    "D": (WRITTEN,) * 4,
    "H": (WRITTEN,) * 4,
    "K": (WRITTEN,) * 4,
    "F": (WRITTEN,) * 4,
    "score": (only("asymmetric", "symmetric_init", "asymmetric_std"),) * 4,  # they differ where they begin
    "score_std": (FREE,) * 4,
    "output_std": (FREE,) * 4,
    "diagonal": (only("keep"),) * 4,
    "scale": (written("1/sqrt(K)", "1"), ROOT_K, ROOT_K, ROOT_K),
    "value": (only("low_rank"),) * 4,
    "norm": (only("token"), only("token"), only("token"), only("rms")),
    "eps": (WRITTEN,) * 4,
    "mlp": (ACTIVATION, ACTIVATION, ACTIVATION, only("swiglu")),
    "position": (only("learned"), only("learned"), only("learned"), only("none")),
    "relative_position": (only("none"), only("none"), only("none"), only("rotary_halves")),
    "rotary_base": (FREE, FREE, FREE, WRITTEN),  # nothing is turned by it but a Llama's queries and keys
    "window": (only(0),) * 4,
    "block": (only("pre_norm"), only("post_norm"), only("pre_norm"), only("pre_norm")),
    "final_norm": (only(True), only(False), only(True), only(True)),
    "embed_norm": (only(False), only(True), only(False), only(False)),
    "segments": (only(0), WRITTEN, only(0), only(0)),
    "bias": (only(True), only(True), only(True), only(False)),
    "dropout": (FREE,) * 4,
    "attention": (FREE,) * 4,
    "compute_dtype": (FREE,) * 4,  # what is written is float32, as the parameters are: it rounds less
    "remat": (FREE,) * 4,
    "unroll": (FREE,) * 4,
}


def _rules(family: str) -> dict[str, Rule]:
    """Of the fields that matter to what a trained model of this family says."""
    rules = {field: row[COLUMNS.index(family)] for field, row in ROWS.items()}
    return {field: rule for field, rule in rules.items() if rule is not FREE}


def fixed(family: str) -> dict[str, Any]:
    """The fields that all members of the family share."""
    return {field: rule.values[0] for field, rule in _rules(family).items() if not rule.written}


def faults(family: str, model: Mapping[str, Any]) -> list[str]:
    """What keeps a model with these fields from being one of the family; what its sizes do, `write` finds."""
    rules, unknown = _rules(family), sorted(model.keys() - ROWS.keys())
    wrong = [f"model.{field} is missing" for field in rules if field not in model]
    wrong += [f"model.{field} is not known here, nor whether a {family} has it" for field in unknown]
    for field, rule in rules.items():
        if rule.values and field in model and model[field] not in rule.values:
            right = " or ".join(repr(value) for value in rule.values)
            wrong.append(f"model.{field} is {model[field]!r} and not {right}")
    return wrong
