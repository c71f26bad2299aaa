"""verdict: numbers of other programs get the statistics, sentences and report of a study."""

import csv
import json
import os
import pathlib
import re
import runpy

import numpy as np
import pytest
import study_folder
import tiny
from errors import raises
from scipy import stats

from experiments.config import errors
from experiments.studies import figures as study_figures, inference, results, run_table, sentences, statistics
from experiments.tools import verdict

ROOT = pathlib.Path(__file__).parents[2]
TRACK3 = pathlib.Path(os.environ.get("TFM_DATA", "")) / "track3"
HEAD = "arm,seed,steps,loss\n"
OLD, NEW = [3.31, 3.33, 3.30, 3.32, 3.31], [3.20, 3.22, 3.19]


def write(folder, arms, *, head="arm,seed,loss", seeds=True) -> pathlib.Path:
    """Write a table of these losses of each arm. Its seeds are 0, 1, ..., or empty."""
    lines = [f"{arm},{i if seeds else ''},{x}" for arm, losses in arms.items() for i, x in enumerate(losses)]
    (folder / "results.csv").write_text("\n".join([head, *lines]) + "\n")
    return folder / "results.csv"


def run_command(*argv) -> tiny.Outcome:
    return tiny.call(verdict.run, verdict.HELP, *argv, positional="table")


@pytest.fixture(autouse=True)
def only_png(monkeypatch):
    monkeypatch.setattr(study_figures, "ALSO", ())


def test_the_table_of_a_study_gives_the_verdict_of_the_study(tmp_path, capsys):
    study = study_folder.make_study(("tied", "none", "asymmetric"), conditions=("a", "b"), seeds=(0, 1, 2, 3))
    draw = np.random.default_rng(0)
    for condition in ("a", "b"):
        losses = {arm: (1 + shift + draw.normal(0, 0.1, 4)).tolist() for arm, shift in (("tied", 1), ("none", 0))}
        losses |= {"asymmetric": draw.normal(1, 0.1, 4).tolist()}
        study_folder.write_losses(tmp_path / "study", condition, losses)
    for name, change in (("a/tied", {"eval/loss": None}), ("b/none", {"diverged_at": 7})):
        place = tmp_path / "study" / name / "seed_3" / "summary.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | change))
    results.write(tmp_path / "study", study, session={})
    expected = results.analyse(tmp_path / "study", study).conditions
    analysis = verdict.run([tmp_path / "study" / "runs.csv"], metric="eval/loss")
    assert 'reference: "asymmetric", the last arm, as in runs.csv' in capsys.readouterr().out
    for condition, of_study in zip(analysis.conditions, expected, strict=True):
        for arm, arm_of_study in zip(condition.arms, of_study.arms, strict=True):
            for field in ("name", "values", "diverged", "difference"):
                assert getattr(arm, field) == getattr(arm_of_study, field), field
    kinds = {arm.difference.kind for condition in expected for arm in condition.compared}
    assert {statistics.WORSE, statistics.OPEN, statistics.UNSTABLE} == kinds


def test_runs_without_a_partner_are_counted(tmp_path):
    out = " ".join(run_command(write(tmp_path, {"new": NEW, "old": OLD})).out.split())  # three seeds and five
    assert out.count("which leaves out 2 runs of") == 1
    for arms, seeds in (({"new": NEW, "old": OLD[:3]}, True), ({"new": NEW, "old": OLD}, False)):
        assert "leaves out" not in " ".join(run_command(write(tmp_path, arms, seeds=seeds)).out.split())


def test_arms_without_common_seeds_are_compared_by_welch(tmp_path):
    file = write(tmp_path, {"new": NEW, "old": OLD}, seeds=False)
    [condition] = verdict.run([file], reference="old").conditions
    difference = condition.compared[0].difference
    variances = np.var(NEW, ddof=1) / 3, np.var(OLD, ddof=1) / 5
    half, mean = stats.t.ppf(0.975, 2) * np.sqrt(sum(variances)), np.mean(NEW) - np.mean(OLD)
    assert difference.interval == pytest.approx((mean - half, mean + half))
    (low, high), _ = inference.welch(np.array(NEW), np.array(OLD), 2)  # 97.5 % each
    assert (high - low) / 2 == pytest.approx(half * stats.t.ppf(0.9875, 2) / stats.t.ppf(0.975, 2))
    assert difference.p == pytest.approx(2 * stats.t.cdf(mean / np.sqrt(sum(variances)), 2))
    assert (difference.kind, difference.unpaired, difference.n) == (statistics.BETTER, (3, 5), 3)
    assert (difference.by_seed, difference.std, difference.detectable) == ({}, None, None)
    assert "leaves out" not in sentences.describe_condition(condition)  # no run needs a partner


