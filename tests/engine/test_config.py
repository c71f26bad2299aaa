"""Configs: what is loaded is what was written, strictly; names are chosen, and what nobody reads is noticed."""

import json
import math
import pathlib
import re

import ml_collections
import pytest
import tiny

from configs import base
from experiments import model as models
from experiments import vision
from experiments.engine import by_name, config_file, errors
from experiments.engine import config as configs
from tfm import attention, block, mlp, norm, position
from tfm.attention import relative_position, score, value

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "base"))


def values(config):
    return configs.flat(config.to_dict())


def overridden(*pairs, config=None):
    config = config or base.get_config("language")
    for key, text in pairs:
        configs.override(config, key, text)
    return values(config)


# Loading and saving


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_config_of_the_project_is_a_small_diff_that_says_how_to_run_it(file):
    config = config_file.load(str(file), base=base.get_config)
    defaults, found = values(config_file.defaults(config, base.get_config)), values(config)
    assert found.keys() == defaults.keys()
    derived = {"model.K", "model.F"} if found["model.K"] == found["model.D"] // found["model.H"] else set()
    changed = {key for key in found if found[key] != defaults[key]} - derived
    most = 30 if "speedrun" in file.stem else 14  # that one differs in all that makes it quick
    assert len(changed) <= most
    assert by_name.experiment(found["experiment"])
    docstring = file.read_text(encoding="utf-8").split('"""')[1]
    assert f"python launch.py --config configs/{file.name}" in docstring


def test_the_project_has_its_configs():
    expected = {"vit", "vit_fashion", "causal_lm", "shakespeare_char", "masked_lm", "smoke"}
    assert expected <= {file.stem for file in FILES}


def test_every_field_of_base_has_a_comment():
    fields = [
        line for line in (ROOT / "configs" / "base.py").read_text().splitlines() if line.startswith("    config.")
    ]
    plain = [line for line in fields if not re.search(r"= \w+\(\)$", line)]  # not: config.mesh = mesh()
    bare = [line for line in plain if "#" not in line and not line.startswith(("    config.steps", "    config.lock"))]
    assert len(plain) > 40 and bare == []


def test_a_saved_config_gives_the_same_config(tmp_path):
    file = tiny.config_file(
        tmp_path, "language", model__D=96, optim__learning_rate=3e-4, train__accumulation=2, sample__prompt="a = 'é'\n"
    )
    written = config_file.load(file, base=base.get_config)
    saved = tmp_path / "config.json"
    for content in (written.to_dict(), {"config": written.to_dict(), "versions": {"jax": "1"}, "commit": "f"}):
        saved.write_text(json.dumps(content))
        again = config_file.load(str(saved), base=base.get_config)
        assert values(again) == values(written)
        assert [type(value) for value in values(again).values()] == [type(value) for value in values(written).values()]
    assert values(again)["model.K"] == 24 and values(again)["model.F"] == 384


def test_a_json_config_may_be_a_part_and_is_not_executed(tmp_path):
    saved = tmp_path / "config.json"
    saved.write_text('{"train": {"steps": 3}, "optim": {"clip": 2}}')
    found, defaults = values(config_file.load(str(saved), base=base.get_config)), values(base.get_config())
    assert found == defaults | {"train.steps": 3, "optim.clip": 2.0} and isinstance(found["optim.clip"], float)


NESTED = [["a", {"model": {"score": "evil:x"}}]]
EVIL = [["mine", {"model": {"M": 1}, "model.score": "evil:x"}], ["b", {}]]


