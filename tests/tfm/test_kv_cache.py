"""E23: one token at a time gives what the whole sequence gives, for every variant that permits it."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import N

from tfm import attention, kernels, linear, norm, position
from tfm.attention import explicit, mask, relative_position, score, value
from tfm.decode import generate, kv_cache

SMALL = dict(D=12, H=2, K=4, F=7, M=2)
CASES = {
    "default": {},
    "tied": dict(score=score.tied),
    "none": dict(score=score.none),
    "constant": dict(score=score.constant, relative_position=relative_position.relative),
    "full rank": dict(value=value.full_rank),
    "identity": dict(value=value.identity),
    "none, full rank": dict(score=score.none, value=value.full_rank),
    "sinusoidal": dict(position=position.sinusoidal),
    "learned, concatenated": dict(position=position.learned_concatenated),
    "sinusoidal, concatenated": dict(position=position.sinusoidal_concatenated),
    "rotary": dict(position=position.none, relative_position=relative_position.rotary),
    "rotary halves": dict(position=position.none, relative_position=relative_position.rotary_halves),
    "rotary, tied": dict(position=position.none, relative_position=relative_position.rotary, score=score.tied),
    "relative": dict(position=position.none, relative_position=relative_position.relative),
    "buckets": dict(position=position.none, relative_position=relative_position.buckets),
    "alibi": dict(position=position.none, relative_position=relative_position.alibi),
    "no position": dict(position=position.none),
    "batch norm": dict(norm=norm.batch),
    "flash": dict(compute=attention.IMPLEMENTATIONS.get("flash")),
    "fused": dict(compute=attention.IMPLEMENTATIONS.get("fused")),
}


def functions(name: str, length: int = N, mask_=mask.causal):
    """(params, whole, start, step) of a small model."""
    model = cases.model(sizes=SMALL | dict(N=N + 4), **CASES[name])
    params = cases.drawn(model.init)
    if "norm" in CASES[name]:  # a variance is positive
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.abs(leaf) + 0.5 if path[-1].key == "var_D" else leaf, params
        )
    start = functools.partial(kv_cache.start, params, capacity=N + 3, mask=mask_, parts=model.parts)
    step = functools.partial(kv_cache.step, params, mask=mask_, parts=model.parts)
    return params, functools.partial(model.apply, params, mask=mask_), jax.jit(start), jax.jit(step)


@pytest.mark.parametrize("name", CASES)
@cases.float64()
def test_every_position_through_the_cache_equals_the_full_pass(name):
    """Prompts of 2 and 4 words at once, each continued from its own end to the last word of the sequence."""
    _, whole, start, step = functions(name)
    tolerance = 1e-6 if name == "fused" else 1e-9  # whose softmax is in float32
    w_BN, length_B = cases.words(), jnp.array([2, 4])
    full_BNW = whole(w_BN)
    logits_BW, cache = start(w_BN[:, :4], length_B)
    rows = jnp.arange(len(w_BN))
    cases.close(logits_BW, full_BNW[rows, length_B - 1], tolerance)
    for t in range(N - 4):
        n_B = length_B + t
        logits_BW, cache = step(cache, w_BN[rows, n_B], n_B)
        cases.close(logits_BW, full_BNW[rows, n_B], tolerance)


@cases.float64()
def test_a_sliding_window_through_the_cache_equals_the_full_pass():
    near = mask.both(mask.causal, mask.window(3))
    _, whole, start, step = functions("rotary", mask_=near)
    w_BN = cases.words()
    full_BNW = whole(w_BN)
    assert np.abs(full_BNW - functions("rotary")[1](w_BN)).max() > 0.01
    logits_BW, cache = start(w_BN[:, :1], jnp.ones(2, int))
    for n in range(1, N):
        logits_BW, cache = step(cache, w_BN[:, n], jnp.full(2, n))
        cases.close(logits_BW, full_BNW[:, n], 1e-9)


@cases.float64()
def test_greedy_text_is_the_same_with_the_cache_and_without():
    _, whole, start, step = functions("rotary")
    prompt_BN, key = cases.words(3, n=2), jax.random.key(0)
    with_cache, _ = generate.generate(
        start, step, prompt_BN, jnp.full(2, 2), key, steps=N - 2, temperature=0.0, top_k=0, top_p=1.0
    )
    anew = generate.sample(whole, prompt_BN, key, steps=N - 2, context=N, temperature=0.0, top_k=0, top_p=1.0)
    np.testing.assert_array_equal(with_cache, anew)


def test_a_norm_that_looks_at_later_tokens_is_refused():
    model = cases.model(norm=norm.instance, sizes=SMALL)
    params = cases.drawn(model.init)
    with pytest.raises(ValueError, match="instance norm looks at later tokens"):
        kv_cache.start(params, cases.words(), jnp.full(2, N), capacity=N, mask=mask.causal, parts=model.parts)


@cases.float64()
def test_parameters_by_layer_and_a_cache_that_grows_change_nothing():
    model = cases.model(sizes=SMALL | dict(N=N), position=position.none, relative_position=relative_position.rotary)
    params, w_BN = cases.drawn(model.init), cases.words()
    call = {"mask": mask.causal, "parts": model.parts}
    logits_BW, cache = kv_cache.start(params, w_BN[:, :2], jnp.full(2, 2), capacity=3, **call)
    layers = kv_cache.by_layer(params)
    step = jax.jit(functools.partial(kv_cache.step, **call))
    full_BNW = model.apply(params, w_BN, mask=mask.causal)
    for n in range(2, N):
        if n == kv_cache.places(cache):
            cache = kv_cache.grow(cache, n + 2)
        logits_BW, cache = step(layers, cache, w_BN[:, n], jnp.full(2, n))
        cases.close(logits_BW, full_BNW[:, n], 1e-9)
    assert kv_cache.places(cache) in (N, N + 1)


@pytest.mark.parametrize("shared", [False, True])
@cases.float64()
def test_attention_of_one_query_is_the_explicit_one_whatever_is_hidden(shared):
    """Also a NaN: none that the mask hides reaches an answer, and one that it shows reaches all of its query's."""
    rng = np.random.default_rng(0)
    q_BHNK = jnp.asarray(rng.standard_normal((2, 3, 1, 5)))
    k_BHSK, v_BHSV = (jnp.asarray(rng.standard_normal((2, 1 if shared else 3, 7, K))) for K in (5, 11))
    n = jnp.array([[3], [5]])
    call = dict(mask=mask.both(mask.causal, mask.window(3)), scale=0.3, bias=relative_position.alibi.bias({}, 3), n=n)
    expected_BHNV, A_BHNS = explicit.attention(q_BHNK, k_BHSK, v_BHSV, **call)
    hidden = (v_BHSV.at[0, 0, 0].set(jnp.nan).at[1, 0, 6].set(jnp.inf), k_BHSK.at[0, 0, 6].set(jnp.nan))
    for k, v in ((k_BHSK, v_BHSV), hidden[::-1]):
        y_BHNV, found_BHNS = kv_cache.attend(q_BHNK, k, v, **call)
        cases.close(y_BHNV, expected_BHNV, 1e-12)
        cases.close(found_BHNS, A_BHNS, 1e-12)
    y_BHNV, _ = kv_cache.attend(q_BHNK, k_BHSK, v_BHSV.at[0, 0, 2, 1].set(jnp.nan), **call)
    assert np.isnan(y_BHNV[0]).all()
    cases.close(y_BHNV[1], expected_BHNV[1], 1e-12)


