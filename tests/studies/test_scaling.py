"""Laws of loss against compute: those that were put in are found, and nothing where the conditions are no sizes."""

import json
import math

import numpy as np
import pytest
import study_folder

from experiments.studies import figures, results, runs, scaling, statistics, styles, tables

SIZES = (16, 32, 64)
NOISE = [0.003, -0.002, 0.001]  # of seeds, which arms share


def left(folder, laws, *, sizes=SIZES, changes=None, noise=NOISE):
    """Conditions D_16, ... of which a step has D^2 FLOPs; laws: arm -> (a, b, E) of L = E + a (C / C_0)^-b."""
    names = [f"D_{D}" for D in sizes]
    study = study_folder.study([*laws], conditions=names, seeds=range(len(noise)))
    each = changes or [{"model.D": D, "study.threshold": 1.0 + D} for D in sizes]
    study = study._replace(
        conditions=[one._replace(changes=its) for one, its in zip(study.conditions, each, strict=True)]
    )
    for D, name in zip(sizes, names, strict=True):
        for arm, (a, b, E) in laws.items():
            x = D * D / (sizes[0] * sizes[-1])
            ends = [(E + a * x**-b) * math.exp(one) for one in noise]
            study_folder.losses(folder, name, {arm: ends}, flops_per_step=float(D * D))
    return study


def families(folder, study):
    return scaling.families(statistics.analyse(study, runs.load(folder, study)))


def test_laws_and_the_compute_for_the_same_loss_are_found(tmp_path):
    laws = {"worse": (2.2, 0.3, 0.0), "near": (2.0, 0.29, 0.0), "far": (9.0, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}
    study = left(tmp_path, laws, noise=[0.0] * 3)
    [family] = families(tmp_path, study)
    assert family.conditions == ["D_16", "D_32", "D_64"] and family.left_out == []
    assert family.middle == pytest.approx(300 * 16 * 64)  # 300 steps
    found = {law.name: law for law in family.laws}
    assert {name: (law.a, law.b, law.E) for name, law in found.items()} == {
        name: pytest.approx(numbers) for name, numbers in laws.items()
    }
    assert found["worse"].compute == pytest.approx(1.1 ** (1 / 0.3)) and found["near"].compute == pytest.approx(1)
    assert found["worse"].compute_interval == pytest.approx([found["worse"].compute] * 2)  # no noise
    assert (found["far"].compute, found["far"].compute_interval) == (None, None)  # 150 times: beyond its sizes
    assert all(law.misfit == pytest.approx(0, abs=1e-9) for law in family.laws)
    assert found["worse"].flops == [300.0 * D * D for D in SIZES]


def test_a_constant_is_fitted_from_five_sizes_on():
    x_I = np.geomspace(0.03, 30, 5)
    for E, sizes, rel in ((1.5, 5, 1e-3), (0.0, 5, 1e-2), (0.0, 4, 1e-9)):
        found = np.ravel(scaling.fit(x_I[:sizes], (E + 0.8 * x_I[:sizes] ** -0.4)[None]))
        assert found == pytest.approx((0.8, 0.4, E), rel=rel, abs=1e-3)
    a, b, E = scaling.fit(x_I[:4], (1.5 + 0.8 * x_I[:4] ** -0.4)[None])
    assert E[0] == 0 and 0 < b[0] < 0.4


def test_seeds_are_drawn_in_pairs(tmp_path):
    """What a seed does to both sides alike is in b, and but for that in no comparison."""
    [family] = families(tmp_path, left(tmp_path, {"worse": (2.1, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}))
    worse, base = family.laws
    for law in family.laws:
        assert law.b_interval[0] < 0.3 < law.b_interval[1] and law.b_interval[1] - law.b_interval[0] > 1e-4
    assert worse.compute_interval == pytest.approx([1.05 ** (1 / b) for b in worse.b_interval[::-1]], rel=1e-4)
    assert base.compute == pytest.approx(1)
    [family] = families(tmp_path / "2", left(tmp_path / "2", {"base": (2.0, 0.3, 0.0)}, noise=NOISE[:2]))
    assert (family.laws[0].b_interval, family.laws[0].compute_interval) == (None, None)  # of two seeds


def test_a_law_that_rises_reaches_nothing():
    mine = np.array([(2.0, -0.1, 0.0), (2.0, 0.1, 1.5), (2.0, 0.5, 0.0)]).T
    its = np.array([(1.0, 0.1, 0.0), (1.0, 0.1, 0.4), (0.5, 0.5, 0.5)]).T
    assert scaling.reaches(mine, its) == pytest.approx([np.inf, np.inf, 4])  # of the second E is above that loss


OTHER = {of: [{"model.D": 16}, {"model.D": 32}, {of: 7}] for of in ("text.N", "model.score")}  # data, models


@pytest.mark.parametrize("case", [*OTHER, "two sizes", "one size", "a size twice", "accuracy", "no FLOPs"])
def test_conditions_that_are_no_three_sizes_have_no_law(tmp_path, case):
    sizes = {"two sizes": (16, 64), "one size": (16, 16.01, 16.02), "a size twice": (16, 32, 64, 64.01)}.get(
        case, SIZES
    )
    metric = "eval/accuracy" if case == "accuracy" else "eval/loss"
    study = left(tmp_path, {"arm": (2.1, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}, sizes=sizes, changes=OTHER.get(case))
    finished = runs.load(tmp_path, study)
    if case == "accuracy":
        finished = [run._replace(summary=run.summary | {metric: run.summary["eval/loss"]}) for run in finished]
        study = study._replace(metric=dict.fromkeys(study.metric, metric))
    if case == "no FLOPs":
        finished = [run._replace(summary=run.summary | {"flops_per_step": None}) for run in finished]
    assert scaling.families(statistics.analyse(study, finished)) == []


def test_sizes_of_two_objectives_are_two_families_and_an_arm_without_a_size_is_left_out(tmp_path):
    changes = [{"model.D": D, "text.objective": of} for of in ("causal", "masked") for D in SIZES]
    study = left(tmp_path, {"arm": (2.1, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}, sizes=range(10, 16), changes=changes)
    summary = tmp_path / "D_10" / "arm" / "seed_1" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"diverged_at": 7}))
    first, second = families(tmp_path, study)
    assert (first.left_out, second.left_out) == (["arm"], []) and second.conditions == ["D_13", "D_14", "D_15"]
    assert tables.tabulate_laws(first).notes[-1].endswith('"arm".')
    finished = runs.load(tmp_path, study)
    *_, one, two = results.analyse_across(statistics.analyse(study, finished), finished)
    assert one.heading == "Loss against compute: D_10, D_11, D_12" and (one.kind, two.kind) == ("compute", "compute1")


def told(family):
    return [cell for row in tables.tabulate_laws(family).rows for cell in row]


def test_a_law_with_a_constant_is_told_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "RESAMPLES", 20)
    study = left(tmp_path, {"arm": (2.1, 0.3, 1.5), "base": (2.0, 0.3, 1.5)}, sizes=(8, 16, 32, 64, 128))
    [family] = families(tmp_path, study)
    E = family.laws[0].E
    assert E > 1 and any(f"{E:.4f}" in cell for cell in told(family))
    law = figures.draw_numbers(family, styles.choose_styles(study))[0].axes[0].lines[0]
    ends = [np.mean([*family.laws[0].values[i].values()]) for i in (0, -1)]
    assert law.get_ydata()[[0, -1]] == pytest.approx(ends, rel=1e-3)


