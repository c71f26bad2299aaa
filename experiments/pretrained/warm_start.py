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
# A published model's facts -> the config's fields that must say the same, by experiment.
FIELDS = {
    "language": {"output": "text.head"},
    "text_classification": {"output": "text.head"},
    "vision": {"patch": "image.patch", "answer": "image.head"},
    "masked_image": {"patch": "image.patch"},
}
OWN = {kind: (*fields.values(), "text.tokenizer") for kind, fields in FIELDS.items()}
WORDED = ("language", "text_classification")  # which may have the words of a model


def adopted(settings: config.Settings, folder: pathlib.Path | None) -> config.Settings:
    """The settings, with the architecture and the words of the model of config.init_from where nobody chose others
    (config.Settings.chosen), which is said. A run that goes on has those with which it began, which `folder` tells."""
    if not (path := settings.to_dict()["init_from"]):
        return settings
    now, kind = config.flat(settings.to_dict()), settings.to_dict().get("study", settings.to_dict())["experiment"]
    if folder is not None and (folder / "config.json").is_file():
        saved = config.flat(open_model.saved(folder / "config.json").get("config", {}))
        right = {key: value for key, value in saved.items() if key.startswith("model.") or key in OWN.get(kind, ())}
    else:
        model = open_model.open(path)
        fresh = parts(settings.to_dict()["init_fresh"])
        right = needed(kind, model, fresh) | ({} if "embed" in fresh else words(kind, model, now))
    own = now.keys() - settings.chosen()
    settings = settings.changed({key: value for key, value in right.items() if key in own})
    found = config.flat(settings.to_dict())
    if changes := [f"{key} = {found[key]}" for key in now if found[key] != now[key]]:
        print(f"as {path} has it: {', '.join(changes)}", flush=True)
    return settings


def parts(init_fresh: str) -> tuple[str, ...]:
    """The parts of a model that config.init_fresh names."""
    return tuple(filter(None, (part.strip() for part in init_fresh.split(","))))


def needed(kind: str, model: open_model.Trained, fresh: tuple[str, ...]) -> dict[str, Any]:
    """The settings of an experiment that the model asks for, but for those of a fresh head, or of fresh positions."""
    free = {*FREE, *(part for part in fresh if part in POSITIONS)}
    right = {f"model.{name}": value for name, value in model.model.items() if name not in free}
    for fact, field in FIELDS.get(kind, {}).items():
        other = "head" in fresh or ("C" in model.facts) != (kind == "text_classification")
        if fact in model.facts and not (fact == "output" and other):
            right[field] = model.facts[fact]
    return right


def words(kind: str, model: open_model.Trained, now: Mapping[str, Any]) -> dict[str, str]:
    """text.tokenizer for the words of the model, where its files tell them and the usual ones are others."""
    there = open_model.tokenizers(model)[:1] if kind in WORDED else []
    usual = any(open_model.saved(file).get("kind") == now["text.tokenizer"] for file in there)
    return {"text.tokenizer": str(_place(there[0]))} if there and not usual else {}


def _place(file: pathlib.Path) -> pathlib.Path:
    """Where a tokenizer is, as text.tokenizer names it."""
    return file.parent if file.name == "tokenizer.json" else file


def started(settings: config.Settings, work: run.Work, *, resumed: bool) -> run.Work:
    """Return the work with the initial parameters of config.init_from, after printing its lines about the data."""
    for line in work.lines:
        log.say(line, "\n")
    return work._replace(params={**work.params, **load(settings, work.task.init, resumed=resumed, files=work.files)})


