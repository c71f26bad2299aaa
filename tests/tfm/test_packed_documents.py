"""Documents packed into one window: each has the logits and the gradients that it has alone in a window."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.data import windows
from tfm import position, transformer
from tfm.attention import explicit, flash, mask as masks, relative_position
from tfm.attention.spec import Call

START, LENGTHS, N = 0, (7, 11, 1, 13), 32  # a document's first token; the lengths of the documents in a window
BLOCKS = functools.partial(flash.attention, queries=8, keys=16)
PAIRS = [  # of a position code and a relative position, with implementations
    (position.learned, relative_position.relative, (explicit.attention, BLOCKS, flash.attention)),
    (position.sinusoidal, relative_position.rotary, (BLOCKS,)),
    (position.learned_concatenated, relative_position.buckets, (flash.attention,)),
    (position.none, relative_position.alibi, (explicit.attention,)),
]


def draw_window() -> np.ndarray:
    """Return w_1N: the documents one after the other, each with START as its first token."""
    w_N = np.random.default_rng(0).integers(1, cases.W, N)
    w_N[np.cumsum((0, *LENGTHS[:-1]))] = START
    return w_N[None]


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_packed_documents_equal_single_ones(pair):
    """The gradient of a sum over documents is the sum of their gradients."""
    code, relation, ways = PAIRS[pair]
    model = cases.model(position=code, relative_position=relation, sizes={"N": N, "K": 6, "M": 2, "H": 2})
    params, w_1N, is_token_BN = cases.draw_params(model.init), draw_window(), np.arange(N) < np.array(LENGTHS)[:, None]
    w_BN = np.zeros(is_token_BN.shape, int)  # each document, and padding, which a causal model does not see
    w_BN[is_token_BN] = w_1N[0]
    numbers = windows.number_documents(w_1N, START)
    assert np.bincount(numbers["document_BN"][0])[1:].tolist() == list(LENGTHS)

    def compute(params: dict, attend, w_BN, **call) -> jax.Array:
        attention = model.spec.block.attention._replace(attend=attend)
        spec = model.spec._replace(block=model.spec.block._replace(attention=attention))
        return transformer.apply(params, w_BN, spec, Call(**call))[0]

    def packed(attend, params: dict) -> jax.Array:
        mask = masks.both(masks.causal, masks.documents(numbers["document_BN"]))
        return compute(params, attend, w_1N, mask=mask, code_n=jnp.asarray(numbers["n_BN"]))[0]

    def single(params: dict) -> jax.Array:
        return compute(params, explicit.attention, w_BN, mask=masks.causal)[is_token_BN]

    def with_gradient(function, params: dict) -> tuple[dict, jax.Array]:
        def total(params: dict) -> tuple[jax.Array, jax.Array]:
            logits_NW = function(params)
            return jnp.sum(jnp.sin(logits_NW)), logits_NW

        return jax.grad(total, has_aux=True)(params)

    functions = [single, *(functools.partial(packed, attend) for attend in ways)]
    expected, *results = jax.jit(lambda params: [with_gradient(function, params) for function in functions])(params)
    for result in results:
        cases.assert_trees_close(result, expected, 1e-5)
