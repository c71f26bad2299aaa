"""The sentences and tables of a study's report: each kind, in both directions, and no verdict with few seeds."""

import dataclasses
import re

import pytest
import study_folder

from experiments.studies import results, sentences, statistics, tables

BASE = [1.0, 1.1, 1.2, 1.3]
FLIP = {statistics.WORSE: statistics.BETTER, statistics.BETTER: statistics.WORSE}


def shift(differences):
    return [x + difference for x, difference in zip(BASE, differences, strict=True)]


SMALL_SHIFTS = [-0.1, 0.2, -0.1, 0.2]
HIGH, LOW, UP = (shift(by) for by in ([0.50, 0.51, 0.49, 0.50], [-0.50, -0.51, -0.49, -0.50], [0.25] * 4))


def analyse(folder, losses, *, condition="all", **options):
    """Return the condition of a study with these losses of each arm. The last arm is the reference."""
    study = study_folder.make_study(tuple(losses), conditions=(condition,), seeds=range(4), **options)
    study_folder.write_losses(folder, condition, losses)
    return study_folder.analyse(folder, study)[0]


def flip_metric(condition):
    """Return the condition with the same numbers as accuracies, which are better if larger."""
    arms = []
    for arm in condition.arms:
        kind = arm.difference and FLIP.get(arm.difference.kind, arm.difference.kind)
        difference = arm.difference and dataclasses.replace(arm.difference, kind=kind)
        arms.append(dataclasses.replace(arm, difference=difference))
    return dataclasses.replace(condition, metric="eval/accuracy", better="more", arms=arms)


def has_parts(text, *parts):
    """Return True if the text has these parts in this order."""
    return re.search(".*?".join(map(re.escape, parts)), text, re.DOTALL) is not None


@pytest.fixture
def condition(tmp_path):
    """Return a condition with an arm of each kind of difference."""
    losses = {"high": HIGH, "low": LOW, "near": shift(SMALL_SHIFTS), "same": BASE, "up": UP}
    return analyse(tmp_path, losses | {"down": shift([-0.25] * 4), "few": [5.0], "base": BASE})


def test_a_sentence_on_each_kind_follows_the_interval_and_the_metric(condition):
    # The intervals are 0.50 +- t(1 - 0.025/7, 3) 0.0081650 / 2 and 0.05 +- t 0.173205 / 2, with t = 6.5797.
    half = ("0.5000", "0.4731 to 0.5269", "4 seeds")
    text = sentences.describe_condition(condition)
    high, low = ('"high"', *half), ('"low"', *half)
    near = ("No difference", '"near"', "0.5198 better", "0.6198 worse")
    flat = ("No spread", '"up" by 0.2500 in every seed', "p = 0.8750 by the sign test", '"down" by -0.2500')  # 7 / 8
    assert has_parts(text, "eval/loss (lower", "Worse", *high, "Better", *low)
    assert has_parts(text, *near, "Identical", '"same"', *flat, "No verdict", '"few"')
    assert has_parts(text, "95 %", "7 comparisons of this study", "Bonferroni", "Not finished", '"few" seed 1, 2, 3')
    text = sentences.describe_condition(flip_metric(condition))
    assert has_parts(text, "eval/accuracy (higher", "Worse", *low, "Better", *high)
    assert has_parts(text, '"near"', "0.6198 better", "0.5198 worse")


def test_without_an_interval_no_sentence_is_about_intervals(tmp_path):
    text = sentences.describe_condition(analyse(tmp_path, {"same": BASE, "up": UP, "base": BASE}))
    assert "95 %" not in text and '"up" by 0.2500' in text
    text = sentences.describe_condition(analyse(tmp_path / "one", {"high": HIGH, "base": BASE}))
    assert "interval" in text and "Bonferroni" not in text


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_seeds_get_no_verdict(tmp_path, n):
    condition = analyse(tmp_path, {"high": HIGH[:n], "base": BASE})
    text = sentences.describe_condition(condition)
    assert has_parts(text, "No verdict", "3", f'"high" ({n} seed')
    assert has_parts(sentences.describe_study([condition]), "No verdict", "3 seeds", '"base"')
    mean = ["-", "+0.5000", "+0.5050"][n]
    assert tables.tabulate_condition(condition).rows[0][5:8] == [mean, "-", "-"]


