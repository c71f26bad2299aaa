"""A user's mistake gets one sentence that names it and what is right, exit code 2, and leaves nothing behind."""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tiny

from experiments.engine import workdir

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ("--config.model.D=8", "--config.model.H=2", "--config.train.batch_size=16")


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Run with these arguments in an empty folder; the sentence, once it is the one thing that happened."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments, folder=tmp_path / "run"):
        outcome = tiny.run("--workdir", str(folder), *SMALL, *arguments)
        assert outcome.code == 2, outcome
        assert outcome.err.startswith("error: ") and outcome.err.endswith("\n") and outcome.err.count("\n") == 1
        assert "Traceback" not in outcome.out + outcome.err
        assert not os.path.lexists(folder) and not list((tmp_path / "here").iterdir())
        return outcome.err.removeprefix("error: ").strip()

    return run


def says(sentence, *words):
    missing = [word for word in words if word not in sentence]
    assert not missing, f"{sentence!r} does not say {missing}"


@pytest.fixture
def language(tmp_path):
    """The arguments of a small language run on a local text."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    return ("--config", tiny.config_file(tmp_path, "language", text__source=str(tmp_path / "text.txt"), text__N=8))


@pytest.fixture
def vision(tmp_path):
    return ("--config", tiny.config_file(tmp_path, "vision"))


def mistake_file(tmp_path, line):
    file = tmp_path / "mistake.py"
    lines = [
        "from configs import base",
        "",
        "def get_config():",
        "    c = base.get_config('vision')",
        f"    {line}",
        "    return c",
    ]
    file.write_text("\n".join(lines))
    return str(file)


# Keys, types, files


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("c.experimant = 'vision'", ['"experimant"', '"experiment"']),
        ("c.train.stebs = 3", ['"stebs"', '"steps"']),
        ("c.train.steps = 'many'", ["TypeError", "int"]),
        ("c.train.steps = 2.5", ["TypeError", "int"]),
        ("c.optim.schedule = 3", ["TypeError", "str"]),
        ("c.model.bias = 'yes'", ["TypeError", "bool"]),
        ("c.seed = 1 / 0", ["division by zero"]),
    ],
)
def test_a_mistake_in_a_config_file(refused, tmp_path, line, words):
    file = mistake_file(tmp_path, line)
    says(refused("--config", file), f"{file}, line 5: ", *words)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("train.stebs=3", ['"train.stebs"', '"train.steps"']),
        ("steps=3", ['"steps"', '"train.steps"']),
        ("model.d=3", ['"model.d"', '"model.D"']),
        ("train.steps=many", ['"train.steps"', "int", '"many"']),
        ("train.steps=1e3", ['"train.steps"', "int", '"1e3"']),
        ("train.steps=", ['"train.steps"', "int", '""']),
        ("optim.learning_rate=fast", ['"optim.learning_rate"', "float", '"fast"']),
        ("model.bias=yes", ['"model.bias"', "bool", "'yes'"]),
        ("model=3", ['"model"']),
    ],
)
def test_a_mistake_on_the_command_line(refused, vision, argument, words):
    says(refused(*vision, f"--config.{argument}"), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"train": {"stebs": 3}}, ['"train.stebs"', '"train.steps"']),
        ({"config": {"train": {"steps": "3"}}}, ['"train.steps"', "int", "'3'"]),
        ({"config": {"train": {"steps": True}}}, ['"train.steps"', "int", "True"]),
        ([1, 2], ["is not a config in JSON", "object"]),
        ("cut off", ["is not a config in JSON"]),
    ],
)
def test_a_mistake_in_a_json_config(refused, tmp_path, content, words):
    file = tmp_path / "config.json"
    file.write_text('{"config": {' if content == "cut off" else json.dumps(content))
    says(refused("--config", str(file)), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def get_config(:\n", ["SyntaxError", "config.py", "line 1"]),
        ("import no_such_module\n", ["config.py, line 1", "no_such_module"]),
        ("x = 1\n", ["config.py", "get_config"]),
        ("def get_config():\n    return {}\n", ["config.py", "get_config() must return", "base.get_config("]),
    ],
)
def test_a_file_that_is_no_config(refused, tmp_path, content, words):
    (tmp_path / "config.py").write_text(content)
    says(refused("--config", str(tmp_path / "config.py")), *words)


def test_a_config_that_is_not_there(refused, tmp_path):
    sentence = refused("--config", str(tmp_path / "vit.py"))
    says(sentence, f"no config file {tmp_path / 'vit.py'}")
    assert "WORKDIR" not in sentence  # who has mistyped it is not told of another run's
    (tmp_path / "vit.yaml").write_text("")
    says(refused("--config", str(tmp_path / "vit.yaml")), ".py", ".json", "vit.yaml")
    says(refused(), "--config configs/vit.py")


def test_words_that_mean_nothing(refused, vision):
    says(refused(*vision, "train.steps=3"), '"train.steps=3"', "--config.key=value")
    says(refused(*vision, "--workdri=x"), "workdri")


def test_a_setting_that_is_not_used(refused, vision, language):
    says(refused(*vision, "--config.text.N=9"), 'unknown config key "text.N"; the sections of vision are: ', "image")
    says(
        refused(*language, "--config.seed=1", "--config.optim.momentum=0.3", "--config.optim.muon_lr_multiplier=4"),
        "optim.momentum, optim.muon_lr_multiplier are set, but this experiment does not use them",
    )
    says(
        refused(*language, "--config.text.objective=masked", "--config.sample.max_new_tokens=3"),
        "sample.max_new_tokens",
    )


# Names


SCHEDULES = "constant linear cosine wsd"
NAMES = [
    ("vision", "experiment", "visoin", "language vision", "vision"),
    ("vision", "model.score", "assymetric", "none tied asymmetric", "asymmetric"),
    ("vision", "model.scale", "1/sqrt(k)", "1/sqrt(K) 1/sqrt(D) 1", "1/sqrt(K)"),
    ("vision", "model.value", "lowrank", "low_rank", "low_rank"),
    ("vision", "model.norm", "tokens", "token token_plain", "token"),
    ("vision", "model.mlp", "gleu", "relu gelu", "gelu"),
    ("vision", "model.position", "sinusoid", "learned sinusoidal none", "sinusoidal"),
    ("vision", "model.block", "prenorm", "pre_norm post_norm", "pre_norm"),
    ("vision", "model.attention", "explicite", "explicit", "explicit"),
    ("vision", "image.head", "pool", "pooled class_token", "pooled"),
    ("vision", "optim.schedule", "cosin", SCHEDULES, "cosine"),
    ("vision", "optim.name", "adamv", "adamw muon", "adamw"),
    ("vision", "device", "tpus", "any cpu gpu tpu", None),
    ("vision", "image.source", "digit", "digits mnist fashion_mnist", None),
    ("language", "text.source", "tinyshakespear", "stdlib tinyshakespeare", None),
    ("language", "text.objective", "mask", "causal masked", "masked"),
    ("language", "text.tokenizer", "byte", "bytes characters", "bytes"),
]


@pytest.mark.parametrize(("experiment", "key", "wrong", "right", "near"), NAMES, ids=[name[1] for name in NAMES])
def test_an_unknown_name_gets_the_right_ones(refused, request, experiment, key, wrong, right, near):
    arguments = request.getfixturevalue(experiment)
    sentence = refused(*arguments, f"--config.{key}={wrong}")
    says(sentence, wrong, *right.split())
    if near:
        assert f'did you mean "{near}"' in sentence.replace("'", '"')


def test_a_variant_of_ones_own_that_is_not_there(refused, vision):
    says(refused(*vision, "--config.model.score=my_arms:cosine"), "score", '"my_arms:cosine"', "my_arms")
    says(refused(*vision, "--config.model.mlp=math:gelu"), "mlp", '"math:gelu"', "gelu")
    says(refused(*vision, "--config.model.norm=:token"), "norm", '":token"')
    says(refused(*vision, "--config.model.norm=os:path"), "norm", '"os:path"', "a tuple (init, apply)")
    says(refused(*vision, "--config.model.scale=os:sep"), "scale", '"os:sep"', "a function")


# Sizes


SIZES = [
    (["model.D=9"], ["model.D = 9", "model.H = 2", "not divisible"]),
    (["model.H=3"], ["model.D = 8", "model.H = 3"]),
    (["model.H=0"], ["model.H"]),
    (["model.M=0"], ["model.M", "at least 1"]),
    (["model.K=-1"], ["model.K", "at least 1"]),
    (["model.unroll=-1"], ["model.unroll", "at least 0"]),
    (["image.patch=3"], ["8 x 8", "3 x 3", "image.patch"]),
    (["image.patch=0"], ["8 x 8", "image.patch"]),
    (["image.shift=8"], ["8 x 8", "shifted by 8"]),
    (["image.shift=-1"], ["8 x 8", "shifted by -1"]),
    (["train.batch_size=20"], ["train.batch_size = 20", "8 devices", "multiple of 8"]),
    (
        ["train.batch_size=20", "train.evaluate_batch=3", "mesh.data=3"],
        ["train.batch_size = 20", "3 devices", "multiple of 3"],
    ),
    (["train.accumulation=4"], ["train.batch_size = 16", "8 devices", "4 accumulated parts", "multiple of 32"]),
    (["train.evaluate_batch=12"], ["train.evaluate_batch = 12", "8 devices", "multiple of 8"]),
    (["train.batch_size=0"], ["batch", "at least 1", "0"]),
    (["train.accumulation=0"], ["train.accumulation", "at least 1"]),
    (["train.steps=0"], ["train.steps", "at least 1"]),
    (["train.save_every=-1"], ["train.save_every", "at least 0", "-1"]),
    (["optim.learning_rate=-0.1"], ["optim.learning_rate", "at least 0", "-0.1"]),
    (["optim.weight_decay=nan"], ["optim.weight_decay = nan", "no number"]),
    (["train.steps=5", "optim.warmup_steps=5"], ["optim.warmup_steps = 5", "train.steps = 5"]),
    (["train.batch_size=8000"], ["8000", "fewer than one batch"]),
    (["mesh.data=9"], ["mesh.data = 9", "does not fit", "8 x "]),
    (["mesh.data=0"], ["mesh.data = 0", "at least 1, or -1"]),
    (["seed=-1"], ["seed", "-1", "2**32"]),
]


@pytest.mark.parametrize(("arguments", "words"), SIZES, ids=[" ".join(arguments) for arguments, _ in SIZES])
def test_sizes_that_do_not_fit(refused, vision, arguments, words):
    says(refused(*vision, *(f"--config.{argument}" for argument in arguments)), *words)


@pytest.mark.parametrize(("key", "least"), [("text.N", 1), ("sample.max_new_tokens", 0)])
def test_sizes_of_text_that_do_not_fit(refused, language, key, least):
    says(refused(*language, f"--config.{key}={least - 1}"), key, f"at least {least}", str(least - 1))


# Data


def test_text_that_is_not_there(refused, language, tmp_path):
    missing = str(tmp_path / "missing.txt")
    says(refused(*language, f"--config.text.source={missing}"), missing, "stdlib", "tinyshakespeare")
    below_a_file = str(tmp_path / "text.txt" / "more")
    says(refused(*language, f"--config.text.source={below_a_file}"), below_a_file)


def test_text_that_is_empty_short_or_not_text(refused, language, tmp_path):
    text = tmp_path / "words.txt"
    arguments = (*language, f"--config.text.source={text}")
    text.write_bytes(b"")
    says(refused(*arguments), str(text), "holds no text")
    (tmp_path / "folder").mkdir()
    says(refused(*language, f"--config.text.source={tmp_path / 'folder'}"), "folder", "holds no text")
    text.write_bytes(b"to be or not to be")
    says(refused(*arguments), "evaluation part has 2 tokens", "needs 9")
    text.write_bytes(tiny.TEXT + b"\xff\xfe" + tiny.TEXT)
    says(refused(*arguments, "--config.text.tokenizer=characters"), "not UTF-8", "1180", "bytes")
    text.write_bytes(b"\x89PNG\r\n" + tiny.TEXT)
    says(refused(*arguments), str(text), "is a PNG image, not text", "leave it out")


def test_a_prompt_that_cannot_be_continued(refused, language):
    says(refused(*language, "--config.sample.prompt="), "sample.prompt", "at least one token")
    unknown = "--config.sample.prompt=é"
    says(refused(*language, "--config.text.tokenizer=characters", unknown), "'é'", "training text")


def test_fewer_examples_than_one_batch(refused, language, tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 122)))
    says(refused(*language, "--config.train.batch_size=80"), "73 examples", "batch of 80")


def idx_folder(folder, *, images=40, size=4, cut=0, label=1, evaluation_label=1):
    """MNIST's four files with random images, gzipped; `cut` bytes are missing from the training images."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, last in (("train", label), ("t10k", evaluation_label)):
        pixels = rng.integers(0, 256, (images, size, size), np.uint8)
        labels = np.append(rng.integers(0, 2, images - 1, np.uint8), np.uint8(last))
        for name, array in ((f"{part}-images-idx3-ubyte.gz", pixels), (f"{part}-labels-idx1-ubyte.gz", labels)):
            sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
            content = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
            keep = len(content) - (cut if name.startswith("train-images") else 0)
            (folder / name).write_bytes(gzip.compress(content[:keep], mtime=0))
    return f"--config.image.source={folder}"


