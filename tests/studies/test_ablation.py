"""A study from its command to its report: paired, resumed, added to, and every run as it would be alone."""

import json
import os
import pathlib
import signal

import numpy as np
import pytest
import tiny
import tiny_study

from configs import base
from experiments import ablation
from experiments.engine import config as configs
from experiments.engine import config_file, log, loop
from experiments.studies import figures as drawings
from experiments.studies import progress, training

CHANGES = {
    "text__N": 8,
    "model__M": 2,
    "model__D": 8,
    "model__H": 2,
    "model__dropout": 0.1,
    "optim__warmup_steps": 2,
    "train__steps": 6,
    "train__batch_size": 8,
    "train__evaluate_batch": 64,
    "train__log_every": 2,
    "train__evaluate_every": 3,
    "mesh__data": 1,
}
ARMS = [["tied", {"model.score": "tied"}], ["fast", {"optim.learning_rate": 1e-2}], ["asymmetric", {}]]
ALL = [f"all/{arm}/seed_{seed}" for arm, _ in ARMS for seed in (3, 5)]


def config_of(folder: pathlib.Path, experiment: str = "ablation", **changes) -> str:
    (folder / "text.txt").write_bytes(tiny.TEXT)
    own = {"study__experiment": "language", "study__arms": ARMS, "study__seeds": [3, 5]}
    every = {"text__source": str(folder / "text.txt")} | CHANGES | (own if experiment == "ablation" else {})
    return tiny.config_file(folder, experiment, **(every | changes))


def study(folder: pathlib.Path, *, draws: bool = False, **changes) -> tiny.Outcome:
    """The study in folder / 'study', without figures unless asked for: they are the same for all."""
    with pytest.MonkeyPatch.context() as patch:
        if not draws:
            patch.setattr(drawings, "draw", lambda *arguments: [])
        return tiny.run("--config", config_of(folder, **changes), "--workdir", str(folder / "study"))


def summaries(folder: pathlib.Path) -> dict[str, dict]:
    files = sorted((folder / "study").glob("*/*/seed_*/summary.json"))
    return {str(file.parent.relative_to(folder / "study")): json.loads(file.read_text()) for file in files}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(folder, outcome) of a study that nothing disturbed. Its live line has counted steps and evaluations."""
    folder, counted = tmp_path_factory.mktemp("done"), []

    class Watched(progress.Progress):
        def end(self):
            one = self._waiting[self._current]
            counted.append((self._pace.steps.work / one.step, self._pace.evaluations.work / one.evaluation / one.step))
            super().end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "Progress", Watched)
        outcome = study(folder, draws=True)
    assert np.allclose(counted, [(5, 2), (5, 2)])  # of two programs; the first of six steps, or three, does not count
    return folder, outcome


def test_a_study_leaves_its_runs_and_its_report(done):
    folder, outcome = done
    assert (outcome.code, outcome.err) == (0, "")
    found = summaries(folder)
    assert sorted(found) == sorted(ALL)
    for name, summary in found.items():
        rows = log.read(folder / "study" / name)
        assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3, 6]
        assert [row["step"] for row in rows if "train/loss" in row] == [2, 4, 6]
        assert [row["step"] for row in rows if "symmetry/1" in row and "symmetry/2" in row] == [0, 3, 6]
        assert summary["eval/loss"] == pytest.approx(rows[-1]["eval/loss"]) and summary["diverged_at"] is None
        assert (summary["steps"], summary["arm"]) == (6, name.split("/")[1])
        assert {"blocks/value/Uv_HKD 2x2x4x8", "head/G_WD 256x8"} <= summary["initial"].keys()
        assert all(len(summary["attention"][measure]) == 2 for measure in ("entropy", "diagonal", "asymmetry"))
    assert found["all/tied/seed_3"]["params"] < found["all/fast/seed_3"]["params"]
    assert found["all/tied/seed_3"]["together"] == 2 and found["all/fast/seed_3"]["together"] == 4  # one program
    config = "ablation_config.py"
    assert [file.relative_to(folder) for file in folder.glob(f"study/**/{config}")] == [
        pathlib.Path("study/source", config)  # once, for all of its runs
    ]
    maps = np.load(folder / "study" / "all" / "tied" / "seed_3" / "maps.npz", allow_pickle=False)["A_MHNS"]
    assert maps.shape == (2, 2, 8, 8) and np.allclose(maps.sum(-1), 1, atol=1e-5)
    for file in ("report.json", "report.md", "report.html"):
        assert (folder / "study" / file).stat().st_size > 1000 and file in outcome.out
    assert not (folder / "study" / "checkpoints").exists()
    assert "No verdict" in outcome.out  # of two seeds


def test_a_run_of_a_study_is_the_run_alone(done, tmp_path):
    folder, _ = done
    alone = config_of(tmp_path, "language", optim__learning_rate=1e-2, seed=5, text__source=str(folder / "text.txt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.language.figures", lambda *arguments: [])
        assert tiny.run("--config", alone, "--workdir", str(tmp_path / "run")).code == 0
    single = json.loads((tmp_path / "run" / "summary.json").read_text())
    ours = summaries(folder)["all/fast/seed_5"]
    assert ours["params"] == single["params"]
    for name in ("eval/loss", "eval/accuracy", "baseline/accuracy"):  # JAX 0.10.2: to the last bit; 0.12: not quite
        assert ours[name] == pytest.approx(single[name], rel=1e-5), name
    rows = [
        {row["step"]: row["train/loss"] for row in log.read(run) if "train/loss" in row}
        for run in (tmp_path / "run", folder / "study" / "all" / "fast" / "seed_5")
    ]
    assert rows[0] == pytest.approx(rows[1], rel=1e-5) and len(rows[0]) == 3


def test_within_a_seed_all_arms_see_the_same_and_start_alike(done):
    folder, _ = done
    first = {name: log.read(folder / "study" / name)[0] for name in ALL}
    assert first["all/fast/seed_3"]["eval/loss"] == first["all/asymmetric/seed_3"]["eval/loss"]
    assert first["all/fast/seed_3"]["eval/loss"] != first["all/fast/seed_5"]["eval/loss"]


def made_at(folder: pathlib.Path) -> dict[str, int]:
    """When each run's result was written."""
    files = (folder / "study").glob("*/*/seed_*/summary.json")
    return {str(file.parent.relative_to(folder / "study")): file.stat().st_mtime_ns for file in files}


