"""Warm start and fine-tuning: training begins with another model's parameters, not random ones (config.init_from)."""

import fnmatch
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.data import files as data_files, pretrained_tokenizer
from experiments.engine import by_name, config, errors, log, run
from experiments.pretrained import open_model, tensors
from tfm import lora, shapes

# Fields of `model` that may differ: they change how a model is computed or trained, not what it is.
FREE = ("dropout", "attention", "compute_dtype", "remat")
# Parts that init_fresh may name, and the fields of `model` that are then the config's own: positions can be dropped.
POSITIONS = ("position", "relative_position")
TABLE, WORDS, PATCHES = "position/P_N", "embed/E_W", "embed/W_DP"  # whose rows have D features, or E
# A model's facts -> the config's fields that must say the same, by experiment.
FIELDS = {
    "language": {"output": "text.head"},
    "text_classification": {"output": "text.head"},
    "vision": {"patch": "image.patch", "output": "image.head"},
    "masked_image": {"patch": "image.patch"},
}
TEXTS = ("language", "text_classification")  # whose tokenizer may be that of a model


def adopted(settings: config.Settings, folder: pathlib.Path | None) -> config.Settings:
    """Return the settings with the architecture and the tokenizer of the model of config.init_from, where the user has
    chosen no others (config.Settings.chosen), and print the changes. A run that goes on has those of `folder`."""
    values = settings.to_dict()
    path, experiment = values["init_from"], values.get("study", values)["experiment"]
    if not path:
        return settings
    now = config.flat(values)
    if folder is not None and (folder / "config.json").is_file():
        saved = config.flat(open_model.saved(folder / "config.json").get("config", {}))
        fields = {*FIELDS.get(experiment, {}).values(), "text.tokenizer"}
        right = {key: value for key, value in saved.items() if key.startswith("model.") or key in fields}
    else:
        model, fresh = open_model.open(path), parts(values["init_fresh"])
        right = needed(experiment, model, fresh) | ({} if "embed" in fresh else _tokenizer(experiment, model, now))
    chosen = settings.list_chosen()
    settings = settings.replace({key: value for key, value in right.items() if key in now and key not in chosen})
    after = config.flat(settings.to_dict())
    if changes := [f"{key} = {after[key]}" for key in now if after[key] != now[key]]:
        print(f"as {path} has it: {', '.join(changes)}", flush=True)
    return settings


def parts(init_fresh: str) -> tuple[str, ...]:
    """Return the parts of a model that config.init_fresh names."""
    return tuple(filter(None, (part.strip() for part in init_fresh.split(","))))


def needed(experiment: str, model: open_model.Trained, fresh: Sequence[str]) -> dict[str, Any]:
    """Return the settings of an experiment that the model needs, but for those of parts that begin anew."""
    free = {*FREE, *(part for part in fresh if part in POSITIONS)}
    right = {f"model.{name}": value for name, value in model.model.items() if name not in free}
    own_head = "head" in fresh or ("C" in model.facts) != (experiment == "text_classification")
    for fact, field in FIELDS.get(experiment, {}).items():
        if fact in model.facts and not (fact == "output" and own_head):
            right[field] = model.facts[fact]
    return right


def _tokenizer(experiment: str, model: open_model.Trained, now: Mapping[str, Any]) -> dict[str, str]:
    """Return text.tokenizer for the tokenizer of the model, if its files have another one than the config names."""
    there = open_model.tokenizers(model)[:1] if experiment in TEXTS else []
    usual = any(open_model.saved(file).get("kind") == now["text.tokenizer"] for file in there)
    return {"text.tokenizer": str(_place(there[0]))} if there and not usual else {}


def _place(file: pathlib.Path) -> pathlib.Path:
    """Return the path of a tokenizer as text.tokenizer names it."""
    return file.parent if file.name == "tokenizer.json" else file


def started(settings: config.Settings, work: run.Work, *, resumed: bool) -> run.Work:
    """Return the work with the initial parameters of config.init_from, after printing its lines about the data."""
    for line in work.lines:
        log.say(line, "\n")
    return work._replace(params={**work.params, **load(settings, work.task.init, resumed=resumed, files=work.files)})


