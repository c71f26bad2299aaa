"""The report's files: complete, consistent with each other, and safe for any text in them."""

import base64
import csv
import dataclasses
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy
import study_folder
from matplotlib import image

from experiments.studies import figures as study_figures, results, runs as study_runs, statistics, tables

ARMS = ("none", "tied", "asymmetric")
STUDY = study_folder.make_study(ARMS, conditions=("causal", "masked"), seeds=(0, 1, 2), threshold=1.6)
HOSTILE = '<script>alert("1")<script> &amp; |`*[x](y) $a_b$ \x1b[31m'
COSTS = ("flops_per_token", "seconds", "diverged_at")  # columns of runs.csv after "params"
FIGURES = 4  # index of the first figure among the files of a report
FIRST_MACHINE = {"commit": "beef", "device": "a large computer", "versions": {"jax": "1", "numpy": "7"}}
FIRST_MACHINE |= {"wall_seconds": 1000.4}
SECOND_MACHINE = {"commit": "", "device": "another one", "versions": {"jax": "2", "numpy": "7"}, "wall_seconds": 234.3}


class Page:
    """A parsed HTML page. Raises ParseError if an element is not closed."""

    def __init__(self, file):
        text = re.sub(r"<((?:meta|img)\b[^>]*)>", r"<\1/>", file.read_text())  # elements without an end
        self.elements = [*ElementTree.fromstring(text).iter()]

    def find_attributes(self, tag):
        return [element.attrib for element in self.elements if element.tag == tag]

    def find_texts(self, *tags):
        texts = [element.text for element in self.elements if element.tag in tags]
        return [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts if text]


@pytest.fixture(scope="module")
def report_files(tmp_path_factory):
    """Return (folder, report files) of a study of two conditions. The second condition has only losses."""
    folder, study = tmp_path_factory.mktemp("study"), STUDY
    study_folder.write_study(folder, study._replace(conditions=study.conditions[:1]))
    losses = {"none": [3.0, 3.1, 3.2], "tied": [2.0, 2.0, 2.1], "asymmetric": [1.0, 1.1, 1.1]}
    study_folder.write_losses(folder, "masked", losses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_figures, "ALSO", ())
        return folder, results.write(folder, study, session=study_folder.PROVENANCE)


def tabulate_rows(record):
    return dict(tables.tabulate_runs(record).rows)


def test_every_file_is_there_without_drafts_and_no_figure_is_blank(report_files):
    folder, files = report_files
    kinds = ("course", "cost", "differences", "symmetry")
    figures = [*(f"{kind}_causal" for kind in kinds), "differences_masked"]
    names = ["report.json", "report.md", "report.html", "runs.csv"]
    names += [f"figures/{name}.png" for name in figures]
    assert [file.relative_to(folder).as_posix() for file in files] == names
    paths = [file for file in folder.rglob("*") if file.is_file() and "seed_" not in str(file)]
    assert sorted(paths) == sorted([*files, folder / "plan.jsonl"])
    for file in files[FIGURES:]:
        pixel_YXZ = image.imread(file)
        assert len(np.unique((pixel_YXZ[::3, ::3, :3] * 7).round(), axis=0)) > 20, file


def test_figures_are_also_svg_and_pdf_and_reproducible(report_files, tmp_path, monkeypatch):
    finished = study_runs.load(report_files[0], STUDY)
    masked = [condition for condition in statistics.analyse(STUDY, finished) if condition.name == "masked"]
    monkeypatch.setattr(study_figures, "KINDS", {"differences": study_figures.KINDS["differences"]})
    for name in "ab":
        (tmp_path / name).mkdir()
        study_figures.draw(tmp_path / name, STUDY, masked, finished, [])
    for end, begin in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF-"}.items():
        first, second = ((tmp_path / name / f"figures/differences_masked.{end}").read_bytes() for name in "ab")
        assert first.startswith(begin) and first == second, end


