"""Heads: self-attention and cross-attention (E8-E11, E26) against the slow reference, of every score, with a KV cache,
for tokens that are kept from themselves, and on devices that share heads, features and tokens."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_positions
import reference_scores
import tiny
import translate
from cases import B, N, S
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from test_arms import ARMS, SCORES, D, H, K, drawn
from test_explicit import MASKS as MASKS_BNS
from test_explicit import paper_allowed as allowed_between

from experiments import model as models
from experiments.engine import errors
from experiments.engine import mesh as meshes
from tfm import attention, block, kernels, shapes
from tfm import layout as layouts
from tfm.attention import explicit, flash, heads, mask, relative_position, score, value

VALID_BS = np.arange(N) < np.array([[N], [1]])  # the second sequence is one word and paddings
MASKS = {
    "none": None,
    "causal": mask.causal,
    "window of one": mask.window(1),
    "padding": mask.padding(VALID_BS),
    "causal padding": mask.both(mask.causal, mask.padding(VALID_BS)),
}
WAYS = attention.IMPLEMENTATIONS | {"flash": functools.partial(flash.attention, queries=4, keys=3)}
arms = pytest.mark.parametrize("name", ARMS)


def paper_allowed(name: str, b: int) -> np.ndarray:
    """The paper's mask [n', n] of sequence b, from the definition of the name."""
    n, other = np.arange(N)[None, :], np.arange(N)[:, None]
    allowed = np.ones((N, N), bool) if "causal" not in name else other <= n
    allowed &= (other == n) | (name != "window of one")
    return allowed & (VALID_BS[b][:, None] | ("padding" not in name))


def parameters(name: str, sizes: dict | None = None) -> dict:
    sizes = sizes or dict(H=H, K=K, D=D)
    values = cases.drawn(lambda key: value.low_rank.init(key, **sizes, M=1, bias=True), seed=1)
    return {"score": drawn(name, sizes=sizes), "value": values, "relative_position": {}}


def parts_of(name: str, **changes) -> heads.Parts:
    return cases.parts(**dict(score=SCORES[name], H=H, itself=SCORES[name].itself) | changes).attention


# --------------------------------------------------------------------------------------------- against the reference


def across(name: str, bias: bool) -> tuple[dict, jax.Array, jax.Array]:
    """Parameters of the sizes in cases.py, and tokens of two sequences."""
    sizes = dict(H=cases.H, K=cases.K, D=cases.D)
    values = cases.drawn(lambda key: value.low_rank.init(key, **sizes, M=1, bias=bias), seed=1)
    params = {"score": cases.score_params(name, bias), "value": values}
    return params, cases.normal(1, B, N, cases.D), cases.normal(2, B, S, cases.D)


def attend(params: dict, x_BND, x_BSD, *, name: str, the_mask, scale: str = "1/sqrt(K)") -> tuple:
    own = cases.parts(score=cases.SCORES[name], scale=score.SCALES[scale]).attention
    return heads.cross_attention(params, x_BND, parts=own, memory=block.Memory(x_BSD, the_mask))[:2]


@pytest.mark.parametrize(("name", "bias"), [*itertools.product(cases.SCORES, [True, False])])
@cases.float64()
def test_multi_head_attention_equals_the_reference(name, bias):
    params, x_BND, x_BSD = across(name, bias)
    chosen = [(where, "1/sqrt(K)") for where in MASKS_BNS] + [("causal", "1/sqrt(D)"), ("causal", "1")]

    @jax.jit
    def every(*arrays):
        return [attend(*arrays, name=name, the_mask=MASKS_BNS[where], scale=scale) for where, scale in chosen]

    for (where, scale), (y_BND, A_BHNS) in zip(chosen, every(params, x_BND, x_BSD), strict=True):
        for b in range(B):
            X_query, X_key = translate.columns(x_BND[b]), translate.columns(x_BSD[b])
            Y, A = translate.attend(name, params, X_key, X_query, scale=scale, allowed=allowed_between(where, b))
            cases.close(y_BND[b], Y.T)
            for h in range(A_BHNS.shape[1]):
                cases.close(A_BHNS[b, h], A[h].T)


@cases.float64()
def test_multi_head_attention_in_the_rows_of_seeds_002_and_004():
    params, x_BND, _ = across("asymmetric", False)
    x_BND = x_BND[:1]
    places = (("score", "Uq_HKD"), ("score", "Uk_HKD"), ("value", "Uv_HKD"), ("value", "Uo_HDK"))
    Uq_HKD, Uk_HKD, Uv_HKD, Uo_HDK = (np.asarray(params[part][key]) for part, key in places)
    y_BND, _ = attend(params, x_BND, x_BND, name="asymmetric", the_mask=None)
    Q, K_, V = ([U.T for U in U_HKD] for U_HKD in (Uq_HKD, Uk_HKD, Uv_HKD))
    O = np.concatenate(list(Uo_HDK), axis=1)
    cases.close(y_BND[0], reference.row_multi_head(np.asarray(x_BND[0]), Q, K_, V, O))
    qk = score.asymmetric.apply(params["score"], x_BND, x_BND)
    y_BHNK, _ = explicit.attention(*qk, value.low_rank.apply(params["value"], x_BND), mask=None, scale=1.0)
    for h in range(cases.H):
        cases.close(y_BHNK[0, h], reference.row_attention(np.asarray(x_BND[0]), Q[h], K_[h], V[h]))


def test_float32_is_close_to_float64_and_bfloat16_has_float32_weights():
    arguments = across("asymmetric", True)
    run = jax.jit(functools.partial(attend, name="asymmetric", the_mask=mask.causal))
    narrow, _ = run(*arguments)
    narrower, A_BHNS = run(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arguments))
    with cases.float64():
        wide, _ = run(*cases.wide(arguments))
    assert narrow.dtype == np.float32 and wide.dtype == np.float64
    assert narrower.dtype == jnp.bfloat16 and A_BHNS.dtype == jnp.float32
    cases.close(narrow, wide, 1e-5)


# ------------------------------------------------------------------------------------------- not to themselves: weights


@pytest.mark.parametrize("variant", ["none", "alibi"])
@pytest.mark.parametrize("name", ["tied_noself", "asymmetric"])
@cases.float64()
def test_weights_are_those_of_the_other_tokens(name, variant):
    """`asymmetric` as with model.diagonal = exclude. Diagonals are 0 and 1 to the last bit."""
    params, x_BND = parameters(name), cases.normal(1, B, N, D)
    made = parts_of(name, itself=False, relative_position=getattr(relative_position, variant))
    every = jax.jit(lambda: [heads.self_attention(params, x_BND, parts=made, mask=m)[1] for m in MASKS.values()])
    for where, A_BHNN in zip(MASKS, every(), strict=True):
        for b, h in [(0, 0), (1, 2)]:
            allowed = reference_scores.without_itself(paper_allowed(where, b))
            X = np.asarray(x_BND[b]).T
            L = reference.scaled(reference_scores.logits(name, params["score"], X, X, h), "1/sqrt(K)", K=K, D=D)
            if variant == "alibi":
                slope = reference_positions.alibi_slopes(H)[h]
                L = L + reference_positions.biases(lambda offset, slope=slope: -slope * abs(offset), range(N), range(N))
            cases.close(A_BHNN[b, h], reference.attention_matrix(L, allowed).T, 1e-7)  # slopes are float32
            np.testing.assert_array_equal(A_BHNN[b, h].diagonal(), allowed.diagonal())


def test_the_bias_says_where_query_and_key_are_one_token():
    alone = relative_position.apart(None)(jnp.array([2, 0]), jnp.arange(4))
    np.testing.assert_array_equal(alone, relative_position.ALONE * np.array([[[0, 0, 1, 0], [1, 0, 0, 0]]]))
    of_each = relative_position.apart(None)(jnp.array([[3], [1]]), jnp.arange(4))
    np.testing.assert_array_equal(of_each, relative_position.ALONE * np.array([[[[0, 0, 0, 1]]], [[[0, 1, 0, 0]]]]))


def test_in_bfloat16_too():
    params, x_BND = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (parameters("pairwise"), cases.normal(1, B, N, D)))
    _, A_BHNN, _ = heads.self_attention(params, x_BND, parts=parts_of("pairwise", itself=False), mask=mask.causal)
    assert A_BHNN.dtype == jnp.float32
    np.testing.assert_array_equal(A_BHNN.diagonal(axis1=2, axis2=3), np.broadcast_to(np.arange(N) == 0, (B, H, N)))
    np.testing.assert_allclose(A_BHNN.sum(-1), 1, rtol=1e-6)


# -------------------------------------------------------------------------------- all ways to compute them are the same


@functools.partial(jax.jit, static_argnames="itself")
def averages_and_gradients(qkv: list, allowed_BNN: jax.Array, *, itself: bool) -> dict:
    """Of queries, keys and values in each way: all scores and masks share a compiled program."""

    def loss(qkv: list, compute) -> tuple:
        bias = None if itself else relative_position.apart(None)
        allowed = Partial(lambda allowed_BNN, n, s_S: allowed_BNN[:, n][:, :, s_S], allowed_BNN)
        y_BHNV, _ = compute(*qkv, mask=allowed, scale=0.4, bias=bias)
        return jnp.sin(y_BHNV + jnp.arange(K)).sum(), y_BHNV

    return {way: jax.grad(loss, has_aux=True)(qkv, compute) for way, compute in WAYS.items()}


def agreed(name: str, where: str, *, itself: bool) -> tuple:
    """The explicit way's gradients and averages, after a look at the others; fused has its softmax in float32.

    Features of zeros, so that all scores have as many, change no product.
    """
    params, x_BND = parameters(name), cases.normal(1, B, N, D)
    sides = SCORES[name].apply(params["score"], x_BND, x_BND)
    qk = [jnp.pad(x, [(0, 0)] * 3 + [(0, 2 * K - x.shape[-1])]) for x in sides]
    allowed_BNN = jnp.broadcast_to(mask.dense(MASKS[where], N=N, S=N), (B, N, N))
    values = value.low_rank.apply(params["value"], x_BND)
    found = averages_and_gradients([*qk, values], allowed_BNN, itself=itself)
    for way, tolerance in (("flash", 1e-10), ("fused", 1e-5)):
        jax.tree.map(functools.partial(cases.close, tolerance=tolerance), found[way], found["explicit"])
    return found["explicit"]


@arms
@cases.float64()
def test_every_way_of_computing_attention_takes_every_score(name):
    (*of_sides, _), _ = agreed(name, "causal", itself=SCORES[name].itself)
    x_BND = cases.normal(1, B, N, D)
    sides, pull = jax.vjp(lambda params: SCORES[name].apply(params, x_BND, x_BND), parameters(name)["score"])
    (gradient,) = pull(tuple(of[..., : side.shape[-1]] for of, side in zip(of_sides, sides, strict=True)))
    assert all(leaf.any() for leaf in gradient.values())


@pytest.mark.parametrize("where", ["window of one", "causal padding"])
@cases.float64()
def test_tokens_without_others_have_finite_gradients_in_every_way(where):
    """Alone, a token's weight is one whatever the logit is: nothing is to be learned from it."""
    (dq_BHNK, dk_BHNK, dv_BHNK), y_BHNV = agreed("asymmetric", where, itself=False)
    assert all(jnp.isfinite(x).all() for x in (dq_BHNK, dk_BHNK, dv_BHNK, y_BHNV))
    assert dv_BHNK[0, :, :-1].all() and np.abs(dq_BHNK[1]).max() < 1e-15  # the second sequence has one word
    assert (np.abs(dq_BHNK[0]).max() > 0.01) == (where == "causal padding")


