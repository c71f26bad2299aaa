"""The numbers of a study's report, against closed forms and tables; and which runs they are of."""

import math

import pytest
import study_folder

from experiments.engine import errors
from experiments.studies import runs, statistics, thresholds

ZERO = dict.fromkeys(range(3), 0.0)


def quantile(P: float) -> float:
    """Of Student's t with two degrees of freedom, where it has a closed form."""
    return (2 * P - 1) / math.sqrt(2 * P * (1 - P))


def analysed(folder, study):
    return statistics.analyse(study, runs.load(folder, study))


def test_interval_and_p_of_three_pairs_are_the_closed_forms():
    found = statistics.compare({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0}, m=2)  # differences 1, 2, 3
    assert found.differences == {0: 1.0, 1: 2.0, 2: 3.0}
    assert found.spread == (2.0, 1.0, 3)
    for interval, P in ((found.interval_alone, 0.975), (found.interval, 0.9875)):
        half = quantile(P) / math.sqrt(3)
        assert interval == pytest.approx((2 - half, 2 + half), rel=1e-9)
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-9)
    assert found.p_corrected == pytest.approx(2 * found.p)


def test_interval_of_five_pairs_is_that_of_a_table():
    arm = dict(enumerate([1.0, 2.0, 3.0, 4.0, 5.0]))
    found = statistics.compare(arm, dict.fromkeys(range(5), 0.0), m=5)
    error = math.sqrt(2.5 / 5)
    assert found.interval_alone == pytest.approx((3 - 2.776445 * error, 3 + 2.776445 * error), abs=1e-5)
    assert found.interval == pytest.approx((3 - 4.604095 * error, 3 + 4.604095 * error), abs=1e-5)  # 99 % each


def test_a_corrected_p_is_at_most_one():
    found = statistics.compare({0: 1.0, 1: -1.1, 2: 0.2}, ZERO, m=12)
    assert found.p > 1 / 12 and found.p_corrected == 1.0


def test_pairs_are_the_seeds_that_both_have():
    found = statistics.compare({7: 1.0, 3: 2.0, 5: 9.0}, {5: 8.5, 7: 0.0, 2: 4.0}, m=1)
    assert found.differences == {7: 1.0, 5: 0.5}
    assert found.spread.mean == 0.75 and found.spread.std == pytest.approx(math.sqrt(0.125))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_pairs_have_no_interval(n):
    found = statistics.compare({seed: seed + 1.0 for seed in range(n)}, ZERO, m=1)
    assert found.interval is None and found.interval_alone is None and found.p is None and found.p_corrected is None
    assert (found.spread.n if n else found.spread) == (n or None)


def test_one_run_has_no_standard_deviation():
    assert statistics.spread([2.5]) == (2.5, None, 1)
    assert statistics.spread([]) is None


@pytest.mark.parametrize("shift", [0.0, 1e-8, 0.1, -3.0])
def test_differences_that_do_not_vary_have_no_interval(shift):
    reference = {0: 1.1, 1: 2.2, 2: 3.3}  # whose sums with 0.1 are rounded
    found = statistics.compare({seed: x + shift for seed, x in reference.items()}, reference, m=1)
    assert not found.varies and found.interval is None and found.p is None
    assert found.alike == (abs(shift) < 1e-7)


def test_small_differences_that_vary_are_told():
    found = statistics.compare({0: 1.00001, 1: 1.00002, 2: 1.00003}, dict.fromkeys(range(3), 1.0), m=1)
    assert found.varies and not found.alike and found.interval.low < 2e-5 < found.interval.high


def test_first_step_at_the_threshold():
    curve = {0: 5.0, 200: 2.0, 100: 3.0, 300: 2.5}
    assert thresholds.first_reached(curve, 2.0, more=False) == 200
    assert thresholds.first_reached(curve, 3.5, more=False) == 100
    assert thresholds.first_reached(curve, 1.9, more=False) is None
    assert thresholds.first_reached(curve, 2.5, more=True) == 0
    assert thresholds.first_reached({}, 2.0, more=True) is None


def test_a_seed_that_never_got_there_is_later_than_all():
    assert thresholds.median_step({0: 100, 1: 300, 2: None}) == 300
    assert thresholds.median_step({0: 100, 1: 200}) == 150
    assert thresholds.median_step({0: 100, 1: None}) is None
    assert thresholds.median_step({}) is None


def test_a_seed_that_diverged_never_got_there(tmp_path):
    study = study_folder.study(threshold=2.0, seeds=(0, 1, 2))
    curve = [(0, 5.0), (100, 1.9)]
    for seed, step in enumerate((None, 150, 150)):
        study_folder.run(tmp_path, "all", "tied", seed, ends={"eval/loss": 1.8}, evaluations=curve, diverged_at=step)
    tied = analysed(tmp_path, study)[0].arms[0]
    assert tied.reached == {0: 100, 1: None, 2: None} and thresholds.median_step(tied.reached) is None


