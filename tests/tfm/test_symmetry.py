"""Symmetry and directionality against the slow reference, their properties, and measures of attention weights."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_symmetry as reference
from cases import B, D, H, K, M, N

from tfm import symmetry
from tfm.attention import score

# Compiled, because tests then take the least time.
symmetry_closed, symmetry_of = jax.jit(symmetry.symmetry), jax.jit(symmetry.symmetry_of)
directionality_closed, directionality_of = jax.jit(symmetry.directionality), jax.jit(symmetry.directionality_of)
form, concatenate_heads, weights = (
    jax.jit(symmetry.form),
    jax.jit(symmetry.concatenate_heads),
    jax.jit(symmetry.weights),
)
MEASURES = (
    (symmetry_closed, symmetry_of, reference.symmetry),
    (directionality_closed, directionality_of, reference.directionality),
)


def factors(seed: int = 0, *, h: int = H, k: int = K, d: int = D, scale: float = 1.0):
    """Draw factors with some features much larger than others, so that d is not 0."""
    rng = np.random.default_rng(seed)
    larger = rng.choice([1.0, 9.0], (2, 1, 1, d), p=[0.9, 0.1])
    return tuple(jnp.asarray(scale * U_HKD) for U_HKD in rng.standard_normal((2, h, k, d)) * larger)


def slow(Uq_HKD, Uk_HKD, measure) -> np.ndarray:
    """Return the reference's measure of each head."""
    heads = [([np.asarray(U_KD, np.float64).T] for U_KD in pair) for pair in zip(Uq_HKD, Uk_HKD, strict=True)]
    return np.array([measure(reference.form(*pair)) for pair in heads])


@pytest.mark.parametrize(("k", "d"), [(K, D), (19, 7)])
@cases.float64()
def test_the_closed_forms_equal_the_definition_and_the_reference(k, d):
    U = factors(k, k=k, d=d)
    M_HDD = form(*U)
    for closed, of_form, of_reference in MEASURES:
        measure_H = closed(*U)
        assert measure_H.shape == (H,) and measure_H.dtype == np.float64 and np.ptp(measure_H) > 0.01
        cases.assert_close(of_form(M_HDD), slow(*U, of_reference))
        cases.assert_close(measure_H, slow(*U, of_reference))


@cases.float64()
def test_measures_of_the_sum_over_heads_equal_the_reference():
    Uq_HKD, Uk_HKD = factors(3)
    M_DD = reference.form(*([np.asarray(U_KD).T for U_KD in U_HKD] for U_HKD in (Uq_HKD, Uk_HKD)))
    of_sum = concatenate_heads(Uq_HKD, Uk_HKD)
    assert of_sum[0].shape == of_sum[1].shape == (1, H * K, D)
    for measure, _, reference_measure in MEASURES:
        cases.assert_close(measure(*of_sum), [reference_measure(M_DD)])
    heads = concatenate_heads(Uq_HKD[:1], Uk_HKD)  # one query for all heads
    cases.assert_close(form(*heads), form(jnp.broadcast_to(Uq_HKD[:1], (H, K, D)), Uk_HKD).sum(0)[None])


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_float32_is_close_and_the_size_of_the_matrices_does_not_matter(scale):
    U = factors(1, scale=scale)
    assert U[0].dtype == np.float32
    for measure, by_definition, reference_measure in MEASURES:
        expected = slow(*factors(1), reference_measure)
        cases.assert_close(measure(*U), expected, 1e-5)
        cases.assert_close(by_definition(form(U[0], U[1] / scale)), expected, 1e-5)


def test_bfloat16_is_computed_in_float32():
    U = [U_HKD.astype(jnp.bfloat16) for U_HKD in factors(2)]
    for measure, _, reference_measure in MEASURES:
        assert measure(*U).dtype == np.float32
        cases.assert_close(measure(*U), slow(*(np.asarray(U_HKD, np.float64) for U_HKD in U), reference_measure), 1e-5)
    assert weights(jnp.ones((M, B, H, N, N), jnp.bfloat16))["entropy"].dtype == np.float32


def test_large_features_of_keys_give_a_negative_direction_and_a_tied_form_has_none():
    U_HKD, V_HKD = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, K, D)))
    large_D = jnp.ones(D).at[3].set(20.0)
    assert float(directionality_closed(U_HKD, V_HKD * large_D)[0]) < -0.5
    assert float(directionality_closed(U_HKD * large_D, V_HKD)[0]) > 0.5
    assert not directionality_closed(U_HKD * large_D, U_HKD * large_D).any()
    many_HKD = jnp.sign(cases.normal(1, 1, 16, 1024))  # with 1024 features, the form is not lost in rounding
    for W_HKD in (U_HKD, many_HKD):
        cases.assert_close(symmetry_closed(W_HKD, W_HKD), [1], 1e-6)