# ------------------------------------------------------------------------------------------ one after the other, across


@arms
@cases.float64()
def test_one_token_after_the_other_equals_the_whole_sequence(name):
    """Keys and values kept, of prompts of 2 and 4 tokens: a later token's query finds its own key at its place."""
    params, x_BND, made = parameters(name), cases.normal(1, B, N, D), parts_of(name)
    run = jax.jit(functools.partial(heads.self_attention, params, parts=made, mask=mask.causal))
    y_BND, _, whole = run(x_BND)
    cache = jax.tree.map(lambda x: jnp.pad(x[:, :, :4], [(0, 0), (0, 0), (0, N - 2), (0, 0)]), whole)
    for n in range(2, N - 2):
        n_B1 = jnp.array([[n], [n + 2]])
        x_B1D = jnp.take_along_axis(x_BND, n_B1[..., None], 1)
        y_B1D, A_BHNS, cache = run(x_B1D, n=n_B1, cache=cache)
        cases.close(y_B1D, jnp.take_along_axis(y_BND, n_B1[..., None], 1))
        for b in range(B):
            assert (A_BHNS[b, :, 0, n_B1[b, 0]] == 0).all() != made.itself


@arms
@cases.float64()
def test_tokens_of_another_sequence_are_all_attended_to(name):
    """Queries of one sequence, keys of another (E26): token 3 of either is not the same."""
    params, x_BND, x_BSD = parameters(name), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    run = jax.jit(functools.partial(heads.cross_attention, params, parts=parts_of(name)))
    y_BND, A_BHNS, kept = run(x_BND, memory=block.Memory(x_BSD, None))
    for b, h in [(0, 1), (1, 2)]:
        L = reference_scores.logits(name, params["score"], np.asarray(x_BSD[b]).T, np.asarray(x_BND[b]).T, h)
        features = {"tied_wide": 2 * K, "l2_tied": K + 4}.get(name, K)
        A = reference.attention_matrix(reference.scaled(L, "1/sqrt(K)", K=features, D=D))
        cases.close(A_BHNS[b, h], A.T)
    again, *_ = run(x_BND[:, 3:4], memory=block.Memory(None, None), cache=kept)
    cases.close(again, y_BND[:, 3:4])


