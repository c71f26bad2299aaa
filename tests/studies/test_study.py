"""The runs of a study's config, the config of each run, and their programs."""

import pathlib

import numpy as np
import pytest
import tiny
from errors import raises

from experiments.config import errors, files as config_files, settings as configs
from experiments.folder import workdir as workdirs
from experiments.studies import study as studies

ROOT = pathlib.Path(__file__).parents[2]
ARMS = [["tied", {"model.score": "tied"}], ["fast", {"optim.learning_rate": 2e-3, "model.D": 16}], ["usual", {}]]


def settings(**changes) -> configs.Settings:
    defaults = {"study__experiment": "language", "study__arms": ARMS, "study__seeds": [4, 0]}
    return tiny.settings("ablation", **defaults | changes)


def list_runs(settings: configs.Settings) -> list[studies.Run]:
    return studies.runs(settings, studies.read(settings))


def test_every_arm_is_trained_with_every_seed_in_every_condition():
    runs = list_runs(settings(study__conditions=[["a", {"text.N": 7}], ["b", {"text.N": 9}]]))
    names = [f"{condition}/{arm}/seed_{seed}" for condition in "ab" for arm, _ in ARMS for seed in (4, 0)]
    assert [run.name for run in runs] == names
    values = [(run.settings.text.N, run.settings.model.score, run.settings.seed) for run in runs[5:7]]
    assert values == [(7, "asymmetric", 0), (9, "tied", 4)]


def test_the_config_of_a_run_equals_that_of_the_run_alone():
    run = list_runs(settings())[2]
    expected = tiny.settings("language", optim__learning_rate=2e-3, model__D=16, seed=4).to_dict()
    assert run.settings.to_dict() == expected
    assert run.settings.model.K == 8 and run.settings.model.F == 64  # derived settings follow model.D


def test_conditions_have_metrics_and_thresholds_and_the_reference_is_the_last_arm():
    conditions = [["a", {"study.threshold": 2.5}], ["b", {"study.metric": "eval/accuracy"}]]
    unchanged = settings(study__conditions=conditions)
    design = studies.read(unchanged)
    assert (design.reference, design.seeds) == ("usual", [4, 0])
    first, second = ([x.name, x.metric, x.threshold] for x in design.conditions)
    assert first == ["a", "eval/loss", 2.5] and second == ["b", "eval/accuracy", 0.0]
    assert unchanged.model.score == "asymmetric"
    # The same limit as for a single run.
    assert list_runs(settings(study__seeds=[configs.LARGEST_SEED]))[0].settings.seed == 2**32 - 1


def test_runs_that_differ_only_in_seeds_and_numbers_are_one_program():
    arms = ARMS[:1] + [["slow", {"optim.learning_rate": 1e-4}], ["wide", {"model.score_std": 2.0}], ["usual", {}]]
    tied, rest = studies.programs(list_runs(settings(study__arms=arms)))
    assert [row.name for row in tied.runs] == ["all/tied/seed_4", "all/tied/seed_0"] and tied.numbers == {}
    assert [row.arm for row in rest.runs] == ["slow", "slow", "wide", "wide", "usual", "usual"]
    assert sorted(rest.numbers) == ["learning_rate", "score_std"]
    np.testing.assert_array_equal(rest.numbers["learning_rate"], np.float32([1e-4, 1e-4] + [1e-3] * 4))
    np.testing.assert_array_equal(rest.numbers["score_std"], np.float32([1, 1, 2, 2, 1, 1]))
    assert (tied.name, rest.name) == ("tied x 2 seeds", "slow, wide, usual x 2 seeds")


MAY_CHANGE = {"study.threshold": 2.0, "mesh.data": 2, "log": [], "train.log_every": 7, "train.evaluate_every": 7}
MAY_CHANGE |= {"train.save_every": 7, "train.keep_best": "eval/loss", "train.patience": 2, "train.nan": "skip"}


