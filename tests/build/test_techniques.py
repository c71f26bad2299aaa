"""Techniques that people argue about, in models of tokens: gates, exclusive attention, values that are the keys, capped
logits. Their equations by hand; causal, token by token, and on devices that share the model."""

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

from experiments.build import model as models
from experiments.engine import errors
from tfm import head, loss
from tfm.attention import mask, relative_position, spec as attentions, value

W, G = 11, 1
TECHNIQUES = {
    "gated": {"value": "gated", "G": 2, "mlp": "relu_squared"},
    "keys, turned": {"value": "keys", "G": 2, "output_cap": 1.5},
    "keys alone": {"value": "keys", "score": "tied", "relative_position": "none", "position": "learned"},
    "exclusive": {"value": "exclusive", "M": 2},
}


def language(**changes) -> models.Model:
    """A model of words with these settings of the section `model`."""
    own = {"M": 1, "D": 16, "H": 4, "relative_position": "rotary", "position": "none", "remat": "none"} | changes
    m = tiny.settings("language", **{f"model__{name}": setting for name, setting in own.items()}).model
    return models.build_language_model(m, head=head.next_word, W=W, N=N)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("name", ["gated", "exclusive"])
@cases.float64()
def test_what_becomes_of_the_averages_of_heads_is_its_equation(name):
    """One value serves all heads; the equation also holds between two sequences."""
    of, x_BND = getattr(value, name), cases.normal(1, B, N, D)
    attention = cases.spec(value=of).attention
    sizes = dict(H=H, K=K, D=D, bias=True)
    params = {"score": cases.drawn(functools.partial(attention.score.init, **sizes))}
    params |= {"value": cases.drawn(functools.partial(of.init, **sizes, M=1, G=G))}
    params |= {"relative_position": {}}
    attend = jax.jit(functools.partial(cases.self_attention, spec=attention, mask=mask.causal))
    y_BND, A_BHNS, cache = jax.device_get(attend(params, x_BND))
    p, x = jax.device_get((params["value"], x_BND))
    v_BNK = x @ p["Uv_GKD"][0].T + p["bv_GK"][0]
    cases.close(cache["v_BHSV"][:, 0], v_BNK)
    along = v_BNK / np.linalg.norm(v_BNK, axis=-1, keepdims=True)

    def answer(A_BHNS, v_BSK, own: bool):
        parts = []
        for h in range(H):
            y_BNK = A_BHNS[:, h] @ v_BSK
            if name == "gated":
                y_BNK = sigmoid(x @ p["Ug_HKD"][h].T) * y_BNK
            elif own:
                y_BNK = y_BNK - (y_BNK * along).sum(-1, keepdims=True) * along
            parts.append(y_BNK @ p["Uo_HDK"][h].T)
        return sum(parts) + p["bo_D"]

    cases.close(y_BND, answer(A_BHNS, v_BNK, True))
    first_BD = np.abs(y_BND[:, 0] - p["bo_D"]).max()  # it sees nothing but its own value
    assert first_BD < 1e-10 if name == "exclusive" else first_BD > 0.1
    ask = functools.partial(cases.cross_attention, spec=attention, memory=attentions.Memory(x_BND[:, :3], None))
    y_BND, A_BHNS, cache = jax.device_get(jax.jit(ask)(params, x_BND))
    cases.close(y_BND, answer(A_BHNS, cache["v_BHSV"][:, 0], False))


