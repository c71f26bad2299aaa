"""The words and tables of a study's report: each kind, in both directions, and nothing where there are few seeds."""

import dataclasses

import pytest
import study_folder

from experiments.studies import report, runs, statistics, tables, words

BASE = [1.0, 1.1, 1.2, 1.3]
FLIP = {statistics.WORSE: statistics.BETTER, statistics.BETTER: statistics.WORSE}


def shifted(by):
    return [x + d for x, d in zip(BASE, by, strict=True)]


NEAR = [-0.1, 0.2, -0.1, 0.2]
HIGH, LOW, UP = (shifted(by) for by in ([0.50, 0.51, 0.49, 0.50], [-0.50, -0.51, -0.49, -0.50], [0.25] * 4))


def analysed(folder, ends, *, condition="all"):
    """The condition of a study whose arms end so; the last arm is the reference."""
    study = study_folder.study(tuple(ends), conditions=(condition,), seeds=range(4))
    study_folder.losses(folder, condition, ends)
    return statistics.analyse(study, runs.load(folder, study))[0]


def flipped(condition):
    """The same numbers of a metric of which more is better."""
    arms = []
    for arm in condition.arms:
        other = arm.difference and dataclasses.replace(
            arm.difference, kind=FLIP.get(arm.difference.kind, arm.difference.kind)
        )
        arms.append(dataclasses.replace(arm, difference=other))
    return dataclasses.replace(condition, metric="eval/accuracy", better="more", arms=arms)


@pytest.fixture
def condition(tmp_path):
    """An arm of each kind."""
    ends = {"high": HIGH, "low": LOW, "near": shifted(NEAR), "same": BASE, "up": UP}
    return analysed(tmp_path, ends | {"down": shifted([-0.25] * 4), "few": [5.0], "base": BASE})


def test_a_sentence_on_each_kind_follows_the_interval_and_the_metric(condition):
    # 0.50 +- t(1 - 0.025/7, 3) 0.0081650 / 2, and t is 6.5797; 0.05 +- t 0.173205 / 2
    said = "by 0.5000 (95 % interval 0.4731 to 0.5269, 4 seeds)"
    sentences = [
        'Against "base", in eval/loss (less is better).',
        f'Worse: "high" {said}; "up" by 0.2500 in every seed, which leaves no spread for an interval (4 seeds). '
        f'Better: "low" {said}; "down" by 0.2500 in every seed, which leaves no spread for an interval (4 seeds).',
        'No difference was found: "near" (between 0.5198 better and 0.6198 worse, 95 %, 4 seeds).',
        'Identical to the reference, but for rounding: "same" (4 seeds).',
        'Too few seeds for a verdict, which takes 3: "few" (1 seed).',
        "The intervals, Student's t on differences paired by seed, which are taken to be roughly normal, hold at 95 % "
        "for the 7 comparisons of this study together (Bonferroni).",
        'Not finished yet: "few" seed 1, 2, 3.',
    ]
    assert words.of_condition(condition) == " ".join(sentences)
    text = words.of_condition(flipped(condition))
    assert f'eval/accuracy (more is better). Worse: "low" {said}; "down" by' in text
    assert f'for an interval (4 seeds). Better: "high" {said}; "up" by' in text
    assert '"near" (between 0.6198 better and 0.5198 worse, 95 %, 4 seeds).' in text


def test_without_an_interval_nothing_is_said_of_intervals(tmp_path):
    text = words.of_condition(analysed(tmp_path, {"same": BASE, "up": UP, "base": BASE}))
    assert "95 %" not in text and "for an interval" in text
    one = words.of_condition(analysed(tmp_path / "one", {"high": HIGH, "base": BASE}))
    assert one.endswith(
        "The interval is Student's t on differences paired by seed, which are taken to be roughly normal."
    )


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_seeds_get_no_verdict(tmp_path, n):
    condition = analysed(tmp_path, {"high": HIGH[:n], "base": BASE})
    have = f"no more than {n}" if n else "none"
    takes = "it takes at least 3 seeds in which"
    sentence = f'No verdict in eval/loss: {takes} both an arm and "base" are finished, and there are {have}.'
    assert words.of_condition(condition).startswith(sentence)
    assert f'No verdict: {takes} an arm and "base" are finished.' in words.of_study([condition])
    mean = ["-", "+0.5000", "+0.5050"][n]
    assert tables.of_condition(condition).rows[0][5:8] == [mean, "-", "-"]


