"""Scores and scales (E4-E7, E11): against the slow references, symmetry, parameter counts, initial values."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_alternatives
import reference_decoders
import reference_scores
from cases import B, N, S
from errors import raises
from score_cases import SCORES, SYMMETRIC, SYMMETRIC_WITH_ROTARY, D, H, K, draw_params

from experiments.engine import optim
from tfm import block as blocks, initial, shapes, symmetry
from tfm.attention import explicit, relative_position, score

# {score: (parameters for each head without biases, biases for each head)}
COUNTS = dict.fromkeys(("none", "constant"), (0, 0)) | {"tied_signed": (D * K + K, K), "l2_tied": (D * K, 0)}
COUNTS |= dict.fromkeys(("tied", "tied_keynorm", "identity_query"), (D * K, K))
COUNTS |= dict.fromkeys(("pairwise", "pairwise_sym"), (D * K + K * K, K))
COUNTS |= {"asymmetric_qknorm": (2 * D * K + 2 * K / H, 2 * K)}  # the heads share the gains
COUNTS |= {"nonlinear_query": (D * K + 2 * D * (D // 2 + 1) / H, K)}
COUNTS |= {"sym_plus_skew": (D * (K + 2), K + 2)}
COUNTS |= dict.fromkeys(("tied_wide", "symmetric_init", "asymmetric", "asymmetric_std"), (2 * D * K, 2 * K))
reference_scores.OF["nonlinear_query"] = reference_alternatives.nonlinear_query_logits
reference_scores.OF["asymmetric_qknorm"] = reference_decoders.qknorm_logits
# Equal to another score up to initial values, or constant.
SAME_AS_OTHER_SCORES = {"symmetric_init", "asymmetric_std", "constant"}
NAMES = [name for name in SCORES if name not in SAME_AS_OTHER_SCORES]
TOKENS = cases.normal(1, B, N, D), cases.normal(2, B, S, D)
both_types = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


@functools.cache
def initial_params() -> dict[bool, dict[str, dict]]:
    """Return {whether the score has biases: {score: initial parameters}}."""

    def initialise(bias: bool) -> dict:
        key = jax.random.key(7)
        return {name: variant.init(key, H=H, K=K, D=D, bias=bias) for name, variant in SCORES.items()}

    return jax.device_get({bias: initialise(bias) for bias in (True, False)})


def cast(tree, dtype):
    """Convert a tree without compiled programs."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), tree)


def logits(name: str, params: dict, x_BND, x_BSD) -> jax.Array:
    return explicit.logits(*SCORES[name].apply(params, x_BND, x_BSD), scale=1.0)


@functools.cache
@cases.float64()
def compute_logits() -> tuple[dict, dict, dict]:
    """Return ({(score, bias): three logits}, {score: factors}, parameters).

    The logits are between two sequences, within one sequence, and between it and its copy.
    """
    trees = {(name, bias): draw_params(name, bias) for name in NAMES for bias in (True, False)}

    @jax.jit
    def compute_all(trees, x_BND, x_BSD, copy_BND):
        pairs = (x_BND, x_BSD), (x_BND, x_BND), (x_BND, copy_BND)
        by_score = {of: [logits(of[0], params, *pair) for pair in pairs] for of, params in trees.items()}
        with_factors = [name for name in NAMES if SCORES[name].factors]
        return by_score, {name: SCORES[name].factors(trees[name, False], D=D) for name in with_factors}

    x_BND, x_BSD = cases.to_float64(TOKENS)
    return jax.device_get((*compute_all(trees, x_BND, x_BSD, x_BND), trees))


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_and_common_queries_and_keys_are_the_same(name):
    by_score, _, trees = compute_logits()
    for bias in (True, False):
        fast, of_one, of_copy = by_score[name, bias]
        assert fast.shape == (B, 1 if name == "none" else H, N, S) and fast.dtype == np.float64
        for b, h in itertools.product(range(B), range(fast.shape[1])):
            X, params = (np.asarray(TOKENS[1][b]).T, np.asarray(TOKENS[0][b]).T), trees[name, bias]
            L = reference.naive_logits(*X) if name == "none" else reference_scores.logits(name, params, *X, h)
            cases.assert_close(fast[b, h], L.T)
        cases.assert_close(of_one, of_copy, 1e-14)
        difference = np.abs(of_one - of_one.swapaxes(2, 3)).max()
        assert difference < 1e-13 if name in SYMMETRIC else difference > 0.1