def test_a_reference_without_runs_gives_no_verdict(tmp_path):
    condition = analyse(tmp_path, {"high": BASE, "base": []})
    assert has_parts(sentences.describe_condition(condition), "No verdict", '"high" (0 seeds)')
    assert tables.tabulate_condition(condition).rows == [
        ["high", "1,000", "2.5 k", "4", "1.1500 ± 0.1291", "-", "-", "-"],
        ["base", "-", "-", "0", "-", "reference", "-", "-"],
    ]


def test_diverged_runs_are_listed_with_a_rate(tmp_path):
    study_folder.write_run(tmp_path, "all", "high", 4, metrics={"eval/loss": None}, diverged_at=1200)
    study_folder.write_run(tmp_path, "all", "base", 5, metrics={"eval/loss": None})
    study_folder.write_losses(tmp_path, "all", {"high": HIGH, "base": BASE})
    study = study_folder.make_study(("high", "base"), seeds=range(6))
    (condition,) = study_folder.analyse(tmp_path, study)
    text = sentences.describe_condition(condition)
    # Clopper and Pearson: 1 - 0.975^(1/5) = 0.005; at the upper end, at most 1 of 5 has the probability 2.5 %.
    assert has_parts(text, "Unstable", '"high" (1 of 5 seeds diverged', "0.01 to 0.72", '"base": 1 of 5')
    assert has_parts(text, '"high" seed 4 (diverged at step 1,200)', '"base" seed 5 (eval/loss not finite)')
    text = sentences.describe_study([condition])
    assert has_parts(text, "missing runs: 2", '"base" over 5 seeds', '"high": unstable.', "diverged: 2")


CASES = {  # (losses of the arm, losses of the reference, parts of the report)
    "stuck": ([1.0, 3.0, 1.01, 1.02], BASE, ["two clusters", "1 of 4", "0.01 to 0.81", '"base": 0 of 4']),
    # 0 +- 3.182446 0.0115470 / 2
    "near": (shift([-0.01, 0.01, -0.01, 0.01]), BASE, ["Equal within 0.02", "0.0184 better", "0.0184 worse"]),
    "same": ([0.0] * 4, [0.0] * 4, ["At the ceiling", '"same" (4 seeds)']),
    "step": (
        shift([0.01] * 4),
        BASE,
        ["the same difference in every seed", '"step" by 0.0100', "p = 0.1250", "sign test"],
    ),
    "copies": ([1.5] * 4, BASE, ["Identical runs of the arm", "seed passed on", '"copies" (4 seeds)']),
    "spread": (BASE, [1.5] * 4, ["Identical runs of the reference", '"spread" (4 seeds)']),
}


@pytest.mark.parametrize("name", CASES)
def test_sentences_without_a_verdict_on_the_mean(tmp_path, name):
    arm, base, parts = CASES[name]
    condition = analyse(tmp_path, {name: arm, "base": base}, margin=0.02, correction="condition")
    assert has_parts(sentences.describe_condition(condition), *parts)
    kind = condition.arms[0].difference.kind.replace("the margin", "0.02")
    assert sentences.describe_study([condition]).endswith(f'"{name}": {kind}.')


def test_a_verdict_without_an_interval_names_the_sign_test(tmp_path):
    base = [*BASE, 1.4, 1.0]
    study = study_folder.make_study(("up", "down", "base"), seeds=range(6), looks=1, correction="study")
    study_folder.write_losses(tmp_path, "all", {"up": [x + 0.25 for x in base], "down": base, "base": base})
    (condition,) = study_folder.analyse(tmp_path, study._replace(arms=study.arms[::2]))
    text = sentences.describe_condition(condition)
    assert has_parts(text, 'Worse: "up" by 0.2500 in every seed', "no interval; p = 0.0312 by the sign test; 6 seeds")
    assert tables.tabulate_condition(condition).rows[0][5:8] == ["+0.2500", "no spread", "0.0312"]


