"""Warm start and fine-tuning: training begins with another model's parameters, not random ones (config.init_from)."""

import fnmatch
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from experiments.data import pretrained_tokenizer
from experiments.engine import by_name, config, disk, errors
from experiments.pretrained import open_model, positions

# Fields of `model` that may differ: they change how a model is computed or trained, not what it is.
FREE = ("dropout", "attention", "compute_dtype", "remat", "unroll")
TABLE, PATCHES = "position/P_ND", "embed/W_DP"
# A published model's facts -> the config's fields that must say the same, by experiment.
FIELDS = {
    "language": {"tied_output": "text.tied_output", "transform": "text.transform", "N": "text.N"},
    "vision": {"patch": "image.patch", "answer": "image.head"},
    "masked_image": {"patch": "image.patch"},
}
HEAD = ("tied_output", "transform")  # facts of a head, which may be a fresh one


def load(
    settings: config.Settings,
    init: Callable[[jax.Array], dict],
    *,
    resumed: bool,
    files: Mapping[str, bytes] | None = None,
) -> dict[str, np.ndarray]:
    """The parameters to start from, by path, as config.init_from and init_fresh say; its table is printed.

    {} where a run starts from random ones, or is resumed. Learned positions of another number are resized, which is
    said. files: those of the run's own words, by name.

    Raises:
      UserError: no such model; one of another architecture, with the fields that must change and the tensors; one whose
        ids mean other words; numbers that are not finite.
    """
    path = settings.init_from
    fresh = tuple(filter(None, (part.strip() for part in settings.init_fresh.split(","))))
    if not path:
        if fresh:
            raise errors.UserError("init_fresh has no meaning without init_from")
        return {}
    if resumed:
        return {}
    model = open_model.open(path)
    expected, theirs = open_model.flat(jax.eval_shape(init, jax.random.key(0))), open_model.flat(model.params)
    _known(fresh, expected, theirs)
    ours, start = (_without(tree, fresh) for tree in (expected, theirs))
    if model.table:
        print(model.table)
    needed = _rows(start) != _rows(ours) and 0 not in (_rows(start), _rows(ours))
    same = PATCHES in start and start[PATCHES].shape[1:] == ours.get(PATCHES, start[PATCHES]).shape[1:]
    same = same and model.facts.get("patch") == settings.to_dict().get("image", {}).get("patch")
    if needed and (PATCHES not in ours or (same and _grids(start[TABLE], _rows(ours)))):
        start[TABLE] = _resized(model, start[TABLE], _rows(ours))
    _compare(settings, model, fresh, start, ours, files or {})
    open_model.finite(model.path, start)
    new = [part for part in fresh if any(_in(name, (part,)) for name in expected)]
    sentence = [f"anew: {', '.join(new)}"] * bool(new)
    sentence += [f"left behind: {', '.join(sorted({*fresh} - {*new}))}"] * (len(new) < len(fresh))
    sentence = [f"starting from {path}: {sum(x.size for x in start.values()):,} of its parameters", *sentence]
    print(", ".join(sentence), flush=True)
    return start


def _compare(
    settings: config.Settings,
    model: open_model.Trained,
    fresh: tuple[str, ...],
    theirs: dict,
    ours: dict,
    files: Mapping[str, bytes],
) -> None:
    """UserError with the fields of the config to change, and the tensors, where what was found is not what is asked."""

    def to_set(fresh: tuple[str, ...]) -> list[str]:
        return _fields(settings, model, fresh) + _vocabulary(settings, model, theirs, ours)

    wrong, faults = to_set(fresh), open_model.differences(theirs, ours)
    reasons = [f"set {'; '.join(wrong)}"] if wrong else []
    reasons += [_images(model, theirs, ours), "" if _numbered(wrong) else _words(settings, model, ours, files)]
    reasons = [part for part in reasons if part]
    shown = open_model.listed(faults, 3 if reasons else 24)  # where a field is wrong, many follow
    if faults and all(_in(fault, ("head",)) for fault in faults) and not to_set((*fresh, "head")):
        shown += "; or init_fresh = head to begin with a new head"
    elif faults and not reasons:
        shown += "; init_fresh may name parts to begin anew, or to leave behind"
    if reasons or faults:
        what = "; ".join(reasons + [shown] * bool(faults))
        raise errors.UserError(f"init_from: {model.path} is not the model of this config: {what}")


