"""The report's files: whole, alike in what they say, and safe whatever the names in them are."""

import base64
import html.parser
import io
import json
import re

import numpy as np
import pytest
import scipy
import study_folder
from matplotlib import image

from experiments.engine import errors
from experiments.studies import maps, record, report, runs

ARMS = ("none", "tied", "asymmetric")
HOSTILE = '<script>alert("1")</script>'.replace("/", "") + " &amp; |`*[x](y) $a_b$ \x1b[31m"
EMPTY = {"meta", "img"}  # elements without an end


class Page(html.parser.HTMLParser):
    """What a browser would make of it: elements in order with their attributes, and words by the element around."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self._open = [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append((self._open[-1] if self._open else "", data))

    def of(self, tag):
        return [attributes for found, attributes in self.elements if found == tag]

    def text(self, *tags):
        return [data.replace("\N{NO-BREAK SPACE}", " ") for tag, data in self.words if tag in tags]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A study of two conditions, its folder, and the files of its report."""
    folder = tmp_path_factory.mktemp("study")
    study = study_folder.study(ARMS, conditions=("causal", "masked"), seeds=(0, 1, 2), threshold=1.6)
    study_folder.whole(folder, study)
    return study, folder, report.write(folder, study, what=study_folder.WHAT)


def test_every_file_is_there_and_no_draft(reported):
    _, folder, files = reported
    kinds = ("course", "differences", "symmetry", "attention", "maps")
    figures = [f"figures/{kind}_{condition}.png" for condition in ("causal", "masked") for kind in kinds]
    names = ["report.json", "report.md", "report.html", *figures]
    assert [file.relative_to(folder).as_posix() for file in files] == names
    there = [file for file in folder.rglob("*") if file.is_file() and "seed_" not in str(file)]
    assert sorted(there) == sorted(files)


def test_figures_are_not_blank(reported):
    for file in reported[2][3:]:
        pixel_YXZ = image.imread(file)
        assert min(pixel_YXZ.shape[:2]) > 150 and np.ptp(pixel_YXZ[..., :3]) > 0.5, file
        assert len(np.unique((pixel_YXZ[::3, ::3, :3] * 7).round(), axis=0)) > 20, file


