"""Every experiment from its command to its figures, and every variant that a config can name, on eight devices."""

import gzip
import json
import math

import jax
import numpy as np
import pytest
import tiny

from experiments import language
from experiments import model as models
from experiments.data import download, tokenizer
from experiments.engine import by_name, compilation, errors, log, mesh, optim
from experiments.engine import run as runs
from experiments.engine import step as steps
from tfm import attention, block, mlp, norm, position
from tfm.attention import relative_position, score, value

PNG = b"\x89PNG\r\n\x1a\n"
SIZES = {
    "model.M": 2,
    "model.D": 8,
    "model.H": 2,
    "train.batch_size": 16,
    "train.evaluate_batch": 64,
    "sample.max_new_tokens": 20,
}
QUICK = {"train.steps": 2, "optim.warmup_steps": 1, "train.log_every": 1}

# What each run changes. Together they name every variant (a test below says so), several at once; of the scores some.
RUNS = {
    "causal": {
        "text.N": 16,
        "model.M": 1,
        "model.D": 32,
        "train.steps": 60,
        "train.log_every": 20,
        "train.evaluate_every": 30,
        "optim.learning_rate": 0.01,
        "sample.prompt": "A king",
    },
    "causal characters": {
        "text.N": 7,
        "text.tokenizer": "characters",
        "text.tied_output": True,
        "sample.prompt": "A",
        "model.score": "tied",
        "model.scale": "1/sqrt(D)",
        "model.norm": "token_plain",
        "model.mlp": "relu",
        "model.position": "sinusoidal",
        "model.block": "post_norm",
        "model.final_norm": False,
        "model.bias": False,
        "model.remat": True,
        "model.unroll": 1,
        "optim.schedule": "linear",
        "optim.clip": 0.0,
        "train.accumulation": 2,
    },
    "masked": {
        "text.objective": "masked",
        "text.N": 31,
        "text.transform": True,
        "model.score": "none",
        "model.scale": "1",
        "model.value": "full_rank",
        "model.norm": "rms",
        "model.mlp": "gelu_tanh",
        "model.embed_norm": True,
        "model.segments": 2,
        "model.relative_position": "buckets",
        "optim.schedule": "constant",
    },
    "prefix": {
        "text.objective": "prefix",
        "text.N": 32,
        "model.relative_position": "rotary_halves",
        "model.mlp": "swiglu",
        "model.attention": "flash",
        "model.compute_dtype": "bfloat16",
        "model.window": 11,
        "model.dropout": 0.1,
        "model.remat": True,
        "sample.prompt": "A king",
    },
    "digits": {
        "image.patch": 4,
        "image.shift": 1,
        "model.norm": "batch",
        "model.value": "identity",
        "model.mlp": "two_hidden_relu",
        "model.position": "learned_concatenated",
        "model.relative_position": "relative",
        "model.dropout": 0.2,
        "model.embed_norm": True,
        "optim.schedule": "wsd",
    },
    "idx": {
        "image.head": "class_token",
        "image.patch": 3,
        "model.position": "none",
        "model.relative_position": "rotary",
        "model.norm": "instance",
        "model.mlp": "two_hidden_gelu",
        "model.unroll": 1,
    },
    "npz": {
        "image.patch": 2,
        "model.K": 3,
        "model.F": 5,
        "model.remat": True,
        "model.score": "constant",
        "model.position": "sinusoidal_concatenated",
        "model.relative_position": "alibi",
        "model.attention": "fused",
        "model.window": 2,
        "mesh.data": 2,
    },
}
TRAINED = ("causal", "masked", "prefix", "idx")  # of the others the step is made, which compiles nothing
FIGURES = {"language": {"loss", "attention"}, "vision": {"loss", "predictions", "confusion", "attention"}}


def experiment_of(name):
    return "language" if name in ("causal", "causal characters", "masked", "prefix") else "vision"


