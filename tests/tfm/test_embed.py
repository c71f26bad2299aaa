"""Embeddings of tokens and images (E1, E2), output heads (E24, E25, E27), and the initial values of both."""

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
from errors import raises
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh as meshes
from tfm import embed as embeds, head as heads, norm, position, shapes, transformer


@cases.float64()
def test_tokens_equal_the_reference_also_if_devices_share_the_vocabulary():
    params, w_BN = cases.draw_params(lambda key: embeds.words.init(key, W=W, D=D)), cases.draw_token_ids()
    x_BND = embeds.words.apply(params, w_BN)
    for b in range(B):
        x = reference.one_hot(np.asarray(w_BN[b]), W)
        cases.assert_close(x_BND[b], reference.embedded(x, np.asarray(params["E_WD"])), 0)
    mesh, E_WD = meshes.make(data=1, tensor=2), params["E_WD"][1:]
    apply = functools.partial(embeds.words.apply, layout=meshes.layout(mesh, W=W - 1))
    sharded = jax.jit(meshes.sharded(apply, mesh, in_specs=(P("tensor"), P())))
    cases.assert_close(sharded({"E_WD": E_WD}, np.arange(W - 1)[None])[0], E_WD, 0)


@cases.float64()
def test_a_segment_adds_its_row_and_without_segments_it_is_segment_0():
    params, w_BN = (
        jax.device_get(cases.draw_params(lambda key: embeds.words.init(key, W=W, D=D, J=3))),
        cases.draw_token_ids(),
    )
    segment_BN = np.arange(N) % 3 * np.ones((B, 1), int)
    apply = jax.jit(functools.partial(embeds.words.apply, params))  # traced token ids can index NumPy arrays
    inputs = {"w_BN": w_BN, "segment_BN": segment_BN}, {"w_BN": w_BN}, w_BN
    for model_input, segment in zip(inputs, (segment_BN, 0, 0), strict=True):
        cases.assert_close(apply(model_input), params["E_WD"][w_BN] + params["S_JD"][segment])


@cases.float64()
def test_patches_equal_the_reference():
    image_BYXZ, P = cases.normal(0, 2, 6, 9, 5), 3 * 3 * 5
    params = cases.draw_params(lambda key: embeds.patches.init(key, P=P, D=D))
    x_BND = embeds.patches.apply(params, embeds.cut(image_BYXZ, size=3))
    assert x_BND.shape == (2, 6, D)
    for b in range(2):
        slow = reference.patch_tokens(np.asarray(image_BYXZ[b]), np.asarray(params["W_DP"]), 3)
        cases.assert_close(x_BND[b], slow.T + np.asarray(params["b_D"]))
    assert embeds.patches.apply(jax.tree.map(jnp.bfloat16, params), jnp.ones((1, 1, P))).dtype == jnp.bfloat16
    in_reading_order = [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    np.testing.assert_array_equal(embeds.cut(jnp.arange(8).reshape(1, 2, 4, 1), size=2), in_reading_order)


@pytest.mark.parametrize(("Y", "X"), [(6, 8), (7, 9)])
def test_images_that_do_not_divide_are_refused(Y, X):
    with raises(ValueError, f"{Y} x {X}", "3 x 3"):
        embeds.cut(jnp.zeros((2, Y, X, 5)), size=3)


def masked_tokens(X, G):
    """Return the reference's probabilities for three masked tokens, and NaN for the others."""
    p = reference.masked_word(X, G, hidden=[1, 4, 6])
    return np.array([p.get(n, np.full(len(G), np.nan)) for n in range(X.shape[1])])


def class_of_each_token(X, G, b):
    return [reference.softmax(logits) for logits in np.transpose(reference.affine(G, X, b))]


def class_of_first_token(X, G, b, W, c):
    """Return BERT's softmax_c(g_c^T tanh(W x_0 + c) + b_c)."""
    return reference.class_token_class(np.tanh(reference.affine(W, X[:, :1], c)), G, b)


HEADS = {
    "next_word": reference.next_word,
    "masked_word": masked_tokens,
    "pooled": reference.pooled_class,
    "class_token": reference.class_token_class,
    "distilled": reference_decoders.distilled_class,
    "each_word": class_of_each_token,
    "first_word": class_of_first_token,
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_the_reference_and_their_logits_are_float32(name):
    variant, sizes = getattr(heads, name), {"W": W} if name in ("next_word", "masked_word") else {"C": C}
    with cases.float64():
        params, x_BND = cases.draw_params(lambda key: variant.init(key, D=D, **sizes)), cases.normal(1, B, N, D)
        apply = jax.jit(variant.apply)
        logits = apply(params, x_BND)
        for b in range(B):
            slow = np.asarray(HEADS[name](translate.columns(x_BND[b]), *map(np.asarray, jax.tree.leaves(params))))
            is_defined = ~np.isnan(slow)
            cases.assert_close(translate.log_probabilities(logits)[b][is_defined], np.log(slow[is_defined]))
    narrow = apply(*jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16), (params, x_BND)))
    assert narrow.dtype == jnp.float32
    cases.assert_close(narrow, logits, 2e-2)


@pytest.mark.parametrize("E", [0, 3])
@cases.float64()
def test_the_head_of_bert_is_a_layer_its_norm_and_a_bias_for_each_token(E):
    """Logits are G LN(gelu(W x + b)) + b_w. G is in the head or is the embedding, which has E features in ALBERT."""
    rows, output_rows = (f"{name}_W{'E' if E else 'D'}" for name in "EG")
    spec = transformer.Spec(embeds.words, position.none, cases.spec(eps=0.1), heads.masked_word)
    init = functools.partial(
        heads.transformed_init, functools.partial(heads.masked_word.init, W=W), norm=norm.token, E=E
    )
    params, x_BND = cases.draw_params(lambda key: {"head": init(key, D=D)}), cases.normal(1, B, N, D)
    G_WD, transform = params["head"].pop(output_rows), params["head"]["transform"]
    for tree in (params | {"embed": {rows: G_WD}}, {"head": params["head"] | {output_rows: G_WD}}):
        logits = jax.jit(functools.partial(transformer.logits, spec=spec))(tree, x_BND)
        for b in range(B):
            X = reference.affine(
                np.asarray(shapes.find(transform, "W")), translate.columns(x_BND[b]), shapes.find(transform, "b")
            )
            norm_params = {f"{name}_D": shapes.find(transform["norm"], name) for name in ("gain", "shift")}
            X = translate.norm(norm_params, np.vectorize(reference.gelu)(X), eps=0.1)
            slow = reference.affine(np.asarray(G_WD), X, np.asarray(params["head"]["b_W"]))
            cases.assert_close(logits[b], np.transpose(slow))
