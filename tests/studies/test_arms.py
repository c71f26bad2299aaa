"""The scores of the ablation against the slow reference, and what makes a comparison of them fair."""

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_scores
from cases import B, N, S

from experiments.engine import by_name, optim
from tfm import block, shapes
from tfm import initial as initials
from tfm.attention import explicit, relative_position, score

SCORES = by_name.candidates(score)
ARMS = [name for name in SCORES if name not in ("none", "constant")]
H, K = 3, 5
D = H * K  # what `identity_query` asks for
arms = pytest.mark.parametrize("name", ARMS)

# For each head as science has it: the parameters of queries and keys without biases.
COUNTS = {
    "none": 0,
    "tied": D * K,
    "tied_noself": D * K,
    "tied_keynorm": D * K,
    "tied_wide": 2 * D * K,
    "tied_signed": D * K + K,
    "pairwise": D * K + K * K,
    "pairwise_sym": D * K + K * K,
    "symmetric_init": 2 * D * K,
    "asymmetric": 2 * D * K,
    "asymmetric_std": 2 * D * K,
    "identity_query": D * K,
    "l2_tied": D * K,
    "constant": 0,
}
BIASES = {name: K for name in ARMS} | {"tied_wide": 2 * K, "l2_tied": 0}
BIASES |= dict.fromkeys(["symmetric_init", "asymmetric", "asymmetric_std"], 2 * K)


def drawn(name: str, bias: bool = True, sizes: dict | None = None) -> dict:
    """Parameters of a score, all of them normal numbers."""
    return cases.drawn(lambda key: SCORES[name].init(key, **dict(H=H, K=K, D=D) | (sizes or {}), bias=bias))


def initial(name: str, bias: bool = False) -> dict:
    return SCORES[name].init(jax.random.key(7), H=H, K=K, D=D, bias=bias)


def logits(name: str, params: dict, x_BND, x_BSD) -> jax.Array:
    return explicit.logits(*SCORES[name].apply(params, x_BND, x_BSD), scale=1.0)


# --------------------------------------------------------------------------------------------------- what they compute


@pytest.mark.parametrize(("name", "bias"), [*itertools.product(ARMS, [True, False])])
@cases.float64()
def test_logits_equal_the_reference(name, bias):
    params, x_BND, x_BSD = drawn(name, bias), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    fast = logits(name, params, x_BND, x_BSD)
    assert fast.shape == (B, H, N, S) and fast.dtype == np.float64
    for b, h in [(0, 0), (1, 1), (1, 2)]:
        L = reference_scores.logits(name, params, np.asarray(x_BSD[b]).T, np.asarray(x_BND[b]).T, h)
        cases.close(fast[b, h], L.T)


@arms
@cases.float64()
def test_tokens_that_attend_to_each_other_are_compared_as_any(name):
    """Where both are the same array, what is common to queries and keys is computed once."""
    params, x_BND = drawn(name), cases.normal(1, B, N, D)
    cases.close(logits(name, params, x_BND, x_BND), logits(name, params, x_BND, x_BND + 0.0), 1e-14)


@arms
def test_float32_and_bfloat16_are_close_to_float64(name):
    arguments = drawn(name), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    narrow = logits(name, *arguments)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arguments)
    assert {x.dtype for x in SCORES[name].apply(*half)} == {jnp.dtype(jnp.bfloat16)}
    with cases.float64():
        cases.close(narrow, logits(name, *cases.wide(arguments)), 1e-5)
        wide = logits(name, *cases.wide(half))
    half = logits(name, *half)
    assert narrow.dtype == half.dtype == np.float32
    cases.close(half, wide, 2e-2)


SYMMETRIC = {"tied", "tied_noself", "tied_wide", "tied_signed", "pairwise_sym", "l2_tied"}