def test_the_page_loads_no_other_files_and_shows_every_figure_in_its_section(report_files):
    page, text = Page(report_files[1][2]), report_files[1][2].read_text()
    assert text.startswith("<!DOCTYPE html>\n<html")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    assert not {"script", "link", "iframe", "object", "base", "form"} & {element.tag for element in page.elements}
    images, metas = page.find_attributes("img"), page.find_attributes("meta")
    contents = [base64.b64decode(img["src"].removeprefix("data:image/png;base64,")) for img in images]
    assert sorted(contents) == sorted(file.read_bytes() for file in report_files[1][FIGURES:])
    assert all(len(img["alt"]) > 40 for img in images)
    policy = [meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    sections = ["Verdict", "Arms", "Training", "Differences", "Symmetry", "How to report this", "What was run"]
    assert page.find_texts("h2") == sections and page.find_texts("a") == [*sections, "report.json", "runs.csv"]
    links = [link["href"] for link in page.find_attributes("a")]
    assert links[-2:] == ["report.json", "runs.csv"] and links[0] == "#verdict"
    names = ["causal", "masked"]
    headings = [*names, "causal: eval/loss", "masked: eval/loss", "causal", *names, "causal"]
    assert page.find_texts("h3") == headings
    cells = {"1,000", "2.5 k", "minus asymmetric", "steps to 1.6", 'model.score = "tied"'}
    assert cells <= set(page.find_texts("td", "th"))
    assert json.loads(page.find_texts("pre")[0]) == study_folder.PROVENANCE["config"]
    assert page.find_texts("p")[0] == "18 of 18 runs finished, seeds 0, 1, 2."
    assert page.find_texts("summary") == ["The whole config"]


def test_json_markdown_and_html_agree_on_the_verdict_and_the_runs(report_files):
    folder, (numbers, markdown, page, _, *pictures) = report_files
    numbers, markdown, page = json.loads(numbers.read_text()), markdown.read_text(), Page(page)
    for verdict in (numbers["verdict"], *(condition["verdict"] for condition in numbers["conditions"])):
        assert "worse" in verdict or "Worse" in verdict
        assert verdict in page.find_texts("p") and verdict in markdown.replace("\\|", "|")
    rows = tables.tabulate_runs(numbers).rows
    assert np.reshape(page.find_texts("td")[-2 * len(rows) :], (-1, 2)).tolist() == rows
    for row in rows:
        assert f"\n* {': '.join(map(results.escape_markdown, row))}\n" in markdown
    links = re.findall(r"\n\n!\[\w+\]\((.*?)\)\n\n\w", markdown)
    assert sorted(folder / link for link in links) == sorted(pictures)
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * 5 and len({row.count(" | ") for row in rows[:5]}) == 1
    assert rows[2].startswith("| none | 1,000 | 2.5 k | 3 | ") and rows[1].startswith("| :-- | --: ")
    assert (
        "\n\n\n" not in markdown and markdown.count("\n\n| arm |") == 2 and markdown.endswith("[runs.csv](runs.csv).\n")
    )


def test_the_first_box_has_the_verdict_with_effects_and_how_rates_were_chosen(report_files):
    numbers, page = json.loads(report_files[1][0].read_text()), Page(report_files[1][2])
    boxes = [element for element in page.elements if element.get("class") == "verdict"]
    verdict, rates = (box.text.replace("\N{NO-BREAK SPACE}", " ") for box in boxes)
    assert verdict == numbers["verdict"] and re.search(
        r'"none": worse in causal and masked by .* \(95 % interval', verdict
    )
    assert rates == numbers["rates"] == "No arm was tuned in this study: one rate for all arms."
    (reporting,) = (text for text in page.find_texts("p") if text.startswith("Give 3 runs of each arm"))
    assert rates in reporting and "the 4 comparisons of this study together" in reporting


def test_a_study_of_one_condition_has_one_paragraph_and_one_of_one_arm_compares_nothing(tmp_path):
    study = study_folder.make_study(seeds=(0, 1, 2))
    study_folder.write_losses(tmp_path, "all", {"tied": [2.0, 2.1, 2.2], "asymmetric": [1.0, 1.0, 1.3]})
    files, analysis = results.write(tmp_path, study, session={}), results.analyse(tmp_path, study)
    for text in (files[1].read_text(), results.format_text(study, analysis)):
        assert text.count("Each arm is compared") == 1 and text.count("Worse: ") == 1
    alone = study._replace(arms=study.arms[1:])
    files, analysis = results.write(tmp_path, alone, session=study_folder.PROVENANCE), results.analyse(tmp_path, alone)
    mean = 'eval/loss of "asymmetric": 1.1000 ± 0.1732 (mean ± SD over 3 seeds).'
    for text in (*(file.read_text() for file in files[1:3]), results.format_text(alone, analysis)):
        assert mean in text.replace("&#34;", '"')
        assert not [word for word in ("compar", "minus", "verdict needs", "paired") if word in text]
    assert files[1].read_text().startswith("# language: one arm\n") and "not the best seed" in files[1].read_text()


def test_json_has_the_numbers_of_the_study(report_files):
    numbers = json.loads(report_files[1][0].read_text())
    assert (numbers["finished_runs"], numbers["planned_runs"], numbers["missing"]) == (18, 18, [])
    assert numbers["what"]["versions"] == {"jax": "0.0.1", "scipy": scipy.__version__}
    none, _, asymmetric = numbers["conditions"][0]["arms"]
    difference = none["difference"]
    assert difference["p_corrected"] == pytest.approx(4 * difference["p"]) and difference["kind"] == "worse"
    assert asymmetric["difference"] is None and asymmetric["symmetry"]["symmetry"] == pytest.approx(
        [np.tanh(0.5), np.tanh(1.0)]  # the two layers at the last step
    )
    assert none["threshold_step"]["of"] == 3
    fields = {field.name for field in dataclasses.fields(statistics.Arm)}
    assert none.keys() == fields - {"missing", "diverged"}
    assert none["others"]["eval/accuracy"] == {"mean": 0.5, "std": 0.0, "n": 3} and difference["words"]


def test_the_csv_has_a_row_and_the_json_curves_for_every_run(report_files):
    _, (numbers, _, _, table, *_) = report_files
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*("condition", "arm", "seed", "eval/loss", "eval/accuracy", "params"), *COSTS]
    assert [rows[0][name] for name in COSTS] == ["2500.0", "155.0", ""]
    last = {"condition": "masked", "arm": "asymmetric", "seed": "2", "eval/loss": "1.1", "eval/accuracy": ""}
    assert len(rows) == 18 and rows[-1] == last | dict(zip(["params", *COSTS], ["1000", "2500.0", "", ""], strict=True))
    curves = json.loads(numbers.read_text())["curves"]
    names = [(run["condition"], run["arm"], str(run["seed"])) for run in curves]
    assert names == [(row["condition"], row["arm"], row["seed"]) for row in rows]
    first = curves[0]["curves"]
    assert first.keys() == {"train/loss", "eval/loss"} and list(first["eval/loss"]) == [str(30 * i) for i in range(11)]
    assert first["eval/loss"]["300"] == float(rows[0]["eval/loss"])


