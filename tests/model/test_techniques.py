"""Gated values, exclusive attention, keys as values, capped logits: their equations, causality, caches, sharding."""

import functools
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import layout_cases
import numpy as np
import pytest
import reference
import tiny
from cases import B, D, H, K, N
from errors import raises

from experiments.config import errors
from experiments.model import build
from tfm import head as heads, linear, loss, models
from tfm.attention import heads as attentions, mask as masks, relative_position, value

W, G = 11, 1
TECHNIQUES = {
    "gated": {"value": "gated", "G": 2, "mlp": "relu_squared"},
    "keys, rotated": {"value": "keys", "G": 2, "output_cap": 1.5},
    "keys, not rotated": {"value": "keys", "score": "tied", "relative_position": "none", "position": "learned"},
    "exclusive": {"value": "exclusive", "M": 2},
    "sigmoid weights": {"weights": "user_weights:sigmoid", "G": 2},
    "weights of the user's": {"weights": "user_weights:shares", "score": "tied_noself"},
}


def language(head=heads.next_word, **changes) -> models.Model:
    """Return a token model with these settings of the section `model`."""
    settings = {"M": 1, "D": 16, "H": 4, "relative_position": "rotary", "position": "none", "remat": "none"} | changes
    m = tiny.settings("language", **{f"model__{name}": setting for name, setting in settings.items()}).model
    return build.language_model(m, head=head, W=W, N=N)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attend(params, x_BND, attention):
    """Return the results of causal self-attention, and of cross-attention to the first three tokens."""

    @jax.jit
    def compute(params, x_BND):
        memory = attentions.Memory(x_BND[:, :3], None)
        to_self = cases.self_attention(params, x_BND, spec=attention, mask=masks.causal)
        return to_self, cases.cross_attention(params, x_BND, spec=attention, memory=memory)

    return jax.device_get(compute(params, x_BND))


@pytest.mark.parametrize("name", ["gated", "exclusive"])
@cases.float64()
def test_gated_and_exclusive_values_equal_their_equations(name):
    """All heads share one value. The equation also holds for cross-attention."""
    variant, x_BND = getattr(value, name), np.asarray(cases.normal(1, B, N, D))
    attention = cases.spec(value=variant).attention
    sizes = dict(H=H, K=K, D=D, bias=True)
    params = {"score": cases.draw_params(functools.partial(attention.score.init, **sizes))}
    params |= {"value": cases.draw_params(functools.partial(variant.init, **sizes, M=1, G=G))}
    params |= {"relative_position": {}}
    (y_BND, A_BHNS, cache), across = attend(params, x_BND, attention)
    p, x = jax.device_get(params["value"]), x_BND
    v_BNK = x @ p["Uv_GKD"][0].T + p["bv_GK"][0]
    cases.assert_close(cache["v_BHSV"][:, 0], v_BNK)
    unit_BNK = v_BNK / np.linalg.norm(v_BNK, axis=-1, keepdims=True)

    def compute_slowly(A_BHNS, v_BSK, is_self_attention: bool):
        head_outputs = []
        for h in range(H):
            y_BNK = A_BHNS[:, h] @ v_BSK
            if name == "gated":
                y_BNK = sigmoid(x @ p["Ug_HKD"][h].T) * y_BNK
            elif is_self_attention:
                y_BNK = y_BNK - (y_BNK * unit_BNK).sum(-1, keepdims=True) * unit_BNK
            head_outputs.append(y_BNK @ p["Uo_HDK"][h].T)
        return sum(head_outputs) + p["bo_D"]

    cases.assert_close(y_BND, compute_slowly(A_BHNS, v_BNK, True))
    first_output = np.abs(y_BND[:, 0] - p["bo_D"]).max()  # the first token attends only to itself
    assert first_output < 1e-10 if name == "exclusive" else first_output > 0.1
    y_BND, A_BHNS, cache = across
    cases.assert_close(y_BND, compute_slowly(A_BHNS, cache["v_BHSV"][:, 0], False))


