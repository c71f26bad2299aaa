"""What was ever planned in a study's folder counts, and so does every look at a verdict."""

import pytest
import study_folder
from errors import raises

from experiments.engine import errors
from experiments.studies import plan, results, runs, statistics

ARMS = ("a", "b", "c", "base")
ENDS = {arm: [1.0 + 0.2 * i, 1.1 + 0.2 * i, 1.3 + 0.19 * i] for i, arm in enumerate(ARMS[::-1])}


def log(folder, *entries):
    """A log of these studies, and of a verdict over some seeds behind each."""
    for study, *verdicts in entries:
        plan.record(folder, study)
        for seeds in verdicts:
            plan.look(folder, study, set(seeds))
    return plan.read(folder)


def of(seeds, **options):
    return study_folder.study(seeds=range(seeds), **options)


def test_an_arm_that_was_removed_still_counts(tmp_path):
    whole, part = (study_folder.study(arms, seeds=(0, 1, 2)) for arms in (ARMS, ARMS[2:]))
    study_folder.losses(tmp_path, "all", {arm: ENDS[arm] for arm in ARMS})
    log(tmp_path, (whole,), (part,), (part,))
    [condition] = results.analyse(tmp_path, part).conditions
    assert condition.comparisons == 3 and len((tmp_path / plan.FILE).read_text().splitlines()) == 2
    [before] = [
        arm.difference for arm in statistics.analyse(whole, runs.load(tmp_path, whole))[0].arms if arm.name == "c"
    ]
    [now] = [arm.difference for arm in condition.compared]
    assert now.interval == before.interval and now.p_corrected == pytest.approx(3 * now.p)
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
    assert [one.comparisons for one in statistics.analyse(study, [])] == [3, 3]
    assert [one.comparisons for one in statistics.analyse(study._replace(correction="study"), [])] == [6, 6]


LOOKS = {
    "one": ([(of(3), range(3))], 1, 1),
    "the same command again": ([(of(3), range(3), range(3)), (of(3), range(3))], 1, 1),
    "stopped in between": ([(of(5), range(4), range(5))], 1, 1),
    "seeds were added, and nothing is finished yet": ([(of(3), range(3)), (of(5), range(3))], 1, 1),
    "seeds were added": ([(of(3), range(3)), (of(5), range(3), range(5))], 2, 2),
    "and taken away": ([(of(3), range(3)), (of(5), range(5)), (of(3), range(3))], 2, 2),
    "declared": ([(of(3, looks=2), range(3)), (of(5, looks=2), range(5))], 2, 1),
    "declared too late": ([(of(3), range(3)), (of(5, looks=2), range(5))], 2, 1.5),
    "declared afterwards": ([(of(3), range(3)), (of(3, looks=2), range(3))], 1, 1),
}


@pytest.mark.parametrize("case", LOOKS)
def test_what_is_another_look(tmp_path, case):
    entries, looks, share = LOOKS[case]
    past = log(tmp_path, *entries)
    assert (len(past.looks), past.share) == (looks, share)


def test_a_report_notes_its_verdict_and_says_when_the_level_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(results.figures, "draw", lambda *_: [])
    study_folder.losses(tmp_path, "all", {"a": [1.0, 1.2, 1.4, 1.7], "base": [1.0, 1.1, 1.2, 1.3]})

    def said(seeds):
        study = study_folder.study(("a", "base"), seeds=range(seeds))
        plan.record(tmp_path, study)
        results.write(tmp_path, study, session={})
        return len(plan.read(tmp_path).looks), "no longer holds" in (tmp_path / "report.md").read_text()

    assert [said(2), said(3), said(3), said(4)] == [(0, False), (1, False), (1, False), (2, True)]
    assert "10 %" in (tmp_path / "report.md").read_text()
    (condition,) = statistics.analyse(
        study_folder.study(("a", "base"), seeds=range(4), looks=2), runs.load(tmp_path, of(4))
    )
    assert condition.together == 2


def test_a_damaged_log_is_refused(tmp_path):
    log(tmp_path, (of(3),))
    with (tmp_path / plan.FILE).open("a") as file:
        file.write("{\n")
    with raises(errors.UserError, tmp_path / plan.FILE):
        plan.record(tmp_path, of(3))
