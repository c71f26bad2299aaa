"""Published models: the tensors and the config.json of a folder as our parameters and settings, and back.

What is read is checked twice: config.json decides the family and what the model must be, and every tensor of the file
must be one of its parameters, or a buffer that is known.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util

from experiments.build import variants
from experiments.engine import by_name, disk, errors
from experiments.pretrained import bert, bert_relatives, families, gpt2, llama, safetensors, tensors, vit
from tfm import shapes

FAMILIES = {
    "gpt2": gpt2.FAMILY,
    "bert": bert.FAMILY,
    "roberta": bert_relatives.ROBERTA,
    "xlm-roberta": bert_relatives.XLM_ROBERTA,
    "distilbert": bert_relatives.DISTILBERT,
    "albert": bert_relatives.ALBERT,
    "vit": vit.FAMILY,
    "deit": vit.DEIT,
    **llama.FAMILIES,
}
GENERATION = "generation_config.json"  # next to config.json: where a text ends
CLASSES = ("classes", "tokens", "spans", "image")  # kinds whose head answers with classes


class Imported(NamedTuple):
    """What a folder holds. family: one of FAMILIES. params: our tree, float32.

    model: fields of a config's `model`. extras: what else one must know (W, N, tied_output, class_names, `kind` as
    open_model.DOES, `ids` that begin, end and pad a text, ...), with their tensors that our models do not have
    (`aside`), and `headless`, true if the model ends before its logits. table: what became of each tensor.
    """

    family: str
    params: dict
    model: dict[str, Any]
    extras: dict[str, Any]
    table: str


def read(path: str | pathlib.Path) -> Imported:
    """Return the model in a folder (config.json and its safetensors), or in a safetensors file next to a config.json.
    Raises UserError for a family or a setting that is not supported, and as `tensors.read`."""
    file = safetensors.file_of(path).parent / "config.json"
    hf_config = disk.read_json(file, says="what the model next to it is")
    family = choose(hf_config.get("model_type"))  # before a large file is read
    model = interpret(hf_config, safetensors.read(path), path)
    # transformers takes nothing from config.json if the other file is there, and runs on if that names no end.
    generation = file.with_name(GENERATION)
    more = disk.read_json(generation, says="what ends a text") if generation.is_file() else {}
    said = hf_config | {name: value for name, value in more.items() if value is not None}
    ids = {name: said[name] for name in family.ids if said.get(name) is not None}
    return model._replace(extras=model.extras | ({"ids": ids} if ids else {}))


def interpret(hf_config: families.HfConfig, arrays: tensors.Arrays, path: str | pathlib.Path) -> Imported:
    """Return the model that config.json describes and the tensors hold. Raises UserError as `read`."""
    name = hf_config.get("model_type")
    family, what = choose(name), f"{path} is not the {name} that its config.json describes"
    with disk.reading(path, TypeError, AttributeError):
        settings = families.read(family, hf_config)
        arrays = family.clean({key.removeprefix(family.prefix): x for key, x in arrays.items()}, settings)
        settings |= family.head(settings, arrays)
        kind = settings["head"] or next(iter(family.outputs))
        if kind in CLASSES:
            names = families.read_labels(hf_config, settings.get("C"), path)
            settings |= {"class_names": names, "C": len(names), "problem_type": hf_config.get("problem_type")}
    too_many = settings["M"] > len(arrays) * settings["share"]
    tensors.complain(what, [f"{settings['M']} layers need more than {len(arrays)} tensors"] if too_many else [])
    lines, sizes = family.lines(settings), _sizes(settings)
    unread = _unread(family, settings, arrays, what)
    wanted = {name for line in lines for name in tensors.names(line.theirs, sizes["M"])}
    aside = {key for key in arrays if key.startswith(family.aside)} - wanted
    own = {key: x for key, x in arrays.items() if key not in unread.keys() | aside}
    flat = tensors.read(lines, own, sizes, what)
    params = {"position": {}, "head": {}, **traverse_util.unflatten_dict(flat, sep="/")}
    params["blocks"]["relative_position"] = {}
    extras = {key: value for key, value in settings.items() if key not in families.MODEL}
    extras |= {"kind": kind, "output": families.output(family, kind, settings), "headless": not settings["head"]}
    extras["aside"] = {key: np.asarray(arrays[key], np.float32) for key in sorted(aside)}
    model = {key: settings[key] for key in families.MODEL}
    unread |= dict.fromkeys(sorted(aside), "no part of our models, and kept aside")
    return Imported(name, params, model, extras, tensors.table(lines, unread))


def _sizes(settings: families.Settings) -> families.Settings:
    """Return the sizes by letter, with those of the layers and segments that have parameters."""
    return settings | {"M": settings["M"] // settings["share"], "J": settings["segments"]}


def _unread(family: families.Family, settings: families.Settings, arrays: tensors.Arrays, what: str) -> dict[str, str]:
    """Return the tensors that hold no parameters, and what they are. Raises UserError for a copy that differs from its
    original."""
    tied = family.tied if settings.get("tied_output") else {}
    copies = {name: first for name, first in tied.items() if name in arrays and first in arrays}
    wrong = [name for name, first in copies.items() if not np.array_equal(arrays[name], arrays[first])]
    tensors.complain(what, [f"{name} is not a copy of {copies[name]}" for name in wrong])
    buffers = {name for buffer in family.buffers for name in tensors.names(buffer, settings["M"])} & arrays.keys()
    return {name: f"a copy of {first}" for name, first in copies.items()} | dict.fromkeys(sorted(buffers), "a buffer")


def write(
    folder: str | pathlib.Path,
    *,
    family: str,
    params: Mapping,
    model: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write files that the transformers library opens with from_pretrained, and return their names.

    params is our tree, `model` the fields of a config's `model`, `extras` what `read` gives: the tensors kept `aside`
    are written back, and class_names, ids and pooler_act; a ViT needs `patch`, `image` and `Z` there, a Llama `N`.
    Raises UserError, with the reason, if the model is none of the family.
    """
    own, extras, what = choose(family), dict(extras or {}), f"this model cannot be written as {family}"
    config, settings = _described(family, params, model, extras, what)
    flat, lines = shapes.flat(params), own.lines(settings)
    wanted = [path for line in lines for path in line.ours]
    faults = [f"{path} is missing" for path in wanted if path not in flat]
    tensors.complain(what, faults + [f"{path} is left over" for path in flat if path not in wanted])
    arrays = own.restore(tensors.write(lines, flat, _sizes(settings)), settings) | settings["aside"]
    ids = {name: extras.get("ids", {}).get(name) for name in own.ids}
    files = {"config.json": {"model_type": family, "dtype": "float32"} | ids | config}
    files |= {GENERATION: ids} if "causal" in own.outputs else {}
    folder = pathlib.Path(folder)
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.write(folder / safetensors.FILE, {prefixed(own, name): array for name, array in arrays.items()})
        for name, content in files.items():
            disk.write_json(folder / name, content)
    return [safetensors.FILE, *files]