def load(
    settings: config.Settings, init: Callable[[jax.Array], dict], *, resumed: bool, files: Mapping[str, bytes]
) -> dict[str, np.ndarray]:
    """The parameters to start from, by path, as config.init_from and init_fresh say; its table is printed.

    {} where a run starts from random ones, or is resumed. Learned positions of another number are resized, which is
    said. files: those of the run's own words, by name. UserError: no such model; one of another architecture, with the
    fields that must change and the tensors; one whose ids mean other words; numbers that are not finite.
    """
    path = settings.init_from
    fresh = parts(settings.init_fresh)
    if fresh and not path:
        raise errors.UserError("init_fresh has no meaning without init_from")
    if resumed or not path:
        return {}
    model = open_model.open(path)
    expected = {name: node for name, node in jax.eval_shape(init, jax.random.key(0)).items() if name != lora.NODE}
    expected, theirs = shapes.flat(expected), shapes.flat(model.params)
    for part in fresh:
        if part not in POSITIONS and not _any(part, (*expected, *theirs)):
            right = sorted({path.split("/")[0] for path in expected})
            hint = f"{by_name.nearest(part, right)}; its parts are: {', '.join(right)}"
            raise errors.UserError(f'init_fresh: this model has no part "{part}"{hint}')
    ours, start = (
        {path: leaf for path, leaf in tree.items() if not any(_any(part, [path]) for part in fresh)}
        for tree in (expected, theirs)
    )
    if model.table:
        print(model.table)
    start = _ordered(model, _resized(settings, model, start, ours), files)
    if wrong := _misfit(settings, model, fresh, start, ours, files):
        raise errors.UserError(f"init_from: {model.path} is not the model of this config: {wrong}")
    open_model.finite(model.path, start)
    new = [part for part in fresh if _any(part, expected)]
    behind = sorted({*fresh} - {*new})
    sentence = f"starting from {path}: {sum(x.size for x in start.values()):,} of its parameters"
    sentence += f", anew: {', '.join(new)}" * bool(new) + f", left behind: {', '.join(behind)}" * bool(behind)
    print(sentence, flush=True)
    return start


def _ordered(model: open_model.Trained, start: dict, files: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Their head with its rows in the order of the data's classes, by their names. Raises UserError for other names."""
    theirs = open_model.class_names(model) if "head/G_CD" in start else None
    ours = json.loads(files.get(run.DATA, b"{}")).get("classes")
    if not theirs or not ours or _alike(theirs) == _alike(ours):
        return start
    if sorted(_alike(theirs)) != sorted(_alike(ours)) or len({*_alike(ours)}) < len(ours):
        there, here = (f"{len(names)}: {data_files.listed(names)}" for names in (theirs, ours))
        raise errors.UserError(
            f"init_from: the classes of {model.path} ({there}) are not those of the data ({here}): name them alike, or "
            "begin with a new head, init_fresh = head"
        )
    order = [_alike(theirs).index(name) for name in _alike(ours)]
    print(f"the rows of the head of {model.path} are put into the order of the data's classes", flush=True)
    return start | {path: start[path][order] for path in ("head/G_CD", "head/b_C") if path in start}


def _alike(names: Sequence[str]) -> list[str]:
    """Without case and spaces."""
    return ["".join(name.casefold().split()) for name in names]


def _any(part: str, paths: Any) -> bool:
    """Whether one of the paths leads to this part of a model, or of its blocks, or into it."""
    return any(path == part or path.startswith((f"{part}/", f"blocks/{part}/")) for path in paths)


def _rows(tree: Mapping[str, Any], table: str = TABLE) -> int:
    """How many positions, or words, have learned rows; 0: there are none."""
    return next((leaf.shape[0] for path, leaf in tree.items() if path.startswith(table)), 0)


def _resized(settings: config.Settings, model: open_model.Trained, start: dict, ours: dict) -> dict[str, np.ndarray]:
    """Theirs with as many learned positions as ours: patches between their neighbours, words cut or stretched. As they
    are where images are cut into other patches, or patches make no grid."""
    there, here = _rows(start), _rows(ours)
    if there == here or 0 in (there, here):
        return start
    if PATCHES in ours:
        patch = settings.to_dict().get("image", {}).get("patch")
        same = PATCHES in start and start[PATCHES].shape[1:] == ours[PATCHES].shape[1:]
        if not same or model.facts.get("patch") != patch:
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
) -> str:
    """The fields of the config to change, and the tensors, where theirs are not what is asked; '' where they are."""
    reasons = _fields(settings, model, fresh)
    there, here = (_rows(tree, WORDS) for tree in (theirs, ours))
    of_words, files_there = settings.experiment in WORDED, open_model.tokenizers(model)
    tokenizer = [_place(file) for file in files_there[:1]]
    fewer_or_more = of_words and 0 not in (there, here) and there != here
    if fewer_or_more:
        which = f"= {tokenizer[0]}, for" if tokenizer else "to that of"
        reasons.append(f"text.tokenizer {which} its {there} words (this one has {here})")
    reasons = [f"set {'; '.join(reasons)}"] if reasons else []
    reasons += filter(None, [_images(model, theirs, ours)])
    if not fewer_or_more and any("W" in shapes.letters(path) for path in ours) and _others(files, files_there):
        reasons.append(
            f"its words are not those of this run: set text.tokenizer = {tokenizer[0]}"
            if of_words
            else "its subwords are not those of this run, which makes them from its own text"
        )
    faults = tensors.differences(theirs, ours)
    if not faults:
        return "; ".join(reasons)
    shown = tensors.listed(faults, 3 if reasons else 24)  # where a field is wrong, many follow
    of_head = all(fault.startswith("head/") for fault in faults)
    if of_head and not fewer_or_more and not _fields(settings, model, (*fresh, "head")):
        shown += "; or init_fresh = head to begin with a new head"
    elif not reasons:
        shown += "; init_fresh may name parts to begin anew, or to leave behind"
    return "; ".join([*reasons, shown])