def test_runs_without_a_partner_are_counted_by_side(tmp_path):
    losses = {
        "both": [1.5, 1.6, 1.8, 1.9],
        "less": [1.5, 1.6, 1.8],
        "more": [*HIGH, 2.0, 2.1],
        "few": [1.0],
        "base": BASE,
    }
    study = study_folder.make_study(tuple(losses), seeds=range(6))
    study_folder.write_losses(tmp_path, "all", losses)
    (condition,) = study_folder.analyse(tmp_path, study)
    assert sentences.describe_partners(condition) == [
        '"less" and "base" are compared by pairs of the same seed, which leaves out 1 run of "base".',
        '"more" and "base" are compared by pairs of the same seed, which leaves out 2 runs of "more".',
    ]
    assert " ".join(sentences.describe_partners(condition)) in sentences.describe_condition(condition)


def test_how_rates_were_chosen_is_one_sentence():
    study, config = study_folder.make_study(("a", "b", "base")), {"optim": {"learning_rate": 0.003}}
    rate, grid = "optim.learning_rate", {"optim.learning_rate": [0.1, 0.2, 0.3]}
    describe = sentences.describe_rates
    assert describe(study, config) == f"No arm was tuned in this study: one rate for all arms: {rate} = 0.003."
    changed = study._replace(conditions=[study.conditions[0]._replace(changes={rate: 0.1})])
    assert describe(changed, config) == "No arm was tuned in this study: one rate for all arms in each condition."
    by_hand = study._replace(arms=[study.arms[0]._replace(changes={rate: 0.1}), *study.arms[1:]])
    assert has_parts(
        describe(by_hand, config), "No arm was tuned", f'{rate} was set to 0.1 for "a"; 0.003 for "b", "base".'
    )
    tuned = study._replace(grid=dict.fromkeys(("a", "b", "base"), grid), tune_seeds=[7, 8])
    place = "over 2 other seeds, on a split of the training data."
    assert describe(tuned, config) == f"Each arm was tuned: the best of 3 values of {rate}, {place}"
    own = tuned._replace(grid={"a": grid | {"optim.ema": [0.0, 0.9]}, "b": {}, "base": {}})
    best = f"the best of 6 combinations of {rate} and optim.ema"
    assert describe(own, config) == f'Of all arms only "a" was tuned: {best}, {place}'


def test_what_to_write_in_a_paper_follows_from_the_study(condition, tmp_path):
    text = " ".join(sentences.describe_reporting([condition], "No arm was tuned."))
    joint = "which hold for the 7 comparisons of this study together (Bonferroni)"
    assert has_parts(
        text, "1 to 4 runs", 'to "base", paired by seed', "95 % interval", joint, "No arm was tuned.", "Show all"
    )
    few = analyse(tmp_path / "few", {"a": [1.0], "base": [2.0]})
    text = " ".join(sentences.describe_reporting([few], ""))
    assert "do not claim a difference" in text and "95 %" not in text and "rates" not in text


def test_an_interval_without_zero_is_on_one_side(condition):
    for interval, side in (((0.0026, 0.0035), "worse"), ((-0.0035, -0.0026), "better")):
        difference = dataclasses.replace(condition.arms[0].difference, kind=statistics.EQUAL, interval=interval)
        assert has_parts(sentences.describe_arm(condition, difference), "0.0026", f"0.0035 {side}")


def test_the_power_is_described_before_training(tmp_path):
    study = study_folder.make_study(("a", "b", "base"), conditions=("x", "y"), seeds=range(5))
    text = sentences.describe_power(study, statistics.analyse(study, []), None)
    assert has_parts(text, "5 seeds", "2.5 standard deviations", "0.8", "4 comparisons", "15 seeds", "7 seeds")
    study_folder.write_losses(tmp_path, "y", {"a": [1.1, 1.3, 1.5], "b": [1.3, 1.7, 2.1], "base": [1.0, 1.1, 1.2]})
    text = sentences.describe_power(study, study_folder.analyse(tmp_path, study), "runs/a")
    assert has_parts(text, "runs/a", "0.2477 to 0.7430 in eval/loss in y")
    two_seeds = study._replace(seeds=[0, 1])
    assert "no difference" in sentences.describe_power(two_seeds, statistics.analyse(two_seeds, []), None)
    one_arm = study._replace(arms=study.arms[:1])
    assert "there is one arm" in sentences.describe_power(one_arm, statistics.analyse(one_arm, []), None)


