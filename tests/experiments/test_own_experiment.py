"""A user's experiment in a file outside the project, with its own fields: config, training, a study."""

import json
import re
import sys

import jax
import pytest
import tiny
from errors import raises

from experiments.config import by_name, errors, files as config_files, settings as configs
from experiments.studies import study as studies
from tfm import loss

CODE = """
import dots
from ml_collections import ConfigDict


def config():
    line = ConfigDict()
    line.slope = 2.0
    line.kind = "plain"
    return dots.config() | {"line": line}


def prepare(settings, devices):
    work, slope = dots.prepare(settings, devices), settings.line.slope

    def loss(params, batch, *, key_B=None, layout=None):
        measures, aux = work.task.loss(params, batch, key_B=key_B)
        return measures | {"slope": (slope * 8.0, 8.0)}, aux

    return work._replace(task=work.task._replace(loss=loss))
"""
CONFIG = """
from configs import base


def get_config():
    config = base.get_config("own_line")
    config.line.slope = 3.0
    config.mesh.data = 1
    config.optim.warmup_steps = 1
    config.train.update(steps=3, batch_size=16)
    return config
"""
CONFIG_FUNCTION = "def config(): return {'line': {'slope': 2.0}}\n"


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """Return a folder with an experiment and its config, which are not imported yet."""
    monkeypatch.delitem(sys.modules, "own_line", raising=False)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own_line.py").write_text(CODE)
    (tmp_path / "one.py").write_text(CONFIG)
    return tmp_path


def launch(folder, *flags):
    """Run the config one.py of the folder with these flags."""
    return tiny.run("--config", str(folder / "one.py"), *flags)


def test_a_users_experiment_is_trained_with_its_own_fields(user_folder):
    run, slope = user_folder / "run", "--config.line.slope=4"
    outcome = launch(user_folder, "--workdir", str(run), slope)
    assert (outcome.code, outcome.err) == (0, "")
    config = json.loads((run / "config.json").read_text())["config"]
    assert (config["experiment"], config["line"]) == ("own_line", {"slope": 4.0, "kind": "plain"})
    assert not {"text", "image", "study"} & config.keys()
    assert json.loads((run / "summary.json").read_text())["eval/slope"] == 4
    assert (run / "source" / "own_line.py").read_text() == CODE
    repeated = launch(user_folder, "--workdir", str(run), slope)
    assert repeated.code == 0 and "finished run" in repeated.out
    unused_setting = launch(user_folder, "--workdir", str(user_folder / "two"), "--config.line.kind=dotted")
    assert unused_setting.code == 2 and "line.kind" in unused_setting.err


def test_a_saved_config_does_not_import_a_users_experiment_unless_the_command_names_it(user_folder, monkeypatch):
    """Code that a .json config names runs only if the command line also names it."""
    monkeypatch.chdir(user_folder)
    saved = {"experiment": "own_line", "line": {"slope": 1.0}, "train": {"batch_size": 16}}
    (user_folder / "a.json").write_text(json.dumps(saved))
    refusal = tiny.run("--config", "a.json", "--dry_run")
    assert refusal.code == 2 and 'a.json: the file has experiment = "own_line"' in refusal.err
    assert tiny.run("--config", "a.json", "--dry_run", "--config.experiment=own_line", "--config.mesh.data=1").code == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def prepare(settings, devices): pass", "own_line.py config"),
        ("def config(): return {}", "own_line.py prepare"),
        ("def config(): return {'line': {'slope': None}}\nprepare = 1", "line.slope None"),
        ("def config(): return {'train': {'slope': 1}}\nprepare = 1", '"train"'),
        (f"{CONFIG_FUNCTION}def prepare(settings, devices): pass", "own_line prepare runs.Work"),
        (f"{CONFIG_FUNCTION}def prepare(settings, devices): return 1 / 0", "own_line.py, line 2: ZeroDivisionError"),
    ],
)
def test_a_file_that_is_not_an_experiment_is_refused_in_a_sentence(user_folder, code, words):
    (user_folder / "own_line.py").write_text(code)
    outcome = launch(user_folder, "--dry_run")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and all(word in outcome.err for word in words.split())


def test_a_config_that_was_made_for_another_experiment_is_refused(user_folder):
    text = CONFIG.replace("own_line", "vision").replace("config.line.slope = 3.0", 'config.experiment = "own_line"')
    (user_folder / "one.py").write_text(text)
    outcome = launch(user_folder, "--dry_run")
    assert outcome.code == 2 and '"dots.bias"' in outcome.err and 'base.get_config("own_line")' in outcome.err


# The experiment of the guide


def test_the_experiment_of_the_guide_learns_and_can_be_studied(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    page = (by_name.ROOT / "docs" / "guides" / "your_experiment.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[0]
    assert len(code.splitlines()) <= 60
    file = tmp_path / "my_regression.py"
    file.write_text(code, encoding="utf-8")
    config = config_files.load(str(file))
    settings = configs.Settings(config)
    runs = studies.runs(settings, studies.read(settings))
    assert [run.settings.regression.noise for run in runs[::3]] == [1.0, 0.3, 0.0] and len(runs) == 9
    assert not any("study" in run.settings.to_dict() or run.settings.experiment != "my_regression" for run in runs)
    config_path = tiny.config_file(tmp_path, "my_regression", train__steps=150, mesh__data=1, regression__features=1)
    flags = "--config.model.M=1 --config.model.D=16 --config.optim.learning_rate=1e-2 --config.regression.pairs=4"
    flags += " --config.model.norm=rms --config.model.mlp=relu --config.model.bias=none"  # compiles quickly
    outcome = tiny.run("--config", config_path, "--workdir", str(tmp_path / "run"), *flags.split())
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval/explained"] > 0.3
    assert (tmp_path / "run" / "figures" / "loss.png").is_file()  # the experiment draws no figures itself


# A user's loss in an experiment of the project


def doubled_cross_entropy(logits, target, weight):
    return loss.cross_entropy(2 * logits, target, weight)


def mean_logit(logits, target, weight):
    return logits.mean()


@pytest.mark.parametrize(("experiment", "changes"), [("vision", {"image__patch": 4}), ("synthetic", {})])
def test_a_users_loss_takes_logits_targets_and_weights(experiment, changes):
    """It equals the built-in loss with doubled logits, also if the token head is fused with the loss."""
    means = []
    for name, scale in (("cross_entropy", 2), ("test_own_experiment:doubled_cross_entropy", 1)):
        task = tiny.task_of(tiny.settings(experiment, train__loss=name, mesh__data=1, model__M=1, **changes))
        params = jax.device_get(tiny.draw_params(task))
        params["head"] = jax.tree.map(lambda x, scale=scale: scale * x, params["head"])
        result = tiny.measure(task)(params, task.train[0])
        means.append({name: float(total / count) for name, (total, count) in result.items()})
    assert means[0] == pytest.approx(means[1], rel=1e-5) and means[0].keys() == {"loss", "accuracy"}


HERE = "test_own_experiment:"


@pytest.mark.parametrize(
    ("name", "tensor", "parts"),
    [
        ("cross", 1, ["loss", "cross", "cross_entropy"]),
        (f"{HERE}mean_logit", 1, ["train.loss", f"{HERE}mean_logit", "(sum, count)"]),
        (f"{HERE}doubled_cross_entropy", 2, ["train.loss", "mesh.tensor"]),
    ],
)
def test_an_invalid_loss_is_refused(name, tensor, parts):
    with raises(errors.UserError, *parts):
        tiny.task_of(tiny.settings("synthetic", mesh__data=1, mesh__tensor=tensor, train__loss=name))
