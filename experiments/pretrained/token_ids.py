"""The ids that begin, end and pad a text: in config.json, and with the last word in generation_config.json."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.engine import disk, errors

FILE = "generation_config.json"
TEXT = ("bos_token_id", "eos_token_id", "pad_token_id")  # what a model that writes text has


def read(config: Mapping[str, Any], folder: pathlib.Path, fields: Iterable[str]) -> dict[str, int | list[int]]:
    """What the two files say of these fields; one that neither gives a value is absent. UserError for a bad value.

    (transformers takes nothing from config.json where the other file is there, and runs on if that names no end.)
    """
    found, file = {}, folder / FILE
    generation = disk.read_json(file, says="what ends a text") if file.is_file() else {}
    for name, saved in (("config.json", config), (FILE, generation)):
        found |= {field: _checked(name, field, saved[field]) for field in fields if saved.get(field) is not None}
    return found


def _checked(file: str, field: str, value: Any) -> int | list[int]:
    """Ids that the model has no row for are allowed, as transformers writes them for small models; -1 pads nothing."""
    several = isinstance(value, list) and field == "eos_token_id"
    least = -1 if field == "pad_token_id" else 0
    if value == [] or not all(type(id) is int and id >= least for id in (value if several else [value])):
        right = "the id of a token, a whole number from 0" + (", or a list of such" if field == "eos_token_id" else "")
        raise errors.UserError(f"{file}: {field} must be {right}, and is {value!r}")
    return value