def _described(
    family: str, params: Mapping, model: Mapping[str, Any], extras: Mapping[str, Any], what: str
) -> tuple[dict[str, Any], families.Settings]:
    """Return config.json of a model, and the settings as they are read from it. Raises UserError for what it cannot
    say."""
    own = FAMILIES[family]
    try:
        sizes = shapes.check(params)
        sizes["M"] *= model["share"]
        settings = {**extras, **model, "G": sizes["H"], **sizes, **_heads(own, shapes.flat(params), extras)}
        config = families.write(own, settings)
    except shapes.ShapeError as error:
        raise errors.UserError(f"{what}: {error}") from error
    except KeyError as error:
        raise errors.UserError(f"{what} without {error}") from error
    again = families.read(own, {"model_type": family, **config})
    output = families.output(own, extras.get("kind", next(iter(own.outputs))), settings)
    tensors.complain(what, unlike(model, extras, sizes, again | {"output": output}))
    return config, settings | again


def rules(family: str, params: Mapping, model: Mapping[str, Any], extras: Mapping[str, Any]) -> list[tensors.Line]:
    """Return the rules by which `write` writes the model, with whole names."""
    own = FAMILIES[family]
    _, settings = _described(family, params, model, extras, f"this model cannot be written as {family}")
    return [line._replace(theirs=prefixed(own, line.theirs)) for line in own.lines(settings)]


def prefixed(family: families.Family, name: str) -> str:
    """Return the whole name of a tensor."""
    return name if name.startswith(family.unprefixed) else family.prefix + name


def _heads(family: families.Family, flat: Mapping[str, Any], extras: Mapping[str, Any]) -> families.Settings:
    """Return the settings that the paths of our parameters show."""
    kind = extras.get("kind", next(iter(family.outputs)))
    return {
        "head": kind if kind == "causal" or any(path.startswith("head/") for path in flat) else "",
        "tied_output": not {"head/G_WD", "head/G_WE"} & flat.keys(),
        "query_bias": "blocks/score/bq_HK" in flat,
        "aside": extras.get("aside", {}),
    }


def unlike(
    model: Mapping[str, Any], extras: Mapping[str, Any], sizes: Mapping[str, int], again: families.Settings
) -> list[str]:
    """List the settings of a model that its config.json does not say. again: those that it says."""
    said = {f"model.{name}": (model.get(name), again[name]) for name in families.MODEL}
    said |= {f"model.{name}": (model[name], "known here") for name in model.keys() - {*families.MODEL, *families.FREE}}
    said |= {name: (n, again[name]) for name, n in sizes.items() if name in again and name not in families.MODEL}
    field = "image.head" if "patch" in extras else f"text.head (with model.mlp = {model.get('mlp')})"
    said[field] = (extras.get("output", again["output"]), again["output"])
    return [f"{name} is {a!r} and not {b!r}" for name, (a, b) in said.items() if _plain(name, a) != _plain(name, b)]


def _plain(name: str, value: Any) -> Any:
    """Return the value of a setting as it compares: with its number, and without how a score begins."""
    if name == "model.norm" and value:
        variant, number = variants.split("norm", value)
        return variant, float(number)
    return "asymmetric" if name == "model.score" and value in families.SAME_SCORES else value


def choose(name: Any) -> families.Family:
    """Return the family with this model_type."""
    return FAMILIES[by_name.choose("model_type", str(name), {name: name for name in FAMILIES})]
