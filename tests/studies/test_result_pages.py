"""The scripts that draw and print the results in docs/, on runs with chosen losses; arms that are files of a user."""

import contextlib
import io
import json
import pathlib
import runpy
import types

import jax
import numpy as np
import published
import pytest
import study_folder
import tiny

from configs import (
    ladder,
    leave_one_out,
    positions,
    positions_wide,
    qk_heads,
    qk_matched,
    qk_positions,
    qk_synthetic,
    qk_widths,
)
from configs.arms import stochastic_depth
from experiments.config import settings as configs
from experiments.devices import mesh as meshes
from experiments.pretrained import open_model
from experiments.studies import figures as study_figures, results, statistics, study as studies
from tfm import shapes

ROOT = pathlib.Path(__file__).parents[2]
KINDS = ("none (causal mask)", "learned", "sinusoidal", "sinusoidal, scaled", "ALiBi")  # of positions, but rotary
FILES = ("multi_token", "stochastic_depth", "rotary")  # two arms of configs/arms, and the reference


def write_study(folder, config, losses):
    """Write the runs and the report of a study. losses: (condition, arm) -> the loss of each seed."""
    study = config.study
    arms, conditions = ([name for name, _ in entries] for entries in (study.arms, study.conditions))
    design = study_folder.make_study(arms, conditions=conditions or ["all"], seeds=study.seeds)
    for condition in design.conditions:
        for arm in design.arms:
            for seed, loss in zip(design.seeds, losses(condition.name, arm.name), strict=True):
                study_folder.write_run(folder, condition.name, arm.name, seed, metrics={"eval/loss": loss})
    results.write(folder, design, session=study_folder.PROVENANCE)


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    monkeypatch.setattr(study_figures, "draw", lambda *arguments, **options: [])


