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
from scipy.special import log_softmax

from experiments import language
from experiments.config import by_name, errors
from experiments.data import corpus as corpora
from experiments.devices import mesh as meshes
from experiments.engine import run_plan, train_step, watch as watches
from experiments.folder import checkpoint, records
from experiments.model import losses
from experiments.pretrained import open_model
from experiments.tools import evaluate, sample
from tfm import loss, mlp, norm, variant
from tfm.attention import mask as masks

LANGUAGE = {"text__N": 8, "text__tokenizer": "characters", "model__remat": "none", "mesh__data": 1}
LANGUAGE |= {"model__norm": "rms", "model__mlp": "relu", "model__bias": "none"}  # compiles quickly


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """Return a folder with the files of both guides, from which Python imports them, and a text."""
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    for page in ("your_experts", "two_tokens", "your_objective", "your_attention"):
        text = (by_name.ROOT / "docs" / "guides" / f"{page}.md").read_text(encoding="utf-8")
        for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            name = re.match(r"# (my_\w+)\.py\n", code)[1]
            monkeypatch.delitem(sys.modules, name, raising=False)
            (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "text.txt").write_bytes(tiny.TEXT[:900] * 3)
    return tmp_path


def settings(folder, experiment="language", **changes):
    return tiny.settings(experiment, **LANGUAGE | {"text__source": str(folder / "text.txt"), "model__M": 1} | changes)


@pytest.mark.parametrize(("axis", "devices", "accumulation"), [("data", 2, 1), ("tensor", 2, 1), ("data", 1, 2)])
def test_the_gradient_is_that_of_the_loss_and_the_weighted_measures(guide, axis, devices, accumulation):
    """Two devices, which measure the balance together, equal one; two microbatches have a balance each."""
    mesh = meshes.make(**{"data": 1, axis: devices})
    task = tiny.work_of(settings(guide, model__mlp="my_experts:experts"), mesh).task
    assert task.weights == {"loss_balance": 0.01}
    task = task._replace(weights={"loss_balance": 3.0})
    params, batch = tiny.draw_params(task), task.train[0]

    def loss(params):
        parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
        batches = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(accumulation)]
        metrics = [train_step.join_metrics(*task.loss(params, part)) for part in batches]
        means = {name: sum(m[name][0] / m[name][1] for m in metrics) / accumulation for name in metrics[0]}
        return means["loss"] + 3.0 * means["loss_balance"], means  # all parts have equally many tokens

    expected_gradient, means = jax.jit(jax.grad(loss, has_aux=True))(params)
    gradient, metrics, _ = tiny.gradient(task, mesh, accumulation)(params, batch, jax.random.key(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), gradient, expected_gradient)
    assert np.abs(gradient["blocks"]["mlp"]["R_XD"]).max() > 1e-3
    assert 1 <= metrics["loss_balance"] < 4 and metrics.keys() == means.keys()
    np.testing.assert_allclose([metrics[name] for name in means], [*means.values()], rtol=1e-5)
    if devices > 1:
        held_out = train_step.evaluator(task._replace(evaluation=[batch]), mesh)(params)
        np.testing.assert_allclose([held_out[name] for name in means], [*means.values()], rtol=1e-5)


def test_measures_of_all_stages_and_layers_are_added(monkeypatch):
    def count(stage):
        def apply(*arrays, **options):
            return stage.apply(*arrays, **options), {"calls": (jnp.float32(2), jnp.float32(1))}

        return stage._replace(apply=apply, measures={"calls": 0.0})

    monkeypatch.setattr(mlp, "gelu", count(mlp.gelu))
    monkeypatch.setattr(norm, "token", count(norm.token))
    task, mesh = tiny.task_of(tiny.settings("vision", image__patch=4)), meshes.make(data=1)
    params, batch = tiny.draw_params(task), task.train[0]
    total, calls = jax.jit(lambda params: task.loss(params, batch)[1]["measures"]["calls"])(params)
    assert calls == 2 * 3 + 1 and total == 2 * calls  # two norms and an MLP in two layers, and the last norm
    assert task.weights == {} and train_step.evaluator(task, mesh)(params)["calls"] == 2  # a mean over stages


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