@pytest.mark.parametrize(
    ("saved", "where"),
    [
        ({"model": {"score": "evil:x"}}, ""),
        ({"study": {"arms": EVIL, "experiment": "vision"}}, " in study.arms"),
        ({"study.conditions": [["a", {}], ["b", {"text.objective": "evil:x"}]]}, " in study.conditions"),
        (
            {"config": {"study": {"experiment": "vision", "conditions": [["a", {"model": {"score": "evil:x"}}]]}}},
            " in study.conditions",
        ),
        ({"study": {"experiment": "vision", "arms": [[{"image.head": "evil:x"}, "swapped"]]}}, " in study.arms"),
    ],
)
def test_code_that_a_saved_config_names_is_not_run(tmp_path, saved, where):
    """What is trusted is given on the command line; that has the last word, so the file's is left out."""
    file = tmp_path / "config.json"
    name, of = ("ablation", "vision") if where else ("vision", "")
    more = {"experiment": name} | ({"study.experiment": of} if of else {})
    file.write_text(json.dumps({"config": more | saved["config"]} if "config" in saved else more | saved))
    with pytest.raises(errors.UserError, match=f' = "evil:x"{where}, a program that would be run: give it on the comm'):
        config_file.load(str(file), base=base.get_config, given={"model.score": ""} if where else {"study.arms": []})
    given = where.removeprefix(" in ") or "model.score"
    assert values(config_file.load(str(file), base=base.get_config, given={given: None})) == values(
        base.get_config(name, of=of)
    )


def test_a_saved_study_may_name_what_is_there(tmp_path):
    arms = [["a:b", {"model.score": "tied", "text.source": "C:/x", "sample.prompt": "a: b"}]]
    (tmp_path / "config.json").write_text(
        json.dumps({"experiment": "ablation", "study": {"experiment": "language", "arms": arms}})
    )
    assert values(config_file.load(str(tmp_path / "config.json"), base=base.get_config))["study.arms"] == arms


@pytest.mark.parametrize("content", ['{"k%d": 1', '{"k%d": {}', '{"train.steps": 3, "study": {"arms": [1]}, "k%d": 1'])
def test_millions_of_settings_are_no_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content % 0 + "".join(f', "k{i}": 1' for i in range(1, 100_000)) + "}")
    with pytest.raises(errors.UserError, match=r"it has 1,\d{3},\d{3} characters, and 1,048,576 are allowed"):
        config_file.load(str(tmp_path / "config.json"), base=base.get_config)


def test_an_unknown_setting_is_refused_before_the_others_are_taken(tmp_path, monkeypatch):
    """Nor is a long name told whole, or put before each of thousands of names below it."""
    monkeypatch.setattr(configs, "assign", None)
    long = "x" * 300_000
    saved = {"seed": 7, "train": {"steps": 3}, long: {f"k{i}": 1 for i in range(50_000)}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(errors.UserError) as caught:
        config_file.load(str(tmp_path / "config.json"), base=base.get_config)
    assert str(caught.value).startswith(f'unknown config key "{long[:97]}..."') and len(str(caught.value)) < 250


@pytest.mark.parametrize("text", ["[" * 600 + "]" * 600, "[" * 99999 + "]" * 99999, '{"a":' * 31 + "1" + "}" * 31])
def test_what_is_nested_absurdly_is_refused(tmp_path, text):
    """Python's own limit is reached somewhere else in every version."""
    (tmp_path / "config.json").write_text(f'{{"experiment": "ablation", "study": {{"seeds": {text}}}}}')
    with pytest.raises(errors.UserError, match="it is nested more than 30 levels deep"):
        config_file.load(str(tmp_path / "config.json"), base=base.get_config)
    with pytest.raises(errors.UserError, match='"study.seeds" must be of type list'):
        overridden(("study.seeds", text), config=base.get_config("ablation"))


def test_what_a_saved_config_derived_stays_derived(tmp_path):
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps({"model": {"D": 96, "H": 2, "K": 48, "F": 7}}))
    found = config_file.load(str(saved), base=base.get_config)
    configs.override(found, "model.D", "64")
    assert values(found)["model.K"] == 32 and values(found)["model.F"] == 7


def test_loading_a_config_leaves_base_as_it_was(tmp_path):
    before = values(base.get_config())
    config_file.load(tiny.config_file(tmp_path, "vision", model__D=96), base=base.get_config)
    overridden(("model.D", "8"))
    assert values(base.get_config()) == before


