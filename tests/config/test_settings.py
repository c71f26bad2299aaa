"""Configs: saved and loaded without loss, names resolved to variants, unused settings refused."""

import contextlib
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
from experiments.config import by_name, errors, settings as configs
from experiments.model import build, checks, variants
from tfm import block as blocks
from tfm.attention import implementations, score


def save_config(folder: pathlib.Path, content: Any) -> str:
    """Write config.json with this content, and return its path."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "config.json")


ROOT = pathlib.Path(__file__).parents[2]


def values(config):
    return configs.flat(config.to_dict())


def override(*pairs, config=None):
    config = config or base.get_config("language")
    for key, text in pairs:
        configs.assign(config, key, text)
    return values(config)


def comments(fields, prefix=""):
    """Return {key: comment} for the fields of configs/base.py or of an experiment's config()."""
    result = {}
    for name, field in fields.items():
        entries = {prefix + name: field[1]} if isinstance(field, tuple) else comments(field, f"{prefix}{name}.")
        result |= entries
    return result


def test_every_field_has_a_comment_and_help_prints_it():
    all_comments = comments(base.FIELDS)
    assert all(all_comments.values()) and all_comments.keys() == {key for key in values(base.get_config())}
    for name in by_name.list_experiments():
        sections = by_name.load_experiment(name).config()
        keys = {key for name in sections for key in values(configs.section({name: sections[name]}))}
        assert comments(sections).keys() == keys
    help_text = " ".join(" ".join(base.list_settings()).replace("    # ", "").split())
    assert [text for text in all_comments.values() if " ".join(text.split()) not in help_text] == []
    assert 'model.bias = "all" # which matrix' in help_text and "model.K = 32 # features" in help_text


def test_a_saved_config_gives_the_same_config_and_leaves_base_as_it_was(tmp_path):
    before = values(base.get_config())
    changes = {"model.D": 96, "optim.learning_rate": 3e-4, "train.accumulation": 2, "text.source": "a = 'é'\n"}
    config = tiny.load_config(tiny.config_file(tmp_path, "language", **changes))
    for content in (config.to_dict(), {"config": config.to_dict(), "versions": {"jax": "1"}, "commit": "f"}):
        result = values(tiny.load_config(save_config(tmp_path, content)))
        assert result == values(config)
        assert [type(value) for value in result.values()] == [type(value) for value in values(config).values()]
        assert result["model.K"] == 24 and result["model.F"] == 384
    assert values(base.get_config()) == before


def test_a_json_config_may_have_only_some_of_the_settings(tmp_path):
    config = values(tiny.load_config(save_config(tmp_path, {"train": {"steps": 3}, "optim": {"clip": 2}})))
    assert config == values(base.get_config()) | {"train.steps": 3, "optim.clip": 2.0}
    assert isinstance(config["optim.clip"], float)


ARMS = [["mine", {"model": {"M": 1}, "model.score": "evil:x"}], ["b", {}]]
INNER = [["a", {"study": {"arms": [["b", {"optim.name": "evil:x"}]]}}]]