def test_bfloat16_logits_are_close_to_float64():
    @jax.jit
    def compute_all(trees, *pair):
        return {name: (SCORES[name].apply(p, *pair), logits(name, p, *pair)) for name, p in trees.items()}

    trees = {name: draw_params(name) for name in NAMES}
    for name, (qk, l_BHNS) in compute_all(*cast((trees, *TOKENS), jnp.bfloat16)).items():
        assert {x.dtype for x in qk} == {jnp.dtype(jnp.bfloat16)} and l_BHNS.dtype == np.float32
        cases.assert_close(l_BHNS, compute_logits()[0][name, True][0], 2e-2)


@cases.float64()
def test_which_scores_are_symmetric_with_rotary_positions():
    """U^T R_{n-s} U is the transpose of U^T R_{s-n} U, unless signs or a matrix are between the two."""
    names = [name for name in SCORES if SCORES[name].supports_rope and name not in SAME_AS_OTHER_SCORES]
    variants, x_BND = (relative_position.rotary, relative_position.rotary_halves), cases.normal(1, B, N, 12)

    @jax.jit
    def compute_all(trees):
        by_score = {}
        for name, params in trees.items():
            qk = SCORES[name].apply(params, x_BND, x_BND)
            rotated_logits = [variant.rotate({}, *qk, jnp.arange(N)) for variant in variants]
            by_score[name] = [explicit.logits(*sides, scale=1.0) for sides in rotated_logits]
        return by_score

    for name, rotated_logits in compute_all({name: draw_params(name, K=4, D=12) for name in names}).items():
        for l_BHNN in rotated_logits:
            difference = np.abs(l_BHNN - l_BHNN.swapaxes(2, 3)).max()
            assert difference < 1e-13 if name in SYMMETRIC_WITH_ROTARY else difference > 0.1, name


@both_types
def test_tied_logits_are_symmetric_to_the_last_bit(dtype, name="tied"):
    """Libraries on some CPUs sum x x^T in another order than its transpose. There, a small difference is allowed."""
    params, x_BND = cast((draw_params(name, K=31, D=37), cases.normal(1, 2, 67, 37)), dtype)
    l_BHNN = np.asarray(jax.jit(logits, static_argnums=0)(name, params, x_BND, x_BND))
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    product_BNN = np.asarray(jax.jit(lambda x_BND: product(x_BND, x_BND.swapaxes(1, 2)))(x_BND))
    exact = np.array_equal(product_BNN, product_BNN.swapaxes(1, 2))
    np.testing.assert_allclose(l_BHNN, l_BHNN.swapaxes(2, 3), rtol=0, atol=0 if exact else 1e-6 * np.abs(l_BHNN).max())


def test_factors_make_the_bilinear_form():
    """l = x_n^T U_q^T U_k x_s, times the scales of tied_keynorm's keys, or minus l2_tied's squared lengths."""
    by_score, factors, trees = compute_logits()
    assert [name for name in NAMES if name not in factors] == ["nonlinear_query"]
    for name, (Uq_HKD, Uk_HKD) in factors.items():
        params = trees[name, False]
        form = np.einsum("bnd,hkd,hke,bse->bhns", TOKENS[0], Uq_HKD, Uk_HKD, TOKENS[1], optimize=True)
        if name == "tied_keynorm":
            form *= K**0.5 / np.linalg.norm(np.einsum("hkd,bsd->bhsk", params["U_HKD"], TOKENS[1]), axis=-1)[:, :, None]
        if name == "asymmetric_qknorm":
            for x, leaf, axis in zip(TOKENS, ("Uq_HKD", "Uk_HKD"), (3, 2), strict=True):
                square = np.square(np.einsum("hkd,bnd->bhnk", params[leaf], x)).mean(-1)
                form /= np.expand_dims(np.sqrt(square + 1e-5), axis)
        if name == "l2_tied":
            square = [(np.einsum("hkd,bnd->bhnk", params["U_HKD"], x) ** 2).sum(-1) for x in TOKENS]
            form -= square[0][..., None] + square[1][:, :, None]
        cases.assert_close(by_score[name, False][0], form)


def test_flags_and_scales_of_scores():
    assert [name for name in SCORES if SCORES[name].factors is None] == ["nonlinear_query", "constant"]
    assert [name for name in SCORES if not SCORES[name].attend_to_self] == ["tied_keynorm"]
    assert [name for name in SCORES if not SCORES[name].supports_rope] == ["l2_tied", "constant"]
    scales = {name: scale(4, 25) for name, scale in score.SCALES.items()}
    assert scales == {"1/sqrt(K)": 0.5, "1/sqrt(D)": 0.2, "1": 1.0}
    zeros = jax.jit(score.constant.apply)({}, *[cases.normal(1, 1, 5, D)] * 2)
    assert [z.shape for z in zeros] == [(1, 1, 5, 1)] * 2 and not any(z.any() for z in zeros)


