"""Symmetry and directionality against the slow reference, and their properties."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_symmetry as reference
from cases import D, H, K, M

from tfm import symmetry
from tfm.attention import score

concatenate_heads = jax.jit(symmetry.concatenate_heads)
REFERENCES = reference.symmetry, reference.directionality


@jax.jit
def measure(Uq_HKD, Uk_HKD):
    """Return [symmetry, directionality] by the closed forms, and both by the definition."""
    closed = [function(Uq_HKD, Uk_HKD) for function in (symmetry.symmetry, symmetry.directionality)]
    M_HDD = symmetry.form(Uq_HKD, Uk_HKD)
    return closed, [symmetry.symmetry_of(M_HDD), symmetry.directionality_of(M_HDD)]


def factors(seed: int = 0, *, h: int = H, k: int = K, d: int = D) -> np.ndarray:
    """Draw U_q and U_k, (2, h, k, d), with some features much larger than others, so that d is not 0."""
    rng = np.random.default_rng(seed)
    larger = rng.choice([1.0, 9.0], (2, 1, 1, d), p=[0.9, 0.1])
    return rng.standard_normal((2, h, k, d)) * larger


def form(*heads) -> np.ndarray:
    """Return the reference's sum of M over heads."""
    return reference.form(*([np.asarray(U_KD, np.float64).T for U_KD in U_HKD] for U_HKD in heads))


def slow(Uq_HKD, Uk_HKD) -> list[np.ndarray]:
    """Return the reference's symmetry and directionality of each head."""
    forms = [form([Uq_KD], [Uk_KD]) for Uq_KD, Uk_KD in zip(Uq_HKD, Uk_HKD, strict=True)]
    return [np.array([of_form(M_DD) for M_DD in forms]) for of_form in REFERENCES]


@pytest.mark.parametrize(("k", "d"), [(K, D), (19, 7)])
@cases.float64()
def test_the_closed_forms_equal_the_definition_and_the_reference(k, d):
    U = factors(k, k=k, d=d)
    closed, by_definition = measure(*U)
    cases.assert_trees_close([closed, by_definition], [slow(*U)] * 2)
    for measure_H in closed:
        assert measure_H.shape == (H,) and measure_H.dtype == np.float64 and np.ptp(measure_H) > 0.01


@cases.float64()
def test_measures_of_the_sum_over_heads_equal_the_reference():
    Uq_HKD, Uk_HKD = factors(3)
    for queries_HKD in (Uq_HKD, Uq_HKD[:1]):  # the second is one query for all heads
        of_sum = concatenate_heads(queries_HKD, Uk_HKD)
        assert of_sum[0].shape == of_sum[1].shape == (1, H * K, D)
        M_DD = form(np.broadcast_to(queries_HKD, Uk_HKD.shape), Uk_HKD)
        cases.assert_trees_close(measure(*of_sum)[0], [np.array([of_form(M_DD)]) for of_form in REFERENCES])


def test_float32_is_close_and_the_size_of_the_matrices_does_not_matter():
    """Smaller types are computed in float32."""
    U, expected = factors(1), slow(*factors(1))
    for scale in (1e-20, 1e20):
        closed, _ = measure(*(scale * U))
        _, by_definition = measure(scale * U[0], U[1])
        assert {measure_H.dtype for measure_H in (*closed, *by_definition)} == {np.dtype("float32")}
        cases.assert_trees_close([closed, by_definition], [expected] * 2, 1e-5)
    narrow = U.astype(jnp.bfloat16)
    closed, _ = measure(*narrow)
    assert {measure_H.dtype for measure_H in closed} == {np.dtype("float32")}
    cases.assert_trees_close(closed, slow(*narrow), 1e-5)


def test_large_features_of_keys_give_a_negative_direction_and_a_tied_form_has_none():
    large_D = np.where(np.arange(D) == 3, 100.0, 1.0)
    U_HKD, V_HKD = np.random.default_rng(0).standard_normal((2, H, K, D))
    assert np.asarray(measure(U_HKD, V_HKD * large_D)[0][1]).mean() < -0.5
    assert np.asarray(measure(U_HKD * large_D, V_HKD)[0][1]).mean() > 0.5
    symmetry_H, directionality_H = measure(U_HKD * large_D, U_HKD * large_D)[0]
    cases.assert_close(symmetry_H, np.ones(H), 1e-6)
    assert not np.any(directionality_H)
    many_HKD = np.sign(cases.normal(1, 1, 16, 1024))  # with 1024 features, the form is not lost in rounding
    cases.assert_close(jax.jit(symmetry.symmetry)(many_HKD, many_HKD), [1], 1e-6)


def test_without_an_outstanding_norm_there_is_no_direction():
    three_features = factors(7, k=2, d=3)  # none of three numbers can exceed the mean by two standard deviations
    Q_DD, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 101, 101)))  # all norms are 1 up to rounding
    for pair in (three_features, (Q_DD, np.broadcast_to(np.eye(101), Q_DD.shape))):
        assert not np.any([directionality_H for _, directionality_H in measure(*pair)])


def test_the_symmetry_of_zeros_is_nan_and_their_direction_zero():
    Uq_HKD, Uk_HKD = factors(8)
    for symmetry_H, directionality_H in measure(0 * Uq_HKD, Uk_HKD):
        assert np.isnan(symmetry_H).all() and not np.any(directionality_H)
    half = K // 2  # features with opposite signs cancel in rounding
    Uq_HKD[:, half : 2 * half], Uk_HKD[:, half : 2 * half] = Uq_HKD[:, :half], -Uk_HKD[:, :half]
    Uq_HKD[:, -1] = 0
    assert np.isnan(measure(Uq_HKD, Uk_HKD)[0][0]).all()
    broken_HKD, _ = factors(8)
    broken_HKD[1, 2, 3] = np.nan
    closed = jax.device_get(measure(broken_HKD, factors(8)[1])[0])
    for measure_H in closed:
        assert np.isnan(measure_H).tolist() == [False, True, False, False, False]
    mean = jax.jit(lambda x_H: symmetry.mean(x_H, -1))(closed[0])
    assert float(mean) == pytest.approx(np.nanmean(closed[0]))


# All heads together have fewer features than D, or more
@pytest.mark.parametrize(("k", "scale"), [(2, 1.0), (K, 1e20)])
def test_measures_of_all_layers_equal_those_of_each_layer(k, scale):
    layers = [factors(seed, k=k) for seed in range(M)]
    params = dict(zip(("Uq_HKD", "Uk_HKD"), scale * np.stack(layers, axis=1), strict=True))
    compute = jax.jit(lambda params: symmetry.layers(params, score.asymmetric.factors, M=M, D=D))
    result = jax.device_get(compute(params))
    for m, U in enumerate(layers):
        cases.assert_close(result.symmetry_H[m], slow(*U)[0], 1e-5)
        cases.assert_close(result.symmetry[m], reference.symmetry(form(*U)), 1e-5)
        cases.assert_close(result.directionality[m], reference.directionality(form(*U)), 1e-5)


def test_without_parameters_the_form_is_the_identity():
    plain = jax.device_get(jax.jit(lambda: symmetry.layers({}, score.none.factors, M=M, D=D))())
    expected = symmetry.Layer(np.ones((M, 1)), np.ones(M), np.zeros(M))
    jax.tree.map(np.testing.assert_array_equal, plain, expected)