def test_without_an_outstanding_norm_there_is_no_direction():
    three_features = factors(7, k=2, d=3)  # none of three numbers can exceed the mean by two standard deviations
    Q_DD, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 101, 101)))
    Q_DD = jnp.asarray(Q_DD, jnp.float32)  # all norms are 1 up to rounding
    for pair in (three_features, (Q_DD, jnp.broadcast_to(jnp.eye(101), Q_DD.shape))):
        assert not directionality_closed(*pair).any() and not directionality_of(form(*pair)).any()


def test_the_symmetry_of_zeros_is_nan_and_their_direction_zero():
    Uq_HKD, Uk_HKD = factors(8)
    for pair in ((0 * Uq_HKD, Uk_HKD), (jnp.tile(Uq_HKD, (1, 2, 1)), jnp.concatenate([Uk_HKD, -Uk_HKD], 1))):
        assert jnp.isnan(symmetry_closed(*pair)).all()
    assert not directionality_closed(0 * Uq_HKD, Uk_HKD).any()
    assert jnp.isnan(symmetry_of(jnp.zeros((2, D, D)))).all()
    broken = Uq_HKD.at[1, 2, 3].set(jnp.nan), Uk_HKD
    for measure, *_ in MEASURES:
        assert jnp.isnan(measure(*broken)).tolist() == [False, True, False, False, False]
    s_H = symmetry_closed(*broken)
    assert float(symmetry.mean(s_H, -1)) == pytest.approx(float(np.nanmean(s_H)))


@pytest.mark.parametrize(
    ("k", "scale"), [(2, 1.0), (K, 1e20)]
)  # all heads together have fewer features than D, or more
def test_measures_of_all_layers_equal_those_of_each_layer(k, scale):
    layers = [factors(seed, k=k, scale=scale) for seed in range(M)]
    Uq_MHKD, Uk_MHKD = map(np.stack, zip(*layers, strict=True))
    layer_params = {"Uq_HKD": Uq_MHKD, "Uk_HKD": Uk_MHKD}
    result = jax.jit(lambda params: symmetry.layers(params, score.asymmetric.factors, M=M, D=D))(layer_params)
    for m, U in enumerate(layers):
        cases.assert_close(result.symmetry_H[m], slow(*U, reference.symmetry), 1e-5)
        cases.assert_close(result.symmetry[m], symmetry_closed(*concatenate_heads(*U))[0], 1e-5)
        cases.assert_close(result.directionality[m], directionality_closed(*concatenate_heads(*U))[0], 1e-5)


def test_without_parameters_the_form_is_the_identity():
    plain = jax.jit(lambda: symmetry.layers({}, score.none.factors, M=M, D=D))()
    assert plain.symmetry_H.tolist() == [[1.0]] * M and plain.symmetry.tolist() == [1.0] * M
    assert plain.directionality.tolist() == [0.0] * M


def attention_weights(kind: str) -> tuple[jax.Array, np.ndarray]:
    """Return (A_MBHNN, real_BN) for a causal mask, padding, or queries without keys ("blind", "nothing")."""
    allowed_BNN, real_BN = np.ones((B, N, N), bool), np.ones((B, N), bool)
    if kind == "causal":
        allowed_BNN &= np.tri(N, dtype=bool)
    if kind == "padding":
        real_BN = np.arange(N) < np.array([[N], [4]])
        allowed_BNN &= real_BN[:, None]
    if kind in ("blind", "nothing"):
        allowed_BNN[:, 3] = allowed_BNN[1] = False
        allowed_BNN &= kind == "blind"
    l_MBHNN = cases.normal(0, M, B, H, N, N, std=2.0)
    allowed = jnp.asarray(allowed_BNN)[:, None]
    return jnp.where(allowed, jax.nn.softmax(jnp.where(allowed, l_MBHNN, -1e9)), 0), real_BN


@pytest.mark.parametrize("kind", ["causal", "padding", "blind", "nothing"])
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@cases.float64()
def test_measures_of_attention_weights_equal_the_reference(kind):
    A_MBHNN, real_BN = attention_weights(kind)
    result, A = weights(A_MBHNN, real_BN), np.asarray(A_MBHNN)
    for name in ("entropy", "diagonal", "asymmetry"):
        measure = getattr(reference, name)
        slow_MBH = [[[measure(A.T, real_BN[b]) for A in A_HNN] for b, A_HNN in enumerate(A_BHNN)] for A_BHNN in A]
        cases.assert_close(result[name], np.nanmean(np.array(slow_MBH), axis=(1, 2)))
    if kind == "causal":
        cases.assert_trees_close(weights(A_MBHNN), result, 0)
