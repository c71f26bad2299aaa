"""E23: one token at a time gives what the whole sequence gives, for every variant that permits it."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import N
from errors import raises

from tfm import norm, position
from tfm.attention import flash, mask, relative_position, rotary_scaling, score, spec, value
from tfm.decode import kv_cache

SMALL = dict(D=12, H=2, K=4, F=7, M=2)
LONGER = relative_position.rotary_of(  # the rotation of a token depends on how many come before it
    100.0, halves=True, scaling=lambda n, K, base: rotary_scaling.dynamic(n, K, base, 3.0, 2.0)
)
CASES = {  # each with parts that no other has
    "tied, full rank, sinusoids, relative, flash": dict(
        **dict(score=score.tied, value=value.full_rank, position=position.sinusoidal, attend=flash.attention),
        relative_position=relative_position.relative,
    ),
    "none, identity, concatenated, alibi, batch norm": dict(
        **dict(score=score.none, value=value.identity, position=position.learned_concatenated, norm=norm.batch),
        relative_position=relative_position.alibi,
    ),
    "l2_tied, capped": dict(score=score.l2_tied, position=position.none, cap=0.7),
    "window": dict(position=position.none, relative_position=LONGER, score=score.tied._replace(attend_to_self=False)),
}
NEAR = mask.both(mask.causal, mask.window(3))


@pytest.mark.parametrize("name", CASES)
@cases.float64()
def test_every_position_through_the_cache_equals_the_full_pass(name):
    """Prompts of 2 and 4 tokens in one batch go on from their own ends to the last token of the sequence.

    "window" has several layers, parameters by layer and a cache that grows. NumPy's parameters are as good as JAX's:
    a compiled function holds them, although NumPy has no rows for traced tokens.
    """
    sizes = SMALL | dict(N=N + 4, M=2 if name == "window" else 1)
    model, the_mask = cases.model(sizes=sizes, **CASES[name]), NEAR if name == "window" else mask.causal
    params, tolerance = cases.drawn(model.init), 1e-9
    if "norm" in CASES[name]:  # a variance is positive
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: np.abs(leaf) + 0.5 if path[-1].key == "var_D" else leaf, params
        )
    w_BN, length_B, rows = np.array(cases.words()), np.array([2, 4]), np.arange(2)
    full_BNW = np.asarray(model.apply(params, w_BN, mask=the_mask))
    if name == "window":  # two layers reach back over two tokens each
        other_BN = np.where(np.arange(N) == 1, w_BN[:, ::-1], w_BN)
        unlike_BN = (model.apply(params, other_BN, mask=the_mask) != full_BNW).any(-1)
        np.testing.assert_array_equal(unlike_BN, (w_BN[:, 1:2] != w_BN[:, -2:-1]) & (np.abs(np.arange(N) - 3) < 3))
    params, call = jax.device_get(params), dict(call=spec.Call(mask=the_mask), spec=model.spec)
    start = functools.partial(kv_cache.start, params, capacity=6 if name == "window" else N + 3, **call)
    step = functools.partial(kv_cache.step, kv_cache.by_layer(params) if name == "window" else params, **call)
    start, step = jax.jit(start), jax.jit(step)
    logits_BW, cache = start(w_BN[:, :4], length_B)
    cases.close(logits_BW, full_BNW[rows, length_B - 1], tolerance)
    for t in range(N - 4):
        n_B = length_B + t
        if n_B.max() == kv_cache.count_positions(cache):
            cache = kv_cache.grow(cache, N + 1)
        logits_BW, cache = step(cache, w_BN[rows, n_B], n_B)
        cases.close(logits_BW, full_BNW[rows, n_B], tolerance)
    assert kv_cache.count_positions(cache) == (N + 1 if name == "window" else N + 3)
    assert kv_cache.by_layer(params, jnp.bfloat16)["embed"]["E_WD"].dtype == jnp.bfloat16


def test_a_norm_that_looks_at_later_tokens_is_refused():
    model = cases.model(norm=norm.instance, sizes=SMALL)
    params, call = cases.drawn(model.init), spec.Call(mask=mask.causal)
    with raises(ValueError, "norm"):
        kv_cache.start(params, cases.words(), jnp.full(2, N), capacity=N, call=call, spec=model.spec)
