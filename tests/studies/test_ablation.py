"""A study from its command to its report: extended, refused, and every run equal to the run alone."""

import json
import pathlib

import numpy as np
import pytest
import study_folder
import tiny
import tiny_study
from tiny_study import ALL, ARMS, STEPS

import launch
from configs import base
from experiments.engine import config as configs, config_file, log, loop
from experiments.studies import figures, programs, run_folders, study

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = {"qk_ablation": 14, "qk_ablation_full": 26, "qk_synthetic": 42, "qk_vit": 6, "norm_study": 3}
PROGRAMS |= {"contradictions": 28, "contradictions_small": 11, "head_study": 4}
PROGRAMS |= {"learning_rate_study": 1, "speedrun_study": 10, "block_study": 7, "text_study": 2}
LANGUAGE = {"study__experiment": "language", "study__arms": [["fast", {"optim.learning_rate": 1e-2}], ["usual", {}]]}


def test_a_study_leaves_its_runs_and_its_report(tmp_path):
    outcome = tiny_study.run(tmp_path, draws=True, log=["symmetry"], study__arms=ARMS[1:])
    assert (outcome.code, outcome.err) == (0, "")
    summaries, root = tiny_study.summaries(tmp_path), tmp_path / "study"
    assert sorted(summaries) == sorted(ALL[2:])
    for name, summary in summaries.items():
        rows = log.read(root / name)
        for key, steps in {"eval/loss": [0, 3, 6], "train/loss": [2, 4, 6], "symmetry/2": [0, 3, 6]}.items():
            assert [row["step"] for row in rows if key in row] == steps
        assert summary["eval/loss"] == pytest.approx(rows[-1]["eval/loss"]) and summary["diverged_at"] is None
        assert (summary["steps"], summary["arm"], summary["together"]) == (6, name.split("/")[1], 4)  # one program
        assert summary["flops_per_step"] > 0 < summary["seconds_per_step"] < summary["wall_seconds"]
        assert [*summary["sources"]][0] == "ablation_config.py" and summary["data_sha256"] is None
        assert summary["initial"].keys() == {"G_CD 3x5", "b_C 3"}
        assert all(len(summary["attention"][measure]) == 2 for measure in ("entropy", "diagonal", "asymmetry"))
    first = {name: log.read(root / name)[0]["eval/loss"] for name in summaries}
    assert first["all/fast/seed_3"] == first["all/base/seed_3"] != first["all/base/seed_5"]  # before training
    config = "ablation_config.py"
    assert list(tmp_path.glob(f"study/**/{config}")) == [root / "source" / config]  # once for all runs
    assert not list(root.glob("*/*/seed_5/maps.npz"))  # only of the first seed
    maps = np.load(root / "all" / "fast" / "seed_3" / "maps.npz", allow_pickle=False)["A_MHNS"]
    assert maps.shape == (2, 2, 5, 5) and np.allclose(maps.sum(-1), 1, atol=1e-5)
    kinds = ("course", "differences", "symmetry", "attention", "maps")
    for file in ("report.json", "report.md", "report.html", *(f"figures/{kind}_all.png" for kind in kinds)):
        assert (root / file).stat().st_size > 1000 and file in outcome.out
    assert not (root / "checkpoints").exists()


def test_launch_run_returns_the_report_of_a_finished_study(copy, monkeypatch):
    folder, file = copy / "study", copy / "study" / "dots.png"

    def draw(*arguments):
        file.write_bytes(b"dots")
        return [figures.Figure(file, "course", "dots", "dots")]

    monkeypatch.setattr(figures, "draw", draw)
    result = launch.run(tiny_study.config_file(copy), folder)
    assert result.summary == json.loads((folder / "report.json").read_text()) and "verdict" in result.summary
    assert (result.folder, result.figures, result.params, result.apply) == (folder, [file], None, None)