best_of_two = (lambda logits, target, weight: (weight.sum(), weight.sum())), "best"
single = (lambda logits, target, weight: weight.sum()), "more"
accuracy = (lambda logits, target, weight: (weight.sum(), weight.sum())), "more"
MLPS = [f"test_extension:{name}" for name in "silent undeclared renamed scalar vector reserved".split()]
NUMBERS = [
    "label_smoothing",
    "label_smoothing:1",
    "label_smoothing:0.1,0.2",
    "class_weights:1,-2",
    "class_weights:x",
    "class_weights:0,0",
]
unsummed = mlp.gelu._replace(apply=lambda params, x_BND, *, layout: mlp.gelu.apply(params, x_BND))
REFUSED = [  # (setting, value, parts of the message)
    *(("model.mlp", name, [f"model.mlp = {name}"]) for name in MLPS),  # their measures are not those that they declare
    *(("train.loss", name, [f"train.loss = {name}"]) for name in NUMBERS),
    ("train.metrics", ["top6"], ["top6", "train.metrics", "top5"]),
    ("train.metrics", ["top5", "top5"], ["top5"]),
    ("train.metrics", ["test_extension:accuracy"], ["accuracy"]),
    ("train.metrics", ["test_extension:best_of_two"], ["best_of_two", "more", "less"]),
    ("train.metrics", ["test_extension:single"], ["single", "(sum, count)"]),
]


@pytest.mark.parametrize(("setting", "value", "words"), REFUSED)
def test_measures_losses_and_metrics_that_do_not_fit_are_refused(setting, value, words):
    with raises(errors.UserError, *words):
        tiny.task_of(tiny.settings("vision", **{setting: value}))


def test_a_function_that_does_not_sum_over_the_devices_is_refused_with_the_axis():
    values = tiny.settings("vision", model__mlp="test_extension:unsummed", mesh__tensor=2, mesh__data=1)
    mesh = meshes.make(tensor=2, data=1)
    with raises(errors.UserError, "model.mlp = test_extension:unsummed", "mesh data=1, tensor=2", "('tensor',)"):
        run_plan.make_plan(values, tiny.work_of(values, mesh).task, mesh)


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
        np.testing.assert_allclose(jax.jit(chosen)(logits, target, weight)["loss"], (total, count), rtol=1e-5)


def test_bits_per_byte_come_from_the_cross_entropy_alone(guide, monkeypatch):
    smooth, nats = {"train__loss": "label_smoothing:0.5"}, {"eval/loss": 2.0}
    both = nats | {"eval/cross_entropy": 1.0}
    for changes, row, expected in (
        ({}, both, 2.0),
        (smooth | {"train__metrics": ["cross_entropy"]}, both, 1.0),
        (smooth, nats, None),
    ):
        work = tiny.work_of(settings(guide, **changes))
        monkeypatch.setattr(language, "generate_sample", lambda *arguments: "a sample")
        first = next(work.figures(work, {}, guide, [{"step": 1} | row]))
        if expected is None:
            assert first == guide / "sample.txt"
        else:  # the tokens are characters of one byte
            np.testing.assert_allclose(first["eval/bits_per_byte"], expected / np.log(2), rtol=0.02)


def test_as_many_class_weights_as_classes():
    chosen = losses.choose_loss(tiny.settings("vision", train__loss="class_weights:1,2"))
    with raises(errors.UserError, "train.loss", "2 class weights", "7 classes"):
        chosen(*logits_of())


def test_metrics_by_name(guide):
    logits, target, weight = logits_of()
    chosen = losses.choose_loss(tiny.settings("vision", train__metrics=["top5", "cross_entropy", "my_metrics:rank"]))
    metrics = jax.jit(chosen)(logits, target, weight)
    rank = (logits > np.take_along_axis(logits, target[..., None], -1)).sum(-1)
    np.testing.assert_allclose(metrics["rank"], ((rank * weight).sum(), weight.sum()))
    np.testing.assert_allclose(metrics["top5"], (((rank < 5) * weight).sum(), weight.sum()))
    np.testing.assert_allclose(metrics["cross_entropy"], jax.jit(loss.cross_entropy)(logits, target, weight))


