"""Published models: translate the tensors and the config.json of a folder to a trained model, and back.

config.json decides the family and the sizes. Every tensor must be a parameter of our model or a known other one.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.config import by_name, disk, errors
from experiments.folder import records
from experiments.model import variants
from experiments.pretrained import bert, families, gpt2, llama, safetensors, tensors, trained, vit
from tfm import shapes

LLAMAS = {"llama": llama.LLAMA, "mistral": llama.MISTRAL, "qwen2": llama.QWEN2, "qwen3": llama.QWEN3}
LLAMAS |= {"gemma": llama.GEMMA}
FAMILIES = {"gpt2": gpt2.FAMILY, "bert": bert.BERT, "roberta": bert.ROBERTA, "xlm-roberta": bert.XLM_ROBERTA}
FAMILIES |= {"distilbert": bert.DISTILBERT, "vit": vit.FAMILY, **LLAMAS}
GENERATION = "generation_config.json"  # a file next to config.json, with the ids that end a text
CLASSES = ("classes", "tokens", "spans", "image")  # kinds with a head of classes
# Tensors that our models do not have, by the beginnings of their names. They are kept in facts["aside"].
ASIDE = ("pooler.", bert.NEXT_SENTENCE)
POOLER = {"pooler.dense.weight": "head/pooler/W_DD", "pooler.dense.bias": "head/pooler/b_D"}


def read(path: str | pathlib.Path) -> trained.Trained:
    """Return the model in a folder (config.json and its safetensors), or in a safetensors file next to a config.json.

    Raises UserError for a missing file, an unsupported family or setting, and tensors that `tensors.read` refuses.
    """
    file = safetensors.file_of(path).with_name("config.json")
    errors.refuse((not file.exists(), f"{file} is missing. It describes the model: copy it into this folder"))
    hf_config = records.read_object(file, {})
    family = choose(hf_config.get("model_type"))  # before a large file is read
    for section in (hf_config, *hf_config.values()):  # text_config has one too
        method = section.get("quantization_config") if isinstance(section, dict) else None
        errors.refuse((method, f"{file}: quantization_config = {str(method)[:60]}. {tensors.QUANTISED}"))
    model = interpret(hf_config, safetensors.read(path), file.parent)
    # If generation_config.json exists, transformers ignores the ids in config.json. Without ids it does not end a text.
    generation = file.with_name(GENERATION)
    fields = records.read_object(generation, {})
    fields = hf_config | {name: value for name, value in fields.items() if value is not None}
    model.facts["ids"] = {name: fields[name] for name in family.ids if fields.get(name) is not None}
    return model


def interpret(hf_config: families.HfConfig, arrays: tensors.Arrays, path: pathlib.Path) -> trained.Trained:
    """Return the model that config.json describes and the tensors hold. path: its folder.

    Its facts include `headless`, True if it ends before its logits, and `aside`, {name: array} of tensors that our
    models lack. If the family can classify texts, `pooler` has the arrays, by our paths, with which a new head for
    classes begins, and `class_layer` is the setting text.head of that head. `read` adds `ids`, the ids that begin,
    end and pad a text. Raises UserError for an unknown family, or if config.json and the tensors do not fit.
    """
    name = hf_config.get("model_type")
    family, label = choose(name), f"{path} is not the {name} that its config.json describes"
    with disk.reading(path, TypeError, AttributeError):
        settings = families.read(family, hf_config)
        M, n = settings["M"], len(arrays)
        errors.refuse((M > n, f"{label}: {M} layers need more than {n} tensors"))
        arrays = family.clean({key.removeprefix(family.prefix): x for key, x in arrays.items()}, settings, family)
        kind, is_held = find_head(family, hf_config, arrays)
        if kind in CLASSES:
            *_, last = family.heads[kind].table
            rows = len(arrays[last.replace("*", "weight")]) if is_held else None
            names = families.read_labels(hf_config, rows, path)
            settings |= {"class_names": names, "C": len(names), "problem_type": hf_config.get("problem_type")}
    model, lines = outline(name, kind, settings | {"headless": not is_held}, path)
    ours = {name for line in lines for name in tensors.names(line, shapes.flat(model.params))}
    aside = [key for key in sorted(arrays) if key.startswith(ASIDE) and key not in ours]
    unread = find_unread(family, settings, arrays, label) | dict.fromkeys(aside, "not in our models, kept aside")
    flat = tensors.read(lines, {key: x for key, x in arrays.items() if key not in unread}, model.params, label)
    params = jax.tree.unflatten(jax.tree.structure(model.params), [flat[path] for path in shapes.flat(model.params)])
    facts = model.facts | {"aside": {key: np.asarray(arrays[key], np.float32) for key in aside}}
    if head := family.heads.get("classes"):
        pooler = [key for key in POOLER if key in arrays and "pooler.dense.*" in head.table]
        pooler = {POOLER[key]: np.asarray(arrays[key], np.float32) for key in pooler}
        facts |= {"pooler": pooler, "class_layer": head.output}
    return dataclasses.replace(model, params=params, facts=facts, table=tensors.table(lines, unread))


def find_head(family: families.Family, hf_config: families.HfConfig, arrays: tensors.Arrays) -> tuple[str, bool]:
    """Return the kind of head, and True if the file holds "NAME.weight" for every "NAME.*" in the head's table.

    Heads for classes of texts and of tokens can have the same tensors: only the class in config.json tells them apart.
    If the file holds no head, return the family's first kind.
    """
    architecture = str((hf_config.get("architectures") or "?")[0])
    weights = {kind: [x[:-1] + "weight" for x in head.table if x.endswith("*")] for kind, head in family.heads.items()}
    held = [kind for kind, names in weights.items() if arrays.keys() >= {*names}]
    named = [kind for kind in held if architecture.endswith(family.heads[kind].suffix)]
    return next(iter([*named, *held, *family.heads])), bool(held)


def outline(
    name: str, kind: str, settings: families.Settings, path: pathlib.Path
) -> tuple[trained.Trained, list[tensors.Line]]:
    """Return the model of these settings with abstract parameters, and a tensors.Line for each tensor.

    name: the model_type of the family. kind, path: fields of Trained.
    """
    family = FAMILIES[name]
    facts = {key: value for key, value in settings.items() if key not in families.MODEL}
    facts["output"] = families.name_output(family, kind, settings)
    model = trained.Trained(path, kind, {}, {key: settings[key] for key in families.MODEL}, facts)
    model = dataclasses.replace(model, params=trained.expect(model, trained.make_network(model)))
    return model, tensors.select(family.table | family.heads[kind].table, model.params, transposed=family.transposed)


def find_unread(
    family: families.Family, settings: families.Settings, arrays: tensors.Arrays, label: str
) -> dict[str, str]:
    """Return {name: reason} of tensors that are not parameters: copies of tied tensors, and buffers.

    Raises UserError, which begins with the label, for a copy that differs from its original.
    """
    tied = family.tied if settings.get("tied_output") else {}
    copies = {name: original for name, original in tied.items() if name in arrays and original in arrays}
    differing = [name for name, original in copies.items() if not np.array_equal(arrays[name], arrays[original])]
    tensors.complain(label, [f"{name} is not a copy of {copies[name]}" for name in differing])
    buffers = {name.format(m=m) for name in family.buffers for m in range(settings["M"])} & arrays.keys()
    unread = {name: f"a copy of {original}" for name, original in copies.items()}
    return unread | dict.fromkeys(sorted(buffers), "a buffer")


def write(folder: str | pathlib.Path, model: trained.Trained, name: str) -> list[str]:
    """Write files that transformers opens with from_pretrained, and return their names. name: the model_type.

    model.facts: as `interpret` returns them; a ViT also needs `patch`, `image` and `Z`, a Llama `N`. Raises UserError,
    with the reason, if the family does not have such a model.
    """
    family, config, settings, lines = describe(model, name)
    arrays = family.restore(tensors.write(lines, model.params), settings, family) | settings["aside"]
    ids = {field: settings["ids"].get(field) for field in family.ids}
    files = {"config.json": {"model_type": name, "dtype": "float32"} | ids | config}
    files |= {GENERATION: ids} if "causal" in family.heads else {}
    folder = pathlib.Path(folder)
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.write(folder / safetensors.FILE, {add_prefix(family, key): x for key, x in arrays.items()})
        for file, content in files.items():
            disk.write_json(folder / file, content)
    return [safetensors.FILE, *files]


def describe(
    model: trained.Trained, name: str
) -> tuple[families.Family, dict[str, Any], families.Settings, list[tensors.Line]]:
    """Return the family `name`, the model's config.json in it, its settings, and a tensors.Line for each tensor.

    The settings are updated by those that are read back from config.json. Raises UserError for a model, settings and
    parameters that the family does not have.
    """
    family, label, flat = choose(name), f"this model cannot be written as {name}", shapes.flat(model.params)
    trained.check_kind(model, *family.heads, needs_head=False)
    try:
        sizes = shapes.check(model.params)
        settings = {"aside": {}, "ids": {}, "headless": False, **model.facts, **model.model}
        settings |= {"G": sizes["H"], **sizes}
        if not settings["headless"]:
            settings["tied_output"] = "head/G_WD" not in flat
        settings["query_bias"] = any(x.any() for path, x in flat.items() if path.endswith(("bq_HK", "bk_HK", "bv_HK")))
        config = families.write(family, model.kind, settings)
    except shapes.ShapeError as error:
        raise errors.UserError(f"{label}, because of the shapes of its parameters: {error}") from error
    except KeyError as error:
        lacking = f"config.json needs {error}, which the model's parameters and facts lack. Add it to model.facts."
        raise errors.UserError(f"{label}: {lacking}") from error
    read_back = families.read(family, {"model_type": name, **config})
    read_back["output"] = families.name_output(family, model.kind, read_back)
    tensors.complain(label, list_unlike(model.model, model.facts.get("output"), read_back))
    settings |= read_back
    outlined, lines = outline(name, model.kind, settings, model.path)
    tensors.complain(label, tensors.differences(flat, shapes.flat(outlined.params)))
    return family, config, settings, lines


def list_lines(model: trained.Trained, name: str) -> list[tensors.Line]:
    """Return a tensors.Line for each tensor that `write` makes of our parameters, with its full name in the file.

    name: the model_type. Raises UserError if no family has this name, or if the family does not have such a model.
    """
    family, _, _, lines = describe(model, name)
    return [line._replace(theirs=add_prefix(family, line.theirs)) for line in lines]


def add_prefix(family: families.Family, name: str) -> str:
    """Return the full name of a tensor, as files of the family have it."""
    return name if name.startswith(family.unprefixed) else family.prefix + name


def list_unlike(model: Mapping[str, Any], output: str | None, read_back: families.Settings) -> list[str]:
    """Return a phrase for each setting that config.json cannot express.

    model: the section `model`. output: text.head or image.head. read_back: the settings read from config.json.
    """
    pairs = {f"model.{name}": (model.get(name), read_back[name]) for name in families.MODEL}
    unknown = model.keys() - {*families.MODEL, *families.FREE}
    pairs |= {f"model.{name}": (model[name], "a supported setting") for name in unknown}
    field = "image.head" if "patch" in read_back else f"text.head (with model.mlp = {model.get('mlp')})"
    pairs[field] = (output, read_back["output"])
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
