"""The words of a study's report: each kind, in both directions, and nothing where there are too few seeds."""

import pytest
import study_folder

from experiments.studies import overall, runs, statistics, tables, verdict

BASE = [1.0, 1.1, 1.2, 1.3]
WIDER = [0.50, 0.51, 0.49, 0.50]  # differences that vary a little


def found(folder, ends, *, condition="all", **options):
    """The first condition of a study whose arms end so; the last arm is the reference."""
    study = study_folder.study(tuple(ends), conditions=(condition,), seeds=range(4), **options)
    study_folder.losses(folder, condition, ends)
    return statistics.analyse(study, runs.load(folder, study))[0]


def shifted(by):
    return [x + d for x, d in zip(BASE, by, strict=True)]


def kinds(condition):
    more = condition.more_is_better
    return [verdict.kind(one.comparison, more_is_better=more) for one in condition.arms if one.comparison]


def flipped(condition):
    """The same numbers of a metric of which more is better."""
    return condition._replace(metric="eval/accuracy", more_is_better=True)


def test_worse_and_better_follow_the_interval_and_the_metric(tmp_path):
    some = found(tmp_path, {"high": shifted(WIDER), "low": shifted([-d for d in WIDER]), "base": BASE})
    assert kinds(some) == [verdict.WORSE, verdict.BETTER]
    assert kinds(flipped(some)) == [verdict.BETTER, verdict.WORSE]
    high = some.arms[0].comparison  # 0.50 +- t(0.9875, 3) 0.0081650 / 2, and t is 4.1765
    said = "by 0.5000 (95 % interval 0.4829 to 0.5171, 4 seeds)"
    assert [verdict.arm(high, more_is_better=more) for more in (False, True)] == [said, said]
    words = verdict.condition(some)
    assert words.startswith(
        f'Against "base", in eval/loss (less is better). Worse: "high" {said}. Better: "low" {said}. The '
    )
    assert "roughly normal, hold at 95 % for the 2 comparisons of this condition together (Bonferroni)." in words
    assert f'(more is better). Worse: "low" {said}. Better: "high" {said}.' in verdict.condition(flipped(some))


def test_no_difference_says_what_is_excluded(tmp_path):
    some = found(tmp_path, {"near": shifted([-0.1, 0.2, -0.1, 0.2]), "base": BASE})
    # 0.05 +- 3.18245 * 0.173205 / 2
    assert some.arms[0].comparison.interval == pytest.approx((-0.22561, 0.32561), abs=1e-5)
    said = '"near" (between 0.2256 better and 0.3256 worse, 95 %, 4 seeds).'
    assert f"No difference was found: {said}" in verdict.condition(some)
    said = '"near" (between 0.3256 better and 0.2256 worse, 95 %, 4 seeds).'
    assert f"No difference was found: {said}" in verdict.condition(flipped(some))
    assert "Worse:" not in verdict.condition(some) and "Better:" not in verdict.condition(some)


def test_a_difference_that_only_one_comparison_alone_would_show_is_none(tmp_path):
    near = shifted([0.1, 0.2, 0.3, 0.1])
    (alone,) = kinds(found(tmp_path / "1", {"near": near, "base": BASE}))
    some = found(tmp_path / "2", {"near": near, **{f"other{i}": BASE for i in range(6)}, "base": BASE})
    assert alone == verdict.WORSE and kinds(some) == [verdict.OPEN, *[verdict.SAME] * 6]
    assert some.arms[0].comparison.p < 0.05 < some.arms[0].comparison.p_corrected