def run_script(name, folder, patch, *arguments):
    """Run a script of docs/ and return the rows that it prints as lists of cells. It writes its figure into folder."""
    script = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))
    patch.setitem(script["main"].__globals__, "__file__", str(folder / f"{name}.py"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        script["main"](*arguments)
    assert (folder / f"{name}.png").stat().st_size > 10_000
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.getvalue().splitlines() if "|" in line]


def test_the_script_on_positions_prints_and_draws_the_differences(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)

    def losses(condition, arm):
        gain = {"none": 0.3, "learned": 0.05, "alibi": -0.05 if condition == "D64_100" else 0.0}.get(arm, 0.0)
        return 2 + gain + draw.normal(0, 0.004, 10)

    wide, techniques = tmp_path / "wide", tmp_path / "techniques"
    write_study(wide, positions_wide.get_config(), losses)
    write_study(techniques, positions.get_config(), losses)
    rows = {name: cells for name, *cells in run_script("positions", tmp_path, monkeypatch, wide, techniques)}
    assert len(rows) == 10 and all(len(row) == 5 for row in rows.values())
    assert all("**+0.3" in cell or "**+0.29" in cell for cell in rows["none (causal mask)"])
    assert ["**" in cell for cell in rows["ALiBi"]] == [False, False, False, True, False]
    assert rows["ALiBi"][3].startswith("**-0.0") and "**" not in str(rows["label smoothing"])
    assert all(1.98 < float(cell) < 2.02 for cell in rows["loss of rotary positions"])
    script = runpy.run_path(str(ROOT / "docs" / "positions.py"))
    better, arms = statistics.BETTER, script["load"](wide)
    drawing = script["draw"](arms)
    assert drawing.get_suptitle() == ""  # here an arm is better
    hollow = [line for axes in drawing.axes for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == sum("**" not in cell for arm in KINDS for cell in [*rows[arm], rows[arm][1]])
    for arm in (arm for condition in arms.values() for arm in condition.values() if arm["difference"]):
        arm["difference"]["kind"] = arm["difference"]["kind"].replace(better, statistics.OPEN)
    assert script["draw"](arms).get_suptitle().startswith("Rotary positions have the lowest loss")


def test_the_script_on_the_ring_draws_loss_and_accuracy_of_every_score(tmp_path, monkeypatch):
    config = qk_synthetic.get_config()
    (tmp_path / "config.json").write_text(json.dumps({"config": config.to_dict()}))
    for i, (score, _) in enumerate(config.study.arms):
        for seed in config.study.seeds:
            rows = [{"step": n, "train/loss": 3 - n / 10, "eval/accuracy": n / 30 + i / 10} for n in (0, 10, 20)]
            metrics = {"eval/accuracy": i / 10}
            study_folder.write_run(tmp_path, "ring", score, seed, metrics=metrics, rows=rows)
    run_script("ring", tmp_path, monkeypatch, tmp_path)
    drawing = runpy.run_path(str(ROOT / "docs" / "ring.py"))["draw"](tmp_path)
    _, accuracy = drawing.axes
    curves = [line.get_ydata().tolist() for line in accuracy.lines if len(line.get_xdata()) == 3]
    assert [curve[0] for curve in curves[::6]] == pytest.approx([i / 10 for i in range(6)])
    labels = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert labels[0] == "no matrix: products of tokens" and labels[-1] == "two matrices" and len(labels) == 6
    assert len(curves) == 6 * (1 + 5)  # means and seeds


def test_the_script_on_the_ladder_compares_rungs_and_what_lacks_an_element(tmp_path, monkeypatch):
    draw, other, names = np.random.default_rng(0), np.random.default_rng(1), [name for name, _ in ladder.arms()]

    def losses_of_rungs(condition, arm):
        return 3 - 0.1 * min(names.index(arm), 3) + draw.normal(0, 0.002, 5)  # the first three steps help

    def losses_without(condition, arm):
        return 2 + 0.2 * (arm == "no_mlp") + other.normal(0, 0.002, 5)

    write_study(tmp_path / "ladder", ladder.get_config(), losses_of_rungs)
    write_study(tmp_path / "without", leave_one_out.get_config(), losses_without)
    folders = [tmp_path / name for name in ("ladder", "ladder", "without", "without")]
    rows = [row for row in run_script("ladder", tmp_path, monkeypatch, *folders) if row[0].startswith("`")]
    rungs, others = rows[:12], rows[24:34]
    assert [row[0].split("`")[1] for row in rungs] == names and rungs == rows[12:24]
    assert ["**-0." in row[4] for row in rungs] == [False, True, True, True, *[False] * 8]
    assert others == rows[34:] and {row[0].split("`")[1] for row in others if "**" in row[4]} == {"no_mlp"}
    assert others[0][0].startswith("`whole`") and others[0][4:] == ["", "", "", ""]


def test_the_steps_of_the_ladder_include_the_variance_by_tuning():
    compare = runpy.run_path(str(ROOT / "docs" / "ladder.py"))["compare_steps"]
    arms = [{"values": dict(enumerate(loss + np.arange(5) * 0.001 * sign))} for loss, sign in ((2.0, 1), (1.9, -1))]
    (plain,), (wide,) = compare(arms, 0.0), compare(arms, 0.01)
    assert plain.kind == statistics.BETTER and wide.kind == statistics.OPEN and wide.interval[0] < plain.interval[0]


def test_the_script_on_two_matrices_prints_and_draws_the_differences(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)

    def losses(positions, score):
        gain = (
            0.2 * (score == "tied" and positions != "none") - 0.1 * ("skew" in score) - 0.05 * (score == "tied_noself")
        )
        return 2 + gain + draw.normal(0, 0.002, 10)

    for config, name in ((qk_positions, "positions"), (qk_matched, "matched")):
        write_study(tmp_path / name, config.get_config(), losses)
    write_study(tmp_path / "heads", qk_heads.get_config(), lambda *_: draw.uniform(0.5, 1, 10))
    rows = run_script("qk", tmp_path, monkeypatch, *(tmp_path / name for name in ("heads", "positions", "matched")))
    names = ["learned", "rotary", "relative, buckets", "ALiBi", "none (causal mask)", "learned", "rotary"]
    like_for_like = [row for row in rows if len(row) == 2]
    rows = [row for row in rows if len(row) > 2]
    assert [row[0] for row in rows] == names
    assert [row[0] for row in like_for_like] == [f"not to itself: {name}" for name in names[:5]]
    assert all(row[1].startswith(("-0.05", "-0.04")) for row in like_for_like)
    assert [row[2].startswith("**+") for row in rows] == [True] * 4 + [False] + [True] * 2
    assert [sum(cell.startswith("**-") for cell in row) for row in rows] == [3] * 5 + [2] * 2  # of rank 2; tied_noself
    assert not any("**" in row[-1] for row in rows)  # two matrices, not to itself


def test_the_script_on_widths_and_steps_finds_the_surface_of_the_differences(tmp_path, capsys):
    script, draw, means = runpy.run_path(str(ROOT / "docs" / "qk_surface.py")), np.random.default_rng(0), {}
    for name, changes in qk_widths.get_config().study.conditions:
        w, t = np.log2(changes["model.D"] / 64), np.log2(changes["train.steps"] / 500)
        means[name] = -0.05 - 0.01 * w + 0.003 * t + 0.008 * t**2 + 0.002 * w * t
    write_study(
        tmp_path, qk_widths.get_config(), lambda size, arm: 2 + means[size] * (arm[0] == "t") + draw.normal(0, 1e-4, 5)
    )
    script["main"](tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 + 5 + 1 and lines[1].startswith(f"  64 features,  125 steps: {means['D64_steps_125']:+.3f}")
    found = [float(line.partition(": ")[2].split()[0]) for line in lines[11:16]]
    np.testing.assert_allclose(found, [-0.05, -0.01, 0.003, 0.008, 0.002], atol=3e-4)


def test_every_arm_of_leave_one_out_changes_the_whole_transformer():
    arms = dict(leave_one_out.get_config().study.arms)
    whole = arms.pop("whole")
    assert len(arms) == 9 and whole["model.position"] == "learned" and whole["model.block"] == "pre_norm"
    for name, changes in arms.items():
        changed = {key for key in whole | changes if changes.get(key) != whole.get(key)}
        assert changed == {*leave_one_out.WITHOUT[name]}, name


def test_the_script_on_skew_parts_prints_the_symmetry_and_the_rank_of_a_model(tmp_path, capsys):
    folder = published.save(tmp_path, "gpt2")
    runpy.run_path(str(ROOT / "docs" / "skew.py"))["main"]([folder])
    *_, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    score = open_model.open(folder).params["blocks"]["score"]
    Uq_MHKD, Uk_MHKD = (np.asarray(score[name], np.float64) for name in ("Uq_HKD", "Uk_HKD"))
    form_MHDD = np.einsum("mhkd,mhke->mhde", Uq_MHKD, Uk_MHKD)
    skew_MHDD = (form_MHDD - form_MHDD.swapaxes(2, 3)) / 2
    share_MH = (skew_MHDD**2).sum((2, 3)) / (form_MHDD**2).sum((2, 3))
    energy_MHR = np.cumsum(np.linalg.svd(skew_MHDD, compute_uv=False) ** 2, -1)
    rank_MH = 1 + (energy_MHR < 0.9 * energy_MHR[..., -1:]).sum(-1)  # singular values of a skew matrix are in pairs
    M, H, K, D = Uq_MHKD.shape
    assert cells[:4] == [f"`{folder.name}`", str(M), str(H), str(K)]
    assert float(cells[4]) == pytest.approx(np.median(1 - 2 * share_MH), abs=0.006)
    assert cells[7] == f"{np.median(rank_MH + rank_MH % 2):.0f} of {2 * K}"


def test_the_arms_of_the_positions_study_that_are_files_have_gradients(tmp_path):
    """Multi-token prediction has a second matrix and loss. Stochastic depth does not change the evaluation."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    config, sizes = positions.get_config(), {"model.M": 1, "model.D": 8, "train.steps": 3, "optim.warmup_steps": 0}
    arms = [arm for arm in config.study.arms if arm[0] in FILES]
    config.study.update(arms=arms, conditions=[["small", sizes]], seeds=[0])
    changes = {"text.source": str(tmp_path / "text.txt"), "text.N": 7, "train.batch_size": 3, "mesh.data": 1}
    config.update_from_flattened_dict(changes)
    settings = configs.Settings(config)
    params, losses, evaluations, gradients, key = {}, {}, {}, {}, jax.random.key(0)
    for run in studies.runs(settings, studies.read(settings)):
        task, arm = tiny.task_of(run.settings), run.arm
        inputs = jax.eval_shape(task.init, key), task.train[0]
        program, outputs = jax.make_jaxpr(task.loss, return_shape=True)(*inputs)
        params[arm], losses[arm], evaluations[arm] = {*shapes.flat(inputs[0])}, {*outputs[0]}, str(program)
        gradients[arm] = str(jax.make_jaxpr(tiny.gradient(task, meshes.make(data=1)))(*inputs, key))
        assert task.weights == ({"loss_later": 0.3} if arm == "multi_token" else {})
    assert params["multi_token"] - params["rotary"] == {"head/G2_WD"} and params["stochastic_depth"] == params["rotary"]
    assert losses["multi_token"] - losses["rotary"] == {"loss_later"}
    assert evaluations["stochastic_depth"] == evaluations["rotary"]
    assert gradients["stochastic_depth"] != gradients["rotary"]


def test_stochastic_depth_skips_blocks_of_sequences_and_scales_the_others(monkeypatch):
    monkeypatch.setattr(stochastic_depth.block, "pre_norm", lambda params, x_BND, *rest: (3 * x_BND, {}))
    x_BND = np.random.default_rng(0).standard_normal((199, 3, 2)).astype(np.float32)
    key_B = jax.random.split(jax.random.key(0), len(x_BND))
    skip = jax.jit(lambda key_B: stochastic_depth.skip_block({}, x_BND, None, types.SimpleNamespace(key_B=key_B))[0])
    np.testing.assert_allclose(skip(None), 3 * x_BND, rtol=1e-6)
    ratio_BND = np.asarray(skip(key_B)) / x_BND
    skipped_B = np.isclose(ratio_BND[:, 0, 0], 1)
    assert 5 <= skipped_B.sum() <= 40  # the expectation is 20
    expected_B = np.where(skipped_B, 1, 1 + 2 / 0.9)
    np.testing.assert_allclose(ratio_BND, np.broadcast_to(expected_B[:, None, None], x_BND.shape), rtol=1e-4)


def test_positions_has_five_kinds_three_widths_ten_seeds_and_warm_ups_of_a_tenth():
    study = positions.get_config().study
    assert len(study.arms) == 9 and study.arms[-1][0] == "rotary" and len(study.seeds) == 10
    assert {changes["model.D"] for _, changes in study.conditions} == {32, 64, 128}
    assert all(10 * x["optim.warmup_steps"] == x["train.steps"] for _, x in study.conditions)


def test_studies_that_add_the_variance_by_tuning_keep_their_level():
    simulate = runpy.run_path(str(ROOT / "docs" / "false_verdicts.py"))["simulate"]
    assert simulate(0.01, 3, True, True) < 0.05 < 0.1 < simulate(0.01, 3, True) < simulate(0.01, 1, False)