@arms
@cases.float64()
def test_who_is_symmetric(name):
    x_BND = cases.normal(1, B, N, D)
    l_BHNN = logits(name, drawn(name), x_BND, x_BND)
    difference = np.abs(l_BHNN - l_BHNN.swapaxes(2, 3)).max()
    assert difference < 1e-13 if name in SYMMETRIC else difference > 0.1
    if name == "symmetric_init":
        at_first = logits(name, initial(name, bias=True), x_BND, x_BND)
        cases.close(at_first, at_first.swapaxes(2, 3), 1e-14)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_wide_tied_logits_too_are_symmetric_to_the_last_bit(dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), drawn("tied_wide", sizes=dict(K=31, D=37)))
    x_BND = cases.normal(1, 2, 67, 37).astype(dtype)
    for call in (logits, jax.jit(logits, static_argnums=0)):
        l_BHNN = np.asarray(call("tied_wide", params, x_BND, x_BND))
        np.testing.assert_array_equal(l_BHNN, l_BHNN.swapaxes(2, 3))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", ["tied_noself", "tied_wide", "tied_signed", "pairwise_sym"])
@cases.float64()
def test_rotary_positions_leave_what_turns_both_sides_alike_symmetric(name, halves):
    """U^T R_{n-s} U is the transpose of U^T R_{s-n} U; with signs, or P, between the two it is so no longer."""
    x_BND = cases.normal(1, B, N, 12)
    q_BHNK, k_BHNK = SCORES[name].apply(drawn(name, sizes=dict(K=4, D=12)), x_BND, x_BND)
    turned = relative_position.rotary_of(10000.0, halves=halves).rotate({}, q_BHNK, k_BHNK, jnp.arange(N))
    l_BHNN = explicit.logits(*turned, scale=1.0)
    cases.close(l_BHNN.diagonal(axis1=2, axis2=3), (q_BHNK * k_BHNK).sum(-1))  # a token is turned against nothing
    difference = np.abs(l_BHNN - l_BHNN.swapaxes(2, 3)).max()
    assert difference < 1e-13 if name.startswith("tied_") and name != "tied_signed" else difference > 0.1


@pytest.mark.parametrize("name", [name for name in SCORES if SCORES[name].factors is not None])
@cases.float64()
def test_factors_make_the_bilinear_form(name):
    """l = x_n^T U_q^T U_k x_s; beside it the scales of tied_keynorm's keys, and what l2_tied adds for either token."""
    params, x_BND, x_BSD = drawn(name, bias=False), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    Uq_HKD, Uk_HKD = SCORES[name].factors(params, D=D)
    M_HDD = jnp.einsum("hkd,hke->hde", Uq_HKD, Uk_HKD)
    form = jnp.einsum("bnd,hde,bse->bhns", x_BND, M_HDD, x_BSD)
    if name == "tied_keynorm":
        length_BHS = jnp.linalg.norm(jnp.einsum("hkd,bsd->bhsk", params["U_HKD"], x_BSD), axis=-1)
        form *= K**0.5 / length_BHS[:, :, None]
    if name == "l2_tied":
        square = [jnp.sum(jnp.einsum("hkd,bnd->bhnk", params["U_HKD"], x) ** 2, -1) for x in (x_BND, x_BSD)]
        form -= square[0][..., None] + square[1][:, :, None]
    cases.close(logits(name, params, x_BND, x_BSD), form)


def test_only_constant_has_no_bilinear_form():
    assert [name for name in SCORES if SCORES[name].factors is None] == ["constant"]
    assert [name for name in SCORES if not SCORES[name].itself] == ["tied_noself", "tied_keynorm"]