def test_differences_without_spread(tmp_path):
    some = found(tmp_path, {"same": BASE, "up": shifted([0.25] * 4), "down": shifted([-0.25] * 4), "base": BASE})
    words = verdict.condition(some)
    assert 'Identical to the reference, but for rounding: "same" (4 seeds).' in words
    assert (
        'no spread to make an interval of: "up" (worse by 0.2500, 4 seeds); "down" (better by 0.2500, 4 seeds).'
        in words
    )
    assert "95 %" not in words
    words = verdict.condition(flipped(some))
    assert '"up" (better by 0.2500, 4 seeds); "down" (worse by 0.2500, 4 seeds).' in words


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_than_three_seeds_get_no_verdict(tmp_path, n):
    some = found(tmp_path, {"high": shifted(WIDER)[:n], "base": BASE})
    words = 'No verdict in eval/loss: it takes at least 3 seeds in which both an arm and "base" are finished, and there'
    assert verdict.condition(some).startswith(f"{words} are no more than {n}.")
    for words in (verdict.condition(some), overall.overall([some]), tables.text([some])):
        assert not {"worse", "better", "Worse", "Better", "excluded"} & set(words.split())
        assert "No verdict" in words
    assert tables.condition(some).rows[0][5:8] == [f"{'+0.5050' if n == 2 else '+0.5000'}", "-", "-"]


def test_an_arm_with_few_seeds_beside_one_with_enough(tmp_path):
    some = found(tmp_path, {"few": [5.0], "high": shifted(WIDER), "base": BASE})
    words = verdict.condition(some)
    assert 'Worse: "high" by' in words and 'Too few seeds for a verdict, which takes 3: "few" (1 seed).' in words
    assert 'Not finished yet: "few" seed 1, 2, 3.' in words
    assert overall.overall([some]) == (
        'The study is not finished: 3 of its runs are missing. Against "base", 4 seeds. "few": too few seeds. '
        '"high": worse.'
    )


def test_no_run_of_the_reference(tmp_path):
    some = found(tmp_path, {"high": BASE, "base": []})
    assert verdict.condition(some).startswith("No verdict") and "and there are none." in verdict.condition(some)
    assert tables.condition(some).rows == [
        ["high", "1,000", "2.5 k", "4", "1.1500 ± 0.1291", "-", "-", "-"],
        ["base", "-", "-", "0", "-", "reference", "-", "-"],
    ]


def test_what_diverged_is_named_with_a_warning(tmp_path):
    study_folder.run(tmp_path, "all", "high", 4, ends={"eval/loss": None}, diverged_at=1200)
    study_folder.run(tmp_path, "all", "base", 5, ends={"eval/loss": None})
    ends = {"high": shifted(WIDER), "base": BASE}
    study_folder.losses(tmp_path, "all", ends)
    study = study_folder.study(tuple(ends), seeds=range(6))
    (some,) = statistics.analyse(study, runs.load(tmp_path, study))
    words = verdict.condition(some)
    assert 'Worse: "high" by 0.5000' in words and ", 4 seeds)" in words
    left_out = '"high" seed 4 (diverged at step 1,200), "base" seed 5 (eval/loss not finite)'
    assert f"Left out: {left_out}; an arm without its diverged runs looks better than it is." in words
    assert overall.overall([some]) == (
        "The study is not finished: 2 of its runs are missing. Left out, since they diverged: 2 of its runs. "
        'Against "base", 4 seeds. "high": worse.'
    )


def test_the_whole_study_says_where(tmp_path):
    ends = {"a": shifted(WIDER), "b": shifted(WIDER), "base": BASE}
    first, second = found(tmp_path, ends, condition="x"), found(tmp_path, ends | {"b": BASE}, condition="y")
    assert overall.overall([first, second]) == (
        'Against "base", 4 seeds. "a": worse in x and y. "b": worse in x; identical in y. Each interval is corrected '
        "within its condition, not for the number of conditions."
    )
    assert overall.overall([first]) == 'Against "base", 4 seeds. "a", "b": worse.'


def test_no_difference_in_a_study_says_how_far_it_could_be(tmp_path):
    near, far = shifted([-0.1, 0.2, -0.1, 0.2]), shifted([0.2, -0.4, 0.2, -0.4])
    first, second = (
        found(tmp_path, {"a": near, "base": BASE}, condition="x"),
        found(tmp_path, {"a": far, "base": BASE}, condition="y"),
    )
    assert overall.overall([first]) == (
        'Against "base", 4 seeds. "a": no difference found (between 0.2256 better and 0.3256 worse, 95 %).'
    )
    both = '"a": no difference found in x and y (between 0.6512 better and 0.4512 worse at the widest, 95 %).'
    assert both in overall.overall([first, second])
    both = "between 0.2256 better and 0.3256 worse in eval/loss and between 0.4512 better and 0.6512 worse in eval/accu"
    assert both in overall.overall([first, flipped(second)])