@pytest.mark.parametrize(
    "new, old, margin, kind",
    [
        ([1.0, 1.1], [1.0, 1.1, 1.2], 0, statistics.FEW),
        ([1.0] * 3, [1.0] * 4, 0, statistics.SAME),
        ([0.0] * 3, [0.0] * 4, 0, statistics.CEILING),
        ([1.0] * 3, [2.0] * 4, 0, "identical runs of both"),
        ([1.0] * 3, [2.0, 2.1, 2.2], 0, "identical runs of the arm"),
        ([2.0, 2.1, 2.2], [1.0] * 3, 0, "identical runs of the reference"),
        ([0.0] * 3, [2.0, 2.1, 2.2], 0, statistics.BETTER),
        ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2, 1.1], 0, statistics.OPEN),
        ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2, 1.1], 1, statistics.EQUAL),
        ([1.0, 1.1, "nan", 1.1], [1.0, 1.1, 1.2], 0, statistics.UNSTABLE),
        ([1.0, 1.001, 1.002, 9.0, 9.001], [1.0, 1.001, 1.002, 1.003], 0, statistics.STUCK),
    ],
)
def test_unpaired_kinds_are_those_of_pairs(tmp_path, new, old, margin, kind):
    file = write(tmp_path, {"new": new, "old": old}, seeds=False)
    assert verdict.run([file], margin=float(margin), reference="old").conditions[0].compared[0].difference.kind == kind


def test_the_report_says_what_is_unpaired_diverged_or_of_other_steps_and_has_no_empty_parts(tmp_path):
    rows = [f"{arm},{seed},100,{x}" for arm in ("a b/c", "base") for seed, x in enumerate(OLD, start=arm == "base")]
    rows += [f"muon,,90,{x}" for x in ("nan", *NEW)]
    (tmp_path / "results.csv").write_text(HEAD + "\n".join([*rows[:5], *rows[10:], *rows[5:10]]) + "\n")
    code, out, err = run_command(tmp_path / "results.csv", "--reference=base", f"--workdir={tmp_path / 'out'}")
    assert (code, err) == (0, "") and "parameters" not in out
    files = sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*"))
    expected = ["figures/differences_all.png", "report.html", "report.json", "report.md", "runs.csv"]
    assert files == expected
    text, page = ((tmp_path / "out" / f"report.{end}").read_text() for end in ("md", "html"))
    assert 'paired by seed, except "muon" (no common seeds)' in text
    assert '"muon" trained for 90 steps and "base" for 100' in text and '"muon" line 7 (loss not finite)' in text
    for absent in ("unknown", "parameters", "FLOP", "config", "symmetry", "Attention", "Training", "hardware"):
        assert absent not in text and absent not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL), absent
    table = (tmp_path / "out" / "runs.csv").read_text().splitlines()
    assert table[0].startswith("condition,arm,seed,loss,") and table[6].startswith("all,muon,,nan,")
    again = verdict.run([tmp_path / "out" / "runs.csv"]).conditions[0]
    first, second = (
        condition.compared
        for condition in (again, verdict.run([tmp_path / "results.csv"], reference="base").conditions[0])
    )
    assert [arm.difference for arm in first] == [arm.difference for arm in second]
    assert [arm.difference.n for arm in first] == [4, 3]  # seeds 1, 2, 3, 4 have pairs


def test_successive_arms_are_a_family(tmp_path):
    arms = {"first": OLD, "second": NEW, "third": [3.2, 3.1, 3.3]}
    analysis = verdict.run([write(tmp_path, arms, seeds=False)], successive=True, workdir=tmp_path / "out")
    names = [condition.name for condition in analysis.conditions]
    assert names == ["second after first", "third after second"]
    assert [condition.compared[0].difference.unpaired for condition in analysis.conditions] == [(3, 5), (3, 3)]
    first, second = (condition.compared[0].difference for condition in analysis.conditions)
    assert first.p_corrected == pytest.approx(2 * first.p) and second.p_corrected == pytest.approx(min(1, 2 * second.p))
    figures = [file.name for file in (tmp_path / "out" / "figures").iterdir()]
    assert len(figures) == 2 and all(re.fullmatch(r"[\w.]+", name) for name in figures)


def test_conditions_have_figures_of_their_own(tmp_path):
    rows = [
        f"{condition},{arm},{seed if arm != 'muon' else ''},{x + shift}"
        for condition in ("a b", "a/b")
        for arm, shift in (("sgd", 1), ("muon", 2), ("base", 0))
        for seed, x in enumerate(OLD)
    ]
    (tmp_path / "results.csv").write_text("\n".join(["condition,arm,seed,loss", *rows]) + "\n")
    verdict.run([tmp_path / "results.csv"], workdir=tmp_path / "out")
    assert len(list((tmp_path / "out" / "figures").glob("differences_a_b_*.png"))) == 2


