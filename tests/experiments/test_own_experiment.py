"""A user's experiment in a file outside the project: its own fields, from the config to a study."""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny
from errors import raises

from configs import base
from experiments.engine import by_name, config as configs, config_file, errors
from experiments.studies import study
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
FIELDS = "def config(): return {'line': {'slope': 2.0}}\n"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a folder with an experiment and a config of it, neither of them imported."""
    monkeypatch.delitem(sys.modules, "own_line", raising=False)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own_line.py").write_text(CODE)
    (tmp_path / "one.py").write_text(CONFIG)
    return tmp_path


def test_it_is_trained_with_its_own_fields(mine):
    outcome = tiny.run("--config", str(mine / "one.py"), "--workdir", str(mine / "run"), "--config.line.slope=4")
    assert (outcome.code, outcome.err) == (0, "")
    saved = json.loads((mine / "run" / "config.json").read_text())["config"]
    assert (saved["experiment"], saved["line"]) == ("own_line", {"slope": 4.0, "kind": "plain"})
    assert not {"text", "image", "study"} & saved.keys()
    assert json.loads((mine / "run" / "summary.json").read_text())["eval/slope"] == 4
    assert (mine / "run" / "source" / "own_line.py").read_text() == CODE
    again = tiny.run("--config", str(mine / "one.py"), "--workdir", str(mine / "run"), "--config.line.slope=4")
    assert again.code == 0 and "finished run" in again.out
    unused = tiny.run("--config", str(mine / "one.py"), "--workdir", str(mine / "two"), "--config.line.kind=dotted")
    assert unused.code == 2 and "line.kind" in unused.err


def test_a_saved_config_does_not_import_it_unasked(mine, monkeypatch):
    """The code that a .json names runs only if the command line names it, too."""
    monkeypatch.chdir(mine)
    (mine / "a.json").write_text(
        json.dumps({"experiment": "own_line", "line": {"slope": 1.0}, "train": {"batch_size": 16}})
    )
    refusal = tiny.run("--config", "a.json", "--dry_run")
    assert refusal.code == 2 and 'a.json has experiment = "own_line"' in refusal.err
    assert tiny.run("--config", "a.json", "--dry_run", "--config.experiment=own_line", "--config.mesh.data=1").code == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def prepare(settings, devices): pass", "own_line.py config"),
        ("def config(): return {}", "own_line.py prepare"),
        ("def config(): return {'line': {'slope': None}}\nprepare = 1", "line.slope None"),
        ("def config(): return {'train': {'slope': 1}}\nprepare = 1", '"train"'),
        (f"{FIELDS}def prepare(settings, devices): pass", "own_line prepare run.Work"),
        (f"{FIELDS}def prepare(settings, devices): return 1 / 0", "own_line.py, line 2: ZeroDivisionError"),
    ],
)
def test_a_file_that_is_not_an_experiment_is_refused_in_a_sentence(mine, code, words):
    (mine / "own_line.py").write_text(code)
    outcome = tiny.run("--config", str(mine / "one.py"), "--dry_run")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and all(word in outcome.err for word in words.split())


def test_a_config_of_another_experiment_is_not_one_of_this(mine):
    text = (mine / "one.py").read_text().replace('base.get_config("own_line")', 'base.get_config("vision")')
    text = text.replace("config.line.slope = 3.0", 'config.experiment = "own_line"')
    (mine / "one.py").write_text(text)
    outcome = tiny.run("--config", str(mine / "one.py"), "--dry_run")
    assert outcome.code == 2 and '"dots.bias"' in outcome.err and 'base.get_config("own_line")' in outcome.err


# The experiment of the guide


def test_regression_in_context_is_learnt_and_a_study_over_its_own_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    page = (by_name.ROOT / "docs" / "guides" / "your_experiment.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[0]
    assert len(code.splitlines()) <= 60
    file = tmp_path / "my_regression.py"
    file.write_text(code, encoding="utf-8")
    config = config_file.load(str(file), base=base.get_config)
    settings = configs.Settings(config, config_file.defaults(config, base.get_config))
    runs = study.runs(settings, study.read(settings))
    assert [run.settings.regression.noise for run in runs[::3]] == [1.0, 0.3, 0.0] and len(runs) == 9
    assert not any("study" in run.settings.to_dict() or run.settings.experiment != "my_regression" for run in runs)
    own = tiny.config_file(tmp_path, "my_regression", train__steps=150, mesh__data=1, regression__features=1)
    words = "--config.model.M=1 --config.model.D=16 --config.optim.learning_rate=1e-2 --config.regression.pairs=4"
    words += " --config.model.norm=rms --config.model.mlp=relu --config.model.bias=none"  # quick to compile
    outcome = tiny.run("--config", own, "--workdir", str(tmp_path / "run"), *words.split())
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval/explained"] > 0.3
    assert (tmp_path / "run" / "figures" / "loss.png").is_file()  # it draws none itself


# A user's loss in an experiment of the project


def entropy(logits, target, weight):
    return loss.cross_entropy(2 * logits, target, weight)


def mean(logits, target, weight):
    return logits.mean()


@pytest.mark.parametrize(("experiment", "changes"), [("vision", {"image__patch": 4}), ("synthetic", {})])
def test_a_users_loss_takes_logits_targets_and_weights(experiment, changes):
    """It equals the loss of twice the logits by hand, also if the head of tokens is fused with the loss."""
    every = []
    for name, scale in (("cross_entropy", 2), ("test_own_experiment:entropy", 1)):
        settings = tiny.settings(experiment, train__loss=name, mesh__data=1, **changes)
        task = tiny.task_of(settings)
        params = tiny.drawn(task)
        params["head"] = jax.tree.map(functools.partial(jnp.multiply, scale), params["head"])
        found = tiny.measure(task)(params, task.train[0], None)
        every.append({name: float(total / count) for name, (total, count) in found.items()})
    assert every[0] == pytest.approx(every[1], rel=1e-5) and every[0].keys() == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train__loss": "cross"}, ("loss", "cross", "cross_entropy")),
        ({"train__loss": "test_own_experiment:mean"}, ("train.loss", "test_own_experiment:mean", "(sum, count)")),
        ({"train__loss": "test_own_experiment:entropy", "mesh__tensor": 2}, ("train.loss", "mesh.tensor")),
    ],
)
def test_an_invalid_loss_is_refused(changes, parts):
    with raises(errors.UserError, *parts):
        tiny.task_of(tiny.settings("synthetic", mesh__data=1, **changes))