def test_the_folder_of_a_program_depends_on_all_settings_except_those_that_may_change():
    """In another folder, a program would silently start from step 0."""

    def folders(**changes) -> list[str]:
        return [program.folder for program in studies.programs(list_runs(settings(**changes)))]

    names = folders()
    assert len(set(names)) == 3 and len(MAY_CHANGE) == len(set(workdirs.MAY_CHANGE) - {"train.steps"})
    for key, value in MAY_CHANGE.items():
        assert workdirs.may_change(key) and folders(**{key: value}) == names, key
    changes = [{"study__seeds": [4, 0, 1]}, {"model__D": 24}, {"train__steps": 6}, {"optim__learning_rate": 3e-3}]
    changes += [{"study__conditions": [["b", {}]]}, {"study__seeds": [0, 4]}, {"text__N": 9}]
    for change in changes:
        assert folders(**change)[0] not in names, change  # the program of "tied", whose arm sets none of these


def make_arms(*names, **changes):
    return {"study__arms": [[names[0], changes], *([name, {}] for name in names[1:])]}


def make_condition(**changes):
    """Return the settings of a study with condition a, which changes the study's settings."""
    return {"study__conditions": [["a", {f"study.{key}": value for key, value in changes.items()}]]}


REFUSED = [  # (settings, words in the error)
    ({"study__arms": [["tied", {}]]}, ["study.arms"]),
    ({"study__arms": ["tied", "none"]}, ["study.arms", "'tied'"]),
    ({"study__arms": [["tied", 1], ["none", {}]]}, ["study.arms", "['tied', 1]"]),
    ({"study__arms": [["a", {}, 1], ["b", {}]]}, ["study.arms", "['a', {}, 1]"]),
    (make_arms("a/b", "b"), ["study.arms", "'a/b'"]),
    (make_arms("b" * 101, "b"), ["study.arms", "b" * 101]),
    (make_arms("b", "B"), ["study.arms", '"b" and "B"']),
    ({"study__conditions": [["Figures", {}]]}, ["study.conditions", "'Figures'"]),
    ({"study__seeds": [1, 1]}, ["study.seeds", "[1, 1]"]),
    ({"study__seeds": []}, ["study.seeds", "[]"]),
    ({"study__seeds": [0.5]}, ["study.seeds", "[0.5]"]),
    ({"study__seeds": [-1]}, ["seed", "-1"]),
    ({"study__metric": "eval/los"}, ["study.metric", "eval/los"]),
    ({"study__metric": "train/loss"}, ["study.metric", "train/loss"]),
    (make_condition(metric="eval/x"), ["condition a", "study.metric", "eval/x"]),
    (make_condition(threshold="x"), ["condition a", "study.threshold", "'x'"]),
    (make_condition(margin=-0.1), ["condition a", "study.margin", "-0.1"]),
    ({"study__looks": 0}, ["study.looks", "0"]),
    (make_arms("smooth", "b", **{"train.loss": "label_smoothing:0.1"}), ["study.metric = eval/loss", "cross_entropy"]),
    ({"study__tune": [["train.loss", ["cross_entropy", "my_file:a"]]]}, ["study.metric = eval/loss", "my_file:a"]),
    (make_arms("tied", "b", **{"model.scor": 1}), ["condition all, arm tied", "model.scor"]),
    (make_arms("tied", "b", **{"model.score": 1}), ["condition all, arm tied", "model.score", "1"]),
    (make_arms("tied", "b", seed=1), ["arm tied", "seed"]),
    (make_arms("tied", "b", **{"study.seeds": [1]}), ["arm tied", "study.seeds"]),
    ({"study__conditions": [["a", {"model.score": "none"}]]}, ["condition a, arm tied", "model.score"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_an_invalid_study_is_refused(changes, words):
    with raises(errors.UserError, *words):
        list_runs(settings(**changes))


def test_the_arms_of_the_learning_rate_study_have_the_rates_in_their_names():
    """The command line's rate does not change them."""
    config = config_files.load(str(ROOT / "configs" / "learning_rate_study.py"))
    configs.assign(config, "optim.learning_rate", "0.5")
    runs = list_runs(configs.Settings(config))
    optim = {run.arm: run.settings.optim for run in runs}
    no_decay = optim.pop("no_decay")
    assert all(float(name) == section.learning_rate for name, section in optim.items())
    assert (no_decay.learning_rate, no_decay.weight_decay) == (1e-3, 0)
