"""Encoder and decoder (E26) against the slow reference, and the decoder with a cache against the decoder without."""

import functools

import cases
import jax
import numpy as np
import pytest
import reference
import translate
from cases import N, W

from tfm import block as blocks, embed as embeds, encoder_decoder, head as heads, position, transformer
from tfm.attention import heads as attentions

SMALL = dict(D=12, H=2, K=4, F=7, M=2)
SIDES = ("encoder", "decoder")
SOURCE_LENGTH = 6  # real tokens of the first source, which has 11 with padding
VALID_BS = np.arange(11) < np.array([[SOURCE_LENGTH], [11]])
WORDS = embeds.words._replace(init=functools.partial(embeds.words.init, W=W))
OUTPUT = heads.next_word._replace(init=functools.partial(heads.next_word.init, W=W))
SPEC = transformer.Spec(WORDS, position.learned, cases.spec(H=SMALL["H"]), OUTPUT)
SCAN_SPEC = SPEC._replace(unroll=1)
init = functools.partial(encoder_decoder.init, spec=SPEC, final_norm=True, bias=True, N=13, **SMALL)


@functools.partial(jax.jit, static_argnums=0)
def apply(order, params, *inputs):
    spec = SCAN_SPEC._replace(block=SCAN_SPEC.block._replace(order=blocks.ORDERS[order]))
    x_BND, aux = encoder_decoder.hidden(params, *inputs, spec, attentions.Call(look=("A_cross",)))
    return transformer.logits(params, x_BND, spec), aux


def decoder_block(params: dict, X, memory, *, order, scale="1/sqrt(K)", eps=1e-5):
    """Return the decoder block's output, D x N: causal self-attention, cross-attention and MLP (E18, E19).

    order: pre_norm, X + stage(LN(X)); post_norm, LN(X + stage(X)); plain, stage(LN(X)).
    """
    cross_params = {"score": params["score_cross"], "value": params["value_cross"]}
    allowed = reference.upper_triangular(len(X[0]), len(X[0]))

    def attend(part, X_key, X_query, allowed=None):
        return translate.attend("asymmetric", part, X_key, X_query, scale=scale, allowed=allowed)[0]

    stages = {
        "norm1": lambda Y: attend(params, Y, Y, allowed),
        "norm_cross": lambda Y: attend(cross_params, memory, Y),
        "norm2": lambda Y: translate.feed("gelu", params["mlp"], Y),
    }
    for name, stage in stages.items():
        normalise = functools.partial(translate.norm, params[name], eps=eps)
        if order == "post_norm":
            X = normalise(reference.residual(X, stage(X)))
        else:
            Y = stage(normalise(X))
            X = Y if order == "plain" else reference.residual(X, Y)
    return X


@pytest.mark.parametrize("order", blocks.ORDERS)
@cases.float64()
def test_translation_equals_the_reference(order):
    """The source has 11 tokens, 5 of them padding. p(next token) after each of 7 target tokens is compared (E24).

    Without residual connections small parameters would make all tokens of a layer equal.
    """
    draws = cases.draw_params(init, std=1.0), cases.draw_token_ids(1, n=11), cases.draw_token_ids(2)
    params, source_BS, w_BN = jax.device_get(draws)
    logits_BNW = np.asarray(apply(order, params, source_BS, VALID_BS, w_BN)[0])
    trees = {name: {"embed": params["embed"]} | params[name] for name in SIDES}
    memory = translate.representation(trees["encoder"], np.asarray(source_BS[0, :SOURCE_LENGTH]), order=order)
    X = translate.tokens(trees["decoder"], np.asarray(w_BN[0]), position="learned")
    for m in range(SMALL["M"]):
        X = decoder_block(translate.layer(trees["decoder"]["blocks"], m), X, memory, order=order)
    X = translate.norm(trees["decoder"]["norm"], X, eps=1e-5)
    slow = np.log(reference.next_word(X, np.asarray(params["head"]["G_WD"])))
    cases.assert_close(translate.log_probabilities(logits_BNW[0]), slow, 1e-9)


@cases.float64()
def test_logits_depend_on_the_source_but_not_on_its_padding_and_a_cache_does_not_change_them():
    """Parameters are NumPy arrays with the cache. Traced token ids can index them."""
    draws = cases.draw_params(init), cases.draw_token_ids(1, n=11), cases.draw_token_ids(2)
    params, source_BS, w_BN = jax.device_get(draws)
    full_BNW, aux = jax.device_get(apply("pre_norm", params, source_BS, VALID_BS, w_BN))
    assert aux["look"]["A_cross"].shape == (2, 2, 2, N, 11)
    np.testing.assert_array_equal(aux["look"]["A_cross"][:, 0, :, :, SOURCE_LENGTH:], 0)
    one_hot = np.eye(22, dtype=int).reshape(22, 2, 11)
    sources = ((source_BS + one_hot[s]) % W for s in (SOURCE_LENGTH, SOURCE_LENGTH - 1))
    padding_BNW, real_BNW = (np.asarray(apply("pre_norm", params, source, VALID_BS, w_BN)[0]) for source in sources)
    np.testing.assert_array_equal(padding_BNW, full_BNW)
    assert np.abs(real_BNW[0] - full_BNW[0]).max() > 1e-3
    np.testing.assert_array_equal(real_BNW[1], full_BNW[1])

    start = functools.partial(encoder_decoder.start, params, capacity=N, spec=SCAN_SPEC, call=attentions.Call())
    logits_BW, cache = jax.jit(start)(source_BS, VALID_BS, w_BN[:, :1], np.ones(2, int))
    step = jax.jit(functools.partial(encoder_decoder.step, params, spec=SCAN_SPEC))
    for n in range(1, N):
        cases.assert_close(logits_BW, full_BNW[:, n - 1], 1e-9)
        logits_BW, cache = step(cache, w_BN[:, n], np.full(2, n))
    cases.assert_close(logits_BW, full_BNW[:, N - 1], 1e-9)


def test_encoder_and_decoder_draw_different_dropout_masks_and_initial_parameters():
    """The blocks return their inputs, so that the zeros of dropout stay visible."""

    def return_input(params, x_BND, spec, call):
        return x_BND, {"running": {}}

    block = SPEC.block._replace(dropout=0.5, order=blocks.Order(return_input))
    spec = SPEC._replace(block=block)

    @jax.jit
    def compute(key):
        w_BN, call = cases.draw_token_ids(1), attentions.Call(key_B=jax.random.split(key, cases.B))
        params = init(key, final_norm=False)
        memory, _ = encoder_decoder.encode(params, w_BN, w_BN >= 0, spec, call)
        x_BND, _ = encoder_decoder.hidden(params, w_BN, w_BN >= 0, w_BN, spec, call)
        leaves = [(params[name]["position"]["P_ND"], params[name]["blocks"]["mlp"]["W1_FD"]) for name in SIDES]
        return (memory.x_BSD == 0, x_BND == 0), leaves

    (encoder, decoder), leaves = jax.device_get(compute(jax.random.key(4)))
    assert 0.3 < np.mean(encoder != decoder) < 0.7
    for encoder, decoder in zip(*leaves, strict=True):
        assert abs(np.corrcoef(np.ravel(encoder), np.ravel(decoder))[0, 1]) < 0.5