def test_direction_reference_and_looks(tmp_path):
    arms = {"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.3], "c": [3.0, 3.3, 3.2]}
    file = write(tmp_path, arms, head="arm,seed,score")
    more, less = (verdict.run([file], better=better, reference="b").conditions[0] for better in ("more", "less"))
    assert [arm.name for arm in more.arms] == ["a", "c", "b"] == [arm.name for arm in less.arms]
    assert [arm.difference.kind for arm in more.compared] == [statistics.WORSE, statistics.BETTER]
    assert [arm.difference.kind for arm in less.compared] == [statistics.BETTER, statistics.WORSE]
    wide = verdict.run([file], better="more", reference="b", looks=4).conditions[0]
    assert wide.together == 8 and np.ptp(wide.arms[0].difference.interval) > np.ptp(more.arms[0].difference.interval)


def test_names_of_columns_and_arms_are_recognised_and_what_is_read_otherwise_is_printed(tmp_path):
    file = tmp_path / "results.csv"
    rows = [f"{arm},{seed},{0.5 + seed / 100}" for arm in ("a b", "base") for seed in range(3)]
    file.write_text("\n".join([" Arm,random_seed ,Test Accuracy", *rows, " a  b,3,nan", "base,3,0.6"]) + "\n")
    code, out, err = run_command(file)
    lines = ["Test Accuracy: higher is better. --better=less", "diverged_at, or their state): 1"]
    assert (code, err) == (0, "") and all(line in out for line in [*lines, "one arm, 'a b': ['a  b', 'a b']"])
    assert '"a b": better' not in out and "unstable" in out


LONG = "arm,seed,accuracy\nours,0,73.4\nours,1,74.0\nours,2,73.1\nbaseline,0,71.0\nbaseline,1,72.5\nbaseline,2,71.5\n"
STEPS = "arm,seed,step,accuracy\n" + "".join(
    f"{line.rpartition(',')[0]},{step},{x}\n"
    for line in LONG.splitlines()[1:]
    for step, x in ((20, line.rpartition(",")[2]), (10, "9"), (30, ""))
)
WIDE = "seed,baseline,ours\n0,71.0,73.4\n1,72.5,74.0\n2,71.5,73.1\n"


@pytest.mark.parametrize(
    ("text", "options", "lines"),
    [
        (WIDE, {"wide": True, "metric": "accuracy"}, ["columns that are arms: baseline, ours"]),
        ("," + WIDE.replace("\n", "\n7,", 3), {"wide": True, "metric": "accuracy"}, ["arms: baseline, ours\n"]),
        (
            LONG.replace("arm,seed,accuracy", "Model, Random Seed ,accuracy"),
            {},
            ['"Model" is read as arm', '"Random Seed" is read as seed'],
        ),
        (LONG.replace("arm", "Method").replace("\n", ",run\n").replace("y,run", "y,Name"), {"metric": "accuracy"}, []),
        (re.sub(r"(\.\d)", r"\1 %", LONG), {}, ["cells with a % sign, read as percentages: 6\n"]),
        (LONG + "ours,3,\nours,4,N/A\n", {}, ["left out as missing: 2\n", "runs without a row that is used: 2\n"]),
        (
            STEPS,
            {},
            [
                '"step" is read as steps',
                "rows of earlier steps of a run",
                "with a value is used: 6\n",
                "left out as missing: 6\n",
            ],
        ),
        (STEPS.replace("step", "epoch").replace("\n", ",5\n").replace("y,5", "y,Step"), {"reference": "no"}, None),
        (
            LONG.replace("\n", ",finished\n").replace("y,finished", "y,State") + "ours,3,70,running\n",
            {},
            ["rows by their state: 6 finished (used), 1 running (left out)", "row that is used: 1\n"],
        ),
    ],
)
def test_a_table_of_another_form_is_read_as_the_long_one_and_says_so(tmp_path, capsys, text, options, lines):
    (tmp_path / "long.csv").write_text(LONG)
    (tmp_path / "results.csv").write_text(text)
    expected = verdict.run([tmp_path / "long.csv"]).conditions[0]
    assert 'reference: "baseline", by its name' in capsys.readouterr().out
    if lines is None:  # two columns of steps: Step counts, and has each step twice
        with raises(errors.UserError, "line 3", "twice"):
            verdict.run([tmp_path / "results.csv"], **options)
        return
    condition = verdict.run([tmp_path / "results.csv"], **options).conditions[0]
    assert [(arm.name, arm.values, arm.difference) for arm in condition.arms] == [
        (arm.name, arm.values, arm.difference) for arm in expected.arms
    ]
    out = capsys.readouterr().out
    assert all(line in out for line in lines), out
    for line in ("%", "missing", "earlier steps", "state", "diverged", "one arm"):
        assert (line in out.partition("reference:")[0]) == any(line in text for text in lines), line


@pytest.mark.parametrize("state", ["crashed", "Failed", "killed", "diverged_at"])
def test_a_run_that_failed_is_diverged_and_a_missing_one_is_not(tmp_path, capsys, state):
    cells = {"crashed": "72,crashed", "Failed": ",Failed", "killed": "72,killed", "diverged_at": ",300"}[state]
    text = LONG.replace("\n", ",\n" if state == "diverged_at" else ",done\n")
    text = re.sub("y,(done)?\n", f"y,{'diverged_at' if state == 'diverged_at' else 'status'}\n", text)
    (tmp_path / "results.csv").write_text(f"{text}ours,3,{cells}\n")
    [condition] = verdict.run([tmp_path / "results.csv"]).conditions
    difference = condition.compared[0].difference
    assert (difference.kind, difference.rates[0].k, difference.rates[0].n) == (statistics.UNSTABLE, 1, 4)
    assert "or their state): 1\n" in capsys.readouterr().out and len(condition.compared[0].values) == 3


def test_a_run_that_failed_at_its_last_step_is_diverged(tmp_path):
    rows = LONG.replace("\n", ",10,done\n").replace("y,10,done", "y,step,state") + "ours,0,,,crashed\n"
    (tmp_path / "results.csv").write_text(rows)
    [condition] = verdict.run([tmp_path / "results.csv"]).conditions
    assert [*condition.compared[0].diverged] == [0] and len(condition.compared[0].values) == 2


@pytest.mark.parametrize(
    ("names", "reference"), [("abc", "a"), (["a", "Control", "c"], "Control"), (["a", "control", "baseline"], "a")]
)
def test_the_reference_is_the_arm_with_such_a_name_or_the_first(tmp_path, names, reference):
    file = write(tmp_path, dict.fromkeys(names, OLD))
    assert verdict.run([file]).conditions[0].reference == reference
    again = verdict.run([file], reference=names[1], workdir=tmp_path / "out")
    assert again.conditions[0].reference == names[1]
    assert verdict.run([tmp_path / "out" / "runs.csv"]).conditions[0].reference == names[1]  # as in a study: the last


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("loss", "less"), ("eval/loss", "less"), ("valLoss", "less"), ("top5_accuracy", "more"), ("error_rate", "less")]
    + [(name, None) for name in ("accuracy_drop", "inaccuracy", "loss_reduction", "accuracy_loss", "glossary")],
)
def test_the_direction_follows_from_whole_words(metric, direction):
    if direction:
        assert run_table.choose_direction(metric, "") == direction
    else:
        with raises(errors.UserError, metric, "--better"):
            run_table.choose_direction(metric, "")