@pytest.mark.parametrize(
    ("key", "changes"),
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
def test_code_that_a_saved_config_names_is_not_run_unless_the_command_line_sets_the_key(tmp_path, key, changes):
    """A value on the command line replaces the file's value, which is then not imported."""
    name, inner = ("ablation", "vision") if key.startswith("study.") else ("vision", "")
    content = {"experiment": name} | changes
    if "study" in changes:
        content["study"] = {"experiment": inner} | changes["study"]
    elif inner:
        content["study.experiment"] = inner
    file = save_config(tmp_path, {"config": content})
    with raises(errors.UserError, '"evil:x"', f"--config.{key}="):
        tiny.load_config(file, explicit={"optim.name": ""})
    assert values(tiny.load_config(file, explicit={key: None})) == values(base.get_config(name, of=inner))


def test_a_saved_study_may_have_texts_that_look_like_code_in_settings_of_other_kinds(tmp_path):
    arms = [["a", {"model.score": "tied", "text.source": "C:/x", "init_from": "a: b"}]]
    config = {"experiment": "ablation", "study": {"experiment": "language", "arms": arms}}
    assert values(tiny.load_config(save_config(tmp_path, config)))["study.arms"] == arms


def test_a_list_that_json_cannot_read_is_refused(tmp_path):
    for text in ("[" * 99999 + "]" * 99999, "[1", "nothing"):
        with raises(errors.UserError, "config.json"):
            tiny.load_config(save_config(tmp_path, f'{{"experiment": "ablation", "study": {{"seeds": {text}}}}}'))
        with raises(errors.UserError, "study.seeds", "list"):
            override(("study.seeds", text), config=base.get_config("ablation"))


def test_derived_sizes_of_a_saved_config_stay_derived(tmp_path):
    result = tiny.load_config(save_config(tmp_path, {"model": {"D": 96, "H": 2, "G": 2, "K": 48, "F": 7}}))
    configs.assign(result, "model.D", "64")
    configs.assign(result, "model.H", "4")
    assert [values(result)[f"model.{letter}"] for letter in "DHGKF"] == [64, 4, 4, 16, 7]
    result = values(tiny.load_config(save_config(tmp_path, {"model": {"K": 32, "F": 512, "D": 256}})))
    assert result["model.K"] == 32 and result["model.F"] == 512


# key, what the command line or a program sets, the resulting value
VALUES = [
    ("train.steps", "7", 7),
    ("train.steps", np.int64(3), 3),
    ("mesh.data", "-1", -1),
    ("optim.learning_rate", "1e-3", 0.001),
    ("optim.learning_rate", "1", 1.0),
    ("optim.clip", 2, 2.0),
    ("optim.ema", np.float32(0.5), 0.5),
    ("model.bias", "qkv", "qkv"),
    ("text.source", "x = 1 # a=b", "x = 1 # a=b"),
    ("text.source", "", ""),
    ("text.source", "7", "7"),
    ("init_from", pathlib.Path("a"), "a"),
    ("train.growth", "[[2, 3]]", [[2, 3]]),
    ("optim.betas", (0.5, 1), [0.5, 1]),
]


@pytest.mark.parametrize(("key", "value", "expected"), VALUES)
def test_a_value_gets_the_type_of_its_setting(key, value, expected):
    before, result = override(), override((key, value))
    assert result[key] == expected and type(result[key]) is type(expected)
    assert {name for name in result if result[name] != before[name]} <= {key}


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
        ("train.growth", "2, 3", ["list", "'[2, 3]'", "2, 3"]),
        ("optim.betas", "0.9,.95", ["list", "'[0.9, 0.95]'"]),
        ("train.metrics", "top5,a:b", ["list", """'["top5", "a:b"]'"""]),
        ("rope", "1", ["model.relative_position=rotary"]),
        ("model.qk_norm", "1", ["model.score=asymmetric_qknorm"]),
    ],
)
def test_a_wrong_key_or_value_is_refused(key, value, words):
    with raises(errors.UserError, key, *words):
        override((key, value))


SUGGESTIONS = """
norm ln token
norm rms_norm rms
norm groupnorm
relative_position RoPE rotary" or "rotary_halves
relative_position learned model.position=learned
position rotary model.relative_position=rotary
score symmetric tied" or "pairwise_sym
score symetric symmetric_init
score qk_norm asymmetric_qknorm
mlp swish silu
mlp relu2 relu_squared
mlp glu swiglu" or "geglu" or "reglu
mlp elu
block prenorm pre_norm
block post_ln post_norm
block prst_norm
attention sdpa flash
optimiser adam adamw
schedule cosine_decay cosine
schedule inverse_sqrt
"""


@pytest.mark.parametrize("row", SUGGESTIONS.strip().splitlines())
def test_a_name_of_another_project_leads_to_ours_and_never_to_an_opposite(row):
    kind, name, *expected = row.split(" ", 2)
    others = {"block": blocks.ORDERS, "attention": implementations.NAMES, "optimiser": ["adamw", "muon"]}
    others["schedule"] = ["constant", "linear", "cosine", "wsd"]
    allowed = others[kind] if kind in others else by_name.candidates(variants.MODULES[kind])
    assert by_name.suggest(name, allowed) == (f' (did you mean "{expected[0]}"?)' if expected else "")