def test_normalised_keys_have_one_length_and_a_zero_vector_stays_zero():
    params, x_BND = draw_params("tied_keynorm", bias=False), np.array(cases.normal(1, B, N, D))
    x_BND[1, 3] = 0

    def number(x_BND):
        k_BHNK = score.tied_keynorm.apply(params, x_BND, x_BND)[1]
        return jnp.sin(k_BHNK + 1).sum(), jnp.linalg.norm(k_BHNK, axis=-1)

    gradient, length_BHN = jax.device_get(jax.jit(jax.grad(number, has_aux=True))(x_BND))
    np.testing.assert_allclose(length_BHN[0], K**0.5, rtol=1e-6)
    assert not length_BHN[1, :, 3].any()
    assert np.isfinite(gradient).all() and gradient[1, 2].any() and not gradient[1, 3].any()


@both_types
def test_squared_lengths_keep_their_digits(dtype):
    """For K = 32, |u|^2 is about 100. Compiled distances are accurate to 2^-15 of it."""

    @jax.jit
    def compute_all(params, x_BND):
        qk = score.l2_tied.apply(params, x_BND, x_BND)
        return *qk, explicit.logits(*qk, scale=1.0)

    arrays = draw_params("l2_tied", H=2, K=32, D=64), 0.55 * np.asarray(cases.normal(1, 2, 41, 64))
    q_BHNK, k_BHNK, result = jax.device_get(compute_all(*cast(arrays, dtype)))
    assert q_BHNK.dtype == dtype
    w_BHNK = np.asarray(q_BHNK[..., :32], np.float64)
    exact = -((w_BHNK[:, :, :, None] - w_BHNK[:, :, None]) ** 2).sum(-1) / 2
    largest = (w_BHNK**2).sum(-1).max() / 2
    assert 50 < largest < 200 and np.abs(result - exact).max() < 2**-15 * largest
    first = np.asarray(k_BHNK[..., -2], np.float64)  # the first of the two features is rounded, to about 2^-9
    assert 2**-10 * largest < np.abs(first + (w_BHNK**2).sum(-1) / 2).max() < 2**-8 * largest


@cases.float64()
def test_squared_lengths_have_the_gradient_of_their_formula():
    x_BND, weight_BHNN = cases.normal(1, B, N, D), cases.normal(2, B, H, N, N)

    def direct(params: dict) -> jax.Array:
        u_BHNK = jnp.einsum("hkd,bnd->bhnk", params["U_HKD"], x_BND)
        return -((u_BHNK[:, :, :, None] - u_BHNK[:, :, None]) ** 2).sum(-1)

    functions = [lambda params: logits("l2_tied", params, x_BND, x_BND), direct]
    gradients = jax.jit(lambda params: [jax.grad(lambda p, f=f: (weight_BHNN * f(p)).sum())(params) for f in functions])
    cases.assert_trees_close(*gradients(draw_params("l2_tied")))


# These scores have another variance: 1/sqrt(3) for queries and keys, and the wider spectrum of U^T U.
VARIANCE = {"asymmetric_std": 1 / 9, "symmetric_init": (12 + 48 + 1) / 48 / 9}


def test_initial_logits_of_other_tokens_have_variance_one():
    """The variance is over the other keys of a query, for normalised tokens, averaged over 150 models."""
    heads, k, runs, n = 4, 12, 150, 32
    d = heads * k
    names = [name for name in SCORES if name != "constant"]
    x_RND = np.random.default_rng(1).standard_normal((runs, n, d), np.float32)
    x_RND = (x_RND - x_RND.mean(-1, keepdims=True)) / x_RND.std(-1, keepdims=True)

    @jax.jit
    @jax.vmap
    def compute_logits_of_run(seed, x_ND):
        result, key = {}, jax.random.key(seed)
        for name in names:
            params = SCORES[name].init(key, H=heads, K=k, D=d, bias=True)
            features = SCORES[name].apply(params, x_ND[None], x_ND[None])[0].shape[-1]
            result[name] = score.SCALES["1/sqrt(K)"](features, d) * logits(name, params, x_ND[None], x_ND[None])
        return result

    for name, l in compute_logits_of_run(np.arange(runs), x_RND).items():
        l_RHNS = np.asarray(l)[..., ~np.eye(n, dtype=bool)].reshape(*l.shape[:-1], n - 1)
        assert float(l_RHNS.var(-1, ddof=1).mean()) == pytest.approx(VARIANCE.get(name, 1.0), rel=0.04), name


