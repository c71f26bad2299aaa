"""The numbers of a study's report, against closed forms and tables, and the runs that they are computed from."""

import math

import numpy as np
import pytest
import study_folder
from errors import raises
from scipy import stats

from experiments.config import errors
from experiments.studies import inference, runs as study_runs, sentences, statistics
from experiments.studies.statistics import BETTER, CEILING, EQUAL, FEW, FLAT, OPEN, SAME, STUCK, UNSTABLE, WORSE

ZERO = dict.fromkeys(range(9), 0.0)
ROUNDED = {0: 1.1, 1: 2.2, 2: 3.3}  # the sums of these with 0.1 are rounded


def quantile(P: float) -> float:
    """Return a quantile of Student's t with two degrees of freedom, which has a closed form."""
    return (2 * P - 1) / math.sqrt(2 * P * (1 - P))


def compare(arm, reference=ZERO, *, better="less", **options):
    return statistics.compare(dict(enumerate(arm)), reference, **{"m": 1, "better": better} | options)


def test_interval_and_p_of_three_pairs_are_the_closed_forms():
    for m, P in ((1, 0.975), (2, 0.9875)):
        three, half = compare((11.0, 22.0, 33.0), {0: 10.0, 1: 20.0, 2: 30.0}, m=m), quantile(P) / math.sqrt(3)
        assert three.interval == pytest.approx((2 - half, 2 + half), rel=1e-9)
    assert three.by_seed == {0: 1.0, 1: 2.0, 2: 3.0} and (three.mean, three.std, three.n) == (2.0, 1.0, 3)
    t = 2 * math.sqrt(3)
    assert three.p == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-9)
    for m, t in ((1, 2.776445), (5, 4.604095)):  # from a table of t; m = 5 needs 99 % each
        five = compare((1.0, 2.0, 3.0, 4.0, 5.0), m=m)
        assert five.interval == pytest.approx((3 - t * math.sqrt(0.5), 3 + t * math.sqrt(0.5)), abs=1e-5)
    assert three.correlation == pytest.approx(1) and five.correlation is None  # its reference is constant
    assert five.detectable == pytest.approx(math.sqrt(2.5) * inference.detectable(5, 5))


def test_pairs_are_the_seeds_that_both_have():
    two = statistics.compare({7: 1.0, 3: 2.0, 5: 9.0}, {5: 8.5, 7: 0.0, 2: 4.0}, m=1, better="less")
    assert two.by_seed == {7: 1.0, 5: 0.5} and two.mean == 0.75 and two.std == pytest.approx(math.sqrt(0.125))


@pytest.mark.parametrize(
    "arm, reference, kinds",
    [
        ((1.0, 1.1, 1.2), ZERO, (WORSE, BETTER)),
        ((-1.0, -1.1, -1.2), ZERO, (BETTER, WORSE)),
        ((1.0, -1.1, 0.2), ZERO, (OPEN, OPEN)),
        ((1.00001, 1.00002, 1.00003), dict.fromkeys(range(3), 1.0), (OPEN, OPEN)),  # small differences that vary
        (ROUNDED.values(), ROUNDED, (SAME, SAME)),
        ([x + 1e-8 for x in ROUNDED.values()], ROUNDED, (SAME, SAME)),
        ([x + 0.5 for x in ROUNDED.values()], ROUNDED, (FLAT, FLAT)),
        ([x + 0.1 for x in ROUNDED.values()], ROUNDED, (FLAT, FLAT)),
        ([x - 3.0 for x in ROUNDED.values()], ROUNDED, (FLAT, FLAT)),
        ([5.1, 5.2, 5.3, 5.1, 5.0, 5.4], dict(enumerate([5.0, 5.1, 5.2, 5.0, 4.9, 5.3])), (WORSE, BETTER)),  # sign test
        ((1.0, 1.0, 1.0), dict.fromkeys(range(3), 1.0 + 1e-8), (SAME, CEILING)),  # (as a loss, as an accuracy)
        ((0.0, 0.0, 0.0), ZERO, (CEILING, SAME)),
        ((1.0, 2.0), ZERO, (FEW, FEW)),
        ((1.0,), ZERO, (FEW, FEW)),
        ((), ZERO, (FEW, FEW)),
    ],
)
def test_the_kind_of_a_difference_follows_the_interval_and_the_direction_of_the_metric(arm, reference, kinds):
    loss, accuracy = (compare(arm, reference, better=better) for better in ("less", "more"))
    assert (loss.kind, accuracy.kind) == kinds and loss.n == len(arm)
    constant = loss.n and loss.std is not None and loss.std < 1e-6
    is_judged = loss.kind in (WORSE, BETTER, OPEN, FLAT)
    numbers = (loss.interval, loss.detectable, loss.p, loss.p_corrected)
    assert [x is not None for x in numbers] == [is_judged and not constant] * 2 + [is_judged] * 2
    assert (loss.mean is None, loss.std is None) == (len(arm) == 0, len(arm) < 2)


