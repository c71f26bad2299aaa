"""Inference from small samples: false positives and power by simulation, corrections and rates by hand."""

import numpy as np
import pytest

from experiments.studies import inference


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


def test_holm_correction_and_rates_equal_values_by_hand():
    assert inference.holm([0.01, 0.04, 0.03], 3) == pytest.approx([0.03, 0.06, 0.06])
    assert inference.holm([0.01, 0.04, 0.03], 4) == pytest.approx([0.04, 0.09, 0.09])  # a fourth comparison has no p
    assert inference.holm([0.5, 0.6], 3) == [1.0, 1.0] and inference.holm([], 3) == []
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
