"""Maximal update parametrisation: its factors, and what the coordinate check measures with and without it."""

import jax
import numpy as np
import pytest
import tiny
from errors import raises
from scipy.special import log_softmax

from experiments.config import errors
from experiments.devices import mesh as meshes
from experiments.engine import optim, run_plan
from experiments.model.task import look
from experiments.tools import coordinate_check
from tfm import mup, shapes

BASE = 16  # the base width
TEXT = dict(text__N=8, text__tokenizer="characters")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(tiny.TEXT)
    return str(file)


def make_work(text, **changes):
    """Return the task of a language model."""
    changes = {"text__source": text, "model__H": 2, "model__M": 1} | TEXT | changes
    return tiny.work_of(tiny.settings("language", **changes))


def make(text, **changes):
    return make_work(text, **changes).task


def compute(function, variants):
    """Return the function of each variant, computed as one program."""
    return jax.device_get(jax.jit(lambda: [function(variant) for variant in variants])())


def update_once(params, gradient, *variants):
    """Return the optimiser's first update by path for each of these settings."""

    def update(values):
        _, rule = optim.make_optimiser(values)
        return rule.update(gradient, rule.init(params), params)[0]

    return map(shapes.flat, compute(update, variants))


def test_names_state_which_sides_grow_with_the_width():
    """(outputs, inputs); a table of rows, E_WD or P_ND, has one-hot rows as outputs."""
    assert mup.grows("embed/W_DP") == (True, False)
    assert mup.grows("head/G_WD") == mup.grows("embed/E_WD") == mup.grows("position/P_ND") == (False, True)
    for path in ("score/Uq_HKD", "value/Uo_HDK", "value/V_HDD", "mlp/W1_FD", "mlp/W2_XDF"):
        assert mup.grows(f"blocks/{path}") == (True, True)
    with pytest.raises(ValueError, match="axis Q of A_QD"):
        mup.grows("A_QD")


def test_at_the_base_width_nothing_changes(text):
    def begin(task):
        params = task.init(jax.random.key(0))
        return params, task.loss(params, task.train[0])[0]["loss"][0]

    for changes in ({}, {"text__head": "tied"}):
        tasks = (make(text, model__D=BASE, model__mup=n, **changes) for n in (0, BASE))
        (params, loss), (params_mup, loss_mup) = compute(begin, tasks)
        jax.tree.map(np.testing.assert_array_equal, params, params_mup)
        assert loss == loss_mup


def test_initial_values_logits_and_output_of_a_wider_model(text):
    works = [make_work(text, model__D=4 * BASE, model__mup=n) for n in (0, BASE)]
    params, params_mup = compute(lambda work: work.task.init(jax.random.key(0)), works)
    plain, wide = shapes.flat(params), shapes.flat(params_mup)
    for path in plain:
        factor = 2.0 if path.startswith(("embed/", "position/")) else 1.0  # sqrt(D / D_0): as at the base width
        np.testing.assert_allclose(wide[path], factor * plain[path], rtol=1e-6, err_msg=path)
    batch = works[0].task.evaluation[0]
    uniform = params | {"blocks": jax.tree.map(np.zeros_like, params["blocks"])}  # equal tokens before the head

    def measure(work):  # with equal parameters
        activations, output = look(work, params, batch, ("q", "A")), look(work, uniform, batch, ())["logits"]
        return activations["q"][0], activations["A"][0][..., -1, :], output

    (q, last, output), (q_mup, last_mup, output_mup) = compute(measure, works)
    np.testing.assert_allclose(q, q_mup, atol=1e-6)
    logits, logits_mup = (np.log(x / x[..., :1]) for x in (last, last_mup))  # of the last token, which may see all
    np.testing.assert_allclose(logits_mup, logits / 2, atol=1e-4)  # 1 / sqrt(r)
    np.testing.assert_allclose(output_mup, output / 4, atol=1e-6)  # 1 / r