def _fields(settings: config.Settings, model: open_model.Trained, fresh: tuple[str, ...]) -> list[str]:
    """'field = right value (it is this)' for every field of the config that is not as the model needs it."""
    right = needed(settings.experiment, model, fresh)
    now = config.flat(settings.to_dict())
    return [f"{field} = {value!r} (it is {now[field]!r})" for field, value in right.items() if now.get(field) != value]


def _others(files: Mapping[str, bytes], files_there: list[pathlib.Path]) -> bool:
    """Whether an id means another word to the model; not so where nobody knows."""
    here = [text for name, text in files.items() if any(fnmatch.fnmatch(name, p) for p in pretrained_tokenizer.FILES)]
    there = [pretrained_tokenizer.content_of(file) for file in files_there] if here else []
    return bool(there) and not any(_content(a) == _content(b) for a in here for b in there)


def _content(file: bytes) -> Any:
    """What a file says of its words: not its spaces, nor how texts were made equally long for some batch."""
    try:
        saved = json.loads(file)
    except (ValueError, RecursionError):
        return file
    return {k: v for k, v in saved.items() if k not in ("padding", "truncation")} if isinstance(saved, dict) else saved


def _images(model: open_model.Trained, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What to say where images have another number of patches."""
    there, here = _rows(theirs), _rows(ours)
    if PATCHES not in ours or 0 in (there, here) or there == here:
        return ""
    match model.extras.get("image") or open_model.saved(model.path / "data.json").get("image"), model.facts:
        case [Y, X, *_], {"Z": Z}:
            return f"it is for images of {Y} x {X} pixels and {Z} channel{'s' * (Z > 1)}"
    return f"it is for images that make {there} tokens, and these make {here}"  # no file tells


def resize(P_ND: np.ndarray, N: int, rule: str) -> np.ndarray | None:
    """The table for N positions.

    cut: its first N rows. linear: between the first and the last row, which stay, by straight lines.
    grid: the rows are a square grid of patches in reading order (and before them a class token, where there is one
    more row than a square has; it stays), interpolated bilinearly between the centres of patches. None where they
    are not two such grids, both with a class token or both without.
    """
    old = P_ND.shape[0]
    if rule == "cut":
        return P_ND[:N]
    if rule == "linear":
        return _between(np.linspace(0, old - 1, N), old).astype(P_ND.dtype) @ P_ND
    (first, old_side), (also_first, side) = _class_token_and_side(old), _class_token_and_side(N)
    if first != also_first or 0 in (old_side, side):
        return None
    one_way = _between((np.arange(side) + 0.5) * old_side / side - 0.5, old_side)
    both = np.kron(one_way, one_way).astype(P_ND.dtype)
    return np.concatenate([P_ND[:first], both @ P_ND[first:]])


def _between(place: np.ndarray, old: int) -> np.ndarray:
    """The matrix that interpolates `old` rows at the given places, which are held between the first and the last."""
    place = np.clip(place, 0, old - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(old)[None]))


def _class_token_and_side(N: int) -> tuple[int, int]:
    """(0 to 2 class tokens, side of the square grid), with side 0 where there is no such grid."""
    for first in (0, 1, 2):
        if N > first and math.isqrt(N - first) ** 2 == N - first:
            return first, math.isqrt(N - first)
    return 0, 0
