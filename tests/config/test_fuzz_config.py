"""Any config is accepted or refused in one sentence: random edits, run by the real launcher."""

import json
import math

import fuzz
import hypothesis
import numpy as np
import pytest
import tiny
from hypothesis import strategies as st

from experiments.config import disk
from experiments.dry_run import topology as topologies
from experiments.engine import run_plan, train_step
from experiments.folder import workdir as workdirs

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
synthetic.task ring:5 ring:1 ring:x ring previous reachability beats membership nearest induction modular_addition:9
optim.name adamw muon
optim.schedule cosine linear:0 constant wsd:0.3 wsd:-1
train.nan abort skip
train.keep_best eval/loss eval/accuracy
"""
NAMES = {line.split()[0]: line.split()[1:] for line in CHOICES.strip().splitlines()}  # {key: names to choose from}
FIELDS = "score value norm mlp position relative_position scale bias outer_norm block attention compute_dtype".split()
NAMES |= {f"model.{field}": tiny.list_names(field) for field in FIELDS}
ANGLES = "50 9:linear:2 9:dynamic:3:4 9:llama3:4:1:4:8 9:yarn:4:8 9:linear 9:linear:0 0 nan 9:yarn:0:1".split()
NAMES["optim.betas"] = [[0.8, 0.9], [0, 0.5], [0.9], [0.9, 1.0], [0.9, math.nan]]
NAMES["model.score"] += "tied_noself none_noself identity_query_noself _noself".split()
NAMES["model.norm"] += "token:0 rms:1e-6 batch:0.5 none:1 token:-1 rms: rms:nan".split()
NAMES["model.relative_position"] += [f"rotary:{angles}" for angles in ANGLES]
KEYS = st.sampled_from(sorted(DEFAULTS))
# Settings that every experiment reads.
COMMON_KEYS = KEYS.filter(lambda key: key.startswith(("model.", "train.", "optim.")))
LARGE = [10**9, 2**31 - 1, 2**31, 2**32, 10**12, 2**63, 10**30, 10**400]
MEDIUM = [24, 32, 48, 64, 100, 1000, 10**6]
INTEGERS = st.one_of(st.integers(-2, 20), st.sampled_from(MEDIUM), st.sampled_from(LARGE + [-n for n in LARGE]))
EXTREME_FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0])
FLOATS = st.one_of(st.floats(0, 1), st.floats(), EXTREME_FLOATS)
PAIRS = st.lists(st.lists(st.one_of(INTEGERS, FLOATS), max_size=3), max_size=3)
ANYTHING = st.one_of(
    st.none(), st.booleans(), INTEGERS, FLOATS, fuzz.TEXTS, PAIRS, st.dictionaries(fuzz.TEXTS, INTEGERS)
)


def draw_typed(key):
    """Return values of the right type."""
    return {bool: st.booleans(), int: INTEGERS, float: FLOATS, str: fuzz.TEXTS, list: PAIRS}[type(DEFAULTS[key])]


def draw_valid(key):
    """Return values that are often valid."""
    if key in NAMES:
        return st.sampled_from(NAMES[key])
    if key == "train.growth":
        return st.lists(st.tuples(st.integers(1, 5), st.sampled_from([16, 24, 32, 33])), max_size=2)
    numbers = {int: st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 48, 100]), float: st.sampled_from([0.0, 0.1, 0.5, 1.0])}
    return numbers.get(type(DEFAULTS[key]), draw_typed(key))


def edits(keys, values):
    return keys.flatmap(lambda key: st.tuples(st.just(key), values(key)))


EDIT = st.one_of(
    edits(KEYS, draw_valid),
    edits(COMMON_KEYS, draw_valid),
    edits(KEYS, draw_typed),
    st.tuples(KEYS, ANYTHING),
    st.tuples(st.one_of(fuzz.TEXTS, KEYS.map(lambda key: key[:-1]), KEYS.map(lambda key: key + ".x")), ANYTHING),
)


def nest(edits):
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
def configs(tmp_path_factory):
    """Return (folder with small data of every kind, {experiment: settings that use the data})."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.txt").write_bytes(tiny.TEXT)
    (folder / "pairs.tsv").write_text("".join(f"word {i}\tpalabra {i * i}\n" for i in range(150)))
    rng = np.random.default_rng(0)
    np.savez(folder / "images.npz", x=rng.integers(0, 256, (60, 8, 8), np.uint8), y=np.arange(60) % 3)
    settings = {
        "language": {"text.source": str(folder / "text.txt"), "text.N": 8},
        "translation": {"pairs.source": str(folder / "pairs.tsv"), "pairs.vocabulary": 300},
        "vision": {"image.source": str(folder / "images.npz"), "image.patch": 4},
        "masked_image": {"image.source": str(folder / "images.npz"), "image.patch": 4},
        "synthetic": {},
        "convolution": {"image.source": str(folder / "images.npz"), "model.H": 3},
    }
    overrides = {"convolution": TRAIN}
    return folder, {name: overrides.get(name, MODEL | TRAIN) | one for name, one in settings.items()}