def test_an_unfinished_study_lists_missing_runs(tmp_path):
    study = study_folder.make_study(seeds=(0, 1, 2))
    study_folder.write_losses(tmp_path, "all", {"tied": [2.0, 2.1, 2.2], "asymmetric": [1.0]})
    study_folder.write_run(tmp_path, "all", "asymmetric", 1, metrics={"eval/loss": 9.0}, diverged_at=7)
    files = results.write(tmp_path, study, session={})
    assert [file.name for file in files[FIGURES:]] == ["differences_all.png"]
    numbers = json.loads(files[0].read_text())
    assert numbers["missing"] == [{"condition": "all", "arm": "asymmetric", "seed": 2}]
    assert numbers["diverged"] == [{"condition": "all", "arm": "asymmetric", "seed": 1, "step": 7}]
    page = Page(files[2])
    assert "5 of 6 runs finished, seeds 0, 1, 2." in page.find_texts("p") and "Symmetry" not in page.find_texts("a")
    assert any('"asymmetric" seed 2.' in text for text in page.find_texts("p")) and "No verdict" in numbers["verdict"]


def test_a_study_without_runs_has_a_report(tmp_path):
    files = results.write(tmp_path, study_folder.make_study(), session={})
    assert len(files) == FIGURES
    study = study_folder.make_study()
    for text in (
        results.format_text(study, results.analyse(tmp_path, study)),
        *(file.read_text() for file in files[1:3]),
    ):
        assert "all: none of its 10 runs is finished yet." in text
    rows = tabulate_rows(json.loads(files[0].read_text()))
    assert rows["code of the runs"] == rows["versions of the runs"] == rows["training time of all runs"] == "unknown"
    assert rows["runs"].startswith("0 of 10 finished")


