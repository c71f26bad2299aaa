"""A Flax module of the user's as the model of an experiment: its values, statistics, devices, and refusals."""

import functools
import json
import shutil
import string
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_study
from errors import raises
from flax import linen, nnx

from experiments.config import errors
from experiments.devices import mesh as meshes
from experiments.engine import run as runs, run_plan, train_step
from experiments.model import flax_model
from experiments.pretrained import open_model
from tfm import layout as layouts, shapes

C, Y = 10, 8  # classes and height of the digits


class Net(nnx.Module):
    """A convolution, a dropout and a layer of heads."""

    def __init__(self, Z, C, *, rngs, rate=0.5, D=4):
        self.conv, self.norm = nnx.Conv(Z, D, (3, 3), rngs=rngs), nnx.BatchNorm(D, rngs=rngs)
        self.dropout, self.heads = nnx.Dropout(rate, rngs=rngs), nnx.LinearGeneral(D, (2, D), rngs=rngs)
        self.head = nnx.Linear(2 * D, C, rngs=rngs)

    def __call__(self, image_BYXZ):
        x = nnx.relu(self.norm(self.conv(image_BYXZ))).mean((1, 2))
        return self.head(self.dropout(self.heads(x)).reshape(len(x), -1))


class Plain(Net):
    """Without dropout and batch statistics."""

    def __init__(self, Z, C, D, *, rngs):
        super().__init__(Z, C, rngs=rngs, rate=0.0, D=D)
        self.norm = nnx.LayerNorm(D, rngs=rngs)


class LinenNet(linen.Module):
    C: int
    D: int

    @linen.compact
    def __call__(self, image_BYXZ, train):
        x = linen.Conv(self.D, (3, 3))(image_BYXZ)
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(x)).mean((1, 2))
        return linen.Dense(self.C)(linen.Dropout(0.5, deterministic=not train)(x))


class Stateful(Plain):
    """What one method does with the features between two layers."""

    def __init__(self, Z, C, D, *, rngs):
        super().__init__(Z, C, D, rngs=rngs)
        self.rngs = rngs
        self.frozen, self.free = (nnx.BatchNorm(D, use_running_average=x, rngs=rngs) for x in (True, False))
        self.order = nnx.Variable(jax.random.permutation(rngs.params(), D))
        self.plain, self.count = jax.random.normal(rngs.params(), D), nnx.Variable(jnp.zeros(()))

    def __call__(self, image_BYXZ):
        return self.head(self.heads(self.change(self.conv(image_BYXZ).mean((1, 2)))).reshape(len(image_BYXZ), -1))

    def change(self, x_BD):
        return self.free(x_BD[:, self.order[...]] * self.plain)


class Counts(Stateful):
    def change(self, x_BD):
        self.count[...] += 1
        return x_BD


class Mistaken(Net):
    def __call__(self, image_BYXZ, is_train=False):
        return self.head(self.dropout(image_BYXZ.reshape(len(image_BYXZ), -1)[:, :8], deterministic=not is_train))


class Random(Net):
    def __call__(self, image_BYXZ):
        return self.head(self.dropout(image_BYXZ.reshape(len(image_BYXZ), -1)[:, :8], deterministic=False))


class Result(Stateful):
    """Return what `result` makes of the logits."""

    def __call__(self, image_BYXZ):
        return self.result(super().__call__(image_BYXZ))


class Balanced(Result):
    def change(self, x_BD):
        return self.frozen(x_BD)

    def result(self, logits_BC):
        return logits_BC, {"loss_balance": (jnp.square(logits_BC).sum(), len(logits_BC))}


class Unnamed(Result):
    def result(self, logits_BC):
        return logits_BC, logits_BC.mean()


class LinenState(linen.Module):
    """Constants that are drawn in a part of the module, and a frozen batch norm."""

    C: int
    training: bool

    @linen.compact
    def __call__(self, image_BYXZ):
        x = image_BYXZ.reshape(len(image_BYXZ), -1)
        noise = jax.random.normal(self.make_rng("noise"), x.shape) * self.training
        draw = functools.partial(jax.random.normal, shape=(x.shape[-1], 4))
        x = (x + noise) @ self.variable("constants", "B", lambda: draw(self.make_rng("params"))).value
        return linen.Dense(self.C)(linen.BatchNorm(use_running_average=True)(x))


