"""Measures over all conditions of a study: values by hand, and None if they are unknown."""

import dataclasses
import json

import numpy as np
import pytest
import study_folder
from scipy import stats

from experiments.studies import (
    figures as study_figures,
    inference,
    overall,
    results,
    runs as study_runs,
    statistics,
    styles,
    tables,
)

BASE = [2.0, 2.1, 2.2, 2.3]
# {condition: difference of the arm from the reference in each seed}.
SHIFT = {
    "loss": [0.4, 0.1, 0.1, -0.3],
    "accuracy": [-1.0, 0.4, 0.8, 0.2],
}


def analyse(folder, arms=("tied", "base"), *, start=6.0, metrics=None):
    """Write runs of the conditions "loss" and "accuracy". Return (study, statistics, runs).

    metrics: {(condition, arm): final value of each seed}, instead of BASE + SHIFT.
    """
    study = study_folder.make_study(arms, conditions=[*SHIFT], seeds=range(4))
    study = study._replace(metric={"loss": "eval/loss", "accuracy": "eval/accuracy"})
    for condition, shift in SHIFT.items():
        metric = study.metric[condition]
        for arm in study.arms:
            shifts = np.zeros(4) if arm.name == study.reference else shift
            for seed, value in enumerate((metrics or {}).get((condition, arm.name), np.array(BASE) + shifts)):
                rows = [] if start is None else [{"step": 0, metric: start if condition == "loss" else 0.0}]
                study_folder.write_run(folder, condition, arm.name, seed, metrics={metric: value}, rows=rows)
    finished = study_runs.load(folder, study)
    return study, statistics.analyse(study, finished), finished


def measure(folder, **options):
    return overall.measure(*analyse(folder, **options)[1:])


def test_the_measures_equal_those_of_the_paper_by_hand(tmp_path):
    measures = measure(tmp_path)
    scale = {"loss": 6.0 - 2.15, "accuracy": 2.15}
    assert measures.scale == pytest.approx(scale) and (measures.seeds, measures.left_out) == (4, [])
    [tied] = measures.arms
    gains = [-x / scale["loss"] for x in SHIFT["loss"]] + [x / scale["accuracy"] for x in SHIFT["accuracy"]]
    assert tied.mean == pytest.approx(np.mean(sorted(gains)[2:6])) and tied.n == 8
    wins = [stats.mannwhitneyu(np.add(BASE, x), BASE, method="asymptotic").statistic / 16 for x in SHIFT.values()]
    assert tied.improvement == pytest.approx((1 - wins[0] + wins[1]) / 2)
    for i, gain in enumerate(np.unique(np.round(gains, 12))):  # 0.1 occurs twice
        x, share, low, high = tied.profile[i]
        assert (x, share) == pytest.approx((gain, np.mean(np.array(gains) >= gain - 1e-9)))
        assert 0 <= low <= share <= high <= 1
    assert tied.interval[0] < tied.mean < tied.interval[1]
    assert 0 <= tied.improvement_interval[0] < tied.improvement < tied.improvement_interval[1] <= 1


