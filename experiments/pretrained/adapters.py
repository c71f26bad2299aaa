"""LoRA in a run (optim.lora, tfm/lora.py): train only adapters and the parts in init_fresh, such as a head.

The run writes the adapters and these parts to adapters.safetensors in its folder, named by their paths in our tree.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.config import by_name, disk, errors, settings as configs
from experiments.engine import freeze, run as runs
from experiments.pretrained import safetensors, tensors
from tfm import layout as layouts, lora, shapes

FILE = "adapters.safetensors"
FORM = "rank, rank:parts or rank:parts:alpha, such as 8, 8:score,value or 8:Uq_HKD,Uv_HKD:16"


def parse(text: str) -> tuple[int, tuple[str, ...], float]:
    """Return (rank, parts, alpha) of optim.lora, such as "8:score,value:16".

    By default the parts are the blocks, and alpha is the rank. Raises UserError for a text of another form than FORM,
    and for an alpha that is 0 or not finite.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([\w, ]*))?(?::(\d+(?:\.\d+)?))?", text)
    rank, parts, alpha = match.groups() if match else ("", "", "")
    if not match or not 0 < (scale := float(alpha or rank)) <= configs.LARGEST_FLOAT:
        raise errors.UserError(f"optim.lora = {text!r} must have the form {FORM}, with a finite alpha above 0.")
    return int(rank), tuple(part.strip() for part in (parts or shapes.STACKED).split(",")), scale


def split_parts(init_fresh: str) -> tuple[str, ...]:
    """Return the names in init_fresh: ("head", "position") for "head, position"."""
    return tuple(filter(None, (part.strip() for part in init_fresh.split(","))))


def merge(params: dict, text: str) -> dict:
    """Return the parameters with their adapters, if any, merged into the weights, and no longer as separate arrays.

    text: the run's optim.lora, which has the factor alpha of the adapters (see `parse`).
    """
    if lora.NODE not in params:
        return params
    return jax.device_get(jax.jit(functools.partial(lora.merge, alpha=parse(text)[2]))(params))


def prepare_work(settings: configs.Settings, experiment: ModuleType, devices: Mesh) -> runs.Work:
    """Return the Work that the experiment prepares, with adapters if optim.lora is set.

    experiment: a module with a function `prepare`. If its Work has no `figures`, the run draws the loss by step.
    Raises UserError if `prepare` returns no Work.
    """
    work = experiment.prepare(settings, devices)
    if not isinstance(work, runs.Work):
        raise errors.UserError(f'the experiment "{settings.experiment}": prepare must return a runs.Work')

    if work.kind not in ("", settings.experiment):
        data = json.loads(work.files.get(runs.DATA, b"{}")) | {"kind": work.kind}
        work = work._replace(files={**work.files, runs.DATA: json.dumps(data).encode()})

    def draw_loss(work: runs.Work, params: Any, folder: pathlib.Path, rows: list[dict]) -> list[pathlib.Path]:
        from experiments.figures import plots  # matplotlib is slow to import

        return [plots.loss_curves(folder / "figures" / "loss.png", rows, unit="mean", title=settings.experiment)]

    lines = [*work.lines, *describe_positions(settings.to_dict().get("model", {}))]
    return add_adapters(settings, work._replace(figures=work.figures or draw_loss, lines=lines))


def describe_positions(m: Mapping[str, Any]) -> list[str]:
    """Return a line to print if the section `model` has both absolute and relative positions; else []."""
    absolute, relative = m.get("position", "none"), m.get("relative_position", "none")
    if "none" in (absolute, relative):
        return []
    hint = f"for {relative} alone, set model.position = none"
    return [f"  positions: model.position = {absolute} and model.relative_position = {relative}, both; {hint}"]