@pytest.mark.parametrize("rows", [1, 2, kernels.FEW, kernels.FEW + 1])
def test_few_rows_are_multiplied_as_many_are(rows):
    x_TD, W_HKD, b_HK = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, 5), (2, 3, 5), (2, 3)])
    )
    expected = np.einsum("td,hkd->thk", x_TD, W_HKD) + np.asarray(b_HK)
    np.testing.assert_allclose(jax.jit(linear.rows)(x_TD, W_HKD, b_HK), expected, rtol=1e-5, atol=1e-5)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(linear.rows(x, W_HKD, b_HK))))(x_TD)
    np.testing.assert_allclose(slope, np.einsum("thk,hkd->td", np.cos(expected), W_HKD), rtol=1e-4, atol=1e-5)


def test_a_word_is_written_at_its_own_place_and_not_beyond_the_end():
    rng = np.random.default_rng(0)
    cache_BHSK, new_BHNK = rng.standard_normal((3, 2, 5, 7)), rng.standard_normal((3, 2, 1, 7))
    expected = cache_BHSK.copy()
    expected[0, :, 4], expected[2, :, 1] = new_BHNK[0, :, 0], new_BHNK[2, :, 0]
    found = jax.jit(kernels.write)(jnp.asarray(cache_BHSK), jnp.asarray(new_BHNK), jnp.array([[4], [5], [1]]))
    np.testing.assert_array_equal(found, expected.astype(found.dtype))
    beyond = jax.jit(kernels.write)(jnp.asarray(cache_BHSK), jnp.asarray(new_BHNK), jnp.full((3, 1), 5))
    np.testing.assert_array_equal(beyond, cache_BHSK.astype(beyond.dtype))


@pytest.mark.parametrize("name", ["default", "relative"])
def test_parameters_of_numpy_are_decoded_with_as_those_of_jax(name):
    """Inside the loop the words are traced, and numpy's arrays give no rows of such."""
    params, _, _, _ = functions(name)
    model = cases.model(sizes=SMALL | dict(N=N + 4), **CASES[name])
    call = dict(mask=mask.causal, parts=model.parts)

    @jax.jit
    def text(w_BN):
        start = functools.partial(kv_cache.start, numpys, capacity=N + 3, **call)
        step = functools.partial(kv_cache.step, kv_cache.by_layer(numpys), **call)
        return generate.generate(start, step, w_BN, np.array([2, 4]), jax.random.key(0), steps=5, temperature=0)[0]

    numpys = jax.device_get(params)
    found_BN = np.asarray(text(cases.words()[:, :4]))
    for b, length in enumerate((2, 4)):
        words = found_BN[b]
        logits_1NW = model.apply(params, words[None, : length + 4], mask=mask.causal)
        np.testing.assert_array_equal(words[length : length + 5], np.argmax(logits_1NW[0, length - 1 :], axis=-1))
