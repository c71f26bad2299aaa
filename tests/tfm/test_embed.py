"""Tokens from words and images (E1, E2), what heads say of them (E24, E25, E27), and how both begin."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_decoders
import translate
from cases import B, C, D, N, W
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh as meshes
from tfm import embed, head, norm, position, shapes, transformer


@cases.float64()
def test_words_equal_the_reference_also_where_devices_share_them():
    params, w_BN = cases.drawn(lambda key: embed.words.init(key, W=W, D=D)), cases.words()
    x_BND = embed.words.apply(params, w_BN)
    for b in range(B):
        x = reference.one_hot(np.asarray(w_BN[b]), W)
        cases.close(x_BND[b], reference.embedded(x, np.asarray(params["E_WD"])), 0)
    mesh, E_WD = meshes.make(data=1, tensor=2), params["E_WD"][1:]
    apply = functools.partial(embed.words.apply, layout=meshes.layout(mesh, W=W - 1))
    spread = jax.jit(meshes.sharded(apply, mesh, in_specs=(P("tensor"), P())))
    cases.close(spread({"E_WD": E_WD}, np.arange(W - 1)[None])[0], E_WD, 0)


@cases.float64()
def test_words_of_segments_have_their_row_too_and_words_alone_that_of_segment_0():
    params, w_BN = cases.drawn(lambda key: embed.words.init(key, W=W, D=D, J=3)), cases.words()
    segment_BN = np.arange(N) % 3 * np.ones((B, 1), int)
    of_words_BND = params["E_WD"][w_BN]
    cases.close(
        embed.words.apply(params, {"w_BN": w_BN, "segment_BN": segment_BN}), of_words_BND + params["S_JD"][segment_BN]
    )
    for alone in (w_BN, {"w_BN": w_BN}):
        cases.close(embed.words.apply(params, alone), of_words_BND + params["S_JD"][0])
    traced_BND = jax.jit(functools.partial(embed.words.apply, jax.device_get(params)))(w_BN)  # of NumPy's
    cases.close(traced_BND, of_words_BND + params["S_JD"][0])


def image(B=2, Y=6, X=9, Z=5) -> jax.Array:
    return cases.normal(0, B, Y, X, Z)


@cases.float64()
def test_patches_equal_the_reference():
    image_BYXZ, P = image(), 3 * 3 * 5
    params = cases.drawn(lambda key: embed.patches.init(key, P=P, D=D))
    x_BND = embed.patches.apply(params, embed.cut(image_BYXZ, size=3))
    assert x_BND.shape == (2, 6, D)
    for b in range(2):
        slow = reference.patch_tokens(np.asarray(image_BYXZ[b]), np.asarray(params["W_DP"]), 3)
        cases.close(x_BND[b], slow.T + np.asarray(params["b_D"]))
    assert embed.patches.apply(jax.tree.map(jnp.bfloat16, params), jnp.ones((1, 1, P))).dtype == jnp.bfloat16
    in_reading_order = [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    np.testing.assert_array_equal(embed.cut(jnp.arange(8).reshape(1, 2, 4, 1), size=2), in_reading_order)


@pytest.mark.parametrize(("Y", "X"), [(6, 8), (7, 9)])
def test_images_that_do_not_divide_are_refused(Y, X):
    with pytest.raises(ValueError, match=f"images of {Y} x {X} pixels do not divide into patches of 3 x 3"):
        embed.cut(image(Y=Y, X=X), size=3)


@cases.float64()
def test_class_token_stands_first():
    params, x_BND = cases.drawn(lambda key: embed.class_token_init(key, D=D)), cases.normal(1, B, N, D)
    y_BND = embed.class_token(params, x_BND)
    for b in range(B):
        slow = reference.with_class_token(translate.columns(x_BND[b]), np.asarray(params["c_D"]))
        cases.close(y_BND[b], slow.T, 0)
    assert embed.class_token(params, x_BND.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_initial_embeddings_and_heads():
    key, sizes = jax.random.key(0), dict(D=97)
    for params, letters, std in [
        (embed.words.init(key, W=101, **sizes), {"W": 101, "D": 97}, 97**-0.5),
        (embed.patches.init(key, P=53, **sizes), {"P": 53, "D": 97}, (53 * 97) ** -0.5),
        (embed.class_token_init(key, D=1009), {"D": 1009}, 1009**-0.5),
        ({"h_D": embed.masked_patches.init(key, P=1, D=1009)["h_D"]}, {"D": 1009}, 1009**-0.5),
        (head.next_word.init(key, W=101, **sizes), {"W": 101, "D": 97}, 0.02),
        (head.masked_word.init(key, W=101, **sizes), {"W": 101, "D": 97}, 0.02),
        (head.pooled.init(key, C=53, **sizes), {"C": 53, "D": 97}, 0.02),
        (head.class_token.init(key, C=53, **sizes), {"C": 53, "D": 97}, 0.02),
        (head.pixels.init(key, P=53, **sizes), {"P": 53, "D": 97}, 0.02),
    ]:
        assert shapes.check(params) == letters
        matrix, *bias = params.values()
        assert float(matrix.std()) == pytest.approx(std, rel=0.06)
        assert not any(b.any() for b in bias)


def masked_words(X, G):
    """The reference's answers for three words; NaN for those that are not asked for."""
    found = reference.masked_word(X, G, hidden=[1, 4, 6])
    return np.array([found.get(n, np.full(len(G), np.nan)) for n in range(X.shape[1])])