@pytest.mark.parametrize(("is_rotated", "G"), [(True, H), (False, 1)])
@cases.float64()
def test_values_that_are_keys_equal_low_rank_values_with_the_matrix_of_the_keys(is_rotated, G):
    """Values are the keys before rotation. Without rotation, the cache has one array for both.

    The test includes cross-attention.
    """
    position_changes = {"relative_position": relative_position.rotary} if is_rotated else {}
    attention = cases.spec(value=value.keys, **position_changes).attention
    x_BND, sizes = np.asarray(cases.normal(1, B, N, D)), dict(H=H, K=K - 1, D=D, G=G, bias=True)
    params = {"score": cases.draw_params(functools.partial(attention.score.init, **sizes)), "relative_position": {}}
    params |= {"value": cases.draw_params(functools.partial(value.keys.init, **sizes, M=1))}
    assert params["value"].keys() == {"Uo_HDK", "bo_D"}
    key, U_o = jax.device_get((params["score"], params["value"]["Uo_HDK"]))
    either = {name.replace("_GK", "_HK"): np.repeat(x, H // G, 0) for name, x in key.items() if "_GK" in name}
    U_k, b_k = ((key | either)[name] for name in ("Uk_HKD", "bk_HK"))
    for (y_BND, A_BHNS, cache), x_BSD in zip(attend(params, x_BND, attention), (x_BND, x_BND[:, :3]), strict=True):
        assert cache.keys() == {"k_BHSK"} | ({"v_BHSV"} if is_rotated and x_BSD is x_BND else set())
        for y_ND, A_HNS, x_SD in zip(y_BND, A_BHNS, x_BSD, strict=True):
            A_HSN, b_o = A_HNS.swapaxes(1, 2), np.asarray(params["value"]["bo_D"])
            cases.assert_close(y_ND.T, reference.low_rank_multi_head(x_SD.T, U_o, U_k, A_HSN, b_k, b_o))


def test_exclusive_with_a_value_of_zero_subtracts_nothing_and_has_a_finite_gradient():
    y, zero = cases.normal(1, 1, 1, 2, K), np.zeros((1, 1, 2, K), np.float32)

    @jax.jit
    def differentiate(y, v):
        output, vjp = jax.vjp(lambda y, v: value.exclusive.post_process({}, y, None, v), y, v)
        return output, vjp(jnp.ones_like(output))

    output, gradient = differentiate(y, zero)
    cases.assert_close(output, y)
    assert all(np.isfinite(leaf).all() for leaf in gradient)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_are_causal_and_equal_with_a_cache(name):
    model = language(**TECHNIQUES[name])
    params, w_BN = jax.device_get(cases.draw_params(model.init)), np.random.default_rng(0).integers(0, W, (3, N))
    apply_model = jax.jit(functools.partial(model.apply, mask=masks.causal))

    def apply(params, w_BN):
        return np.asarray(apply_model(params, w_BN)[0])

    logits_BNW = apply(params, w_BN)
    other_BNW = apply(params, np.where(np.arange(N) < 4, w_BN, (w_BN + 1) % W))
    np.testing.assert_array_equal(other_BNW[:, :4], logits_BNW[:, :4])
    assert (other_BNW[:, 4:] != logits_BNW[:, 4:]).any(-1).all()
    start = jax.jit(functools.partial(model.start, capacity=N, mask=masks.causal))
    logits_BW, cache = start(params, w_BN[:, :3], np.full(3, 3))
    cases.assert_close(logits_BW, logits_BNW[:, 2], 1e-5)
    step = jax.jit(lambda *arrays: model.step(model.by_layer(params), *arrays, mask=masks.causal))
    for n in range(3, N):
        logits_BW, cache = step(cache, w_BN[:, n], np.full(3, n))
        cases.assert_close(logits_BW, logits_BNW[:, n], 1e-5)


def test_mapped_parameters_are_used_by_every_function_of_a_model():
    model, w_BN = language(G=2), np.random.default_rng(0).integers(0, W, (3, N))
    mapped, weight_BN = models.map_params(model, lambda params: quantise(params)), np.ones((3, N), np.float32)

    def quantise(params):
        return jax.tree.map(lambda x: jnp.round(4 * x) / 4, params)

    def compute(model, params):
        x_BND, _ = model.hidden(params, w_BN, mask=masks.causal)
        start_BW, cache = model.start(params, w_BN[:, :3], np.full(3, 3), capacity=N, mask=masks.causal)
        step_BW, _ = model.step(model.by_layer(params), cache, w_BN[:, 3], np.full(3, 3), mask=masks.causal)
        of_head = [model.output(params, x_BND), model.logits(params, x_BND), model.loss(params, x_BND, w_BN, weight_BN)]
        return x_BND, start_BW, step_BW, of_head, model.apply(params, w_BN, mask=None)[0]

    params = cases.draw_params(model.init)
    one, other = jax.jit(lambda params: (compute(mapped, params), compute(model, quantise(params))))(params)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert (one[0] != jax.jit(lambda params: compute(model, params))(params)[0]).any()


@pytest.mark.parametrize(("by_token", "sparse"), [(True, False), (True, True), (False, False)])
def test_a_head_of_your_own_predicts_in_training_too(monkeypatch, by_token, sparse):
    """Its logits are cosines, not the products of our head. With by_token, the loss calls it on chunks of tokens."""
    monkeypatch.setattr(loss, "MIN_CHUNKED", 1)
    monkeypatch.setattr(loss, "CHUNK_CPU", 8 * W)

    def cosines(params, x_BND, *, layout):
        return linear.logits(*(x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (x_BND, params["G_WD"])))

    model = language(head=heads.next_word._replace(apply=cosines, by_token=by_token))
    params, w_BN = cases.draw_params(model.init), jnp.arange(3 * N).reshape(3, N) % W
    x_BND, weight_BN = cases.normal(1, 3, N, 16), jnp.ones((3, N))

    def in_training(params):
        return model.loss(params, x_BND, w_BN, weight_BN, sparse=sparse)["loss"][0]

    def from_logits(params):
        return loss.cross_entropy(model.logits(params, x_BND), w_BN, weight_BN)[0]

    results = [jax.jit(jax.value_and_grad(function))(params) for function in (in_training, from_logits)]
    cases.assert_trees_close(*results, 1e-5)
    assert np.abs(jax.jit(model.logits)(params, x_BND)).max() <= 1 + 1e-5


def test_output_cap_is_applied_to_the_logits_of_the_head():
    model_pair, w_BN = [language(output_cap=cap) for cap in (0.0, 0.5)], np.array([[1, 2, 2, 5]])
    weight_BN = np.ones(w_BN.shape, np.float32)

    @jax.jit
    def compute(params):
        logits = [one.apply(params, w_BN, mask=masks.causal)[0] for one in model_pair]
        x_BND, _ = model_pair[1].hidden(params, w_BN, mask=masks.causal)
        total, _ = model_pair[1].loss(params, x_BND, w_BN, weight_BN)["loss"]
        return *logits, total, loss.cross_entropy(logits[1], w_BN, weight_BN)[0]

    logits_BNW, capped_BNW, total, expected = jax.device_get(compute(cases.draw_params(model_pair[0].init)))
    cases.assert_close(capped_BNW, 0.5 * np.tanh(logits_BNW / 0.5), 1e-6)
    assert np.abs(logits_BNW).max() > 0.9
    cases.assert_close(total, expected, 1e-6)


@pytest.mark.parametrize("score", ["asymmetric_qknorm", "nonlinear_query"])
def test_the_norms_of_a_score_have_the_eps_of_the_config(score):
    two_models, w_BN = [language(norm=f"none:{eps}", score=score) for eps in (1e-5, 0.5)], np.arange(4)[None]
    compute = jax.jit(lambda params: [model.apply(params, w_BN, mask=masks.causal)[0] for model in two_models])
    assert np.ptp(jax.device_get(compute(cases.draw_params(two_models[0].init))), axis=0).max() > 1e-3


def test_weights_of_the_user_are_those_of_look():
    """Flash attention in the config, and the same mask: A is the user's function, and 0 for forbidden keys."""
    model, w_BN = language(weights="user_weights:sigmoid", G=2, relative_position="none"), np.array([[1, 2, 2, 5]])
    params = cases.draw_params(model.init)
    _, aux = jax.jit(functools.partial(model.hidden, mask=masks.causal, look=("q", "k", "v", "A")))(params, w_BN)
    q, k, v, A_MBHNS = (np.asarray(aux["look"][name], float) for name in ("q", "k", "v", "A"))
    logits = q @ np.repeat(k, 2, axis=2).swapaxes(-1, -2) / 2  # K = 4
    cases.assert_close(A_MBHNS, np.tri(4) * sigmoid(logits - np.log(np.arange(1, 5))[:, None]), 1e-5)
    assert "model.weights" in model.lines[0] and "explicit" in model.lines[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "sigmoid"}, ["weights", "sigmoid", "softmax", "my_file"]),
        ({"weights": "user_weights:missing"}, ["user_weights", "missing"]),
        ({"weights": "user_weights:one_row"}, ["model.weights", "one_row", "shape"]),
        ({"block": "user_weights:pair"}, ["model.block", "residual"]),
    ],
)
def test_wrong_parts_are_refused(changes, words):
    with raises(errors.UserError, *words):
        language(**changes)


