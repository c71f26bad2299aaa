"""Laws of loss against compute: simulated laws are recovered; other conditions than sizes have no law."""

import json
import math

import numpy as np
import pytest
import study_folder

from experiments.studies import (
    figures as study_figures,
    results,
    runs as study_runs,
    scaling,
    statistics,
    styles,
    tables,
)

SIZES = (16, 32, 64)
NOISE = [0.003, -0.002, 0.001]  # noise of each seed, equal in all arms


def simulate(folder, laws, *, sizes=SIZES, changes=None, noise=NOISE):
    """Write runs of the conditions D_16, ..., with D^2 FLOPs per step. Return the study.

    laws: {arm: (a, b, E)} for the loss E + a (C / C_0)^-b.
    """
    names = [f"D_{D}" for D in sizes]
    study = study_folder.make_study([*laws], conditions=names, seeds=range(len(noise)))
    changes = changes or [{"model.D": D, "study.threshold": 1.0 + D} for D in sizes]
    conditions = [x._replace(changes=change) for x, change in zip(study.conditions, changes, strict=True)]
    study = study._replace(conditions=conditions)
    for D, name in zip(sizes, names, strict=True):
        for arm, (a, b, E) in laws.items():
            x = D * D / (sizes[0] * sizes[-1])
            ends = [(E + a * x**-b) * math.exp(deviation) for deviation in noise]
            study_folder.write_losses(folder, name, {arm: ends}, flops_per_step=float(D * D))
    return study


def families(folder, study):
    return scaling.families(study_folder.analyse(folder, study))


def test_laws_and_the_compute_for_the_same_loss_are_recovered(tmp_path):
    laws = {"worse": (2.2, 0.3, 0.0), "near": (2.0, 0.29, 0.0), "far": (9.0, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}
    study = simulate(tmp_path, laws, noise=[0.0] * 3)
    [family] = families(tmp_path, study)
    assert family.conditions == ["D_16", "D_32", "D_64"] and family.left_out == []
    assert family.middle == pytest.approx(300 * 16 * 64)  # 300 steps
    for law in family.laws:
        assert (law.a, law.b, law.E) == pytest.approx(laws[law.name]) and law.misfit == pytest.approx(0, abs=1e-9)
    worse, near, far, _ = family.laws
    assert worse.compute == pytest.approx(1.1 ** (1 / 0.3)) and near.compute == pytest.approx(1)
    assert worse.compute_interval == pytest.approx([worse.compute] * 2)  # no noise
    assert (far.compute, far.compute_interval) == (None, None)  # 150 times: beyond its sizes
    assert [law.name for law in family.laws] == [*laws] and worse.flops == [300.0 * D * D for D in SIZES]


def test_a_constant_is_fitted_from_five_sizes_on():
    x_I = np.geomspace(0.03, 30, 5)
    for E, sizes, rel in ((1.5, 5, 1e-3), (0.0, 5, 1e-2), (0.0, 4, 1e-9)):
        law = np.ravel(scaling.fit(x_I[:sizes], (E + 0.8 * x_I[:sizes] ** -0.4)[None]))
        assert law == pytest.approx((0.8, 0.4, E), rel=rel, abs=1e-3)
    a, b, E = scaling.fit(x_I[:4], (1.5 + 0.8 * x_I[:4] ** -0.4)[None])
    assert E[0] == 0 and 0 < b[0] < 0.4


def test_seeds_are_drawn_in_pairs(tmp_path):
    """Noise that arms of a seed share changes b, and changes comparisons only through b."""
    [family] = families(tmp_path, simulate(tmp_path, {"worse": (2.1, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}))
    worse, base = family.laws
    for law in family.laws:
        assert law.b_interval[0] < 0.3 < law.b_interval[1] and law.b_interval[1] - law.b_interval[0] > 1e-4
    assert worse.compute_interval == pytest.approx([1.05 ** (1 / b) for b in worse.b_interval[::-1]], rel=1e-4)
    assert base.compute == pytest.approx(1)
    [family] = families(tmp_path / "2", simulate(tmp_path / "2", {"base": (2.0, 0.3, 0.0)}, noise=NOISE[:2]))
    assert (family.laws[0].b_interval, family.laws[0].compute_interval) == (None, None)  # two seeds are not enough


def test_a_law_that_rises_reaches_nothing():
    laws = np.array([(2.0, -0.1, 0.0), (2.0, 0.1, 1.5), (2.0, 0.5, 0.0)]).T
    references = np.array([(1.0, 0.1, 0.0), (1.0, 0.1, 0.4), (0.5, 0.5, 0.5)]).T
    assert scaling.reaches(laws, references) == pytest.approx([np.inf, np.inf, 4])  # the second E is above that loss


UNLIKE = {key: [{"model.D": 16}, {"model.D": 32}, {key: 7}] for key in ("text.N", "model.score")}  # data, models


@pytest.mark.parametrize("case", [*UNLIKE, "two sizes", "one size", "a size twice", "accuracy", "no FLOPs"])
def test_fewer_than_three_sizes_have_no_law(tmp_path, case):
    sizes = {"two sizes": (16, 64), "one size": (16, 16.01, 16.02), "a size twice": (16, 32, 64, 64.01)}
    laws = {"arm": (2.1, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}
    study = simulate(tmp_path, laws, sizes=sizes.get(case, SIZES), changes=UNLIKE.get(case))
    finished = study_runs.load(tmp_path, study)
    if case == "accuracy":
        finished = [run._replace(summary=run.summary | {"eval/accuracy": run.summary["eval/loss"]}) for run in finished]
        study = study._replace(conditions=[x._replace(metric="eval/accuracy") for x in study.conditions])
    if case == "no FLOPs":
        finished = [run._replace(summary=run.summary | {"flops_per_step": None}) for run in finished]
    assert scaling.families(statistics.analyse(study, finished)) == []


def test_sizes_of_two_objectives_are_two_families_and_an_arm_without_a_size_is_left_out(tmp_path):
    changes = [{"model.D": D, "text.objective": x} for x in ("causal", "masked") for D in SIZES]
    study = simulate(tmp_path, {"arm": (2.1, 0.3, 0.0), "base": (2.0, 0.3, 0.0)}, sizes=range(10, 16), changes=changes)
    summary = tmp_path / "D_10" / "arm" / "seed_1" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"diverged_at": 7}))
    first, second = families(tmp_path, study)
    assert (first.left_out, second.left_out) == (["arm"], []) and second.conditions == ["D_13", "D_14", "D_15"]
    assert tables.tabulate_laws(first).notes[-1].endswith('"arm".')
    files = results.write(tmp_path, study, session={})
    assert "## Loss against compute: D_10, D_11, D_12\n" in files[1].read_text()
    assert {"compute.png", "compute1.png"} < {file.name for file in files}