def test_metrics_are_refused_where_there_are_no_logits():
    values = tiny.settings("masked_image", train__metrics=["top5"])
    mesh = meshes.make(data=1)
    with raises(errors.UserError, "train.metrics", "top5"):
        run_plan.make_plan(values, tiny.work_of(values, mesh).task, mesh)


def test_a_metric_says_which_values_are_better():
    for metric, better in {"eval/rank": "less", "eval/loss_balance": "less", "eval/top5": "more", "": "more"}.items():
        best = checkpoint.choose_best(metric, {"rank": "less", "top5": "more"})
        assert best == (metric, better)
        assert not metric or checkpoint.score({metric: 2.0}, best) == {"less": -2, "more": 2}[better]
    with raises(errors.UserError, "train.keep_best", "eval/dropped"):
        checkpoint.choose_best("eval/dropped", {})


def run(folder, experiment, *flags, **changes):
    """Run the experiment with a small model and without figures. Return its summary."""
    changes = LANGUAGE | {"model.M": 1, "model.D": 8, "model.H": 2, "train.batch_size": 16} | changes
    config = tiny.config_file(folder, experiment, text__source=str(folder / "text.txt"), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "figures", lambda *arguments: [])
        outcome = tiny.run("--config", config, "--workdir", str(folder / "run"), *flags)
    assert outcome.code == 0, outcome.err
    return json.loads((folder / "run" / "summary.json").read_text())


def test_a_metric_of_the_users_decides_which_checkpoint_is_kept(guide):
    metrics = '--config.train.metrics=["my_metrics:rank", "top5"]'
    changes = {"train.keep_best": "eval/rank", "train.steps": 4, "train.evaluate_every": 1}
    summary = run(guide, "language", metrics, **changes)
    ranks = [row["eval/rank"] for row in records.read_metrics(guide / "run") if "eval/rank" in row]
    assert summary["checkpoints"]["best"]["eval/rank"] == min(ranks) and len(ranks) == 4
    assert summary["better"] == {"rank": "less", "top5": "more"}
    assert (guide / "run" / "source" / "my_metrics.py").is_file()


# Watches


def measure_second_block(tree):
    """Return the norm of the parameters of the second block."""
    return np.sqrt(sum(np.sum(np.square(x[1])) for x in jax.tree.leaves(tree["blocks"])))


def test_watches_see_the_gradient_the_updates_and_the_parameters_and_a_skipped_step_does_not_change_them(guide):
    watch, mesh = ["my_watch:cosine", "gradient_norms", "update_ratios"], meshes.make(data=2)
    values = settings(guide, model__M=2, train__watch=watch, optim__clip=0.0, train__nan="skip")
    plan = run_plan.make_plan(values, tiny.work_of(values, mesh).task, mesh)
    state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=mesh)
    batch, seen = meshes.place_batch(mesh, plan.task.train[0]), []
    for _ in range(2):
        before = jax.device_get(state.params)
        state, metrics = plan.step(state, batch, np.True_)
        metrics, params, gradient = jax.device_get((metrics, state.params, state.watch[0]))
        seen.append((metrics, np.concatenate([x.ravel() for x in jax.tree.leaves(gradient)])))
        norms = [x for name, x in metrics.items() if name.startswith("gradient_norm/")]
        assert {"gradient_norm/block_1", "gradient_norm/block_2", "gradient_norm/embed"} <= metrics.keys()
        np.testing.assert_allclose(np.sqrt(np.sum(np.square(norms))), metrics["gradient_norm"], rtol=1e-5)
        ratio = measure_second_block(jax.tree.map(np.subtract, params, before)) / measure_second_block(before)
        np.testing.assert_allclose(metrics["update_ratio/block_2"], ratio, rtol=1e-3)
    (first, old), (second, new) = seen
    cosine = old @ new / np.linalg.norm(old) / np.linalg.norm(new)
    assert first["gradient_cosine"] == 0 and abs(second["gradient_cosine"] - cosine) < 1e-5
    broken_params = jax.tree.map(lambda x: jax.device_put(np.full_like(x, np.nan), x.sharding), state.params)
    state, metrics = plan.step(state.replace(params=broken_params), batch, np.True_)
    after = np.concatenate([x.ravel() for x in jax.tree.leaves(jax.device_get(state.watch[0]))])
    np.testing.assert_array_equal(after, new)
    assert metrics["skipped"] == 1