EXCLUSIVE = {"model__value": "exclusive"}
GATED = {"model__value": "gated", "model__output_cap": 0.5}
LAYOUTS = {"1x1x2x1": GATED, "1x2x1x2": EXCLUSIVE}


@pytest.fixture(scope="module")
def task_of(tmp_path_factory):
    return layout_cases.tasks(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_techniques_on_several_devices_have_the_gradient_of_one_device(task_of, sizes, monkeypatch):
    monkeypatch.setitem(layout_cases.KINDS, "techniques", ("language", LAYOUTS[sizes] | layout_cases.FAST_TO_COMPILE))
    expected = layout_cases.gradient(task_of, "techniques", "1x1x1x1", 1)[:2]
    # The loss computes logits in chunks also if devices share the vocabulary.
    chunks = mock.patch.multiple("tfm.loss", MIN_CHUNKED=1, CHUNK=8 * 256)
    layout_cases.assert_agree(chunks(layout_cases.gradient)(task_of, "techniques", sizes, 1)[:2], expected)


def test_weights_of_the_user_refuse_a_shared_sequence(task_of):
    with raises(errors.UserError, "model.weights", "mesh.sequence"):
        task_of("language", layout_cases.mesh_of("1x1x1x2"), model__weights="user_weights:sigmoid")


def test_nonlinear_query_refuses_tensor_parallelism(task_of):
    with raises(errors.UserError, "nonlinear_query", "mesh.tensor"):
        task_of("language", layout_cases.mesh_of("1x1x2x1"), model__score="nonlinear_query")