def test_a_run_of_a_study_is_the_run_alone(complete, tmp_path):
    config = tiny.config_file(tmp_path, "dots", **tiny_study.TRAIN | {"optim__learning_rate": 1e-2, "seed": 5})
    assert tiny.run("--config", config, "--workdir", str(tmp_path / "run")).code == 0
    alone, summaries = json.loads((tmp_path / "run" / "summary.json").read_text()), tiny_study.summaries(complete)
    fast, lean = summaries["all/fast/seed_5"], summaries["all/lean/seed_5"]
    assert lean["params"] < fast["params"] == alone["params"]
    assert (lean["together"], fast["together"]) == (2, 4)  # two programs
    for name in ("eval/loss", "eval/accuracy", "baseline/accuracy"):  # JAX 0.10.2: to the last bit; 0.12: not quite
        assert fast[name] == pytest.approx(alone[name], rel=1e-5), name
    rows = [log.read(run) for run in (tmp_path / "run", complete / "study" / "all" / "fast" / "seed_5")]
    losses = [{row["step"]: row["train/loss"] for row in run_rows if "train/loss" in row} for run_rows in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3
    assert "attention" not in fast and not any("symmetry/1" in row for row in rows[1])  # log has no symmetry


def test_arms_and_seeds_may_be_added_and_foreign_checkpoints_stay(complete, tmp_path, signalled):
    def read_times() -> dict[pathlib.Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.glob("study/*/*/seed_*/summary.json")}

    checkpoints, arms = tmp_path / "study" / "checkpoints", {"study__arms": ARMS[1:]}
    signalled(loop, "train")
    assert tiny_study.run(tmp_path, study__seeds=[3], **arms).code == 143
    for name in ("all_gone_01234567", "all_fast_noself_01234567", "all_fast_01234567"):
        (checkpoints / name).mkdir()
    assert tiny_study.run(tmp_path, **arms).code == 0
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["all_fast_noself_01234567", "all_gone_01234567"]
    before = read_times()
    assert len(before) == 4
    assert tiny_study.run(tmp_path).code == 0
    tiny_study.assert_alike(tmp_path, complete, ALL)
    assert read_times().items() >= before.items()
    planned = [json.loads(line)["planned"] for line in (tmp_path / "study" / "plan.jsonl").read_text().splitlines()]
    assert [(len(entry["arms"]), entry["seeds"]) for entry in planned] == [(2, [3]), (2, [3, 5]), (3, [3, 5])]


@pytest.mark.parametrize("seeds", [[3, 5], [3, 5, 7]], ids=["finished", "another seed"])
def test_other_data_than_the_finished_runs_had_is_refused(copy, monkeypatch, seeds):
    monkeypatch.setattr(programs, "train", lambda *_: pytest.fail("trained"))
    file = copy / "study" / "all" / "fast" / "seed_5" / "config.json"
    content = json.loads(file.read_text())
    assert content["data"] == {"sha256": None, "classes": None}
    for data in ({"sha256": "0", "classes": None}, {"sha256": None, "classes": ["a", "b"]}):
        file.write_text(json.dumps(content | {"data": data}))
        outcome = tiny_study.run(copy, study__seeds=seeds)
        assert outcome.code == 2 and str(file.parent) in outcome.err and "fast" in outcome.err


def test_results_of_other_steps_are_not_compared(copy, monkeypatch):
    summaries = []
    monkeypatch.setattr(programs, "train", lambda *_: summaries.append(tiny_study.summaries(copy)))
    assert tiny_study.run(copy, train__steps=8).code == 0
    assert summaries == [{}, {}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"study__arms": [["lean", {}], *ARMS[1:]]}, ["arm lean", "dots.bias", "False", "True"]),
        ({"optim__betas": [0.8, 0.99]}, ["study", "optim.betas"]),
    ],
)
def test_an_arm_may_not_become_another_one(copy, change, words):
    outcome = tiny_study.run(copy, **change)
    assert outcome.code == 2 and all(word in outcome.err for word in words)


