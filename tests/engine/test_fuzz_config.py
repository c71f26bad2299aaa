"""Whatever a config says, it is accepted or refused in one sentence: random edits on the real path of the launcher."""

import json
import math

import fuzz
import hypothesis
import numpy as np
import pytest
import tiny
from hypothesis import strategies as st

from experiments.dry_run import topology
from experiments.engine import disk, run_plan, train_step, workdir

DEFAULTS = tiny.fields()
MODEL = {"model.M": 1, "model.D": 8, "model.H": 2}
TRAIN = {"train.batch_size": 16, "train.steps": 3, "optim.warmup_steps": 1}
CHOICES = """
experiment language vision synthetic translation masked_image convolution sample classify fill export ablation
family gpt2 bert vit llama
text.objective causal prefix masked
text.tokenizer bytes characters
text.source docstrings
image.head pooled class_token
synthetic.task ring:5 ring:1 ring:x ring previous reachability beats membership nearest
optim.name adamw muon normuon hyperball
optim.schedule cosine linear:0 constant wsd:0.3 wsd:-1
train.nan abort skip skip_spikes
train.keep_best eval/loss eval/accuracy
"""
NAMES = {line.split()[0]: line.split()[1:] for line in CHOICES.strip().splitlines()}  # of what is chosen by name
FIELDS = "score value norm mlp position relative_position scale bias outer_norm block attention compute_dtype".split()
NAMES |= {f"model.{field}": tiny.listed(field) for field in FIELDS}
ANGLES = "50 9:linear:2 9:dynamic:3:4 9:llama3:4:1:4:8 9:yarn:4:8 9:linear 9:linear:0 0 nan 9:yarn:0:1".split()
NAMES["optim.betas"] = [[0.8, 0.9], [0, 0.5], [0.9], [0.9, 1.0], [0.9, math.nan]]
NAMES["model.score"] += "tied_noself none_noself identity_query_noself _noself".split()
NAMES["model.norm"] += "token:0 rms:1e-6 batch:0.5 none:1 token:-1 rms: rms:nan".split()
NAMES["model.relative_position"] += [f"rotary:{angles}" for angles in ANGLES]
KEYS = st.sampled_from(sorted(DEFAULTS))
TRAINED = KEYS.filter(lambda key: key.startswith(("model.", "train.", "optim.")))  # what every experiment looks at
LARGE = [10**9, 2**31 - 1, 2**31, 2**32, 10**12, 2**63, 10**30]
ABSURD = st.one_of(st.sampled_from(LARGE + [-n for n in LARGE]), st.just(5000).map(lambda digits: 10**digits))
WHOLE = st.one_of(st.integers(-2, 20), st.sampled_from([24, 32, 48, 64, 100, 1000, 10**6]), ABSURD)
BROKEN = st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0])
REAL = st.one_of(st.floats(0, 1), st.floats(), BROKEN)
PAIRS = st.lists(st.lists(st.one_of(WHOLE, REAL), max_size=3), max_size=3)
ANYTHING = st.one_of(st.none(), st.booleans(), WHOLE, REAL, fuzz.TEXTS, PAIRS, st.dictionaries(fuzz.TEXTS, WHOLE))


def typed(key):
    """A value of the right type."""
    return {bool: st.booleans(), int: WHOLE, float: REAL, str: fuzz.TEXTS, list: PAIRS}[type(DEFAULTS[key])]


def sensible(key):
    """Return values that are often valid."""
    if key in NAMES:
        return st.sampled_from(NAMES[key])
    if key == "train.growth":
        return st.lists(st.tuples(st.integers(1, 5), st.sampled_from([16, 24, 32, 33])), max_size=2)
    numbers = {int: st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 48, 100]), float: st.sampled_from([0.0, 0.1, 0.5, 1.0])}
    return numbers.get(type(DEFAULTS[key]), typed(key))


def edits(keys, values):
    return keys.flatmap(lambda key: st.tuples(st.just(key), values(key)))


EDIT = st.one_of(
    edits(KEYS, sensible),
    edits(TRAINED, sensible),
    edits(KEYS, typed),
    st.tuples(KEYS, ANYTHING),
    st.tuples(st.one_of(fuzz.TEXTS, KEYS.map(lambda key: key[:-1]), KEYS.map(lambda key: key + ".x")), ANYTHING),
)


def plainly(write, value, otherwise):
    """The value as text; otherwise for a number of thousands of digits, which Python does not write."""
    try:
        return write(value)
    except ValueError:
        return otherwise