@pytest.mark.parametrize("n, m, kind", [(5, 1, FLAT), (6, 1, WORSE), (6, 2, FLAT), (7, 2, WORSE), (10, 25, WORSE)])
def test_pairs_with_one_difference_are_judged_by_the_sign_test(n, m, kind):
    """All n signs agree with probability 2 / 2^n; the values are rounded to two decimals."""
    reference = dict(enumerate([3.31, 3.29, 3.3, 3.33, 3.28, 3.3, 3.32, 3.31, 3.3, 3.27][:n]))
    worse = compare([x + 0.02 for x in reference.values()], reference, m=m)
    assert (worse.kind, worse.interval, worse.detectable) == (kind, None, None)
    assert worse.p == 2**-n * 2 and worse.p_corrected == m * worse.p
    better = compare([x - 0.02 for x in reference.values()], reference, m=m)
    assert better.kind == (BETTER if kind == WORSE else FLAT)


def test_the_corrected_p_is_below_5_percent_where_zero_is_outside_the_interval():
    random, kinds = np.random.default_rng(0), set()
    for _ in range(300):
        arm, base = (dict(enumerate(side)) for side in random.normal([[0.7], [0]], 0.3, (2, 5)).tolist())
        sides = random.normal(0.7, 0.2, 4), random.normal(0, 0.4, 6)
        for result in (
            statistics.compare(arm, base, m=6, better="less"),
            statistics.compare_unpaired(*sides, m=6, better="less"),
        ):
            low, high = result.interval
            assert result.p_corrected == min(1, 6 * result.p)
            assert (result.p_corrected < 0.05) == (result.kind != OPEN) == (low > 0 or high < 0)
            kinds.add((result.kind, bool(result.unpaired)))
    assert kinds == {(OPEN, False), (OPEN, True), (WORSE, False), (WORSE, True)}


def test_an_interval_that_ends_at_zero_shows_no_difference():
    arm = (1.0, 2.0, 3.0)
    half = stats.ttest_1samp(arm, 0.0).confidence_interval().high - 2.0
    shifted_arm = [x - 2.0 + half for x in arm]
    assert compare([x + 1e-9 for x in shifted_arm]).kind == WORSE
    assert compare([x - 1e-9 for x in shifted_arm]).kind == OPEN
    assert compare([x + 1e-9 for x in shifted_arm], m=2).kind == OPEN  # without the correction, it would be WORSE


def test_equality_needs_the_whole_interval_within_the_margin():
    """The interval is 0 +- 4.302653 0.01 / sqrt(3) = 0 +- 0.024842."""
    arm = (-0.01, 0.0, 0.01)
    assert [compare(arm, margin=margin).kind for margin in (0.0, 0.0248, 0.0249)] == [OPEN, OPEN, EQUAL]
    assert compare(arm, margin=0.0249, m=2).kind == OPEN
    assert [compare([x + 0.2 for x in arm], margin=margin).kind for margin in (0.2, 0.3)] == [WORSE, EQUAL]
    assert compare([0.1] * 6, margin=0.2).kind == WORSE  # constant differences have no interval