def source(name, folder):
    """The data of a run that has none of its own, written to the folder."""
    rng = np.random.default_rng(0)
    if experiment_of(name) == "language":
        (folder / "text.txt").write_bytes(tiny.TEXT * 3)
        return {"text.source": str(folder / "text.txt")}
    if name == "idx":
        for part, n in (("train", 40), ("t10k", 23)):
            arrays = rng.integers(0, 256, (n, 6, 9), np.uint8), np.arange(n, dtype=np.uint8) % 3
            for kind, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
                header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
                (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
        return {"image.source": str(folder)}
    if name == "npz":
        np.savez(folder / "colours.npz", x=rng.random((70, 4, 6, 3), np.float32), y=np.arange(70) % 5)
        return {"image.source": str(folder / "colours.npz")}
    return {}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A function from the name of a run to (outcome, folder, changes); each is run once."""
    done = {}

    def run(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("run")
            changes = SIZES | QUICK | source(name, folder) | RUNS[name]
            if "sample.max_new_tokens" in changes and (experiment_of(name) == "vision" or name == "masked"):
                del changes["sample.max_new_tokens"]
            file = tiny.config_file(folder, experiment_of(name), **changes)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)
                outcome = tiny.run("--config", file, "--workdir", str(folder / "run"))
            done[name] = outcome, folder / "run", changes
        return done[name]

    return run


@pytest.mark.parametrize("name", [name for name in RUNS if name not in TRAINED])
def test_the_step_of_a_run(name, tmp_path):
    changes = tiny.TRAIN | SIZES | source(name, tmp_path) | RUNS[name]
    if experiment_of(name) == "vision":
        del changes["sample.max_new_tokens"]
    settings = tiny.settings(experiment_of(name), model=False, **changes)
    task = tiny.task_of(settings)
    plan = runs.plan(settings, task, runs.devices(settings))
    state = steps.abstract_state(task, plan.optimiser, mesh=plan.mesh)
    batch = mesh.abstract_batch(plan.mesh, task.train[0])
    after, metrics = jax.eval_shape(plan.step, state, batch, steps.abstract_alive(plan.mesh))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert all(x.shape == () for x in metrics.values())


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_from_its_command_to_its_figures(finished, name):
    outcome, folder, changes = finished(name)
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((folder / "summary.json").read_text())
    experiment, last = experiment_of(name), changes["train.steps"]
    assert (summary["experiment"], summary["steps"]) == (experiment, last)
    assert summary["devices"] == changes.get("mesh.data", 8)
    assert summary["commit"] == json.loads((folder / "config.json").read_text())["commit"]
    rows = log.read(folder)
    assert max(row["step"] for row in rows) == last
    for row in rows:
        assert all(math.isfinite(number) for number in row.values())
    assert summary["eval/loss"] > 0 and 0 <= summary["eval/accuracy"] <= 1 and 0 < summary["baseline/accuracy"] < 1
    drawn = {file.stem: file for file in (folder / "figures").iterdir()}
    assert drawn.keys() == FIGURES[experiment]
    for file in drawn.values():
        assert file.read_bytes().startswith(PNG) and str(file) in outcome.out
    for words in ("total", "FLOP per step", "eval/loss", "eval/accuracy", "tokens/s", "compiling", "most frequent"):
        assert words in outcome.out
    assert (folder / "checkpoints" / str(last)).is_dir()
    assert (folder / "sample.txt").exists() == (experiment == "language")


def test_causal_training_learns_and_writes_text(finished):
    outcome, folder, changes = finished("causal")
    rows = log.read(folder)
    first, last = rows[0]["train/loss"], [row for row in rows if "train/loss" in row][-1]["train/loss"]
    assert last < 0.8 * math.log(256) and last < first
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
    written = (folder / "sample.txt").read_text(encoding="utf-8")
    assert written.startswith("A king") and len(written.encode()) >= len("A king") + 20
    assert written in outcome.out and str(folder / "sample.txt") in outcome.out


def test_hidden_words_are_filled_in(finished):
    outcome, folder, changes = finished("masked")
    blocks = (folder / "sample.txt").read_text(encoding="utf-8").strip().split("\n\n")
    assert len(blocks) == 4
    for text in blocks:
        hidden, filled, truth, right = text.split("\n")
        assert hidden.startswith("hidden: ") and filled.startswith("filled: ") and truth.startswith("truth:  ")
        assert len(truth) == len("truth:  ") + changes["text.N"]
        seen = hidden.removeprefix("hidden: ")
        assert len(seen) == changes["text.N"]
        differ = [at for at, (a, b) in enumerate(zip(seen, truth.removeprefix("truth:  "), strict=True)) if a != b]
        assert all(seen[at] == "_" for at in differ)
        count = int(right.split()[2])
        assert len(differ) <= count <= seen.count("_")
        assert text in outcome.out


def test_the_random_images_are_told_apart_from_a_guess(finished):
    """23 images in three classes 0, 1, 2, 0, 1, ...: the most frequent training class, 0, is 8 of them."""
    assert json.loads((finished("idx")[1] / "summary.json").read_text())["baseline/accuracy"] == pytest.approx(8 / 23)


def test_the_baseline_of_text_is_the_most_frequent_training_token(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"a" * 60 + b"b" * 30 + b"abbbaabbbb")  # the last ten are held out
    task = tiny.task_of(tiny.settings("language", text__source=str(tmp_path / "text.txt"), text__N=4))
    assert task.baseline["accuracy"] == pytest.approx(2 / 9)  # of "bbbaabbbb", what follows the first
    assert task.tokens_per_example == 4


def test_only_masked_words_see_what_comes_after_them_and_padding_is_seen_by_none(tmp_path):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    losses = {}
    for objective in ("causal", "masked"):
        task = tiny.task_of(
            tiny.settings("language", text__source=str(tmp_path / "text.txt"), text__N=7, text__objective=objective)
        )
        measure = jax.jit(task.loss_and_metrics)
        batch = dict(task.train[0]) | {"weight_BN": np.float32(np.arange(7) < 3) * np.ones((16, 1), np.float32)}

        params = tiny.drawn(task)

        def loss(changed, measure=measure, params=params, batch=batch, **arrays):
            w_BN = np.where(np.arange(7) == changed, ord("#"), batch["w_BN"])
            return float(measure(params, batch | arrays | {"w_BN": w_BN}, None)["loss"][0])

        losses[objective] = [loss(changed) for changed in (None, 2, 3, 6)]
        if objective == "masked":
            short = {"valid_BS": np.arange(7) < np.full((16, 1), 5)}
            assert loss(None, **short) == loss(5, **short) == loss(6, **short) != loss(None)
    nothing, at_2, at_3, at_6 = losses["causal"]
    assert nothing == at_3 == at_6 != at_2
    assert len(set(losses["masked"])) == 4


def test_the_evaluation_part_of_images_is_never_shifted():
    tasks = [tiny.task_of(tiny.settings("vision", image__patch=4, image__shift=shift)) for shift in (0, 2)]
    still, shifted = ([task.train[0]["image_BYXZ"], task.evaluation[0]["image_BYXZ"]] for task in tasks)
    assert np.array_equal(still[1], shifted[1]) and not np.array_equal(still[0], shifted[0])


def test_the_model_has_the_sizes_of_the_config(tmp_path):
    task = tiny.task_of(tiny.settings("vision", image__patch=4, image__head="class_token", model__K=3, model__F=5))
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert params["blocks"]["score"]["Uq_HKD"].shape == (2, 2, 3, 8)
    assert params["blocks"]["mlp"]["W1_FD"].shape == (2, 5, 8)
    assert params["position"]["P_ND"].shape == (5, 8) and task.tokens_per_example == 5
    assert params["head"]["G_CD"].shape == (10, 8) and params["class"]["c_D"].shape == (8,)


def listed(call, *arguments):
    """The names that the refusal of a wrong one lists."""
    with pytest.raises(errors.UserError) as caught:
        call(*arguments)
    return set(str(caught.value).split("are: ")[1].split(", "))


@pytest.mark.parametrize("name", by_name.candidates(score))
def test_every_score_has_a_gradient_in_a_model_of_words(name, tmp_path):
    """Shapes and types of what a step computes, without compiling it; their numbers are in test_score, test_heads."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    changes = dict(text__source=str(tmp_path / "text.txt"), text__N=8, model__score=name)
    for more in ({}, {"model__compute_dtype": "bfloat16", "model__attention": "flash", "model__bias": False}):
        task = tiny.task_of(tiny.settings("language", **changes | more))

        def total(params, task=task):
            return task.loss_and_metrics(params, task.train[0], None)["loss"][0]

        params = jax.eval_shape(task.init, jax.random.key(0))
        loss, gradient = jax.eval_shape(jax.value_and_grad(total), params)
        assert loss.shape == () and loss.dtype == np.float32
        assert jax.tree.map(lambda leaf: leaf.shape, gradient) == jax.tree.map(lambda leaf: leaf.shape, params)


def test_together_the_runs_name_every_variant():
    def schedule(name):
        optim.schedule(name, peak=1.0, steps=2, warmup_steps=1, final_fraction=0.1)

    offered = {
        "model.value": set(by_name.candidates(value)),
        "model.norm": set(by_name.candidates(norm)),
        "model.mlp": set(by_name.candidates(mlp)),
        "model.position": set(by_name.candidates(position)),
        "model.scale": set(score.SCALES),
        "model.block": set(block.ORDERS),
        "model.attention": set(attention.IMPLEMENTATIONS),
        "model.final_norm": {True, False},
        "model.bias": {True, False},
        "model.remat": {True, False},
        "model.unroll": {0, 1},
        "text.objective": set(language.OBJECTIVES),
        "text.tokenizer": set(tokenizer.KINDS),
        "text.tied_output": {True, False},
        "model.relative_position": set(by_name.candidates(relative_position)),
        "model.compute_dtype": set(models.DTYPES),
        "model.embed_norm": {True, False},
        "text.transform": {True, False},
        "image.head": set(models.CLASS_HEADS),
        "optim.schedule": listed(schedule, "?"),
    }
    defaults = tiny.fields()
    used = {key: {run.get(key, defaults[key]) for run in RUNS.values()} for key in offered}
    assert used == offered
    assert "tinyshakespeare" in download.NAMED  # data sets that are downloaded are not run here