def test_the_page_stands_alone_and_shows_every_figure(reported):
    _, folder, files = reported
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    assert not {"script", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in page.elements}
    shown = [base64.b64decode(one["src"].removeprefix("data:image/png;base64,")) for one in page.of("img")]
    assert sorted(shown) == sorted(file.read_bytes() for file in files[3:])
    assert all(len(one["alt"]) > 40 for one in page.of("img"))
    policy = [one["content"] for one in page.of("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_the_page_has_its_sections_in_order(reported):
    page = Page((reported[1] / "report.html").read_text())
    assert (
        page.text("h2")
        == page.text("a")
        == [*("Verdict", "Arms", "Training", "Paired differences", "Symmetry", "Attention", "What was run")]
    )
    cells = page.text("td", "th")
    assert {"1,000", "2.5 k", "minus asymmetric", "steps to 1.6", 'model.score = "tied"'} <= set(cells)
    assert json.loads(page.text("pre")[0]) == study_folder.WHAT["config"]
    assert page.text("p")[0] == "18 of 18 runs finished, seeds 0, 1, 2."


def test_all_three_say_the_same_verdict(reported):
    _, folder, _ = reported
    numbers = json.loads((folder / "report.json").read_text())
    page, markdown = Page((folder / "report.html").read_text()), (folder / "report.md").read_text()
    paragraphs = page.text("p")
    for words in (numbers["verdict"], *(one["verdict"] for one in numbers["conditions"])):
        assert "worse" in words or "Worse" in words
        assert words in paragraphs and words in markdown.replace("\\|", "|")


def test_markdown_links_to_the_figures_and_has_the_table(reported):
    _, folder, files = reported
    text = (folder / "report.md").read_text()
    links = re.findall(r"!\[\w+\]\((.*?)\)", text)
    assert [folder / link for link in links] == files[3:]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * 5 and {row.count(" | ") for row in rows} == {rows[0].count(" | ")}
    assert rows[2].startswith("| none | 1,000 | 2.5 k | 3 | ") and rows[1].startswith("| :-- | --: ")


def test_json_has_the_numbers(reported):
    numbers = json.loads((reported[1] / "report.json").read_text())
    assert (numbers["finished_runs"], numbers["planned_runs"], numbers["missing"]) == (18, 18, [])
    versions = numbers["what"].pop("versions")
    assert numbers["what"] | {"versions": {"jax": "0.0.1"}} == study_folder.WHAT
    assert versions == {"jax": "0.0.1", "scipy": scipy.__version__}
    none, _, asymmetric = numbers["conditions"][0]["arms"]
    found = none["difference"]
    by_seed = {seed: none["values"][seed] - asymmetric["values"][seed] for seed in "012"}
    assert found["by_seed"] == pytest.approx(by_seed) and found["mean"] == pytest.approx(
        np.mean(list(by_seed.values()))
    )
    assert found["interval"][0] < found["interval_uncorrected"][0] < found["mean"] < found["interval"][1]
    assert found["p_corrected"] == pytest.approx(2 * found["p"]) and found["kind"] == "worse"
    assert asymmetric["difference"] is None and asymmetric["symmetry"]["symmetry"] == pytest.approx(
        [np.tanh(0.5), np.tanh(1.0)]  # of 2 layers, at the last step
    )
    assert len(none["attention"]["entropy"]) == 2 and none["threshold_step"]["of"] == 3


def test_a_study_of_many_conditions_has_an_overview_in_colour(tmp_path):
    study = study_folder.study(conditions=("a", "b", "c"), seeds=(0, 1, 2))
    for name in ("a", "b", "c"):
        study_folder.losses(tmp_path, name, {"tied": [1.2, 1.3, 1.5], "asymmetric": [1.0, 1.1, 1.2]})
    files = report.write(tmp_path, study, what={})
    page, markdown = Page(files[2].read_text()), files[1].read_text()
    assert [cell.get("class") for cell in page.of("td")].count("worse") == 3 and "All conditions" in page.text("h3")
    anchors = {one["id"] for tag, one in page.elements if "id" in one}
    assert [one["href"].removeprefix("#") in anchors for one in page.of("a")] == [True] * len(page.of("a"))
    assert "all-conditions" in anchors and "#all-conditions" in [one["href"] for one in page.of("a")]
    assert "## All conditions" in markdown and "| b | eval/loss | 1.1000 | +0.2333 worse |" in markdown


def test_json_has_no_number_that_json_has_not():
    inf, nan = float("inf"), float("nan")
    assert record.finite({1: (inf, nan), "a": {"b": [-inf, 1.5, "nan", True]}}) == {
        "1": [None, None],
        "a": {"b": [None, 1.5, "nan", True]},
    }


def test_an_unfinished_study_says_what_is_missing(tmp_path):
    study = study_folder.study(seeds=(0, 1, 2))
    study_folder.losses(tmp_path, "all", {"tied": [2.0, 2.1, 2.2], "asymmetric": [1.0]})
    files = report.write(tmp_path, study, what={})
    assert [file.name for file in files[3:]] == ["course_all.png", "differences_all.png"]
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["missing"] == [{"condition": "all", "arm": "asymmetric", "seed": seed} for seed in (1, 2)]
    page = Page((tmp_path / "report.html").read_text())
    assert "4 of 6 runs finished, seeds 0, 1, 2." in page.text("p")
    assert any('Not finished yet: "asymmetric" seed 1, 2.' in words for words in page.text("p"))
    assert "No verdict" in report.text(tmp_path, study)


def test_a_study_without_any_run(tmp_path):
    files = report.write(tmp_path, study_folder.study(), what={})
    assert len(files) == 3 and "The study is not finished: 10" in Page(files[2].read_text()).text("p")[1]


def test_hostile_names_stay_words(tmp_path):
    study = study_folder.study((HOSTILE, "asymmetric"), conditions=(HOSTILE,), seeds=(0,))
    study = study._replace(arms=[study.arms[0]._replace(changes={HOSTILE: HOSTILE}), study.arms[1]])
    study_folder.whole(tmp_path, study, M=1, H=1)
    what = {"config": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}, "device": HOSTILE, "commit": HOSTILE}
    files = report.write(tmp_path, study, what=what)
    text = files[2].read_text()
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.elements} and "\x1b" not in text
    shown = HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert shown in page.text("td") and shown in page.text("h3")
    assert {attribute for tag, attributes in page.elements for attribute in attributes} <= {
        *("lang", "charset", "http-equiv", "content", "name", "class", "scope", "src", "alt", "id", "href")
    }
    markdown = files[1].read_text()
    assert "<script" not in markdown and "\x1b" not in markdown and "[x](y)" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert all(re.fullmatch(r"[\w-]+\.png", file.name) for file in files[3:]) and len(files) == 8
    assert "\x1b" not in report.text(tmp_path, study)


def test_damaged_maps_are_told(tmp_path):
    study = study_folder.study(seeds=(0,))
    study_folder.losses(tmp_path, "all", {"tied": [1.0]})
    file = tmp_path / "all/tied/seed_0/maps.npz"
    array = io.BytesIO()
    np.save(array, np.ones(3))
    for content in (b"", b"no zip", b"PK\x03\x04 cut off", array.getvalue()):
        file.write_bytes(content)
        with pytest.raises(errors.UserError, match=r"maps\.npz does not hold attention maps"):
            maps.first(runs.load(tmp_path, study))
    np.savez(file, A_MHNS=np.ones((2, 3, 3)))
    with pytest.raises(errors.UserError, match="must hold A_MHNS with 4 axes, and it has 3"):
        maps.first(runs.load(tmp_path, study))