SPREAD = [0.91, 0.94, 0.92, 0.93, 0.95, 0.92]
IDENTICAL_RUNS = {  # (arm, reference, kind as losses, kind as accuracies)
    "arm": ([0.5] * 6, SPREAD, "identical runs of the arm", "identical runs of the arm"),
    "reference": (SPREAD, [0.5] * 6, "identical runs of the reference", "identical runs of the reference"),
    "both": ([0.25] * 6, [0.5] * 6, "identical runs of both", "identical runs of both"),
    "rounding": ([0.5, 0.5 + 1e-8, *[0.5] * 4], SPREAD, "identical runs of the arm", "identical runs of the arm"),
    "best accuracy": ([1.0] * 6, SPREAD, "identical runs of the arm", BETTER),
    "least value": (SPREAD, [0.0] * 6, WORSE, BETTER),
    "percent": ([100 * x for x in SPREAD], [100.0] * 6, "identical runs of the reference", WORSE),
    "two clusters": ([0.5] * 6, [0.1, 0.11, 0.1, 0.9, 0.91, 0.9], *["identical runs of the arm"] * 2),
    "diverged": ([0.5] * 6, [*SPREAD[:5], None], UNSTABLE, UNSTABLE),
    "alike": ([0.5] * 6, [0.5] * 6, SAME, SAME),
}


@pytest.mark.parametrize("case", IDENTICAL_RUNS)
def test_runs_that_are_identical_although_their_seeds_differ_are_never_better_or_worse(tmp_path, case):
    arm, base, *kinds = IDENTICAL_RUNS[case]
    for metric, kind in zip(("eval/loss", "eval/accuracy"), kinds, strict=True):
        study, folder = study_folder.make_study(("arm", "base"), seeds=range(6), metric=metric), tmp_path / metric
        for name, values in (("arm", arm), ("base", base)):
            for seed, x in enumerate(values):
                study_folder.write_run(folder, "all", name, seed, metrics={"eval/loss": x, "eval/accuracy": x})
        difference = study_folder.analyse(folder, study)[0].compared[0].difference
        assert difference.kind == kind
        if kind in statistics.IDENTICAL.values():
            numbers = ("interval", "p", "p_corrected", "detectable", "rates")
            assert {getattr(difference, name) for name in numbers} == {None}


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("unpaired", [False, True])
def test_intervals_of_accuracies_do_not_leave_their_scale(tmp_path, scale, unpaired):
    accuracies = {"high": [0.996, 0.998, 0.9], "low": [0.004, 0.002, 0.1], "base": [0.998, 0.91, 0.994]}
    columns = {"eval/accuracy": (0.0, scale), "eval/accuracy_drop": (0.0, scale), "eval/bleu": statistics.UNLIMITED}
    for metric, (least, most) in columns.items():
        runs = []
        for i, (name, values) in enumerate(accuracies.items()):
            for seed, x in enumerate(values):
                summary = {metric: scale * x, "better": {metric.rpartition("/")[2]: "more"}}
                runs.append(study_runs.Run("all", name, seed + 10 * i * unpaired, 1, summary, rows=[]))
        study = study_folder.make_study((*accuracies,), seeds=() if unpaired else (0, 1, 2), metric=metric)
        (condition,) = statistics.analyse(study, runs)
        ends = np.array([arm.difference.interval for arm in condition.compared]) + condition.base.mean
        assert (ends[:, 0] >= least - 1e-9).all() and (ends[:, 1] <= most + 1e-9).all()
        assert (ends.min() < 0 and ends.max() > scale) == (least < 0)  # without limits, they would leave it
        assert [arm.difference.kind for arm in condition.compared] == [OPEN, WORSE]


def threshold_step(*curves, reference=(), m=1):
    return statistics.threshold_step(dict(enumerate(curves)), dict(enumerate(reference)), 2.0, m=m, better="less")


