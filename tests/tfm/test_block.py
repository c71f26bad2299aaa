"""Blocks (E13, E18, E19) against the slow reference, their residual connections and the scale they begin with."""

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, D, F, H, K, M, N

from tfm import block, norm, transformer
from tfm.attention import mask, score

SIZES = dict(D=D, H=H, K=K, F=F, M=1, N=N, bias=True)


@pytest.mark.parametrize(("norm_name", "mlp_name"), [*itertools.product(cases.NORMS, cases.MLPS)])
@cases.float64()
def test_blocks_equal_the_reference(norm_name, mlp_name):
    own, x_BND = dict(norm=cases.NORMS[norm_name], mlp=cases.MLPS[mlp_name]), cases.normal(1, 1, N, D)
    chosen = [*itertools.product(block.ORDERS, [0.0, 0.3])]
    params = cases.drawn(lambda key: block.init(key, parts=cases.parts(**own), **SIZES))

    @jax.jit
    def every(params):
        def one(order, eps):
            parts = cases.parts(**own, order=block.ORDERS[order], eps=eps)
            return block.apply(params, x_BND, parts=parts, mask=mask.causal, maps=True)

        return [one(*pair) for pair in chosen]

    for (order, eps), (y_BND, seen) in zip(chosen, every(params), strict=True):
        settings = dict(order=order, score="asymmetric", mlp=mlp_name, scale="1/sqrt(K)", eps=eps)
        allowed = reference.upper_triangular(N, N)
        cases.close(y_BND[0], translate.block(params, translate.columns(x_BND[0]), allowed=allowed, **settings).T)
        assert seen["A"].shape == (1, H, N, N) and seen["running"] == {}


def test_in_training_a_block_returns_the_statistics_of_its_norms():
    """Of both orders, of each norm by its name; nothing is kept in evaluation."""
    x_BND, key_B = cases.normal(1, B, N, D), jax.random.split(jax.random.key(0), B)
    for order in block.ORDERS.values():
        parts = cases.parts(norm=norm.batch, order=order)
        params = cases.drawn(lambda key, parts=parts: block.init(key, parts=parts, **SIZES))
        params = {name: part | ({"var_D": jnp.ones(D)} if "norm" in name else {}) for name, part in params.items()}
        run = jax.jit(
            lambda key_B, parts=parts, params=params: block.apply(
                params, x_BND, parts=parts, mask=mask.causal, key_B=key_B
            )
        )
        (_, trained), (_, evaluated) = run(key_B), run(None)
        assert evaluated["running"] == {} and set(trained["running"]) == {"norm1", "norm2"}
        if order is block.pre_norm:
            cases.agree(trained["running"]["norm1"], norm.batch.observe(x_BND), 1e-5)


def layers(depth: int = M, chosen=score.asymmetric) -> dict:
    return cases.drawn(cases.model(score=chosen, sizes=dict(M=depth)).init)["blocks"]


def stack_of(params, x_BND, **parts):
    return transformer.stack(params, x_BND, mask=mask.causal, parts=cases.parts(**parts), unroll=1)


@pytest.mark.parametrize("name", cases.SCORES)
def test_zero_output_projections_make_pre_norm_blocks_the_identity(name):
    params, x_BND = layers(M, cases.SCORES[name]), cases.normal(1, B, N, D)
    for part, output in (("value", ("Uo_HDK", "bo_D")), ("mlp", ("W2_DF", "b2_D"))):
        params[part] |= {key: jnp.zeros_like(params[part][key]) for key in output}
    np.testing.assert_array_equal(stack_of(params, x_BND, score=cases.SCORES[name])[0], x_BND)


def test_each_half_of_a_block_has_its_own_residual_connection():
    """With either output projection at zero, the other half still adds something to the tokens."""
    x_BND = cases.normal(1, B, N, D)
    for part, output in (("value", ("Uo_HDK", "bo_D")), ("mlp", ("W2_DF", "b2_D"))):
        params = layers(1)
        params[part] |= {key: jnp.zeros_like(params[part][key]) for key in output}
        added = np.asarray(stack_of(params, x_BND)[0] - x_BND)
        assert np.abs(added).mean() > 0.1 and abs(np.corrcoef(added.ravel(), np.asarray(x_BND).ravel())[0, 1]) < 0.9
