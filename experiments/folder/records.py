"""Read the files of a run's folder, which may be damaged or of another program, and check their types.

A function returns {} or no rows for a missing file, and raises UserError for a damaged one. NaN and infinity are None.
"""

import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from flax import traverse_util

from experiments.config import disk, errors, settings as configs

CONFIG, SUMMARY, DATA, METRICS, CHECKPOINTS = "config.json", "summary.json", "data.json", "metrics.jsonl", "checkpoints"
# A form is a type, a range, [the form of all items] or of each item, (alternatives), or {key: form}.
# A key "!name" is needed, "eval/" is for all keys that begin so, and "*" for all others.
NULL, COUNT, POSITIVE, TEXTS = type(None), range(2**63), range(1, 2**63), {"*": str}
NUMBER = (float, NULL)  # null: not finite
NOUNS = {str: "a text", float: "a number", range: "a whole number", bool: "true or false", NULL: "null"}
NOUNS |= {list: "a list", dict: "an object"}
ROW = {"!step": COUNT, "*": NUMBER}
SUMMARY_FORM = {"!steps": COUNT, "params": COUNT, "skipped": COUNT, "diverged_at": (COUNT, NULL), "data": [str]}
SUMMARY_FORM |= {"eval/": NUMBER, "baseline/": NUMBER, "initial": {"*": [NUMBER] * 4}, "data_sha256": (str, NULL)}
SUMMARY_FORM |= {"checkpoints": {"*": (ROW, NULL)}} | dict.fromkeys("guess better versions sources".split(), TEXTS)
SUMMARY_FORM |= dict.fromkeys("experiment commit device params_sha256".split(), str)
SUMMARY_FORM |= dict.fromkeys(
    "wall_seconds compile_seconds tokens_per_second flops_per_step flops_per_token seconds_per_step".split(), float
)
# Types of the settings that tools read from config.json without config_file.load, which checks all of them.
TYPES = {
    POSITIVE: "model.M model.D model.H model.G model.K model.F text.N pairs.N image.patch",
    COUNT: "model.window model.segments model.mup train.steps train.patience study.looks",
    float: "model.cap model.output_cap model.score_std model.output_std model.embed_std study.threshold study.margin",
    str: "experiment text.head text.objective image.head train.loss train.keep_best optim.lora study.experiment "
    "study.metric model.score model.scale model.value model.norm model.mlp model.position model.relative_position "
    "model.block model.outer_norm model.bias model.flax model.mup_depth model.attention model.remat "
    "model.compute_dtype",
    bool: "text.documents study.keep_weights",
    list: "study.arms study.conditions study.seeds study.tune study.tune_seeds",
}
SETTINGS = {name: kind for kind, names in TYPES.items() for name in names.split()} | {"train.metrics": [str]}
CONFIG_FORM = {"!config": traverse_util.unflatten_dict(SETTINGS, sep="."), "versions": TEXTS, "commit": str}
CONFIG_FORM |= {"devices": (str, NULL), "data": ({"sha256": (str, NULL), "classes": ([str], NULL)}, NULL)}
DATA_FORM = {"classes": ([str], NULL), "kind": str, "image": [POSITIVE] * 3, "values": [float] * 2}
DATA_FORM |= {"mean": [float], "std": [float], "source": [str], "target": [str]}


def read_object(file: pathlib.Path, form: Any) -> dict[str, Any]:
    """Return the JSON object in a file, {} if the file is missing. Raises UserError unless it has this `form`.

    form: {name: type, or another form}; "!x" is a required name x (see `find_fault`).
    """
    if not os.path.lexists(file):
        return {}
    with disk.reading(file):
        return _parse(disk.read_bytes(file), form)


def read_rows(file: pathlib.Path, form: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line; nothing if the file is missing.

    A damaged last line without a line end, which was cut off, is left out. Raises UserError for any other line that is
    damaged or not of this `form` (see `find_fault`).
    """
    if not os.path.lexists(file):
        return
    with disk.reading(file), disk.open_regular(file) as lines:
        for number, text in enumerate(iter(lambda: lines.readline(disk.MOST_BYTES), b""), 1):
            try:
                yield _parse(text, form)
            except (ValueError, RecursionError) as error:
                fault = f"{file}: line {number:,} is damaged: {disk.reason(error)}. Correct or delete this line"
                errors.refuse((text.endswith(b"\n") or len(text) == disk.MOST_BYTES, fault))


def _parse(text: bytes, form: Any) -> dict[str, Any]:
    """Return the JSON object of a text. Raises ValueError for another form, RecursionError for too deep nesting."""
    row = json.loads(text, parse_constant=lambda _: None)
    json.dumps(row, ensure_ascii=False).encode()  # raises ValueError for half a character, "\ud800"
    if fault := find_fault(row, form):
        raise ValueError(fault)
    return row


def find_fault(value: Any, form: Any, key: str = "") -> str:
    """Return what is wrong with a JSON value, as "steps = 'x' must be a whole number from 0 on"; "" if it fits.

    form: a type; a range of integers; a tuple of alternatives; a list of one form for all items, or of a form for each
    item; or {name: form} for an object. "!x" is a required name x, "eval/" all names that begin so, "*" all others.
    key: the name of the value, for the text.
    """
    if isinstance(form, tuple):
        faults = [find_fault(value, option, key) for option in form]
        return faults[0] if all(faults) else ""
    kind, inner = form if isinstance(form, type) else type(form), []
    if isinstance(form, dict) and isinstance(value, dict):
        if missing := [name[1:] for name in form if name[0] == "!" and name[1:] not in value]:
            return f"{missing[0]} is missing"
        forms = {name.removeprefix("!"): option for name, option in form.items()}
        rest = forms.get("*", object)
        inner = [(x, forms.get(name, forms.get(f"{name.partition('/')[0]}/", rest)), name) for name, x in value.items()]
    elif isinstance(form, list) and isinstance(value, list) and len(form) in (1, len(value)):
        inner = [(x, form[i % len(form)], f"{key}[{i}]") for i, x in enumerate(value)]
    else:
        is_number = kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max
        is_count = kind is range and type(value) is int and value in form
        if not (is_number or is_count or form is object or type(value) is form and kind is not float):
            size = f" from {form.start} on" if kind is range else ""
            size += f" of {len(form)}" if isinstance(form, list) and len(form) > 1 else ""
            place = f"{key[: configs.LONGEST]} = " if key else ""
            return f"{place}{configs.format_value(value)} must be {NOUNS[kind]}{size}"
    return next(filter(None, (find_fault(*item) for item in inner)), "")


def read_metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl in a folder, [] if it is missing. Raises UserError as `read_rows` does."""
    return [*read_rows(folder / METRICS, ROW)]


def read_settings(folder: pathlib.Path) -> dict[str, Any]:
    """Return the settings in config.json, by keys such as "train.steps"."""
    return configs.flat(read_config(folder).get("config", {}))


def _read(name: str, form: Any, folder: pathlib.Path) -> dict[str, Any]:
    return read_object(folder / name, form)


read_config = functools.partial(_read, CONFIG, CONFIG_FORM)  # {"config": settings, "data", "versions", "devices", ...}
read_summary = functools.partial(_read, SUMMARY, SUMMARY_FORM)  # the result; it marks a finished run
read_data = functools.partial(_read, DATA, DATA_FORM)  # the format of the inputs of a run's model