def test_the_users_code_is_found_by_its_real_path(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(ROOT)
    monkeypatch.chdir(tmp_path)
    ours = ["link/launch.py", f"../{tmp_path.name}/link/tfm/mlp.py", f"{ROOT}/experiments/vision.py", "<string>"]
    assert not any(map(by_name.is_user_code, ours))
    assert all(map(by_name.is_user_code, ["my_file.py", "link/configs/vit.py", "link/tfm2/mlp.py"]))


def test_sizes_follow_from_others_unless_they_are_set():
    def sizes(*pairs):
        return tuple(override(*pairs)[f"model.{letter}"] for letter in "DHKF")

    assert sizes() == (128, 4, 32, 512)
    assert sizes(("model.D", "60")) == (60, 4, 15, 240)
    assert sizes(("model.H", "2")) == (128, 2, 64, 512)
    assert sizes(("model.K", "5"), ("model.D", "60")) == (60, 4, 5, 240)
    assert sizes(("model.D", "60"), ("model.F", "7")) == (60, 4, 15, 7)


VARIANTS = {
    **{name: by_name.candidates(module) for name, module in variants.MODULES.items()},
    "scale": score.SCALES,
    "bias": blocks.BIASES,
    "outer_norm": checks.OUTER_NORMS,
    "block": blocks.ORDERS,
    "attention": implementations.NAMES,
    "compute_dtype": build.DTYPES,
}


@pytest.mark.parametrize("field", VARIANTS)
def test_base_lists_the_variants_of_a_package(field):
    assert set(tiny.list_names(field)) == set(VARIANTS[field])


def test_a_variant_is_loaded_from_the_users_file(tmp_path, monkeypatch):
    source = "from tfm.attention import score\ncosine = score.tied._replace(init='mine')\n"
    (tmp_path / "arms_of_mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != ""])
    scores = by_name.candidates(score)
    for name in ("arms_of_mine:cosine", "arms_of_mine.py:cosine"):
        result = by_name.choose("score", name, scores)
        assert (result.init, result.apply) == ("mine", score.tied.apply)
    for name, word in (("arms_of_mine:sine", "sine"), ("my_legs:cosine", "my_legs"), (".arms_of_mine:cosine", "")):
        with raises(errors.UserError, f'"{name}"', word):
            by_name.choose("score", name, scores)
    # A saved config must not name such code unnoticed.
    for name in ("arms-of-mine:cosine", "arms_of_mine:co sine", "arms_of_mine:"):
        with raises(errors.UserError, f'"{name}"', "my_file:my_variant"):
            by_name.choose("score", name, scores)
    with raises(errors.UserError, "letter", "arms_of_mine:cosine"):
        by_name.choose("letter", "arms_of_mine:cosine", {"a": 1})  # this setting accepts no user code
    code = {key: list(configs.find_code(key, "arms_of_mine:cosine")) for key in ("model.score", "image.source")}
    assert code == {"model.score": [("model.score", "arms_of_mine:cosine")], "image.source": []}


def test_experiments_have_the_names_of_their_files():
    assert by_name.load_experiment("vision").__name__ == "experiments.vision"
    for name in ("", "nothing", "../launch"):
        with raises(errors.UserError, f'"{name}"', "language", "vision"):
            by_name.load_experiment(name)


def test_numbers_that_are_out_of_range_or_not_finite_are_refused():
    largest = {"train.steps": 2**31 - 1, "seed": 2**32 - 1, "study.seeds": [2**32 - 1], "optim.clip": 3.4e38}
    configs.check_numbers(largest)
    wrong = {"train.steps": -(2**31), "study.seeds": [1, [2**32]], "seed": 2**32, "study.tune_seeds": [-1]}
    for key, number in [*wrong.items(), ("seed", 10**5000)]:
        with raises(errors.UserError, key):
            configs.check_numbers({key: number})
    for number in (math.nan, -math.inf, 3.5e38):
        with raises(errors.UserError, "a", number):
            configs.check_numbers({"a": [0.5, number]})


def settings(**changes):
    config = base.get_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return configs.Settings(config)


def test_a_changed_setting_that_is_never_read_is_refused():
    settings().refuse_unused()
    result = settings(train__steps=7, model__remat="full", seed=1)
    assert result.train.steps == 7 and result.to_dict()["train"]["steps"] == 7
    with raises(AttributeError, "train.stebs"):
        _ = result.train.stebs
    _ = result.model  # a section, of which nothing is read
    with raises(errors.UserError, "use model.remat, seed. Remove"):
        result.refuse_unused()
    assert (result.seed, result.model.remat, result.model.D) == (1, "full", 128)
    result.refuse_unused()


def test_a_derived_size_counts_as_unused_only_if_the_user_sets_it():
    for changes in ({"model__D": 64}, {"model__D": 64, "model__F": 7}):
        result = settings(**changes)
        assert result.model.D == 64
        with raises(errors.UserError, "model.F") if "model__F" in changes else contextlib.nullcontext():
            result.refuse_unused()  # K and F follow from D
    assert result.model.F == 7
    result.refuse_unused()