class Sows(LinenState):
    @linen.compact
    def __call__(self, image_BYXZ):
        self.sow("losses", "balance", image_BYXZ.mean())
        return linen.Dense(self.C)(image_BYXZ.mean((1, 2)))


class Tokens(nnx.Module):
    """A causal model of tokens: the mean of the tokens so far."""

    def __init__(self, W, D, *, rngs):
        self.embed, self.head = nnx.Embed(W, D, rngs=rngs), nnx.Linear(D, W, rngs=rngs)

    def __call__(self, w_BN):
        return self.head(jnp.cumsum(self.embed(w_BN), 1) / (1 + jnp.arange(w_BN.shape[1]))[:, None])


class SeesAll(Tokens):
    def __call__(self, w_BN):
        return self.head(jnp.broadcast_to(self.embed(w_BN).mean(1, keepdims=True), (*w_BN.shape, self.embed.features)))


class NotFinite(Tokens):
    def __call__(self, w_BN):
        return super().__call__(w_BN) * jnp.nan


class CallsBack(Tokens):
    def __call__(self, w_BN):
        jax.debug.callback(lambda x_BN: int(f"no number of {x_BN.shape}"), w_BN)
        return super().__call__(w_BN)


class Padded(nnx.Module):
    """The mean of the tokens, which are real where `valid` is True, for each token."""

    def __init__(self, W, D, *, rngs):
        self.embed, self.head = nnx.Embed(W, D, rngs=rngs), nnx.Linear(D, W, rngs=rngs)

    def __call__(self, w_BN, valid):
        x_BND = self.embed(w_BN)
        return self.head(x_BND + x_BND.mean(1, keepdims=True, where=valid[..., None]))


class LinenPadded(linen.Module):
    W: int
    D: int

    @linen.compact
    def __call__(self, w_BN, valid):
        x_BND = linen.Embed(self.W, self.D)(w_BN)
        return linen.Dense(self.W)(x_BND + x_BND.mean(1, keepdims=True, where=valid[..., None]))


class Classifier(nnx.Module):
    """Classify the mean of the tokens that are real."""

    def __init__(self, W, D, C, *, rngs):
        self.embed, self.head = nnx.Embed(W, D, rngs=rngs), nnx.Linear(D, C, rngs=rngs)

    def __call__(self, w_BN, valid):
        return self.head(self.embed(w_BN).mean(1, where=valid[..., None]))


class Blind(Classifier):
    """Classify the mean of all tokens."""

    def __call__(self, w_BN):
        return super().__call__(w_BN, jnp.ones(w_BN.shape, bool))


NORMAL = nnx.initializers.normal()


class Sharded(nnx.Module):
    """A causal model of tokens with partitioning metadata. The axis `embed` has no meaning here."""

    def __init__(self, W, D, *, rngs, axis="fsdp"):
        shard = nnx.with_partitioning
        self.embed = nnx.Embed(W, D, embedding_init=shard(NORMAL, (None, axis)), rngs=rngs)
        self.up = nnx.Linear(D, 4 * D, kernel_init=shard(NORMAL, ("embed", (axis, "embed"))), rngs=rngs)
        self.head = nnx.Linear(4 * D, W, rngs=rngs)

    def __call__(self, w_BN):
        return self.head(nnx.relu(self.up(jnp.cumsum(self.embed(w_BN), 1))))


class Misnamed(Sharded):
    def __init__(self, W, D, *, rngs):
        super().__init__(W, D, rngs=rngs, axis="model")


class LinenSharded(linen.Module):
    W: int
    D: int

    @linen.compact
    def __call__(self, w_BN):
        shard = functools.partial(linen.with_partitioning, NORMAL)
        x_BND = jnp.cumsum(linen.Embed(self.W, self.D, embedding_init=shard((None, "fsdp")), name="embed")(w_BN), 1)
        x_BNF = linen.Dense(4 * self.D, kernel_init=shard(("embed", ("fsdp", "embed"))), name="up")(x_BND)
        return linen.Dense(self.W, name="head")(linen.relu(x_BNF))


class WrongShape(Plain):
    def __call__(self, image_BYXZ):
        return super().__call__(image_BYXZ)[:, :3]


