"""E23: one token at a time gives what the whole sequence gives, for every variant that permits it."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import N

from tfm import attention, norm, position
from tfm.attention import mask, relative_position, score, value
from tfm.decode import generate, kv_cache

SMALL = dict(D=12, H=2, K=4, F=7, M=2)
NOWHERE = dict(position=position.none)
CASES = {  # each with parts that no other has
    "default": {},
    "tied, buckets": NOWHERE | dict(score=score.tied, relative_position=relative_position.buckets),
    "constant, relative": dict(score=score.constant, relative_position=relative_position.relative),
    "none, full rank, sinusoids": dict(score=score.none, value=value.full_rank, position=position.sinusoidal),
    "identity, concatenated, alibi": dict(
        value=value.identity, position=position.learned_concatenated, relative_position=relative_position.alibi
    ),
    "rotary": NOWHERE | dict(relative_position=relative_position.rotary),
    "rotary halves, no token itself": NOWHERE
    | dict(relative_position=relative_position.rotary_halves, score=score.tied_noself, itself=False),
    "batch norm, flash": dict(norm=norm.batch, compute=attention.IMPLEMENTATIONS["flash"]),
    "fused": dict(compute=attention.IMPLEMENTATIONS["fused"]),
    "window": NOWHERE | dict(relative_position=relative_position.rotary),
}
NEAR = mask.both(mask.causal, mask.window(3))


@functools.cache
def functions(name: str):
    """(params, whole, start, step) of a small model."""
    model, the_mask = cases.model(sizes=SMALL | dict(N=N + 4), **CASES[name]), NEAR if name == "window" else mask.causal
    params = cases.drawn(model.init)
    if "norm" in CASES[name]:  # a variance is positive
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.abs(leaf) + 0.5 if path[-1].key == "var_D" else leaf, params
        )
    call = dict(mask=the_mask, parts=model.parts)
    start = jax.jit(functools.partial(kv_cache.start, params, capacity=N + 3, **call))
    step = jax.jit(functools.partial(kv_cache.step, params, **call))
    return params, functools.partial(model.apply, params, mask=the_mask), start, step


@pytest.mark.parametrize("name", CASES)
@cases.float64()
def test_every_position_through_the_cache_equals_the_full_pass(name):
    """Prompts of 2 and 4 words at once, each continued from its own end to the last word of the sequence."""
    _, whole, start, step = functions(name)
    tolerance = 1e-6 if name == "fused" else 1e-9  # whose softmax is in float32
    w_BN, length_B = cases.words(), jnp.array([2, 4])
    full_BNW = whole(w_BN)
    assert name != "window" or np.abs(full_BNW - functions("rotary")[1](w_BN)).max() > 0.01
    logits_BW, cache = start(w_BN[:, :4], length_B)
    rows = np.arange(len(w_BN))
    cases.close(logits_BW, full_BNW[rows, length_B - 1], tolerance)
    for t in range(N - 4):
        n_B = length_B + t
        logits_BW, cache = step(cache, w_BN[rows, n_B], n_B)
        cases.close(logits_BW, full_BNW[rows, n_B], tolerance)


@cases.float64()
def test_greedy_text_is_the_same_with_the_cache_and_without():
    _, whole, start, step = functions("rotary")
    prompt_BN, key = cases.words(3, n=2), jax.random.key(0)
    call = dict(steps=N - 2, temperature=0.0, top_k=0, top_p=1.0)
    with_cache = jax.jit(lambda w_BN: generate.generate(start, step, w_BN, jnp.full(2, 2), key, **call)[0])
    anew = jax.jit(lambda w_BN: generate.sample(whole, w_BN, key, context=N, **call))
    np.testing.assert_array_equal(with_cache(prompt_BN), anew(prompt_BN))


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
    start = jax.jit(functools.partial(kv_cache.start, capacity=4, **call))
    logits_BW, cache = start(params, w_BN[:, :2], jnp.full(2, 2))
    layers = kv_cache.by_layer(params)
    step = jax.jit(functools.partial(kv_cache.step, **call))
    full_BNW = model.apply(params, w_BN, mask=mask.causal)
    for n in range(2, N):
        if n == kv_cache.places(cache):
            cache = kv_cache.grow(cache, N + 1)
        logits_BW, cache = step(layers, cache, w_BN[:, n], jnp.full(2, n))
        cases.close(logits_BW, full_BNW[:, n], 1e-9)
    assert kv_cache.places(cache) == N + 1


def test_parameters_of_numpy_are_decoded_with_as_those_of_jax():
    """Inside the loop the words are traced, and numpy's arrays give no rows of such."""
    model = cases.model(sizes=SMALL | dict(N=N + 4), **CASES["constant, relative"])
    params = cases.drawn(model.init)
    call = dict(mask=mask.causal, parts=model.parts)

    @jax.jit
    def text(w_BN):
        start = functools.partial(kv_cache.start, numpys, capacity=N + 3, **call)
        step = functools.partial(kv_cache.step, kv_cache.by_layer(numpys), **call)
        return generate.generate(start, step, w_BN, np.array([2, 4]), jax.random.key(0), steps=5, temperature=0)[0]

    numpys = jax.device_get(params)
    found_BN = np.asarray(text(cases.words()[:, :4]))
    logits_BNW = model.apply(params, found_BN, mask=mask.causal)
    for b, length in enumerate((2, 4)):
        most_likely = np.argmax(logits_BNW[b, length - 1 : length + 4], axis=-1)
        np.testing.assert_array_equal(found_BN[b, length : length + 5], most_likely)
