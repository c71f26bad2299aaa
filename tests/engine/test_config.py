"""Configs: what is loaded is what was written, strictly; names are chosen, and what nobody reads is noticed."""

import json
import math
import pathlib
import re
import sys

import numpy as np
import pytest
import tiny

from configs import base
from experiments import model as models
from experiments.engine import by_name, config as configs, config_file, errors
from tfm import block, mlp, norm, position
from tfm.attention import implementations, relative_position, score, value

ROOT = pathlib.Path(__file__).parents[2]


def values(config):
    return configs.flat(config.to_dict())


def overridden(*pairs, config=None):
    config = config or base.get_config("language")
    for key, text in pairs:
        configs.override(config, key, text)
    return values(config)


def saved_in(folder, content):
    """The config in JSON that holds this."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "config.json")


def loaded(file, **more):
    return config_file.load(file, base=base.get_config, **more)


def test_every_field_of_base_has_a_comment():
    lines = (ROOT / "configs" / "base.py").read_text().splitlines()
    fields = [line for line in lines if re.match(r"    (config|mesh|model|optim|train)\.\w+ = ", line)]
    assert len(fields) > 40 and [line for line in fields if "#" not in line] == []


def test_a_saved_config_gives_the_same_config_and_leaves_base_as_it_was(tmp_path):
    before = values(base.get_config())
    changes = {"model.D": 96, "optim.learning_rate": 3e-4, "train.accumulation": 2, "text.source": "a = 'é'\n"}
    written = loaded(tiny.config_file(tmp_path, "language", **changes))
    for content in (written.to_dict(), {"config": written.to_dict(), "versions": {"jax": "1"}, "commit": "f"}):
        again = values(loaded(saved_in(tmp_path, content)))
        assert again == values(written)
        assert [type(value) for value in again.values()] == [type(value) for value in values(written).values()]
        assert again["model.K"] == 24 and again["model.F"] == 384
    assert values(base.get_config()) == before


def test_a_json_config_may_be_a_part_and_is_not_executed(tmp_path):
    found = values(loaded(saved_in(tmp_path, {"train": {"steps": 3}, "optim": {"clip": 2}})))
    assert found == values(base.get_config()) | {"train.steps": 3, "optim.clip": 2.0}
    assert isinstance(found["optim.clip"], float)


EVIL = [["mine", {"model": {"M": 1}, "model.score": "evil:x"}], ["b", {}]]


@pytest.mark.parametrize(
    ("saved", "where"),
    [
        ({"model": {"score": "evil:x"}}, ""),
        ({"study": {"arms": EVIL, "experiment": "vision"}}, " in study.arms"),
        ({"study.conditions": [["a", {}], ["b", {"text.objective": "evil:x"}]]}, " in study.conditions"),
        ({"study": {"conditions": [["a", {"model": {"score": "evil:x"}}]]}}, " in study.conditions"),
        ({"study": {"arms": [[{"image.head": "evil:x"}, "swapped"]]}}, " in study.arms"),
    ],
)
def test_code_that_a_saved_config_names_is_not_run(tmp_path, saved, where):
    """What is trusted is given on the command line; that has the last word, so the file's is left out."""
    name, of = ("ablation", "vision") if where else ("vision", "")
    more = {"experiment": name} | ({"study.experiment": of} if "study" not in saved and of else {})
    if "study" in saved:
        saved = {"study": {"experiment": of} | saved["study"]}
    file = saved_in(tmp_path, {"config": more | saved})
    inside = {" in study.cond": "study.conditions"}.get(where, where.removeprefix(" in ") or "model.score")
    with pytest.raises(errors.UserError) as caught:
        loaded(file, given={"optim.name": ""})
    assert '"evil:x"' in str(caught.value) and f"--config.{inside}=" in str(caught.value)
    given = {inside: None}
    assert values(loaded(file, given=given)) == values(base.get_config(name, of=of))


def test_a_saved_study_may_name_what_is_there(tmp_path):
    arms = [["a", {"model.score": "tied", "text.source": "C:/x", "init_from": "a: b"}]]
    saved = {"experiment": "ablation", "study": {"experiment": "language", "arms": arms}}
    assert values(loaded(saved_in(tmp_path, saved)))["study.arms"] == arms


