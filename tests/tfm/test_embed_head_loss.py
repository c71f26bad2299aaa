"""Tokens from words and images (E1, E2), heads (E24, E25, E27) and losses against the slow reference."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, C, D, N, W

from tfm import embed, head, loss, shapes

# ------------------------------------------------------------------------------------------------------------ tokens


@cases.float64()
def test_words_equal_the_reference():
    params, w_BN = cases.drawn(lambda key: embed.words.init(key, W=W, D=D)), cases.words()
    x_BND = embed.words.apply(params, w_BN)
    for b in range(B):
        x = reference.one_hot(np.asarray(w_BN[b]), W)
        cases.close(x_BND[b], reference.embedded(x, np.asarray(params["E_WD"])), 0)


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


def test_patches_are_in_reading_order():
    image_BYXZ = jnp.arange(2 * 4 * 1).reshape(1, 2, 4, 1)
    np.testing.assert_array_equal(embed.cut(image_BYXZ, size=2), [[[0, 1, 4, 5], [2, 3, 6, 7]]])


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


def test_class_token_takes_the_dtype_of_the_tokens():
    params = embed.class_token_init(jax.random.key(0), D=D)
    assert embed.class_token(params, cases.normal(1, B, N, D).astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_initial_embeddings():
    key, sizes = jax.random.key(0), dict(D=97)
    for params, letters, std in [
        (embed.words.init(key, W=101, **sizes), {"W": 101, "D": 97}, 97**-0.5),
        (embed.patches.init(key, P=53, **sizes), {"P": 53, "D": 97}, (53 * 97) ** -0.5),
        (embed.class_token_init(key, D=1009), {"D": 1009}, 1009**-0.5),
        (head.next_word.init(key, W=101, **sizes), {"W": 101, "D": 97}, 0.02),
        (head.masked_word.init(key, W=101, **sizes), {"W": 101, "D": 97}, 0.02),
        (head.pooled.init(key, C=53, **sizes), {"C": 53, "D": 97}, 0.02),
        (head.class_token.init(key, C=53, **sizes), {"C": 53, "D": 97}, 0.02),
    ]:
        assert shapes.check(params) == letters
        matrix, *bias = params.values()
        assert float(matrix.std()) == pytest.approx(std, rel=0.06)
        assert not any(b.any() for b in bias)


# ------------------------------------------------------------------------------------------------------------- heads


@cases.float64()
def test_next_word_equals_the_reference():
    params, x_BND = cases.drawn(lambda key: head.next_word.init(key, W=W, D=D)), cases.normal(1, B, N, D)
    log_p = translate.log_probabilities(head.next_word.apply(params, x_BND))
    for b in range(B):
        slow = reference.next_word(translate.columns(x_BND[b]), np.asarray(params["G_WD"]))
        cases.close(log_p[b], np.log(slow))


@cases.float64()
def test_masked_word_equals_the_reference():
    params, x_BND = cases.drawn(lambda key: head.masked_word.init(key, W=W, D=D)), cases.normal(1, B, N, D)
    log_p = translate.log_probabilities(head.masked_word.apply(params, x_BND))
    for b in range(B):
        slow = reference.masked_word(translate.columns(x_BND[b]), np.asarray(params["G_WD"]), hidden=[1, 4, 6])
        for n in slow:
            cases.close(log_p[b, n], np.log(slow[n]))


@pytest.mark.parametrize("name", ["pooled", "class_token"])
@cases.float64()
def test_classification_equals_the_reference(name):
    variant = getattr(head, name)
    params, x_BND = cases.drawn(lambda key: variant.init(key, C=C, D=D)), cases.normal(1, B, N, D)
    log_p = translate.log_probabilities(variant.apply(params, x_BND))
    slow = {"pooled": reference.pooled_class, "class_token": reference.class_token_class}[name]
    for b in range(B):
        p = slow(translate.columns(x_BND[b]), np.asarray(params["G_CD"]), np.asarray(params["b_C"]))
        cases.close(log_p[b], np.log(p))


@pytest.mark.parametrize("name", ["next_word", "masked_word", "pooled", "class_token"])
def test_logits_are_float32(name):
    variant, sizes = getattr(head, name), {"W": W} if "word" in name else {"C": C}
    params = cases.drawn(lambda key: variant.init(key, D=D, **sizes))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x_BND = cases.normal(1, B, N, D).astype(jnp.bfloat16)
    narrow = variant.apply(params, x_BND)
    assert narrow.dtype == jnp.float32
    with cases.float64():
        wide = variant.apply(*cases.wide((params, x_BND)))
    assert wide.dtype == np.float64
    cases.close(narrow, wide, 2e-2)


# ------------------------------------------------------------------------------------------------------------ losses


@cases.float64()
def test_cross_entropy_equals_the_reference():
    """In nats, over what is asked for only; a target there may be anything, and so may its logits."""
    logits, target_BN = cases.normal(0, B, N, W, std=3.0), cases.words(1)
    weight_BN = jnp.asarray(np.random.default_rng(2).integers(0, 3, (B, N)) / 2.0)
    assert (weight_BN == 0).any() and (weight_BN == 0.5).any()
    total, count = loss.cross_entropy(logits, target_BN, weight_BN)
    slow = 0.0
    for b in range(B):
        p = [reference.softmax(np.asarray(row)) for row in logits[b]]
        slow += reference.cross_entropy(p, np.asarray(target_BN[b]), np.asarray(weight_BN[b]))
    cases.close(total, slow)
    cases.close(count, float(weight_BN.sum()))
    dirty = jnp.where(weight_BN[..., None] == 0, jnp.nan, logits)
    cases.close(loss.cross_entropy(dirty, jnp.where(weight_BN == 0, W + 5, target_BN), weight_BN)[0], slow)


def test_cross_entropy_of_nothing_is_zero_of_zero():
    total, count = loss.cross_entropy(cases.normal(0, B, N, W), cases.words(1), jnp.zeros((B, N)))
    assert total == 0 and count == 0


def test_cross_entropy_has_no_gradient_where_nothing_is_asked():
    weight_BN = jnp.ones((B, N)).at[1, 3:].set(0.0)
    gradient = jax.grad(lambda l: loss.cross_entropy(l, cases.words(1), weight_BN)[0])(cases.normal(0, B, N, W))
    np.testing.assert_array_equal(gradient.any(-1), weight_BN > 0)
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-6)


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_their_number():
    total, count = loss.cross_entropy(jnp.full((3, 5), 1000.0), jnp.arange(3), jnp.ones(3))
    assert float(total / count) == pytest.approx(np.log(5), abs=1e-4)


def test_losses_of_bfloat16_logits_are_float32():
    logits, target_BN, weight_BN = cases.normal(0, B, N, W).astype(jnp.bfloat16), cases.words(1), jnp.ones((B, N))
    total, _ = loss.cross_entropy(logits, target_BN, weight_BN)
    assert total.dtype == jnp.float32
    cases.close(total, loss.cross_entropy(logits.astype(jnp.float32), target_BN, weight_BN)[0], 1e-6)


def test_accuracy_by_hand():
    logits = jnp.array([[1.0, 2.0, 0.0], [5.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    hits, asked = loss.accuracy(logits, jnp.array([1, 0, 0, 0]), jnp.array([1.0, 1.0, 1.0, 0.0]))
    assert (hits, asked) == (2, 3)
    hits, asked = loss.accuracy(logits, jnp.array([0, 2, 2, 0]), jnp.array([1.0, 1.0, 0.0, 0.0]))
    assert (hits, asked) == (0, 2)
