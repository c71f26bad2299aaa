"""LoRA in a run (optim.lora, tfm/lora.py): of an experiment's model only adapters are trained, and parts that begin
anew (init_fresh), as a head. The run's folder gets these alone as adapters.safetensors, by the paths of our tree.
"""

import functools
import pathlib
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from experiments.engine import by_name, config, disk, errors, optim, run
from experiments.pretrained import safetensors, tensors
from tfm import layout as layouts, lora, shapes

FILE = "adapters.safetensors"
FORM = "rank, rank:where or rank:where:alpha, as 8, 8:score,value or 8:Uq_HKD,Uv_HKD:16"


def read(text: str) -> tuple[int, tuple[str, ...], float]:
    """Return (rank, where, alpha) of optim.lora: without `where`, of all matrices of the blocks; without alpha, of the
    rank."""
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([\w, ]*))?(?::(\d+(?:\.\d+)?))?", text)
    if not match:
        raise errors.UserError(f"optim.lora = {text!r} is not of the form {FORM}")
    rank, where, alpha = match.groups()
    return int(rank), tuple(part.strip() for part in (where or shapes.STACKED).split(",")), float(alpha or rank)


def merged(params: dict, text: str) -> dict:
    """Return the effective weights of a run with this optim.lora, as numpy arrays; those of another run as they are."""
    if lora.NODE not in params:
        return params
    return jax.device_get(jax.jit(functools.partial(lora.merge, alpha=read(text)[2]))(params))


def prepared(settings: config.Settings, experiment: ModuleType, devices: Mesh) -> run.Work:
    """What the experiment makes of its config: with adapters where it has some, with the loss for a figure where it
    draws none. UserError where one's own makes no Work."""
    work = experiment.prepare(settings, devices)
    if not isinstance(work, run.Work):
        raise errors.UserError(
            f'the experiment "{settings.experiment}": prepare must return a run.Work, and it does not'
        )

    def loss(params: Any, folder: pathlib.Path, rows: list[dict]) -> list[pathlib.Path]:
        from experiments.figures import plots  # matplotlib, only where something is drawn

        return [plots.loss_curves(folder / "figures" / "loss.png", rows, unit="mean", title=settings.experiment)]

    return adapted(settings, work._replace(figures=work.figures or loss))


def adapted(settings: config.Settings, work: run.Work) -> run.Work:
    """Return the work with adapters, as optim.lora says. Raises UserError if it means no matrix of the model."""
    text, task = settings.optim.lora, work.task
    if not text:
        return work
    if not settings.init_from and not work.params:
        raise errors.UserError("optim.lora adapts a trained model: say which one with init_from")
    rank, where, alpha = read(text)
    effective = functools.partial(lora.merge, alpha=alpha)
    paths = shapes.flat(jax.eval_shape(task.init, jax.random.key(0)))
    matrices = {path: path.split("/") for path in paths if shapes.is_matrix(path)}
    names = sorted({name for parts in matrices.values() for name in parts})
    for part in where:
        if part not in names:
            hint = f"{by_name.suggest(part, names)}; the right ones are: {', '.join(names)}"
            raise errors.UserError(f'optim.lora: no matrix is called "{part}", or lies in a part of that name{hint}')

    def init(key: jax.Array, **numbers: Any) -> dict:
        chosen = lambda path: path in matrices and not {*where}.isdisjoint(matrices[path])  # noqa: E731
        return lora.init(key, task.init(key, **numbers), rank=rank, chosen=chosen)

    def loss(
        params: dict, batch: dict, *, key_B: Any = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[Mapping, dict]:
        return task.loss(effective(params, layout=layout), batch, key_B=key_B, layout=layout)

    def through(function: Callable | None) -> Callable | None:
        return function and (lambda params, *rest: function(effective(params), *rest))

    fresh = [part.strip() for part in settings.init_fresh.split(",")]
    frozen = ("*", f"!{lora.NODE}", *(f"!{part}" for part in fresh if part))

    def figures(params: dict, folder: pathlib.Path, rows: list[dict]) -> Any:
        kept = shapes.flat(optim.select_trained(params, frozen))
        with run.file_errors(folder):
            safetensors.write(folder / FILE, {path: leaf for path, leaf in shapes.flat(params).items() if kept[path]})
        yield folder / FILE
        yield from work.figures(merged(params, text), folder, rows)

    seen = {"probe": through(task.probe), "maps": through(task.maps)}
    own = task._replace(init=init, loss=loss, frozen=frozen, **seen)
    return work._replace(task=own, figures=figures, apply=through(work.apply))


def as_peft(folder: pathlib.Path, out: pathlib.Path, *, settings: Mapping[str, Any], rules: list[tensors.Line]) -> str:
    """Write the adapters of a run (its folder, its config) as peft has them, for the published model that it began
    with. rules: those by which that model is written. Return why not, if it has several of the matrices in one tensor.
    """
    kept, (rank, _, alpha) = safetensors.read(folder / FILE), read(settings["optim"]["lora"])
    nodes: dict[str, dict[str, str]] = {}
    for name in kept:
        if name.startswith(f"{lora.NODE}/"):
            path, _, side = name.removeprefix(f"{lora.NODE}/").rpartition("/")
            nodes.setdefault(path, {})[side[0]] = name
    lines, targets, whole = [], [], []
    for line in rules:
        if len(line.ours) == 1 and (sides := nodes.pop(line.ours[0], {})):
            place = line.theirs.removesuffix(".weight")
            targets.append(place)
            for side, name in sides.items():
                axis = next(one for one in line.axes.split() if {*one} == {*name.rpartition("_")[2]} - {"L"})
                axes = f"L {axis}" if side == "A" else f"{axis} L"
                lines.append(tensors.Line(f"{place}.lora_{side}.weight", axes, (name,)))
        elif {*line.ours} <= kept.keys():
            whole.append(line.theirs.split(".")[0])
            lines.append(line)
    if nodes:
        return f"its family has no tensor of its own for {', '.join(nodes)}"
    sizes = shapes.check(traverse_util.unflatten_dict(kept, sep="/"))
    arrays = tensors.write(lines, kept, settings["model"] | sizes)
    safetensors.write(out / "adapter_model.safetensors", {f"base_model.model.{k}": x for k, x in arrays.items()})
    said = {"peft_type": "LORA", "base_model_name_or_path": settings["init_from"], "r": rank, "lora_alpha": alpha}
    said["target_modules"] = [name for place in targets for name in tensors.names(place, sizes["M"])]
    disk.write_json(out / "adapter_config.json", said | {"modules_to_save": sorted({*whole}) or None, "bias": "none"})
    return ""
