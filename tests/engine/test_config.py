"""Configs: a strict round trip, names resolved to variants, and unused settings refused."""

import json
import math
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import tiny
from errors import raises

from configs import base
from experiments.build import checks, model as models
from experiments.engine import by_name, config as configs, errors
from tfm import block, mlp, norm, position
from tfm.attention import implementations, relative_position, score, value


def saved_in(folder: pathlib.Path, content: Any) -> str:
    """Write a config in JSON with this content, and return its path."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "config.json")


ROOT = pathlib.Path(__file__).parents[2]


def values(config):
    return configs.flat(config.to_dict())


def overridden(*pairs, config=None):
    config = config or base.get_config("language")
    for key, text in pairs:
        configs.assign(config, key, text)
    return values(config)


def comments(fields, prefix=""):
    """The comment of every field of configs/base.py and of an experiment's config(), by its key."""
    result = {}
    for name, field in fields.items():
        more = {prefix + name: field[1]} if isinstance(field, tuple) else comments(field, f"{prefix}{name}.")
        result |= more
    return result


def test_every_field_has_a_comment_and_help_prints_it():
    every = comments(base.FIELDS)
    assert all(every.values()) and every.keys() == {key for key in values(base.get_config())}
    for name in by_name.list_experiments():
        own = by_name.load_experiment(name).config()
        assert comments(own).keys() == {key for part in own for key in values(configs.section({part: own[part]}))}
    printed = " ".join(" ".join(base.list_settings()).replace("    # ", "").split())
    assert [text for text in every.values() if " ".join(text.split()) not in printed] == []
    assert 'model.bias = "all" # all, none' in printed and "model.K = 32 # query" in printed


def test_a_saved_config_gives_the_same_config_and_leaves_base_as_it_was(tmp_path):
    before = values(base.get_config())
    changes = {"model.D": 96, "optim.learning_rate": 3e-4, "train.accumulation": 2, "text.source": "a = 'é'\n"}
    written = tiny.loaded(tiny.config_file(tmp_path, "language", **changes))
    for content in (written.to_dict(), {"config": written.to_dict(), "versions": {"jax": "1"}, "commit": "f"}):
        again = values(tiny.loaded(saved_in(tmp_path, content)))
        assert again == values(written)
        assert [type(value) for value in again.values()] == [type(value) for value in values(written).values()]
        assert again["model.K"] == 24 and again["model.F"] == 384
    assert values(base.get_config()) == before


def test_a_json_config_may_have_only_some_of_the_settings(tmp_path):
    config = values(tiny.loaded(saved_in(tmp_path, {"train": {"steps": 3}, "optim": {"clip": 2}})))
    assert config == values(base.get_config()) | {"train.steps": 3, "optim.clip": 2.0}
    assert isinstance(config["optim.clip"], float)


ARMS = [["mine", {"model": {"M": 1}, "model.score": "evil:x"}], ["b", {}]]
INNER = [["a", {"study": {"arms": [["b", {"optim.name": "evil:x"}]]}}]]


@pytest.mark.parametrize(
    ("key", "saved"),
    [
        ("model.score", {"model": {"score": "evil:x"}}),
        ("log", {"log": ["evil:x"]}),
        ("study.arms", {"study": {"arms": ARMS}}),
        ("study.arms", {"study": {"arms": [[{"image.head": "evil:x"}, "swapped"]]}}),
        ("study.arms", {"study": {"arms": [["a", {"study.tune": [["model.norm", ["evil:x"]]]}]]}}),
        ("study.arms", {"study": {"arms": [["source", [["evil:x"]]]]}}),
        ("study.arms", {"study": {"arms": [["a", {"model.resource": "evil:x"}]]}}),
        ("study.conditions", {"study.conditions": [["a", {}], ["b", {"text.objective": "evil:x"}]]}),
        ("study.conditions", {"study": {"conditions": [["a", {"model": {"score": "evil:x"}}]]}}),
        ("study.conditions", {"study": {"conditions": INNER}}),
        ("study.tune", {"study": {"tune": [["model.score", ["tied", "evil:x"]]]}}),
        ("study.tune", {"study.tune": [["model.score", [[["evil:x"]]]]]}),
    ],
)
def test_code_that_a_saved_config_names_is_not_run_unless_the_command_line_sets_the_key(tmp_path, key, saved):
    """The command line has the last word, so the file's value of this key is left out."""
    name, of = ("ablation", "vision") if key.startswith("study.") else ("vision", "")
    content = {"experiment": name, "study.experiment": of} if "study" not in saved and of else {"experiment": name}
    content |= saved | ({"study": {"experiment": of} | saved["study"]} if "study" in saved else {})
    file = saved_in(tmp_path, {"config": content})
    with raises(errors.UserError, '"evil:x"', f"--config.{key}="):
        tiny.loaded(file, explicit={"optim.name": ""})
    assert values(tiny.loaded(file, explicit={key: None})) == values(base.get_config(name, of=of))