def test_the_bootstrap_draws_seeds_within_a_condition_and_is_reproducible(tmp_path):
    """If the seeds of each condition agree, the interval is a point, even if conditions differ."""
    metrics = {("loss", "tied"): [x + 1 for x in BASE], ("accuracy", "tied"): [x + 1 for x in BASE]}
    [tied] = measure(tmp_path / "constant", metrics=metrics).arms
    assert tied.interval == pytest.approx([tied.mean] * 2)
    draws = inference.resamples([3, 5], 7)
    assert [draw.shape for draw in draws] == [(7, 3), (7, 5)] and [draw.max() for draw in draws] == [2, 4]
    assert all(np.array_equal(*pair) for pair in zip(draws, inference.resamples([3, 5], 7), strict=True))
    assert measure(tmp_path / "a").arms == measure(tmp_path / "b").arms
    for count, upper in ((10, 1951), (60, np.inf)):  # 2,000 numbers
        low, high = inference.percentiles(np.array([*range(1, 2001 - count), *[np.inf] * count])).tolist()
        assert 50 <= low <= 51 and upper - 1 <= high <= upper


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, ["tied"]),
        ({"metrics": {("loss", "tied"): [1.0, 2.0]}}, None),  # too few pairs
        ({"metrics": {("accuracy", "tied"): [1.0, 2.0, 3.0, None]}}, None),  # one diverged
        ({"metrics": {("accuracy", "base"): [1.0, 2.0, 3.0, None]}}, None),  # the reference diverged
    ],
)
def test_an_arm_without_pairs_or_with_a_diverged_run_has_no_measures(tmp_path, change, names):
    measures = measure(tmp_path, **change)
    assert (measures and [arm.name for arm in measures.arms]) == names
    measures = measure(tmp_path / "more", arms=("tied", "other", "base"), metrics={("loss", "other"): BASE[:2]})
    assert [arm.name for arm in measures.arms] == ["tied"] and measures.left_out == ["other"]
    study = study_folder.make_study(("tied", "base"), conditions=("loss",), seeds=range(4))
    finished = study_runs.load(tmp_path, study)
    assert overall.measure(statistics.analyse(study, finished), finished) is None  # one condition is not enough
    assert '"other"' in tables.tabulate_overall(measures).notes[-1]


@pytest.mark.parametrize("start", [None, 2.0])
def test_without_a_gain_of_the_reference_there_is_no_mean_and_no_profile(tmp_path, start):
    """The start of the reference is unknown, or not worse than its end."""
    measures = measure(tmp_path, start=start)
    [tied] = measures.arms
    assert (tied.mean, tied.interval, tied.profile) == (None, None, []) and tied.improvement > 0
    table = tables.tabulate_overall(measures)
    assert table.head[2:] == ["P(better)", "95 % interval"] and len(table.rows[0]) == 4
    assert table.notes[1].startswith('No interquartile mean: in "loss"')
    assert study_figures.draw_numbers(measures, {}) is None


def test_the_profile_is_in_the_figure_and_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(study_figures, "KINDS", {})  # other tests draw the figures of one condition
    study, conditions, finished = analyse(tmp_path)
    [block] = results.analyse_across(conditions, finished)
    style = styles.choose_styles(study)
    drawing, caption = study_figures.draw_numbers(block.numbers, style)
    line, [arm] = drawing.axes[0].lines[0], block.numbers.arms
    assert line.get_drawstyle() == "steps-pre" and "2 conditions" in caption
    assert line.get_ydata()[[0, -1]].tolist() == [1, 0]
    assert np.array(line.get_data())[:, 1:-1] == pytest.approx(np.array(arm.profile)[:, :2].T * [[100], [1]])
    outlier = dataclasses.replace(arm, profile=[[-9e3, 0.5, 0.2, 0.8]])  # on a linear axis, it would hide the others
    wide_drawing, wide_caption = study_figures.draw_numbers(
        dataclasses.replace(block.numbers, arms=[arm, outlier]), style
    )
    assert (drawing.axes[0].get_xscale(), wide_drawing.axes[0].get_xscale()) == ("linear", "symlog")
    assert wide_caption.endswith("logarithmic.") and not caption.endswith("logarithmic.")
    assert "4 seeds" in block.table.notes[2]
    files = results.write(tmp_path, study, session={})
    text = [file.read_text() for file in files[:4]]
    numbers = json.loads(text[0])
    assert numbers["overall"]["arms"][0]["improvement"] == pytest.approx(arm.improvement) and numbers["scaling"] == []
    assert "## Over all conditions" in text[1] and "![profile](figures/profile.png)" in text[1]
    assert all(block.table.rows[0][4] in page and "P(better)" in page for page in text[1:])
    assert (tmp_path / "figures" / "profile.svg").is_file()
