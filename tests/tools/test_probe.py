"""Symmetry and directionality of a model's layers: logged while it trains, and told of a trained or published one."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import reference_symmetry as reference
import tiny

from experiments import model as models
from experiments.engine import checkpoint, errors, log, loop, mesh as meshes, run as runs, train_step as steps
from experiments.pretrained import open_model
from experiments.tools import symmetry as command
from tfm import symmetry

NAMES = [f"{name}/{layer}" for name in ("symmetry", "symmetry_sum", "directionality") for layer in (1, 2)]


def by_hand(score: dict, m: int) -> list[float]:
    """s (mean over heads, median, of the sum) and d of layer m, by the reference."""
    Uq_HKD, Uk_GKD = score["Uq_HKD"][m], score["Uk_HKD" if "Uk_HKD" in score else "Uk_GKD"][m]
    Uk_HKD = np.repeat(Uk_GKD, len(Uq_HKD) // len(Uk_GKD), 0)
    Uq_HDK, Uk_HDK = (np.swapaxes(np.asarray(U_HKD, np.float64), 1, 2) for U_HKD in (Uq_HKD, Uk_HKD))
    of_heads = [reference.symmetry(reference.form([q], [k])) for q, k in zip(Uq_HDK, Uk_HDK, strict=True)]
    M_DD = reference.form(Uq_HDK, Uk_HDK)
    return [np.mean(of_heads), np.median(of_heads), reference.symmetry(M_DD), reference.directionality(M_DD)]


# A model.


def settings(**changes):
    return tiny.settings("language", **{f"model__{name}": value for name, value in changes.items()}).model


def test_both_sides_of_an_encoder_decoder_are_told():
    m = settings(K=5, score="tied")
    tree = jax.eval_shape(models.encoder_decoder(m, W=11, N=3, tied_output=True).init, jax.random.key(0))
    found = jax.eval_shape(models.probe(m), tree)
    sides = {f"{name.split('/')[0]}/{side}/{i}" for name in NAMES for side in ("encoder", "decoder") for i in "12"}
    assert set(found) == sides and all(x.shape == () for x in found.values())


def test_of_scores_without_a_form_nothing_is_told(tmp_path, monkeypatch):
    assert models.probe(settings(score="constant")) is None
    (tmp_path / "own_pair.py").write_text(
        "from tfm import variant\nfrom tfm.attention import score\nplain = variant.Variant(*score.tied[:2])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert models.probe(settings(score="own_pair:plain")) is None


# The step.


def counted(mesh, **options):
    """(metrics, calls): metrics of six steps of the linear task, and after how many the probe was computed."""
    calls = []

    def probe(params):
        jax.debug.callback(lambda: calls.append(1))
        return {"size": jnp.sum(jnp.square(params["G_CD"]))}

    task, (rate, optimiser) = tiny.linear_task()._replace(probe=probe), tiny.adamw()
    state, metrics = steps.initial_state(task, optimiser, seed=0, mesh=mesh), []
    step = steps.update(task=task, optimiser=optimiser, rate=rate, mesh=mesh, **options)
    for i in range(6):
        batch = dict(task.train[i])
        if i == 2:
            batch["x_BD"] = np.full_like(batch["x_BD"], np.nan)
        state, found = step(state, meshes.place_batch(mesh, batch))
        metrics.append(jax.device_get(found) | {"size": float(jnp.sum(jnp.square(state.params["G_CD"])))})
    jax.effects_barrier()
    return metrics, len(calls)


def test_the_probe_is_computed_after_the_steps_that_are_due_and_no_others():
    def due(n):
        return loop.due(n, every=3, steps=5)

    mesh = meshes.make(data=1)
    found, calls = counted(mesh, accumulation=2, nan="skip", probe_due=due)
    told = [metrics["probe/size"] for metrics in found]
    assert calls == 3 and told[0] == told[1] == told[3] == 0
    assert [told[n - 1] for n in (3, 5, 6)] == pytest.approx([found[n - 1]["size"] for n in (3, 5, 6)])
    assert found[2]["skipped"] == 1 and found[2]["size"] == found[1]["size"]  # a step that changed nothing is one
    plain, calls = counted(mesh, accumulation=2, nan="skip")
    assert calls == 0
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_equal(one, {name: x for name, x in other.items() if name != "probe/size"})


def test_what_happens_every_so_many_steps_and_at_the_end():
    assert [n for n in range(1, 8) if loop.due(n, every=3, steps=7)] == [3, 6, 7]
    assert [n for n in range(1, 8) if loop.due(n, every=0, steps=7)] == [7]


def test_on_eight_devices_the_probe_finds_what_it_finds_on_one_and_by_hand():
    changed = tiny.settings("vision", image__patch=4, model__H=4, model__D=32, model__K=3)

    def found(**sizes):
        mesh = meshes.make(**sizes)
        task = tiny.work_of(changed, mesh).task
        params = tiny.drawn(task)
        params["blocks"]["score"]["Uq_HKD"] = params["blocks"]["score"]["Uq_HKD"].at[..., 5].mul(9)  # a direction
        params = jax.device_put(params, meshes.shardings(mesh, params, task.layout))
        assert params["blocks"]["score"]["Uq_HKD"].is_fully_replicated == (mesh.size == 1)
        state = steps.State(jnp.int32(1), params, (), jax.random.key(0))
        probe = jax.jit(lambda state: steps.probed(task, state, lambda n: n == 1))
        due, other = ({name: float(x) for name, x in probe(state.replace(step=n)).items()} for n in jnp.arange(1, 3))
        assert due.keys() == {f"probe/{name}" for name in NAMES} and not any(other.values())
        return due, params["blocks"]["score"]

    (eight, _), (one, score) = found(data=2, fsdp=2, tensor=2), found(data=1)
    assert eight == pytest.approx(one, rel=1e-4, abs=1e-5) and all(abs(x) > 1e-3 for x in one.values())
    for layer in (1, 2):
        mean, _, of_sum, d = by_hand(score, layer - 1)
        numbers = [one[f"probe/{name}/{layer}"] for name in ("symmetry", "symmetry_sum", "directionality")]
        np.testing.assert_allclose(numbers, [mean, of_sum, d], rtol=1e-4, atol=1e-5)


# A run.


def launched(folder, task):
    looks = dict(log=["tensorboard", "symmetry"], train__save_every=3, train__log_every=2, mesh__data=1)
    return tiny.trained(folder, task, **looks)


def test_a_run_logs_what_is_probed_where_it_logs_the_loss_and_logs_the_same_where_it_goes_on(tmp_path, capsys):
    task = tiny.linear_task()._replace(probe=lambda params: {"size": jnp.sum(jnp.square(params["G_CD"]))})
    launched(tmp_path, task)
    rows = log.read(tmp_path)
    told = {row["step"]: row["size"] for row in rows if "train/loss" in row}
    assert sorted(told) == [2, 4, 5] and len(set(told.values())) == 3
    assert told[5] == pytest.approx(np.square(checkpoint.parameters(tmp_path / "checkpoints", 5)["G_CD"]).sum())
    assert not any(name.startswith(("train/probe", "train/size")) for row in rows for name in row)
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    (tmp_path / "summary.json").unlink()
    launched(tmp_path, task)
    assert "at step 3" in capsys.readouterr().out and log.read(tmp_path) == rows


def test_a_run_without_a_form_refuses_to_look_at_it():
    changed = tiny.settings("vision", model__score="constant", log=["symmetry"], mesh__data=1, image__patch=4)
    with pytest.raises(errors.UserError, match="log has symmetry, but there is nothing to look at"):
        runs.plan(changed, tiny.task_of(changed), runs.devices(changed))


def test_the_search_for_nan_finds_none_in_steps_without_a_probe():
    with jax.debug_nans(True):
        mesh = meshes.make(data=1)
        task, (rate, optimiser) = tiny.linear_task(), tiny.adamw()
        task = task._replace(probe=lambda params: {"x": 1.0 + params["b_C"][0]})
        state = steps.initial_state(task, optimiser, seed=0, mesh=mesh)
        step = steps.update(
            task=task, optimiser=optimiser, rate=rate, mesh=mesh, accumulation=1, probe_due=lambda n: n == 2
        )
        assert float(step(state, task.train[0])[1]["probe/x"]) == 0


# The command.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    return published.run(tmp_path_factory.mktemp("run") / "run", "vision", image__patch=4)


def told(checkpoint_) -> dict[str, list[float]]:
    """What the command prints: the numbers of each line."""
    outcome = tiny.command(command, checkpoint=checkpoint_)
    assert (outcome.code, outcome.err) == (0, "")
    head, *lines = outcome.out.splitlines()
    assert head.split("  ")[0] == "layer" and len(set(map(len, [head, *lines]))) == 1
    return {line.split()[0]: [float(x) for x in line.split()[1:]] for line in lines}


def is_that_of(found, score):
    """Equal to the reference's numbers, and the last line is their median."""
    M = len(score["Uq_HKD"])
    expected = np.array([by_hand(score, m) for m in range(M)])
    assert list(found) == [*(str(m + 1) for m in range(M)), "median"]
    np.testing.assert_allclose([found[str(m + 1)] for m in range(M)], expected, atol=6e-4)
    np.testing.assert_allclose(found["median"], np.median(expected, axis=0), atol=6e-4)