def test_an_error_in_a_config_file_is_told_with_its_last_line_there(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\n\ndef text():\n    return json.loads('{')\n\ndef get_config():\n    return text()\n")
    with pytest.raises(errors.UserError) as caught:
        config_file.load(str(file), base=base.get_config)
    assert str(caught.value).startswith(f"{file}, line 4: JSONDecodeError: ")
    assert "\n" not in str(caught.value)


# Overrides


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.steps", "7", 7),
        ("mesh.data", "-1", -1),
        ("optim.learning_rate", "1e-3", 0.001),
        ("optim.learning_rate", "1", 1.0),
        ("optim.learning_rate", ".5", 0.5),
        ("model.bias", "false", False),
        ("model.bias", "False", False),
        ("model.bias", "0", False),
        ("model.remat", "true", True),
        ("model.remat", "1", True),
        ("sample.prompt", "x = 1 # a=b", "x = 1 # a=b"),
        ("sample.prompt", "", ""),
        ("sample.prompt", "7", "7"),
        ("model.scale", "1", "1"),
        ("init_from", "/a folder/é", "/a folder/é"),
    ],
)
def test_an_override_has_the_type_of_its_field(key, text, expected):
    found = overridden((key, text))
    assert found[key] == expected and type(found[key]) is type(expected)
    assert {k for k, v in found.items() if v != values(base.get_config("language"))[k]} <= {key}


def test_a_list_is_given_as_json():
    config = ml_collections.ConfigDict({"sizes": [1]})
    assert overridden(("sizes", "[2, 3]"), config=config) == {"sizes": [2, 3]}
    with pytest.raises(errors.UserError, match='"sizes" must be of type list'):
        overridden(("sizes", "2, 3"), config=config)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("train.stebs", "3", 'unknown config key "train.stebs" (did you mean "train.steps"?)'),
        ("steps", "3", 'unknown config key "steps" (did you mean "train.steps"?)'),
        ("model.d", "3", 'unknown config key "model.d" (did you mean "model.D"?)'),
        ("zzz", "3", 'unknown config key "zzz"'),
        ("train.steps", "1e3", '"train.steps" must be of type int, and "1e3" is not'),
        ("train.steps", "2.0", '"train.steps" must be of type int, and "2.0" is not'),
        ("model.bias", "no", "\"model.bias\" must be of type bool, and 'no' is not"),
        ("model.bias", "2", "\"model.bias\" must be of type bool, and '2' is not"),
        ("optim.clip", "one", '"optim.clip" must be of type float, and "one" is not'),
    ],
)
def test_an_override_that_is_wrong(key, text, said):
    with pytest.raises(errors.UserError) as caught:
        overridden((key, text))
    assert str(caught.value) == said