def test_image_files_that_are_not_there(refused, vision, tmp_path):
    says(refused(*vision, f"--config.image.source={tmp_path / 'no'}"), str(tmp_path / "no"), "digits", "mnist")
    idx_folder(tmp_path / "idx")
    (tmp_path / "idx" / "t10k-labels-idx1-ubyte.gz").unlink()
    says(refused(*vision, f"--config.image.source={tmp_path / 'idx'}"), "lacks t10k-labels-idx1-ubyte")
    (tmp_path / "image.png").write_bytes(b"")
    says(refused(*vision, f"--config.image.source={tmp_path / 'image.png'}"), "image.png", "IDX", ".npz")


def test_a_named_set_that_is_not_here(refused, vision, tmp_path, monkeypatch):
    monkeypatch.setenv("TFM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sentence = refused(*vision, "--config.image.source=fashion_mnist")
    says(sentence, "fashion_mnist", *(str(tmp_path / place) for place in ("data", "cache")))


def test_truncated_idx_files(refused, vision, tmp_path):
    sentence = refused(*vision, idx_folder(tmp_path / "idx", cut=5))
    says(sentence, "train-images-idx3-ubyte.gz", "cut off", "(40, 4, 4)")


def test_labels_out_of_range(refused, vision, tmp_path):
    says(refused(*vision, idx_folder(tmp_path / "idx", evaluation_label=2)), "evaluation part", "label 2", "0 .. 1")
    says(refused(*vision, idx_folder(tmp_path / "high", label=200)), "training part", "label 200 is out of range")
    x, y = np.zeros((9, 4, 4), np.uint8), np.array([0, 1, 2, 0, 1, -1, 0, 1, 2])
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x, y_test=abs(y))
    says(refused(*vision, f"--config.image.source={tmp_path / 'images.npz'}"), "training part", "label -1", "0 .. 2")