@pytest.mark.parametrize(("turned", "G"), [(True, H), (False, 1)])
@cases.float64()
def test_values_that_are_keys_are_of_low_rank_with_the_matrix_of_the_keys(turned, G):
    """Before positions turn them; where none does, what is kept for later words is one array. Between sequences too."""
    own = {"relative_position": relative_position.rotary} if turned else {}
    attention, x_BND = cases.spec(value=value.keys, **own).attention, cases.normal(1, B, N, D)
    parts, sizes = {"score": attention.score, "value": value.keys}, dict(H=H, K=K - 1, D=D, G=G, bias=True)
    more = {"score": {}, "value": {"M": 1}}
    params = {name: cases.drawn(functools.partial(of.init, **sizes, **more[name])) for name, of in parts.items()}
    params |= {"relative_position": {}}
    assert params["value"].keys() == {"Uo_HDK", "bo_D"}
    memory = attentions.Memory(x_BND[:, :3], None)
    attend = jax.jit(functools.partial(cases.self_attention, spec=attention, mask=mask.causal))
    ask = jax.jit(functools.partial(cases.cross_attention, spec=attention, memory=memory))
    key, U_o = params["score"], np.asarray(params["value"]["Uo_HDK"])
    U_k, b_k = (
        np.repeat(key.get(f"{name}_HK{d}", key.get(f"{name}_GK{d}")), H // G, 0)
        for name, d in (("Uk", "D"), ("bk", ""))
    )
    for found, x_BSD in ((attend(params, x_BND), x_BND), (ask(params, x_BND), memory.x_BSD)):
        y_BND, A_BHNS, cache = jax.device_get(found)
        assert cache.keys() == {"k_BHSK"} | ({"v_BHSV"} if turned and x_BSD is x_BND else set())
        for y_ND, A_HNS, x_SD in zip(y_BND, A_BHNS, np.asarray(x_BSD), strict=True):
            A_HSN, b_o = A_HNS.swapaxes(1, 2), np.asarray(params["value"]["bo_D"])
            cases.close(y_ND.T, reference.low_rank_multi_head(x_SD.T, U_o, U_k, A_HSN, b_k, b_o))


def test_a_value_of_zero_takes_nothing_away_and_has_a_finite_gradient():
    y, zero = cases.normal(1, 1, 1, 2, K), jnp.zeros((1, 1, 2, K))

    @jax.jit
    def both(y, v):
        left, pull = jax.vjp(lambda y, v: value.exclusive.post_process({}, y, None, v), y, v)
        return left, pull(jnp.ones_like(left))

    left, gradient = both(y, zero)
    cases.close(left, y)
    assert all(np.isfinite(leaf).all() for leaf in gradient)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_later_words_change_nothing_and_word_by_word_is_the_whole(name):
    model = language(**TECHNIQUES[name])
    params, w_BN = jax.device_get(cases.drawn(model.init)), np.random.default_rng(0).integers(0, W, (3, N))
    run = jax.jit(functools.partial(model.apply, mask=mask.causal))
    step = jax.jit(functools.partial(model.step, mask=mask.causal))

    def apply(params, w_BN):
        return np.asarray(run(params, w_BN)[0])

    logits_BNW = apply(params, w_BN)
    other_BNW = apply(params, np.where(np.arange(N) < 4, w_BN, (w_BN + 1) % W))
    np.testing.assert_array_equal(other_BNW[:, :4], logits_BNW[:, :4])
    assert (other_BNW[:, 4:] != logits_BNW[:, 4:]).any(-1).all()
    start = jax.jit(functools.partial(model.start, capacity=N, mask=mask.causal))
    found_BW, cache = start(params, w_BN[:, :3], np.full(3, 3))
    cases.close(found_BW, logits_BNW[:, 2], 1e-5)
    layers = jax.device_get(model.by_layer(params))
    for n in range(3, N):
        found_BW, cache = step(layers, cache, w_BN[:, n], np.full(3, n))
        cases.close(found_BW, logits_BNW[:, n], 1e-5)


def test_a_cap_is_on_what_the_head_says():
    both, w_BN = [language(output_cap=cap) for cap in (0.0, 0.5)], np.array([[1, 2, 2, 5]])
    weight_BN = np.ones(w_BN.shape, np.float32)

    @jax.jit
    def answers(params):
        logits = [of.apply(params, w_BN, mask=mask.causal)[0] for of in both]
        x_BND, matrix = both[1].output(params, both[1].hidden(params, w_BN, mask=mask.causal)[0])
        total, _ = loss.next_token(x_BND, matrix, w_BN, weight_BN, cap=both[1].spec.cap)["loss"]
        return *logits, total, loss.cross_entropy(logits[1], w_BN, weight_BN)[0]

    plain, capped, total, expected = jax.device_get(answers(cases.drawn(both[0].init)))
    cases.close(capped, 0.5 * np.tanh(plain / 0.5), 1e-6)
    assert np.abs(plain).max() > 0.9
    cases.close(total, expected, 1e-6)


@pytest.mark.parametrize("score", ["asymmetric_qknorm", "nonlinear_query"])
def test_the_norms_of_a_score_have_the_eps_of_the_config(score):
    both = [language(norm=f"none:{eps}", score=score) for eps in (1e-5, 0.5)]
    answers = jax.jit(lambda params: [of.apply(params, np.arange(4)[None], mask=mask.causal)[0] for of in both])
    assert np.ptp(answers(cases.drawn(both[0].init)), axis=0).max() > 1e-3


EXCLUSIVE = {"model__value": "exclusive"}
GATED = {"model__value": "gated", "model__output_cap": 0.5}
LAYOUTS = {"1x1x2x1": GATED, "1x2x1x2": EXCLUSIVE}


@pytest.fixture(scope="module")
def task_of(tmp_path_factory):
    return layout_cases.tasks(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_devices_have_the_gradient_of_one(task_of, sizes, monkeypatch):
    monkeypatch.setitem(layout_cases.KINDS, "techniques", ("language", LAYOUTS[sizes] | layout_cases.FEW))
    expected = layout_cases.gradient(task_of, "techniques", "1x1x1x1", 1)[:2]
    chunks = mock.patch.multiple("tfm.loss", FROM=1, LOGITS=8 * 256)  # also of a vocabulary that devices share
    layout_cases.agree(chunks(layout_cases.gradient)(task_of, "techniques", sizes, 1)[:2], expected)


def test_a_score_that_cuts_tokens_is_not_shared(task_of):
    with raises(errors.UserError, "nonlinear_query", "mesh.tensor"):
        task_of("language", layout_cases.mesh_of("1x1x2x1"), model__score="nonlinear_query")