def test_scores_have_their_number_of_parameters_and_the_same_matrices_without_biases():
    for name, (count, bias_count) in COUNTS.items():
        params, matrices = (initial_params()[bias][name] for bias in (True, False))
        assert [shapes.total(matrices), shapes.total(params)] == [H * count, H * (count + bias_count)], name
        shapes.check(params)
        for leaf, value in params.items():
            assert (leaf[0] == "b") == (leaf not in matrices) and (leaf in matrices or not value.any()), (name, leaf)
        jax.tree.map(np.testing.assert_array_equal, {leaf: params[leaf] for leaf in matrices}, matrices)
        drawn = jax.device_get(draw_params(name))
        for leaf, result in initial.scaled(drawn, 0.25, "U").items():
            np.testing.assert_array_equal(result, drawn[leaf] * (0.25 if leaf.startswith("U") else 1))
    assert COUNTS.keys() == SCORES.keys()


def test_parameters_of_one_name_have_the_same_initial_values():
    """test_initial.py tests the other scores."""
    params = initial_params()[False]
    plain, half = params["asymmetric"], params["asymmetric_std"]["Uq_HKD"]
    for leaf in ("Uq_HKD", "Uk_HKD"):
        np.testing.assert_array_equal(params["asymmetric_qknorm"][leaf], plain[leaf])
        np.testing.assert_array_equal(params["symmetric_init"][leaf], half)
    np.testing.assert_array_equal(params["identity_query"]["Uk_HKD"], plain["Uk_HKD"])
    np.testing.assert_allclose(params["nonlinear_query"]["Uk_HKD"], 2**0.5 * plain["Uk_HKD"], rtol=1e-6)
    np.testing.assert_array_equal(params["tied_signed"]["U_HKD"], params["pairwise"]["U_HKD"])
    np.testing.assert_array_equal(params["tied_signed"]["sigma_HK"], [[1, 1, 1, -1, -1]] * H)


def test_the_score_does_not_change_the_initial_values_of_the_rest_of_a_block():
    def initialise(name: str, std: float = 1.0) -> dict:
        parts, sizes = cases.spec(score=SCORES[name], H=H, score_std=std), dict(D=D, H=H, K=K, F=7, M=2, N=N)
        return blocks.init(jax.random.key(3), spec=parts, bias=True, cross=True, **sizes)

    first, second, scaled = initialise("asymmetric"), initialise("pairwise"), initialise("pairwise", 0.5)
    for part in ("score", "score_cross"):
        np.testing.assert_array_equal(scaled[part].pop("U_HKD"), second[part].pop("U_HKD") / 2)
    jax.tree.map(np.testing.assert_array_equal, scaled, second)
    for part in first.keys() - {"score", "score_cross"}:
        jax.tree.map(np.testing.assert_array_equal, first[part], second[part])


def test_weight_decay_changes_the_matrices_of_scores():
    params = initial_params()[True].values()
    decays = {leaf: has_decay for tree in params for leaf, has_decay in optim.matrices(tree).items()}
    matrices = {"U_HKD", "U_HQD", "Uq_HKD", "Uk_HKD", "P_HKK", "W1_ID", "W2_DI"}
    assert {leaf for leaf, has_decay in decays.items() if has_decay} == matrices
    other_leaves = {"b_HK", "b_HQ", "bq_HK", "bk_HK", "sigma_HK", "gainq_K", "gaink_K", "gain1_D", "gain2_D"}
    assert {leaf for leaf, has_decay in decays.items() if not has_decay} == other_leaves


@cases.float64()
def test_the_skew_part_of_sym_plus_skew_has_its_rank():
    """With r = 0 there is no skew part, and the score is `tied`."""
    for r in (0, 2, 4):
        params = score.sym_plus_skew_of(r).init(jax.random.key(0), H=H, K=K, D=D, bias=True)
        assert params["U_HQD"].shape == (H, K + r, D)
        M_HDD = np.asarray(symmetry.form(*score.sym_plus_skew_of(r).factors(params, D=D)), np.float64)
        U_HKD = np.asarray(params["U_HQD"], np.float64)[:, :K]
        np.testing.assert_allclose((M_HDD + M_HDD.mT) / 2, U_HKD.mT @ U_HKD, atol=1e-6)
        assert np.linalg.matrix_rank(M_HDD - M_HDD.mT, tol=1e-5).tolist() == [r] * H
    plain = draw_params("tied")
    same = score.sym_plus_skew_of(0).apply({"U_HQD": plain["U_HKD"], "b_HQ": plain["b_HK"]}, *TOKENS)
    cases.assert_trees_close(SCORES["tied"].apply(plain, *TOKENS), same, 1e-6)


def test_identity_query_needs_as_many_features_as_tokens():
    with raises(ValueError, "D = 16"):
        score.identity_query.init(jax.random.key(0), H=3, K=5, D=16, bias=True)