REFUSED_ARMS = [
    {"model.score": "tide"},
    {"image.patch": 3},
    {"optim.muon_lr_multiplier": 3.0},
    {"train.nan": "skip"},
    {"optim.weight_decay": -1.0},
    {"model.score_std": -1.0},
    {"log": ["wandb"]},
]
REFUSED = [
    ({"study__arms": [["good", {}], ["bad", arm]]}, ["arm bad", next(iter(arm)).partition(".")[2]])
    for arm in REFUSED_ARMS
]
REFUSED += [
    ({"study__metric": "eval/explained"}, ["study.metric", "eval/explained", "eval/accuracy, eval/loss"]),
    ({"study__experiment": "langage"}, ['"langage"', '"language"']),
    ({"study__experiment": "ablation"}, ["study.experiment"]),
    ({"seed": 1}, ["seed = 1", "study.seeds"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_an_invalid_study_is_one_sentence_before_anything_is_trained(tmp_path, changes, words, monkeypatch):
    monkeypatch.setattr(programs, "train", lambda *_: pytest.fail("trained"))
    outcome = tiny_study.run(tmp_path, **LANGUAGE | changes)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and all(word in outcome.err for word in words)
    assert not (tmp_path / "study").exists()


def test_started_programs_come_first_and_unchanged(tmp_path):
    settings = tiny.settings("ablation", **tiny_study.TRAIN | tiny_study.STUDY)
    every = study.programs(study.runs(settings, study.read(settings)))
    lean, rest = ([run.name for run in program.runs] for program in every)

    def names(*finished: str) -> list[list[str]]:
        for name in (*lean, *rest):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "summary.json").write_text(json.dumps({"steps": STEPS * (name in finished)}))
        return [[run.name for run in program.runs] for program in run_folders.unfinished(every, tmp_path)]

    assert names() == [lean, rest]
    (tmp_path / "checkpoints" / every[1].folder).mkdir(parents=True)
    assert names("all/fast/seed_3") == [rest, lean]
    assert names(*rest, "all/lean/seed_3") == [["all/lean/seed_5"]]
    assert names(*rest, *lean) == []


@pytest.mark.parametrize("stem", PROGRAMS)
def test_every_study_of_the_project_is_valid(stem):
    loaded = config_file.load(str(ROOT / "configs" / f"{stem}.py"), base=base.get_config)
    settings = configs.Settings(loaded, config_file.defaults(loaded, base.get_config))
    design = study.read(settings)
    programs = study.programs(study.runs(settings, design._replace(seeds=design.seeds[:1])))
    assert len(programs) == PROGRAMS[stem] and len(design.seeds) >= 3  # fewer give no verdict


def test_a_dry_run_of_a_study_of_the_project_writes_nothing(tmp_path):
    file = str(ROOT / "configs" / "norm_study.py")
    outcome = tiny.run("--config", file, "--dry_run", "--config.mesh.data=1", "--workdir", str(tmp_path / "study"))
    assert (outcome.code, outcome.err) == (0, "") and outcome.out.count("parameters each") == PROGRAMS["norm_study"]
    studies = {file.stem for file in (ROOT / "configs").glob("*.py") if 'get_config("ablation"' in file.read_text()}
    assert studies == PROGRAMS.keys()
    assert not list(tmp_path.iterdir()) and "power: 5 seeds show a difference of " in outcome.out


def test_a_dry_run_prints_the_power_with_the_spread_of_the_folder(tmp_path):
    for arm, ends in (("fast", [1.1, 1.3, 1.5]), ("base", [1.0, 1.1, 1.2])):
        for seed, end in enumerate(ends):
            study_folder.run(tmp_path / "study", "all", arm, seed, ends={"eval/loss": end})
    outcome = tiny_study.run(tmp_path, "--dry_run", study__arms=ARMS[1:], study__seeds=[0, 1, 2])
    assert (outcome.code, outcome.err) == (0, "")
    assert "power: 3 seeds show a difference of 3.3 standard deviations of the paired difference" in outcome.out
    assert f"with the standard deviations of the runs in {tmp_path / 'study'}: 0.3264 in eval/loss" in outcome.out
