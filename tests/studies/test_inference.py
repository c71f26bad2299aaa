"""Inference from small samples: false positives and power by simulation, rates by hand."""

import numpy as np
import pytest
from scipy import stats

from experiments.studies import inference, statistics


def excludes_zero(difference_XI, m):
    """Return True for each interval that does not contain 0."""
    low, high = inference.interval(difference_XI, m)
    return (low > 0) | (high < 0)


def test_a_whole_study_of_35_comparisons_has_5_percent_of_false_positives():
    """Seven conditions of five arms and a reference, with five seeds that share noise. No arm differs."""
    random = np.random.default_rng(0)
    value_XCAI = random.normal(size=(2000, 7, 6, 5)) + random.normal(size=(2000, 7, 1, 5))
    difference_XCAI = value_XCAI[:, :, 1:] - value_XCAI[:, :, :1]
    assert 0.03 < excludes_zero(difference_XCAI, 35).any((1, 2)).mean() <= 0.06
    assert excludes_zero(difference_XCAI, 5).any((1, 2)).mean() > 0.2  # if corrected within each condition


@pytest.mark.parametrize(("n", "m", "effect_on_grid"), [(3, 8, 9.5), (5, 4, 2.5), (5, 12, 3.5)])
def test_the_power_equals_that_of_simulated_studies(n, m, effect_on_grid):
    assert np.ceil(2 * inference.detectable(n, m)) / 2 == effect_on_grid  # rounded up to halves
    difference_XI = np.random.default_rng(0).normal(inference.detectable(n, m), size=(10_000, n))
    assert excludes_zero(difference_XI, m).mean() == pytest.approx(0.8, abs=0.015)
    for effect in (1, 2):
        n_seeds = inference.seeds_for(effect, m)
        assert inference.detectable(n_seeds, m) <= effect < inference.detectable(n_seeds - 1, m)


def test_the_interval_of_two_means_equals_values_by_hand():
    """The means are 2 and 4; the squares of their errors 1/3 and 1/2. Both ends and p have two degrees of freedom."""
    (low, high), p = inference.welch(np.array([1.0, 2, 3]), np.array([2.0, 3, 4, 5, 6]), 2)
    t = 2 / np.sqrt(1 / 3 + 1 / 2)
    assert p == pytest.approx(1 - t / np.sqrt(t * t + 2))  # the closed form of two degrees of freedom
    half = 0.975 / np.sqrt(2 * 0.9875 * 0.0125) * np.sqrt(1 / 3 + 1 / 2)  # its 98.75 % quantile
    assert (low, high) == pytest.approx((-2 - half, -2 + half))


UNEQUAL = {  # (runs of both sides, their SDs): false positives, in %, of a study of 18 comparisons; of Welch's own
    ((3, 10), (1, 1)): (0.0, 15),
    ((3, 10), (3, 1)): (0.1, 29),
    ((3, 10), (1, 3)): (0.0, 4),
    ((4, 30), (1, 1)): (0.0, 18),
    ((4, 30), (3, 1)): (2.1, 13),
    ((4, 30), (1, 3)): (0.0, 6),
}  # docs/studies.md


@pytest.mark.parametrize("sizes, sds", UNEQUAL)
def test_unpaired_comparisons_of_few_and_many_runs_hold_a_strict_level(sizes, sds):
    """The 18 levels of 0.05/18 sum up to at most 5 %, unlike with the degrees of freedom of Welch and Satterthwaite."""
    random = np.random.default_rng(0)
    sides = [random.normal(0, sd, (200_000, n)) for n, sd in zip(sizes, sds, strict=True)]
    (low_X, high_X), p_X = inference.welch(*sides, 18)
    assert ((18 * p_X < 0.05) == ((low_X > 0) | (high_X < 0))).all()
    usual_X = stats.ttest_ind(*sides, axis=1, equal_var=False).pvalue
    level, usual = (1800 * np.mean(18 * x_X < 0.05) for x_X in (p_X, usual_X))
    assert level <= 5 and (level, usual) == pytest.approx(UNEQUAL[sizes, sds], abs=1)


def draw_accuracies(n, examples, *p):
    """Draw 40,000 studies of n runs for each p: the share of correct answers among the examples."""
    random = np.random.default_rng(0)
    return [random.binomial(examples, x, (40_000, n)) / examples for x in p]


@pytest.mark.filterwarnings("ignore:Precision loss")  # scipy's, of equal differences
@pytest.mark.parametrize(
    "n, m, examples, p", [(5, 1, 500, 0.99), (5, 35, 100, 0.99), (3, 35, 100, 0.9), (3, 35, 20, 0.8)]
)
def test_verdicts_on_accuracies_hold_their_level(n, m, examples, p):
    """The levels of m comparisons sum up to at most 5 %, also if few examples make differences equal by chance."""
    arm_XI, base_XI = draw_accuracies(n, examples, p, p)
    difference_XI = arm_XI - base_XI
    is_equal_X = np.ptp(difference_XI, -1) < 1e-9  # t has no spread
    pairs = zip(arm_XI[is_equal_X], base_XI[is_equal_X], strict=True)
    sides = ([dict(enumerate(side)) for side in pair] for pair in pairs)
    kinds = [statistics.compare(*pair, m=m, better="more").kind for pair in sides]
    verdicts = kinds.count(statistics.WORSE) + kinds.count(statistics.BETTER)
    verdicts += np.sum(excludes_zero(difference_XI, m) & ~is_equal_X)
    assert kinds and 100 * m * verdicts / len(arm_XI) <= 5.1


