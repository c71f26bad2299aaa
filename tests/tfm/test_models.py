"""tfm.language_model and tfm.vision_model equal transformers that are built from the same choices."""

import functools

import cases
import jax
import numpy as np
import pytest
from cases import W
from errors import raises

import tfm
from tfm import head as heads, mlp, norm
from tfm.attention import explicit, flash, mask as masks, relative_position, score, value

SIZES = dict(M=2, D=12, H=3, N=8, W=W)


@cases.float64()
def test_a_language_model_equals_the_transformer_with_the_same_choices():
    """It is causal by default; mask=None removes the mask."""
    model = cases.model(sizes={name: SIZES[name] for name in "MDHN"} | {"K": 4, "F": 48})
    w_BN, expected = cases.draw_token_ids(n=6), model.init(jax.random.key(0))
    for mask, options in ((masks.causal, {}), (None, {"mask": None})):
        init, apply = tfm.language_model(**SIZES, **options)
        params = init(jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        cases.assert_close(jax.jit(apply)(params, w_BN), model.apply(params, w_BN, mask=mask), 1e-10)


def test_activations_are_returned_by_name():
    """Flash attention, the default, forms no weights; these are those of explicit attention. One name is unknown."""
    (init, apply), (_, explicit_apply) = (
        tfm.language_model(**SIZES, attend=attend) for attend in (flash.attention, explicit.attention)
    )
    params, w_BN = cases.draw_params(init), cases.draw_token_ids(n=6)
    logits_BNW, look = jax.jit(functools.partial(apply, look=("A", "v", "hidden")))(params, w_BN)
    cases.assert_close(logits_BNW, apply(params, w_BN), 1e-5)
    assert look.keys() == {"A", "v", "hidden"} and look["hidden"].shape == (2, cases.B, 6, 12)
    assert look["A"].shape == (2, cases.B, 3, 6, 6) and look["v"].shape == (2, cases.B, 3, 6, 4)
    np.testing.assert_allclose(look["A"].sum(-1), 1, atol=1e-5)
    assert (np.triu(look["A"], 1) == 0).all()
    cases.assert_close(look["A"], explicit_apply(params, w_BN, look=("A",))[1]["A"], 1e-5)
    with raises(ValueError, "'Q'", "q, k, v, A"):
        apply(params, w_BN, look=("Q",))


def test_choices_of_variants_change_the_parameter_tree():
    choices = dict(norm=norm.rms, mlp=mlp.swiglu, position=relative_position.rotary, score=score.tied)
    init, apply = tfm.language_model(**SIZES, **choices, value=value.full_rank, tied_output=True, bias="none")
    params = jax.eval_shape(init, jax.random.key(0))
    block = params["blocks"]
    assert params["position"] == {} and block["score"].keys() == {"U_HKD"} and block["value"].keys() == {"V_HDD"}
    assert block["norm1"].keys() == {"gain_D"} and "Wg_FD" in block["mlp"] and params["head"] == {}
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((2, 8), "int32")).shape == (2, 8, W)


@pytest.mark.parametrize("head_variant", [heads.pooled, heads.class_token])
def test_a_vision_model_takes_images(head_variant):
    init, apply = tfm.vision_model(Y=8, X=6, Z=2, patch=2, C=5, M=1, D=8, H=2, head=head_variant)
    params = jax.eval_shape(init, jax.random.key(0))
    assert params["position"]["P_ND"].shape == (12 + (head_variant is heads.class_token), 8)
    assert ("class" in params) == (head_variant is heads.class_token)
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((3, 8, 6, 2), "float32")).shape == (3, 5)


def test_sizes_that_do_not_fit_are_refused():
    with raises(ValueError, "H = 5"):
        tfm.language_model(**SIZES | {"H": 5})
    with raises(ValueError, 8, 7):
        tfm.vision_model(Y=8, X=7, Z=1, patch=2, C=5, M=1, D=8, H=2)