def test_a_word_is_written_at_its_own_place_and_not_beyond_the_end():
    rng = np.random.default_rng(0)
    cache_BHSK, new_BHNK = rng.standard_normal((3, 2, 5, 7)), rng.standard_normal((3, 2, 1, 7))
    expected = cache_BHSK.copy()
    expected[0, :, 4], expected[2, :, 1] = new_BHNK[0, :, 0], new_BHNK[2, :, 0]
    write = jax.jit(kernels.write)
    found = write(jnp.asarray(cache_BHSK), jnp.asarray(new_BHNK), jnp.array([[4], [5], [1]]))
    np.testing.assert_array_equal(found, expected.astype(found.dtype))
    beyond = write(jnp.asarray(cache_BHSK), jnp.asarray(new_BHNK), jnp.full((3, 1), 5))
    np.testing.assert_array_equal(beyond, cache_BHSK.astype(beyond.dtype))


# --------------------------------------------------------------------------------------------------------- on devices

SHARED = ("tied_noself", "tied_keynorm", "tied_wide", "tied_signed", "l2_tied", "pairwise")


def summed(params: dict, x_BND: jax.Array, over: layouts.Layout = layouts.ONE) -> jax.Array:
    """A number for each score that every output moves."""

    def of(name: str) -> jax.Array:
        own = layouts.gathered(params[name], over)
        n = layouts.positions(over, x_BND.shape[1])
        y_BND, *_ = heads.self_attention(own, x_BND, parts=parts_of(name, H=4), mask=mask.causal, n=n, layout=over)
        return jnp.sin(y_BND + jnp.arange(y_BND.shape[-1])).sum()

    return jnp.stack([of(name) for name in SHARED])


