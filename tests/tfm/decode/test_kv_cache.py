"""E23: one token at a time with a cache gives the logits of the full sequence, for variants that allow a cache."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import N
from errors import raises

from tfm import norm, position
from tfm.attention import flash, heads as attentions, mask as masks, relative_position, rotary_scaling, score, value
from tfm.decode import kv_cache

SMALL = dict(D=12, H=2, K=4, F=7, M=2)
LONGER = relative_position.rotary_of(  # the rotation depends on the number of tokens so far
    100.0, halves=True, scaling=lambda n, K, base: rotary_scaling.dynamic(n, K, base, 3.0, 2.0)
)
CASES = {  # each case has variants that no other case has
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
CAUSAL_WINDOW = masks.both(masks.causal, masks.window(3))


@pytest.mark.parametrize("name", CASES)
@cases.float64()
def test_logits_with_the_cache_equal_the_full_forward_pass_at_every_position(name):
    """Prompts of 2 and 4 tokens in one batch are continued to the last token of the sequence.

    "window" has several layers, parameters by layer and a cache that grows. Parameters are NumPy arrays, which a
    compiled function must index with traced token ids.
    """
    sizes = SMALL | dict(N=N + 4, M=2 if name == "window" else 1)
    model, the_mask = cases.model(sizes=sizes, **CASES[name]), CAUSAL_WINDOW if name == "window" else masks.causal
    params = jax.device_get(cases.draw_params(model.init))
    if "norm" in CASES[name]:  # variances must be positive
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: np.abs(leaf) + 0.5 if path[-1].key == "var_D" else leaf, params
        )
    w_BN, length_B, rows = np.array(cases.draw_token_ids()), np.array([2, 4]), np.arange(2)
    full_BNW = np.asarray(model.apply(params, w_BN, mask=the_mask))
    if name == "window":  # two layers reach back over two tokens each
        other_BN = np.where(np.arange(N) == 1, w_BN[:, ::-1], w_BN)
        changed_BN = (np.asarray(model.apply(params, other_BN, mask=the_mask)) != full_BNW).any(-1)
        np.testing.assert_array_equal(changed_BN, (w_BN[:, 1:2] != w_BN[:, -2:-1]) & (np.abs(np.arange(N) - 3) < 3))
    call = dict(call=attentions.Call(mask=the_mask), spec=model.spec)

    @jax.jit
    def start(w_BN, length_B):
        return kv_cache.start(params, w_BN, length_B, capacity=6 if name == "window" else N + 3, **call)

    @jax.jit
    def step(cache, w_B, n_B):
        return kv_cache.step(kv_cache.by_layer(params) if name == "window" else params, cache, w_B, n_B, **call)

    logits_BW, cache = start(w_BN[:, :4], length_B)
    cases.assert_close(logits_BW, full_BNW[rows, length_B - 1], 1e-9)
    for t in range(N - 4):
        n_B = length_B + t
        if n_B.max() == kv_cache.count_positions(cache):
            cache = kv_cache.grow(cache, N + 1)
        logits_BW, cache = step(cache, w_BN[rows, n_B], n_B)
        cases.assert_close(logits_BW, full_BNW[rows, n_B], 1e-9)
    assert kv_cache.count_positions(cache) == (N + 1 if name == "window" else N + 3)
    narrow = jax.eval_shape(lambda params: kv_cache.by_layer(params, jnp.bfloat16), params)
    assert narrow["embed"]["E_WD"].dtype == jnp.bfloat16


def test_a_norm_that_looks_at_later_tokens_is_refused():
    model = cases.model(norm=norm.instance, sizes=SMALL)
    call = dict(capacity=N, call=attentions.Call(mask=masks.causal), spec=model.spec)
    with raises(ValueError, "norm"):
        kv_cache.start(cases.draw_params(model.init), cases.draw_token_ids(), np.full(2, N), **call)
