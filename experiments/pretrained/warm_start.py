"""Warm start and fine-tuning: begin training with the parameters of a trained model (config.init_from)."""

import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.config import by_name, disk, errors, settings as configs
from experiments.data import files as data_files, pretrained_tokenizer
from experiments.engine import freeze, run as runs
from experiments.folder import log, records
from experiments.pretrained import adapters, open_model, tensors, trained
from tfm import lora, shapes

# Fields of `model` that may differ from the trained model's, because they do not change the function that it computes.
FREE = ("dropout", "attention", "compute_dtype", "remat")
# Parts that init_fresh may name even if the model lacks them. Then the config decides the `model` field of this name.
POSITIONS = ("position", "relative_position")
TABLE, WORDS, PATCHES = "position/P_N", "embed/E_W", "embed/W_DP"  # prefixes of paths
TEXTS = ("language", "text_classification")  # experiments that can use a model's tokenizer
CLASSIFIERS = ("text_classification", "vision")


def adopt_architecture(settings: configs.Settings, folder: pathlib.Path | None) -> configs.Settings:
    """Return the settings with the architecture and tokenizer of the model at init_from, unless the user chose others.

    Print the changes. A resumed run has a `folder`, whose config.json then decides instead of the model. Raises
    UserError if a value from the model names code, which the run would execute.
    """
    values = settings.to_dict()
    path, experiment = values["init_from"], values.get("study", values)["experiment"]
    if not path:
        return settings
    current = configs.flat(values)
    if saved := records.read_settings(folder) if folder else {}:
        fields = {"text.head", "text.tokenizer", "image.patch", "image.head"}
        required = {key: value for key, value in saved.items() if key.startswith("model.") or key in fields}
    else:
        model, fresh = open_model.open(path), adapters.split_parts(values["init_fresh"])
        required = list_required(experiment, model, fresh)
        if experiment == "text_classification" and (layer := model.facts.get("class_layer")):
            required = {"text.head": layer} | required  # that of transformers, also in a new head
        tokenizer = pretrained_tokenizer.find(model.path) if experiment in TEXTS and "embed" not in fresh else None
        if tokenizer and records.read_object(tokenizer, {}).get("kind") != current["text.tokenizer"]:
            required["text.tokenizer"] = str(tokenizer.parent)
    chosen = settings.list_chosen()
    adopted = {key: value for key, value in required.items() if key in current and key not in chosen}
    for key, value in adopted.items() if not saved else ():
        code = isinstance(value, str) and by_name.CODE.fullmatch(value)
        refused = f'init_from: {path} has {key} = "{value}", code that would be executed'
        refused += f". If you trust this code, set {key} in your config"
        errors.refuse((code, refused))
    settings = settings.replace(adopted)
    after = configs.flat(settings.to_dict())
    if changes := [f"{key} = {after[key]}" for key in current if after[key] != current[key]]:
        print(f"settings of {path}: {', '.join(changes)}", flush=True)
    return settings


def list_required(experiment: str, model: trained.Trained, fresh: Sequence[str]) -> dict[str, Any]:
    """Return {setting: value} that a config needs to use the model, without settings of positions in `fresh`.

    text.head or image.head is included only if the head is kept: it is not fresh, and both or none of model and
    experiment classify.
    experiment: that of the config. fresh: the parts in init_fresh.
    """
    free = {*FREE, *(part for part in fresh if part in POSITIONS)}
    required = {f"model.{name}": value for name, value in model.model.items() if name not in free}
    new_head = "head" in fresh or ("C" in model.facts) != (experiment in CLASSIFIERS)
    facts = {"patch"} if new_head else {"patch", "output"}
    fields = {fact: field for fact, field in open_model.FACTS.get(experiment, {}).items() if fact in facts}
    return required | {field: model.facts[fact] for fact, field in fields.items() if fact in model.facts}


def add_parameters(settings: configs.Settings, work: runs.Work, *, resumed: bool) -> runs.Work:
    """Print Work.lines, the lines about the data, and return the work with parameters of the model at init_from.

    A resumed run gets none from that model. Raises UserError if the model does not fit the settings (`load`).
    """
    for line in work.lines:
        log.say(line, "\n")
    return work._replace(params={**work.params, **load(settings, work.task.init, resumed=resumed, files=work.files)})