@cases.float64()
def test_devices_that_share_features_heads_and_tokens_compute_what_one_does():
    """Eight: two for the sequences and the features of the weights, two for the heads, two for the tokens."""
    mesh, sizes = meshes.make(fsdp=2, tensor=2, sequence=2), dict(H=4, K=3, D=12)
    params = {name: parameters(name, sizes=sizes) for name in SHARED}
    x_BND, dealt = cases.normal(1, 2, 8, 12), [0, 2, 4, 6, 1, 3, 5, 7]
    over = meshes.layout(mesh)
    specs = shapes.specs(params, over.rules)
    assert specs["tied_signed"]["score"]["U_HKD"] == P("tensor", None, "fsdp")
    assert specs["tied_signed"]["score"]["sigma_HK"] == specs["pairwise"]["score"]["P_HKK"] == P("tensor")

    def gradients(params: dict, x_BND: jax.Array, *layout: layouts.Layout) -> tuple:
        def total(params: dict) -> tuple:
            whole = jax.lax.psum(summed(params, x_BND, *layout), over.tokens if layout else ())
            return whole.sum(), whole

        return jax.grad(total, has_aux=True)(params)

    def share(params: dict, x_BND: jax.Array) -> tuple:
        return gradients(params, x_BND, over)

    spread = meshes.sharded(share, mesh, in_specs=(specs, P("fsdp", "sequence")), out_specs=(specs, P()))
    found = jax.jit(spread)(params, x_BND[:, jnp.array(dealt)])
    jax.tree.map(cases.close, found, jax.jit(gradients)(params, x_BND))


