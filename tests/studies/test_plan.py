"""The plan log in a study's folder: every planned comparison and every interim analysis counts."""

import pytest
import study_folder
from errors import raises

from experiments.config import errors
from experiments.studies import plan, results, statistics

ARMS = ("a", "b", "c", "base")
LOSSES = {arm: [1.0 + 0.2 * i, 1.1 + 0.2 * i, 1.3 + 0.19 * i] for i, arm in enumerate(ARMS[::-1])}


def log_plans(folder, *entries):
    """Log the plans of these studies and interim analyses over these seeds. Return the content of the log."""
    for study, *verdicts in entries:
        plan.record(folder, study)
        for seeds in verdicts:
            plan.look(folder, study, set(seeds))
    return plan.read(folder)


def make_plan(seeds, **options):
    return study_folder.make_study(seeds=range(seeds), **options)


def test_an_arm_that_was_removed_still_counts(tmp_path):
    full_study, small_study = (study_folder.make_study(arms, seeds=(0, 1, 2)) for arms in (ARMS, ARMS[2:]))
    study_folder.write_losses(tmp_path, "all", {arm: LOSSES[arm] for arm in ARMS})
    log_plans(tmp_path, (full_study,), (small_study,), (small_study,))
    [condition] = results.analyse(tmp_path, small_study).conditions
    assert condition.comparisons == 3 and len((tmp_path / plan.FILE).read_text().splitlines()) == 2
    [expected] = [arm.difference for arm in study_folder.analyse(tmp_path, full_study)[0].arms if arm.name == "c"]
    [difference] = [arm.difference for arm in condition.compared]
    assert difference.interval == expected.interval and difference.p_corrected == pytest.approx(3 * difference.p)
    text = results.format_text(small_study, results.analyse(tmp_path, small_study)).replace("\n", " ")
    assert '"a" against "base" in all, eval/loss; "b" against "base" in all, eval/loss' in text


@pytest.mark.parametrize(
    ("changes", "m"),
    [
        ({}, 3),
        ({"arms": ("d", *ARMS)}, 4),
        ({"conditions": ("all", "more")}, 6),
        ({"conditions": ("other",)}, 6),
        ({"metric": "eval/accuracy"}, 6),
        ({"arms": ("base", "b", "c", "a")}, 5),  # another reference: a and base are compared in both
    ],
)
def test_the_number_of_comparisons_counts_each_once(tmp_path, changes, m):
    past = log_plans(tmp_path, (study_folder.make_study(ARMS),))
    assert statistics.analyse(study_folder.make_study(**{"arms": ARMS} | changes), [], past)[0].comparisons == m


def test_comparisons_can_be_corrected_within_a_condition():
    study = study_folder.make_study(ARMS, conditions=("x", "y"), correction="condition")
    for correction, m in (("condition", 3), ("study", 6)):
        conditions = statistics.analyse(study._replace(correction=correction), [])
        assert [condition.comparisons for condition in conditions] == [m, m]


LOOKS = {  # {case: (analyses, share of the level, [(planned seeds, declared analyses, seeds of each verdict)])}
    "one analysis": (1, 1, [(3, 1, 3)]),
    "the same command again": (1, 1, [(3, 1, 3, 3), (3, 1, 3)]),
    "stopped in between": (1, 1, [(5, 1, 4, 5)]),
    "seeds were added, and nothing is finished yet": (1, 1, [(3, 1, 3), (5, 1, 3)]),
    "seeds were added": (2, 2, [(3, 1, 3), (5, 1, 3, 5)]),
    "seeds were added and removed": (2, 2, [(3, 1, 3), (5, 1, 5), (3, 1, 3)]),
    "two analyses were declared": (2, 1, [(3, 2, 3), (5, 2, 5)]),
    "two analyses were declared after the first": (2, 1.5, [(3, 1, 3), (5, 2, 5)]),
    "two analyses were declared for the same seeds": (1, 1, [(3, 1, 3), (3, 2, 3)]),
}


@pytest.mark.parametrize("case", LOOKS)
def test_interim_analyses_are_counted_with_their_share_of_the_level(tmp_path, case):
    looks, share, entries = LOOKS[case]
    for seeds, declared, *verdicts in entries:
        past = log_plans(tmp_path, (make_plan(seeds, looks=declared), *map(range, verdicts)))
    assert (len(past.looks), past.share) == (looks, share)


def test_the_last_verdict_of_each_part_is_no_analysis_of_the_whole_study(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    first, second = (study_folder.make_study(seeds=seeds) for seeds in ((0, 1, 2), (3, 4, 5)))
    log_plans(a, (first, first.seeds))
    log_plans(b, (second._replace(seeds=[3, 4]), [3, 4]), (second, second.seeds))
    plan.look(a, first, {*first.seeds, *second.seeds})
    assert plan.read(a, [b]).looks.keys() == {frozenset([3, 4]), frozenset(range(6))}


def test_a_report_logs_its_verdict_and_warns_if_the_level_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(results.study_figures, "draw", lambda *_: [])
    study_folder.write_losses(tmp_path, "all", {"a": [1.0, 1.2, 1.4, 1.7], "base": [1.0, 1.1, 1.2, 1.3]})

    for seeds, looks, has_warning in ((2, 0, False), (3, 1, False), (3, 1, False), (4, 2, True)):
        study = study_folder.make_study(("a", "base"), seeds=range(seeds))
        plan.record(tmp_path, study)
        results.write(tmp_path, study, session={})
        assert len(plan.read(tmp_path).looks) == looks
        assert ("no longer holds" in (tmp_path / "report.md").read_text()) == has_warning
    assert "10 %" in (tmp_path / "report.md").read_text()
    assert study_folder.analyse(tmp_path, study._replace(looks=2))[0].together == 2


def test_a_damaged_log_is_refused(tmp_path):
    log_plans(tmp_path, (make_plan(3),))
    with (tmp_path / plan.FILE).open("a") as file:
        file.write("{\n")
    with raises(errors.UserError, tmp_path / plan.FILE):
        plan.record(tmp_path, make_plan(3))