def each_words_class(X, G, b):
    return [reference.softmax(logits) for logits in np.transpose(reference.affine(G, X, b))]


def first_words_class(X, G, b, W, c):
    """BERT's: softmax_c(g_c^T tanh(W x_0 + c) + b_c)."""
    return reference.class_token_class(np.tanh(reference.affine(W, X[:, :1], c)), G, b)


HEADS = {
    "next_word": reference.next_word,
    "masked_word": masked_words,
    "pooled": reference.pooled_class,
    "class_token": reference.class_token_class,
    "distilled": reference_decoders.distilled_class,
    "each_word": each_words_class,
    "first_word": first_words_class,
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_the_reference_and_their_logits_are_float32(name):
    variant, sizes = getattr(head, name), {"W": W} if name in ("next_word", "masked_word") else {"C": C}
    with cases.float64():
        params, x_BND = cases.drawn(lambda key: variant.init(key, D=D, **sizes)), cases.normal(1, B, N, D)
        apply = jax.jit(variant.apply)
        logits = apply(params, x_BND)
        for b in range(B):
            slow = np.asarray(HEADS[name](translate.columns(x_BND[b]), *map(np.asarray, jax.tree.leaves(params))))
            asked = ~np.isnan(slow)
            cases.close(translate.log_probabilities(logits)[b][asked], np.log(slow[asked]))
    narrow = apply(*jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16), (params, x_BND)))
    assert narrow.dtype == jnp.float32
    cases.close(narrow, logits, 2e-2)


@pytest.mark.parametrize("E", [0, 3])
@cases.float64()
def test_the_head_of_bert_is_a_layer_its_norm_and_a_bias_for_each_word(E):
    """G LN(gelu(W x + b)) + b_w, with a matrix of its own and with the embedding's; of ALBERT with E features."""
    rows, own_rows = (f"{name}_W{'E' if E else 'D'}" for name in "EG")
    spec = transformer.Spec(embed.words, position.none, cases.spec(eps=0.1), head.masked_word)
    init = functools.partial(head.transformed_init, functools.partial(head.masked_word.init, W=W), norm=norm.token, E=E)
    params, x_BND = cases.drawn(lambda key: {"head": init(key, D=D)}), cases.normal(1, B, N, D)
    G_WD, own = params["head"].pop(own_rows), params["head"]["transform"]
    for tree in (params | {"embed": {rows: G_WD}}, {"head": params["head"] | {own_rows: G_WD}}):
        logits = jax.jit(functools.partial(transformer.logits, spec=spec))(tree, x_BND)
        for b in range(B):
            X = reference.affine(np.asarray(shapes.find(own, "W")), translate.columns(x_BND[b]), shapes.find(own, "b"))
            norm_of = {f"{name}_D": shapes.find(own["norm"], name) for name in ("gain", "shift")}
            X = translate.norm(norm_of, np.vectorize(reference.gelu)(X), eps=0.1)
            slow = reference.affine(np.asarray(G_WD), X, np.asarray(params["head"]["b_W"]))
            cases.close(logits[b], np.transpose(slow))
