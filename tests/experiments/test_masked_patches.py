"""Image-to-image prediction (E26): its mathematics against the slow reference."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_image
import tiny
import translate
from cases import B, D, N

from experiments import model as models
from tfm import embed, head, loss, shapes

P = 31
HIDDEN_BN = np.array([[1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0, 1]], bool)  # B x N


@cases.float64()
def test_masked_patches_and_pixels_equal_the_reference():
    image_BYXZ, hidden_BN = cases.normal(0, 2, 6, 9, 5), HIDDEN_BN[:, :6]
    params = cases.drawn(lambda key: embed.masked_patches.init(key, P=45, D=D))
    out = cases.drawn(lambda key: head.pixels.init(key, P=P, D=D))

    @jax.jit
    def both(image_BYXZ):
        inputs = {"v_BNP": embed.cut(image_BYXZ, size=3), "hidden_BN": hidden_BN}
        x_BND = embed.masked_patches.apply(params, inputs)
        return x_BND, head.pixels.apply(out, x_BND)

    x_BND, v_BNP = jax.device_get(both(image_BYXZ))
    for b in range(2):
        X = reference.patch_tokens(np.asarray(image_BYXZ[b]), np.asarray(params["W_DP"]), 3)
        X = X + np.asarray(params["b_D"])[:, None]
        cases.close(x_BND[b], reference_image.masked_tokens(X, hidden_BN[b], np.asarray(params["h_D"])).T)
        W, bias = np.asarray(out["W_PD"]), np.asarray(out["b_P"])
        cases.close(v_BNP[b], reference_image.predicted_patches(translate.columns(x_BND[b]), W, bias).T)


@cases.float64()
def test_squared_error_equals_the_reference_whatever_stands_where_nothing_is_asked():
    shown_BN1, error = ~HIDDEN_BN[..., None], jax.jit(loss.squared_error)
    prediction_BNP, target_BNP = (np.where(shown_BN1, np.nan, cases.normal(i, B, N, P)) for i in (0, 1))
    for b in range(B):
        guess, truth = (np.asarray(v_BNP[b]).T for v_BNP in (prediction_BNP, target_BNP))
        total, count = error(prediction_BNP[b : b + 1], target_BNP[b : b + 1], HIDDEN_BN[b : b + 1] * 1.0)
        assert count == HIDDEN_BN[b].sum() * P
        cases.close(total / count, reference_image.mean_squared_error(guess, truth, HIDDEN_BN[b]))
    grads_BNP = jax.jit(jax.grad(lambda v: loss.squared_error(v, target_BNP, HIDDEN_BN * 1.0)[0]))(prediction_BNP)
    cases.close(grads_BNP, np.where(shown_BN1, 0, 2 * (prediction_BNP - target_BNP)))


def test_squared_error_weighs_and_counts():
    prediction_BNP, target_BNP = jnp.array([[[1.0, 2.0], [5.0, 5.0]]]), jnp.array([[[0.0, 0.0], [4.0, 5.0]]])
    assert loss.squared_error(prediction_BNP, target_BNP, jnp.array([[0.5, 2.0]])) == (4.5, 5)
    assert loss.squared_error(prediction_BNP, target_BNP, jnp.zeros((1, 2))) == (0, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_predicted_pixels_and_their_error_are_float32_and_tokens_are_of_the_parameters_type(dtype):
    params, x_BND = cases.drawn(lambda key: head.pixels.init(key, P=P, D=D)), cases.normal(1, B, N, D).astype(dtype)
    v_BNP = head.pixels.apply(jax.tree.map(lambda leaf: leaf.astype(dtype), params), x_BND)
    narrow_BNP = v_BNP.astype(dtype)
    total, count = loss.squared_error(narrow_BNP, jnp.ones_like(v_BNP) / 3, jnp.ones((B, N), dtype))
    wide, _ = loss.squared_error(narrow_BNP.astype(jnp.float32), jnp.ones_like(v_BNP) / 3, jnp.ones((B, N)))
    assert v_BNP.dtype == total.dtype == jnp.float32 and count == B * N * P and total == wide
    params = cases.drawn(lambda key: embed.masked_patches.init(key, P=P, D=D))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    inputs = {"v_BNP": cases.normal(0, B, N, P), "hidden_BN": HIDDEN_BN}
    assert embed.masked_patches.apply(params, inputs).dtype == dtype


def test_initial_parameters():
    key = jax.random.key(0)
    params = embed.masked_patches.init(key, P=53, D=1009)
    assert shapes.check(params) == {"P": 53, "D": 1009} and not params["b_D"].any()
    assert float(params["h_D"].std()) == pytest.approx(1009**-0.5, rel=0.06)
    np.testing.assert_array_equal(params["W_DP"], embed.patches.init(key, P=53, D=1009)["W_DP"])
    params = head.pixels.init(key, P=53, D=97)
    assert shapes.check(params) == {"P": 53, "D": 97} and not params["b_P"].any()
    assert float(params["W_PD"].std()) == pytest.approx(0.02, rel=0.06)


def test_no_hidden_pixel_reaches_an_output_or_a_gradient():
    """Not even NaN; a visible one reaches the outputs of all patches, also of the hidden ones."""
    places = {"embed": models.sized(embed.masked_patches, P=P), "head": models.sized(head.pixels, P=P)}
    model = models.build(tiny.settings("masked_image", model__M=1).model, **places, N=N)
    params = cases.drawn(model.init)

    @jax.jit
    def answers(v_BNP):
        def predict(params):
            return model.apply(params, {"v_BNP": v_BNP, "hidden_BN": HIDDEN_BN}, mask=None)[0]

        return predict(params), jax.grad(lambda params: jnp.sum(predict(params) ** 2))(params)

    v_BNP = cases.normal(0, B, N, P)
    clean, dirty = answers(v_BNP), answers(jnp.where(HIDDEN_BN[..., None], jnp.nan, v_BNP))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    changed = answers(v_BNP.at[0, 1, 3].add(1.0))[0] != clean[0]  # patch 1 of image 0 is visible
    assert changed[0].any(-1).all() and not changed[1].any()
    assert clean[1]["embed"]["h_D"].any() and clean[1]["embed"]["W_DP"].any()


def test_join_undoes_cut():
    image_BYXZ = cases.normal(0, 2, 6, 9, 5)
    v_BNP = embed.cut(image_BYXZ, size=3)
    np.testing.assert_array_equal(embed.join(v_BNP, Y=6, X=9, size=3), image_BYXZ)
    for slow, image_YXZ in zip(v_BNP, image_BYXZ, strict=True):
        cases.close(slow, reference_image.vec_patches(np.asarray(image_YXZ), 3).T, 1e-6)
    for wrong in ({"Y": 6, "X": 6, "size": 3}, {"Y": 7, "X": 9, "size": 3}, {"Y": 10, "X": 15, "size": 5}):
        with pytest.raises(ValueError, match=f"6 patches of 45 values, .* do not make {wrong['Y']} x {wrong['X']}"):
            embed.join(v_BNP, **wrong)
