"""What the tests of the engine share: the launcher in this process, and tasks that compile in a second."""

import contextlib
import functools
import io
import json
import pathlib
import re
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import launch
from configs import base
from experiments import vision
from experiments.engine import (
    batches,
    by_name,
    compilation,
    config,
    config_file as files,
    mesh as meshes,
    optim,
    run as runs,
    train_step,
)
from experiments.tools import command as commands
from tfm import loss

MODEL = {"model.M": 2, "model.D": 8, "model.H": 2, "model.remat": "products"}
TRAIN = {"optim.warmup_steps": 2, "train.steps": 5, "train.batch_size": 16}
EXPERIMENTS = (
    "language vision text_classification captions masked_image translation synthetic convolution ablation".split()
)
TEXT = (b"A king who reads is worth two kings who fight. " * 3 + bytes(range(32, 127))) * 5  # 1180 bytes


class Outcome(NamedTuple):
    """What a person sees of a run."""

    code: int
    out: str
    err: str


def forget_flags() -> None:
    """The launcher's flags are as if none had been given before in this process."""
    for flag in flags.FLAGS.get_key_flags_for_module("launch"):
        flag.unparse()


def run(*arguments: str) -> Outcome:
    """`python launch.py ARGUMENTS`, in this process; the machine's rate is not measured, which takes a second."""
    forget_flags()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compilation, "measure_peak", lambda *, devices: 1e9)
            code = launch.main(["launch.py", *arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def command(tool, **values) -> Outcome:
    """`python -m experiments.tools.TOOL --NAME=VALUE ...`, in this process; a list is given one by one."""
    pairs = [(name, one) for name, value in values.items() for one in (value if isinstance(value, list) else [value])]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = commands.main(tool.run, tool.HELP, [tool.__name__, *(f"--{name}={one}" for name, one in pairs)])
    return Outcome(code, out.getvalue(), err.getvalue())


def refusal(tool, **values) -> str:
    """The one sentence that a tool's command ends with, which has printed nothing."""
    code, out, err = command(tool, **values)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    return err


def config_file(folder: pathlib.Path, experiment: str, **changes) -> str:
    """The path of a config file in `folder` with these changes (dots of keys may be written as __)."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    lines = [f"    config.{key} = {value!r}\n" for key, value in changes.items()]
    begin = f"base.get_config({experiment!r}, of={changes.get('study.experiment', '')!r})"
    head = f"from configs import base\n\n\ndef get_config():\n    config = {begin}\n"
    file = folder / f"{experiment}_config.py"
    file.write_text(head + "".join(lines) + "    return config\n", encoding="utf-8")
    return str(file)


def saved_in(folder: pathlib.Path, content: Any) -> str:
    """Write a config in JSON with this content, and return its path."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "config.json")


def loaded(file: str, **options) -> Any:
    """Return the config of a file."""
    return files.load(file, base=base.get_config, **options)


def settings(experiment: str, *, model: bool = True, **changes) -> config.Settings:
    """A config with few steps, a small model (where there is one) and these changes (dots of keys written as __)."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    made = base.get_config(experiment, of=changes.get("study.experiment", ""))
    made.update_from_flattened_dict(TRAIN | (MODEL if model else {}) | changes)
    return config.Settings(made, files.defaults(made, base.get_config))


def fields() -> dict[str, Any]:
    """The defaults of all fields that an experiment of the project has, by their keys."""
    every = [base.get_config(name, of="language" if name == "ablation" else "") for name in EXPERIMENTS]
    return {key: value for one in every for key, value in config.flat(one.to_dict()).items()}


def listed(field: str) -> list[str]:
    """Return the names in the comment of a field of the model: "relu, gelu (mlp.py)"."""
    return re.sub(r" \(.*|of the logits: ", "", base.FIELDS["model"][field][1]).split(", ")


def work_of(settings: config.Settings, devices: jax.sharding.Mesh | None = None) -> runs.Work:
    """What an experiment makes of a config."""
    with contextlib.redirect_stdout(io.StringIO()):
        return by_name.load_experiment(settings.experiment).prepare(settings, devices or runs.make_mesh(settings))


def task_of(settings: config.Settings) -> train_step.Task:
    """The task that an experiment hands to the loop."""
    return work_of(settings).task


def shown(settings: config.Settings, folder: pathlib.Path, rows: list[dict]) -> tuple[runs.Work, Any, str]:
    """What an experiment makes of a config, shows of a model that was drawn, not trained, and prints of it.

    rows: those of metrics.jsonl. All files that it shows are whole.
    """
    work = work_of(settings)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        found = [*work.figures(drawn(work.task), folder, rows)]
    files, numbers = [one for one in found if not isinstance(one, dict)], {}
    for more in (one for one in found if isinstance(one, dict)):
        numbers |= more
    assert all(file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") or file.suffix == ".txt" for file in files)
    return work, (files, numbers), out.getvalue()


def drawn(task: train_step.Task) -> dict:
    """Parameters of the task's tree, all of them normal numbers, biases and gains too; its `init` is not compiled."""
    rng = np.random.default_rng(0)
    tree = jax.eval_shape(task.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jax.device_put((0.3 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)), tree)


def measure(task: train_step.Task) -> Callable:
    """Return (params, batch, key_B=None) -> the measures of the task's loss, jitted."""
    return jax.jit(lambda params, batch, key_B=None: task.loss(params, batch, key_B=key_B)[0])


def gradient(task: train_step.Task, mesh: jax.sharding.Mesh, accumulation: int = 1) -> Callable:
    """Return (params, batch, key) -> `train_step.gradient` on the devices of a mesh, jitted."""
    of_device = functools.partial(train_step.gradient, task=task, mesh=mesh, accumulation=accumulation)

    def on_mesh(params, batch, key):
        specs = train_step.gradient_specs(params, batch, task, mesh)
        return meshes.sharded(of_device, mesh, **specs)(params, batch, key)

    return jax.jit(on_mesh)


D, C = 5, 3  # of the linear task


def adamw():
    """A schedule, and AdamW with it."""
    rate = optim.schedule("cosine", peak=0.01, steps=50, warmup_steps=3)
    return rate, optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)


def linear_task(*, n=61, n_evaluation=29, batch=16, evaluate_batch=8, seed=0, growth=()) -> train_step.Task:
    """Classification by one matrix. Examples have unequal weights, every third none, and training adds noise."""
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
        answer = logits_BC, batch["label_B"], batch["weight_B"]
        return {"loss": loss.cross_entropy(*answer), "accuracy": loss.accuracy(*answer)}, {}

    return train_step.Task(
        init=init,
        loss=mean,
        train=batches.train(fetch, n=n, batch=batch, seed=seed, growth=growth),
        evaluation=batches.evaluation(lambda i_B, rng: fetch(i_B + n, rng), n=n_evaluation, batch=evaluate_batch),
        tokens_per_example=1,
        baseline={"accuracy": 1 / C},
    )


def own_disk(commands: str, what: str) -> list[str]:
    """What to put before a command, so that `sh` does these commands (mounts) for it alone. Skips where none can be."""
    inside = ["unshare", "-rm", "sh", "-c"]
    try:
        subprocess.run([*inside, commands], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{what} cannot be made here: {error}")
    return [*inside, f'{commands} && exec "$@"', "sh"]


@contextlib.contextmanager
def without_figures():
    """Inside, a run of images draws nothing, and the machine's rate is not measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "measure_peak", lambda *, devices: 1e9)
        patch.setattr(vision, "figures", lambda *arguments: [])
        yield


def trained(folder, task: train_step.Task, *, figures=lambda *arguments: [], resume=None, **changes) -> runs.Result:
    """A run of this task in the folder, with these changes of the settings."""
    given = settings("vision", model=False, **changes)
    assert given.experiment == "vision"  # as the launcher, which reads it
    with without_figures():
        return runs.run(given, folder, runs.Work(task, figures), runs.make_mesh(given), resume=resume)
