"""Tuning: each arm chooses settings on data and seeds that the comparison does not use."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import study_folder
import tiny
import tiny_study
from errors import raises

from experiments import ablation
from experiments.config import errors
from experiments.folder import checkpoint
from experiments.model import splits
from experiments.studies import figures as study_figures, programs, results, study as studies, tuning

RATES = ["optim.learning_rate", [1e-3, 1e-2]]
ARMS = ["less", "more", "usual"]  # rows of one program
CHANGES = [{"optim.weight_decay": 0.01}, {"optim.weight_decay": 0.05}, {}]
SMALL = {"study__experiment": "parted_dots", "study__arms": [list(arm) for arm in zip(ARMS, CHANGES, strict=True)]}
SMALL |= {"study__tune": [RATES], "study__tune_seeds": [8, 9], "study__keep_weights": True}


@pytest.mark.parametrize("stride", [1, 9])
@pytest.mark.parametrize("n", [10, 47, 320, 3210, 9999])
def test_the_tuning_split_and_the_training_split_do_not_overlap(n, stride):
    """An example is a window of `apart` numbers."""

    def fetch(index_B, rng):
        return {"x_BN": index_B[:, None] + np.arange(stride)}

    if n < 2 * stride:
        with raises(errors.UserError, n):
            splits.split_for_tuning((fetch, n), most=50, stride=stride)
        return
    (training, n_left), (block, n_block) = splits.split_for_tuning((fetch, n), most=50, stride=stride)
    training_BN, tuning_BN = training(np.arange(n_left), None)["x_BN"], block(np.arange(n_block), None)["x_BN"]
    assert not {*training_BN.ravel().tolist()} & {*tuning_BN.ravel().tolist()}
    assert len({*training_BN[:, 0].tolist()}) == n_left and len({*tuning_BN.ravel().tolist()}) == tuning_BN.size
    assert training_BN.min() == 0 and max(training_BN[:, 0].max(), tuning_BN[:, 0].max()) < n
    assert n_left > 0.5 * n and 0 < n_block <= 50
    # The tuning examples are spread over the data.
    assert n < 640 * stride or tuning_BN[0, 0] < n / 2 < tuning_BN[-1, 0]


@pytest.fixture(scope="module")
def tuned_study(tmp_path_factory):
    """Return the folder of a tuned study of three arms, and its output."""
    folder = tmp_path_factory.mktemp("tuned")
    outcome = tiny_study.run(folder, **SMALL)
    assert (outcome.code, outcome.err) == (0, "")
    return folder, outcome.out


def test_an_arm_is_compared_with_the_settings_that_it_chose_on_other_data_and_seeds(tuned_study):
    tmp_path, out = tuned_study
    of_tuning, of_arms = "less (2 values), more (2 values), usual (2 values) x 2 seeds:", "less, more, usual x 2 seeds:"
    assert "first 12 tuning runs in 1 programs" in out and 0 < out.index(of_tuning) < out.index(of_arms)
    folder, losses = tmp_path / "study", {}
    for file in sorted(folder.glob("tuning/all/*/seed_*/summary.json")):
        summary = json.loads(file.read_text())
        losses.setdefault(summary["arm"], []).append(summary["eval/loss"])
        config = json.loads((file.parent / "config.json").read_text())["config"]
        assert summary["arm"].endswith(f"@learning_rate={config['optim']['learning_rate']}")
        assert summary["seed"] in (8, 9) and "baseline/accuracy" not in summary
    names = [f"{arm}@learning_rate={rate}" for arm in ARMS for rate in (0.001, 0.01)]
    assert {name: len(seed_losses) for name, seed_losses in losses.items()} == dict.fromkeys(names, 2)
    summaries = tiny_study.summaries(tmp_path)
    digests = {json.loads(file.read_text())["evaluation_crc32"] for file in folder.glob("tuning/*/*/*/summary.json")}
    assert len(digests) == 1 and not digests & {summary["evaluation_crc32"] for summary in summaries.values()}
    record = json.loads((folder / "report.json").read_text())
    assert len(summaries) == 6 and [choice["arm"] for choice in record["tuned"]] == ARMS
    for choice in record["tuned"]:
        arm = choice["arm"]
        means = {rate: np.mean(losses[f"{arm}@learning_rate={rate}"]) for rate in (0.001, 0.01)}
        assert {x["values"]["optim.learning_rate"]: x["mean"] for x in choice["tried"]} == pytest.approx(means)
        best = min(means, key=means.get)
        assert choice["chosen"] == {"optim.learning_rate": best} and choice["at_the_end"] == ["optim.learning_rate"]
        for seed in (3, 5):
            config = json.loads((folder / "all" / arm / f"seed_{seed}" / "config.json").read_text())["config"]
            assert config["optim"]["learning_rate"] == best
        assert f"{arm} chose optim.learning_rate = {best} (best of 2" in out
    assert all("lie beyond: all, less" in (folder / file).read_text() for file in ("report.md", "report.html"))
    assert not (folder / "tuning" / "checkpoints").exists() and not list(folder.glob("**/lock"))
    for name, summary in summaries.items():
        params = checkpoint.parameters(folder / name / "checkpoints", tiny_study.STEPS)
        assert checkpoint.digest(params) == summary["params_sha256"] and (folder / name / "dots.txt").is_file()


def test_choices_of_two_folders_are_those_of_one(tuned_study, tmp_path):
    folder, parts = tuned_study[0] / "study", [tmp_path / "A", tmp_path / "B"]
    for part, removed in zip(parts, ("more", "less"), strict=True):
        shutil.copytree(folder, part)
        for place in (*part.glob(f"tuning/all/{removed}@*"), part / "all" / removed):
            shutil.rmtree(place)
        config = json.loads((part / "config.json").read_text())
        config["config"]["study"]["arms"] = [arm for arm in SMALL["study__arms"] if arm[0] != removed]
        (part / "config.json").write_text(json.dumps(config))
    whole, single = studies.read(results.combine(parts)), tuning.read(folder, studies.read(results.combine([folder])))
    both = sorted(tuning.read(parts[0], whole._replace(also=parts[1:])), key=lambda choice: choice.arm)
    assert both == sorted(single, key=lambda choice: choice.arm) and len(single) == 3


def test_an_arm_is_tuned_over_the_values_of_the_study_and_of_the_arm(tmp_path, monkeypatch):
    arms = [["own", {"study.tune": [["optim.betas", [[0.8, 0.99], [0.9, 0.99]]]], "dots.bias": False}], ["base", {}]]
    changes = tiny_study.TRAIN | tiny_study.STUDY | {"study__arms": arms, "study__tune": [RATES]}
    settings = tiny.settings("ablation", **changes)
    design = studies.read(settings)
    values = [run.settings.optim for run in studies.runs(settings, tuning.trials(design)) if run.seed == 1000]
    expected = [(0.001, 0.8), (0.001, 0.9), (0.01, 0.8), (0.01, 0.9), (0.001, 0.9), (0.01, 0.9)]
    assert [(optim.learning_rate, optim.betas[0]) for optim in values] == expected
    assert len({arm.name for arm in tuning.trials(design).arms}) == 6
    assert not any("study.tune" in arm.changes for arm in tuning.trials(design).arms)
    points = [tuning.Point(values, {1000: 1.0}) for values in tuning.combinations(design, "own")]
    choice = tuning.Tuned(design.conditions[0].name, "own", points, points[0], [], points[0].values, None)
    points = [tuning.Point({}, {1000: 2.0})]
    reference = tuning.Tuned(design.conditions[0].name, "base", points, points[0], [], {}, None)
    draw_panels, panels = study_figures.draw_panels, []

    def keep_panels(rows, *arguments, **options):
        panels.extend(*rows)
        return draw_panels(rows, *arguments, **options)

    monkeypatch.setattr(study_figures, "draw_panels", keep_panels)
    (figure,) = tuning.draw(tmp_path, design, [choice, reference])
    assert figure.file.is_file() and [panel.x for panel in panels] == ["learning rate", "betas"]
    assert [panel.curves["base"][1].tolist() for panel in panels] == [[[2.0, 2.0]]] * 2  # a level line: nothing to try


def write_tuning(folder, **losses_of_arms):
    """Write the tuning runs of two arms with three rates and two seeds. ends: arm -> the losses of each rate."""
    design = study_folder.make_study(("tied", "usual"), seeds=(0, 1))
    grid = {arm.name: {"optim.learning_rate": [0.1, 0.2, 0.4]} for arm in design.arms}
    design = design._replace(grid=grid, tune_seeds=[8, 9])
    for arm, losses_of_rates in losses_of_arms.items():
        for rate, losses_of_seeds in zip((0.1, 0.2, 0.4), losses_of_rates, strict=True):
            for seed, loss in zip((8, 9), losses_of_seeds, strict=True):
                name, summary = f"{arm}@learning_rate={rate}", {"diverged_at": 3 if loss is None else None}
                study_folder.write_run(folder / "tuning", "all", name, seed, metrics={"eval/loss": loss}, **summary)
    return design


def test_the_best_mean_is_chosen_and_never_one_with_a_diverged_seed(tmp_path):
    design = write_tuning(tmp_path, tied=[(2, 2), (1, 1.4), (0, None)], usual=[(3, 1), (3, 1), (5, 5)])
    tied, usual = tuning.read(tmp_path, design)
    assert (tied.best.values, tied.best.mean, tied.edges) == ({"optim.learning_rate": 0.2}, 1.2, [])
    assert (tied.chosen, tied.kept) == (tied.best.values, "a neighbour diverged")
    assert "not interpolated: all, tied (a neighbour diverged)" in tuning.table([tied, usual]).notes[-1]
    assert (usual.best.values, usual.edges) == ({"optim.learning_rate": 0.1}, ["optim.learning_rate"])  # the first
    assert tied.points[2].mean is None and "0.4: diverged" in tuning.table([tied]).rows[0][-1]
    accuracy_study = design._replace(conditions=[design.conditions[0]._replace(metric="eval/accuracy")])
    for file in tmp_path.glob("tuning/**/summary.json"):
        file.write_text(file.read_text().replace("eval/loss", "eval/accuracy"))
    chosen = [choice.best.values["optim.learning_rate"] for choice in tuning.read(tmp_path, accuracy_study)]
    assert chosen == [0.1, 0.4]  # the largest accuracy
    next(tmp_path.glob("tuning/all/usual@*/seed_8/summary.json")).unlink()
    # The tuning of "usual" is not finished.
    assert [choice.arm for choice in tuning.read(tmp_path, accuracy_study)] == ["tied"]


def make_points(losses, **others):
    """Return points whose learning rates are the keys, each with one loss (None: it diverged)."""
    return [tuning.Point({tuning.RATE: rate} | others, {8: loss}) for rate, loss in losses.items()]


def test_the_rate_is_the_vertex_of_the_parabola_through_the_best_and_its_neighbours():
    """Beyond the neighbours, the losses are no parabola. The grid is neither sorted nor evenly spaced."""
    losses = {rate: 2.0 + 0.1 * np.log(rate / 0.0123) ** 2 for rate in (0.03, 0.005, 0.01)} | {0.1: 2.3, 0.001: 9.0}
    for sign in (1, -1):  # a loss; an accuracy
        points = make_points({rate: sign * loss for rate, loss in losses.items()}, ema=0.9)
        best = next(point for point in points if point.values[tuning.RATE] == 0.01)
        others = make_points({0.008: 0.0, 0.012: 0.0}, ema=0.0)  # other settings are not at their best
        assert tuning.interpolate(points + others, best, sign) == ({tuning.RATE: 0.0123, "ema": 0.9}, "")


CHOICES = [  # losses of the rates 0.1, 0.2, 0.4 and 0.8; the chosen rate; the reason
    ([2, 1, 2, 9], 0.2, ""),
    ([1.0, 1.1, 1.6, 9], 0.119, ""),  # an end of the grid: 0.1 * 2^(1/4)
    ([9, 1.6, 1.1, 1.0], 0.673, ""),
    ([1, 2, 3.5, 9], 0.1, ""),  # the vertex is outside the grid
    ([9, 3.5, 2, 1], 0.8, ""),
    ([1.0, 1.5, 1.6, 9], 0.1, ""),  # the vertex is the worst point of the parabola
    ([2, 1, None, 9], 0.2, "a neighbour diverged"),
    ([None, 1, 2, 9], 0.2, "a neighbour diverged"),
    ([1, 1, 1, 1], 0.1, ""),
]


@pytest.mark.parametrize(("losses", "rate", "reason"), CHOICES)
def test_the_rate_is_at_most_half_a_step_from_the_best_one_that_was_tried(losses, rate, reason):
    for sign in (1, -1):
        signed = [None if loss is None else sign * loss for loss in losses]
        points = make_points(dict(zip((0.1, 0.2, 0.4, 0.8), signed, strict=True)))
        best = points[[loss or 99 for loss in losses].index(min(loss or 99 for loss in losses))]
        assert tuning.interpolate(points, best, sign) == ({tuning.RATE: rate}, reason)


def test_two_rates_and_rates_of_0_and_other_settings_are_not_interpolated():
    grids = [make_points({0.1: 1.0, 0.2: 2.0}), make_points({0.1: 1.0, 0.2: 2.0, 0.0: 1.1})]
    grids.append([tuning.Point({"optim.ema": ema}, {8: loss}) for ema, loss in ((0.2, 1), (0.1, 1.1), (0.4, 3))])
    for points in grids:
        assert tuning.interpolate(points, points[0]) == (points[0].values, "")


def test_an_arm_whose_runs_have_the_rate_of_the_grid_keeps_it(tmp_path):
    design = write_tuning(tmp_path / "A", tied=[(1.8, 2.2), (1, 1), (3, 3)], usual=[(2, 2), (1, 1), (2, 2)])
    assert [choice.chosen[tuning.RATE] for choice in tuning.read(tmp_path / "A", design)] == [0.178, 0.2]
    for part, rate in (("A", 0.1), ("B", 0.2)):
        place = study_folder.write_run(tmp_path / part, "all", "tied", 7, metrics={"eval/loss": 1.0})
        (place / "config.json").write_text(json.dumps({"config": {"optim": {"learning_rate": rate}}}))
    tied, _ = tuning.read(tmp_path / "A", design)
    assert (tied.chosen[tuning.RATE], tied.kept) == (0.178, "")
    tied, usual = tuning.read(tmp_path / "A", design._replace(also=[tmp_path / "B"]))
    assert (tied.chosen[tuning.RATE], tied.kept) == (0.2, "runs with the tried rate exist")
    assert tied.variance == 0 < tuning.estimate_variance(tied.points)
    assert tied.record()["not_interpolated"] == tied.kept and "= 0.2" in str(tied)
    assert not usual.kept and "tied (runs with the tried rate exist)" in tuning.table([tied, usual]).notes[-1]


def test_the_variance_by_tuning_is_that_of_the_choice_over_resampled_seeds():
    """Of the four samples of two seeds, one chooses the rate with the mean 2.0 and three that with 1.5."""
    points = [
        tuning.Point({tuning.RATE: rate}, dict(zip((8, 9), x, strict=True))) for rate, x in ((1, (1, 3)), (2, (2, 1)))
    ]
    diverged = tuning.Point({tuning.RATE: 4}, {8: 0.0, 9: None})  # never chosen
    expected = 2 * 0.25 * 0.75 * 0.5**2
    for sign in (1, -1):
        signed = [point._replace(metric={seed: sign * x for seed, x in point.metric.items()}) for point in points]
        assert tuning.estimate_variance([*signed, diverged], sign) == pytest.approx(expected, rel=0.15)
    assert tuning.estimate_variance([point._replace(metric={8: 1.0}) for point in points]) is None
    curve = [
        tuning.Point({tuning.RATE: 2.0**k}, {seed: (k - at) ** 2 for seed, at in ((8, 1.0), (9, 1.0))})
        for k in range(3)
    ]
    assert tuning.estimate_variance(curve) == 0
    shifted = [
        tuning.Point({tuning.RATE: 2.0**k}, {seed: (k - at) ** 2 for seed, at in ((8, 0.8), (9, 1.2))})
        for k in range(3)
    ]
    rises = 0.04 * (1.04 - 0.04) / 0.2  # at 0.2 from the vertex, on the chord between 0.04 and 1.04
    assert tuning.estimate_variance(shifted) == pytest.approx(2 * 0.25 * rises**2, rel=0.15)
    assert tuning.estimate_variance(shifted, is_kept=True) == 0  # both seeds have the same best rate of the grid


def test_variances_are_means_over_the_arms_that_had_a_choice():
    points = make_points({0.1: 1.0, 0.2: 2.0})
    choices = [
        tuning.Tuned(condition, "arm", tried, tried[0], [], {}, variance)
        for condition, tried, variance in (
            ("a", points, 1.0),
            ("a", points, 3.0),
            ("a", points[:1], 0.0),
            ("b", points, None),
        )
    ]
    assert tuning.pool_variances(choices) == {"a": 2.0, "b": None}


def set_tuning(folder, losses_of_arms):
    """Replace the losses of the finished tuning runs. losses_of_arms: arm -> rate -> loss."""
    for file in folder.glob("study/tuning/all/*/seed_*/summary.json"):
        summary = json.loads(file.read_text())
        arm, _, rate = summary["arm"].partition("@learning_rate=")
        file.write_text(json.dumps(summary | {"eval/loss": losses_of_arms[arm][float(rate)]}))


def read_rates(folder):
    """Return arm/seed -> learning rate, of the compared runs."""
    configs = {file.parent: json.loads(file.read_text()) for file in folder.glob("study/all/*/seed_*/config.json")}
    return {f"{p.parent.name}/{p.name}": content["config"]["optim"]["learning_rate"] for p, content in configs.items()}


def test_compared_runs_have_the_interpolated_rate_and_rates_are_never_mixed(tmp_path, monkeypatch):
    changes = {
        "study__experiment": "parted_dots",
        "study__arms": [["decay", {"optim.weight_decay": 0.05}], ["plain", {}]],
    }
    changes |= {"study__tune": [[tuning.RATE, [1e-3, 2e-3, 4e-3]]], "study__tune_seeds": [8], "study__seeds": [3]}
    assert tiny_study.run(tmp_path, **changes).code == 0
    shutil.rmtree(tmp_path / "study" / "all")
    first = {"decay": {1e-3: 2.0, 2e-3: 1.0, 4e-3: 3.0}, "plain": {1e-3: 3.0, 2e-3: 1.0, 4e-3: 2.0}}
    set_tuning(tmp_path, first)
    with monkeypatch.context() as patch:  # as in earlier versions
        patch.setattr(tuning, "interpolate", lambda points, best, sign: (best.values, ""))
        assert tiny_study.run(tmp_path, **changes).code == 0
    outcome = tiny_study.run(tmp_path, **changes | {"study__seeds": [3, 5]})
    assert (outcome.code, read_rates(tmp_path)) == (0, dict.fromkeys(read_rates(tmp_path), 2e-3))
    assert len(read_rates(tmp_path)) == 4
    shutil.rmtree(tmp_path / "study" / "all")
    outcome = tiny_study.run(tmp_path, **changes)
    assert outcome.code == 0 and "decay, plain x 1 seed:" in outcome.out  # one program
    assert read_rates(tmp_path) == {"decay/seed_3": 0.00178, "plain/seed_3": 0.00224}
    set_tuning(tmp_path, first | {"plain": {1e-3: 2.0, 2e-3: 1.0, 4e-3: 3.0}})
    outcome = tiny_study.run(tmp_path, **changes | {"study__seeds": [3, 5]})
    assert outcome.code == 2 and "optim.learning_rate (0.00224 -> 0.00178)" in outcome.err and "plain" in outcome.err
    assert not list(tmp_path.glob("study/all/*/seed_5/summary.json"))


def test_an_arm_that_diverges_with_all_values_is_an_error(tmp_path):
    design = write_tuning(tmp_path, tied=[(None, 2), (1, None), (None, None)], usual=[(3, 1)] * 3)
    with raises(errors.RunError, "condition all", "arm tied", "study.tune"):
        tuning.read(tmp_path, design)


REFUSED = [
    ({"study__tune": [["optim.learning_rate", 0.1]]}, ["study.tune", "0.1"]),
    ({"study__tune": [["optim.learning_rate", []]]}, ["study.tune", "optim.learning_rate"]),
    ({"study__tune_seeds": [1, 3]}, ["study.tune_seeds", "3"]),
    ({"study__tune_seeds": []}, ["study.tune_seeds", "[]"]),
    ({"study__arms": tiny_study.ARMS}, ["arm fast", "optim.learning_rate", "study.tune"]),
    ({"study__tune": [["optim.rate", [1, 2]]]}, ["optim.rate"]),
    ({}, ["study.tune", '"dots"', "splits.make_splits"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_invalid_tuning_is_refused_in_one_sentence_before_training(tmp_path, changes, words):
    arms = [["lean", {"dots.bias": False}], ["base", {}]]
    outcome = tiny_study.run(tmp_path, **{"study__arms": arms, "study__tune": [RATES]} | changes)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and all(word in outcome.err for word in words)
    assert not (tmp_path / "study").exists()


def test_two_processes_share_the_programs_of_a_study(complete_study, tmp_path, monkeypatch):
    """While the first process trains the first program, a second one trains the second program, waits for the first,
    and is stopped there. Locks hold within a process as between two."""
    original, names, second = programs.train, [], []

    def train(job, *arguments):
        names.append(job.program.name)
        if len(names) == 1:
            second.append(tiny_study.run(tmp_path))
        original(job, *arguments)

    def stop(seconds):
        raise errors.Interrupted("stopped", 143)

    monkeypatch.setattr(programs, "train", train)
    monkeypatch.setattr(ablation.time, "sleep", stop)
    outcome = tiny_study.run(tmp_path)
    assert (outcome.code, outcome.err) == (0, "") and names == ["lean x 2 seeds", "fast, base x 2 seeds"]
    [outcome_of_second] = second
    page = tmp_path / "study" / "report.md"
    assert outcome_of_second.code == 143 and f"{page} holds the 4 of 6 runs that are finished" in outcome_of_second.err
    assert re.search(rf"waiting for lean x 2 seeds: .* is in use by .*process {os.getpid()}", outcome_of_second.out)
    assert "1 of 2 done" in outcome_of_second.out and "1 of 2 done" in outcome.out
    tiny_study.assert_equal_runs(tmp_path, complete_study, tiny_study.ALL)
    assert not list(tmp_path.glob("study/**/lock"))


def test_only_unfinished_rows_are_trained_if_another_process_has_trained_a_part(complete_study, tmp_path, monkeypatch):
    """The other process had one seed: it has finished two of the four rows of the second program."""
    original, names = programs.train, []

    def train(job, *arguments):
        names.append([run.name for run in job.program.runs])
        original(job, *arguments)
        if len(names) == 1:
            assert tiny_study.run(tmp_path, study__arms=tiny_study.ARMS[1:], study__seeds=[5]).code == 0

    monkeypatch.setattr(programs, "train", train)
    assert tiny_study.run(tmp_path).code == 0
    lean, rest = tiny_study.ALL[:2], tiny_study.ALL[2:]
    assert names == [lean, [name for name in rest if "seed_5" in name], [name for name in rest if "seed_3" in name]]
    losses, expected = (
        {name: summary["eval/loss"] for name, summary in tiny_study.summaries(folder).items()}
        for folder in (tmp_path, complete_study)
    )
    assert losses == pytest.approx(expected, rel=1e-5)


def test_seeds_that_devices_cannot_share_evenly_are_trained(complete_study, tmp_path):
    """Three seeds of two arms over four devices make eight rows. Two of them repeat the last run without effect."""
    arms = {"study__arms": [tiny_study.ARMS[1], ["base", {}]], "study__seeds": [3, 5, 7], "mesh__seed": 4}
    outcome = tiny_study.run(tmp_path, **arms)
    assert (outcome.code, outcome.err) == (0, "") and "seed=4" in outcome.out
    summaries, expected = tiny_study.summaries(tmp_path), tiny_study.summaries(complete_study)
    assert len(summaries) == 6 and not list(tmp_path.glob("study/checkpoints/*"))
    for name in tiny_study.ALL[2:]:
        assert summaries[name]["eval/loss"] == pytest.approx(expected[name]["eval/loss"], abs=1e-5)
    outcome = tiny_study.run(tmp_path, **arms | {"mesh__seed": 1})
    assert outcome.code == 0 and "6 of the runs finished before" in outcome.out


def test_points_of_a_grid_have_different_folders():
    """They differ even on a file system that ignores the case of letters."""
    grids = [["a/b", "a-b", "a b"], ["x" * 300, "x" * 299 + "y", "x" * 250], ["Rms", "rms"]]
    grids += [[[0.9, 0.99], [0.9, [0.99]]], ["1,b=2", "1-b=2"], [1e-3, 1e-2, 1]]
    for grid in grids:
        names = [tuning._name("arm", {"model.norm": value}) for value in grid]
        assert len({name.lower() for name in names}) == len(grid) and max(map(len, names)) <= 200
        assert all(re.fullmatch(r"[A-Za-z0-9_+.,=@-]+", name) for name in names)