def test_the_factor_of_the_output_follows_the_layer_before_it(tmp_path):
    """The class logits of a text are those of G / r and the same layer tanh(W x_0 + b)."""
    (tmp_path / "texts.csv").write_text("text,label\n" + "".join(f"{i} kings,{i % 3}\n" for i in range(30)))
    config = dict(text__head="tanh", text__N=16, text__source=str(tmp_path / "texts.csv"), model__D=32, model__M=1)
    works = [tiny.work_of(tiny.settings("text_classification", model__mup=n, **config)) for n in (0, 8)]
    params = tiny.draw_params(works[0].task)
    params["blocks"] = jax.tree.map(np.zeros_like, params["blocks"])
    scaled = params | {"head": params["head"] | {"G_CD": np.asarray(params["head"]["G_CD"]) / 4}}
    batch = works[0].task.evaluation[0]
    pairs = (works[0], scaled), (works[1], params)
    expected, logits = compute(lambda one: one[0].apply(one[1], batch), pairs)
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_the_optimiser_divides_the_steps_of_matrices(text):
    values = tiny.settings("language", text__source=text, model__D=32, model__mup=8, optim__weight_decay=0.0, **TEXT)
    params = tiny.draw_params(make(text, model__D=32))
    gradient = jax.tree.map(np.ones_like, params)
    plain, scaled = update_once(params, gradient, values.replace({"model.mup": 0}), values)
    for path, update in plain.items():
        factor = 4.0 if path.split("/")[0] == "blocks" and shapes.is_matrix(path) else 1.0
        np.testing.assert_allclose(scaled[path] * factor, update, rtol=1e-5, err_msg=path)


def test_deeper_models_scale_what_a_stage_adds_last(text):
    """Compared with a model of the same depth without it: 1/s^a on the branches, s^(a-1) on the rates (s = 2)."""
    deep = dict(model__D=8, model__M=4, model__mup=8)
    tasks = [make(text, **deep, model__mup_depth=depth) for depth in ("", *(f"{name}:2" for name in mup.DEPTH))]
    params, *scaled_params = compute(lambda task: task.init(jax.random.key(0)), tasks)
    plain = shapes.flat(params)
    ends = {"value/Uo_HDK", "value/bo_D", "mlp/W2_DF", "mlp/b2_D"}
    assert {path.removeprefix("blocks/") for path in plain if mup.ends_branch(path)} == ends
    for exponent, scaled in zip(mup.DEPTH.values(), map(shapes.flat, scaled_params), strict=True):
        for path in plain:
            factor = 2 ** (0.5 - exponent) if mup.ends_branch(path) else 1.0  # 1/sqrt(2 M) is there without it
            np.testing.assert_allclose(scaled[path], factor * plain[path], rtol=1e-6, err_msg=path)
    gradient = jax.tree.map(lambda x: np.linspace(1, 2, x.size, dtype=np.float32).reshape(x.shape), params)
    for name in ("adamw", "muon"):
        values = tiny.settings("language", text__source=text, optim__name=name, optim__weight_decay=0.0, **deep, **TEXT)
        variants = [values.replace({"model.mup_depth": f"{method}:2"}) for method in mup.DEPTH]
        unscaled, *updates = update_once(params, gradient, values, *variants)
        for exponent, scaled in zip(mup.DEPTH.values(), updates, strict=True):
            for path, update in unscaled.items():
                factor = 2 ** (exponent - 1) if path.startswith("blocks/") else 1.0
                factor *= 2**-exponent if mup.ends_branch(path) else 1.0
                np.testing.assert_allclose(scaled[path], factor * update, rtol=1e-4, err_msg=(name, exponent, path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__scale": "1"}, ["model.mup = 8", "model.scale"]),
        ({"model__mup": -1}, ["model.mup = -1"]),
        ({"optim__name": "optax:lion"}, ["model.mup = 8", "adamw"]),
        ({"model__mlp": "test_coordinate_check:unknown_axis"}, ["model.mup = 8", "axis Q"]),
        ({"model__mup_depth": "deep:2"}, ["model.mup_depth = deep:2", "completep:2"]),
        ({"model__mup_depth": "completep:0"}, ["model.mup_depth = completep:0", "completep:2"]),
        ({"model__mup_depth": "completep:2", "model__mup": 0}, ["model.mup_depth = completep:2", "model.mup"]),
        ({"model__mup_depth": "completep:2", "model__block": "post_norm"}, ["model.mup_depth", "pre_norm"]),
        ({"model__mup_depth": "completep:2", "model__value": "identity"}, ["model.mup_depth", "model.value"]),
    ],
)
def test_what_maximal_update_parametrisation_cannot_scale_is_refused(text, changes, words):
    mesh = meshes.make(data=1)
    with raises(errors.UserError, *words):
        values = tiny.settings("language", text__source=text, **{"model__mup": 8, **TEXT, **changes})
        task = tiny.work_of(values, mesh).task
        jax.eval_shape(task.init, jax.random.key(0))
        run_plan.make_plan(values, task, mesh)


def test_maximal_update_parametrisation_of_another_model_is_refused():
    values, mesh = tiny.settings("convolution", model=False, model__mup=8), meshes.make(data=1)
    with raises(errors.UserError, "model.mup = 8"):
        run_plan.make_plan(values, tiny.work_of(values, mesh).task, mesh)


