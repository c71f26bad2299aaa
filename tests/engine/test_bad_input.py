"""A user's mistake is reported in one sentence with the allowed values. The exit code is 2; no file is written."""

import json
import os
import pathlib
import subprocess
import sys

import dots
import numpy as np
import pytest
import tiny

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ("--config.model.D=8", "--config.model.H=2", "--config.train.batch_size=16")


@pytest.fixture
def check_refusal(tmp_path, monkeypatch):
    """Return a function (arguments, *words). It runs the launcher in an empty folder and checks its one-line error.

    The error contains these words, the exit code is 2, and no file is written.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run_and_check(arguments, *words, folder=tmp_path / "run"):
        outcome = tiny.run("--workdir", str(folder), *arguments)
        assert outcome.code == 2, outcome
        assert outcome.err.startswith("error: ") and outcome.err.endswith("\n") and outcome.err.count("\n") == 1
        assert "Traceback" not in outcome.out + outcome.err
        assert not os.path.lexists(folder) and not list((tmp_path / "here").iterdir())
        missing = [word for word in words if word not in outcome.err]
        assert not missing, f"{outcome.err!r} does not say {missing}"
        return outcome.err

    return run_and_check


@pytest.fixture
def language(tmp_path):
    """Return the arguments of a small language run on a local text."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    file = tiny.config_file(tmp_path, "language", text__source=str(tmp_path / "text.txt"), text__N=8)
    return ("--config", file, *SMALL)


@pytest.fixture
def vision(tmp_path):
    return ("--config", tiny.config_file(tmp_path, "vision"), *SMALL)


@pytest.fixture
def training(tmp_path):
    """Return the arguments of an experiment that is quickly prepared."""
    return ("--config", tiny.config_file(tmp_path, "dots", **dots.CHANGES))


AT_ITS_LINE = [
    ("c.experimant = 'vision'", ['"experimant"', '"experiment"']),
    ("c.train.stebs = 3", ['"stebs"', '"steps"']),
    ("c.train.update(stebs=3)", ['"stebs"']),
    ("c.text.N = 3", ['no "text"']),
    ("c.train.steps = 'many'", ["TypeError", "int"]),
    ("c.train.steps = 2.5", ["TypeError", "int"]),
    ("c.optim.schedule = 3", ["TypeError", "str"]),
    ("c.model.bias = False", ["TypeError", "str"]),
    ("c.seed = 1 / 0", ["division by zero"]),
    ("raise RuntimeError('mine')", ["RuntimeError: mine"]),
]
LATER = [
    ("c.model.M = None", ["model.M"]),  # a ConfigDict accepts None for any type, and True for an integer
    ("c.train.steps = True", ["train.steps"]),
    ("c.experiment = None", ["experiment"]),
    ("c.unlock().more = 1", ['"more"']),
    ("c.unlock().__delattr__('seed')", ['"seed"']),
]
IN_FILES = [(*one, ", line 5: ") for one in AT_ITS_LINE] + [(*one, ": ") for one in LATER]