def test_arms_and_seeds_may_be_added(whole, tmp_path):
    assert tiny_study.run(tmp_path, study__arms=tiny_study.ARMS[1:], study__seeds=[3]).code == 0
    before = made_at(tmp_path)
    assert len(before) == 2
    assert tiny_study.run(tmp_path).code == 0
    tiny_study.assert_alike(tmp_path, whole, tiny_study.ALL)
    assert made_at(tmp_path).items() >= before.items()


def test_a_seed_may_be_added_to_what_was_begun_and_other_runs_keep_their_checkpoints(whole, tmp_path, monkeypatch):
    """With the seed, the program is another one; it has all it needs. What is not part of the study stays."""
    checkpoints, arms = tmp_path / "study" / "checkpoints", {"study__arms": tiny_study.ARMS[1:]}

    def stopped(*arguments, **options):
        state = train(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return state

    train = loop.train
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", stopped)
        assert tiny_study.run(tmp_path, study__seeds=[3], **arms).code == 143
    for name in ("all_gone_01234567", "all_fast_noself_01234567", "all_fast_01234567"):
        (checkpoints / name).mkdir()
    assert tiny_study.run(tmp_path, **arms).code == 0
    assert sorted(one.name for one in checkpoints.iterdir()) == ["all_fast_noself_01234567", "all_gone_01234567"]
    tiny_study.assert_alike(tmp_path, whole, tiny_study.ALL[2:])


def test_results_of_other_steps_are_not_compared(tmp_path):
    one = {"study__arms": tiny_study.ARMS[1:], "study__seeds": [3]}
    assert tiny_study.run(tmp_path, train__steps=4, **one).code == 0
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "run", lambda *arguments, **options: seen.append(summaries(tmp_path)))
        patch.setattr(ablation.reports, "write", lambda *arguments, **options: [])
        patch.setattr(ablation.reports, "text", lambda *arguments, **options: "")
        assert tiny_study.run(tmp_path, **one).code == 0
    assert seen == [{}]


def test_an_arm_may_not_become_another_one(done):
    folder, _ = done
    other = [["tied", {"model.score": "none"}], *ARMS[1:]]
    outcome = study(folder, study__arms=other)
    assert outcome.code == 2 and "model.score ('tied' -> 'none')" in outcome.err and "arm tied: " in outcome.err
    outcome = study(folder, optim__beta1=0.8)
    assert outcome.code == 2 and "optim.beta1" in outcome.err


def test_all_is_checked_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "run", lambda *arguments, **options: pytest.fail("trained"))
    for change, message in {
        "model.score": ({"model.score": "tide"}, 'arm bad: unknown score "tide"'),
        "unknown": ({"image.patch": 3}, 'arm bad: unknown config key "image.patch"'),
        "unused": (
            {"optim.muon_lr_multiplier": 3.0},
            "arm bad: optim.muon_lr_multiplier is set, but this experiment does not use it",
        ),
        "guard": ({"train.nan": "skip"}, "arm bad: train.growth, nan, spike and keep_best are not for a study"),
        "rate": ({"optim.weight_decay": -1.0}, "arm bad: optim.weight_decay must be at least 0"),
        "initial": ({"model.score_std": -1.0}, "arm bad: model.score_std must be at least 0"),
        "probe": ({"train.probe": True}, "arm bad: train.probe is the same for a whole study"),
    }.values():
        outcome = study(tmp_path, study__arms=[["good", {}], ["bad", change]])
        assert outcome.code == 2 and message in outcome.err and not any((tmp_path / "study").iterdir())