def test_resolution_is_the_largest_gap_between_evaluations():
    assert thresholds.every([{0: 1.0, 50: 1.0, 150: 1.0}, {0: 1.0, 20: 1.0}]) == 100
    assert thresholds.every([{0: 1.0}]) is None


def test_direction_of_a_metric():
    assert statistics.more_is_better("eval/accuracy") and not statistics.more_is_better("eval/loss")
    with pytest.raises(errors.UserError, match=r'"eval/speed" must be a metric that ends in loss, accuracy'):
        statistics.more_is_better("eval/speed")


def test_numbers_of_a_folder(tmp_path):
    study = study_folder.study(threshold=2.0, seeds=(0, 1, 2))
    for seed in range(3):
        ends = {"eval/accuracy": 0.5 + seed / 10, "baseline/accuracy": 0.1}
        curve = [(0, 5.0), (100, 1.9 if seed else 2.1), (200, 1.5)]
        study_folder.run(tmp_path, "all", "asymmetric", seed, ends=ends | {"eval/loss": 1.5}, evaluations=curve)
        ends["eval/loss"] = 1.6 + seed / 100
        study_folder.run(tmp_path, "all", "tied", seed, ends=ends, evaluations=[(0, 5.0), (200, 2.2)], params=700)
    [found] = analysed(tmp_path, study)
    tied, asymmetric = found.arms
    assert (tied.params, asymmetric.params, tied.flops_per_token) == (700, 1000, 2500.0)
    assert tied.spread == pytest.approx((1.61, 0.01, 3))
    assert tied.others["eval/accuracy"] == pytest.approx((0.6, 0.1, 3))
    assert tied.comparison.spread.mean == pytest.approx(0.11) and asymmetric.comparison is None
    assert tied.reached == dict.fromkeys(range(3), None) and asymmetric.reached == {0: 200, 1: 100, 2: 100}
    assert (found.every, found.comparisons, found.baseline) == (200, 1, {"accuracy": 0.1})


def test_what_diverged_is_in_no_number_and_named(tmp_path):
    study = study_folder.study(seeds=(0, 1, 2, 3))
    study_folder.losses(tmp_path, "all", {"asymmetric": [1.0, 1.1, 1.2, 1.3], "tied": [2.0]})
    study_folder.run(tmp_path, "all", "tied", 1, ends={"eval/loss": 9.0, "eval/accuracy": 0.9}, diverged_at=120)
    study_folder.run(tmp_path, "all", "tied", 2, ends={"eval/loss": None, "eval/accuracy": 0.9})
    tied = analysed(tmp_path, study)[0].arms[0]
    assert tied.values == {0: 2.0} and tied.spread.mean == 2.0 and tied.others == {}
    assert tied.diverged == {1: 120, 2: None} and tied.missing == [3]
    assert tied.comparison.differences == {0: 1.0}


def test_a_metric_that_was_not_measured_is_refused(tmp_path):
    study = study_folder.study(metric="eval/accuracy")
    study_folder.losses(tmp_path, "all", {"tied": [1.0]})
    with pytest.raises(errors.UserError, match='of "tied" have not measured "eval/accuracy", but eval/loss'):
        analysed(tmp_path, study)


def test_each_condition_has_its_own_metric_and_runs(tmp_path):
    study = study_folder.study(conditions=("a", "b"))._replace(metric={"a": "eval/loss", "b": "eval/accuracy"})
    study_folder.losses(tmp_path, "a", {"tied": [3.0], "asymmetric": [1.0]})
    study_folder.run(tmp_path, "b", "tied", 0, ends={"eval/loss": 7.0, "eval/accuracy": 0.25})
    a, b = analysed(tmp_path, study)
    assert a.arms[0].spread.mean == 3.0 and not a.more_is_better
    assert b.arms[0].spread.mean == 0.25 and b.more_is_better and b.arms[0].others["eval/loss"].mean == 7.0


def test_only_finished_runs_are_read(tmp_path):
    study = study_folder.study(seeds=(0, 1))
    study_folder.losses(tmp_path, "all", {"tied": [1.0, 2.0]})
    (tmp_path / "all/tied/seed_1/summary.json").unlink()
    assert [(run.arm, run.seed) for run in runs.load(tmp_path, study)] == [("tied", 0)]
    (tmp_path / "all/tied/seed_0/summary.json").write_text('{"eval/loss"')
    with pytest.raises(errors.UserError, match="summary.json cannot be read as JSON"):
        runs.load(tmp_path, study)


def test_curves_are_stacked_where_all_have_numbers():
    step_I, value_RI = runs.stack([{0: 1.0, 20: 3.0, 10: 2.0}, {20: 5.0, 0: 4.0, 30: 6.0}])
    assert step_I.tolist() == [0, 20] and value_RI.tolist() == [[1.0, 3.0], [4.0, 5.0]]
    step_I, value_RI = runs.stack([])
    assert len(step_I) == 0 and value_RI.shape == (0, 0)