def test_the_median_step_to_a_threshold_and_its_paired_difference():
    curves_by_step = {None: {0: 9.0}, 100: {100: 1.0}, 200: {200: 1.0}, 300: {300: 1.0}}
    medians = {(100, 300, None): 300, (100, 200): 150, (100, None): None, (None, None): None, (): None}
    for steps, median in medians.items():  # a seed that does not reach the threshold counts as the latest
        result = threshold_step(*(curves_by_step[key] for key in steps))
        assert (result.median, result.reached, result.of) == (median, len(steps) - steps.count(None), len(steps))
    base = [curves_by_step[100]] * 3
    result = threshold_step(curves_by_step[200], curves_by_step[200], curves_by_step[300], reference=base, m=2)
    half = quantile(0.9875) * math.sqrt(1e4 / 3) / math.sqrt(3)
    assert result.difference == pytest.approx(400 / 3)
    assert result.interval == pytest.approx((400 / 3 - half, 400 / 3 + half))
    early, never = curves_by_step[200], curves_by_step[None]
    # censored, diverged, without reference, censored reference
    for curves, reference in (((early, never), base), ((early, {}), base), ((early,), []), ((early,), [never])):
        result = threshold_step(*curves, reference=reference)
        assert (result.difference, result.interval) == (None, None)
    # Two pairs are not enough.
    assert threshold_step(curves_by_step[200], curves_by_step[300], reference=base).interval is None


def test_p_is_multiplied_by_all_comparisons_and_looks_of_the_study(tmp_path):
    study = study_folder.make_study(("a", "b", "base"), conditions=("x", "y"), seeds=(0, 1, 2), looks=2)
    study_folder.write_losses(tmp_path, "x", {"a": [1.0, 1.1, 1.3], "b": [3.0, 3.11, 3.2], "base": [1.0, 1.1, 1.2]})
    study_folder.write_losses(tmp_path, "y", {"a": [1.4, 1.53, 1.6], "base": [1.0, 1.1, 1.2]})
    (x, y) = study_folder.analyse(tmp_path, study)
    a, b, c = (arm.difference for arm in (*x.compared, y.compared[0]))
    assert b.p < c.p < a.p and x.comparisons == y.comparisons == 4 and y.compared[1].difference.p_corrected is None
    assert [b.p_corrected, c.p_corrected, a.p_corrected] == pytest.approx([8 * b.p, 8 * c.p, 1])
    assert b.interval == compare([2.0, 2.01, 2.0], m=8).interval == pytest.approx(b.interval)


def test_a_study_with_a_metric_of_the_users_can_be_analysed_before_its_first_run(tmp_path):
    study = study_folder.make_study(("a", "base"), seeds=(0, 1, 2), metric="eval/cross_entropy")
    (condition,) = study_folder.analyse(tmp_path, study)
    assert condition.metric == "eval/cross_entropy" and condition.compared[0].missing == [0, 1, 2]