def test_code_hardware_versions_and_data_are_those_of_the_runs(tmp_path):
    def make_record(study):
        return results.record(study, results.analyse(tmp_path, study), study_folder.PROVENANCE)

    study = study_folder.make_study(conditions=("a", "b"), seeds=(0, 1, 2))
    study = study._replace(conditions=[study.conditions[0]._replace(changes={"text.N": 7}), study.conditions[1]])
    data = {"a": ["  text: 9 words", "held out: 2"], "b": ["text: 7 words"]}
    for condition, lines in data.items():
        study_folder.write_losses(tmp_path, condition, {"tied": [1.2, 1.3, 1.5]}, data=lines, **FIRST_MACHINE)
        study_folder.write_losses(tmp_path, condition, {"asymmetric": [1.0, 1.1, 1.2]}, data=lines, **SECOND_MACHINE)
    rows = tabulate_rows(make_record(study))
    assert rows["code of the runs"] == "beef (6 runs), not from a checkout (6 runs)"
    assert rows["hardware of the runs"] == "a large computer (6 runs), another one (6 runs)"
    assert rows["versions of the runs"] == "jax 1 (6 runs) and 2 (6 runs), numpy 7"
    assert rows["training time of all runs"] == "7,408 s"
    assert rows["data, a"] == "text: 9 words; held out: 2" and rows["data, b"] == "text: 7 words"
    assert rows["code of the report"] == "c0ffee, on one small computer"
    assert rows["versions of the report"] == f"jax 0.0.1, scipy {scipy.__version__}"
    assert rows["runs"] == "12 of 12 finished, seeds 0, 1, 2" and rows["arm tied"] == 'model.score = "tied"'
    assert rows["condition a"] == "text.N = 7" and "condition b" not in rows
    assert tabulate_rows(make_record(study._replace(conditions=study.conditions[1:])))["data"] == "text: 7 words"


def test_hostile_values_are_escaped(tmp_path):
    """Names of arms are letters and digits, but settings, data and versions may contain any text."""
    study = study_folder.make_study(("tied", "asymmetric"), seeds=(0,))
    study = study._replace(arms=[study.arms[0]._replace(changes={HOSTILE: HOSTILE}), study.arms[1]])
    study_folder.write_losses(tmp_path, "all", {"tied": [1.0], "asymmetric": [2.0]}, data=[HOSTILE])
    session = {"config": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}, "device": HOSTILE, "commit": HOSTILE}
    files = results.write(tmp_path, study, session=session)
    page = Page(files[2])
    assert not page.find_attributes("script") and "\x1b" not in files[2].read_text()
    clean = HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert clean in page.find_texts("td") and json.loads(page.find_texts("pre")[0]) == session["config"]
    assert {name for element in page.elements for name in element.attrib} <= {
        *("lang", "charset", "http-equiv", "content", "name", "class", "scope", "src", "alt", "id", "href")
    }
    markdown = files[1].read_text()
    assert "<script" not in markdown and "\x1b" not in markdown and "[x](y)" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert len(files) == FIGURES + 1 and "\x1b" not in results.format_text(study, results.analyse(tmp_path, study))