def test_the_verdict_on_a_study_names_conditions_and_ranges(tmp_path):
    losses = {"a": HIGH, "b": HIGH, "base": BASE}
    first, second = analyse(tmp_path, losses, condition="x"), analyse(tmp_path, losses | {"b": BASE}, condition="y")
    words = '"a", "b": worse by 0.5000 (95 % interval 0.4829 to 0.5171).'  # 0.5 +- t(1 - 0.025/2, 3) 0.00816497 / 2
    assert has_parts(
        sentences.describe_study([first]), '"base" over 4 seeds, in eval/loss (lower', words, "2 comparisons"
    )
    text = sentences.describe_study([first, second])
    words = (
        '"a": worse in x and y by 0.5000 (95 % intervals range from 0.4',
        '"b": worse in x by 0.5000 (95 % interval',
    )
    words = (*words, "; identical in y.", "All intervals", "2 comparisons")
    assert has_parts(text, *words)
    text = sentences.describe_study([dataclasses.replace(entry, family="condition") for entry in (first, second)])
    assert "All intervals" not in text and "within its condition" in text
    assert '"b": identical in all 3 conditions.' in sentences.describe_study([second] * 3)
    small = analyse(tmp_path, {"a": shift(SMALL_SHIFTS), "base": BASE}, condition="z")
    large = analyse(tmp_path, {"a": shift([-2 * d for d in SMALL_SHIFTS]), "base": BASE}, condition="w")
    assert has_parts(sentences.describe_study([small]), '"a": no difference found', "0.2256 better", "0.3256 worse")
    text = sentences.describe_study([small, large])
    assert has_parts(text, "in z and w", "intervals range", "0.6512 better", "0.4512 worse")
    # The conditions have different metrics.
    assert has_parts(sentences.describe_study([small, flip_metric(large)]), "no difference found in z and w.")


def test_seeds_and_numbers_are_formatted():
    assert [sentences.count_seeds(n) for n in ([1], [5, 5], [5, 3])] == ["1 seed", "5 seeds", "3 to 5 seeds"]
    numbers = {0.0: "0.0000", 1.23456: "1.2346", -0.00051234: "-0.00051", 0.001: "0.0010"}
    assert {x: sentences.format_number(x) for x in numbers} == numbers and sentences.format_number(-0.0) == "0.0000"
    assert [tables.format_signed(x) for x in (0.5, -0.5, 0.0, None)] == ["+0.5000", "-0.5000", "0.0000", "-"]


def test_arms_with_other_data_or_initial_values_than_the_reference_are_listed(tmp_path):
    common = {"evaluation_crc32": 5, "training_crc32": 7, "initial": {f"w{i}_D 2": [1.0, 0, 0, 0] for i in range(9)}}
    different = {f"w{i}_D 2": [0.0, 0.0, 1.0, i] for i in range(9)} | {"extra_D 2": [1.0, 0, 0, 0]}
    # A multiple counts as the same initial values.
    scaled = {name: [-2 * x for x in sums] for name, sums in common["initial"].items()}
    arms = {"data": {"evaluation_crc32": 6}, "batch": {}, "start": {"initial": different}, "same": {"initial": scaled}}
    for arm, changes in (arms | {"base": {}}).items():
        for seed in range(3):
            batch = {"training_crc32": 8} if (arm, seed) == ("batch", 1) else {}
            study_folder.write_run(tmp_path, "all", arm, seed, metrics={"eval/loss": 1.0}, **(common | changes | batch))
    study = study_folder.make_study((*arms, "base"), seeds=range(3))
    (condition,) = study_folder.analyse(tmp_path, study)
    different = [(arm.other_evaluation, arm.other_batches, len(arm.other_initial)) for arm in condition.arms]
    assert different == [([0, 1, 2], [], 0), ([], [1], 0), ([], [], 9), ([], [], 0), ([], [], 0)]
    data, batch, start = sentences.describe_mismatches(condition)
    assert has_parts(data, '"data"', '"base"', "0, 1, 2") and has_parts(batch, '"batch"', '"base"', "seed 1")
    assert has_parts(start, '"start"', "w0_D, w1_D, w2_D, w3_D, w4_D, w5_D and 3 more")