def test_laws_are_drawn_and_the_report_tells_them(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "RESAMPLES", 20)
    study = left(tmp_path, {"arm": (2.1, 0.3, 0.0), "base": (2.0, 0.3, 0.0)})
    [family] = families(tmp_path, study)
    drawing, _ = figures.draw_numbers(family, styles.choose_styles(study))
    [panel], [arm, _] = drawing.axes, family.laws
    law, seeds, mean = panel.lines[:3]
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert law.get_ydata()[[0, -1]] == pytest.approx([np.mean([*arm.values[i].values()]) for i in (0, -1)], rel=1e-3)
    assert seeds.get_ydata().tolist() == [*arm.values[0].values()] and mean.get_ydata() == np.mean(seeds.get_ydata())
    assert tables.tabulate_laws(family).rows[1][-2:] == ["reference", "-"]
    monkeypatch.setattr(figures, "KINDS", {})  # those of one condition have tests of their own
    text = [file.read_text() for file in results.write(tmp_path, study, session={})[:4]]
    [of_json] = json.loads(text[0])["scaling"]
    assert of_json["laws"][0]["compute"] == pytest.approx(arm.compute) and of_json["reference"] == "base"
    numbers = [f"{arm.compute:.2f} times", f"{arm.b:.4f}", "Loss against compute"]
    assert all(number in one for number in numbers for one in text[1:])
    assert (tmp_path / "figures" / "compute.png").is_file() and "![compute](figures/compute.png)" in text[1]