class Fails(Plain):
    def __call__(self, image_BYXZ):
        return self.nowhere(image_BYXZ)


def settings(name, experiment="vision", **changes):
    """Return settings with this module and few steps."""
    changes = {"mesh__data": 1} | changes
    return tiny.settings(experiment, model=False, model__flax=f"test_flax_model:{name}", **changes)


def build(name, **changes):
    """Return the model of digits."""
    inputs = jax.ShapeDtypeStruct((2, Y, Y, 1), jnp.float32)
    return flax_model.make(settings(name, **changes).model, layouts.ONE, inputs, (2, C), Y=Y, X=Y, Z=1, C=C)[0]


def images(B=6):
    return np.random.default_rng(0).standard_normal((B, Y, Y, 1), np.float32)


def values_of(module):
    """Return the arrays of an nnx module in the order of its paths."""
    nodes = sorted((".".join(map(str, path)), node) for path, node in nnx.iter_graph(module))
    return [node[...] for _, node in nodes if isinstance(node, nnx.Param | nnx.BatchStat)]


def test_an_nnx_module_computes_what_flax_computes():
    model, images_BYXZ = build("Net", model__D=4), images()

    @jax.jit
    def compute(key):
        module, params = Net(1, C, rngs=nnx.Rngs(key)), model.init(key)
        values = values_of(module)
        module.eval()
        return params, values, model.apply(params, images_BYXZ), module(images_BYXZ)

    params, values, (logits, aux), expected = compute(jax.random.key(5))
    assert len(params) == len(values) == 10
    for (_, mine), theirs in zip(sorted(params.items()), values, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert aux == {}


def test_a_linen_module_computes_what_flax_computes():
    model, module, images_BYXZ = build("LinenNet", model__D=4), LinenNet(C, 4), images()

    @jax.jit
    def compute(key):
        variables, params = module.init(key, images_BYXZ[:2], train=False), model.init(key)
        key_B = jax.random.split(key, 6)
        results = [model.apply(params, images_BYXZ, key_B=keys)[0] for keys in (None, key_B)]
        changes = {"rngs": {"dropout": key_B[0]}, "mutable": ["batch_stats"]}
        trained, _ = module.apply(variables, images_BYXZ, train=True, **changes)
        return params, variables, results, [module.apply(variables, images_BYXZ, train=False), trained]

    params, variables, results, expected = compute(jax.random.key(5))
    assert len(params) == len(jax.tree.leaves(variables)) == 8
    np.testing.assert_allclose(results, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["Net", "LinenNet"])
def test_dropout_and_batch_statistics_are_those_of_training(name):
    model, images_BYXZ = build(name, model__D=4), images()
    params = jax.jit(model.init)(jax.random.key(5))
    apply = jax.jit(lambda key: model.apply(params, images_BYXZ, key_B=jax.random.split(key, 6)))
    first, again, other = (jax.device_get(apply(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first[0], again[0])
    assert np.abs(first[0] - other[0]).max() > 0.01
    running = first[1][train_step.RUNNING]
    assert len(running) == 2 and running.keys() <= params.keys()
    updated = train_step.update_running(jax.device_get(params), running)
    mean = next(name for name in running if ".mean_" in name)
    momentum = 0.99  # of Flax
    assert np.abs(updated[mean]).max() > 0 and np.abs(updated[mean]).max() < (1 - momentum) * 10


def test_names_state_the_shapes_and_which_parameters_are_matrices():
    params = jax.eval_shape(build("Net").init, jax.random.key(0))
    assert shapes.check(params)
    matrices = {name.rpartition("_")[0] for name in params if shapes.is_matrix(name)}
    assert matrices == {"conv.kernel", "heads.kernel", "head.kernel"}  # not heads.bias, which has two axes


def plan_run(values):
    """Return the plan of a run with these settings, which are all used."""
    plan = run_plan.make_plan(values, tiny.work_of(values).task, runs.make_mesh(values))
    values.refuse_unused()
    return plan


def take_step(values):
    """Return the parameters and the metrics after one step."""
    plan, mesh = plan_run(values), runs.make_mesh(values)
    state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=mesh)
    state, metrics = plan.step(state, meshes.place_batch(mesh, plan.task.train[0]), np.True_)
    return jax.device_get((state.params, metrics))


SHARDED = {"model__D": 8, "text__N": 8, "train__accumulation": 2}
FSDP = SHARDED | {"mesh__fsdp": 2}


@pytest.mark.parametrize("name", ["Sharded", "LinenSharded"])
def test_metadata_shard_the_parameters_and_the_numbers_are_those_of_one_device(tmp_path, name):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    source = {"text__source": str(tmp_path / "text.txt")}
    values = settings(name, "language", **SHARDED, **source, mesh__data=2, mesh__fsdp=2)
    plan = plan_run(values)
    assert plan.task.lines[1:] == (
        "metadata: mesh.fsdp shards 2 of 5 parameters (21% of their numbers); axis names without effect: embed",
    )
    state = train_step.abstract_state(plan.task, plan.optimiser, mesh=runs.make_mesh(values))
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        key = jax.tree_util.keystr(path)
        axis = -1 if "embed.embedding" in key or "up.kernel" in key else None
        expected = [n // 2 if i == axis else n for i, n in zip(range(-leaf.ndim, 0), leaf.shape, strict=True)]
        assert list(leaf.sharding.shard_shape(leaf.shape)) == expected, key
    if name == "Sharded":  # the code that gathers the parameters is the same
        one_device = settings(name, "language", **SHARDED, **source)
        (one, metrics), (four, metrics_4) = take_step(one_device), take_step(values)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), one, four)
        np.testing.assert_allclose(metrics["loss"], metrics_4["loss"], rtol=1e-5)


def test_batch_statistics_follow_flax():
    params, _ = take_step(settings("Net", model__D=4, optim__learning_rate=0.0, optim__weight_decay=0.0))
    image_BYXZ = tiny.task_of(settings("Net", model__D=4)).train[0]["image_BYXZ"]

    @jax.jit
    def compute(key):
        module = Net(1, C, rngs=nnx.Rngs(key))
        module.train()
        module(image_BYXZ)
        return module.norm.mean[...], module.norm.var[...]

    mean, variance = (params[f"norm.{name}_A"] for name in ("mean", "var"))
    np.testing.assert_allclose((mean, variance), compute(jax.random.key(0)), atol=1e-5)


FIXED = {"Balanced": {"order", "plain", "count", "frozen.mean", "frozen.var", "free.mean", "free.var"}}
FIXED["Stateful"] = FIXED["Balanced"] - {"free.mean", "free.var"}
FIXED["LinenState"] = {"constants.B", "batch_stats.BatchNorm_0.mean", "batch_stats.BatchNorm_0.var"}


@pytest.mark.parametrize("name", FIXED)
def test_other_state_is_fixed_and_cannot_be_unfrozen(name):
    values = settings(name, optim__weight_decay=0.1, optim__learning_rate=0.1, optim__frozen=["!*"])
    initial = jax.device_get(jax.jit(tiny.work_of(values).task.init)(jax.random.key(0)))
    params, metrics = take_step(values)
    same = {path for path in params if "bias" not in path and np.array_equal(params[path], initial[path])}
    same = {path.rpartition("_")[0] if "_" in path.rpartition(".")[2] else path for path in same}
    assert {path for path in same if not path.endswith("scale")} == FIXED[name] and not set(
        "".join(map(shapes.letters, params))
    ) & {*string.ascii_uppercase} - {*"AEU"}
    assert metrics.get("loss_balance", 1) > 0 and ("loss_balance" in metrics) == (name == "Balanced")


def test_devices_share_the_statistics_of_a_batch_norm():
    changes = {
        "optim__name": "optax:sgd",
        "train__batch_size": 8,
    }  # Adam divides by gradients that are 0 but for rounding
    (one, _), (two, _) = (take_step(settings("Stateful", mesh__data=n, **changes)) for n in (1, 2))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), one, two)


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped_and_the_tools_refuse_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    changes = tiny.TRAIN | {"train.steps": 4, "train.save_every": 2, "mesh.data": 1, "optim.ema": 0.5}
    config = tiny.config_file(tmp_path, "vision", model__flax="test_flax_model:Net", **changes)

    def train():
        outcome = tiny.run("--config", config, "--workdir", str(tmp_path / "run"))
        assert outcome.code == 0, outcome.err
        return outcome.out, json.loads((tmp_path / "run" / "summary.json").read_text())

    _, whole = train()
    assert np.isfinite(whole["eval/loss"]) and (tmp_path / "run" / "figures" / "predictions.png").stat().st_size > 100
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")  # as if it had stopped before it saved the last step
    (tmp_path / "run" / "summary.json").unlink()
    with tiny.without_figures():
        out, resumed = train()
    assert resumed["params_sha256"] == whole["params_sha256"] and "at step 2" in out
    with raises(errors.UserError, "model.flax = test_flax_model:Net", "launch.run"):
        open_model.open(tmp_path / "run")