def _without(tree: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    return {path: leaf for path, leaf in tree.items() if not _in(path, parts)}


def _in(path: str, parts: tuple[str, ...]) -> bool:
    return any(path == part or path.startswith(part + "/") for part in parts)


def _rows(tree: Mapping[str, Any]) -> int:
    """How many positions have learned rows; 0: there are none."""
    return tree[TABLE].shape[0] if TABLE in tree else 0


def _known(fresh: tuple[str, ...], expected: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """UserError for a part to make anew, or to leave behind, that neither this model nor the other one has."""
    for part in fresh:
        if not any(_in(path, (part,)) for path in (*expected, *theirs)):
            parts = sorted({path.split("/")[0] for path in expected})
            hint = by_name.nearest(part, parts)
            raise errors.UserError(
                f'init_fresh: this model has no part "{part}"{hint}; its parts are: {", ".join(parts)}'
            )


def _fields(settings: config.Settings, model: open_model.Trained, fresh: tuple[str, ...]) -> list[str]:
    """'field = right value (it is this)' for every field of the config that is not as the model needs it."""
    values = settings.to_dict()
    right = {f"model.{name}": value for name, value in model.model.items() if name not in FREE}
    for fact, field in FIELDS.get(settings.experiment, {}).items():
        free = ("head" in fresh and fact in HEAD) or fact == "N"
        if fact in model.facts and not free:
            right[field] = model.facts[fact]
    now = config.flat(values)
    return [f"{field} = {value!r} (it is {now[field]!r})" for field, value in right.items() if now.get(field) != value]


def _vocabulary(
    settings: config.Settings, model: open_model.Trained, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[str]:
    """What to say where the words are more or fewer than those of the model."""
    there, here = (tree["embed/E_WD"].shape[0] if "embed/E_WD" in tree else 0 for tree in (theirs, ours))
    if settings.experiment != "language" or 0 in (there, here) or there == here:
        return []
    which = f"= {_tokenizer(model)}, for" if open_model.tokenizers(model) else "to that of"
    return [f"text.tokenizer {which} its {there} words (this one has {here})"]


def _tokenizer(model: open_model.Trained) -> pathlib.Path:
    """What text.tokenizer has to be for the words of a model that has a file of them."""
    file = open_model.tokenizers(model)[0]
    return file.parent if file.name == "tokenizer.json" else file


def _numbered(wrong: list[str]) -> bool:
    """Whether the number of words tells already that they are others."""
    return any(field.startswith("text.tokenizer") for field in wrong)


def _words(
    settings: config.Settings, model: open_model.Trained, asked: Mapping[str, Any], kept: Mapping[str, bytes]
) -> str:
    """What to say where an id means another word to the model; '' where no row is taken from it, or nobody knows."""
    ours = [content for name, content in kept.items() for p in pretrained_tokenizer.FILES if fnmatch.fnmatch(name, p)]
    rows = any("W" in path.rsplit("_", 1)[-1] for path in asked)
    theirs = [_bytes(file) for file in open_model.tokenizers(model)] if ours and rows else []
    if not theirs or any(_content(a) == _content(b) for a in ours for b in theirs):
        return ""
    if settings.experiment != "language":
        return "its subwords are not those of this run, which makes them from its own text"
    return f"its words are not those of this run: set text.tokenizer = {_tokenizer(model)}"


def _bytes(file: pathlib.Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise errors.UserError(f"{file} cannot be read: {error.strerror or error}") from error


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
    try:
        saved = model.extras.get("image") or json.loads(disk.read_text(model.path / "data.json"))["image"]
        size, Z = f"{saved[0]} x {saved[1]} pixels", model.facts["Z"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):  # no file tells, or none that is whole
        return f"it is for images that make {there} tokens, and these make {here}"
    return f"it is for images of {size} and {Z} channel{'s' * (Z > 1)}"


def _grids(P_ND: np.ndarray, N: int) -> bool:
    try:
        return positions.resize(P_ND, N, "grid").shape[0] == N
    except errors.UserError:
        return False


def _resized(model: open_model.Trained, P_ND: np.ndarray, N: int) -> np.ndarray:
    """The position table for N positions: patches between their neighbours, words cut or stretched."""
    rule = "grid" if model.kind in ("image", "masked_image") else "cut" if N <= P_ND.shape[0] else "linear"
    print(f"the {P_ND.shape[0]} learned positions are made {N} by the rule {rule}")
    return positions.resize(P_ND, N, rule)