# ------------------------------------------------------------------------------------------------------ from a config


def test_the_config_and_the_score_say_who_attends_to_itself():
    def itself(**changes) -> bool:
        return models.block_parts(tiny.settings("vision", **changes).model).attention.itself

    assert itself() and itself(model__score="tied")
    assert not itself(model__diagonal="exclude") and not itself(model__score="tied_noself")
    assert not itself(model__score="tied_keynorm", model__diagonal="keep")
    with pytest.raises(errors.UserError, match='unknown diagonal "none"; the right ones are: keep, exclude'):
        itself(model__diagonal="none")


def test_the_config_and_each_of_several_runs_say_how_wide_it_begins():
    def U_HKD(std: float, **numbers: float) -> jax.Array:
        m = tiny.settings("vision", model__score_std=std).model
        model = models.vision(m, answer="pooled", Y=4, X=4, Z=1, patch=2, C=3)
        return model.init(jax.random.key(0), **numbers)["blocks"]["score"]["Uq_HKD"]

    np.testing.assert_array_equal(U_HKD(0.5), U_HKD(1.0) / 2)
    np.testing.assert_array_equal(U_HKD(0.5, score_std=2.0), 2 * U_HKD(1.0))
    with pytest.raises(errors.UserError, match="model.score_std must be at least 0"):
        models.block_parts(tiny.settings("vision", model__score_std=-1.0).model)


@pytest.mark.parametrize("std", [0.0, 0.5])
def test_the_outputs_of_a_block_begin_at_their_share(std):
    def made(**changes: float) -> dict:
        settings = tiny.settings("vision", **changes)
        return models.vision(settings.model, answer="pooled", Y=4, X=4, Z=1, patch=2, C=3).init(jax.random.key(0))

    usual, scaled = made(), made(model__output_std=std)
    outputs = {("value", "Uo_HDK"), ("mlp", "W2_DF")}
    for path, leaf in jax.tree_util.tree_leaves_with_path(usual):
        names = tuple(shapes.names(path))
        found = functools.reduce(lambda tree, name: tree[name], names, scaled)
        assert np.any(np.asarray(leaf)) or names[-2:] not in outputs
        np.testing.assert_array_equal(found, std * leaf if names[-2:] in outputs else leaf)
    with pytest.raises(errors.UserError, match="model.output_std must be at least 0"):
        models.block_parts(tiny.settings("vision", model__output_std=-1.0).model)