@pytest.mark.parametrize("content", ['{"k%d": 1', '{"k%d": {}', '{"train.steps": 3, "study": {"arms": [1]}, "k%d": 1'])
def test_millions_of_settings_are_no_config(tmp_path, content):
    file = saved_in(tmp_path, content % 0 + "".join(f', "k{i}": 1' for i in range(1, 100_000)) + "}")
    with pytest.raises(errors.UserError, match=r"it has 1,\d{3},\d{3} characters, and 1,048,576 are allowed"):
        loaded(file)


def test_an_unknown_setting_is_refused_before_the_others_are_taken(tmp_path):
    """Nor is a long name told whole, or put before each of thousands of names below it."""
    long = "x" * 300_000
    saved = {"seed": "wrong too", "train": {"steps": 3}, long: {f"k{i}": 1 for i in range(50_000)}}
    with pytest.raises(errors.UserError) as caught:
        loaded(saved_in(tmp_path, saved))
    assert str(caught.value).startswith(f'unknown config key "{long[:97]}..."; the sections of a config are: mesh,')


@pytest.mark.parametrize("text", ["[" * 600 + "]" * 600, "[" * 99999 + "]" * 99999, '{"a":' * 31 + "1" + "}" * 31])
def test_what_is_nested_absurdly_is_refused(tmp_path, text):
    """Python's own limit is reached somewhere else in every version."""
    with pytest.raises(errors.UserError, match="it is nested more than 30 levels deep"):
        loaded(saved_in(tmp_path, f'{{"experiment": "ablation", "study": {{"seeds": {text}}}}}'))
    with pytest.raises(errors.UserError, match='"study.seeds" must be of type list'):
        overridden(("study.seeds", text), config=base.get_config("ablation"))
    assert configs.shallow("[" * 29 + "1" + "]" * 29)
    with pytest.raises(ValueError, match="30 levels"):
        configs.shallow("[" * 30 + "1" + "]" * 30)


def test_what_a_saved_config_derived_stays_derived(tmp_path):
    found = loaded(saved_in(tmp_path, {"model": {"D": 96, "H": 2, "K": 48, "F": 7}}))
    configs.override(found, "model.D", "64")
    assert values(found)["model.K"] == 32 and values(found)["model.F"] == 7
    found = values(loaded(saved_in(tmp_path, {"model": {"K": 32, "F": 512, "D": 256}})))  # as D = 128 would have them
    assert found["model.K"] == 32 and found["model.F"] == 512


def test_an_error_in_a_config_file_is_told_with_its_last_line_there(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\n\ndef text():\n    return json.loads('{')\n\ndef get_config():\n    return text()\n")
    with pytest.raises(errors.UserError) as caught:
        loaded(str(file))
    assert str(caught.value).startswith(f"{file}, line 4: JSONDecodeError: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.M = None", '"model.M" must be of type int'),  # a ConfigDict takes None for anything, and True for 1
        ("train.steps = True", '"train.steps" must be of type int'),
        ("optim.clip = None", '"optim.clip" must be of type float'),
        ("experiment = None", '"experiment" must be of type str'),
        ("more = 1", 'has the key "more"'),
        ("__delattr__('seed')", 'lacks the key "seed": one of the experiment vision begins with base.get_config("vis'),
    ],
)
def test_a_config_with_other_keys_or_types_is_refused(tmp_path, change, said):
    begin = "from configs import base\ndef get_config():\n    c = base.get_config('vision').unlock()\n"
    (tmp_path / "config.py").write_text(f"{begin}    c.{change}\n    return c\n")
    with pytest.raises(errors.UserError, match=re.escape(said)):
        loaded(str(tmp_path / "config.py"))


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
        found = overridden((key, text))
        assert found[key] == expected and type(found[key]) is type(expected)
        assert {other for other in found if found[other] != before[other]} <= {key}


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("train.stebs", "3", 'unknown config key "train.stebs" (did you mean "train.steps"?)'),
        ("steps", "3", 'unknown config key "steps" (did you mean "train.steps"?)'),
        ("model.d", "3", 'unknown config key "model.d" (did you mean "model.D"?)'),
        ("zzz", "3", 'unknown config key "zzz"'),
        ("train.steps", "1e3", '"train.steps" must be of type int, and "1e3" is not'),
        ("train.steps", "", '"train.steps" must be of type int, and "" is not'),
        ("optim.clip", "one", '"optim.clip" must be of type float, and "one" is not'),
        ("train.growth", "2, 3", """"train.growth" must be of type list, as '["One", "Two"]', and "2, 3" is not"""),
    ],
)
def test_an_override_that_is_wrong(key, text, said):
    with pytest.raises(errors.UserError) as caught:
        overridden((key, text))
    assert str(caught.value) == said


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


