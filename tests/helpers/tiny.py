"""Functions that run commands in this process, small settings, and tasks that compile in a second."""

import contextlib
import functools
import io
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import launch
from configs import base
from experiments import command as commands, vision
from experiments.config import by_name, files as config_files, settings as configs
from experiments.devices import compilation, mesh as meshes
from experiments.engine import batches, optim, run as runs, train_step
from tfm import loss

MODEL = {"model.M": 2, "model.D": 8, "model.H": 2, "model.remat": "products"}
TRAIN = {"optim.warmup_steps": 2, "train.steps": 5, "train.batch_size": 16}
EXPERIMENTS = (
    "language vision text_classification captions masked_image translation synthetic convolution ablation".split()
)
TEXT = (b"A king who reads is worth two kings who fight. " * 3 + bytes(range(32, 127))) * 5  # 1180 bytes


class Outcome(NamedTuple):
    """Exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str


def forget_flags() -> None:
    """Reset the launcher's flags to their defaults."""
    for flag in flags.FLAGS.get_key_flags_for_module("launch"):
        flag.unparse()


def run(*arguments: str) -> Outcome:
    """Run `python launch.py ARGUMENTS` in this process. Skip the measurement of peak FLOP/s, which takes a second."""
    forget_flags()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compilation, "measure_peak", lambda *, devices: 1e9)
            code = launch.main(["launch.py", *arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def command(tool, **values) -> Outcome:
    """Run `python -m experiments.tools.TOOL --NAME=VALUE ...` in this process. A list repeats its flag."""
    pairs = [(name, one) for name, value in values.items() for one in (value if isinstance(value, list) else [value])]
    return call(tool.run, tool.HELP, *(f"--{name}={one}" for name, one in pairs))


def call(function, help, *argv, positional="") -> Outcome:
    """Call the function of a command with these arguments, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        argv = ["command", *map(str, argv)]
        code = commands.exit_code(lambda: function(**commands.arguments(function, help, argv, positional=positional)))
    return Outcome(code, out.getvalue(), err.getvalue())


def refusal(tool, **values) -> str:
    """Assert that a tool's command prints a one-line error and nothing else. Return the error."""
    code, out, err = command(tool, **values)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    return err


def config_file(folder: pathlib.Path, experiment: str, **changes) -> str:
    """Return the path of a new config file in `folder` with these changes (keys may have __ for dots)."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    lines = [f"    config.{key} = {value!r}\n" for key, value in changes.items()]
    begin = f"base.get_config({experiment!r}, of={changes.get('study.experiment', '')!r})"
    head = f"from configs import base\n\n\ndef get_config():\n    config = {begin}\n"
    file = folder / f"{experiment}_config.py"
    file.write_text(head + "".join(lines) + "    return config\n", encoding="utf-8")
    return str(file)


def load_config(file: str, **options) -> Any:
    """Load the config in a file."""
    return config_files.load(file, **options)


def settings(experiment: str, *, model: bool = True, **changes) -> configs.Settings:
    """Return settings with few steps, a small model (if there is one) and these changes (keys may have __ for dots)."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    values = base.get_config(experiment, of=changes.get("study.experiment", ""))
    values.update_from_flattened_dict(TRAIN | (MODEL if model else {}) | changes)
    return configs.Settings(values)


def fields() -> dict[str, Any]:
    """Return {key: default} for all fields of the project's experiments."""
    defaults = [base.get_config(name, of="language" if name == "ablation" else "") for name in EXPERIMENTS]
    return {key: value for values in defaults for key, value in configs.flat(values.to_dict()).items()}


def list_names(field: str) -> list[str]:
    """Return the names that the comment of a model field lists, such as "activation: relu, gelu (mlp.py)"."""
    return re.sub(r"^[^:(]*: | \(.*", "", base.FIELDS["model"][field][1]).split(", ")


def work_of(settings: configs.Settings, devices: jax.sharding.Mesh | None = None) -> runs.Work:
    """Return the runs.Work that an experiment prepares for these settings."""
    with contextlib.redirect_stdout(io.StringIO()):
        return by_name.load_experiment(settings.experiment).prepare(settings, devices or runs.make_mesh(settings))


def task_of(settings: configs.Settings) -> train_step.Task:
    """Return the train_step.Task that an experiment prepares for these settings."""
    return work_of(settings).task


def baseline(task: train_step.Task) -> dict[str, float]:
    """Return the metrics of the guess without a model."""
    return {name: value for name, (value, _) in task.baseline(task.evaluation).items()}


def make_figures(settings: configs.Settings, folder: pathlib.Path, rows: list[dict]) -> tuple[runs.Work, Any, str]:
    """Draw an experiment's figures for a model with random parameters.

    rows: the rows of metrics.jsonl. Returns (work, (files, numbers), stdout).
    """
    work, files, numbers = work_of(settings), [], {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for result in work.figures(work, draw_params(work.task), folder, rows):
            if isinstance(result, dict):
                numbers |= result
            else:
                files.append(result)
    assert all(file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") or file.suffix == ".txt" for file in files)
    return work, (files, numbers), out.getvalue()


def draw_params(task: train_step.Task) -> dict:
    """Draw all parameters of a task, also biases and gains, as normal numbers. This does not compile its `init`."""
    rng = np.random.default_rng(0)
    tree = jax.eval_shape(task.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jax.device_put((0.3 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)), tree)


def measure(task: train_step.Task) -> Callable:
    """Return a jitted function (params, batch, key_B=None) -> the task's loss and metrics."""
    return jax.jit(lambda params, batch, key_B=None: task.loss(params, batch, key_B=key_B)[0])


def gradient(task: train_step.Task, mesh: jax.sharding.Mesh, accumulation: int = 1) -> Callable:
    """Return a jitted function (params, batch, key) that runs `train_step.gradient` on the devices of a mesh."""
    gradient_on_device = functools.partial(train_step.gradient, task=task, mesh=mesh, accumulation=accumulation)

    def on_mesh(params, batch, key):
        specs = train_step.gradient_specs(params, batch, task, mesh)
        return meshes.sharded(gradient_on_device, mesh, **specs)(params, batch, key)

    return jax.jit(on_mesh)


D, C = 5, 3  # features and classes of the linear task


def adamw():
    """Return (schedule of the learning rate, AdamW with this schedule)."""
    rate = optim.schedule("cosine", peak=0.01, steps=50, warmup_steps=3)
    return rate, optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)


def linear_task(*, n=61, n_evaluation=29, batch=16, evaluate_batch=8, seed=0, growth=()) -> train_step.Task:
    """Return a task in which one matrix classifies points. Examples have weights 0, 1, 2; training adds noise."""
    rng = np.random.default_rng(0)
    x_BD = rng.standard_normal((n + n_evaluation, D)).astype(np.float32)
    label_B = rng.integers(0, C, n + n_evaluation).astype(np.int32)
    weight_B = (np.arange(n + n_evaluation) % 3).astype(np.float32)

    def fetch(index_B, rng):
        noise = 0 if rng is None else 0.1 * rng.standard_normal((len(index_B), D)).astype(np.float32)
        return {"x_BD": x_BD[index_B] + noise, "label_B": label_B[index_B], "weight_B": weight_B[index_B]}

    def init(key):
        return {"G_CD": jax.random.normal(key, (C, D)), "b_C": jnp.zeros(C)}

    def mean(params, batch, *, key_B=None, layout=None):
        logits_BC = batch["x_BD"] @ params["G_CD"].T + params["b_C"]
        targets = batch["label_B"], batch["weight_B"]
        return {"loss": loss.cross_entropy(logits_BC, *targets), "accuracy": loss.accuracy(logits_BC, *targets)}, {}

    return train_step.Task(
        init=init,
        loss=mean,
        train=batches.train(fetch, n=n, batch=batch, seed=seed, growth=growth),
        evaluation=batches.evaluation(lambda i_B, rng: fetch(i_B + n, rng), n=n_evaluation, batch=evaluate_batch),
        tokens_per_example=1,
        baseline=lambda evaluation: {"accuracy": (1 / C, "any class")},
    )


@contextlib.contextmanager
def without_figures():
    """Context manager: skip the figures of image runs and the measurement of peak FLOP/s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "measure_peak", lambda *, devices: 1e9)
        patch.setattr(vision, "figures", lambda *arguments: [])
        yield


def train(folder, task: train_step.Task, *, figures=lambda *arguments: [], resume=None, **changes) -> runs.Result:
    """Train this task in the folder with these changes to the settings. Return the result."""
    values = settings("vision", model=False, **changes)
    assert values.experiment == "vision"  # the run also reads this setting
    with without_figures():
        return runs.run(values, folder, runs.Work(task, figures), runs.make_mesh(values), resume=resume)
