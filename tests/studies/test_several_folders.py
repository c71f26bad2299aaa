"""The report of a study's folder, or of the folders of several machines, without training."""

import json
import pathlib
import shutil

import pytest
import tiny
from tiny_study import ARMS

from experiments.config import by_name
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


def test_a_folder_without_a_study_has_no_report(complete_study, tmp_path):
    missing = tmp_path / "missing"
    assert str(missing) in tiny.refusal(report, workdir=missing) and not missing.exists()
    assert str(missing) in tiny.refusal(report, workdir=complete_study / "study", also=[missing])
    (tmp_path / "config.json").write_text('{"config": {"train": {"steps": 3}}}')
    assert str(tmp_path) in tiny.refusal(report, workdir=tmp_path)


def test_comparisons_planned_in_a_part_count_in_the_whole_study(halves):
    plan = {"conditions": {"all": "eval/loss"}, "arms": ["gone", ARMS[-1][0]], "reference": ARMS[-1][0], "seeds": [0]}
    with (halves[1] / "plan.jsonl").open("a") as file:
        file.write(json.dumps({"when": "", "planned": plan}) + "\n")
    assert f'"gone" against "{ARMS[-1][0]}"' in tiny.command(report, workdir=halves[0], also=halves[1:]).out


def test_the_report_of_two_halves_equals_that_of_the_whole_study(complete_study, halves):
    others = {file: file.read_bytes() for file in halves[1].rglob("*") if file.is_file()}
    outcome = tiny.command(report, workdir=halves[0], also=halves[1:])
    assert (outcome.code, outcome.err) == (0, "")
    record, whole = read_report(halves[0]), read_report(complete_study / "study")
    assert record["ran"].pop("folders") == {str(halves[0]): 4, str(halves[1]): 2} and not whole["ran"].pop("folders")
    assert record == whole
    row = f"* folders of the runs: {halves[0]} (4 runs), {halves[1]} (2 runs)"
    assert row in (halves[0] / "report.md").read_text().replace("\\_", "_")
    assert others == {file: file.read_bytes() for file in halves[1].rglob("*") if file.is_file()}
    study = json.loads((halves[0] / "report.json").read_text())["what"]["config"]["study"]
    assert study["arms"] == ARMS and study["seeds"] == [3, 5]


def test_seeds_of_two_machines_are_one_study(complete_study, tmp_path):
    folders = [tmp_path / name for name in "AB"]
    for folder, seed, missing in zip(folders, (5, 3), (3, 5), strict=True):
        shutil.copytree(complete_study / "study", folder, ignore=shutil.ignore_patterns(f"seed_{missing}"))
        edit(folder / "config.json", config__study__seeds=[seed], config__log=["symmetry"] * (seed == 3))
        edit(folder / "config.json", config__mesh__data=seed)
    assert tiny.command(report, workdir=folders[0], also=folders[1:]).code == 0
    record = read_report(folders[0])
    assert record["seeds"] == [5, 3] and record["finished_runs"] == 6 and record["missing"] == []


BASE = "all/base/seed_5/summary.json"
CHANGED_ARMS = [ARMS[1], ["base", {"optim.betas": [0.5, 0.99]}]]
REFUSED = [  # (changes to files, the fact that then differs)
    ([("config.json", {"config__train__steps": 7})], "train.steps"),
    ([("config.json", {"config__study__arms": ARMS[2:] + ARMS[1:2]})], "the reference"),
    ([("config.json", {"config__study__arms": CHANGED_ARMS})], '"base" of study.arms'),
    ([(BASE, {"commit": "beef"})], "the code"),
    ([(place + BASE, {"sources": {"config.py": place, "mine.py": place}}) for place in ("", "../A/")], "mine.py"),
    ([(BASE, {"data_sha256": "beef"})], "the data of all/base"),
    ([(BASE, {"eval/loss": 3.0})], "the result of all/base/seed_5"),
]


@pytest.mark.parametrize(("changes", "fact"), REFUSED, ids=[fact for _, fact in REFUSED])
def test_folders_that_disagree_have_no_report(halves, changes, fact):
    for name, change in changes:
        edit(halves[1] / name, **change)
    (halves[0] / "report.json").unlink()
    error = tiny.refusal(report, workdir=halves[0], also=halves[1:])
    assert all(str(part) in error for part in (*halves, fact)) and not (halves[0] / "report.json").exists()


def test_a_report_can_correct_within_each_condition_on_request(study_copy):
    folder = study_copy / "study"
    for flags, family in (({"correction": "condition"}, "condition"), ({}, "study")):
        outcome = tiny.command(report, workdir=folder, **flags)
        assert (outcome.code, read_report(folder)["conditions"][0]["family"]) == (0, family)
        assert f"comparisons of this {family} together" in (folder / "report.md").read_text()
    assert '"arms"' in tiny.refusal(report, workdir=folder, correction="arms")
