"""A study from its command to its report: extended, refused, and each run equal to the same run alone."""

import json
import pathlib

import pytest
import study_folder
import tiny
import tiny_study
from tiny_study import ALL, ARMS, STEPS

import launch
from experiments.config import files as config_files, settings as configs
from experiments.engine import loop
from experiments.folder import records
from experiments.studies import figures as study_figures, programs, run_folders, study as studies

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = {
    "qk_ablation": 14,
    "qk_ablation_full": 26,
    "qk_synthetic": 42,
    "qk_induction": 15,
    "qk_vit": 6,
    "norm_study": 3,
}
PROGRAMS |= {"contradictions": 24, "contradictions_small": 9, "head_study": 4, "search_noise": 1}
PROGRAMS |= {"learning_rate_study": 1, "speedrun_study": 10, "block_study": 7, "text_study": 2, "mup_study": 8}
PROGRAMS |= {"ladder": 12, "ladder_digits": 12, "leave_one_out": 10, "leave_one_out_digits": 10, "positions": 45}
PROGRAMS |= {"qk_heads": 48, "qk_padding": 4, "qk_positions": 35, "qk_skew": 18, "qk_tokens": 9, "qk_widths": 22}
PROGRAMS |= {
    "qk_matched": 12,
    "qk_induction_heads": 36,
    "positions_wide": 30,
    "qk_sizes_colab": 27,
    "qk_skew_text": 14,
    "qk_noself": 6,
}
LANGUAGE = {"study__experiment": "language", "study__arms": [["fast", {"optim.learning_rate": 1e-2}], ["usual", {}]]}


def test_a_study_writes_its_runs_and_its_report(tmp_path):
    outcome = tiny_study.run(tmp_path, draws=True, log=["symmetry"], study__arms=ARMS[1:])
    assert (outcome.code, outcome.err) == (0, "")
    summaries, root = tiny_study.summaries(tmp_path), tmp_path / "study"
    assert sorted(summaries) == sorted(ALL[2:])
    for name, summary in summaries.items():
        rows = records.read_metrics(root / name)
        for key, steps in {"eval/loss": [0, 3, 6], "train/loss": [2, 4, 6], "symmetry/2": [0, 3, 6]}.items():
            assert [row["step"] for row in rows if key in row] == steps
        assert summary["eval/loss"] == pytest.approx(rows[-1]["eval/loss"]) and summary["diverged_at"] is None
        assert (summary["steps"], summary["arm"], summary["together"]) == (6, name.split("/")[1], 4)  # one program
        assert summary["flops_per_step"] > 0 < summary["seconds_per_step"] < summary["wall_seconds"]
        assert [*summary["sources"]][0] == "ablation_config.py" and summary["data_sha256"] is None
        assert summary["initial"].keys() == {"G_CD 3x5", "b_C 3"}
    first = {name: records.read_metrics(root / name)[0]["eval/loss"] for name in summaries}
    assert first["all/fast/seed_3"] == first["all/base/seed_3"] != first["all/base/seed_5"]  # before training
    config = "ablation_config.py"
    assert list(tmp_path.glob(f"study/**/{config}")) == [root / "source" / config]  # one copy for all runs
    kinds = ("course", "differences")
    for file in ("report.json", "report.md", "report.html", *(f"figures/{kind}_all.png" for kind in kinds)):
        assert (root / file).stat().st_size > 1000 and file in outcome.out
    assert not (root / "checkpoints").exists()


def test_launch_run_returns_the_report_of_a_finished_study(study_copy, monkeypatch):
    folder, file = study_copy / "study", study_copy / "study" / "dots.png"

    def draw(*arguments):
        file.write_bytes(b"dots")
        return [study_figures.Figure(file, "course", "dots", "dots")]

    monkeypatch.setattr(study_figures, "draw", draw)
    result = launch.run(tiny_study.config_file(study_copy), folder)
    assert result.summary == json.loads((folder / "report.json").read_text()) and "verdict" in result.summary
    assert (result.folder, result.figures, result.params, result.apply) == (folder, [file], None, None)


