"""Training that starts from another model's parameters instead of random ones (config.init_from)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from experiments.engine import config, errors, pretrained, trained

# Fields of `model` that may differ: they change how a model is computed or trained, not what it is.
FREE = ("dropout", "attention", "compute_dtype", "remat", "unroll")
TABLE = "position/P_ND"
# A published model's facts -> the config's fields that must say the same, by experiment.
FIELDS = {
    "language": {"tied_output": "text.tied_output", "transform": "text.transform", "N": "text.N"},
    "vision": {"patch": "image.patch", "answer": "image.head"},
}
HEAD = ("tied_output", "transform")  # facts of a head, which may be a fresh one


def load(settings: config.Settings, init: Callable[[jax.Array], dict], *, resumed: bool) -> dict[str, np.ndarray]:
    """The parameters to start from, by path, as config.init_from, init_fresh and resize_positions say; its table is
    printed. {} where a run starts from random ones, or is resumed.

    Raises:
      UserError: no such model; one of another architecture, with the fields that must change and the tensors.
    """
    path, resize = settings.init_from, settings.resize_positions
    fresh = tuple(filter(None, (part.strip() for part in settings.init_fresh.split(","))))
    if not path:
        if fresh or resize:
            raise errors.UserError("init_fresh and resize_positions have no meaning without init_from")
        return {}
    if resumed:
        return {}
    made = trained.open(path)
    expected = trained.flat(jax.eval_shape(init, jax.random.key(0)))
    _known(fresh, expected)
    asked, found = (_without(tree, fresh) for tree in (expected, trained.flat(made.params)))
    if made.table:
        print(made.table)
    if resize and TABLE in found and TABLE in asked:
        found[TABLE] = _resized(made, found[TABLE], asked[TABLE].shape[0])
    _compare(settings, made, fresh, found, asked)
    new = f", anew: {', '.join(fresh)}" if fresh else ""
    print(f"starting from {path}: {sum(x.size for x in found.values()):,} of its parameters{new}", flush=True)
    return found


def _compare(
    settings: config.Settings, made: trained.Trained, fresh: tuple[str, ...], found: dict, asked: dict
) -> None:
    """UserError with the fields of the config to change, and the tensors, where what was found is not what is asked."""
    wrong = _fields(settings, made, fresh, TABLE in found) + _vocabulary(found, asked)
    there, here = (len(tree[TABLE]) if TABLE in tree else 0 for tree in (found, asked))
    if there and here and there != here:
        wrong.append(f"or resize_positions = True to make {here} positions of its {there}")
    faults = trained.differences(found, asked)
    if wrong or faults:
        told = [f"set {'; '.join(wrong)}"] * bool(wrong)
        told += [trained.listed(faults, 3 if wrong else 24)] * bool(faults)  # where a field is wrong, many follow
        raise errors.UserError(f"init_from: {made.path} is not the model of this config: {'; '.join(told)}")


def placed(imported: Mapping[str, np.ndarray], params: Any) -> Any:
    """The parameters, on their devices, where the imported ones have taken the place of those with the same path."""
    paths = iter(trained.flat(params))

    def replaced(leaf: jax.Array) -> jax.Array:
        new = imported.get(next(paths))
        return leaf if new is None else jax.device_put(np.asarray(new, leaf.dtype), leaf.sharding)

    return jax.tree.map(replaced, params)


def _without(tree: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    return {path: leaf for path, leaf in tree.items() if not _in(path, parts)}


def _in(path: str, parts: tuple[str, ...]) -> bool:
    return any(path == part or path.startswith(part + "/") for part in parts)


def _known(fresh: tuple[str, ...], expected: Mapping[str, Any]) -> None:
    """UserError for a part to make anew that this model does not have."""
    for part in fresh:
        if not any(_in(path, (part,)) for path in expected):
            parts = sorted({path.split("/")[0] for path in expected})
            hint = config.nearest(part, parts)
            raise errors.UserError(
                f'init_fresh: this model has no part "{part}"{hint}; its parts are: {", ".join(parts)}'
            )


def _fields(settings: config.Settings, made: trained.Trained, fresh: tuple[str, ...], table: bool) -> list[str]:
    """'field = right value (it is this)' for every field of the config that is not as the model needs it."""
    values = settings.to_dict()
    right = {f"model.{name}": value for name, value in made.model.items() if name not in FREE}
    for fact, field in FIELDS.get(settings.experiment, {}).items():
        free = ("head" in fresh and fact in HEAD) or (fact == "N" and (settings.resize_positions or not table))
        if fact in made.facts and not free:
            right[field] = made.facts[fact]
    now = config.flat(values)
    return [f"{field} = {value!r} (it is {now[field]!r})" for field, value in right.items() if now.get(field) != value]


def _vocabulary(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What to say where the words are not those of the model."""
    there, here = (tree["embed/E_WD"].shape[0] if "embed/E_WD" in tree else 0 for tree in (found, asked))
    if 0 in (there, here) or there == here:
        return []
    return [f"text.tokenizer to that of its {there} words (this one has {here})"]


def _resized(made: trained.Trained, P_ND: np.ndarray, N: int) -> np.ndarray:
    """The position table for N positions: patches between their neighbours, words cut or stretched."""
    rule = "grid" if made.kind in ("image", "masked_image") else "cut" if N <= P_ND.shape[0] else "linear"
    if N != P_ND.shape[0]:
        print(f"the {P_ND.shape[0]} learned positions are made {N} by the rule {rule}")
    return pretrained.resize_positions(P_ND, N, rule)