def load(
    settings: configs.Settings, init: Callable[[jax.Array], dict], *, resumed: bool, files: Mapping[str, bytes]
) -> dict[str, np.ndarray]:
    """Return {path: array} of the parameters that a run takes from the model at init_from.

    {} if the run is resumed or has no init_from. Print our path of each tensor of a published model. init: random key
    -> the run's own parameters. files: the contents of the run's tokenizer and data, by name. Raises UserError if the
    model's settings, tensors or tokenizer do not fit, if a parameter is not finite, or if init_fresh is invalid.
    """
    path, fresh = settings.init_from, adapters.split_parts(settings.init_fresh)
    errors.refuse((fresh and not path, f"init_fresh = {settings.init_fresh} needs init_from, the path of a model."))
    if resumed or not path:
        return {}
    model = open_model.open(path)
    expected = shapes.flat({k: node for k, node in jax.eval_shape(init, jax.random.key(0)).items() if k != lora.NODE})
    pooler = _find_pooler(settings, model, expected)
    theirs = shapes.flat(model.params) | pooler
    for part in fresh:
        if part not in POSITIONS and not _select(expected | theirs, [part]):
            names = sorted({path.split("/")[0] for path in expected})
            by_name.choose("part of this model in init_fresh:", part, dict.fromkeys(names, ""))
    left_out = _select(expected | theirs, fresh, "!head/pooler" if pooler else "")
    ours, start = ({path: x for path, x in tree.items() if path not in left_out} for tree in (expected, theirs))
    if model.table:
        log.say(model.table, "\n")
    start = _order_classes(model, _resize_positions(settings.to_dict(), model, start, ours), files)
    reasons = "; ".join(_list_differences(settings, model, fresh, start, ours, files))
    errors.refuse((reasons, f"init_from: {model.path} is not the model of this config: {reasons}"))
    trained.check_finite(model.path, start)
    notes = {"head": "head (except head/pooler, the pooler of the model)"} if pooler.keys() & start.keys() else {}
    is_new = {part: bool(_select(expected, [part])) for part in fresh}
    new = ", ".join(notes.get(part, part) for part in fresh if is_new[part])
    unused = ", ".join(part for part in fresh if not is_new[part])
    sentence = f"starting from {path}: {sum(x.size for x in start.values()):,} of its parameters"
    print(sentence + f", new: {new}" * bool(new) + f", unused: {unused}" * bool(unused), flush=True)
    return start


def _select(tree: Mapping[str, Any], fresh: Iterable[str], exception: str = "") -> set[str]:
    """Return the paths of the parameters in these parts of the model or of its blocks (fresh: as in init_fresh).

    exception: a pattern (freeze.select_trained) of parameters that do not belong to the part "head"; "": none.
    """
    patterns = [(part, f"blocks/{part}", exception * (part == "head")) for part in sorted(fresh)]
    return freeze.find_frozen(tree, [*itertools.chain(*patterns)])