def test_a_run_of_a_study_equals_the_same_run_alone(complete_study, tmp_path):
    config = tiny.config_file(tmp_path, "dots", **tiny_study.TRAIN | {"optim__learning_rate": 1e-2, "seed": 5})
    assert tiny.run("--config", config, "--workdir", str(tmp_path / "run")).code == 0
    single_run = json.loads((tmp_path / "run" / "summary.json").read_text())
    fast, lean = (tiny_study.summaries(complete_study)[f"all/{arm}/seed_5"] for arm in ("fast", "lean"))
    assert lean["params"] < fast["params"] == single_run["params"]
    assert (lean["together"], fast["together"]) == (2, 4)  # two programs
    for name in ("eval/loss", "eval/accuracy", "baseline/accuracy"):  # equal bit for bit in JAX 0.10.2, but not in 0.12
        assert fast[name] == pytest.approx(single_run[name], rel=1e-5), name
    rows = [
        records.read_metrics(run) for run in (tmp_path / "run", complete_study / "study" / "all" / "fast" / "seed_5")
    ]
    losses = [{row["step"]: row["train/loss"] for row in run_rows if "train/loss" in row} for run_rows in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3
    assert not any("symmetry/1" in row for row in rows[1])  # `log` has no "symmetry"


def test_arms_and_seeds_may_be_added_and_foreign_checkpoints_stay(complete_study, tmp_path, signal_after):
    def read_times() -> dict[pathlib.Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.glob("study/*/*/seed_*/summary.json")}

    checkpoints, arms = tmp_path / "study" / "checkpoints", {"study__arms": ARMS[1:]}
    signal_after(loop, "train")
    assert tiny_study.run(tmp_path, study__seeds=[3], **arms).code == 143
    for name in ("all_gone_01234567", "all_fast_noself_01234567", "all_fast_01234567"):
        (checkpoints / name).mkdir()
    assert tiny_study.run(tmp_path, **arms).code == 0
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["all_fast_noself_01234567", "all_gone_01234567"]
    times = read_times()
    assert len(times) == 4
    assert tiny_study.run(tmp_path).code == 0
    tiny_study.assert_equal_runs(tmp_path, complete_study, ALL)
    assert read_times().items() >= times.items()
    plans = [json.loads(line)["planned"] for line in (tmp_path / "study" / "plan.jsonl").read_text().splitlines()]
    assert [(len(entry["arms"]), entry["seeds"]) for entry in plans] == [(2, [3]), (2, [3, 5]), (3, [3, 5])]


@pytest.mark.parametrize("seeds", [[3, 5], [3, 5, 7]], ids=["finished", "another seed"])
def test_data_that_differ_from_those_of_finished_runs_are_refused(study_copy, monkeypatch, seeds):
    monkeypatch.setattr(programs, "train", lambda *_: pytest.fail("trained"))
    file = study_copy / "study" / "all" / "fast" / "seed_5" / "config.json"
    content = json.loads(file.read_text())
    assert content["data"] == {"sha256": None, "classes": None}
    for data in ({"sha256": "0", "classes": None}, {"sha256": None, "classes": ["a", "b"]}):
        file.write_text(json.dumps(content | {"data": data}))
        outcome = tiny_study.run(study_copy, study__seeds=seeds)
        assert outcome.code == 2 and str(file.parent) in outcome.err and "fast" in outcome.err


def test_runs_with_another_number_of_steps_are_trained_again(study_copy, monkeypatch):
    summaries = []
    monkeypatch.setattr(programs, "train", lambda *_: summaries.append(tiny_study.summaries(study_copy)))
    assert tiny_study.run(study_copy, train__steps=8).code == 0
    assert summaries == [{}, {}]


def test_an_arm_may_not_change_its_settings(study_copy):
    arm = {"study__arms": [["lean", {}], *ARMS[1:]]}, ["arm lean", "dots.bias", "False", "True"]
    for change, words in (arm, ({"optim__betas": [0.8, 0.99]}, ["study", "optim.betas"])):
        outcome = tiny_study.run(study_copy, **change)
        assert outcome.code == 2 and all(word in outcome.err for word in words)


REFUSED_ARMS = {"model.score": "tide", "image.patch": 3, "optim.muon_lr_multiplier": 3.0, "train.nan": "skip"}
REFUSED_ARMS |= {"optim.weight_decay": -1.0, "model.score_std": -1.0, "log": ["wandb"]}
REFUSED = [
    ({"study__arms": [["good", {}], ["bad", {key: value}]]}, ["arm bad", key.partition(".")[2]])
    for key, value in REFUSED_ARMS.items()
]
REFUSED += [
    ({"study__metric": "eval/explained"}, ["study.metric", "eval/explained", "eval/accuracy, eval/loss"]),
    ({"study__experiment": "langage"}, ['"langage"', '"language"']),
    ({"study__experiment": "ablation"}, ["study.experiment"]),
    ({"seed": 1}, ["seed = 1", "study.seeds"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_an_invalid_study_is_refused_in_one_sentence_before_training(tmp_path, changes, words, monkeypatch):
    monkeypatch.setattr(programs, "train", lambda *_: pytest.fail("trained"))
    outcome = tiny_study.run(tmp_path, **LANGUAGE | changes)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and all(word in outcome.err for word in words)
    assert not (tmp_path / "study").exists()


def test_started_programs_come_first_and_unchanged(tmp_path):
    settings = tiny.settings("ablation", **tiny_study.TRAIN | tiny_study.STUDY)
    programs_in_order = studies.programs(studies.runs(settings, studies.read(settings)))
    lean, rest = ([run.name for run in program.runs] for program in programs_in_order)

    def names(*finished_runs: str) -> list[list[str]]:
        for name in (*lean, *rest):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "summary.json").write_text(json.dumps({"steps": STEPS * (name in finished_runs)}))
        return [[run.name for run in program.runs] for program in run_folders.unfinished(programs_in_order, tmp_path)]

    assert names() == [lean, rest]
    (tmp_path / "checkpoints" / programs_in_order[1].folder).mkdir(parents=True)
    assert names("all/fast/seed_3") == [rest, lean]
    assert names(*rest, "all/lean/seed_3") == [["all/lean/seed_5"]]
    assert names(*rest, *lean) == []


@pytest.mark.parametrize("stem", PROGRAMS)
def test_every_study_of_the_project_is_valid(stem):
    config = config_files.load(str(ROOT / "configs" / f"{stem}.py"))
    settings = configs.Settings(config)
    design = studies.read(settings)
    programs = studies.programs(studies.runs(settings, design._replace(seeds=design.seeds[:1])))
    assert len(programs) == PROGRAMS[stem] and len(design.seeds) >= 3  # fewer seeds give no verdict


def test_a_dry_run_of_a_study_of_the_project_writes_nothing(tmp_path):
    file = str(ROOT / "configs" / "norm_study.py")
    outcome = tiny.run("--config", file, "--dry_run", "--config.mesh.data=1", "--workdir", str(tmp_path / "study"))
    assert (outcome.code, outcome.err) == (0, "") and outcome.out.count("parameters each") == PROGRAMS["norm_study"]
    assert not list(tmp_path.iterdir()) and "power: 5 seeds show a difference of " in outcome.out


def test_every_config_of_a_study_is_tested():
    stems = {file.stem for file in (ROOT / "configs").glob("*.py")} - {"base", "__init__"}
    assert {x for x in stems if config_files.load(f"{ROOT}/configs/{x}.py").experiment == "ablation"} == PROGRAMS.keys()


def test_a_dry_run_prints_the_power_with_the_standard_deviations_of_finished_runs(tmp_path):
    for arm, losses in (("fast", [1.1, 1.3, 1.5]), ("base", [1.0, 1.1, 1.2])):
        for seed, loss in enumerate(losses):
            study_folder.write_run(tmp_path / "study", "all", arm, seed, metrics={"eval/loss": loss})
    outcome = tiny_study.run(tmp_path, "--dry_run", study__arms=ARMS[1:], study__seeds=[0, 1, 2])
    assert (outcome.code, outcome.err) == (0, "")
    assert "power: 3 seeds show a difference of 3.3 standard deviations of the paired difference" in outcome.out
    assert f"with the standard deviations of the runs in {tmp_path / 'study'}: 0.3264 in eval/loss" in outcome.out