SCORES = """none tied tied_keynorm tied_wide tied_signed l2_tied pairwise pairwise_sym identity_query
nonlinear_query symmetric_init asymmetric asymmetric_std asymmetric_qknorm constant"""
MLPS = """relu relu_squared gelu gelu_tanh quick_gelu silu tanh two_hidden_relu two_hidden_gelu swiglu geglu geglu_tanh
reglu"""
LISTED = {
    "score": (by_name.candidates(score), SCORES),
    "value": (by_name.candidates(value), "low_rank keys gated exclusive full_rank identity"),
    "norm": (by_name.candidates(norm), "token token_plain rms batch batch_features instance layer_sequence none"),
    "mlp": (by_name.candidates(mlp), MLPS),
    "position": (by_name.candidates(position), "learned sinusoidal learned_concatenated sinusoidal_concatenated none"),
    "relative_position": (by_name.candidates(relative_position), "none rotary rotary_halves relative buckets alibi"),
    "scale": (score.SCALES, "1/sqrt(K) 1/sqrt(D) 1"),
    "bias": (block.BIASES, "all none attention mlp qkv"),
    "outer_norm": (models.OUTER_NORMS, "last first both none"),
    "block": (block.ORDERS, "pre_norm post_norm plain"),
    "attention": (implementations.NAMES, "explicit flash"),
    "compute_dtype": (models.DTYPES, "float32 bfloat16"),
}


@pytest.mark.parametrize("field", LISTED)
def test_a_room_offers_its_variants_and_base_lists_them(field):
    offered, names = LISTED[field]
    assert listed(field) == set(offered) == set(names.split())


def listed(field):
    """The names in the comment of a field of base.py: '# relu, gelu (mlp.py)'. It may go on in the next line."""
    source = (ROOT / "configs" / "base.py").read_text()
    (comment,) = re.findall(rf"    model\.{field} = .*?# (.*(?:\n    # .*)*)", source)
    comment = comment.replace("\n    # ", " ")
    return set(re.sub(r" \(.*|of the logits: ", "", comment).split(", "))


@pytest.mark.parametrize(
    ("name", "hint"), [("betta", ' (did you mean "beta"?)'), ("Alpha", ' (did you mean "alpha"?)'), ("x", "")]
)
def test_choosing_by_name(name, hint):
    right = {"alpha": 1, "beta": 2}
    assert by_name.choose("letter", "beta", right) == 2
    with pytest.raises(errors.UserError) as caught:
        by_name.choose("letter", name, right)
    assert str(caught.value) == f'unknown letter "{name}"{hint}; the right ones are: alpha, beta'


