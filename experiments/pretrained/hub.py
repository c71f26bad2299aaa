"""Published models: translate the tensors and the config.json of a folder to our parameters and settings, and back.

A model is checked twice. config.json decides the family and the sizes. Every tensor of the file must be a parameter of
the family or a known buffer.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util

from experiments.config import by_name, disk, errors
from experiments.folder import records
from experiments.model import variants
from experiments.pretrained import bert, families, gpt2, llama, safetensors, tensors, vit
from tfm import shapes

LLAMAS = {"llama": llama.LLAMA, "mistral": llama.MISTRAL, "qwen2": llama.QWEN2, "qwen3": llama.QWEN3}
LLAMAS |= {"gemma": llama.GEMMA}
FAMILIES = {"gpt2": gpt2.FAMILY, "bert": bert.BERT, "roberta": bert.ROBERTA, "xlm-roberta": bert.XLM_ROBERTA}
FAMILIES |= {"distilbert": bert.DISTILBERT, "vit": vit.FAMILY, **LLAMAS}
GENERATION = "generation_config.json"  # a file next to config.json, with the ids that end a text
CLASSES = ("classes", "tokens", "spans", "image")  # kinds with a head of classes


class Published(NamedTuple):
    """A published model, as it is read from a folder or will be written into one.

    family: one of FAMILIES. params: our tree, float32. model: the fields of a config's `model`. table: where each
    tensor went.

    extras: other properties: W, N, tied_output, class_names, `kind` (trained.DOES), `ids` that begin, end and pad a
    text, `headless` (True if the model ends before its logits), ... `aside` are tensors that our models do not have.
    `pooler` has the arrays, by our paths, with which a new head for classes of texts begins; `class_layer` is the
    text.head of such a head in transformers, None if the family has none.
    """

    family: str
    params: dict
    model: dict[str, Any]
    extras: dict[str, Any]
    table: str = ""


def read(path: str | pathlib.Path) -> Published:
    """Return the model in a folder (config.json and its safetensors), or in a safetensors file next to a config.json.

    Raises UserError for a family or a setting that is not supported, and as `tensors.read`.
    """
    file = safetensors.file_of(path).parent / "config.json"
    errors.refuse((not file.exists(), f"{file} is missing. It records what the model next to it is"))
    hf_config = records.read_object(file, {})
    family = choose(hf_config.get("model_type"))  # before a large file is read
    for section in (hf_config, *hf_config.values()):  # text_config has one too
        method = section.get("quantization_config") if isinstance(section, dict) else None
        errors.refuse((method, f"{file}: quantization_config = {str(method)[:60]}. {tensors.QUANTISED}"))
    model = interpret(hf_config, safetensors.read(path), path)
    # If generation_config.json exists, transformers ignores the ids in config.json. Without ids it does not end a text.
    generation = file.with_name(GENERATION)
    fields = records.read_object(generation, {})
    fields = hf_config | {name: value for name, value in fields.items() if value is not None}
    ids = {name: fields[name] for name in family.ids if fields.get(name) is not None}
    return model._replace(extras=model.extras | ({"ids": ids} if ids else {}))


def interpret(hf_config: families.HfConfig, arrays: tensors.Arrays, path: str | pathlib.Path) -> Published:
    """Return the model that config.json describes and the tensors hold. Raises UserError as `read` does."""
    name = hf_config.get("model_type")
    family, label = choose(name), f"{path} is not the {name} that its config.json describes"
    with disk.reading(path, TypeError, AttributeError):
        settings = families.read(family, hf_config)
        arrays = {key.removeprefix(family.prefix): x for key, x in arrays.items()}
        arrays = family.clean(arrays, settings, family)
        settings |= family.head(settings, arrays, family)
        kind = settings["head"] or next(iter(family.outputs))
        if kind in CLASSES:
            names = families.read_labels(hf_config, settings.get("C"), path)
            settings |= {"class_names": names, "C": len(names), "problem_type": hf_config.get("problem_type")}
    M, sizes, n = settings["M"], settings | {"J": settings["segments"]}, len(arrays)
    errors.refuse((M > n, f"{label}: {M} layers need more than {n} tensors"))
    lines = family.lines(settings, family)
    expected = {name for line in lines for name in tensors.names(line.theirs, M)}
    aside = {
        key: remark
        for key in sorted(arrays.keys() - expected)
        for start, remark in family.aside.items()
        if key.startswith(start)
    }
    unread = _find_unread(family, settings, arrays, label) | aside
    flat = tensors.read(lines, {key: x for key, x in arrays.items() if key not in unread}, sizes, label)
    params = {"position": {}, "head": {}, **traverse_util.unflatten_dict(flat, sep="/")}
    params["blocks"]["relative_position"] = {}
    extras = {key: value for key, value in settings.items() if key not in families.MODEL}
    extras |= {"kind": kind, "output": families.output(family, kind, settings), "headless": not settings["head"]}
    extras["aside"] = {key: np.asarray(arrays[key], np.float32) for key in aside}
    pooler = {path: np.asarray(arrays[key], np.float32) for key, path in family.pooler.items() if key in arrays}
    extras |= {"pooler": pooler, "class_layer": family.outputs.get("classes")}
    model = {key: settings[key] for key in families.MODEL}
    return Published(name, params, model, extras, tensors.table(lines, unread))


def _find_unread(
    family: families.Family, settings: families.Settings, arrays: tensors.Arrays, label: str
) -> dict[str, str]:
    """Return the tensors that are not read as parameters: name -> reason, such as "a buffer".

    Raises UserError for a copy that differs from its original.
    """
    tied = family.tied if settings.get("tied_output") else {}
    copies = {name: original for name, original in tied.items() if name in arrays and original in arrays}
    differing = [name for name, original in copies.items() if not np.array_equal(arrays[name], arrays[original])]
    tensors.complain(label, [f"{name} is not a copy of {copies[name]}" for name in differing])
    buffers = {name for buffer in family.buffers for name in tensors.names(buffer, settings["M"])} & arrays.keys()
    unread = {name: f"a copy of {original}" for name, original in copies.items()}
    return unread | dict.fromkeys(sorted(buffers), "a buffer")


def write(folder: str | pathlib.Path, model: Published) -> list[str]:
    """Write files that the transformers library opens with from_pretrained, and return their names.

    `extras` as `read` returns them: the tensors in `aside` are written back, and class_names, ids and pooler_act. A ViT
    needs `patch`, `image` and `Z` in `extras`, a Llama needs `N`. Raises UserError, with the reason, if the family does
    not have such a model.
    """
    family, config, settings, lines = _describe(model)
    arrays = tensors.write(lines, shapes.flat(model.params), settings | {"J": settings["segments"]})
    arrays = family.restore(arrays, settings, family) | settings["aside"]
    ids = {name: model.extras.get("ids", {}).get(name) for name in family.ids}
    files = {"config.json": {"model_type": model.family, "dtype": "float32"} | ids | config}
    files |= {GENERATION: ids} if "causal" in family.outputs else {}
    folder = pathlib.Path(folder)
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.write(folder / safetensors.FILE, {add_prefix(family, name): x for name, x in arrays.items()})
        for name, content in files.items():
            disk.write_json(folder / name, content)
    return [safetensors.FILE, *files]


def _describe(model: Published) -> tuple[families.Family, dict[str, Any], families.Settings, list[tensors.Line]]:
    """Return a model's family, its config.json, the settings that are read back from config.json, and the rules.

    Raises UserError for a setting that config.json cannot express, and for parameters that the family does not have.
    """
    family, extras, label = choose(model.family), model.extras, f"this model cannot be written as {model.family}"
    kind, flat = extras.get("kind", next(iter(family.outputs))), shapes.flat(model.params)
    try:
        sizes = shapes.check(model.params)
        settings = {**extras, **model.model, "G": sizes["H"], **sizes, "aside": extras.get("aside", {})}
        settings["head"] = kind if kind == "causal" or any(path.startswith("head/") for path in flat) else ""
        settings["tied_output"] = "head/G_WD" not in flat if settings["head"] else extras.get("tied_output", True)
        settings["query_bias"] = "blocks/score/bq_HK" in flat
        config = families.write(family, settings)
    except shapes.ShapeError as error:
        raise errors.UserError(f"{label}: {error}") from error
    except KeyError as error:
        raise errors.UserError(f"{label} without {error}") from error
    read_back = families.read(family, {"model_type": model.family, **config})
    output = families.output(family, kind, settings)
    tensors.complain(label, list_unlike(model.model, extras, sizes, read_back | {"output": output}))
    settings |= read_back
    lines = family.lines(settings, family)
    expected = [path for line in lines for path in line.ours]
    faults = [f"{path} is missing" for path in expected if path not in flat]
    tensors.complain(label, faults + [f"{path} is left over" for path in flat if path not in expected])
    return family, config, settings, lines


def rules(model: Published) -> list[tensors.Line]:
    """Return the rules by which `write` writes the model, with the full names of tensors."""
    family, _, _, lines = _describe(model)
    return [line._replace(theirs=add_prefix(family, line.theirs)) for line in lines]


def add_prefix(family: families.Family, name: str) -> str:
    """Return the full name of a tensor, as files of the family have it."""
    return name if name.startswith(family.unprefixed) else family.prefix + name


def list_unlike(
    model: Mapping[str, Any], extras: Mapping[str, Any], sizes: Mapping[str, int], read_back: families.Settings
) -> list[str]:
    """List the settings of a model that its config.json cannot express. read_back: settings read from config.json."""
    pairs = {f"model.{name}": (model.get(name), read_back[name]) for name in families.MODEL}
    pairs |= {
        f"model.{name}": (model[name], "a supported setting")
        for name in model.keys() - {*families.MODEL, *families.FREE}
    }
    pairs |= {
        name: (n, read_back[name]) for name, n in sizes.items() if name in read_back and name not in families.MODEL
    }
    field = "image.head" if "patch" in extras else f"text.head (with model.mlp = {model.get('mlp')})"
    pairs[field] = (extras.get("output", read_back["output"]), read_back["output"])
    return [f"{name} is {a!r} and not {b!r}" for name, (a, b) in pairs.items() if _plain(name, a) != _plain(name, b)]


def _plain(name: str, value: Any) -> Any:
    """Return a setting for a comparison: a norm with its number as a float, a score without its initial values."""
    if name == "model.norm" and value:
        variant, number = variants.split("norm", value)
        return variant, float(number)
    return "asymmetric" if name == "model.score" and value in families.SAME_SCORES else value


def choose(name: Any) -> families.Family:
    """Return the family with this model_type. Raises UserError if there is none."""
    return FAMILIES[by_name.choose("model_type", str(name), {name: name for name in FAMILIES})]