def as_text(value):
    """Return the value as it is written on the command line."""
    how = json.dumps if not isinstance(value, str | float) else str
    return plainly(how, value, "9" * 5000)


def nested(edits):
    """Return {'a.b': 1} as {'a': {'b': 1}}; if a part of a key is a value, the key stays as it is."""
    values = {}
    for key, value in edits:
        inner = values
        *parts, last = key.split(".")
        for part in parts:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner
        if isinstance(inner, dict):
            inner[last] = value
        else:
            values[key] = value
    return values


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with small data of every kind, and the config of each experiment that uses it."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.txt").write_bytes(tiny.TEXT)
    (folder / "pairs.tsv").write_text("".join(f"word {i}\tpalabra {i * i}\n" for i in range(150)))
    rng = np.random.default_rng(0)
    np.savez(folder / "images.npz", x=rng.integers(0, 256, (60, 8, 8), np.uint8), y=np.arange(60) % 3)
    own = {
        "language": {"text.source": str(folder / "text.txt"), "text.N": 8},
        "translation": {"pairs.source": str(folder / "pairs.tsv"), "pairs.vocabulary": 300},
        "vision": {"image.source": str(folder / "images.npz"), "image.patch": 4},
        "masked_image": {"image.source": str(folder / "images.npz"), "image.patch": 4},
        "synthetic": {},
        "convolution": {"image.source": str(folder / "images.npz"), "model.H": 3},
    }
    without = {"convolution": TRAIN}
    return folder, {name: without.get(name, MODEL | TRAIN) | one for name, one in own.items()}


class Reached(Exception):
    """The config was accepted: all is checked, and the step would be compiled now."""


def reached(*_):
    """In the place of what compiles."""
    raise Reached


@pytest.fixture
def until_compiling(monkeypatch, tmp_path):
    """The launcher up to where the training step is compiled, in an empty folder, on a machine of 2 GiB."""

    def abstract(task, optimiser, *, seed, mesh):
        return train_step.abstract_state(task, optimiser, mesh=mesh)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_step, "initial_state", abstract)
    monkeypatch.setattr(run_plan, "compile_step", reached)
    monkeypatch.setattr(topology, "compile_programs", reached)
    monkeypatch.setattr(disk, "host_memory", lambda: 2**31)
    monkeypatch.setattr(workdir, "describe_commit", lambda: "")


def launched(test, *arguments):
    """Count the case, and check that it was accepted or refused in a sentence."""
    try:
        code, err = fuzz.launched(*arguments)
    except Reached:
        return fuzz.count(test, "accepted")
    assert code == 2, (code, err)
    fuzz.check_sentence(err)
    assert err.startswith("error: ")
    return fuzz.count(test, "refused")


@pytest.fixture(scope="module", autouse=True)
def print_counts():
    yield
    fuzz.tell()


@hypothesis.given(
    st.sampled_from(["language", "vision", "masked_image", "synthetic", "convolution", "translation"]),
    st.lists(EDIT, max_size=3),
    st.sampled_from(["arguments", "json", "python"]),
    st.booleans(),
)
@fuzz.settings(24)
def test_a_config_is_accepted_or_refused_in_a_sentence(place, until_compiling, tmp_path_factory, name, edits, way, dry):
    folder, configs_of = place
    new = tmp_path_factory.mktemp("case")
    where = ["--dry_run"] if dry else ["--workdir", str(new / "run")]
    launched("configs", *arguments(new, way, name, configs_of[name], edits), *where)


def arguments(folder, way, name, own, edits):
    """Return the launcher's arguments for an experiment with its settings and the edits, in one of three ways."""
    if way == "arguments":
        file = tiny.config_file(folder, name, **own)
        return ["--config", file, *(f"--config.{key}={as_text(value)}" for key, value in edits)]
    every = [("experiment", name), *own.items(), *edits]
    if way == "json":
        content = plainly(json.dumps, nested(every), '{"seed": ' + "9" * 5000 + "}")
    else:
        lines = [f"    config.{key} = {plainly(repr, value, '10 ** 5000')}" for key, value in every]
        begin = f"    config = base.get_config({name!r}, of={own.get('study.experiment', '')!r})"
        head = "from math import inf, nan\nfrom configs import base\ndef get_config():"
        content = "\n".join([head, begin, *lines, "    return config\n"])
    file = folder / f"config.{'json' if way == 'json' else 'py'}"
    file.write_text(content, encoding="utf-8", errors="backslashreplace")
    return ["--config", str(file)]
