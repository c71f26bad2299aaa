"""The plan log of a study's folder: everything that was ever planned counts, and so does every look at a verdict."""

import pytest
import study_folder
from errors import raises

from experiments.engine import errors
from experiments.studies import plan, results, statistics

ARMS = ("a", "b", "c", "base")
ENDS = {arm: [1.0 + 0.2 * i, 1.1 + 0.2 * i, 1.3 + 0.19 * i] for i, arm in enumerate(ARMS[::-1])}


def log(folder, *entries):
    """Log these studies, each with its verdicts over some seeds, and return the content of the log."""
    for study, *verdicts in entries:
        plan.record(folder, study)
        for seeds in verdicts:
            plan.look(folder, study, set(seeds))
    return plan.read(folder)


def plan_of(seeds, **options):
    return study_folder.study(seeds=range(seeds), **options)


def test_an_arm_that_was_removed_still_counts(tmp_path):
    whole, part = (study_folder.study(arms, seeds=(0, 1, 2)) for arms in (ARMS, ARMS[2:]))
    study_folder.losses(tmp_path, "all", {arm: ENDS[arm] for arm in ARMS})
    log(tmp_path, (whole,), (part,), (part,))
    [condition] = results.analyse(tmp_path, part).conditions
    assert condition.comparisons == 3 and len((tmp_path / plan.FILE).read_text().splitlines()) == 2
    [expected] = [arm.difference for arm in study_folder.analyse(tmp_path, whole)[0].arms if arm.name == "c"]
    [difference] = [arm.difference for arm in condition.compared]
    assert difference.interval == expected.interval and difference.p_corrected == pytest.approx(3 * difference.p)
    text = results.format_text(tmp_path, part).replace("\n", " ")
    assert '"a" against "base" in all, eval/loss; "b" against "base" in all, eval/loss' in text


@pytest.mark.parametrize(
    ("other", "m"),
    [
        ({}, 3),
        ({"arms": ("d", *ARMS)}, 4),
        ({"conditions": ("all", "more")}, 6),
        ({"conditions": ("other",)}, 6),
        ({"metric": "eval/accuracy"}, 6),
        ({"arms": ("base", "b", "c", "a")}, 5),  # another reference: a and base are compared in both
    ],
)
def test_m_counts_every_comparison_once(tmp_path, other, m):
    past = log(tmp_path, (study_folder.study(ARMS),))
    assert statistics.analyse(study_folder.study(**{"arms": ARMS} | other), [], past)[0].comparisons == m


def test_corrected_within_a_condition_on_request():
    study = study_folder.study(ARMS, conditions=("x", "y"), correction="condition")
    for correction, m in (("condition", 3), ("study", 6)):
        conditions = statistics.analyse(study._replace(correction=correction), [])
        assert [condition.comparisons for condition in conditions] == [m, m]


LOOKS = {
    "one": ([(plan_of(3), range(3))], 1, 1),
    "the same command again": ([(plan_of(3), range(3), range(3)), (plan_of(3), range(3))], 1, 1),
    "stopped in between": ([(plan_of(5), range(4), range(5))], 1, 1),
    "seeds were added, and nothing is finished yet": ([(plan_of(3), range(3)), (plan_of(5), range(3))], 1, 1),
    "seeds were added": ([(plan_of(3), range(3)), (plan_of(5), range(3), range(5))], 2, 2),
    "and taken away": ([(plan_of(3), range(3)), (plan_of(5), range(5)), (plan_of(3), range(3))], 2, 2),
    "declared": ([(plan_of(3, looks=2), range(3)), (plan_of(5, looks=2), range(5))], 2, 1),
    "declared too late": ([(plan_of(3), range(3)), (plan_of(5, looks=2), range(5))], 2, 1.5),
    "declared afterwards": ([(plan_of(3), range(3)), (plan_of(3, looks=2), range(3))], 1, 1),
}


@pytest.mark.parametrize("case", LOOKS)
def test_looks_are_counted_with_their_share_of_the_level(tmp_path, case):
    entries, looks, share = LOOKS[case]
    past = log(tmp_path, *entries)
    assert (len(past.looks), past.share) == (looks, share)


def test_a_report_logs_its_verdict_and_warns_if_the_level_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(results.figures, "draw", lambda *_: [])
    study_folder.losses(tmp_path, "all", {"a": [1.0, 1.2, 1.4, 1.7], "base": [1.0, 1.1, 1.2, 1.3]})

    for seeds, looks, lost in ((2, 0, False), (3, 1, False), (3, 1, False), (4, 2, True)):
        study = study_folder.study(("a", "base"), seeds=range(seeds))
        plan.record(tmp_path, study)
        results.write(tmp_path, study, session={})
        assert len(plan.read(tmp_path).looks) == looks
        assert ("no longer holds" in (tmp_path / "report.md").read_text()) == lost
    assert "10 %" in (tmp_path / "report.md").read_text()
    assert study_folder.analyse(tmp_path, study._replace(looks=2))[0].together == 2


def test_a_damaged_log_is_refused(tmp_path):
    log(tmp_path, (plan_of(3),))
    with (tmp_path / plan.FILE).open("a") as file:
        file.write("{\n")
    with raises(errors.UserError, tmp_path / plan.FILE):
        plan.record(tmp_path, plan_of(3))
