"""Whole models in one line are the transformers of the same parts, and the choices reach them."""

import cases
import jax
import numpy as np
import pytest
from cases import W
from errors import raises

import tfm
from tfm import head, mlp, norm
from tfm.attention import mask as masks, relative_position, score, value

SIZES = dict(M=2, D=12, H=3, N=8, W=W)


@cases.float64()
def test_a_language_model_is_the_transformer_of_its_parts():
    """It is causal, unless it has no mask."""
    model = cases.model(sizes={name: SIZES[name] for name in "MDHN"} | {"K": 4, "F": 48})
    w_BN, expected = cases.words(n=6), model.init(jax.random.key(0))
    for mask, options in ((masks.causal, {}), (None, {"mask": None})):
        init, apply = tfm.language_model(**SIZES, **options)
        params = init(jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        cases.close(jax.jit(apply)(params, w_BN), model.apply(params, w_BN, mask=mask), 1e-10)


def test_choices_are_functions_and_change_the_tree():
    choices = dict(norm=norm.rms, mlp=mlp.swiglu, position=relative_position.rotary, score=score.tied)
    init, apply = tfm.language_model(**SIZES, **choices, value=value.full_rank, tied_output=True, bias="none")
    params = jax.eval_shape(init, jax.random.key(0))
    block = params["blocks"]
    assert params["position"] == {} and block["score"].keys() == {"U_HKD"} and block["value"].keys() == {"V_HDD"}
    assert block["norm1"].keys() == {"gain_D"} and "Wg_FD" in block["mlp"] and params["head"] == {}
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((2, 8), "int32")).shape == (2, 8, W)


@pytest.mark.parametrize("answer", [head.pooled, head.class_token])
def test_a_vision_model_takes_images(answer):
    init, apply = tfm.vision_model(Y=8, X=6, Z=2, patch=2, C=5, M=1, D=8, H=2, head=answer)
    params = jax.eval_shape(init, jax.random.key(0))
    assert params["position"]["P_ND"].shape == (12 + (answer is head.class_token), 8)
    assert ("class" in params) == (answer is head.class_token)
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((3, 8, 6, 2), "float32")).shape == (3, 5)


def test_sizes_that_do_not_fit_are_refused():
    with raises(ValueError, "H = 5"):
        tfm.language_model(**SIZES | {"H": 5})
    with raises(ValueError, 8, 7):
        tfm.vision_model(Y=8, X=7, Z=1, patch=2, C=5, M=1, D=8, H=2)