def test_a_text_is_generated_by_computing_all_tokens_again():
    values = settings("Tokens", "language", text__N=8, text__tokenizer="characters")
    inputs = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    model, _ = flax_model.make(values.model, layouts.ONE, inputs, (2, 8, 11), W=11, N=8)
    w_BN = np.arange(16).reshape(2, 8) % 11

    @jax.jit
    def compute(key):
        params = model.init(key)
        start_BW, cache = model.start(params, w_BN[:, :3], np.array([3, 2]), capacity=8)
        step_BW, _ = model.step(model.by_layer(params), cache, w_BN[:, 3], np.array([3, 3]))
        return model.apply(params, w_BN)[0], start_BW, step_BW

    every_BNW, start_BW, step_BW = jax.device_get(compute(jax.random.key(0)))
    np.testing.assert_allclose(start_BW, every_BNW[[0, 1], [2, 1]], atol=1e-6)
    np.testing.assert_allclose(step_BW, every_BNW[:, 3], atol=1e-6)


BLIND = "padding: your Flax module does not see it, because its call has no argument `valid`"


@pytest.fixture
def reviews(tmp_path):
    """Return settings of 80 texts in two classes."""
    texts = [(word, f"a {word} film{' again' * (i % 3)}, {i}") for word in ("good", "bad") for i in range(40)]
    rows = "".join(f'{word},"{text}"\n' for word, text in texts)
    (tmp_path / "reviews.csv").write_text(f"label,text\n{rows}")
    return {"text__source": str(tmp_path / "reviews.csv"), "text__N": 24, "mesh__data": 1}