def test_an_overview_has_a_row_for_each_of_many_conditions(tmp_path):
    conditions = [analyse(tmp_path, {"a": HIGH, "b": BASE, "base": BASE}, condition=name) for name in "xyz"]
    conditions[1] = dataclasses.replace(flip_metric(conditions[1]), name="other")
    assert tables.tabulate_overview(conditions[:2]) is None
    table = tables.tabulate_overview(conditions)
    assert table.head == ["condition", "metric", "base", "a", "b"]
    assert table.rows[0] == ["x", "eval/loss", "1.1500", "+0.5000 worse", "0.0000 same"]
    assert table.rows[1] == ["other", "eval/accuracy", "1.1500", "+0.5000 better", "0.0000 same"]
    assert [kinds[3:] for kinds in table.kinds] == [["worse", "same"], ["better", "same"], ["worse", "same"]]


def test_the_table_of_a_condition_has_means_differences_and_notes(tmp_path, condition):
    for seed in range(4):
        curve = [(0, 5.0), (1000, 2.0 if seed else 2.5), (2000, 1.5)]
        study_folder.write_run(tmp_path, "one", "base", seed, metrics={"eval/loss": BASE[seed]}, evaluations=curve)
        metrics = {"eval/loss": HIGH[seed], "eval/accuracy": 0.25, "baseline/accuracy": 0.1}
        metrics["guess"], curve = {"accuracy": "always the first"}, curve[:-1] if seed < 3 else []
        study_folder.write_run(tmp_path, "one", "high", seed, metrics=metrics, evaluations=curve)
    study = study_folder.make_study(("high", "base"), conditions=["one"], seeds=range(4), threshold=2.0)
    table = tables.tabulate_condition(*study_folder.analyse(tmp_path, study))
    assert table.head[3:] == ["runs", "eval/loss", "minus base", "95 % interval", "p", "steps to 2", "eval/accuracy"]
    low = 3.182446 * 0.00816497 / 2  # t(0.975, 3)
    interval = f"+{0.5 - low:.4f} to +{0.5 + low:.4f}"
    row = ["4", "1.6500 ± 0.1268", "+0.5000", interval, "< 0.0001", "not reached (2 of 4)", "0.2500 ± 0.0000"]
    assert table.rows[0][3:] == row
    assert table.rows[1][5:] == ["reference", "-", "-", "1,000 (4 of 4)", "-"]
    # with this effect, noncentral t of 4 pairs exceeds the 97.5 % quantile with probability 0.8
    assert has_parts(table.notes[1], "0.8", "2.1 standard deviations", '"high" 0.0174', '"high" 1.00')
    assert has_parts(table.notes[2], "Steps to 2", "1,000 steps apart")
    assert table.notes[3] == "Baseline: accuracy 0.1000 (always the first)."
    full_table = tables.tabulate_condition(condition)
    assert [row[7] for row in full_table.rows[:3]] == ["< 0.0001", "< 0.0001", "1.0000"]
    assert "7 comparisons" in full_table.notes[0] and "99.29 % each" in full_table.notes[0]
    assert "p (Bonferroni)" in full_table.head and "times 7" in full_table.notes[0]


def test_the_report_for_a_terminal_is_aligned_and_narrow(tmp_path):
    study = study_folder.make_study(("a", "base"), conditions=["x", "y", "z"], seeds=range(4))
    for name in "xyz":
        study_folder.write_losses(tmp_path, name, {"a": HIGH, "base": BASE})
    text = results.format_text(study, results.analyse(tmp_path, study))
    lines = text.splitlines()
    assert all(len(line) <= 110 for line in lines) and "FLOP" not in text
    assert lines[1].index("eval/loss") + len("eval/loss") == lines[2].index("± 0.1268") + len("± 0.1268")
    parts = ("x\n", "y\n", "z\n", "all conditions\n  condition", '"a": worse in all 3 conditions', "by 0.5000 (95 %")
    assert has_parts(text, *parts)
