"""Documents packed into one window: each has the logits and the gradients that it has alone in a window."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.data import windows
from tfm import position
from tfm.attention import explicit, flash, mask as masks, relative_position

START, LENGTHS, N = 0, (7, 11, 1, 13), 32  # a document's first token; the lengths of the documents in a window
BLOCKS = functools.partial(flash.attention, queries=8, keys=16)
CASES = [  # a position code, a relative position, and an implementation
    (position.learned, relative_position.relative, BLOCKS),
    (position.sinusoidal, relative_position.rotary, flash.attention),
    (position.learned_concatenated, relative_position.buckets, explicit.attention),
]


def draw_window() -> np.ndarray:
    """Return w_1N: the documents one after the other, each with START as its first token."""
    w_N = np.random.default_rng(0).integers(1, cases.W, N)
    w_N[np.cumsum((0, *LENGTHS[:-1]))] = START
    return w_N[None]


@pytest.mark.parametrize(("code", "relation", "attend"), CASES)
def test_packed_documents_equal_single_ones(code, relation, attend):
    """The gradient of a sum over documents is the sum of their gradients."""
    model = cases.model(position=code, relative_position=relation, sizes={"N": N, "K": 6, "M": 2, "H": 2})
    params, w_1N, is_token_BN = cases.draw_params(model.init), draw_window(), np.arange(N) < np.array(LENGTHS)[:, None]
    w_BN = np.zeros(is_token_BN.shape, int)  # each document, and padding, which a causal model does not see
    w_BN[is_token_BN] = w_1N[0]
    numbers = windows.number_documents(w_1N, START)
    assert np.bincount(numbers["document_BN"][0])[1:].tolist() == list(LENGTHS)
    attention = model.spec.block.attention._replace(attend=attend)
    packed_spec = model.spec._replace(block=model.spec.block._replace(attention=attention))

    def packed(params: dict) -> jax.Array:
        mask = masks.both(masks.causal, masks.documents(numbers["document_BN"]))
        return cases.apply_model(params, w_1N, spec=packed_spec, mask=mask, code_n=numbers["n_BN"])[0][0]

    def single(params: dict) -> jax.Array:
        return cases.apply_model(params, w_BN, spec=model.spec, mask=masks.causal)[0][is_token_BN]

    @jax.jit
    def with_gradients(params: dict) -> list:
        def total(params: dict, function) -> tuple[jax.Array, jax.Array]:
            logits_NW = function(params)
            return jnp.sum(jnp.sin(logits_NW)), logits_NW

        return [jax.grad(total, has_aux=True)(params, function) for function in (packed, single)]

    cases.assert_trees_close(*with_gradients(params), 1e-5)