def test_laws_are_drawn_and_reported_with_their_constant(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "RESAMPLES", 20)
    study = simulate(tmp_path, {"arm": (2.1, 0.3, 1.5), "base": (2.0, 0.3, 1.5)}, sizes=(8, 16, 32, 64, 128))
    [family] = families(tmp_path, study)
    drawing, _ = study_figures.draw_laws(family, styles.choose_styles(study))
    [panel], [arm, _] = drawing.axes, family.laws
    law, seeds, mean = panel.lines[:3]
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log") and arm.E > 1
    assert law.get_ydata()[[0, -1]] == pytest.approx([np.mean([*arm.values[i].values()]) for i in (0, -1)], rel=1e-3)
    assert seeds.get_ydata().tolist() == [*arm.values[0].values()] and mean.get_ydata() == np.mean(seeds.get_ydata())
    assert tables.tabulate_laws(family).rows[1][-2:] == ["reference", "-"]
    monkeypatch.setattr(study_figures, "KINDS", {})  # other tests draw the figures of one condition
    text = [file.read_text() for file in results.write(tmp_path, study, session={})[:3]]
    [record] = json.loads(text[0])["scaling"]
    assert record["laws"][0]["compute"] == pytest.approx(arm.compute) and record["reference"] == "base"
    numbers = [f"{arm.compute:.2f} times", f"{arm.b:.4f}", f"{arm.E:.4f}", "Loss against compute"]
    assert all(number in page for number in numbers for page in text[1:])
    assert (tmp_path / "figures" / "compute.png").is_file() and "![compute](figures/compute.png)" in text[1]
