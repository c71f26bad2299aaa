"""What a user adds in files of their own: experts with a balance loss, metrics, watches, a second target.

The files are those of the guides.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.engine import by_name, checkpoint, errors, mesh as meshes, run_plan, train_step, watch as watches
from experiments.model import losses
from experiments.tools import evaluate, sample
from tfm import loss, mlp, norm, variant

LANGUAGE = dict(text__N=8, text__tokenizer="characters")


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """Return a folder with the files of both guides, from which Python imports them, and a text."""
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    for page in ("your_experts", "two_tokens"):
        text = (by_name.ROOT / "docs" / "guides" / f"{page}.md").read_text(encoding="utf-8")
        for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            name = re.match(r"# (my_\w+)\.py\n", code)[1]
            monkeypatch.delitem(sys.modules, name, raising=False)
            (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "text.txt").write_bytes(tiny.TEXT[:900] * 3)
    return tmp_path


def settings(folder, experiment="language", **changes):
    return tiny.settings(experiment, text__source=str(folder / "text.txt"), **LANGUAGE | changes)


def take_step(values, devices):
    """Return the parameters and the metrics after one step."""
    mesh = meshes.make(data=devices)
    work = tiny.work_of(values, mesh)
    plan = run_plan.make_plan(values, work.task, mesh)
    state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=mesh)
    state, metrics = plan.step(state, meshes.place_batch(mesh, plan.task.train[0]), np.True_)
    held_out = train_step.evaluator(plan.task, mesh)(state.params)
    return jax.device_get((state.params, metrics)), held_out


def test_experts_on_two_devices_equal_one_and_their_balance_is_measured(guide):
    values = settings(guide, model__mlp="my_experts:experts")
    (params, metrics), held_out = take_step(values, 1)
    (params_2, metrics_2), held_out_2 = take_step(values, 2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), params, params_2)
    for one, two in ((metrics, metrics_2), (held_out, held_out_2)):
        assert 1 <= one["loss_balance"] < 4
        np.testing.assert_allclose([one[name] for name in sorted(one)], [two[name] for name in sorted(one)], rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_gradient_is_that_of_the_loss_and_the_weighted_measures(guide, accumulation):
    values = settings(guide, model__mlp="my_experts:experts")
    task, mesh = tiny.work_of(values, meshes.make(data=1)).task, meshes.make(data=1)
    assert task.weights == {"loss_balance": 0.01}
    task = task._replace(weights={"loss_balance": 3.0})
    params, batch = tiny.draw_params(task), task.train[0]
    specs = train_step.gradient_specs(params, batch, task, mesh)

    def gradient(params, batch, key):
        return train_step.gradient(params, batch, key, task=task, mesh=mesh, accumulation=accumulation)

    grads, *_ = jax.jit(meshes.sharded(gradient, mesh, **specs))(params, batch, jax.random.key(0))

    def total(params):
        parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
        sums = []
        for i in range(accumulation):
            metrics, _ = train_step.measure(task, params, jax.tree.map(lambda x, i=i: x[i], parts))
            mean, count = (a / b for a, b in (metrics["loss"], metrics["loss_balance"]))
            sums.append(mean + 3.0 * count)
        return sum(sums) / accumulation  # all parts have equally many tokens

    expected = jax.jit(jax.grad(total))(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), grads, expected)
    assert np.abs(grads["blocks"]["mlp"]["R_XD"]).max() > 1e-3


def test_measures_of_all_stages_and_layers_are_added(monkeypatch):
    def count(stage):
        def apply(*arrays, **options):
            return stage.apply(*arrays, **options), {"calls": (jnp.float32(2), jnp.float32(1))}

        return stage._replace(apply=apply, measures={"calls": 0.0})

    monkeypatch.setattr(mlp, "gelu", count(mlp.gelu))
    monkeypatch.setattr(norm, "token", count(norm.token))
    values = tiny.settings("vision")
    assert tiny.task_of(values).weights == {}
    (_, metrics), held_out = take_step(values, 1)
    assert metrics["calls"] == held_out["calls"] == 2  # a mean over stages
    task = tiny.task_of(values)
    (total, calls), _ = train_step.measure(task, tiny.draw_params(task), task.train[0])[0]["calls"], 0
    assert calls == 2 * 3 + 1 and total == 2 * calls  # two norms and an MLP in two layers, and the last norm


def gelu(result):
    """Return an MLP whose result has this form."""
    return lambda params, x_BND: result(mlp.gelu.apply(params, x_BND))


PAIR = (jnp.float32(1), jnp.float32(1))
silent = variant.Variant(mlp.gelu.init, gelu(lambda y: y), measures={"loss_x": 1.0})
undeclared = variant.Variant(mlp.gelu.init, gelu(lambda y: (y, {"loss_x": PAIR})))
renamed = variant.Variant(mlp.gelu.init, gelu(lambda y: (y, {"loss_y": PAIR})), measures={"loss_x": 1.0})
scalar = variant.Variant(mlp.gelu.init, gelu(lambda y: (y, {"x": y.mean()})), measures={"x": 0.0})
vector = variant.Variant(mlp.gelu.init, gelu(lambda y: (y, {"x": (y[0], y[1])})), measures={"x": 0.0})
reserved = variant.Variant(mlp.gelu.init, gelu(lambda y: (y, {"loss": PAIR})), measures={"loss": 1.0})


@pytest.mark.parametrize("name", ["silent", "undeclared", "renamed", "scalar", "vector", "reserved"])
def test_measures_that_do_not_agree_with_their_declaration_are_refused(name):
    with raises(errors.UserError, f"model.mlp = test_extension:{name}"):
        tiny.task_of(tiny.settings("vision", model__mlp=f"test_extension:{name}"))


def test_two_stages_cannot_weight_a_measure_differently(monkeypatch):
    monkeypatch.setattr(mlp, "gelu", mlp.gelu._replace(measures={"loss_x": 1.0}))
    monkeypatch.setattr(norm, "token", norm.token._replace(measures={"loss_x": 2.0}))
    with pytest.raises(ValueError, match=r"loss_x.*2\.0.*1\.0"):
        tiny.task_of(tiny.settings("vision"))


# Losses and metrics by name


def logits_of(C=7):
    draw = np.random.default_rng(0)
    return draw.standard_normal((5, 3, C), np.float32), draw.integers(0, C, (5, 3)), draw.integers(0, 2, (5, 3)) * 1.0


def test_losses_by_name_equal_their_definitions():
    (logits, target, weight), numbers = logits_of(), [0.5, 1, 2, 0, 1, 1, 3]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = np.eye(7)[target]
    smooth = -((0.9 * one_hot + 0.1 / 7) * np.log(p)).sum(-1)
    weighted = -(one_hot * np.log(p)).sum(-1) * np.array(numbers)[target]
    for name, total, count in (
        ("label_smoothing:0.1", (smooth * weight).sum(), weight.sum()),
        ("class_weights:0.5,1,2,0,1,1,3", (weighted * weight).sum(), (np.array(numbers)[target] * weight).sum()),
    ):
        chosen = losses.choose_loss(tiny.settings("vision", train__loss=name))
        np.testing.assert_allclose(chosen(logits, target, weight)["loss"], (total, count), rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["label_smoothing", "label_smoothing:1", "label_smoothing:0.1,0.2", "class_weights:1,-2", "class_weights:x"]
)
def test_losses_with_wrong_numbers_are_refused(name):
    with raises(errors.UserError, f"train.loss = {name}"):
        losses.choose_loss(tiny.settings("vision", train__loss=name))


@pytest.mark.parametrize(
    ("changes", "source"),
    [({}, "loss"), ({"train.loss": "label_smoothing:0.5", "train.metrics": ["cross_entropy"]}, "cross_entropy")]
    + [({"train.loss": "label_smoothing:0.5"}, None)],
)
def test_bits_per_byte_come_from_the_cross_entropy_alone(guide, changes, source):
    rows = [{"step": 1, "eval/loss": 2.0, "eval/cross_entropy": 1.0}]
    rows = rows if source else [{"step": 1, "eval/loss": 2.0}]
    values = settings(guide, **{name.replace(".", "__"): value for name, value in changes.items()})
    _, (_, numbers), _ = tiny.make_figures(values, guide, rows)
    expected = {"loss": 2.0, "cross_entropy": 1.0}.get(source)
    assert ("eval/bits_per_byte" in numbers) == (source is not None)
    if source:  # the tokens are characters of one byte
        np.testing.assert_allclose(numbers["eval/bits_per_byte"], expected / np.log(2), rtol=0.02)


def test_as_many_class_weights_as_classes():
    chosen = losses.choose_loss(tiny.settings("vision", train__loss="class_weights:1,2"))
    with raises(errors.UserError, "train.loss", "2 class weights", "7 classes"):
        chosen(*logits_of())


def test_metrics_by_name(guide):
    logits, target, weight = logits_of()
    chosen = losses.choose_loss(tiny.settings("vision", train__metrics=["top5", "cross_entropy", "my_metrics:rank"]))
    metrics = chosen(logits, target, weight)
    rank = (logits > np.take_along_axis(logits, target[..., None], -1)).sum(-1)
    np.testing.assert_allclose(metrics["rank"], ((rank * weight).sum(), weight.sum()))
    np.testing.assert_allclose(metrics["top5"], (((rank < 5) * weight).sum(), weight.sum()))
    np.testing.assert_allclose(metrics["cross_entropy"], loss.cross_entropy(logits, target, weight))


best_of_two = (lambda logits, target, weight: (weight.sum(), weight.sum())), "best"
single = (lambda logits, target, weight: weight.sum()), "more"
accuracy = (lambda logits, target, weight: (weight.sum(), weight.sum())), "more"


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["top6"], ("top6", "top5")),
        (["top5", "top5"], ("top5",)),
        (["test_extension:accuracy"], ("accuracy",)),
        (["test_extension:best_of_two"], ("best_of_two", "more", "less")),
        (["test_extension:single"], ("single", "(sum, count)")),
    ],
)
def test_metrics_that_do_not_fit_are_refused(metrics, words):
    with raises(errors.UserError, *words):
        losses.choose_loss(tiny.settings("vision", train__metrics=metrics))


def test_metrics_are_refused_where_there_are_no_logits():
    values = tiny.settings("masked_image", train__metrics=["top5"])
    mesh = meshes.make(data=1)
    with raises(errors.UserError, "train.metrics", "top5"):
        run_plan.make_plan(values, tiny.work_of(values, mesh).task, mesh)


@pytest.mark.parametrize(
    ("metric", "better"), [("eval/rank", "less"), ("eval/loss_balance", "less"), ("eval/top5", "more"), ("", "more")]
)
def test_a_metric_says_which_values_are_better(metric, better):
    best = checkpoint.choose_best(metric, {"rank": "less", "top5": "more"})
    assert best == (metric, better)
    if metric:
        sign = {"less": -1, "more": 1}[better]
        assert checkpoint.score({metric: 2.0}, best) == 2 * sign
    with raises(errors.UserError, "train.keep_best", "eval/dropped"):
        checkpoint.choose_best("eval/dropped", {})


def test_a_metric_of_the_users_decides_which_checkpoint_is_kept(guide):
    flags = {"train.metrics": '["my_metrics:rank", "top5"]', "train.keep_best": "eval/rank", "mesh.data": "1"}
    flags |= {"text.source": str(guide / "text.txt"), "train.steps": "6", "train.evaluate_every": "2"}
    flags |= {name: str(value) for name, value in (tiny.MODEL | {"train.batch_size": 16, "text.N": 8}).items()}
    config, folder = tiny.config_file(guide, "language"), guide / "run"
    arguments = [f"--config.{name}={value}" for name, value in flags.items()]
    outcome = tiny.run("--config", config, "--workdir", str(folder), *arguments)
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    ranks = {row["step"]: row["eval/rank"] for row in rows if "eval/rank" in row}
    assert summary["checkpoints"]["best"]["eval/rank"] == min(ranks.values())
    assert summary["better"] == {"rank": "less", "top5": "more"} and (folder / "source" / "my_metrics.py").is_file()


# Watches


def measure_second_block(tree):
    """Return the norm of the parameters of the second block."""
    return np.sqrt(sum(np.sum(np.square(x[1])) for x in jax.tree.leaves(tree["blocks"])))


def test_watches_see_the_gradient_the_updates_and_the_parameters(guide):
    values = settings(guide, train__watch=["my_watch:cosine", "gradient_norms", "update_ratios"], optim__clip=0.0)
    mesh = meshes.make(data=2)
    plan = run_plan.make_plan(values, tiny.work_of(values, mesh).task, mesh)
    state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=mesh)
    batch, seen = meshes.place_batch(mesh, plan.task.train[0]), []
    for _ in range(2):
        before = jax.device_get(state.params)
        state, metrics = plan.step(state, batch, np.True_)
        metrics = jax.device_get(metrics)
        seen.append((metrics, jax.device_get(state.watch[0])))
        norms = [x for name, x in metrics.items() if name.startswith("gradient_norm/")]
        assert {"gradient_norm/block_1", "gradient_norm/block_2", "gradient_norm/embed"} <= metrics.keys()
        np.testing.assert_allclose(np.sqrt(np.sum(np.square(norms))), metrics["gradient_norm"], rtol=1e-5)
        change = jax.tree.map(lambda new, old: new - old, jax.device_get(state.params), before)
        np.testing.assert_allclose(
            metrics["update_ratio/block_2"], measure_second_block(change) / measure_second_block(before), rtol=1e-3
        )
    (first, gradient), (second, later) = seen
    flat = [np.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (gradient, later)]
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    assert first["gradient_cosine"] == 0 and abs(second["gradient_cosine"] - cosine) < 1e-5


def test_a_skipped_step_does_not_change_the_state_of_a_watch(guide):
    values = settings(guide, train__watch=["my_watch:cosine"], train__nan="skip")
    mesh = meshes.make(data=1)
    plan = run_plan.make_plan(values, tiny.work_of(values, mesh).task, mesh)
    state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=mesh)
    state = state.replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))
    state, metrics = plan.step(state, meshes.place_batch(mesh, plan.task.train[0]), np.True_)
    assert metrics["skipped"] == 1 and all(np.all(x == 0) for x in jax.tree.leaves(state.watch))


stateful = (lambda params: ()), (lambda state, **trees: ((1.0,), {}))
matrix = (lambda params: ()), (lambda state, *, gradient, updates, params: (state, {"x": gradient["embed"]["W_DP"]}))
broken = (lambda params: ()), (lambda state, *, gradient, updates, params: (state, {"x": gradient["nowhere"]}))


@pytest.mark.parametrize(
    ("name", "words"),
    [("cosine", ("cosine",)), ("test_extension:stateful", ("update",)), ("test_extension:matrix", ("number",))]
    + [("test_extension:broken", ("test_extension.py, line", "KeyError"))],
)
def test_watches_that_do_not_fit_are_refused(name, words):
    params = jax.eval_shape(tiny.task_of(tiny.settings("vision")).init, jax.random.key(0))
    with raises(errors.UserError, name, *words):
        watches.choose([name], params)


# An experiment on top of one of ours


def test_a_run_with_a_second_target_is_opened_by_the_tools(guide):
    changes = {"text.source": str(guide / "text.txt"), "text.N": 8, "text.tokenizer": "characters", "mesh.data": 1}
    config = tiny.config_file(guide, "my_two_tokens", **tiny.MODEL | tiny.TRAIN | changes)
    outcome = tiny.run("--config", config, "--workdir", str(guide / "run"))
    assert outcome.code == 0, outcome.err
    summary = json.loads((guide / "run" / "summary.json").read_text())
    assert summary["eval/loss_later"] > 1 and summary["experiment"] == "my_two_tokens"
    for tool, values in (
        (sample, dict(prompt="A king", max_new_tokens=3)),
        (evaluate, dict(file=str(guide / "text.txt"))),
    ):
        outcome = tiny.command(tool, checkpoint=str(guide / "run"), **values)
        assert outcome.code == 0 and "head/G2_WD" in outcome.out
    params = tiny.draw_params(tiny.task_of(settings(guide, "my_two_tokens")))
    task = tiny.task_of(settings(guide, "my_two_tokens"))
    metrics, _ = task.loss(params, task.train[0])
    head = params["head"]
    swapped = params | {"head": {"G_WD": head["G2_WD"], "G2_WD": head["G_WD"]}}
    assert metrics["loss_later"][1] == metrics["loss"][1] * 7 / 8  # the last of 8 tokens has no token after the next
    assert task.loss(swapped, task.train[0])[0]["loss_later"][0] != metrics["loss_later"][0]
