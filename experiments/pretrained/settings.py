"""What becomes of the fields of a config's `model` in each family: a row for every field, a column for every family.

A model with a field that has no row is not written: whether the family has what it says is not known.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.pretrained import fields


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
ACTIVATION = written(*dict.fromkeys(fields.ACTIVATIONS.values()))
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