stateful = (lambda params: ()), (lambda state, **trees: ((1.0,), {}))
matrix = (lambda params: ()), (lambda state, *, gradient, updates, params: (state, {"x": gradient["embed"]["W_DP"]}))
grown = (lambda params: jnp.zeros(2)), (lambda state, **trees: (jnp.zeros(3), {}))
listed = (lambda params: ()), (lambda state, **trees: (state, [1.0]))
numbered = (lambda params: ()), (lambda state, **trees: (state, {1: 1.0}))
loss_again = (lambda params: ()), (lambda state, **trees: (state, {"loss": 1.0}))
evaluated = (lambda params: ()), (lambda state, **trees: (state, {"probe/eval/loss": 1.0}))
broken = (lambda params: ()), (lambda state, *, gradient, updates, params: (state, {"x": gradient["nowhere"]}))


@pytest.mark.parametrize(
    ("name", "words"),
    [("cosine", ("cosine",)), ("test_extension:stateful", ("must return",)), ("test_extension:matrix", ("number",))]
    + [("test_extension:broken", ("test_extension.py, line", "KeyError"))]
    + [(f"test_extension:{name}", ("must return", "test_extension.py")) for name in ("grown", "listed", "numbered")]
    + [
        ("test_extension:loss_again", ("loss is reserved",)),
        ("test_extension:evaluated", ("probe/eval/loss is reserved",)),
    ],
)
def test_watches_that_do_not_fit_are_refused(name, words):
    params = jax.eval_shape(tiny.task_of(tiny.settings("vision")).init, jax.random.key(0))
    with raises(errors.UserError, name, *words):
        watches.choose([name], params, taken=["loss"])


# An experiment on top of one of ours


def test_a_run_with_a_second_target_is_opened_by_the_tools(guide):
    task = tiny.task_of(settings(guide, "my_two_tokens"))
    params, batch = tiny.draw_params(task), task.train[0]
    swapped = params | {"head": {"G_WD": params["head"]["G2_WD"], "G2_WD": params["head"]["G_WD"]}}
    metrics, other = jax.jit(lambda *trees: [task.loss(tree, batch)[0] for tree in trees])(params, swapped)
    assert metrics["loss_later"][1] == metrics["loss"][1] * 7 / 8  # the last of 8 tokens has no token after the next
    assert metrics["loss_later"][0] != other["loss_later"][0] and task.weights == {"loss_later": 0.3}
    summary = run(guide, "my_two_tokens", **{"train.steps": 1})
    assert summary["eval/loss_later"] > 1 and summary["experiment"] == "my_two_tokens"
    for tool, flags in (
        (sample, dict(prompt="A king", max_new_tokens=3)),
        (evaluate, dict(file=str(guide / "text.txt"))),
    ):
        assert "--trust=my_two_tokens" in tiny.refusal(tool, checkpoint=str(guide / "run"), **flags)
        outcome = tiny.command(tool, checkpoint=str(guide / "run"), trust="my_two_tokens", **flags)
        assert outcome.code == 0, outcome


def test_own_weights_and_an_own_value_are_the_same_in_a_full_pass_a_cache_and_look(guide):
    changes = {"model__weights": "my_attention:sigmoid", "model__value": "my_attention:differential", "model__H": 4}
    work = tiny.work_of(settings(guide, **changes))
    params, w_BN, model = tiny.draw_params(work.task), work.task.evaluation[0]["w_BN"][:3], work.model

    @jax.jit
    def compute(params):
        logits_BNW, aux = model.apply(params, w_BN, mask=masks.causal, look=("q", "k", "A"))
        start_BW, cache = model.start(params, w_BN[:, :5], np.full(3, 5), capacity=11, mask=masks.causal)
        step_BW, _ = model.step(model.by_layer(params), cache, w_BN[:, 5], np.full(3, 5), mask=masks.causal)
        return logits_BNW, start_BW, step_BW, aux["look"]

    logits_BNW, start_BW, step_BW, seen = jax.device_get(compute(params))
    np.testing.assert_allclose(start_BW, logits_BNW[:, 4], atol=1e-5)
    np.testing.assert_allclose(step_BW, logits_BNW[:, 5], atol=1e-5)
    l_BHNS = np.einsum("BHNK,BHSK->BHNS", seen["q"][0], seen["k"][0]) / np.sqrt(seen["q"].shape[-1])
    expected = np.tril(1 / (1 + np.exp(np.log(np.arange(1, 9))[:, None] - l_BHNS)))
    np.testing.assert_allclose(seen["A"][0], expected, atol=1e-5)
    assert params["blocks"]["value"]["Uo_GDK"].shape == (1, 2, 8, 2)


