"""The report of a study's folder without training, and of merged folders."""

import json
import pathlib
import shutil

import pytest
import tiny
import tiny_study
from tiny_study import ALL, ARMS

from experiments.engine import by_name
from experiments.studies import figures as study_figures, programs
from experiments.tools import report


@pytest.fixture(autouse=True)
def forbid_training(monkeypatch):
    """Draw nothing, and fail if an experiment is prepared."""
    monkeypatch.setattr(study_figures, "draw", lambda *_: [])
    for owner, name in ((by_name, "load_experiment"), (programs, "check")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("an experiment was prepared"))


def edit(file: pathlib.Path, **changes) -> None:
    """Change a JSON file. Two underscores separate the keys of nested objects."""
    content = json.loads(file.read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = content
        for name in path:
            inner = inner[name]
        inner[last] = value
    file.write_text(json.dumps(content))


def read_report(folder: pathlib.Path) -> dict:
    """Return report.json without the session that wrote it."""
    record = json.loads((folder / "report.json").read_text())
    assert record.pop("what")["versions"]
    return record


@pytest.fixture
def halves(complete_study, tmp_path):
    """Return the folders of two machines with parts of `complete_study`: each has one arm and the reference."""
    folders = [tmp_path / name for name in "AB"]
    for folder, missing in zip(folders, ("fast", "lean"), strict=True):
        shutil.copytree(complete_study / "study", folder)
        shutil.rmtree(folder / "all" / missing)
        edit(folder / "config.json", config__study__arms=[arm for arm in ARMS if arm[0] != missing])
    return folders


def test_a_report_is_rewritten_without_training(study_copy):
    folder = study_copy / "study"
    before, page = read_report(folder), (folder / "report.md").read_text()
    for name in ("report.json", "report.md", "report.html", "runs.csv"):
        (folder / name).unlink()
    outcome = tiny.command(report, workdir=folder)
    assert (outcome.code, outcome.err) == (0, "") and before["verdict"][:30] in outcome.out
    assert read_report(folder) == before and (folder / "report.html").is_file()
    session = "* code of the report: "
    assert page.split(session)[0] == (folder / "report.md").read_text().split(session)[0]


def test_a_folder_without_a_study_has_no_report(tmp_path):
    missing = tmp_path / "missing"
    assert str(missing) in tiny.refusal(report, workdir=missing) and not missing.exists()
    (tmp_path / "config.json").write_text('{"config": {"train": {"steps": 3}}}')
    assert str(tmp_path) in tiny.refusal(report, workdir=tmp_path)


def test_comparisons_planned_in_a_part_count_in_the_merged_study(halves, tmp_path):
    plan = {"conditions": {"all": "eval/loss"}, "arms": ["gone", ARMS[-1][0]], "reference": ARMS[-1][0], "seeds": [0]}
    with (halves[1] / "plan.jsonl").open("a") as file:
        file.write(json.dumps({"when": "", "planned": plan}) + "\n")
    assert f'"gone" against "{ARMS[-1][0]}"' in tiny.command(report, workdir=tmp_path / "new", merge=halves).out


def test_merged_halves_equal_the_whole_study(complete_study, halves, tmp_path):
    (halves[1] / "source" / "mine.py").write_text("a = 1")
    outcome = tiny.command(report, workdir=tmp_path / "new", merge=halves)
    assert (outcome.code, outcome.err) == (0, "")
    assert read_report(tmp_path / "new") == read_report(complete_study / "study")
    assert {file.name for file in (tmp_path / "new" / "source").iterdir()} >= {"ablation_config.py", "mine.py"}
    shutil.copytree(tmp_path / "new", tmp_path / "study")
    tiny_study.assert_equal_runs(tmp_path, complete_study, ALL)
    study = json.loads((tmp_path / "new" / "config.json").read_text())["config"]["study"]
    assert study["arms"] == ARMS and study["seeds"] == [3, 5]


def test_seeds_of_two_machines_are_merged(complete_study, tmp_path):
    folders = [tmp_path / name for name in "AB"]
    for folder, seed, missing in zip(folders, (5, 3), (3, 5), strict=True):
        shutil.copytree(complete_study / "study", folder, ignore=shutil.ignore_patterns(f"seed_{missing}"))
        edit(folder / "config.json", config__study__seeds=[seed])
    assert tiny.command(report, workdir=tmp_path / "new", merge=folders).code == 0
    record = read_report(tmp_path / "new")
    assert record["seeds"] == [5, 3] and record["finished_runs"] == 6 and record["missing"] == []


BASE = "all/base/seed_5/summary.json"
CHANGED_ARMS = [ARMS[1], ["base", {"optim.betas": [0.5, 0.99]}]]
REFUSED = [  # (changes to files, the fact that then differs)
    ([("config.json", {"config__train__steps": 7})], "train.steps"),
    ([("config.json", {"config__study__arms": ARMS[2:] + ARMS[1:2]})], "the reference"),
    ([("config.json", {"config__study__arms": CHANGED_ARMS})], '"base" of study.arms'),
    ([(BASE, {"commit": "beef"})], "the code"),
    ([(place + BASE, {"sources": {"config.py": place, "mine.py": place}}) for place in ("", "../A/")], "mine.py"),
    ([(BASE, {"data_sha256": "beef"})], "the data of all/base/seed_5"),
    ([(BASE, {"eval/loss": 3.0})], "the result of all/base/seed_5"),
]


@pytest.mark.parametrize(("changes", "fact"), REFUSED, ids=[fact for _, fact in REFUSED])
def test_folders_that_disagree_are_not_merged(halves, tmp_path, changes, fact):
    for name, change in changes:
        edit(halves[1] / name, **change)
    error = tiny.refusal(report, workdir=tmp_path / "new", merge=halves)
    assert all(str(part) in error for part in (*halves, fact))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["A", "B"]


def test_a_report_can_correct_within_each_condition_on_request(study_copy):
    folder = study_copy / "study"
    for flags, family in (({"correction": "condition"}, "condition"), ({}, "study")):
        outcome = tiny.command(report, workdir=folder, **flags)
        assert (outcome.code, read_report(folder)["conditions"][0]["family"]) == (0, family)
        assert f"comparisons of this {family} together" in (folder / "report.md").read_text()
    assert '"arms"' in tiny.refusal(report, workdir=folder, correction="arms")


def test_a_merge_needs_two_folders_with_runs_and_a_new_folder(halves, tmp_path):
    new = tmp_path / "new"
    assert "--merge" in tiny.refusal(report, workdir=new, merge=halves[:1])
    assert str(halves[1]) in tiny.refusal(report, workdir=halves[1], merge=halves)
    for folder in halves:
        shutil.rmtree(folder / "all")
    assert f"{halves[0]} or {halves[1]}" in tiny.refusal(report, workdir=new, merge=halves) and not new.exists()


def test_a_merge_does_not_copy_foreign_files(halves, tmp_path):
    run = sorted(halves[0].glob("all/*/seed_*"))[0]
    with (run / "core").open("wb") as file:
        file.truncate(2**40)
    (run / "link.json").symlink_to("/etc/hostname")
    (run / "tokenizer.json").write_text("{}")
    outcome = tiny.command(report, workdir=tmp_path / "new", merge=halves)
    assert outcome.code == 0 and f"2 files of {run}" in outcome.out
    names = {file.name for file in (tmp_path / "new" / run.relative_to(halves[0])).iterdir()}
    assert "tokenizer.json" in names and not names & {"core", "link.json"}