def init_unknown(key, *, D, F, M, bias):
    return {"A_QD": np.ones((3, D), np.float32)}


unknown_axis = init_unknown, lambda params, x_BND: x_BND @ params["A_QD"].T @ params["A_QD"]


def test_activations_by_name_are_those_of_the_forward_pass(text):
    work = make_work(text, model__M=2)
    task = work.task
    batch, params = task.evaluation[0], tiny.draw_params(task)
    names = ("q", "k", "v", "attention", "mlp", "hidden")
    [seen, (metrics, _)] = compute(lambda f: f(params, batch), [lambda *given: look(work, *given, names), task.loss])
    M, H, D, N = 2, 2, 8, 8
    assert seen["q"].shape == seen["k"].shape == seen["v"].shape == (M, len(batch["w_BN"]), H, N, D // H)
    assert seen["hidden"].shape == seen["mlp"].shape == (M, len(batch["w_BN"]), N, D)
    added = seen["hidden"][1] - seen["hidden"][0]
    np.testing.assert_allclose(added, seen["attention"][1] + seen["mlp"][1], atol=1e-5)
    chosen = np.take_along_axis(log_softmax(seen["logits"], -1), batch["target_BN"][..., None], -1)[..., 0]
    np.testing.assert_allclose(-(chosen * batch["weight_BN"]).sum(), metrics["loss"][0], rtol=1e-5)


BY_WIDTH = ["q", "k", "v", "attention", "mlp", "hidden", "logits"]
MUP, DEPTH_MUP, MORE = ["model.mup=64"], ["model.mup=64", "model.mup_depth=depth_mup:2"], pytest.mark.slow
SMALL = ["text.N=16", "seed=2"]  # a small text has the same slopes in all versions of Python
REMAT = ["model.D=32", "model.remat=full"]  # with remat the layers are a loop, which compiles faster


@pytest.mark.parametrize(
    ("flags", "settings", "largest"),  # the largest |slope| of each stage with it; None: without it
    [
        pytest.param({"widths": "64,128,256,512"}, MUP, dict.fromkeys(BY_WIDTH, 0.1), marks=MORE),
        pytest.param({"widths": "64,256"}, ["model.mup=0"], None, marks=MORE),
        pytest.param({"depths": "2,4,8,16"}, DEPTH_MUP, {"last layer": 0.2, "logits": 0.1}, marks=MORE),
        pytest.param({"depths": "2,8"}, MUP, None, marks=MORE),
        ({"widths": "32,128", "steps": 4}, ["model.mup=0", "model.M=1", *SMALL], None),
        ({"depths": "2,8", "steps": 4}, [*DEPTH_MUP, *SMALL, *REMAT], {"last layer": 0.25, "logits": 0.1}),
    ],
)
def test_changes_do_not_depend_on_the_size_with_it_and_grow_without(flags, settings, largest, text, tmp_path):
    """The text is small, or Python's own source. Slopes of few or small sizes differ from 0 by up to 0.2 by chance."""
    source = {"text.source": text} if "steps" in flags else {}
    config = tiny.config_file(tmp_path, "language", **{"model.M": 2, "train.batch_size": 16}, **source)
    figure = {"workdir": str(tmp_path / "out")} if "widths" in flags else {}
    settings = [*settings, "optim.learning_rate=3e-3"]
    outcome = tiny.command(coordinate_check, config=config, set=settings, **flags, **figure)
    assert outcome.code == 0, outcome.err
    slopes = {line[:14].strip(): float(line.split()[-2]) for line in outcome.out.splitlines()[1:9]}
    if figure:
        assert (tmp_path / "out" / "coordinate_check.png").read_bytes().startswith(b"\x89PNG")
    assert slopes.keys() == {*BY_WIDTH, "last layer"}
    if largest is None:
        assert slopes["last layer"] > (0.4 if "steps" in flags else 0.5), slopes
    else:
        assert all(abs(slopes[stage]) < limit for stage, limit in largest.items()), slopes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(config=""), ["--config"]),
        (dict(widths="64"), ["--widths=64"]),
        (dict(widths="64,x"), ["--widths=64,x"]),
        (dict(depths="4,0"), ["--depths=4,0"]),
        (dict(set=["model.mup"]), ["--set=model.mup"]),
        (dict(config="configs/convolution.py"), ["convolution", "activations"]),
    ],
)
def test_bad_arguments_are_refused(values, words, tmp_path):
    message = tiny.refusal(coordinate_check, **{"config": "configs/vit.py"} | values)
    assert all(word in message for word in words)
