"""Read the files of a run's folder, config.json, summary.json, metrics.jsonl and data.json, and check their types.

Engine, studies and tools read them only by this module, because they may be damaged or of another program. NaN and
infinity become None. Each function returns {} or no rows for a missing file, and raises UserError for a damaged one.
"""

import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from experiments.config import disk, errors, settings as configs

CONFIG, SUMMARY, DATA = "config.json", "summary.json", "data.json"
# A form is a type, a range, [the form of all items] or of each item, (alternatives), or {key: form}.
# A key "!name" is needed, "eval/" is for all keys that begin so, and "*" for all others.
NULL, COUNT, POSITIVE, TEXTS = type(None), range(2**63), range(1, 2**63), {"*": str}
NUMBER = (float, NULL)  # null: not finite
NOUNS = {str: "a text", float: "a number", range: "a whole number", bool: "true or false"}
NOUNS |= {NULL: "null", list: "a list", dict: "an object"}
COSTS = "wall_seconds compile_seconds tokens_per_second flops_per_step flops_per_token seconds_per_step".split()
SUMMARY_FORM = {
    **{"!steps": COUNT, "params": COUNT, "skipped": COUNT, "diverged_at": (COUNT, NULL), "eval/": NUMBER},
    **{"baseline/": NUMBER, "guess": TEXTS, "better": TEXTS, "versions": TEXTS, "sources": TEXTS, "data": [str]},
    **{"initial": {"*": [NUMBER] * 4}, "checkpoints": {"*": ({"!step": COUNT, "*": NUMBER}, NULL)}},
    **{"experiment": str, "commit": str, "device": str, "data_sha256": (str, NULL), "params_sha256": str},
    **dict.fromkeys(COSTS, float),
}
# Types of the settings that tools read from config.json without config_file.load, which checks all of them.
MODEL = "score scale value norm mlp position relative_position block outer_norm bias flax mup_depth attention remat"
TYPES = {
    POSITIVE: "model.M model.D model.H model.G model.K model.F text.N pairs.N image.patch",
    COUNT: "model.window model.segments model.mup train.steps train.patience study.looks",
    float: "model.cap model.output_cap model.score_std model.output_std model.embed_std study.threshold study.margin",
    str: "experiment text.head text.objective image.head train.loss train.keep_best optim.lora study.experiment "
    "study.metric model.compute_dtype " + " ".join(f"model.{name}" for name in MODEL.split()),
    bool: "text.documents study.keep_weights",
    list: "study.arms study.conditions study.seeds study.tune study.tune_seeds",
}
SETTINGS: dict[str, Any] = {"train": {"metrics": [str]}}
for _kind, _names in TYPES.items():
    for _section, _, _name in (name.rpartition(".") for name in _names.split()):
        (SETTINGS.setdefault(_section, {}) if _section else SETTINGS)[_name] = _kind
CONFIG_FORM = {
    **{"!config": SETTINGS, "versions": TEXTS, "devices": (str, NULL), "commit": str},
    "data": ({"sha256": (str, NULL), "classes": ([str], NULL)}, NULL),
}
DATA_FORM = {
    **{"classes": ([str], NULL), "kind": str, "image": [POSITIVE] * 3, "values": [float] * 2, "mean": [float]},
    **{"std": [float], "source": [str], "target": [str]},
}


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Return the content of config.json: {"config": the settings, "data", "versions", "devices", "commit"}."""
    return read_object(folder / CONFIG, CONFIG_FORM)


def read_summary(folder: pathlib.Path) -> dict[str, Any]:
    """Return the content of summary.json."""
    return read_object(folder / SUMMARY, SUMMARY_FORM)


def read_data(folder: pathlib.Path) -> dict[str, Any]:
    """Return the content of data.json, which describes the inputs of a run's model."""
    return read_object(folder / DATA, DATA_FORM)


def read_object(file: pathlib.Path, form: Any) -> dict[str, Any]:
    """Return the JSON object in a file."""
    if not os.path.lexists(file):
        return {}
    with disk.reading(file):
        content = json.loads(disk.read_bytes(file), parse_constant=lambda _: None)
        json.dumps(content, ensure_ascii=False).encode()  # raises ValueError for half a character, "\ud800"
        if fault := find_fault(content, form, "it"):
            raise ValueError(fault)
    return content


def read_rows(file: pathlib.Path, form: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line. The last may be cut off, which is a line without an end."""
    if not os.path.lexists(file):
        return
    with disk.reading(file), disk.open_regular(file) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(disk.MOST_BYTES), b""), 1):
            try:
                row = json.loads(line, parse_constant=lambda _: None)
                fault = find_fault(row, form, "it")
            except (ValueError, RecursionError) as error:
                fault = disk.reason(error)
            if not fault:
                yield row
            elif line.endswith(b"\n") or len(line) == disk.MOST_BYTES:
                raise errors.UserError(f"{file}: line {number:,} is damaged: {fault}. Correct or delete it")


def find_fault(value: Any, form: Any, key: str) -> str:
    """Return what is wrong with a JSON value, as "steps = 'x' must be a whole number from 0 on"; "" if it fits."""
    if isinstance(form, tuple):
        faults = [find_fault(value, option, key) for option in form]
        return faults[0] if all(faults) else ""
    inner = []
    if isinstance(form, dict) and isinstance(value, dict):
        if missing := [name[1:] for name in form if name[0] == "!" and name[1:] not in value]:
            return f"{missing[0]} is missing"
        forms = {name.removeprefix("!"): option for name, option in form.items()}
        rest = forms.get("*", object)
        inner = [(x, forms.get(name, forms.get(f"{name.partition('/')[0]}/", rest)), name) for name, x in value.items()]
    elif isinstance(form, list) and isinstance(value, list) and len(form) in (1, len(value)):
        inner = [(x, form[i % len(form)], f"{key}[{i}]") for i, x in enumerate(value)]
    elif not fits(value, form):
        noun = NOUNS[form if isinstance(form, type) else type(form)]
        size = f" from {form.start} on" if isinstance(form, range) else ""
        size += f" of {len(form)}" if isinstance(form, list) and len(form) > 1 else ""
        return f"{configs.shorten(key)} = {configs.format_value(value)} must be {noun}{size}"
    return next(filter(None, (find_fault(*item) for item in inner)), "")


def fits(value: Any, form: Any) -> bool:
    """Return True if a JSON value has a form that is a type or a range."""
    if isinstance(form, range):
        return type(value) is int and value in form
    if form is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return form is object or type(value) is form