class Reached(Exception):
    """Raised when the launcher has checked a config and would compile the step."""


def raise_reached(*_):
    """Replace a function that compiles."""
    raise Reached


@pytest.fixture
def until_compiling(monkeypatch, tmp_path):
    """Stop the launcher before it compiles the step. Use an empty folder and pretend to have 2 GiB of memory."""

    def abstract(task, optimiser, *, seed, mesh):
        return train_step.abstract_state(task, optimiser, mesh=mesh)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_step, "initial_state", abstract)
    monkeypatch.setattr(run_plan, "compile_step", raise_reached)
    monkeypatch.setattr(topologies, "compile_programs", raise_reached)
    monkeypatch.setattr(disk, "host_memory", lambda: 2**31)
    monkeypatch.setattr(workdirs, "read_commit", lambda: ("", b""))


def check_launch(test, *arguments):
    """Run a case and count it. Check that the config was accepted or refused in one sentence."""
    try:
        code, err = fuzz.run_launcher(*arguments)
    except Reached:
        return fuzz.count(test, "accepted")
    assert code == 2, (code, err)
    fuzz.check_sentence(err)
    assert err.startswith("error: ")
    return fuzz.count(test, "refused")


@pytest.fixture(scope="module", autouse=True)
def print_counts():
    yield
    fuzz.print_counts()


@hypothesis.given(
    st.sampled_from(["language", "vision", "masked_image", "synthetic", "convolution", "translation"]),
    st.lists(EDIT, max_size=3),
    st.sampled_from(["arguments", "json", "python"]),
    st.booleans(),
)
@fuzz.settings(24)
def test_a_config_is_accepted_or_refused_in_a_sentence(
    configs, until_compiling, tmp_path_factory, name, edits, form, is_dry_run
):
    folder, configs_of = configs
    new = tmp_path_factory.mktemp("case")
    destination = ["--dry_run"] if is_dry_run else ["--workdir", str(new / "run")]
    check_launch("configs", *arguments(new, form, name, configs_of[name], edits), *destination)


def arguments(folder, form, name, settings, edits):
    """Return the launcher's arguments for an experiment with these settings and edits.

    form: the edits are "arguments", or in a config in "json" or "python".
    """
    if form == "arguments":
        file = tiny.config_file(folder, name, **settings)
        return [
            "--config",
            file,
            *(f"--config.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in edits),
        ]
    entries = [("experiment", name), *settings.items(), *edits]
    if form == "json":
        content = json.dumps(nest(entries))
    else:
        lines = [f"    config.{key} = {value!r}" for key, value in entries]
        begin = f"    config = base.get_config({name!r}, of={settings.get('study.experiment', '')!r})"
        head = "from math import inf, nan\nfrom configs import base\ndef get_config():"
        content = "\n".join([head, begin, *lines, "    return config\n"])
    file = folder / f"config.{'json' if form == 'json' else 'py'}"
    file.write_text(content, encoding="utf-8", errors="backslashreplace")
    return ["--config", str(file)]