@pytest.mark.parametrize(
    "text, options, value",
    [
        ("arm,Seed,seed,loss\na,0,0,1\n", {}, "Seed, seed"),
        ("arm,accuracy\na,0.91\na,0.93\nb,92.5\nb,93\n", {}, "fractions, up to 0.93"),
        ("seed,loss\n0,1\n", {}, "arm"),
        ("arm,seed\na,1\n", {"metric": "loss"}, "--metric=loss"),
        ("arm,x,y\na,1,2\n", {}, "x, y"),
        ("arm,loss\na,x\nb,1\n", {}, "'x'"),
        ("arm,seed,loss\na,0.5,1\n", {}, "line 2"),
        ("arm,seed,loss\na,-1,1\n", {}, "line 2"),
        ("arm,steps,loss\na,inf,1\n", {}, "line 2"),
        ("arm,loss\n,1\n", {}, "line 2"),
        ("arm,seed,loss\na,0,1\na,0,2\n", {}, "line 3"),
        ("arm,loss\na,1\na,2\n", {}, "the number of arms is 1"),
        (WIDE, {}, "add --wide"),
        (WIDE, {"wide": True}, "--metric=NAME"),
        (WIDE.replace("seed", "arm"), {"wide": True, "metric": "accuracy"}, "column seed"),
        (WIDE.replace("\n1,", "\n,"), {"wide": True, "metric": "accuracy"}, "line 3: seed is empty"),
        ("model,config,loss\na,b,1\n", {}, "model, config"),
        ("arm,accuracy\na,73%\nb,74\n", {}, "1 cells with a % sign and 1 without"),
        ("arm,loss,state\na,1,gone\n", {}, "state = 'gone'"),
        ("arm,step,loss\na,1,1\na,2,2\nb,1,1\n", {}, "arm a have no seed"),
        ("arm,seed,steps\na,0,1\na,0,2\nb,1,1\n", {"metric": "steps", "better": "less"}, "twice"),
        ("arm,loss\na,\nb,1\nc,2\n", {}, "arm a has no value"),
        ("arm,loss\n", {}, "the number of arms is 0"),
        ("arm,score\na,1\nb,2\n", {}, "--better"),
        ("arm,score\na,1\nb,2\n", {"better": "higher"}, "--better=higher"),
        ("arm,loss\na,1\nb,2\n", {"reference": "c"}, '"c"'),
        ("arm,loss\na,1\nb,2\n", {"reference": "a", "successive": True}, "--reference=a"),
        ("arm,loss\na,1\nb,2\n", {"looks": 0}, "--looks"),
        ("arm,loss\na,1\nb,2\n", {"margin": -1.0}, "--margin"),
        ("arm,loss\na,1\nb,2\n", {"correction": "none"}, '"none"'),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(tmp_path, text, options, value):
    (tmp_path / "results.csv").write_text(text)
    with raises(errors.UserError, value):
        verdict.run([tmp_path / "results.csv"], workdir=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_missing_table_and_an_existing_folder_are_refused(tmp_path):
    assert run_command()[0] == 2 and run_command(tmp_path / "no.csv")[0] == 2
    with raises(errors.UserError, str(tmp_path)):
        verdict.run([write(tmp_path, {"a": OLD, "b": NEW})], workdir=tmp_path)


def test_the_commands_of_the_page_run_on_its_table(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8").partition("## How do I judge numbers")[2]
    [table] = re.findall(r"^```\n(arm,.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[:1]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("results.csv").write_text(table)
    lines = re.findall(r"^python -m experiments.tools.verdict (results.csv .*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    first, second = (run_command(*line.split()) for line in lines)
    assert first.code == second.code == 0 and pathlib.Path("DIR/report.html").exists()
    assert "Welch" in first.out and "muon after sgd" in second.out


@pytest.mark.skipif(not TRACK3.is_dir(), reason="$TFM_DATA names no folder with track3")
def test_the_page_on_records_has_the_numbers_that_its_script_prints(tmp_path, capsys):
    script = runpy.run_path(str(ROOT / "docs" / "which_records.py"))
    script["main"](TRACK3, tmp_path)
    page = (ROOT / "docs" / "which_records.md").read_text(encoding="utf-8")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 21 and all(row in page for row in rows[1:])
    assert (tmp_path / "which_records.png").stat().st_size > 10_000
    with (tmp_path / "records.csv").open() as file:
        assert len({row["arm"] for row in csv.DictReader(file)}) == 19
    analysis = verdict.run([tmp_path / "records.csv"], successive=True, better="less")
    kinds = [condition.compared[0].difference.kind for condition in analysis.conditions]
    assert (len(kinds), kinds.count(statistics.BETTER), kinds.count(statistics.FEW)) == (18, 6, 2)


def test_the_script_on_records_recovers_simulated_runs():
    """A true SD, crossing and slope, from runs that are drawn with them."""
    script, draw = runpy.run_path(str(ROOT / "docs" / "which_records.py")), np.random.default_rng(0)
    several = [draw.normal(3.28, 0.001, 10).tolist() for _ in range(40)]
    sd, low, high = script["pool"](several)
    assert low < 0.001 < high and sd == pytest.approx(np.sqrt(np.mean([np.var(x, ddof=1) for x in several])))
    row = script["Row"](1, 3000, 1, 3.28 - 50 * 4e-5, 16)
    crossing_X = script["draw_crossings"]([row], {1: (4e-5, 100), 2: (2e-5, 100)}, 0.001, False)[0]
    assert np.median(crossing_X) == pytest.approx(2950, abs=0.3)
    assert crossing_X.std() == pytest.approx(0.00025 / 4e-5, rel=0.1)
    gain_X = script["simulate_gain"](10, 10, 0.001, 4e-5)
    assert gain_X.mean() == pytest.approx(0, abs=0.1)
    assert gain_X.std() == pytest.approx(np.sqrt(2 / 10 * 25**2 + 2 * 25 / 12), rel=0.02)
    assert script["simulate_gain"](8, 20, 0.001, 4e-5).mean() > 5  # more runs pass earlier