def test_a_saved_study_may_name_what_is_there(tmp_path):
    arms = [["a", {"model.score": "tied", "text.source": "C:/x", "init_from": "a: b"}]]
    saved = {"experiment": "ablation", "study": {"experiment": "language", "arms": arms}}
    assert values(tiny.loaded(saved_in(tmp_path, saved)))["study.arms"] == arms


@pytest.mark.parametrize("text", ["[" * 99999 + "]" * 99999, "[1", "nothing"])
def test_a_list_that_json_cannot_read_is_refused(tmp_path, text):
    with raises(errors.UserError, "config.json"):
        tiny.loaded(saved_in(tmp_path, f'{{"experiment": "ablation", "study": {{"seeds": {text}}}}}'))
    with raises(errors.UserError, "study.seeds", "list"):
        overridden(("study.seeds", text), config=base.get_config("ablation"))


def test_what_a_saved_config_derived_stays_derived(tmp_path):
    result = tiny.loaded(saved_in(tmp_path, {"model": {"D": 96, "H": 2, "K": 48, "F": 7}}))
    configs.assign(result, "model.D", "64")
    assert values(result)["model.K"] == 32 and values(result)["model.F"] == 7
    result = values(tiny.loaded(saved_in(tmp_path, {"model": {"K": 32, "F": 512, "D": 256}})))
    assert result["model.K"] == 32 and result["model.F"] == 512


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.M = None", "model.M"),  # a ConfigDict takes None for anything, and True for 1
        ("train.steps = True", "train.steps"),
        ("experiment = None", "experiment"),
        ("more = 1", '"more"'),
        ("__delattr__('seed')", '"seed"'),
    ],
)
def test_a_config_with_other_keys_or_types_is_refused(tmp_path, change, key):
    begin = "from configs import base\ndef get_config():\n    c = base.get_config('vision').unlock()\n"
    (tmp_path / "config.py").write_text(f"{begin}    c.{change}\n    return c\n")
    with raises(errors.UserError, "config.py", key):
        tiny.loaded(str(tmp_path / "config.py"))


# What a command line says, and what the setting is then.
TAKEN = {
    "train.steps": {"7": 7},
    "mesh.data": {"-1": -1},
    "optim.learning_rate": {"1e-3": 0.001, "1": 1.0, ".5": 0.5},
    "model.bias": {"qkv": "qkv"},
    "text.source": {"x = 1 # a=b": "x = 1 # a=b", "": "", "7": "7"},
    "model.scale": {"1": "1"},
    "train.growth": {"[[2, 3]]": [[2, 3]]},
}


@pytest.mark.parametrize("key", TAKEN)
def test_an_override_has_the_type_of_its_field(key):
    before = overridden()
    for text, expected in TAKEN[key].items():
        result = overridden((key, text))
        assert result[key] == expected and type(result[key]) is type(expected)
        assert {other for other in result if result[other] != before[other]} <= {key}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.stebs", "3", ["train.steps"]),
        ("steps", "3", ["train.steps"]),
        ("model.d", "3", ["model.D"]),
        ("zzz", "3", []),
        ("train.steps", "1e3", ["int", "1e3"]),
        ("train.steps", "", ["int"]),
        ("train.steps", 2.0, ["int", "2.0"]),
        ("train.steps", True, ["int", "True"]),
        ("model.bias", False, ["str", "False"]),
        ("optim.clip", "one", ["float", "one"]),
        ("optim.clip", 10**400, ["float"]),
        ("train.growth", "2, 3", ["list", '["One", "Two"]', "2, 3"]),
    ],
)
def test_a_wrong_key_or_value_is_refused(key, value, words):
    with raises(errors.UserError, key, *words):
        overridden((key, value))


def test_sizes_follow_from_others_unless_they_are_set():
    def sizes(*pairs):
        return tuple(overridden(*pairs)[f"model.{letter}"] for letter in "DHKF")

    assert sizes() == (128, 4, 32, 512)
    assert sizes(("model.D", "60")) == (60, 4, 15, 240)
    assert sizes(("model.H", "2")) == (128, 2, 64, 512)
    assert sizes(("model.K", "5"), ("model.D", "60")) == (60, 4, 5, 240)
    assert sizes(("model.D", "60"), ("model.F", "7")) == (60, 4, 15, 7)
    config = base.get_config()
    config.model.F, config.model.D, config.model.H = 9, 30, 3
    assert (config.model.K, config.model.F) == (10, 9)


OFFERED = {
    "score": by_name.candidates(score),
    "value": by_name.candidates(value),
    "norm": by_name.candidates(norm),
    "mlp": by_name.candidates(mlp),
    "position": by_name.candidates(position),
    "relative_position": by_name.candidates(relative_position),
    "scale": score.SCALES,
    "bias": block.BIASES,
    "outer_norm": checks.OUTER_NORMS,
    "block": block.ORDERS,
    "attention": implementations.NAMES,
    "compute_dtype": models.DTYPES,
}