@pytest.mark.parametrize(("name", "lines"), [("Padded", ()), ("LinenPadded", ()), ("SeesAll", (BLIND,))])
def test_a_module_of_masked_tokens_sees_the_padding_if_its_call_takes_valid(tmp_path, name, lines):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    masked = {"text__N": 64, "text__objective": "masked", "text__source": str(tmp_path / "text.txt")}
    assert_sees_padding(tiny.work_of(settings(name, "language", **masked)), lines)


@pytest.mark.parametrize(("name", "lines"), [("Classifier", ()), ("Blind", (BLIND,))])
def test_a_classifier_of_texts_sees_the_padding_if_its_call_takes_valid(reviews, name, lines):
    work = tiny.work_of(settings(name, "text_classification", **reviews))
    assert work.task.layout.batch == meshes.BATCH
    assert_sees_padding(work, lines)


def assert_sees_padding(work, lines):
    """Assert that the task has these lines, and that the ids of padding change the logits if there are any."""
    batch, params = work.task.evaluation[-1], tiny.draw_params(work.task)
    real_BN = batch["valid_BS"]
    assert work.task.lines[1:] == lines and 0 < real_BN.mean() < 1
    apply, batches = jax.jit(work.apply), [batch | {"w_BN": np.where(real_BN, batch["w_BN"], w)} for w in (0, 3)]
    change = np.abs(np.subtract(*(jax.device_get(apply(params, one)) for one in batches)))
    change = change[real_BN] if change.ndim == 3 else change
    assert change.max() > 0.01 if lines else change.max() == 0