def load(
    settings: config.Settings, init: Callable[[jax.Array], dict], *, resumed: bool, files: Mapping[str, bytes]
) -> dict[str, np.ndarray]:
    """Return the parameters to start from, by path, as config.init_from and init_fresh say, and print their table.

    {} if a run starts from random ones, or is resumed. Learned positions of another number are resized. files: those
    of the run's own tokenizer and data, by name. Raises UserError for a model of another architecture, with the fields
    that must change and the tensors, for ids that mean other tokens, and for numbers that are not finite.
    """
    path, fresh = settings.init_from, parts(settings.init_fresh)
    if fresh and not path:
        raise errors.UserError("init_fresh has no meaning without init_from")
    if resumed or not path:
        return {}
    model = open_model.open(path)
    expected = shapes.flat({k: node for k, node in jax.eval_shape(init, jax.random.key(0)).items() if k != lora.NODE})
    theirs = shapes.flat(model.params)
    known = sorted({path.split("/")[0] for path in expected})
    for part in fresh:
        if part not in POSITIONS and not _in(part, (*expected, *theirs)):
            hint = f"{by_name.suggest(part, known)}; its parts are: {', '.join(known)}"
            raise errors.UserError(f'init_fresh: this model has no part "{part}"{hint}')
    ours, start = (
        {path: leaf for path, leaf in tree.items() if not any(_in(part, [path]) for part in fresh)}
        for tree in (expected, theirs)
    )
    if model.table:
        print(model.table)
    start = _ordered(model, _resized(settings.to_dict(), model, start, ours), files)
    if wrong := _misfit(settings, model, fresh, start, ours, files):
        raise errors.UserError(f"init_from: {model.path} is not the model of this config: {'; '.join(wrong)}")
    open_model.finite(model.path, start)
    new, left = [part for part in fresh if _in(part, expected)], [part for part in fresh if not _in(part, expected)]
    sentence = f"starting from {path}: {sum(x.size for x in start.values()):,} of its parameters"
    sentence += f", anew: {', '.join(new)}" * bool(new) + f", left behind: {', '.join(left)}" * bool(left)
    print(sentence, flush=True)
    return start


def _in(part: str, paths: Any) -> bool:
    """Return True if one of the paths leads to this part of a model, or of its blocks, or into it."""
    return any(path == part or path.startswith((f"{part}/", f"blocks/{part}/")) for path in paths)