@pytest.mark.parametrize(("line", "words", "place"), IN_FILES)
def test_a_mistake_in_a_config_file_is_refused_with_its_line_if_it_raises(check_refusal, tmp_path, line, words, place):
    file = tmp_path / "mistake.py"
    head = "from configs import base\n\ndef get_config():\n    c = base.get_config('vision')\n"
    file.write_text(f"{head}    {line}\n    return c\n")
    check_refusal(["--config", str(file)], f"{file}{place}", *words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", json.dumps({"train": {"stebs": 3}}), ['"train.stebs"', '"train.steps"']),
        ("a.json", json.dumps({"config": {"train": {"steps": "3.5"}}}), ["train.steps", "int", "'3.5'"]),
        ("a.json", json.dumps({"config": {"train": {"steps": True}}}), ["train.steps", "int", "True"]),
        ("a.json", "[1, 2]", ["as a config in JSON", "object"]),
        ("a.json", '{"config": {', ["as a config in JSON"]),
        ("a.py", "def get_config(:\n", ["SyntaxError", "a.py", "line 1"]),
        ("a.py", "import no_such_module\n", ["a.py, line 1", "no_such_module"]),
        (
            "a.py",
            "import json\ndef f():\n    return json.loads('{')\ndef get_config():\n    return f()\n",
            ["a.py, line 3", "JSONDecodeError"],
        ),
        ("a.py", "x = 1\n", ["a.py", "get_config"]),
        ("a.py", "def get_config():\n    return {}\n", ["a.py", "get_config() must return", "base.get_config("]),
        ("a.yaml", "", [".py", ".json", "a.yaml"]),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(check_refusal, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    check_refusal(["--config", str(tmp_path / name)], *words)


def test_a_path_that_is_too_long_for_the_file_system_is_refused(check_refusal, language):
    for arguments in (["--config"], [*language, "--config.init_from"]):
        check_refusal([*arguments[:-1], f"{arguments[-1]}={'9' * 300}"], "999")


# Settings that are wrong or contradict each other | parts of the message
VISION_MISTAKES = """
model.D=9 | model.D = 9 | model.H = 2
model.H=0 | model.H
model.M=0 | model.M | at least 1
image.patch=3 | 8 x 8 | 3 x 3 | image.patch
image.patch=0 | 8 x 8 | image.patch
image.augment=["shift:8"] | 'shift:8' | less than a side
image.augment=[1 | image.augment | type list
train.batch_size=20 | train.batch_size = 20 | 8 devices | multiple of 8
train.batch_size=0 | train.batch_size = 0 | at least 1
train.batch_size=8000 | train.batch_size = 8000 | examples
mesh.data=9 | mesh.data = 9 | does not fit | 8 x
train.batch_size=20 mesh.data=3 | train.batch_size = 20 | 3 devices | multiple of 3
model=3 | "model"
text.N=9 | unknown config key "text.N"; the sections of vision are: | image
model.scale=os:sep | scale "os:sep" | a function
experiment=visoin | visoin | language | did you mean "vision"
experiment=synthetic | has the unknown key | base.get_config("synthetic")
model.score=assymetric | assymetric | none | tied | did you mean "asymmetric"
model.scale=1/sqrt(k) | 1/sqrt(k) | 1/sqrt(D) | did you mean "1/sqrt(K)"
model.value=lowrank | lowrank | did you mean "low_rank"
model.norm=tokens | tokens | token_plain | did you mean "token"
model.norm=LayerNorm | LayerNorm | did you mean "token"
model.window=-1 | model.window = -1 | at least 0
model.mlp=gleu | gleu | relu | did you mean "gelu"
model.position=sinusoid | sinusoid | learned | none | did you mean "sinusoidal"
model.block=prenorm | prenorm | post_norm | did you mean "pre_norm"
image.head=pool | pool | class_token | did you mean "pooled"
model.attention=flish | attention | flish | flash
model.compute_dtype=bf16 | compute_dtype | bf16 | bfloat16
model.attention=explicit_bfloat16 | model.attention | explicit_bfloat16 | model.compute_dtype = bfloat16
model.relative_position=alibbi | relative_position | alibbi | alibi
model.relative_position=rotery:2 | relative_position | rotery | "rotary"
model.dropout=1.0 | model.dropout | 1.0 | 1
model.value=keys model.score=tied_wide | value | keys | model.K = 4
model.score=identity_query model.K=3 | score | identity_query | 2 x 3
model.relative_position=rotary model.K=3 | relative_position | rotary | 3 features
model.relative_position=rotary_halves model.score=none model.D=9 model.H=3 | rotary_halves | 9 features
model.relative_position=rotary_halves:9:yarn:2 | rotary_halves:base:yarn:factor:N:fast:slow:length
model.relative_position=rotary:9:linear:0 | relative_position | rotary:9:linear:0
model.relative_position=rotary:0.5 | relative_position | rotary:base
model.score=sym_plus_skew:3 | model.score | sym_plus_skew:3 | even | sym_plus_skew:2
model.score=sym_plus_skew:_noself | model.score | even
model.score=sym_plus_skew:1000000 | model.score | model.D
model.relative_position=rotary: | relative_position | rotary:base
model.relative_position=rotary:9:linear:2:3 | relative_position | rotary:base:linear:factor
model.relative_position=rotary model.score=constant | relative_position | rotary | supports_rope
model.relative_position=rotary_halves model.score=l2_tied | relative_position | rotary | supports_rope
model.norm=rms:x | norm | rms:1e-6
model.norm=rms:-1 | norm | rms:1e-6
model.norm=token: | norm | token | rms:1e-6
model.norm=batch:0.1:0.2 | norm | batch | rms:1e-6
model.norm=batch_features train.accumulation=2 | train.accumulation
seed=-1 | seed
"""
LANGUAGE_MISTAKES = """
text.N=0 | text.N | at least 1 | 0
text.objective=mask | mask | causal | did you mean "masked"
text.head=tied_gelu | unknown head "tied_gelu" | did you mean "tied+gelu" | linear+bias
text.tokenizer=byte | byte | characters | did you mean
text.tokenizer=/nowhere/tokenizer.json | /nowhere/tokenizer.json
text.objective=prefix text.N=1 | text.N
text.objective=masked text.head=linear+gelu model.norm=batch | text.head = linear+gelu
seed=1 optim.momentum=0.3 optim.muon_lr_multiplier=4 | optim.momentum, optim.muon_lr_multiplier
model.norm=instance | model.norm = instance
model.window=8 | model.window = 8
model.window=9 | model.window = 9
model.window=9 model.position=none | model.window = 9
model.window=1000 model.position=none | model.window = 1000
"""
TRAINING_MISTAKES = """
train.accumulation=0 | train.accumulation | at least 1
train.steps=0 | train.steps | at least 1
optim.learning_rate=-0.1 | optim.learning_rate | at least 0 | -0.1
optim.weight_decay=nan | optim.weight_decay = nan
train.patience=3 | train.patience = 3 | train.keep_best
train.patience=3 train.keep_best=eval/loss train.evaluate_every=0 | train.patience = 3 | train.evaluate_every
train.growth=[[2,16]] | train.growth | [2, 16] | another size
optim.name=adamw_torch | "adamw_torch" | did you mean "adamw"
optim.name=Lion | "Lion" | did you mean "optax:lion"
train.keep_best=eval/perplexity | train.keep_best | eval/perplexity | eval/loss
train.keep_best=eval/explained | train.keep_best | eval/explained | eval/loss
optim.ema=1.0 | optim.ema
optim.betas=[0.9,1.0] | optim.betas
optim.schedule=a:b | a:b
optim.name=moun | "moun" | "muon" | adamw, muon
optim.name=os:path | "os:path"
optim.name=optax:constant_schedule | optim.name = optax:constant_schedule | optax.GradientTransformation
optim.name=optax:lion optim.betas=[0.5,1.0] | optim.betas | [0.5, 1.0]
optim.name=muon optim.momentum=1.0 | optim.momentum | 1.0
optim.betas=[0.9] | optim.betas | [0.9]
optim.betas=[-0.1,0.5] | optim.betas | [-0.1, 0.5]
optim.betas=["a",0.5] | optim.betas | ['a', 0.5]
optim.betas=[true,0] | optim.betas | [True, 0]
optim.warmup_steps=5 train.steps=5 | optim.warmup_steps = 5 | train.steps = 5
optim.schedule=cosin | "cosin" | "cosine" | constant, linear, cosine, wsd
optim.schedule=constant:0.5 | optim.schedule = constant:0.5
optim.schedule=linear:-1 | optim.schedule = linear:-1
optim.schedule=cosine:nan | optim.schedule = cosine:nan
optim.schedule=os:path | "os:path"
optim.schedule=test_optim:pair_schedule | optim.schedule = test_optim:pair_schedule | (step, steps)
"""
TABLES = {"vision": VISION_MISTAKES, "language": LANGUAGE_MISTAKES, "training": TRAINING_MISTAKES}
MISTAKES = [(name, *line.split(" | ")) for name, table in TABLES.items() for line in table.strip().splitlines()]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_an_invalid_setting_is_refused(check_refusal, request, mistake):
    experiment, changes, *words = mistake
    check_refusal([*request.getfixturevalue(experiment), *(f"--config.{change}" for change in changes.split())], *words)


@pytest.mark.parametrize(("labels", "words"), [([0, 1, -1, 2], ["from -1", "0 .. 2"]), ([0, 0, 0, 0], ["'0'"])])
def test_labels_that_cannot_be_trained_on_are_refused(check_refusal, vision, tmp_path, labels, words):
    """tests/data tests the other faults of data files."""
    x, y = np.zeros((4, 4, 4), np.uint8), np.array(labels)
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x, y_test=abs(y))
    check_refusal([*vision, f"--config.image.source={tmp_path / 'images.npz'}"], "images.npz", *words)


@pytest.mark.parametrize("experiment", ["vision", "language", "training"])
def test_the_arguments_above_are_accepted_without_the_mistake(experiment, request, tmp_path):
    """Check the tests above: without a mistake, the arguments are accepted until the run directory is created."""
    (tmp_path / "file").write_text("")
    outcome = tiny.run(*request.getfixturevalue(experiment), "--workdir", str(tmp_path / "file" / "run"))
    assert outcome.code == 2 and str(tmp_path / "file" / "run") in outcome.err


def test_a_shell_gets_exit_code_2_and_one_line_on_stderr(tmp_path):
    """Libraries may print warnings on import; the command adds one line."""
    command = [sys.executable, str(ROOT / "launch.py"), "--config", "no.py", "--workdir", str(tmp_path / "run")]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 2
    lines = [line for line in outcome.stderr.splitlines() if not line.startswith("WARNING:absl:")]
    assert lines == ["error: there is no config file no.py"]
    assert not list(tmp_path.iterdir())