def test_seeds_in_words():
    assert [verdict.seeds(n) for n in ([1], [5, 5], [5, 3])] == ["1 seed", "5 seeds", "3 to 5 seeds"]


def test_an_overview_where_there_are_many_conditions(tmp_path):
    ends = {"a": shifted(WIDER), "b": BASE, "base": BASE}
    some = [found(tmp_path, ends, condition=name) for name in "xyz"]
    some[1] = flipped(some[1])._replace(name="other")
    assert tables.overview(some[:2]) is None and "all conditions" not in tables.text(some[:2])
    table = tables.overview(some)
    assert table.head == ["condition", "metric", "base", "a", "b"]
    assert table.rows[:2] == [
        ["x", "eval/loss", "1.1500", "+0.5000 worse", "0.0000 same"],
        ["other", "eval/accuracy", "1.1500", "+0.5000 better", "0.0000 same"],
    ]
    assert [kinds[3:] for kinds in table.kinds] == [["worse", "same"], ["better", "same"], ["worse", "same"]]
    assert "all conditions\n  condition         metric    base" in tables.text(some)
    assert '"b": identical in all 3 conditions.' in overall.overall(some)


def test_the_column_of_p_says_what_it_is_times(tmp_path):
    some = found(tmp_path, {"a": shifted(WIDER), "b": BASE, "base": BASE})
    assert tables.condition(some).head[7:] == ["p (x 2)"]


def test_numbers_in_words():
    assert [verdict.number(x) for x in (0.0, -0.0, 1.23456, -0.00051234, 0.001)] == [
        *("0.0000", "0.0000", "1.2346", "-0.00051", "0.0010")
    ]
    assert [tables.signed(x) for x in (0.5, -0.5, 0.0)] == ["+0.5000", "-0.5000", "0.0000"]


def test_the_table_of_a_condition(tmp_path):
    high = shifted(WIDER)
    for seed in range(4):
        curve = [(0, 5.0), (1000, 2.0 if seed else 2.5), (2000, 1.5)]
        study_folder.run(tmp_path, "all", "base", seed, ends={"eval/loss": BASE[seed]}, evaluations=curve)
        ends = {"eval/loss": high[seed], "eval/accuracy": 0.25, "baseline/accuracy": 0.1}
        ends["guess"] = {"accuracy": "always the first"}
        study_folder.run(tmp_path, "all", "high", seed, ends=ends, evaluations=curve[:-1] if seed < 3 else [])
    study = study_folder.study(("high", "base"), seeds=range(4), threshold=2.0)
    (some,) = statistics.analyse(study, runs.load(tmp_path, study))
    table = tables.condition(some)
    assert table.head[3:] == ["runs", "eval/loss", "minus base", "95 % interval", "p", "steps to 2", "eval/accuracy"]
    low = 3.182446 * 0.00816497 / 2  # t(0.975, 3)
    interval = f"+{0.5 - low:.4f} to +{0.5 + low:.4f}"
    row = ["4", "1.6500 ± 0.1268", "+0.5000", interval, "< 0.0001", "not reached (2 of 4)", "0.2500 ± 0.0000"]
    assert table.rows[0][3:] == row
    assert table.rows[1][5:] == ["reference", "-", "-", "1,000 (4 of 4)", "-"]
    assert "eval/loss at most that" in table.notes[1] and "between evaluations, is 1,000." in table.notes[1]
    assert table.notes[2] == "Baseline: accuracy 0.1000 (always the first)."


def test_text_is_aligned_and_wrapped(tmp_path):
    lines = tables.text([found(tmp_path, {"a\x1b[2J": shifted(WIDER), "base": BASE})]).splitlines()
    assert all(len(line) <= 110 for line in lines) and "\x1b" not in "".join(lines)
    head, first, second = lines[1:4]
    assert head.index("eval/loss") + len("eval/loss") == first.index("± 0.1268") + len("± 0.1268")
    assert second.rstrip().startswith("  base") and lines[-1] == 'Against "base", 4 seeds. "a�[2J": worse.'
