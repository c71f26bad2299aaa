"""What becomes of the fields of a config's `model` in each family: a row for every field, a column for every family.

A model with a field that has no row is not written: whether the family has what it says is not known.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

WRITTEN = "written"  # into config.json, beside the tensors where it is a size
FREE = "free"  # where a model begins, or how it is trained and computed: no matter to what the trained one says


class Only(NamedTuple):
    """The one value that the family has, and others that are the same function of the parameters."""

    value: Any
    same: tuple[Any, ...] = ()


COLUMNS = ("gpt2", "bert", "vit", "llama")
ROOT_K = Only("1/sqrt(K)")
ROWS = {
    "M": (WRITTEN,) * 4,
    "D": (WRITTEN,) * 4,
    "H": (WRITTEN,) * 4,
    "K": (WRITTEN,) * 4,
    "F": (WRITTEN,) * 4,
    "score": (Only("asymmetric", ("symmetric_init", "asymmetric_std")),) * 4,  # they differ where they begin
    "score_std": (FREE,) * 4,
    "output_std": (FREE,) * 4,
    "diagonal": (Only("keep"),) * 4,
    "scale": (WRITTEN, ROOT_K, ROOT_K, ROOT_K),
    "value": (Only("low_rank"),) * 4,
    "norm": (Only("token"), Only("token"), Only("token"), Only("rms")),
    "eps": (WRITTEN,) * 4,
    "mlp": (WRITTEN, WRITTEN, WRITTEN, Only("swiglu")),
    "position": (Only("learned"), Only("learned"), Only("learned"), Only("none")),
    "relation": (Only("none"), Only("none"), Only("none"), Only("rotary_halves")),
    "rotary_base": (FREE, FREE, FREE, WRITTEN),  # nothing is turned by it but a Llama's queries and keys
    "window": (Only(0),) * 4,
    "block": (Only("pre_norm"), Only("post_norm"), Only("pre_norm"), Only("pre_norm")),
    "final_norm": (Only(True), Only(False), Only(True), Only(True)),
    "embed_norm": (Only(False), Only(True), Only(False), Only(False)),
    "segments": (Only(0), WRITTEN, Only(0), Only(0)),
    "bias": (Only(True), Only(True), Only(True), Only(False)),
    "dropout": (FREE,) * 4,
    "attention": (FREE,) * 4,
    "compute_dtype": (FREE,) * 4,  # what is written is float32, as the parameters are: it rounds less
    "remat": (FREE,) * 4,
    "unroll": (FREE,) * 4,
}


def fixed(family: str) -> dict[str, Any]:
    """The fields that all members of the family share."""
    column = COLUMNS.index(family)
    return {field: row[column].value for field, row in ROWS.items() if isinstance(row[column], Only)}


def faults(family: str, model: Mapping[str, Any]) -> list[str]:
    """What keeps a model of these fields from being one of the family, as far as its tensors need not tell it."""
    column = COLUMNS.index(family)
    needed = [field for field, row in ROWS.items() if row[column] != FREE]
    wrong = [f"model.{field} is missing" for field in needed if field not in model]
    for field, value in model.items():
        if field not in ROWS:
            wrong.append(f"model.{field} is not known here, nor whether a {family} has it")
        elif isinstance(one := ROWS[field][column], Only) and value not in (one.value, *one.same):
            wrong.append(f"model.{field} is {value!r} and not {one.value!r}")
    return wrong
