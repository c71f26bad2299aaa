"""An encoder and a decoder (E26) against the slow reference, and the decoder with a cache against itself."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import reference
import translate
from cases import N, W

from tfm import block as blocks, embed, encoder_decoder, head, position, transformer
from tfm.attention import spec as attentions

SMALL = dict(D=12, H=2, K=4, F=7, M=2)
SIDES = ("encoder", "decoder")
REAL = 6  # tokens of the first source, of 11
VALID_BS = np.arange(11) < np.array([[REAL], [11]])
WORDS = embed.words._replace(init=functools.partial(embed.words.init, W=W))
OUTPUT = head.next_word._replace(init=functools.partial(head.next_word.init, W=W))
SPEC = transformer.Spec(WORDS, position.learned, cases.spec(H=SMALL["H"]), OUTPUT)
init = functools.partial(encoder_decoder.init, spec=SPEC, final_norm=True, bias=True, N=13, **SMALL)


LOOP = SPEC._replace(unroll=1)


@jax.jit
def apply(params, *inputs):
    x_BND, aux = encoder_decoder.hidden(params, *inputs, LOOP, attentions.Call(maps=True))
    return transformer.logits(params, x_BND, LOOP), aux


def decoder_block(params: dict, X, memory, *, scale="1/sqrt(K)", eps=1e-5):
    """Return X + MHSA(LN(X)), causal; + attention to the encoder's tokens; + MLP; in columns (E18 with one stage)."""
    across = {"score": params["score_cross"], "value": params["value_cross"]}
    allowed = reference.upper_triangular(len(X[0]), len(X[0]))

    def attend(part, X_key, X_query, allowed=None):
        return translate.attend("asymmetric", part, X_key, X_query, scale=scale, allowed=allowed)[0]

    normed = translate.norm(params["norm1"], X, eps=eps)
    X = reference.residual(X, attend(params, normed, normed, allowed))
    X = reference.residual(X, attend(across, memory, translate.norm(params["norm_cross"], X, eps=eps)))
    return reference.residual(X, translate.feed("gelu", params["mlp"], translate.norm(params["norm2"], X, eps=eps)))


@cases.float64()
def test_translation_equals_the_reference():
    """A source of 11 tokens, of which 5 are padding, and a target of 7: p(next token) after each of them (E24)."""
    params, source_BS, w_BN = cases.drawn(init), cases.words(1, n=11), cases.words(2)
    logits_BNW, _ = apply(params, source_BS, VALID_BS, w_BN)
    trees = {name: {"embed": params["embed"]} | params[name] for name in SIDES}
    memory = translate.representation(trees["encoder"], np.asarray(source_BS[0, :REAL]))
    X = translate.tokens(trees["decoder"], np.asarray(w_BN[0]), position="learned")
    for m in range(SMALL["M"]):
        X = decoder_block(translate.layer(trees["decoder"]["blocks"], m), X, memory)
    X = translate.norm(trees["decoder"]["norm"], X, eps=1e-5)
    slow = np.log(reference.next_word(X, np.asarray(params["head"]["G_WD"])))
    cases.close(translate.log_probabilities(logits_BNW[0]), slow, 1e-9)


@cases.float64()
def test_the_source_matters_and_its_padding_does_not_and_a_cache_changes_nothing():
    """The decoder's parameters are NumPy's, and traced tokens choose their rows."""
    params, source_BS, w_BN = cases.drawn(init), cases.words(1, n=11), cases.words(2)
    full_BNW, aux = apply(params, source_BS, VALID_BS, w_BN)
    assert aux["A_cross_MBHNS"].shape == (2, 2, 2, N, 11)
    np.testing.assert_array_equal(aux["A_cross_MBHNS"][:, 0, :, :, REAL:], 0)
    changed = (source_BS.at[0, s].add(1) % W for s in (REAL, REAL - 1))
    padding, real = (apply(params, source, VALID_BS, w_BN)[0] for source in changed)
    np.testing.assert_array_equal(padding, full_BNW)
    assert np.abs(real[0] - full_BNW[0]).max() > 1e-3
    np.testing.assert_array_equal(real[1], full_BNW[1])

    params = jax.device_get(params)
    start = functools.partial(encoder_decoder.start, params, capacity=N, spec=LOOP, call=attentions.Call())
    logits_BW, cache = jax.jit(start)(source_BS, VALID_BS, w_BN[:, :1], jnp.ones(2, int))
    step = jax.jit(functools.partial(encoder_decoder.step, params, spec=LOOP))
    for n in range(1, N):
        cases.close(logits_BW, full_BNW[:, n - 1], 1e-9)
        logits_BW, cache = step(cache, w_BN[:, n], jnp.full(2, n))
    cases.close(logits_BW, full_BNW[:, N - 1], 1e-9)


def test_both_sides_draw_their_own_zeros_of_dropout():
    """The blocks and the head leave the tokens as they are, so that the zeros stay visible."""

    def unchanged(params, x_BND, spec, call):
        return x_BND, {"running": {}}

    block = SPEC.block._replace(dropout=0.5, order=blocks.Order(unchanged, unchanged))
    spec = SPEC._replace(block=block)

    @jax.jit
    def zeros(key):
        w_BN, call = cases.words(1), attentions.Call(key_B=jax.random.split(key, cases.B))
        given = init(key, final_norm=False), w_BN, w_BN >= 0
        memory, _ = encoder_decoder.encode(*given, spec, call)
        return memory.x_BSD == 0, encoder_decoder.hidden(*given, w_BN, spec, call)[0] == 0

    encoder, decoder = zeros(jax.random.key(4))
    assert 0.3 < np.mean(encoder != decoder) < 0.7


def test_both_sides_begin_with_their_own_draws():
    @jax.jit  # compiled, only the returned leaves are drawn
    def initial(key):
        params = init(key)
        return [(params[name]["position"]["P_ND"], params[name]["blocks"]["mlp"]["W1_FD"]) for name in SIDES]

    for encoder, decoder in zip(*initial(jax.random.key(3)), strict=True):
        assert abs(np.corrcoef(np.ravel(encoder), np.ravel(decoder))[0, 1]) < 0.5