def test_a_variant_from_a_file_of_ones_own(tmp_path, monkeypatch):
    own = "from tfm.attention import score\ncosine = score.tied._replace(init='mine')\n"
    (tmp_path / "arms_of_mine.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != ""])
    scores = by_name.candidates(score)
    found = by_name.choose("score", "arms_of_mine:cosine", scores)
    assert (found.init, found.apply) == ("mine", score.tied.apply)
    for wrong, word in (("arms_of_mine:sine", "sine"), ("my_legs:cosine", "my_legs"), (".arms_of_mine:cosine", "dot")):
        with pytest.raises(errors.UserError, match=f'the score "{wrong}" cannot be imported: .*{word}'):
            by_name.choose("score", wrong, scores)
    for wrong in ("arms-of-mine:cosine", "arms_of_mine:co sine", "arms_of_mine:"):  # a .json could name it unnoticed
        with pytest.raises(errors.UserError, match="is not of the form my_file:my_variant"):
            by_name.choose("score", wrong, scores)
    with pytest.raises(errors.UserError, match='unknown letter "arms_of_mine:cosine"; the right ones are: a'):
        by_name.choose("letter", "arms_of_mine:cosine", {"a": 1})  # no place for a program
    named = {key: list(configs.codes(key, "arms_of_mine:cosine")) for key in ("model.score", "text.source")}
    assert named == {"model.score": [("model.score", "arms_of_mine:cosine")], "text.source": []}


def test_experiments_are_found_by_their_files():
    assert by_name.experiment("vision").__name__ == "experiments.vision"
    for wrong in ("", "nothing", "model", "../launch"):
        with pytest.raises(errors.UserError, match=f'unknown experiment "{wrong}".*: .*language.*, vision'):
            by_name.experiment(wrong)


def test_absurd_numbers_are_refused():
    most = {"train.steps": 2**31 - 1, "seed": 2**32 - 1, "study.seeds": [2**32 - 1], "optim.clip": 3.4e38}
    configs.check_numbers(most)
    for key, number in (("train.steps", -(2**31)), ("study.seeds", [1, [2**32]]), ("seed", 2**32), ("seed", 10**5000)):
        with pytest.raises(errors.UserError, match=f"{key} = .* is too large a number: at most {most['seed']}|214"):
            configs.check_numbers({key: number})
    for wrong in (math.nan, -math.inf, 3.5e38):
        with pytest.raises(errors.UserError, match="is no number that can be computed with"):
            configs.check_numbers({"a": [0.5, wrong]})


def test_what_a_program_gives_is_taken_as_a_config_has_it():
    config = base.get_config("ablation")
    given = {"study.seeds": (1, 2), "init_from": pathlib.Path("a"), "train.steps": np.int64(3)}
    given |= {"optim.clip": 2, "optim.ema": np.float32(0.5), "model.bias": "none"}
    for key in given:
        configs.assign(config, key, given[key])
    found = [values(config)[key] for key in given]
    assert found == [[1, 2], "a", 3, 2.0, 0.5, "none"]
    assert [type(one) for one in found] == [list, str, int, float, float, str]
    for key, wrong in (("train.steps", 2.0), ("train.steps", True), ("model.bias", False), ("optim.clip", "2")):
        with pytest.raises(errors.UserError, match=f'"{key}" must be of type'):
            configs.assign(config, key, wrong)


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
    found = settings(train__steps=7, model__remat="full", seed=1)
    _ = found.train
    with pytest.raises(errors.UserError) as caught:
        found.refuse_unused()
    assert str(caught.value) == "model.remat, seed, train.steps are set, but this experiment does not use them"
    assert (found.train.steps, found.seed) == (7, 1)
    with pytest.raises(errors.UserError, match="^model.remat is set, but this experiment does not use it$"):
        found.refuse_unused()
    inner = found.model
    assert inner.remat == "full" and inner.D == 128
    found.refuse_unused()


def test_a_derived_size_counts_as_changed_only_where_it_matters():
    found = settings(model__D=64)
    _ = found.model.D
    with pytest.raises(errors.UserError, match="model.F, model.K are set"):
        found.refuse_unused()  # an experiment that uses D uses these, too
    assert math.prod((found.model.F, found.model.K)) == 256 * 16
    found.refuse_unused()


def test_a_switch_is_true_or_false():
    config = base.get_config("translation")
    for text, right in {"true": True, "1": True, "false": False, "0": False}.items():
        configs.override(config, "pairs.reverse", text)
        assert config.pairs.reverse is right
    with pytest.raises(errors.UserError) as caught:
        configs.override(config, "pairs.reverse", "2")
    assert "pairs.reverse" in str(caught.value) and "2" in str(caught.value)