@pytest.mark.filterwarnings("ignore:Precision loss")  # scipy's, of equal differences
@pytest.mark.parametrize("p, missed, by_angles", [(0.99, 5, 5), (0.97, 5, 12.5), (0.9, 5, 30)])
def test_intervals_of_accuracies_cover_their_difference_which_those_of_angles_do_not(p, missed, by_angles):
    """Five runs of an arm with 99 % of 500 examples: how many intervals, in %, miss the difference to p.

    An angle is asin(sqrt(accuracy)). Its interval is turned back into accuracies at the mean angle of the reference.
    """
    sides = draw_accuracies(5, 500, 0.99, p)
    angle_XI, base_XI = (np.arcsin(np.sqrt(side_XI)) for side_XI in sides)
    base_X = base_XI.mean(-1)
    ends = (np.clip(base_X + end_X, 0, np.pi / 2) for end_X in inference.interval(angle_XI - base_XI, 1))
    intervals = inference.interval(sides[0] - sides[1], 1), [np.sin(x) ** 2 - np.sin(base_X) ** 2 for x in ends]
    shares = [100 * np.mean((low_X > 0.99 - p) | (high_X < 0.99 - p)) for low_X, high_X in intervals]
    assert shares == pytest.approx([missed, by_angles], abs=0.5)


def test_rates_equal_values_by_hand():
    low = 0.025 ** (1 / 5)  # its fifth power is 2.5 %
    assert inference.rate(0, 5).interval == pytest.approx((0, 1 - low))
    assert inference.rate(5, 5).interval == pytest.approx((low, 1))


def test_one_percent_of_normal_samples_seem_to_have_a_plateau():
    random = np.random.default_rng(0)
    for n in range(4, 21):
        _, _, ratio_X = inference.separation(random.normal(size=(20_000, n)))
        assert 0.007 < (ratio_X > inference.GAPS[n - 4]).mean() < 0.013, n


def test_a_plateau_is_found_but_not_with_three_seeds():
    random = np.random.default_rng(0)

    def share(n, stuck_seeds):
        samples = 2.0 + random.normal(0, 0.02, (300, n)) + 1.2 * (np.arange(n) < stuck_seeds)
        return np.mean([inference.plateau(list(values)) is not None for values in samples])

    assert min(share(n, stuck_seeds) for n, stuck_seeds in ((4, 1), (5, 1), (5, 2), (10, 3))) > 0.95
    assert share(3, 1) == 0


def test_the_separation_and_the_plateau_equal_values_by_hand():
    gap, middle, ratio = inference.separation(np.array([10.0, 0.0, 12.0, 1.0]))
    assert (gap, middle, ratio) == pytest.approx((9, 5.5, 9 / np.sqrt((2 * 0.5**2 + 2 * 1**2) / 2)))
    losses = [1.90, 3.09, 1.91, 1.89, 1.90]
    assert inference.plateau(losses) == pytest.approx(2.5) and inference.plateau(losses[:2]) is None
    assert inference.plateau([1.0, 1.0, 1.0, 1.0, 0.91]) is None  # at a ceiling, without variation


CROSSINGS = {
    "between two evaluations": ({0: 5.0, 100: 3.0, 200: 2.5, 300: 1.0, 400: 1.0}, 2.0, 200 + 100 / 3),
    "lost at the next evaluation": ({0: 5.0, 100: 1.0, 200: 3.0, 300: 1.0, 400: 0.5}, 2.0, 250),
    "only at the last evaluation": ({200: 1.0, 100: 3.0, 0: 5.0}, 2.0, 150),
    "lost at the end": ({0: 5.0, 100: 1.0, 200: 3.0}, 2.0, None),
    "from the beginning": ({0: 1.0, 100: 1.0}, 2.0, 0),
    "exactly": ({0: 5.0, 100: 2.0}, 2.0, 100),
    "never": ({0: 5.0, 100: 3.0}, 2.0, None),
    "no curve": ({}, 2.0, None),
}


@pytest.mark.parametrize("case", CROSSINGS)
def test_the_step_at_which_a_curve_reaches_a_threshold(case):
    curve, threshold, step = CROSSINGS[case]
    expected = step if step is None else pytest.approx(step)
    assert inference.crossing(curve, threshold, better="less") == expected
    upward = {step_of_value: -value for step_of_value, value in curve.items()}
    assert inference.crossing(upward, -threshold, better="more") == expected


def test_the_bootstrap_draws_seeds_within_a_condition_and_is_reproducible():
    draws = inference.resamples([3, 5], 7)
    assert [draw.shape for draw in draws] == [(7, 3), (7, 5)] and [draw.max() for draw in draws] == [2, 4]
    assert all(np.array_equal(*pair) for pair in zip(draws, inference.resamples([3, 5], 7), strict=True))
    for count, upper in ((10, 1951), (60, np.inf)):  # 2,000 numbers
        low, high = inference.percentiles(np.array([*range(1, 2001 - count), *[np.inf] * count])).tolist()
        assert 50 <= low <= 51 and upper - 1 <= high <= upper