def test_the_command_line_gives_values_behind_an_equals_sign_or_a_space(tmp_path, monkeypatch):
    seen = {}

    class Spy:
        config = vision.config

        @staticmethod
        def run(settings, folder):
            seen.update(configs.flat(settings.to_dict()), folder=folder)

    monkeypatch.setattr(by_name, "experiment", lambda name: Spy)
    file = tiny.config_file(tmp_path, "vision", model__H=8)
    words = ["--config.train.steps", "7", "--config.image.source=a = b", "--config.model.D=64", "-config.seed=3"]
    assert tiny.run("--config", file, *words).code == 0
    assert (seen["train.steps"], seen["image.source"], seen["seed"]) == (7, "a = b", 3)
    assert (seen["model.D"], seen["model.K"], seen["model.F"]) == (64, 8, 256)
    assert re.fullmatch(r"runs/vision_config/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(seen["folder"]))
    assert tiny.run("--config", file, "--workdir", "a/b").code == 0 and seen["folder"] == pathlib.Path("a/b")
    assert tiny.run("--config", file, "--workdir", "a/b", "--dry_run").code == 0 and seen["folder"] is None


# What follows from other fields


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


# Names


ROOMS = {
    "score": (
        score,
        "none tied tied_noself tied_keynorm tied_wide tied_signed l2_tied pairwise pairwise_sym identity_query "
        "symmetric_init asymmetric asymmetric_std constant",
    ),
    "value": (value, "low_rank full_rank identity"),
    "norm": (norm, "token token_plain rms batch instance"),
    "mlp": (mlp, "relu gelu gelu_tanh two_hidden_relu two_hidden_gelu swiglu"),
    "position": (position, "learned sinusoidal learned_concatenated sinusoidal_concatenated none"),
    "relative_position": (relative_position, "none rotary rotary_halves relative buckets alibi"),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_its_variants_and_base_lists_them(room):
    module, names = ROOMS[room]
    assert set(by_name.candidates(module)) >= set(names.split())
    assert listed(room) == set(by_name.candidates(module))


def test_base_lists_the_names_of_tables():
    assert listed("scale") == set(score.SCALES)
    assert listed("block") == set(block.ORDERS)
    assert listed("attention") == set(attention.IMPLEMENTATIONS)
    assert listed("compute_dtype") == set(models.DTYPES)


def listed(field):
    """The names in the comment of a field of base.py: '# relu, gelu (mlp.py)'. It may go on in the next line."""
    source = (ROOT / "configs" / "base.py").read_text()
    (comment,) = re.findall(rf"    config\.{field} = .*?# (.*(?:\n    # .*)*)", source)
    comment = comment.replace("\n    # ", " ")
    return set(re.sub(r" \(.*|of the logits: ", "", comment).split(", "))


def test_choosing_by_name():
    right = {"alpha": 1, "beta": 2}
    assert by_name.choose("letter", "beta", right) == 2
    with pytest.raises(errors.UserError) as caught:
        by_name.choose("letter", "betta", right)
    assert str(caught.value) == 'unknown letter "betta" (did you mean "beta"?); the right ones are: alpha, beta'
    with pytest.raises(errors.UserError) as caught:
        by_name.choose("letter", "x", right)
    assert str(caught.value) == 'unknown letter "x"; the right ones are: alpha, beta'


def test_a_variant_from_a_file_of_ones_own(tmp_path, monkeypatch):
    own = "from tfm.attention import score\ncosine = score.tied._replace(init='mine')\n"
    (tmp_path / "arms_of_mine.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path != ""])
    found = by_name.choose("score", "arms_of_mine:cosine", by_name.candidates(score))
    assert (found.init, found.apply) == ("mine", score.tied.apply)
    for wrong, word in (("arms_of_mine:sine", "sine"), ("my_legs:cosine", "my_legs"), (".arms_of_mine:cosine", "dot")):
        with pytest.raises(errors.UserError, match=f'the score "{wrong}" cannot be imported: .*{word}'):
            by_name.choose("score", wrong, {})
    for wrong in (
        "arms-of-mine:cosine",
        "arms_of_mine:co sine",
        "arms_of_mine:",
    ):  # else a .json could name it unnoticed
        with pytest.raises(errors.UserError, match="is not of the form my_file:my_variant"):
            by_name.choose("score", wrong, {})
    assert configs.is_code("arms_of_mine:cosine") and not list(configs.codes("sample.prompt", "arms_of_mine:cosine"))


def test_experiments_are_found_by_their_files():
    assert by_name.experiment("vision").__name__ == "experiments.vision"
    for wrong in ("", "nothing", "model", "../launch"):
        with pytest.raises(errors.UserError, match=f'unknown experiment "{wrong}".*: .*language.*, vision'):
            by_name.experiment(wrong)


# What is read


def settings(**changes):
    config = base.get_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return configs.Settings(config, defaults=base.get_config())


def test_settings_are_values_by_name():
    found = settings(train__steps=7)
    assert found.train.steps == 7 and found.to_dict()["train"]["steps"] == 7
    with pytest.raises(AttributeError, match="there is no setting train.stebs"):
        _ = found.train.stebs


def test_a_changed_setting_that_is_never_read_is_refused():
    settings().refuse_unused()
    found = settings(train__steps=7, model__remat=True, seed=1)
    _ = found.train
    with pytest.raises(errors.UserError) as caught:
        found.refuse_unused()
    assert str(caught.value) == "model.remat, seed, train.steps are set, but this experiment does not use them"
    assert (found.train.steps, found.seed) == (7, 1)
    with pytest.raises(errors.UserError) as caught:
        found.refuse_unused()
    assert str(caught.value) == "model.remat is set, but this experiment does not use it"
    inner = found.model
    assert inner.remat and inner.D == 128
    found.refuse_unused()


def test_a_derived_size_counts_as_changed_only_where_it_matters():
    found = settings(model__D=64)
    _ = found.model.D
    with pytest.raises(errors.UserError, match="model.F, model.K are set"):
        found.refuse_unused()  # an experiment that uses D uses these, too
    assert math.prod((found.model.F, found.model.K)) == 256 * 16
    found.refuse_unused()