WRONG = {
    "study.metric = eval/explained, but what is measured is eval/accuracy, eval/loss": {
        "study__metric": "eval/explained"
    },
    'unknown experiment "langage" (did you mean "language"?)': {"study__experiment": "langage"},
    "seed: a study has study.seeds": {"seed": 1},
    "the 2 runs of tied x 2 seeds do not divide evenly over mesh.seed = 3": {"mesh__seed": 3},
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_is_one_sentence(tmp_path, message):
    outcome = study(tmp_path, **WRONG[message])
    assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1
    assert not list(tmp_path.glob("study/*/*/*/summary.json"))


def test_seeds_spread_over_devices_are_trained_alike(whole, tmp_path):
    outcome = tiny_study.run(tmp_path, mesh__seed=2, study__arms=tiny_study.ARMS[1:])
    assert (outcome.code, outcome.err) == (0, "") and "seed=2" in outcome.out
    for name, summary in summaries(tmp_path).items():
        assert summary["eval/loss"] == pytest.approx(summaries(whole)[name]["eval/loss"], abs=1e-5)


def test_a_run_that_diverges_is_named_and_the_others_go_on(whole, tmp_path):
    outcome = tiny_study.run(tmp_path, study__arms=[["wild", {"optim.learning_rate": 1e38}], ["base", {}]])
    assert (outcome.code, outcome.err) == (0, "")
    for seed in (3, 5):
        assert summaries(tmp_path)[f"all/wild/seed_{seed}"]["diverged_at"] in (1, 2, 3)
    tiny_study.assert_alike(tmp_path, whole, [f"all/base/seed_{seed}" for seed in (3, 5)])
    assert "diverged" in outcome.out


def test_dry_run_writes_nothing(tmp_path):
    outcome = tiny.run("--config", config_of(tmp_path), "--dry_run")
    assert outcome.code == 0 and "tied x 2 seeds" in outcome.out and "fast, asymmetric x 2 seeds" in outcome.out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ablation_config.py", "text.txt"]


def test_a_study_is_of_no_study(tmp_path):
    outcome = tiny.run("--config", config_of(tmp_path), "--dry_run", "--config.study.experiment=ablation")
    assert outcome.code == 2 and "study.experiment is what the runs of a study are, as language" in outcome.err


def test_programs_that_were_begun_come_first_and_as_they_were(tmp_path):
    made = tiny.settings("ablation", study__experiment="language", study__arms=ARMS, study__seeds=[3, 5])
    asked = ablation.study.read(made)
    rows = ablation.study.runs(made, asked)
    tied, rest = ablation.study.programs(rows)

    def names(finished: set[str]) -> list[list[str]]:
        return [[row.name for row in one.runs] for one in ablation.unfinished(rows, finished, tmp_path)]

    of_tied, of_rest = [[row.name for row in one.runs] for one in (tied, rest)]
    assert names(set()) == [of_tied, of_rest]
    (tmp_path / "checkpoints" / rest.folder).mkdir(parents=True)
    assert names({"all/fast/seed_3"}) == [of_rest, of_tied]
    assert names({*of_rest, "all/tied/seed_3"}) == [["all/tied/seed_5"]]
    assert names({*of_rest, *of_tied}) == []


ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = {"qk_ablation": 10, "qk_ablation_full": 26, "qk_synthetic": 42, "qk_vit": 6, "norm_study": 3}
PROGRAMS |= {"learning_rate_study": 1, "speedrun_study": 9}


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.py")), ids=lambda file: file.stem)
def test_every_study_of_the_project_is_one(file):
    made = config_file.load(str(file), base=base.get_config) if file.stem not in ("base", "__init__") else None
    if made is None or made.experiment != "ablation":
        assert file.stem not in PROGRAMS
        return
    settings = configs.Settings(made, config_file.defaults(made, base.get_config))
    asked = ablation.study.read(settings)
    found = ablation.study.programs(ablation.study.runs(settings, asked))
    assert len(found) == PROGRAMS[file.stem] and len(asked.seeds) >= 3  # with fewer no verdict is spoken


@pytest.mark.parametrize("stem", ["norm_study", "learning_rate_study"])
def test_a_study_of_the_project_can_be_prepared(stem):
    outcome = tiny.run("--config", str(ROOT / "configs" / f"{stem}.py"), "--dry_run", "--config.mesh.data=1")
    assert (outcome.code, outcome.err) == (0, "") and outcome.out.count("parameters each") == PROGRAMS[stem]