def test_keys_of_one_length_and_none_of_a_zero_vector():
    params = drawn("tied_keynorm", bias=False)
    x_BND = cases.normal(1, B, N, D).at[1, 3].set(0.0)

    def keys(x_BND):
        return score.tied_keynorm.apply(params, x_BND, x_BND)[1]

    length_BHN = jnp.linalg.norm(keys(x_BND), axis=-1)
    np.testing.assert_allclose(length_BHN[0], K**0.5, rtol=1e-6)
    assert not length_BHN[1, :, 3].any()
    gradient = jax.grad(lambda x_BND: jnp.sin(keys(x_BND) + 1).sum())(x_BND)
    assert jnp.isfinite(gradient).all() and gradient[1, 2].any() and not gradient[1, 3].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_squared_lengths_keep_their_digits(dtype):
    """For K = 32, |u|^2 is about 100: distances of these queries and keys within 2^-15 of that, compiled or not."""
    params = drawn("l2_tied", sizes=dict(H=2, K=32, D=64))
    arguments = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, 0.55 * cases.normal(1, 2, 41, 64)))
    for apply in (score.l2_tied.apply, jax.jit(score.l2_tied.apply)):
        q_BHNK, k_BHNK = apply(arguments[0], arguments[1], arguments[1])
        assert q_BHNK.dtype == dtype
        found = explicit.logits(q_BHNK, k_BHNK, scale=1.0)
        w_BHNK = np.asarray(q_BHNK[..., :32], np.float64)
        exact = -((w_BHNK[:, :, :, None] - w_BHNK[:, :, None]) ** 2).sum(-1) / 2
        largest = (w_BHNK**2).sum(-1).max() / 2
        assert 50 < largest < 200 and np.abs(found - exact).max() < 2**-15 * largest
    first = np.asarray(k_BHNK[..., -2], np.float64)  # alone it would be as far off as 2^-9
    assert 2**-10 * largest < np.abs(first + (w_BHNK**2).sum(-1) / 2).max() < 2**-8 * largest


@cases.float64()
def test_squared_lengths_pass_on_their_gradient():
    x_BND, weight_BHNN = cases.normal(1, B, N, D), cases.normal(2, B, H, N, N)

    def direct(params: dict) -> jax.Array:
        u_BHNK = jnp.einsum("hkd,bnd->bhnk", params["U_HKD"], x_BND)
        return -((u_BHNK[:, :, :, None] - u_BHNK[:, :, None]) ** 2).sum(-1)

    of = [lambda params: logits("l2_tied", params, x_BND, x_BND), direct]
    found, expected = (jax.grad(lambda p, f=f: (weight_BHNN * f(p)).sum())(drawn("l2_tied"))["U_HKD"] for f in of)
    cases.close(found, expected)


# ------------------------------------------------------------------------------------------------- how they are begun


def token_normed(key: jax.Array, *shape: int) -> jax.Array:
    x = jax.random.normal(key, shape)
    x -= x.mean(-1, keepdims=True)
    return x / x.std(-1, keepdims=True)


def spread(name: str, *, heads: int, k: int, runs: int, n: int = 32) -> float:
    """The variance of a query's scaled logits over the other keys: the mean over queries, heads and many models."""
    d = heads * k
    keys = jax.random.split(jax.random.key(1), (2, runs))
    params = jax.vmap(lambda key: SCORES[name].init(key, H=heads, K=k, D=d, bias=True))(keys[0])
    x_RND = token_normed(keys[1, 0], runs, n, d)
    q, k_ = jax.vmap(lambda params, x_ND: SCORES[name].apply(params, x_ND[None], x_ND[None]))(params, x_RND)
    l = np.asarray(explicit.logits(q, k_, scale=score.SCALES["1/sqrt(K)"](q.shape[-1], d)))
    others = l[..., ~np.eye(n, dtype=bool)].reshape(*l.shape[:-1], n - 1)
    return float(others.var(-1, ddof=1).mean())


EXPECTED = dict.fromkeys(["constant"], 0.0) | {"asymmetric_std": 1 / 9, "symmetric_init": (12 + 48 + 1) / 48 / 9}


@pytest.mark.parametrize("name", SCORES)
def test_logits_of_other_tokens_begin_with_variance_one(name):
    """But for the two scores about the initial scale: 1/sqrt(3) on both sides, and the wider spectrum of U^T U."""
    assert spread(name, heads=4, k=12, runs=150) == pytest.approx(EXPECTED.get(name, 1.0), rel=0.04)


@pytest.mark.parametrize("name", SCORES)
def test_parameters_are_as_many_as_said(name):
    for bias in (False, True):
        params = initial(name, bias)
        assert shapes.total(params) == H * (COUNTS[name] + (BIASES.get(name, 0) if bias else 0))
        shapes.check(params)
        for path, leaf in params.items():
            assert path[0] != "b" or not leaf.any()


