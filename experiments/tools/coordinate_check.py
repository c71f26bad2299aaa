"""Measure how the activations of a config's model depend on its width or depth, in the first steps of training.

python -m experiments.tools.coordinate_check --config=FILE --widths=64,128,256,512 --set=model.mup=64
coordinate_check.run("FILE", set=("model.mup=64",))

A coordinate check trains models of several widths D (or, with --depths=2,4,8, numbers of layers M) for a few steps. It
prints, for each stage, the mean change |x - x_0| of its activations, and the slopes of log |x| and log |x - x_0| after
the last step against log D or log M. With maximal update parametrisation (model.mup, Yang et al. 2022, appendix D.1;
model.mup_depth) the slope of the change is near 0. Without it some changes grow, and the best learning rate of a small
model is too large for a wide or deep one. For depths, read "last layer" and "logits": what one layer adds falls with M.
"""

import contextlib
import io
import pathlib
import re
from typing import Any

import jax
import numpy as np

from experiments import command as commands
from experiments.config import by_name, errors, files as config_files
from experiments.devices import mesh as meshes
from experiments.engine import run_plan, train_step
from experiments.model import task as tasks
from experiments.studies import tables

STAGES = ("q", "k", "v", "attention", "mlp", "hidden")  # and logits
HELP = {
    "config": "The config file.",
    "widths": "The widths D to train, separated by commas.",
    "depths": "The numbers of layers M to train, in place of widths.",
    "steps": "The number of steps.",
}


def run(
    config: commands.Path,
    *,
    widths: str = "64,128,256,512",
    depths: str = "",
    steps: int = 10,
    set: tuple[str, ...] = (),
    workdir: commands.Path = "",
) -> dict[str, dict[str, float]]:
    """Print a table, and return {stage: {"size slope", "change slope"}}.

    These are the slopes of log |x| and log |x - x_0|, for a stage's activations x after the last step and x_0 before
    training, against log of the width or, if `depths` is set, of the depth. A stage is a part of the model, such as
    mlp. workdir: a folder, which gets coordinate_check.png. Raises UserError for fewer than two sizes, no step, or a
    model that does not show its activations.
    """
    commands.require("--config=FILE", config)
    changes, figure = commands.parse_changes(set), commands.output(workdir, "coordinate_check.png")
    flag, text, letter = ("depths", depths, "M") if depths else ("widths", widths, "D")
    sizes = sorted(map(int, re.findall(r"\d+", text))) if re.fullmatch(r"[\d, ]+", text) else []
    if len(sizes) < 2 or sizes[0] < 1 or steps < 1:
        example = f"--{flag}=64,128 --steps=4"
        raise errors.UserError(f"--{flag}={text} --steps={steps} needs at least two {flag} and one step: {example}")
    measured = {size: measure(str(config), changes | {f"model.{letter}": size}, steps) for size in sizes}
    slopes = fit_slopes(measured)
    print(tables.align(tabulate(measured, slopes, letter)))
    if figure is not None:
        from experiments.figures import plots  # imports matplotlib, which takes a second

        changes_DT = {stage: np.stack([measures[stage][1] for measures in measured.values()]) for stage in slopes}
        title = " ".join([pathlib.Path(config).stem, *set])
        print(f"\n  {plots.coordinates(figure, changes_DT, sizes, letter=letter, title=title)}")
    return slopes


def measure(config: str, changes: dict[str, Any], steps: int) -> dict[str, np.ndarray]:
    """Train one model at a constant learning rate. Return stage -> mean |x| and |x - x_0| at each step, (2, steps + 1).

    The means are over a held-out batch and all layers; those of "last layer" over this layer only. Raises
    UserError if the model does not show its activations.
    """
    fixed = {"train.steps": steps + 1, "optim.schedule": "constant", "optim.warmup_steps": 0, "mesh.data": 1}
    with contextlib.redirect_stdout(io.StringIO()):
        settings = config_files.load_settings(config, fixed | changes)
        mesh = meshes.make(data=1)
        work = by_name.load_experiment(settings.experiment).prepare(settings, mesh)
    if work.task.probe is None:
        cause = "the model of this experiment does not show its activations"
        raise errors.UserError(f"{config}: {cause}. Choose a config whose model is a transformer of this project")
    plan = run_plan.make_plan(settings, work.task, mesh)
    state = train_step.initial_state(plan.task, plan.optimiser, seed=plan.seed, mesh=mesh)
    batch = work.task.evaluation[0]
    look, first, rows = jax.jit(lambda params: tasks.look(work, params, batch, STAGES)), {}, []
    for n in range(steps + 1):
        activations = {name: np.asarray(x, np.float32) for name, x in look(state.params).items()}
        activations["last layer"] = activations["hidden"][-1]
        first = first or activations
        rows.append({name: (np.abs(x).mean(), np.abs(x - first[name]).mean()) for name, x in activations.items()})
        state, _ = plan.step(state, meshes.place_batch(mesh, work.task.train[n]), np.True_)
    return {name: np.array([row[name] for row in rows]).T for name in first}


def fit_slopes(measured: dict[int, dict[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Return {stage: {"size slope": ..., "change slope": ...}} from {size of the model: result of `measure`}.

    These are the slopes of log2 |x| and log2 |x - x_0|, both after the last step, against log2 of the model's size.
    x: the activations of a stage; x_0: before training. |x| is the mean absolute value.
    """
    logarithms, slopes = np.log2(list(measured)), {}
    for stage in next(iter(measured.values())):
        pairs = np.array([measures[stage][:, -1] for measures in measured.values()]).T  # |x|, |x - x_0| of each size
        size, change = (float(np.polyfit(logarithms, np.log2(np.maximum(x, 1e-30)), 1)[0]) for x in pairs)
        slopes[stage] = {"size slope": size, "change slope": change}
    return slopes


def tabulate(measured: dict[int, dict], slopes: dict[str, dict], letter: str) -> tables.Table:
    """Return a row for each stage: its mean |x - x_0| after the last step at each size, and its slopes (`fit_slopes`).

    measured: {size of the model: result of `measure`}. letter: D or M, the size that differs.
    """
    head, rows = ["stage", *(f"change, {letter} = {size}" for size in measured), "change slope", "size slope"], []
    for stage, slope in slopes.items():
        changes = [f"{measures[stage][1, -1]:.4g}" for measures in measured.values()]
        rows.append([stage, *changes, f"{slope['change slope']:+.2f}", f"{slope['size slope']:+.2f}"])
    return tables.Table(head, rows)


if __name__ == "__main__":
    commands.main(run, HELP)