@pytest.mark.parametrize("field", OFFERED)
def test_base_lists_the_variants_of_a_package(field):
    assert set(tiny.listed(field)) == set(OFFERED[field])


@pytest.mark.parametrize(("name", "hint"), [("betta", '"beta"'), ("Alpha", '"alpha"'), ("x", "alpha, beta")])
def test_choosing_by_name(name, hint):
    right = {"alpha": 1, "beta": 2}
    assert by_name.choose("letter", "beta", right) == 2
    with raises(errors.UserError, "letter", f'"{name}"', hint):
        by_name.choose("letter", name, right)


def test_a_variant_from_the_users_file(tmp_path, monkeypatch):
    own = "from tfm.attention import score\ncosine = score.tied._replace(init='mine')\n"
    (tmp_path / "arms_of_mine.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != ""])
    scores = by_name.candidates(score)
    for name in ("arms_of_mine:cosine", "arms_of_mine.py:cosine"):
        result = by_name.choose("score", name, scores)
        assert (result.init, result.apply) == ("mine", score.tied.apply)
    for wrong, word in (("arms_of_mine:sine", "sine"), ("my_legs:cosine", "my_legs"), (".arms_of_mine:cosine", "")):
        with raises(errors.UserError, f'"{wrong}"', word):
            by_name.choose("score", wrong, scores)
    for wrong in ("arms-of-mine:cosine", "arms_of_mine:co sine", "arms_of_mine:"):  # a .json could name it unnoticed
        with raises(errors.UserError, f'"{wrong}"', "my_file:my_variant"):
            by_name.choose("score", wrong, scores)
    with raises(errors.UserError, "letter", "arms_of_mine:cosine"):
        by_name.choose("letter", "arms_of_mine:cosine", {"a": 1})  # no place for a program
    named = {key: list(configs.find_code(key, "arms_of_mine:cosine")) for key in ("model.score", "text.source")}
    assert named == {"model.score": [("model.score", "arms_of_mine:cosine")], "text.source": []}


def test_experiments_have_the_names_of_their_files():
    assert by_name.load_experiment("vision").__name__ == "experiments.vision"
    for wrong in ("", "nothing", "model", "../launch"):
        with raises(errors.UserError, f'"{wrong}"', "language", "vision"):
            by_name.load_experiment(wrong)


def test_absurd_numbers_are_refused():
    most = {"train.steps": 2**31 - 1, "seed": 2**32 - 1, "study.seeds": [2**32 - 1], "optim.clip": 3.4e38}
    configs.check_numbers(most)
    for key, number in (("train.steps", -(2**31)), ("study.seeds", [1, [2**32]]), ("seed", 2**32), ("seed", 10**5000)):
        with raises(errors.UserError, key):
            configs.check_numbers({key: number})
    for wrong in (math.nan, -math.inf, 3.5e38):
        with raises(errors.UserError, "a", wrong):
            configs.check_numbers({"a": [0.5, wrong]})


def test_values_of_a_program_get_the_types_of_a_config():
    config = base.get_config("ablation")
    given = {"study.seeds": (1, 2), "init_from": pathlib.Path("a"), "train.steps": np.int64(3)}
    given |= {"optim.clip": 2, "optim.ema": np.float32(0.5), "model.bias": "none"}
    for key in given:
        configs.assign(config, key, given[key])
    result = [values(config)[key] for key in given]
    assert result == [[1, 2], "a", 3, 2.0, 0.5, "none"]
    assert [type(one) for one in result] == [list, str, int, float, float, str]


def settings(**changes):
    config = base.get_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return configs.Settings(config, defaults=base.get_config())


def test_settings_are_values_by_name():
    result = settings(train__steps=7)
    assert result.train.steps == 7 and result.to_dict()["train"]["steps"] == 7
    with raises(AttributeError, "train.stebs"):
        _ = result.train.stebs


def test_a_changed_setting_that_is_never_read_is_refused():
    settings().refuse_unused()
    result = settings(train__steps=7, model__remat="full", seed=1)
    _ = result.train
    with raises(errors.UserError, "model.remat, seed, train.steps"):
        result.refuse_unused()
    assert (result.train.steps, result.seed) == (7, 1)
    with raises(errors.UserError, "model.remat"):
        result.refuse_unused()
    inner = result.model
    assert inner.remat == "full" and inner.D == 128
    result.refuse_unused()


def test_a_derived_size_counts_as_changed_if_an_experiment_uses_it():
    result = settings(model__D=64)
    _ = result.model.D
    with raises(errors.UserError, "model.F, model.K"):
        result.refuse_unused()  # an experiment that uses D uses these, too
    assert math.prod((result.model.F, result.model.K)) == 256 * 16
    result.refuse_unused()
