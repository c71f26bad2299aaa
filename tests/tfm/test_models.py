"""tfm.language_model and tfm.vision_model equal transformers that are built from the same choices."""

import functools

import cases
import jax
import numpy as np
import pytest
from cases import W
from errors import raises

import tfm
from tfm import mlp, norm
from tfm.attention import mask as masks, relative_position, score, value

SIZES = dict(M=2, D=12, H=3, N=8, W=W)


@cases.float64()
def test_a_language_model_equals_the_transformer_with_the_same_choices():
    """It is causal by default; mask=None removes the mask. Activations are returned by name.

    Flash attention, the default, forms no weights; the returned weights are those of explicit attention.
    """
    model = cases.model(sizes={name: SIZES[name] for name in "MDHN"} | {"K": 4, "F": 48})
    w_BN, look = cases.draw_token_ids(n=6), ("A", "v", "hidden")
    (init, causal), (_, unmasked) = tfm.language_model(**SIZES), tfm.language_model(**SIZES, mask=None)

    @jax.jit
    def compute(params):
        expected = cases.apply_model(params, w_BN, spec=model.spec, mask=masks.causal, look=look)
        return causal(params, w_BN, look=look), expected, unmasked(params, w_BN), model.apply(params, w_BN)

    params, expected_params = jax.device_get(jax.jit(lambda key: (init(key), model.init(key)))(jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    (logits_BNW, activations), (expected_BNW, aux), *without_mask = jax.device_get(compute(params))
    cases.assert_trees_close((logits_BNW, activations), (expected_BNW, aux["look"]))
    cases.assert_close(*without_mask)
    np.testing.assert_allclose(activations["A"].sum(-1), 1)
    shapes = {"A": (2, cases.B, 3, 6, 6), "v": (2, cases.B, 3, 6, 4), "hidden": (2, cases.B, 6, 12)}
    assert jax.tree.map(np.shape, activations) == shapes and (np.triu(activations["A"], 1) == 0).all()
    with raises(ValueError, "'Q'", "q, k, v, A"):
        jax.eval_shape(functools.partial(causal, look=("Q",)), params, w_BN)


def test_choices_of_variants_change_the_parameter_tree():
    choices = dict(norm=norm.rms, mlp=mlp.swiglu, position=relative_position.rotary, score=score.tied)
    init, apply = tfm.language_model(**SIZES, **choices, value=value.full_rank, tied_output=True, bias="none")
    params = jax.eval_shape(init, jax.random.key(0))
    block = params["blocks"]
    assert params["position"] == {} and block["score"].keys() == {"U_HKD"} and block["value"].keys() == {"V_HDD"}
    assert block["norm1"].keys() == {"gain_D"} and "Wg_FD" in block["mlp"] and params["head"] == {}
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((2, 8), "int32")).shape == (2, 8, W)


@pytest.mark.parametrize("class_token", [False, True])
def test_a_vision_model_takes_images(class_token):
    init, apply = tfm.vision_model(Y=8, X=6, Z=2, patch=2, C=5, M=1, D=8, H=2, class_token=class_token)
    params = jax.eval_shape(init, jax.random.key(0))
    assert params["position"]["P_ND"].shape == (12 + class_token, 8)
    assert ("class" in params) == class_token
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((3, 8, 6, 2), "float32")).shape == (3, 5)


def test_sizes_that_do_not_fit_are_refused():
    with raises(ValueError, "H = 5"):
        tfm.language_model(**SIZES | {"H": 5})
    with raises(ValueError, 8, 7):
        tfm.vision_model(Y=8, X=7, Z=1, patch=2, C=5, M=1, D=8, H=2)
