"""Call.edit replaces activations by the names of `look`: in one layer or all, with a cache, under jit, vmap, grad."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import B, M, N
from errors import raises

from tfm import encoder_decoder, layout as layouts, transformer
from tfm.attention import flash, heads as attentions, mask as masks, value
from tfm.decode import kv_cache

NAMES = ("q", "k", "v", "A", "y", "attention", "mlp", "hidden")
GROUPED = value.low_rank._replace(init=functools.partial(value.low_rank.init, G=1))
MODEL = cases.model(attend=flash.attention, value=GROUPED)
SOURCE_BN, TARGET_BN = cases.draw_token_ids(1), cases.draw_token_ids(2)


def draw() -> dict:
    return cases.draw_params(MODEL.init)


def run(w_BN, **call):
    """Return the logits, and the activations that `look` names."""
    call = {"mask": masks.causal, "look": NAMES} | call
    logits_BNW, aux = cases.apply_model(draw(), w_BN, spec=MODEL.spec, **call)
    return logits_BNW, aux.get("look")


@cases.float64()
def test_an_activation_of_one_layer_is_replaced_by_that_of_another_text():
    """Earlier layers are unchanged to the last bit, and later ones differ. All that follows depends on `hidden`."""

    @jax.jit
    def patch_all():
        source, look = run(SOURCE_BN)
        patched = {}
        for name in NAMES:
            x_M = look[name]
            patched[name] = run(TARGET_BN, edit={name: lambda x, m, x_M=x_M: jnp.where(m == 1, x_M[1], x)})
        return (source, look), run(TARGET_BN), run(TARGET_BN, edit={}), patched

    (source, source_look), plain, empty, patched = jax.device_get(patch_all())
    jax.tree.map(np.testing.assert_array_equal, empty, plain)
    for name, (_, look) in patched.items():
        np.testing.assert_array_equal(look[name][1], source_look[name][1], err_msg=name)
        for other in NAMES:
            np.testing.assert_array_equal(look[other][0], plain[1][other][0], err_msg=name)
        assert np.abs(look["hidden"][1] - plain[1]["hidden"][1]).max() > 1e-3, name
        assert np.abs(look[name][2] - plain[1][name][2]).max() > 1e-4, name
    cases.assert_close(patched["hidden"][0], source)
    cases.assert_close(patched["A"][1]["attention"][0], plain[1]["attention"][0])


@cases.float64()
def test_a_cached_step_edits_as_the_full_pass_does():
    edit = {"A": lambda A_BHNS, m: A_BHNS * (1 + m), "k": lambda k_BHNK, m: k_BHNK / (2 + m)}
    edit |= {"v": lambda v_BHNV, m: v_BHNV + m, "hidden": lambda x_BND, m: 2 * x_BND, "q": lambda q_BHNK, m: q_BHNK - m}
    call = {"spec": MODEL.spec, "call": attentions.Call(mask=masks.causal, edit=edit)}

    @jax.jit
    def compute(w_BN):
        logits_BW, cache = kv_cache.start(draw(), w_BN[:, :3], np.full(B, 3), capacity=N, **call)
        stepped = [logits_BW]
        for n in range(3, N):
            logits_BW, cache = kv_cache.step(draw(), cache, w_BN[:, n], np.full(B, n), **call)
            stepped.append(logits_BW)
        return jnp.stack(stepped, 1), run(w_BN, edit=edit, look=())[0], run(w_BN, look=())[0]

    stepped, edited, plain = jax.device_get(compute(TARGET_BN))
    cases.assert_close(stepped, edited[:, 2:], 1e-9)
    assert np.abs(edited - plain).max() > 1e-2


@cases.float64()
def test_an_edit_has_a_gradient_and_works_under_vmap():
    """The gradient of the sum of logits with respect to a factor on an activation equals differences."""

    def total(factor, name):
        return jnp.sin(run(TARGET_BN, edit={name: lambda x, m: x * jnp.where(m == M - 1, factor, 1)}, look=())[0]).sum()

    factors = np.array([0.9, 1.0, 1.1]) + 1e-6 * np.array([[-1], [0], [1]])
    for name in ("A", "mlp"):
        function = functools.partial(total, name=name)
        totals, gradient = jax.jit(jax.vmap(jax.vmap(jax.value_and_grad(function))))(factors)
        cases.assert_close(gradient[1], (totals[2] - totals[0]) / 2e-6, 1e-6)


@pytest.mark.parametrize("option", [{"edit": {"mpl": lambda x, m: x}}, {"look": ("mpl",)}])
def test_unknown_names_are_refused(option):
    with raises(ValueError, next(iter(option)), "mpl", "mlp", "hidden"):
        jax.eval_shape(lambda: run(TARGET_BN, **option))


def test_an_edit_keeps_the_shape_and_the_dtype():
    with raises(ValueError, "first_head", "shape"):
        first_head = lambda x_BHNK, m: x_BHNK[:, :1]  # noqa: E731
        first_head.__name__ = "first_head"
        jax.eval_shape(lambda: run(TARGET_BN, edit={"q": first_head}))
    spec = MODEL.spec._replace(dtype=jnp.bfloat16)
    call = attentions.Call(mask=masks.causal, edit={"hidden": lambda x_BND, m: x_BND.astype(jnp.float32)})
    assert jax.eval_shape(lambda: transformer.hidden(draw(), TARGET_BN, spec, call))[0].dtype == jnp.bfloat16


def test_the_weights_of_cross_attention_can_be_edited():
    model = cases.model(attend=flash.attention)
    sizes = dict(D=cases.D, M=1, N=N, H=cases.H, K=cases.K, F=cases.F, bias=True, final_norm=True)
    params = cases.draw_params(functools.partial(encoder_decoder.init, spec=model.spec, **sizes))

    @jax.jit
    def compute():
        calls = [attentions.Call(look=("A_cross",), edit=edit) for edit in ({}, {"A_cross": lambda A, m: 0 * A})]
        arrays = SOURCE_BN, SOURCE_BN >= 0, TARGET_BN
        return [encoder_decoder.hidden(params, *arrays, model.spec, call) for call in calls]

    (plain, _), (edited, aux) = jax.device_get(compute())
    assert not aux["look"]["A_cross"].any() and np.abs(plain - edited).max() > 1e-3


def test_weights_cannot_be_edited_or_seen_if_devices_share_a_sequence():
    spec, x_BND = MODEL.spec.block.attention, np.ones((1, 4, cases.D), np.float32)
    params = jax.tree.map(lambda leaf: leaf[0], draw()["blocks"])
    for option in ({"look": ("A",)}, {"edit": {"A": lambda A_BHNS, m: A_BHNS}}):
        call = attentions.Call(layout=layouts.Layout(sequence="ring"), **option)
        with raises(ValueError, "A", "devices"):
            jax.eval_shape(
                lambda call=call: attentions.self_attention(params, x_BND, spec, call, {"look": {}, "measures": {}})
            )