def _find_pooler(
    settings: configs.Settings, model: trained.Trained, expected: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return {path: array} of BERT's pooler, the first layer of the run's head as in transformers; {} if unused.

    It belongs to the encoder: init_fresh = head keeps it. Print a line if the head of the run's config (text.head) has
    another first layer.
    """
    pooler, layer = model.facts.get("pooler", {}), settings.to_dict().get("text", {}).get("head")
    if pooler and settings.experiment == "text_classification" and layer != model.facts["class_layer"]:
        needed = f"it needs text.head = {model.facts['class_layer']}, and text.head = {layer}"
        print(f"the pooler of {model.path} is not used: {needed}", flush=True)
        return {}
    return {path: x for path, x in pooler.items() if path in expected}


def _order_classes(model: trained.Trained, start: dict, files: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Return the parameters with the head's rows in the order of the data. Raises UserError if class names differ."""
    theirs = model.facts.get("class_names", []) if "head/G_CD" in start else []
    ours = json.loads(files.get(runs.DATA, b"{}")).get("classes")
    if not ours or theirs == [f"LABEL_{i}" for i in range(len(theirs))]:  # the model has no class names
        return start
    old, new = (["".join(name.casefold().split()) for name in names] for names in (theirs, ours))
    if old == new:
        return start
    if sorted(old) != sorted(new) or len({*new}) < len(new):
        raise errors.UserError(
            f"init_from: {model.path} has the {len(theirs)} classes {data_files.join_names(theirs)}, and the data has "
            f"{len(ours)}: {data_files.join_names(ours)}. Use equal names, or set init_fresh = head for a new head."
        )
    order = [old.index(name) for name in new]
    print(f"the rows of the head of {model.path} are reordered to the order of the data's classes", flush=True)
    return start | {path: start[path][order] for path in ("head/G_CD", "head/b_C") if path in start}


def _count_rows(tree: Mapping[str, Any], table: str = TABLE) -> int:
    """Return the number of rows of the table with this path (learned positions or tokens), 0 if there is none."""
    return next((leaf.shape[0] for path, leaf in tree.items() if path.startswith(table)), 0)


def _resize_positions(
    config: Mapping[str, Any], model: trained.Trained, start: dict, ours: dict
) -> dict[str, np.ndarray]:
    """Return the parameters `start` with learned positions resized to the number in `ours`; unchanged if impossible."""
    old, new = _count_rows(start), _count_rows(ours)
    pixels = [tree[PATCHES].shape[1:] if PATCHES in tree else None for tree in (ours, start)]
    other_patches = pixels[0] != pixels[1] or model.facts.get("patch") != config.get("image", {}).get("patch")
    if old == new or 0 in (old, new) or other_patches:
        return start
    rule = "grid" if model.kind in trained.IMAGES else "cut" if new <= old else "linear"
    path = next(path for path in start if path.startswith(TABLE))
    if (table := resize(start[path], new, rule)) is None:
        return start
    print(f"the {old} learned positions are resized to {new} by the rule {rule}")
    return start | {path: table}


def _list_differences(
    settings: configs.Settings, model: trained.Trained, fresh: tuple, theirs: dict, ours: dict, files: Mapping
) -> list[str]:
    """List the fields of the config to change, and the tensors that do not fit, as phrases for an error."""
    current, is_text = configs.flat(settings.to_dict()), settings.experiment in TEXTS
    required, tokenizer = list_required(settings.experiment, model, fresh), pretrained_tokenizer.find(model.path)
    changes = {field: value for field, value in required.items() if current.get(field) != value}
    reasons = [f"set {field} = {value!r} (it is {current.get(field)!r})" for field, value in changes.items()]
    (W, our_W), (N, our_N) = ([_count_rows(tree, table) for tree in (theirs, ours)] for table in (WORDS, TABLE))
    other_size = is_text and 0 not in (W, our_W) and W != our_W
    if other_size or any("W" in shapes.letters(path) for path in ours) and _tokenizers_differ(files, tokenizer):
        remedy = f" (set text.tokenizer = {tokenizer.parent})" if tokenizer and is_text else ""
        reasons.append(f"its tokenizer has {W} tokens and differs from the run's, which has {our_W}{remedy}")
    if PATCHES in ours and N != our_N and 0 not in (N, our_N):
        image = model.facts.get("image") or records.read_data(model.path).get("image")
        reasons.append(f"its images of {image} pixels make {N} tokens, and the run's make {our_N}")
    if faults := tensors.differences(theirs, ours):
        head = all(fault.startswith("head/") for fault in faults)
        remedy = "or set init_fresh = head" if head else "or list in init_fresh the parts to initialise or to leave out"
        listed = tensors.join_faults(faults, 3 if reasons else tensors.MOST_FAULTS)  # a wrong field causes many
        reasons += [listed] if reasons and not head else [listed, remedy]
    return reasons


def _tokenizers_differ(files: Mapping[str, bytes], tokenizer: pathlib.Path | None) -> bool:
    """Return True if the run and the model have tokenizers that differ, except in padding and truncation."""
    if not tokenizer or "tokenizer.json" not in files:
        return False
    contents = files["tokenizer.json"], pretrained_tokenizer.read_files(tokenizer)["tokenizer.json"]
    with disk.reading(tokenizer, TypeError):
        ours, theirs = (json.loads(content) | {"padding": None, "truncation": None} for content in contents)
    return ours != theirs


def resize(P_ND: np.ndarray, N: int, rule: str) -> np.ndarray | None:
    """Return the learned positions P_ND resized to N rows; None if the rule is grid and either table is no grid.

    rule = cut: the first N rows. linear: linear interpolation from the first row to the last. grid: a square grid of
    patches in reading order is interpolated bilinearly between their centres; a class token before it does not change.
    For cut, P_ND must have N rows or more. For grid, both tables have a class token, or neither has.
    """
    old, D = P_ND.shape
    if rule == "cut":
        return P_ND[:N]
    if rule == "linear":
        place_N = np.linspace(0, old - 1, N)
        return np.stack([np.interp(place_N, np.arange(old), P_N) for P_N in P_ND.T], axis=1).astype(P_ND.dtype)
    (old_classes, old_side), (classes, side) = _class_tokens_and_side(old), _class_tokens_and_side(N)
    if old_classes != classes or 0 in (old_side, side):
        return None
    grid = P_ND[classes:].reshape(old_side, old_side, D)
    grid = np.asarray(jax.image.resize(grid, (side, side, D), "linear", antialias=False))
    return np.concatenate([P_ND[:classes], grid.reshape(-1, D)])


def _class_tokens_and_side(N: int) -> tuple[int, int]:
    """Return (0 or 1 class tokens, side of the square grid), with side 0 if there is no such grid."""
    grids = ((classes, math.isqrt(N - classes)) for classes in (0, 1))
    return next((grid for grid in grids if grid[0] + grid[1] ** 2 == N), (0, 0))