STABLE = [1.90, 1.91, 1.89, 1.90, 1.92]
FAILURES = {
    "none": (STABLE[::-1], STABLE, OPEN, None),
    "one diverged": ([9.9, None, 9.8, 9.7, 9.9], STABLE, UNSTABLE, (1, 0)),
    "all diverged": ([None] * 5, STABLE, UNSTABLE, (5, 0)),
    "of the reference": (STABLE, [None, *STABLE[1:]], UNSTABLE, (0, 1)),
    "two seeds ended": ([None, 1.0], STABLE, FEW, None),
    "one stuck": ([1.90, 3.09, *STABLE[:3]], STABLE, STUCK, (1, 0)),
    "of the reference, and all": ([3.0, 3.01, 3.02, 3.0, 3.01], [1.90, 3.09, *STABLE[:3]], STUCK, (5, 1)),
    "stuck alike": ([1.90, 3.09, *STABLE[:3]], [1.90, 3.09, *STABLE[:3]], SAME, None),
    "stuck and diverged": ([None, 3.09, *STABLE[:3]], STABLE, UNSTABLE, (1, 0)),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("metric", ["eval/loss", "eval/accuracy"])
def test_diverged_and_stuck_seeds_give_a_rate_and_no_verdict(tmp_path, case, metric):
    arm, base, kind, counts = FAILURES[case]
    study = study_folder.make_study(("arm", "base"), seeds=range(5), metric=metric)
    for name, seed, loss in [("arm", *item) for item in enumerate(arm)] + [("base", *item) for item in enumerate(base)]:
        value = {metric: loss if loss is None or metric == "eval/loss" else 10 - loss}
        study_folder.write_run(tmp_path, "all", name, seed, metrics=value, diverged_at=7 if loss is None else None)
    difference = study_folder.analyse(tmp_path, study)[0].compared[0].difference
    assert difference.kind == kind and (difference.rates and tuple(rate.k for rate in difference.rates)) == counts
    assert (difference.interval is None) == (difference.p is None) == (kind != OPEN)


def test_the_statistics_of_a_folder_equal_values_by_hand(tmp_path):
    study = study_folder.make_study(threshold=2.0, seeds=(0, 1, 2))
    for seed in range(3):
        metrics = {"eval/accuracy": 0.5 + seed / 10, "baseline/accuracy": 0.1}
        loss, curve = {"eval/loss": 1.5}, [(0, 5.0), (100, 1.9 if seed else 2.1), (200, 1.5), (250, 1.4)]
        study_folder.write_run(tmp_path, "all", "asymmetric", seed, metrics=metrics | loss, evaluations=curve)
        loss, curve = {"eval/loss": 1.6 + seed / 100}, [(0, 5.0), (200, 2.2)]
        study_folder.write_run(tmp_path, "all", "tied", seed, metrics=metrics | loss, evaluations=curve, params=700)
    [condition] = study_folder.analyse(tmp_path, study)
    tied, asymmetric = condition.arms
    assert (tied.params, asymmetric.params, tied.flops_per_token) == (700, 1000, 2500.0)
    assert (tied.mean, tied.std, tied.n) == pytest.approx((1.61, 0.01, 3))
    accuracy = tied.others["eval/accuracy"]
    assert (accuracy.mean, accuracy.std, accuracy.n) == pytest.approx((0.6, 0.1, 3))
    assert tied.difference.mean == pytest.approx(0.11) and asymmetric.difference is None
    assert tied.threshold_step.by_seed == dict.fromkeys(range(3), None)
    assert asymmetric.threshold_step.by_seed == pytest.approx({0: 700 / 6, 1: 3000 / 31, 2: 3000 / 31})
    assert condition.compared == [tied] and condition.reference == "asymmetric"
    assert (condition.evaluation_interval, condition.comparisons, condition.baseline) == (200, 1, {"accuracy": 0.1})


def test_diverged_runs_are_listed_and_excluded_from_means(tmp_path):
    study = study_folder.make_study(seeds=(0, 1, 2, 3), threshold=2.5)
    study_folder.write_losses(tmp_path, "all", {"asymmetric": [1.0, 1.1, 1.2, 1.3]})
    for seed, (loss, step) in enumerate([(2.0, None), (9.0, 120), (None, None)]):
        metrics = {"eval/loss": loss} | ({"eval/accuracy": 0.9} if seed else {})
        curve = [(100, 2.0)]
        study_folder.write_run(tmp_path, "all", "tied", seed, metrics=metrics, evaluations=curve, diverged_at=step)
    [condition] = study_folder.analyse(tmp_path, study)
    tied = condition.arms[0]
    assert tied.values == {0: 2.0} and (tied.mean, tied.std, tied.n) == (2.0, None, 1) and tied.others == {}
    assert tied.diverged == {1: 120, 2: None} and tied.missing == [3]
    assert tied.difference.by_seed == {0: 1.0} and condition.evaluation_interval is None
    assert tied.threshold_step.by_seed == {0: 100, 1: None, 2: None} and tied.threshold_step.median is None


def test_each_condition_has_its_own_metric_and_runs(tmp_path):
    study = study_folder.make_study(conditions=("a", "b"))
    study.conditions[1] = study.conditions[1]._replace(metric="eval/accuracy")
    study_folder.write_losses(tmp_path, "a", {"tied": [3.0], "asymmetric": [1.0]})
    study_folder.write_run(tmp_path, "b", "tied", 0, metrics={"eval/loss": 7.0, "eval/accuracy": 0.25})
    a, b = study_folder.analyse(tmp_path, study)
    assert (a.arms[0].mean, a.better) == (3.0, "less")
    assert (b.arms[0].mean, b.better) == (0.25, "more") and b.arms[0].others["eval/loss"].mean == 7.0
    with raises(errors.UserError, '"tied"', "eval/accuracy", "eval/loss"):
        study_folder.analyse(tmp_path, study_folder.make_study(conditions=("a", "b"), metric="eval/accuracy"))


def test_means_of_a_layer_are_over_the_seeds_that_have_it(tmp_path):
    study = study_folder.make_study(seeds=(0, 1))
    rows = [{"step": 0, "symmetry/1": 9.0, "symmetry/2": 0.5}, {"step": 5, "symmetry/1": 1.0, "symmetry/2": None}]
    study_folder.write_run(tmp_path, "all", "tied", 0, metrics={"eval/loss": 1.0}, rows=rows)
    rows = [{"symmetry/1": 2.0, "step": 7}]
    study_folder.write_run(tmp_path, "all", "tied", 1, metrics={"eval/loss": 1.0}, rows=rows)
    rows = [{"symmetry/1": 0.5, "symmetry/2": None, "step": 7}]
    study_folder.write_run(tmp_path, "all", "asymmetric", 0, metrics={"eval/loss": 1.0}, rows=rows)
    tied, asymmetric = study_folder.analyse(tmp_path, study)[0].arms
    assert tied.symmetry == {"symmetry": [1.5, 0.5]} and asymmetric.symmetry == {"symmetry": [0.5, None]}


def test_only_finished_runs_are_read(tmp_path):
    study = study_folder.make_study(seeds=(0, 1))
    study_folder.write_losses(tmp_path, "all", {"tied": [1.0, 2.0]})
    (tmp_path / "all/tied/seed_1/summary.json").unlink()
    assert [(run.arm, run.seed) for run in study_runs.load(tmp_path, study)] == [("tied", 0)]
    (tmp_path / "all/tied/seed_0/summary.json").write_text('{"eval/loss"')
    with raises(errors.UserError, tmp_path / "all/tied/seed_0/summary.json"):
        study_runs.load(tmp_path, study)


def test_curves_are_stacked_at_the_steps_that_all_have():
    step_I, value_RI = study_runs.stack([{0: 1.0, 20: 3.0, 10: 2.0}, {20: 5.0, 0: 4.0, 30: 6.0}])
    assert step_I.tolist() == [0, 20] and value_RI.tolist() == [[1.0, 3.0], [4.0, 5.0]]
    step_I, value_RI = study_runs.stack([])
    assert len(step_I) == 0 and value_RI.shape == (0, 0)


def test_the_variance_by_tuning_widens_the_interval_and_its_share_is_stated():
    arm, reference = {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.1}, dict.fromkeys(range(4), 0.0)
    plain, wide = (statistics.compare(arm, reference, m=2, better="less", extra=extra) for extra in (0.0, 0.04))
    error = math.sqrt(plain.std**2 / 4 + 0.04)
    half = stats.t.isf(0.0125, 3) * error
    assert wide.interval == pytest.approx((plain.mean - half, plain.mean + half))
    assert wide.p == pytest.approx(2 * stats.t.sf(plain.mean / error, 3)) and plain.p < wide.p
    assert wide.detectable == pytest.approx(plain.detectable * error / (plain.std / 2))
    design = study_folder.make_study(["arm", "base"], seeds=[*range(4)])
    runs = [
        study_runs.Run("all", name, seed, 1, {"eval/loss": x, "better": {"loss": "less"}}, [])
        for name, losses in (("arm", arm), ("base", {0: 0.1, 1: 0.0, 2: 0.2, 3: 0.4}))
        for seed, x in losses.items()
    ]
    widths = []
    for variance, phrase in (
        (0.02, "an SD of 0.1414 for each arm, "),
        (None, "which one tuning seed cannot show."),
        (0.0, ""),
    ):
        (condition,) = statistics.analyse(design, runs, tuning_variances={"all": variance})
        text = sentences.describe_condition(condition)
        assert phrase in text and ("the chance in tuning" in text) == bool(phrase)
        widths.append(np.ptp(condition.compared[0].difference.interval))
    assert widths[0] > 1.1 * widths[1] == 1.1 * widths[2]
