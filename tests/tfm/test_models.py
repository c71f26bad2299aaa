"""The front door: whole models in one line are those of the same parts, and the choices arrive."""

import cases
import jax
import numpy as np
import pytest
from errors import raises

import tfm
from tfm import head, mlp, norm, position
from tfm.attention import relative_position, score, value

SIZES = dict(W=11, M=2, D=12, H=3, N=8)


@cases.float64()
def test_a_language_model_is_the_transformer_of_its_parts():
    init, apply = tfm.language_model(**SIZES)
    params, w_BN = init(jax.random.key(0)), np.arange(12).reshape(2, 6) % 11
    sizes = {name: SIZES[name] for name in "MDHN"} | {"K": 4, "F": 48}
    words = tfm.embed.words._replace(init=lambda key, *, D: tfm.embed.words.init(key, W=11, D=D))
    output = head.next_word._replace(init=lambda key, *, D: head.next_word.init(key, W=11, D=D))
    spec = tfm.transformer.Spec(words, position.learned, cases.spec(H=3), output)
    own = tfm.transformer.init(jax.random.key(0), spec=spec, final_norm=True, bias=True, **sizes)
    jax.tree.map(np.testing.assert_array_equal, params, own)
    expected, _ = cases.apply_model(own, w_BN, spec=spec, mask=tfm.attention.mask.causal)
    cases.close(apply(params, w_BN), expected, 1e-10)


def test_choices_are_functions_and_change_the_tree():
    init, apply = tfm.language_model(
        **SIZES,
        norm=norm.rms,
        mlp=mlp.swiglu,
        position=relative_position.rotary,
        score=score.tied,
        value=value.full_rank,
        tied_output=True,
        bias="none",
    )
    params = jax.eval_shape(init, jax.random.key(0))
    block = params["blocks"]
    assert params["position"] == {} and block["score"].keys() == {"U_HKD"} and block["value"].keys() == {"V_HDD"}
    assert block["norm1"].keys() == {"gain_D"} and "Wg_FD" in block["mlp"] and params["head"] == {}
    w_BN = jax.ShapeDtypeStruct((2, 8), "int32")
    assert jax.eval_shape(apply, params, w_BN).shape == (2, 8, 11)


def test_later_tokens_change_nothing_unless_there_is_no_mask():
    w_BN = np.arange(8)[None] % 11
    other_BN = np.where(np.arange(8) == 7, 3, w_BN)
    for mask, same in ((tfm.attention.mask.causal, True), (None, False)):
        init, apply = tfm.language_model(**SIZES | {"M": 1}, mask=mask)
        params, run = init(jax.random.key(0)), jax.jit(apply)
        assert (np.asarray(run(params, w_BN))[:, :7] == np.asarray(run(params, other_BN))[:, :7]).all() == same


@pytest.mark.parametrize("answer", [head.pooled, head.class_token])
def test_a_vision_model_takes_images(answer):
    init, apply = tfm.vision_model(Y=8, X=6, Z=2, patch=2, C=5, M=1, D=8, H=2, head=answer)
    params = jax.eval_shape(init, jax.random.key(0))
    assert params["position"]["P_ND"].shape == (12 + (answer is head.class_token), 8)
    assert ("class" in params) == (answer is head.class_token)
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((3, 8, 6, 2), "float32")).shape == (3, 5)


def test_sizes_that_do_not_fit_are_errors():
    with raises(ValueError, "H = 5"):
        tfm.language_model(**SIZES | {"H": 5})
    with raises(ValueError, 8, 7):
        tfm.vision_model(Y=8, X=7, Z=1, patch=2, C=5, M=1, D=8, H=2)