def unit(x) -> np.ndarray:
    return np.asarray(x) / np.linalg.norm(x)


def test_parameters_of_one_name_begin_alike():
    """The same draws, and where scores ask for another variance those times a number."""
    begun = {name: initial(name, bias=True) for name in SCORES}
    common = {leaf: [name for name in SCORES if leaf in begun[name]] for leaf in ("U_HKD", "Uq_HKD", "Uk_HKD", "P_HKK")}
    assert [len(names) for names in common.values()] == [7, 3, 4, 2]
    for leaf, names in common.items():
        for one, other in itertools.combinations(names, 2):
            if leaf != "Uk_HKD" or "symmetric_init" not in (one, other):
                np.testing.assert_allclose(unit(begun[one][leaf]), unit(begun[other][leaf]), atol=1e-6)
    np.testing.assert_array_equal(begun["tied"]["U_HKD"], begun["tied_noself"]["U_HKD"])
    np.testing.assert_array_equal(begun["identity_query"]["Uk_HKD"], begun["asymmetric"]["Uk_HKD"])
    np.testing.assert_allclose(begun["symmetric_init"]["Uq_HKD"], 3**-0.5 * begun["asymmetric"]["Uq_HKD"], rtol=1e-6)
    np.testing.assert_array_equal(begun["symmetric_init"]["Uk_HKD"], begun["symmetric_init"]["Uq_HKD"])
    np.testing.assert_array_equal(begun["asymmetric_std"]["Uq_HKD"], begun["symmetric_init"]["Uq_HKD"])
    np.testing.assert_array_equal(begun["tied_signed"]["sigma_HK"], [[1, 1, 1, -1, -1]] * H)


def test_the_rest_of_a_block_begins_alike():
    def begun(name: str) -> dict:
        parts, sizes = cases.parts(score=SCORES[name], H=H), dict(D=D, H=H, K=K, F=7, M=2, N=N)
        return block.init(jax.random.key(3), parts=parts, bias=True, cross=True, **sizes)

    expected = begun("asymmetric")
    for name in ARMS:
        found = begun(name)
        for part in found.keys() - {"score", "score_cross"}:
            jax.tree.map(np.testing.assert_array_equal, found[part], expected[part])


def test_what_weight_decay_calls_a_matrix():
    decayed = {leaf: here for name in SCORES for leaf, here in optim.matrices(initial(name, bias=True)).items()}
    assert {leaf for leaf, here in decayed.items() if here} == {"U_HKD", "U_HQD", "Uq_HKD", "Uk_HKD", "P_HKK"}
    assert {leaf for leaf, here in decayed.items() if not here} == {"b_HK", "b_HQ", "bq_HK", "bk_HK", "sigma_HK"}


@pytest.mark.parametrize("name", SCORES)
def test_the_initial_scale_is_a_factor_on_the_matrices_of_queries_and_keys(name):
    params = drawn(name)
    for leaf, found in initials.scaled(params, 0.25, "U").items():
        np.testing.assert_array_equal(found, params[leaf] * (0.25 if leaf.startswith("U") else 1))


def test_a_block_begins_with_the_scale_of_its_design():
    sizes = dict(D=D, H=H, K=K, F=7, M=2, N=N, bias=True, cross=True)
    plain, scaled = (
        block.init(jax.random.key(3), parts=cases.parts(H=H, score=score.pairwise, score_std=std), **sizes)
        for std in (1.0, 0.5)
    )
    for part in ("score", "score_cross"):
        np.testing.assert_array_equal(scaled[part].pop("U_HKD"), plain[part].pop("U_HKD") / 2)
    jax.tree.map(np.testing.assert_array_equal, scaled, plain)


def test_queries_that_are_tokens_need_as_many_features():
    with pytest.raises(ValueError, match="need D = H K, and 16 is not 3 x 5"):
        score.identity_query.init(jax.random.key(0), H=3, K=5, D=16, bias=True)