def _ordered(model: open_model.Trained, start: dict, files: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Return their head with its rows in the order of the data's classes. Raises UserError if the names differ."""
    theirs = open_model.class_names(model) if "head/G_CD" in start else None
    ours = json.loads(files.get(run.DATA, b"{}")).get("classes")
    if not theirs or not ours:
        return start
    there, here = (["".join(name.casefold().split()) for name in names] for names in (theirs, ours))
    if there == here:
        return start
    if sorted(there) != sorted(here) or len({*here}) < len(here):
        raise errors.UserError(
            f"init_from: the classes of {model.path} ({len(theirs)}: {data_files.join_names(theirs)}) are not those of "
            f"the data ({len(ours)}: {data_files.join_names(ours)}): name them alike, or set init_fresh = head for a"
            " new one"
        )
    order = [there.index(name) for name in here]
    print(f"the rows of the head of {model.path} are put into the order of the data's classes", flush=True)
    return start | {path: start[path][order] for path in ("head/G_CD", "head/b_C") if path in start}


def _rows(tree: Mapping[str, Any], table: str = TABLE) -> int:
    """Return how many positions, or tokens, have learned rows."""
    return next((leaf.shape[0] for path, leaf in tree.items() if path.startswith(table)), 0)


def _resized(config: Mapping[str, Any], model: open_model.Trained, start: dict, ours: dict) -> dict[str, np.ndarray]:
    """Return theirs with as many learned positions as ours: patches between their neighbours, tokens cut or stretched.
    As they are if images are cut into other patches, or patches make no grid."""
    there, here = _rows(start), _rows(ours)
    if there == here or 0 in (there, here):
        return start
    if PATCHES in ours:
        same = PATCHES in start and start[PATCHES].shape[1:] == ours[PATCHES].shape[1:]
        if not same or model.facts.get("patch") != config.get("image", {}).get("patch"):
            return start
    rule = "grid" if model.kind in ("image", "masked_image") else "cut" if here <= there else "linear"
    path = next(path for path in start if path.startswith(TABLE))
    table = resize(start[path], here, rule)
    if table is None:
        return start
    print(f"the {there} learned positions are made {here} by the rule {rule}")
    return start | {path: table}


def _misfit(
    settings: config.Settings, model: open_model.Trained, fresh: tuple, theirs: dict, ours: dict, files: Mapping
) -> list[str]:
    """Return the fields of the config to change, and the tensors that do not fit."""
    now = config.flat(settings.to_dict())
    right, tokenizers = needed(settings.experiment, model, fresh), open_model.tokenizers(model)
    wrong = {field: value for field, value in right.items() if now.get(field) != value}
    reasons = [f"set {field} = {value!r} (it is {now.get(field)!r})" for field, value in wrong.items()]
    (W, own_W), (N, own_N) = ([_rows(tree, table) for tree in (theirs, ours)] for table in (WORDS, TABLE))
    other_size = settings.experiment in TEXTS and 0 not in (W, own_W) and W != own_W
    if other_size or any("W" in shapes.letters(path) for path in ours) and _differ(files, tokenizers):
        place = (
            f" (set text.tokenizer = {_place(tokenizers[0])})" if tokenizers and settings.experiment in TEXTS else ""
        )
        reasons.append(f"it has another tokenizer, of {W} tokens, and this run one of {own_W}{place}")
    if PATCHES in ours and N != own_N and 0 not in (N, own_N):
        image = model.extras.get("image") or open_model.saved(model.path / run.DATA).get("image")
        reasons.append(f"it is for images of {image} pixels, which make {N} tokens, and these make {own_N}")
    if faults := tensors.differences(theirs, ours):
        head = all(fault.startswith("head/") for fault in faults)
        begin = "or set init_fresh = head" if head else "or name in init_fresh the parts to begin anew, or to leave out"
        shown = tensors.listed(faults, 3 if reasons else tensors.MOST_FAULTS)  # many follow from a wrong field
        reasons += [shown] if reasons and not head else [shown, begin]
    return reasons


def _differ(files: Mapping[str, bytes], tokenizers: Sequence[pathlib.Path]) -> bool:
    """Return True if an id means another token to the model. False if nobody knows."""
    here = [text for name, text in files.items() if any(fnmatch.fnmatch(name, p) for p in pretrained_tokenizer.FILES)]
    there = [pretrained_tokenizer.read_content(file) for file in tokenizers] if here else []
    return bool(there) and not any(_content(a) == _content(b) for a in here for b in there)


def _content(file: bytes) -> Any:
    """Return what a file says of its tokens: not its spaces, nor how texts were made equally long for some batch."""
    try:
        saved = json.loads(file)
    except ValueError:
        return file
    return {k: v for k, v in saved.items() if k not in ("padding", "truncation")} if isinstance(saved, dict) else saved


def resize(P_ND: np.ndarray, N: int, rule: str) -> np.ndarray | None:
    """Return the table for N positions.

    cut: its first N rows. linear: between the first and the last row, which stay, by straight lines.
    grid: the rows are a square grid of patches in reading order (and before them up to two class tokens, which stay, if
    there are more rows than a square has), interpolated bilinearly between the centres of patches. None if they are not
    two such grids with as many class tokens.
    """
    old = P_ND.shape[0]
    if rule == "cut":
        return P_ND[:N]
    if rule == "linear":
        return _between(np.linspace(0, old - 1, N), old).astype(P_ND.dtype) @ P_ND
    (first, old_side), (also_first, side) = _class_tokens_and_side(old), _class_tokens_and_side(N)
    if first != also_first or 0 in (old_side, side):
        return None
    one_way = _between((np.arange(side) + 0.5) * old_side / side - 0.5, old_side)
    both = np.kron(one_way, one_way).astype(P_ND.dtype)
    return np.concatenate([P_ND[:first], both @ P_ND[first:]])


def _between(place: np.ndarray, old: int) -> np.ndarray:
    """Return the matrix that interpolates `old` rows at the given places, clipped to the first and the last."""
    place = np.clip(place, 0, old - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(old)[None]))


def _class_tokens_and_side(N: int) -> tuple[int, int]:
    """Return (0 to 2 class tokens, side of the square grid), with side 0 if there is no such grid."""
    for first in (0, 1, 2):
        if N > first and math.isqrt(N - first) ** 2 == N - first:
            return first, math.isqrt(N - first)
    return 0, 0
