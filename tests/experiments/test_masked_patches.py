"""Image-to-image prediction (E26): its mathematics against the slow reference."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import reference
import reference_image
import tiny
import translate
from cases import B, D, N
from errors import raises

from experiments.build import model as models
from tfm import embed, head, loss

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


def test_no_hidden_pixel_reaches_an_output_or_a_gradient():
    """Not even NaN; a visible one reaches the outputs of all patches, also of the hidden ones."""
    places = {"embed": models.bind_sizes(embed.masked_patches, P=P), "head": models.bind_sizes(head.pixels, P=P)}
    model = models.build_model(tiny.settings("masked_image", model__M=1).model, **places, N=N)
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
        with raises(ValueError, f"{wrong['Y']} x {wrong['X']}"):
            embed.join(v_BNP, **wrong)