def test_a_module_classifies_texts_in_a_run(tmp_path, reviews):
    changes = reviews | tiny.TRAIN | {"train.steps": 60, "optim.learning_rate": 0.1, "model__D": 8}
    config = tiny.config_file(tmp_path, "text_classification", model__flax="test_flax_model:Classifier", **changes)
    outcome = tiny.run("--config", config, "--workdir", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/accuracy"] == 1 and summary["recall"] == {"bad": 1, "good": 1}
    for name in ("figures/loss.png", "figures/confusion.png", "sample.txt"):
        assert str(tmp_path / "run" / name) in outcome.out and (tmp_path / "run" / name).stat().st_size > 100


def test_a_module_that_classifies_texts_is_an_arm_of_a_study(tmp_path, reviews):
    ours = {"model.M": 1, "model.H": 1, "model.norm": "rms", "model.mlp": "relu", "model.bias": "none"}
    arms = [["module", {"model.flax": "test_flax_model:Classifier"}], ["ours", ours]]
    changes = reviews | {"study__experiment": "text_classification", "study__arms": arms, "study__seeds": [3]}
    assert tiny_study.run(tmp_path, **changes, model__D=4).code == 0
    module, ours = tiny_study.summaries(tmp_path).values()
    assert module["params"] < ours["params"] and np.isfinite([module["eval/loss"], ours["eval/loss"]]).all()


def not_a_class(**options):
    """Return nothing: a function is no module."""


class Other:
    pass


@pytest.mark.parametrize(
    ("name", "experiment", "changes", "words"),
    [
        ("not_a_class", "vision", {}, ["model.flax = test_flax_model:not_a_class", "nnx.Module"]),
        ("Other", "vision", {}, ["model.flax = test_flax_model:Other", "linen.Module"]),
        ("WrongShape", "vision", {}, ["test_flax_model:WrongShape", "(2, 10)", "(2, 3)"]),
        ("Fails", "vision", {}, ["test_flax_model.py, line", "nowhere"]),
        ("Counts", "vision", {}, ["test_flax_model:Counts", "`count`", "Variable"]),
        (
            "Mistaken",
            "vision",
            {"model__D": 4},
            ["test_flax_model:Mistaken", "`dropout`", "nothing in training", "deterministic"],
        ),
        (
            "Random",
            "vision",
            {"model__D": 4},
            ["test_flax_model:Random", "`dropout`", "on in evaluation", "deterministic"],
        ),
        ("Unnamed", "vision", {}, ["test_flax_model:Unnamed", "(sum, count)", "float32[2, 10]"]),
        ("Sows", "vision", {}, ["test_flax_model:Sows", "`losses.balance`", "(sum, count)"]),
        ("Stateful", "vision", {"train__accumulation": 2}, ["train.accumulation = 2", "batch norm"]),
        ("Tokens", "vision", {}, ["test_flax_model:Tokens", "W"]),
        ("Plain", "vision", {"model__M": 3}, ["model.M"]),
        ("Plain", "vision", {"image__patch": 4}, ["image.patch"]),
        ("Plain", "vision", {"mesh__tensor": 2}, ["mesh.tensor = 2", "model.flax"]),
        ("Misnamed", "language", FSDP, ["mesh.fsdp = 2", "test_flax_model:Misnamed", '"fsdp"']),
        ("Tokens", "language", FSDP, ["mesh.fsdp = 2", "test_flax_model:Tokens", '"fsdp"']),
        ("Sharded", "language", FSDP | {"model__D": 5}, ["mesh.fsdp = 2", "= 5", "embed.embedding"]),
        ("Tokens", "language", {"text__N": 8, "model__window": 4}, ["model.window = 4", "model.flax"]),
        ("Classifier", "text_classification", {"text__head": "linear"}, ["text.head"]),
        ("Tokens", "text_classification", {"text__N": 8}, ["test_flax_model:Tokens", "(2, 2)", "(2, 8, 257)"]),
    ],
)
def test_modules_and_settings_that_do_not_fit_are_refused(reviews, name, experiment, changes, words):
    changes = reviews | changes if experiment == "text_classification" else changes
    with raises(errors.UserError, *words):
        plan_run(settings(name, experiment, **changes))


def test_an_exception_of_a_callback_in_a_module_is_shown(tmp_path):
    changes = tiny.TRAIN | {"text__N": 8, "mesh.data": 1, "model__flax": "test_flax_model:CallsBack"}
    outcome = tiny.run(
        "--config", tiny.config_file(tmp_path, "language", **changes), "--workdir", str(tmp_path / "run")
    )
    assert outcome.code == 1 and "ValueError" in outcome.err and "no number" in outcome.err