def test_no_run_of_the_reference(tmp_path):
    condition = analysed(tmp_path, {"high": BASE, "base": []})
    assert "and there are none." in words.of_condition(condition)
    assert tables.of_condition(condition).rows == [
        ["high", "1,000", "2.5 k", "4", "1.1500 ± 0.1291", "-", "-", "-"],
        ["base", "-", "-", "0", "-", "reference", "-", "-"],
    ]


def test_what_diverged_is_named_with_a_warning(tmp_path):
    study_folder.run(tmp_path, "all", "high", 4, ends={"eval/loss": None}, diverged_at=1200)
    study_folder.run(tmp_path, "all", "base", 5, ends={"eval/loss": None})
    study_folder.losses(tmp_path, "all", {"high": HIGH, "base": BASE})
    study = study_folder.study(("high", "base"), seeds=range(6))
    (condition,) = statistics.analyse(study, runs.load(tmp_path, study))
    text = words.of_condition(condition)
    # Clopper and Pearson: 1 - 0.975^(1/5) = 0.005, and the other end where 1 or 0 of 5 have 2.5 %
    rate = '"high" (1 of 5 diverged, a rate of 0.01 to 0.72, 95 %; of "base" 1 of 5).'
    assert f"Unstable, and a mean without the diverged seeds would hide it: {rate} In no mean" in text
    left_out = '"high" seed 4 (diverged at step 1,200), "base" seed 5 (eval/loss not finite)'
    assert f"In no mean: {left_out}; an arm without its diverged runs looks better than it is." in text
    assert words.of_study([condition]) == (
        "The study is not finished: 2 of its runs are missing. Left out, since they diverged: 2 of its runs. "
        'Against "base", 5 seeds. "high": unstable.'
    )


def test_what_is_said_where_there_is_no_verdict_on_the_mean(tmp_path):
    """Stuck seeds, a ceiling, and equality within a margin, whose interval is 0 +- 3.182446 0.0115470 / 2."""
    study = study_folder.study(("stuck", "same", "near", "base"), seeds=range(4), margin=0.02, correction="condition")
    near = [x + d for x, d in zip(BASE, (-0.01, 0.01, -0.01, 0.01), strict=True)]
    study_folder.losses(tmp_path, "all", {"stuck": [1.0, 3.0, 1.01, 1.02], "near": near, "base": BASE})
    only = study._replace(arms=study.arms[2:])
    (condition,) = statistics.analyse(only, runs.load(tmp_path, only))
    said = '"near" (between 0.0184 better and 0.0184 worse, 95 %, 4 seeds).'
    assert f"Equal within 0.02, in which the whole interval lies: {said}" in words.of_condition(condition)
    assert words.of_study([condition]) == 'Against "base", 4 seeds. "near": equal within 0.02.'
    aside = dataclasses.replace(condition.arms[0].difference, interval=(0.0026, 0.0035))
    assert words.of_arm(condition, aside) == "(between 0.0026 and 0.0035 worse, 95 %, 4 seeds)"
    aside = dataclasses.replace(aside, interval=(-0.0035, -0.0026))
    assert words.of_arm(condition, aside) == "(between 0.0026 and 0.0035 better, 95 %, 4 seeds)"
    only = study._replace(arms=[study.arms[0], study.arms[3]])
    (condition,) = statistics.analyse(only, runs.load(tmp_path, only))
    rate = '"stuck" (1 of 4 did not leave the plateau, a rate of 0.01 to 0.81, 95 %; of "base" 0 of 4).'
    assert words.of_condition(condition).endswith(f"In two clusters, so that the mean is not the question here: {rate}")
    assert tables.of_condition(condition).rows[0][5:8] == ["+0.3575", "in two clusters", "-"]
    study_folder.losses(tmp_path / "x", "all", {"same": [0.0] * 4, "base": [0.0] * 4})
    only = study._replace(arms=[study.arms[1], study.arms[3]])
    (condition,) = statistics.analyse(only, runs.load(tmp_path / "x", only))
    ceiling = "At the ceiling in every seed, as the reference, where a difference cannot be seen:"
    assert words.of_condition(condition).endswith(f'{ceiling} "same" (4 seeds).')


def test_what_seeds_can_show_before_they_are_trained(tmp_path):
    study = study_folder.study(("a", "b", "base"), conditions=("x", "y"), seeds=range(5))
    assert words.of_power(study, statistics.analyse(study, []), None) == (
        "power: 5 seeds show a difference of 2.5 standard deviations of the paired difference with probability 0.8, "
        "for the 4 comparisons of this study together; one of 1 takes 15 seeds, one of 2 takes 7 seeds"
    )
    study_folder.losses(tmp_path, "y", {"a": [1.1, 1.3, 1.5], "b": [1.3, 1.7, 2.1], "base": [1.0, 1.1, 1.2]})
    text = words.of_power(study, statistics.analyse(study, runs.load(tmp_path, study)), "runs/a")
    assert text.endswith("\nwith those of the runs in runs/a: 0.2477 to 0.7430 in eval/loss in y")
    few = study._replace(seeds=[0, 1])
    assert words.of_power(few, statistics.analyse(few, []), None).startswith("power: 2 seeds can show no difference")


