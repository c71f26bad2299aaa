"""Published models: the tensors and the config.json of a folder as our parameters and settings, and back.

What is read is checked twice: config.json decides the family and what the model must be, and every tensor of the file
must be one of its parameters (or a buffer that is known, and holds what it must hold).
"""

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flax import traverse_util

from experiments.engine import disk, errors
from experiments.pretrained import bert, bert_relatives, families, gpt2, llama, safetensors, tensors, vit
from tfm import shapes

ENCODERS = (bert.FAMILY, *bert_relatives.FAMILIES)
FAMILIES = {
    one.name: one
    for one in (gpt2.FAMILY, gpt2.BIGCODE, *ENCODERS, vit.FAMILY, vit.DEIT, llama.FAMILY, *llama.RELATIVES)
}
CLASSIFIERS = ("classifier.weight", "cls_classifier.weight", "classifier.out_proj.weight")  # a row for each class
NEXT_SENTENCE = ("seq_relationship.weight", "sop_classifier.classifier.weight")
GENERATION = "generation_config.json"  # beside config.json: where a text ends
ASIDE = ("pooler", "next_sentence")  # heads that our models do not have: kept in `extras`


class Imported(NamedTuple):
    """What a folder holds. family: one of FAMILIES. params: our tree, float32.

    model: fields of a config's `model`. extras: what else one must know (W, N, tied_output, class_names, `ids` of
    `_token_ids`, `kind` as open_model.DOES, ...), with the arrays of heads that are ASIDE, and `headless`, true where
    the model ends before its logits. table: what became of each tensor, for a person.
    """

    family: str
    params: dict
    model: dict[str, Any]
    extras: dict[str, Any]
    table: str