def test_npz_files_that_hold_no_images(refused, vision, tmp_path):
    file = tmp_path / "images.npz"
    source = f"--config.image.source={file}"
    file.write_bytes(b"PK\3\4 and no more")
    says(refused(*vision, source), str(file), "damaged")
    np.savez(file, pixels=np.zeros((3, 4, 4)))
    says(refused(*vision, source), str(file), "x_train", "pixels")


# Machine and folder


@pytest.mark.parametrize(("device", "why"), [("tpu", "this machine has no TPU"), ("gpu", "sees only 8 x cpu")])
def test_an_accelerator_that_is_not_there(refused, vision, device, why):
    says(refused(*vision, f"--config.device={device}"), f"a {device} was asked for", why)


def test_a_workdir_that_cannot_be_written(refused, vision, tmp_path):
    (tmp_path / "file").write_text("mine")
    sentence = refused(*vision, "--config.image.patch=4", folder=tmp_path / "file" / "run")
    says(sentence, f"the workdir {tmp_path / 'file' / 'run'} cannot be written")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_workdir_that_is_a_file_or_holds_something_else(vision, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    for name, word in (("file", "cannot be written"), ("folder", "holds files, but no run to resume")):
        outcome = tiny.run(*vision, *SMALL, "--workdir", str(tmp_path / name))
        assert outcome.code == 2
        says(outcome.err, str(tmp_path / name), word)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["thesis.txt"]


def test_a_run_that_is_stopped_says_how_to_go_on(vision, tmp_path, monkeypatch):
    def stopped(*entering):
        raise KeyboardInterrupt

    monkeypatch.setattr(workdir, "enter", stopped)
    outcome = tiny.run(*vision, *SMALL, "--workdir", str(tmp_path / "run"))
    assert outcome.code == 130
    assert "--workdir" in outcome.err and outcome.err.count("\n") == 1


def test_any_other_error_is_not_hidden(vision, tmp_path, monkeypatch):
    """Only what a user can mend is a sentence; a fault of the program keeps its traceback."""

    def broken(*entering):
        raise ValueError("a fault")

    monkeypatch.setattr(workdir, "enter", broken)
    with pytest.raises(ValueError, match="a fault"):
        tiny.run(*vision, *SMALL, "--workdir", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("train.stebs=3", 'unknown config key "train.stebs" (did you mean "train.steps"?)'),
        ("image.patch=3", "images of 8 x 8 pixels do not divide into patches of 3 x 3 (image.patch)"),
    ],
)
def test_the_real_command(tmp_path, mistake, sentence):
    """What a shell sees: exit code 2, and one line on stderr that is ours (a library may warn as it is imported)."""
    command = [sys.executable, str(ROOT / "launch.py"), "--config", str(ROOT / "configs" / "vit.py")]
    command += ["--workdir", str(tmp_path / "run"), f"--config.{mistake}"]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 2
    lines = [line for line in outcome.stderr.splitlines() if not line.startswith("WARNING:absl:")]
    assert lines == [f"error: {sentence}"]
    assert not list(tmp_path.iterdir())


def test_the_arguments_above_would_run_but_for_the_mistake(vision, language, tmp_path, monkeypatch):
    """Guards the guards: without a mistake the same arguments reach the point where the folder is made."""
    reached = []

    def stopped(folder, *entering):
        reached.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(workdir, "enter", stopped)
    for arguments in (vision, language, (*vision, idx_folder(tmp_path / "idx"))):
        assert tiny.run(*arguments, *SMALL, "--workdir", str(tmp_path / "run")).code == 130
    assert reached == [tmp_path / "run"] * 3