def add_adapters(settings: configs.Settings, work: runs.Work) -> runs.Work:
    """Return the work with the adapters of optim.lora; unchanged without optim.lora.

    Raises UserError if no trained model is loaded (init_from), or if optim.lora is invalid or names an unknown part.
    """
    text, task = settings.optim.lora, work.task
    if not text:
        return work
    untrained = not settings.init_from and not work.params
    errors.refuse((untrained, f"optim.lora = {text} adapts a trained model. Set init_from to its path."))
    rank, parts, alpha = parse(text)
    effective = functools.partial(lora.merge, alpha=alpha)
    paths = shapes.flat(jax.eval_shape(task.init, jax.random.key(0)))
    matrices = {path: path.split("/") for path in paths if shapes.is_matrix(path)}
    names = sorted({name for path in matrices.values() for name in path})
    for part in parts:
        by_name.choose("matrix or part in optim.lora:", part, dict.fromkeys(names, ""))
    chosen = {path for path, nodes in matrices.items() if not {*parts}.isdisjoint(nodes)}

    def init(key: jax.Array, **numbers: Any) -> dict:
        return lora.init(key, task.init(key, **numbers), rank=rank, select=chosen.__contains__)

    def loss(
        params: dict, batch: dict, *, key_B: Any = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[Mapping, dict]:
        return task.loss(effective(params, layout=layout), batch, key_B=key_B, layout=layout)

    def with_effective(function: Callable | None) -> Callable | None:
        return function and (lambda params, *rest: function(effective(params), *rest))

    frozen = ("*", f"!{lora.NODE}", *(f"!{part}" for part in split_parts(settings.init_fresh)))

    def figures(adapted: runs.Work, params: dict, folder: pathlib.Path, rows: list[dict]) -> Any:
        fixed = freeze.find_frozen(params, frozen)
        with runs.file_errors(folder):
            arrays = {path: leaf for path, leaf in shapes.flat(params).items() if path not in fixed}
            safetensors.write(folder / FILE, arrays)
        yield folder / FILE
        yield from work.figures(work, merge(params, text), folder, rows)

    adapted = task._replace(init=init, loss=loss, frozen=frozen, probe=with_effective(task.probe))
    return work._replace(task=adapted, figures=figures, apply=with_effective(work.apply))


def write_peft(
    folder: pathlib.Path, out: pathlib.Path, *, settings: Mapping[str, Any], lines: list[tensors.Line]
) -> str:
    """Write the adapters of a run (its folder and settings) into `out`, in peft's format for a published model.

    lines: which of our matrices each tensor of the published model holds. Return "", or the reason why nothing is
    written: a tensor holds several of our matrices.
    """
    arrays, (rank, _, alpha) = safetensors.read(folder / FILE), parse(settings["optim"]["lora"])
    nodes: dict[str, dict[str, str]] = {}  # path of a matrix -> {"A": name of the array, "B": ...}
    for name in arrays:
        top, _, path = name.partition("/")
        if top == lora.NODE:
            path, _, side = path.rpartition("/")
            nodes.setdefault(path, {})[side[0]] = name
    written, targets, trained_parts = [], [], []
    for line in lines:
        if len(line.ours) == 1 and (sides := nodes.pop(line.ours[0], {})):
            place = line.theirs.removesuffix(".weight")
            targets += tensors.names(tensors.Line(place, (sides["A"],)), arrays)
            for side, name in sides.items():
                written.append(tensors.Line(f"{place}.lora_{side}.weight", (name,), transposed=side == "A"))
        elif {*line.ours} <= arrays.keys():
            trained_parts.append(line.theirs.rpartition(".")[0])
            written.append(line)
    if nodes:
        return f"no tensor of its family holds {', '.join(nodes)} alone"
    theirs = {f"base_model.model.{name}": x for name, x in tensors.write(written, arrays).items()}
    safetensors.write(out / "adapter_model.safetensors", theirs)
    peft_config = {
        "peft_type": "LORA",
        "base_model_name_or_path": settings["init_from"],
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "modules_to_save": sorted({*trained_parts}) or None,
        "bias": "none",
    }
    disk.write_json(out / "adapter_config.json", peft_config)
    return ""