def read(path: str | pathlib.Path) -> Imported:
    """The model in a folder (config.json and its safetensors), or in a safetensors file with config.json beside it.
    UserError for a family or a setting that is not supported, and as `tensors.read`."""
    path = pathlib.Path(path)
    file = safetensors.file_of(path).parent / "config.json"
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
    rows = [
        len(arrays[name]) for name in arrays if name.removeprefix(family.prefix) in CLASSIFIERS and arrays[name].ndim
    ]
    config = families.labelled(config, rows[0], path) if rows else config
    facts, plain = families.describe(family, config), {}
    for name in (name for name in arrays if name.endswith(NEXT_SENTENCE) and arrays[name].ndim):
        facts["T"] = len(arrays[name])
    for name, array in arrays.items():  # without the prefix, and spelled as in the lines
        short = name.removeprefix(family.prefix)
        for pattern, spelling in family.spellings:
            short = re.sub(pattern, spelling, short)
        if short in plain:
            raise errors.UserError(f"the file has the tensor {short} twice, once of them as {name}")
        plain[short] = array
    groups = family.groups(facts, set(plain))
    lines = [tensors.own_keys(line, facts) for line in family.lines if line.group in groups | {""}]
    known = [one for one in family.known if one.unless not in groups]
    what = f"{path} is not the {family.name} that its config.json describes"
    flat, table = tensors.read(lines, known, plain, facts | {"M": facts["M"] // facts["share"]}, what)
    flat = family.ours(flat, facts)
    params = {"position": {}, "head": {}} | traverse_util.unflatten_dict(flat, sep="/")
    params["blocks"]["relative_position"] = {}
    extras = {name: fact for name, fact in facts.items() if name not in family.model} | params.pop("extras", {})
    extras["kind"] = next((head for head in family.heads if head in groups), family.kind)
    extras["output"] = families.output(family, extras["kind"], facts)
    extras["headless"] = family.kind != "causal" and not params["head"]
    return Imported(family.name, params, {name: facts[name] for name in family.model}, extras, table)


def write(
    folder: str | pathlib.Path,
    *,
    family: str,
    params: Mapping,
    model: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
) -> list[str]:
    """The names of the files written, which the transformers library opens with from_pretrained.

    params is our tree, `model` the fields of a config's `model`, `extras` what `read` gives: heads kept there are
    written back, and class_names, ids and pooler_act; a ViT needs `patch`, `image` and `Z` there, a Llama `N`.
    UserError, with the reason, where the model is none of the family.
    """
    spec, extras, what = _family(family), dict(extras or {}), f"this model cannot be written as {family}"
    tree = dict(params) | {"extras": {name: extras[name] for name in ASIDE if name in extras}}
    tensors.complain(what, families.faults(spec, model))
    flat = shapes.flat(tree)
    every = [tensors.own_keys(line, model) for line in spec.lines]
    groups = {line.group for line in every if any(path in flat for path in line.ours)} | {""}
    groups -= {*spec.heads} - {extras.get("kind", spec.kind)}  # some have the same arrays
    lines = [line for line in every if line.group in groups and line.group.split("/")[0] in groups]
    wanted = [path for line in lines for path in line.ours]
    faults = [f"{path} is missing" for path in wanted if path not in flat]
    tensors.complain(what, faults + [f"{path} is left over" for path in flat if path not in wanted])
    try:
        sizes = shapes.check(tree)
    except shapes.ShapeError as error:
        raise errors.UserError(f"{what}: {error}") from error
    sizes["M"] *= model["share"]
    facts = extras | {**model, "G": sizes["H"]} | sizes
    facts |= {"tied_output": "untied" not in groups, "query_bias": "query_bias" in groups}
    config = families.config(spec, facts, groups)
    again = families.describe(spec, config)  # as they will read it: a size or a setting that they cannot say shows here
    free = [name for name in spec.model if spec.model[name] == families.ANY or name == "relative_position"]
    said = [(f"model.{name}", name, model[name]) for name in free]
    said += [(name, name, n) for name, n in sizes.items() if name in again]
    tensors.complain(what, [f"{a} is {x!r} and not {again[name]!r}" for a, name, x in said if x != again[name]])
    sets = again | {"M": again["M"] // again["share"]}
    arrays = tensors.write(lines, spec.theirs(flat, again), sizes=sets)
    spec.groups(again, set(arrays))  # may refuse
    arrays = {name if name.startswith(spec.unprefixed) else spec.prefix + name: array for name, array in arrays.items()}
    ids = {name: extras.get("ids", {}).get(name) for name in spec.ids}
    saved = {"config.json": ids | config} | ({GENERATION: ids} if spec.kind == "causal" else {})
    folder = pathlib.Path(folder)
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.write(folder / safetensors.FILE, arrays)
        for name, content in saved.items():
            disk.write_json(folder / name, content)
    return [safetensors.FILE, *saved]


def _family(name: Any) -> families.Family:
    if not isinstance(name, str) or name not in FAMILIES:
        raise errors.UserError(f"there is no family of models {name!r} here: those known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _token_ids(config: Mapping[str, Any], folder: pathlib.Path, fields: Iterable[str]) -> dict[str, int | list[int]]:
    """What config.json and generation_config.json say of the ids that begin, end and pad a text. UserError for no id.
    (transformers takes nothing from config.json where the other file is there, and runs on if that names no end.) Ids
    that the model has no row for are allowed, as transformers writes them for small models; -1 pads nothing."""
    ids, file = {}, folder / GENERATION
    generation = disk.read_json(file, says="what ends a text") if file.is_file() else {}
    for name, saved in (("config.json", config), (GENERATION, generation)):
        for field in [field for field in fields if saved.get(field) is not None]:
            ids[field] = value = saved[field]
            end, least = field == "eos_token_id", -1 if field == "pad_token_id" else 0
            each = value if end and isinstance(value, list) else [value]
            if not each or not all(type(id) is int and id >= least for id in each):
                right = "the id of a token, a whole number from 0" + (", or a list of such" if end else "")
                raise errors.UserError(f"{name}: {field} must be {right}, and is {value!r}")
    return ids
