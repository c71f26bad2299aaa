"""Embeddings of tokens and images (E1, E2), output heads (E24, E25, E27), and the initial values of both."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import reference
import translate
from cases import B, C, D, N, W
from errors import raises
from jax.sharding import PartitionSpec as P

from experiments.devices import mesh as meshes
from tfm import embed as embeds, head as heads, mlp, norm, position, transformer


@cases.float64()
def test_tokens_and_segments_equal_the_reference_also_if_devices_share_the_vocabulary():
    """A segment adds its row, and without segments it is segment 0."""
    params = jax.device_get(cases.draw_params(lambda key: embeds.words.init(key, W=W, D=D, J=3)))
    w_BN, segment_BN = np.asarray(cases.draw_token_ids()), np.arange(N) % 3 * np.ones((B, 1), int)
    E_WD, words = {"E_WD": params["E_WD"]}, functools.partial(embeds.words.apply, params)
    mesh = meshes.make(data=1, tensor=2)
    apply = functools.partial(embeds.words.apply, layout=meshes.layout(mesh, W=W - 1))
    sharded = meshes.sharded(apply, mesh, in_specs=(P("tensor"), P()))

    @jax.jit  # traced token ids can index NumPy arrays
    def compute_all(w_BN, rows_WD):
        inputs = {"w_BN": w_BN, "segment_BN": segment_BN}, {"w_BN": w_BN}, w_BN
        shared = sharded({"E_WD": rows_WD}, np.arange(W - 1)[None])
        return embeds.words.apply(E_WD, w_BN), [words(model_input) for model_input in inputs], shared

    x_BND, with_segments, shared_1WD = jax.device_get(compute_all(w_BN, params["E_WD"][1:]))
    for b in range(B):
        cases.assert_close(x_BND[b], reference.embedded(reference.one_hot(w_BN[b], W), params["E_WD"]), 0)
    for result, segment in zip(with_segments, (segment_BN, 0, 0), strict=True):
        cases.assert_close(result, x_BND + params["S_JD"][segment])
    cases.assert_close(shared_1WD[0], params["E_WD"][1:], 0)


@cases.float64()
def test_patches_equal_the_reference_and_images_must_divide():
    image_BYXZ, P = np.asarray(cases.normal(0, 2, 6, 9, 5)), 3 * 3 * 5
    params = jax.device_get(cases.draw_params(lambda key: embeds.patches.init(key, P=P, D=D)))

    @jax.jit
    def compute(params, image_BYXZ, pixels):
        return embeds.patches.apply(params, embeds.cut(image_BYXZ, size=3)), embeds.cut(pixels, size=2)

    x_BND, order = jax.device_get(compute(params, image_BYXZ, np.arange(8).reshape(1, 2, 4, 1)))
    assert x_BND.shape == (2, 6, D)
    for b in range(2):
        slow = reference.patch_tokens(image_BYXZ[b], params["W_DP"], 3)
        cases.assert_close(x_BND[b], slow.T + params["b_D"])
    np.testing.assert_array_equal(order, [[[0, 1, 4, 5], [2, 3, 6, 7]]])  # in reading order
    narrow = {name: leaf.astype(jnp.bfloat16) for name, leaf in params.items()}
    assert jax.eval_shape(embeds.patches.apply, narrow, np.ones((1, 1, P))).dtype == jnp.bfloat16
    for Y, X in ((6, 8), (7, 9)):
        with raises(ValueError, f"{Y} x {X}", "3 x 3"):
            embeds.cut(np.zeros((2, Y, X, 5)), size=3)


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
    "each_word": class_of_each_token,
    "first_word": class_of_first_token,
}


def test_heads_equal_the_reference_and_their_logits_are_float32():
    sizes = {name: {"W": W} if name in ("next_word", "masked_word") else {"C": C} for name in HEADS}
    inits = {name: functools.partial(getattr(heads, name).init, D=D, **sizes[name]) for name in HEADS}
    apply_all = jax.jit(lambda p, x_BND: {name: getattr(heads, name).apply(p[name], x_BND) for name in HEADS})
    with cases.float64():
        params = jax.device_get({name: cases.draw_params(init) for name, init in inits.items()})
        x_BND = np.asarray(cases.normal(1, B, N, D))
        results = jax.device_get(apply_all(params, x_BND))
        for name, logits in results.items():
            log_p = translate.log_probabilities(logits)
            for b in range(B):
                slow = np.asarray(HEADS[name](translate.columns(x_BND[b]), *jax.tree.leaves(params[name])))
                is_defined = ~np.isnan(slow)
                cases.assert_close(log_p[b][is_defined], np.log(slow[is_defined]))
    narrow = apply_all(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x_BND)))
    assert {logits.dtype for logits in narrow.values()} == {np.dtype("float32")}
    cases.assert_trees_close(narrow, results, 2e-2)


@cases.float64()
def test_the_head_of_bert_is_a_layer_its_norm_and_a_bias_for_each_token():
    """Logits are G LN(gelu(W x + b)) + b_w. G is in the head or is the embedding."""
    head = heads.after_layer(heads.masked_word, mlp.exact_gelu, norm.token, eps=0.1)
    spec = transformer.Spec(embeds.words, position.none, cases.spec(), head)
    draws = cases.draw_params(lambda key: {"head": head.init(key, D=D, W=W)}), cases.normal(1, B, N, D)
    params, x_BND = jax.device_get(draws)
    G_WD, transform = params["head"].pop("G_WD"), params["head"]["transform"]
    trees = [params | {"embed": {"E_WD": G_WD}}, {"head": params["head"] | {"G_WD": G_WD}, "embed": {}}]
    compute_both = jax.jit(lambda trees: [transformer.logits(tree, x_BND, spec) for tree in trees])
    for b, pair in enumerate(zip(*jax.device_get(compute_both(trees)), strict=True)):
        X = reference.affine(transform["W_DD"], translate.columns(x_BND[b]), transform["b_D"])
        X = translate.norm(transform["norm"], np.vectorize(reference.gelu)(X), eps=0.1)
        slow = np.transpose(reference.affine(G_WD, X, params["head"]["b_W"]))
        for logits in pair:
            cases.assert_close(logits, slow)
