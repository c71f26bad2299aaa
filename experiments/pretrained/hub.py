"""Published models: the tensors and the config.json of a folder as our parameters and settings, and back.

What is read is checked twice: config.json decides the family and what the model must be, and every tensor of the file
must be one of its parameters (or a buffer that is known, and holds what it must hold).
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import disk, errors
from experiments.pretrained import bert, families, gpt2, llama, safetensors, tensors, vit
from tfm import shapes

FAMILIES = {module.FAMILY.name: module.FAMILY for module in (gpt2, bert, vit, llama)}
GENERATION = "generation_config.json"  # beside config.json: where a text ends
ASIDE = ("pooler", "next_sentence")  # heads that our models do not have: kept in `extras`


class Imported(NamedTuple):
    """What a folder holds. family: gpt2, bert, vit or llama. params: our tree, float32.

    model: fields of a config's `model`. extras: what else one must know (W, N, tied_output, class_names, `ids` of
    `_token_ids`, ...), with the arrays of heads that our models do not have (`pooler`, `next_sentence`) and `headless`,
    true where the model ends before its logits. table: what became of each tensor (`show` makes it readable).
    """

    family: str
    params: dict
    model: dict[str, Any]
    extras: dict[str, Any]
    table: list[tensors.Row]


def read(path: str | pathlib.Path) -> Imported:
    """The model in a folder (config.json and its safetensors), or in a safetensors file with config.json beside it.

    UserError for a family or a setting that is not supported; and one that lists the tensors that are missing, left
    over, of another shape, or not what they must be.
    """
    path = pathlib.Path(path)
    safetensors.refuse_pickles(path)  # also where no config.json says what they are
    file = (path if path.is_dir() else path.parent) / "config.json"
    if path.is_dir() and not file.exists() and not any(map(_is_weights, path.iterdir())):
        raise errors.UserError(
            f"{path} holds neither a run nor a published model (config.json with {safetensors.FILE}, or a llama2c .bin)"
        )
    config = disk.read_json(file, says="what the model beside it is")
    if "model_type" not in config:
        raise errors.UserError(f"{file} has no model_type, which must be one of {', '.join(FAMILIES)}")
    family = _family(config["model_type"])  # before a large file is read
    ids = _token_ids(config, file.parent, family.ids)
    read = interpret(config, safetensors.read(path), path)
    return read._replace(extras=read.extras | ({"ids": ids} if ids else {}))


def interpret(config: Mapping[str, Any], arrays: tensors.Arrays, path: str | pathlib.Path) -> Imported:
    """The model that config.json describes and the tensors hold. UserError as `read`, which names `path`."""
    family = _family(config.get("model_type"))
    description = family.describe(config)
    plain = families.plain(family, arrays)
    groups = family.groups(description, set(plain))
    lines = [line for line in family.lines if line.group in groups | {""}]
    known = [one for one in family.known if one.unless not in groups]
    what = f"{path} is not the {family.name} that its config.json describes"
    stored = {"layers": description.layers or description.sizes["M"]}
    tensors.complain(tensors.check(lines, known, plain, sizes=description.sizes, **stored), what)
    more, faults = tensors.recognise(known, plain, facts=description.sizes | description.model, **stored)
    tensors.complain(faults, what)
    flat, table = tensors.read(lines, plain, sizes=description.sizes, **stored)
    params = {"position": {}, "head": {}} | _nested(flat)
    extras = description.extras | params.pop("extras", {})
    extras["headless"] = family.name in ("bert", "vit") and not params["head"]
    model = {letter: description.sizes[letter] for letter in "MDHKF"} | families.fixed(family.name) | description.model
    params["blocks"]["relative_position"] = {}
    return Imported(family.name, params, model, extras, table + more)


def write(
    folder: str | pathlib.Path,
    *,
    family: str,
    params: Mapping,
    model: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
) -> list[str]:
    """The names of the files written: model.safetensors and config.json, which the transformers library opens with
    from_pretrained, and of a model that goes on with a text generation_config.json, which says where the text ends.

    params is our tree, `model` the fields of a config's `model`, `extras` what `read` gives: heads kept there are
    written back, and class_names, ids and pooler_act; a ViT needs `patch` there, a Llama `N`. Heads and layers that
    were shared in a file are written one by one. UserError, with the reason, where the model is none of the family.
    """
    spec, extras, what = _family(family), dict(extras or {}), f"this model cannot be written as {family}"
    tree = dict(params) | {"extras": {name: extras[name] for name in ASIDE if name in extras}}
    flat = _flat(tree)
    groups = {line.group for line in spec.lines if any(path in flat for path in line.ours)} | {""}
    lines = [line for line in spec.lines if line.group in groups and line.group.split("/")[0] in groups]
    tensors.complain(families.faults(spec.name, model), what)
    tensors.match(lines, flat, what)
    sizes = _sizes(tree, what)
    config = {"model_type": spec.name, "dtype": "float32"} | spec.config(sizes, model, extras, groups)
    description = spec.describe(config)  # as they will read it: a size or a setting that they cannot say shows here
    _same({letter: description.sizes[letter] for letter in "MDHKF"} | description.model, model, what, "model.")
    _same({letter: n for letter, n in description.sizes.items() if letter in sizes}, sizes, what)
    arrays = tensors.write(lines, flat, sizes=description.sizes)
    full, ids = families.full(spec, arrays), {name: extras.get("ids", {}).get(name) for name in spec.ids}
    saved = {"config.json": config | ids} | ({GENERATION: ids} if spec.ids == families.TEXT_IDS else {})
    _save(pathlib.Path(folder), {full[name]: array for name, array in arrays.items()}, saved)
    return [safetensors.FILE, *saved]


def show(imported: Imported) -> str:
    """The table of tensors for a person: theirs, ours, and what was done."""
    return tensors.text(imported.table)


def _is_weights(file: pathlib.Path) -> bool:
    return file.name in (safetensors.FILE, safetensors.INDEX)


def _family(name: Any) -> families.Family:
    for family in FAMILIES.values():
        if name in (family.name, *family.aliases):
            return family
    raise errors.UserError(f"there is no family of models {name!r} here: those known are {', '.join(FAMILIES)}")


def _sizes(tree: Mapping, what: str) -> dict[str, int]:
    try:
        return shapes.check(tree)
    except shapes.ShapeError as error:
        raise errors.UserError(f"{what}: {error}") from error


def _save(folder: pathlib.Path, arrays: Mapping[str, np.ndarray], objects: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.write(folder / safetensors.FILE, arrays, {"format": "pt"})
        for name, saved in objects.items():
            (folder / name).write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise errors.UserError(f"{folder} cannot be written: {error.strerror or error}") from error


def _same(right: Mapping[str, Any], values: Mapping[str, Any], what: str, prefix: str = "") -> None:
    """UserError where a field that `values` has is not the right one."""
    wrong = [
        f"{prefix}{name} is {values[name]!r} and not {value!r}"
        for name, value in right.items()
        if name in values and values[name] != value
    ]
    tensors.complain(wrong, what)


def _nested(flat: Mapping[str, np.ndarray]) -> dict:
    """{'a/b': x} -> {'a': {'b': x}}."""
    tree: dict = {}
    for path, array in flat.items():
        *nodes, leaf = path.split("/")
        node = tree
        for name in nodes:
            node = node.setdefault(name, {})
        node[leaf] = array
    return tree


def _flat(tree: Mapping, path: str = "") -> dict[str, np.ndarray]:
    """The inverse of `_nested`; empty nodes vanish."""
    leaves = {}
    for name, node in tree.items():
        leaves |= _flat(node, f"{path}{name}/") if isinstance(node, Mapping) else {f"{path}{name}": np.asarray(node)}
    return leaves


def _token_ids(config: Mapping[str, Any], folder: pathlib.Path, fields: Iterable[str]) -> dict[str, int | list[int]]:
    """What config.json and generation_config.json say of the ids that begin, end and pad a text; one that neither gives
    a value is absent. UserError for a bad value.

    (transformers takes nothing from config.json where the other file is there, and runs on if that names no end.)
    """
    ids, file = {}, folder / GENERATION
    generation = disk.read_json(file, says="what ends a text") if file.is_file() else {}
    for name, saved in (("config.json", config), (GENERATION, generation)):
        ids |= {field: _checked(name, field, saved[field]) for field in fields if saved.get(field) is not None}
    return ids


def _checked(file: str, field: str, value: Any) -> int | list[int]:
    """Ids that the model has no row for are allowed, as transformers writes them for small models; -1 pads nothing."""
    several = isinstance(value, list) and field == "eos_token_id"
    least = -1 if field == "pad_token_id" else 0
    if value == [] or not all(type(id) is int and id >= least for id in (value if several else [value])):
        right = "the id of a token, a whole number from 0" + (", or a list of such" if field == "eos_token_id" else "")
        raise errors.UserError(f"{file}: {field} must be {right}, and is {value!r}")
    return value