QUANTISED = """
import jax
import jax.numpy as jnp
from experiments import language
from tfm import models

config = language.config


def quantise(params):
    return jax.tree.map(lambda x: jnp.round(4 * x) / 4, params)


def prepare(settings, mesh):
    work = language.prepare(settings, mesh, change=lambda model: models.map_params(model, quantise))
    return work._replace(kind="language")
"""


def test_a_changed_model_is_trained_sampled_and_opened_with_its_change(guide, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_quantised", raising=False)
    (guide / "my_quantised.py").write_text(QUANTISED)
    run(guide, "my_quantised", **{"train.steps": 1, "train.metrics": ["my_metrics:rank", "top5"]})
    trust = "my_quantised", "my_metrics:rank"
    for i in range(2):
        with raises(errors.UserError, f"--trust={trust[i]}"):
            open_model.open(guide / "run", trust=trust[:i])
    with pytest.MonkeyPatch.context() as patch, raises(errors.UserError, "my_quantised", "need Work.model"):
        patch.setattr(
            sys.modules["my_quantised"], "prepare", lambda *_: tiny.work_of(settings(guide))._replace(model=None)
        )
        open_model.open(guide / "run", trust=trust)
    opened = open_model.open(guide / "run", trust=trust)
    work = tiny.work_of(settings(guide, "my_quantised"))
    plain = tiny.work_of(settings(guide, "language"))
    batch, params = work.task.evaluation[0], opened.params
    results = jax.device_get([jax.jit(one.apply)(params, batch) for one in (work, plain)])
    np.testing.assert_allclose(opened(batch["w_BN"]), results[0], atol=1e-5)
    assert np.abs(results[0] - results[1]).max() > 1e-2
    rounded = sys.modules["my_quantised"].quantise(params)
    texts = [
        language.generate_sample(settings(guide), corpus_of(guide), model, tree)
        for model, tree in ((work.model, params), (plain.model, rounded))
    ]
    assert texts[0] == texts[1]


def corpus_of(folder):
    return corpora.read_corpus(settings(folder).text, ())


def test_an_own_objective_reaches_the_loss_the_baseline_and_the_samples(guide):
    work = tiny.work_of(settings(guide, "my_diffusion", text__objective="masked"))
    batch, params = work.task.evaluation[0], tiny.draw_params(work.task)
    masked_BN, largest_B1 = batch["weight_BN"] > 0, batch["weight_BN"].max(1, keepdims=True)
    np.testing.assert_allclose(batch["weight_BN"], masked_BN * largest_B1, rtol=1e-6)  # 1 / t of the window
    assert len({*largest_B1.ravel().tolist()}) > 9 and (batch["w_BN"] != batch["target_BN"])[masked_BN].all()
    nats = -np.take_along_axis(log_softmax(work.apply(params, batch), -1), batch["target_BN"][..., None], -1)[..., 0]
    total, count = work.task.loss(params, batch)[0]["loss"]
    np.testing.assert_allclose([total, count], [(nats * batch["weight_BN"]).sum(), batch["weight_BN"].sum()], rtol=1e-4)
    folder = guide / "out"
    (folder / "figures").mkdir(parents=True)
    files = [file for file in work.figures(work, params, folder, [{"step": 1, "train/loss": 2.0}]) if file]
    assert {file.name for file in files} >= {"sample.txt", "written.txt"}
    hidden = (folder / "sample.txt").read_text().splitlines()[0].removeprefix("masked: ")
    assert [letter == "_" for letter in hidden] == masked_BN[0].tolist()
    assert len((folder / "written.txt").read_text()) == 8