def test_the_whole_study_says_where_and_how_far(tmp_path):
    ends = {"a": HIGH, "b": HIGH, "base": BASE}
    first, second = analysed(tmp_path, ends, condition="x"), analysed(tmp_path, ends | {"b": BASE}, condition="y")
    within = "All intervals hold at 95 % for the 2 comparisons of this study together."  # each was analysed alone
    assert words.of_study([first]) == 'Against "base", 4 seeds. "a", "b": worse.'
    assert words.of_study([first, second]) == (
        f'Against "base", 4 seeds. "a": worse in x and y. "b": worse in x; identical in y. {within}'
    )
    alone = [dataclasses.replace(one, family="condition") for one in (first, second)]
    assert words.of_study(alone).endswith("corrected within its condition, not for the number of conditions.")
    assert '"b": identical in all 3 conditions.' in words.of_study([second] * 3)
    near = analysed(tmp_path, {"a": shifted(NEAR), "base": BASE}, condition="z")
    far = analysed(tmp_path, {"a": shifted([-2 * d for d in NEAR]), "base": BASE}, condition="w")
    said = '"a": no difference found'
    assert f"{said} (between 0.2256 better and 0.3256 worse, 95 %)." in words.of_study([near])
    both = "in z and w (between 0.6512 better and 0.4512 worse at the widest, 95 %)."
    assert f"{said} {both}" in words.of_study([near, far])
    each = "between 0.2256 better and 0.3256 worse in eval/loss and between 0.4512 better and 0.6512 worse in eval/accu"
    assert each in words.of_study([near, flipped(far)])


def test_seeds_and_numbers_in_words():
    assert [words.seeds(n) for n in ([1], [5, 5], [5, 3])] == ["1 seed", "5 seeds", "3 to 5 seeds"]
    numbers = {0.0: "0.0000", 1.23456: "1.2346", -0.00051234: "-0.00051", 0.001: "0.0010"}
    assert {x: words.number(x) for x in numbers} == numbers and words.number(-0.0) == "0.0000"
    assert [tables.signed(x) for x in (0.5, -0.5, 0.0, None)] == ["+0.5000", "-0.5000", "0.0000", "-"]


def test_what_is_not_the_references_is_told(tmp_path):
    """Of held-out examples, training batches and initial values."""
    alike = {"evaluation_crc32": 5, "training_crc32": 7, "initial": {f"w{i}_D 2": [1.0, 0, 0, 0] for i in range(9)}}
    many = {f"w{i}_D 2": [0.0, 0.0, 1.0, i] for i in range(9)} | {"mine_D 2": [1.0, 0, 0, 0]}
    twice = {name: [-2 * x for x in its] for name, its in alike["initial"].items()}  # a multiple is no other value
    arms = {
        "data": {"evaluation_crc32": 6},
        "more": {"evaluation_crc32": 4},
        "batch": {},
        "start": {"initial": many},
        "same": {"initial": twice},
    }
    for arm, other in (arms | {"base": {}}).items():
        for seed in range(3):
            own = {"training_crc32": 8} if (arm, seed) == ("batch", 1) else {}
            study_folder.run(tmp_path, "all", arm, seed, ends={"eval/loss": 1.0}, **(alike | other | own))
    study = study_folder.study((*arms, "base"), seeds=range(3))
    (condition,) = statistics.analyse(study, runs.load(tmp_path, study))
    unlike = [(arm.other_evaluation, arm.other_batches, len(arm.other_initial)) for arm in condition.arms]
    assert unlike == [([0, 1, 2], [], 0)] * 2 + [([], [1], 0), ([], [], 9), ([], [], 0), ([], [], 0)]
    sentences = [
        '"data", "more" are not evaluated on the same held-out examples as "base": their difference may be one of the '
        "data.",
        '"batch" is not trained on the batches of "base" in seed 1: their difference may be one of the batches, in '
        "spite of the same seeds.",
        '"start" begins with other values than "base", not only at another scale, in weights of the same name and '
        "shape: w0_D, w1_D, w2_D, w3_D, w4_D, w5_D and 3 more. Seeds do not pair these.",
    ]
    assert words.of_condition(condition).endswith(" ".join(sentences))