def test_the_command_tells_of_a_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_that_of(told(run), open_model.open(str(run)).params["blocks"]["score"])
    assert not any(tmp_path.iterdir())
    outcome = tiny.command(command, workdir=tmp_path / "out", checkpoint=run)
    assert (tmp_path / "out" / "symmetry.txt").read_text() == outcome.out


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_command_tells_of_a_published_model(family, tmp_path):
    folder = published.save(tmp_path, family)
    is_that_of(told(folder), open_model.open(str(folder)).params["blocks"]["score"])


def test_the_command_refuses_what_has_no_scores(run, tmp_path):
    def refused(name, **values):
        return tiny.refusal(command, checkpoint=published.changed(run, tmp_path / name, **values))

    assert "have no matrix to look at" in refused("a", model__score="constant")
    assert "does not hold the scores that its config.json describes: U_HKD (2, 2, 4, 8) is missing" in refused(
        "b", model__score="tied"
    )
    assert "has shape (2, 2, 4, 8) and not (3, 2, 4, 8)" in refused("c", model__M=3)


def test_layers_without_a_form_are_left_out_of_the_medians():
    s_MH = np.array([[np.nan, 0.25, 0.75], [np.nan] * 3])
    found = symmetry.Layer(s_MH, np.array([0.5, np.nan]), np.array([-0.5, 0.0]))
    rows = [line.split() for line in command.table({"encoder/": found}).splitlines()]
    assert rows[1:] == [
        ["encoder/1", "0.500", "0.500", "0.500", "-0.500"],
        ["encoder/2", "nan", "nan", "nan", "0.000"],
        ["encoder/median", "0.500", "0.500", "0.500", "-0.250"],
    ]