def test_an_overview_where_there_are_many_conditions(tmp_path):
    some = [analysed(tmp_path, {"a": HIGH, "b": BASE, "base": BASE}, condition=name) for name in "xyz"]
    some[1] = dataclasses.replace(flipped(some[1]), name="other")
    assert tables.overview(some[:2]) is None
    table = tables.overview(some)
    assert table.head == ["condition", "metric", "base", "a", "b"]
    assert table.rows[:2] == [
        ["x", "eval/loss", "1.1500", "+0.5000 worse", "0.0000 same"],
        ["other", "eval/accuracy", "1.1500", "+0.5000 better", "0.0000 same"],
    ]
    assert [kinds[3:] for kinds in table.kinds] == [["worse", "same"], ["better", "same"], ["worse", "same"]]


def test_the_table_of_a_condition(tmp_path, condition):
    for seed in range(4):
        curve = [(0, 5.0), (1000, 2.0 if seed else 2.5), (2000, 1.5)]
        study_folder.run(tmp_path, "one", "base", seed, ends={"eval/loss": BASE[seed]}, evaluations=curve)
        ends = {"eval/loss": HIGH[seed], "eval/accuracy": 0.25, "baseline/accuracy": 0.1}
        ends["guess"] = {"accuracy": "always the first"}
        study_folder.run(tmp_path, "one", "high", seed, ends=ends, evaluations=curve[:-1] if seed < 3 else [])
    study = study_folder.study(("high", "base"), conditions=["one"], seeds=range(4), threshold=2.0)
    (one,) = statistics.analyse(study, runs.load(tmp_path, study))
    table = tables.of_condition(one)
    assert table.head[3:] == ["runs", "eval/loss", "minus base", "95 % interval", "p", "steps to 2", "eval/accuracy"]
    low = 3.182446 * 0.00816497 / 2  # t(0.975, 3)
    interval = f"+{0.5 - low:.4f} to +{0.5 + low:.4f}"
    row = ["4", "1.6500 ± 0.1268", "+0.5000", interval, "< 0.0001", "not reached (2 of 4)", "0.2500 ± 0.0000"]
    assert table.rows[0][3:] == row
    assert table.rows[1][5:] == ["reference", "-", "-", "1,000 (4 of 4)", "-"]
    # 80 % of t of 4 pairs, noncentral, are above its 97.5 %
    assert table.notes[1] == (
        "Power: these seeds show 2.1 standard deviations of the paired difference with probability 0.8: "
        '"high" 0.0174. Correlation of the pairs: "high" 1.00.'
    )
    assert "Steps to 2: where eval/loss comes to it" in table.notes[2] and "(1,000 steps apart)" in table.notes[2]
    assert table.notes[3] == "Baseline: accuracy 0.1000 (always the first)."
    every = tables.of_condition(condition)
    assert [row[7] for row in every.rows[:3]] == ["< 0.0001", "< 0.0001", "1.0000"]
    small = dataclasses.replace(condition.arms[0].difference, p_corrected=0.00012)
    one = dataclasses.replace(condition, arms=[dataclasses.replace(condition.arms[0], difference=small)])
    assert tables.of_condition(one).rows[0][7] == "0.0001"
    assert every.head[7:] == ["p (Holm)"] and "(Bonferroni: 99.29 % each); p is Holm's." in every.notes[0]
    assert [row[6] for row in every.rows[3:]] == ["identical", "no spread", "no spread", "-", "-"]


def test_a_small_difference_without_a_spread_has_no_verdict(tmp_path):
    condition = analysed(tmp_path, {"step": shifted([0.01] * 4), "base": BASE})
    phrase = "As much in every seed, and too little for a verdict where nothing tells the spread: "
    assert f'{phrase}"step" by 0.0100 in every seed, which leaves no spread' in words.of_condition(condition)
    assert tables.of_condition(condition).rows[0][5:] == ["+0.0100", "no spread", "-"]


def test_text_is_aligned_and_wrapped(tmp_path):
    study = study_folder.study(("a\x1b[2J", "base"), conditions=["x", "y", "z"], seeds=range(4))
    for name in "xyz":
        study_folder.losses(tmp_path, name, {"a\x1b[2J": HIGH, "base": BASE})
    text = report.text(tmp_path, study)
    lines = text.splitlines()
    assert all(len(line) <= 110 for line in lines) and "\x1b" not in text
    head, first, second = lines[1:4]
    assert head.index("eval/loss") + len("eval/loss") == first.index("± 0.1268") + len("± 0.1268")
    assert "FLOP" not in head and second.rstrip().startswith("  base") and "\nall conditions\n  condition" in text
    assert text.endswith("3 comparisons\nof this study together.") and '"a�[2J": worse in all 3 conditions.' in text
