"""Tokens that are kept from themselves; every score in each way of computing attention, with a cache, and across."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_positions
import reference_scores
import tiny
from cases import B, N, S
from jax.sharding import PartitionSpec as P
from test_arms import ARMS, SCORES, D, H, K, drawn

from experiments import model as models
from experiments.engine import errors
from experiments.engine import mesh as meshes
from tfm import attention, block, position, shapes
from tfm import layout as layouts
from tfm.attention import flash, heads, mask, relative_position, score, value
from tfm.decode import kv_cache

VALID_BS = np.arange(N) < np.array([[N], [1]])  # the second sequence is one word and paddings
MASKS = {
    "none": None,
    "causal": mask.causal,
    "window of one": mask.window(1),
    "padding": mask.padding(jnp.asarray(VALID_BS)),
    "causal padding": mask.both(mask.causal, mask.padding(jnp.asarray(VALID_BS))),
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


def design(name: str, **parts) -> heads.Parts:
    return cases.parts(**dict(score=SCORES[name], H=H, itself=SCORES[name].itself) | parts).attention


# ------------------------------------------------------------------------------------------- not to themselves: weights


@pytest.mark.parametrize("variant", ["none", "alibi"])
@pytest.mark.parametrize("name", ["tied_noself", "asymmetric"])
@cases.float64()
def test_weights_are_those_of_the_other_tokens(name, variant):
    """`asymmetric` as with model.diagonal = exclude. Diagonals are 0 and 1 to the last bit."""
    params, x_BND = parameters(name), cases.normal(1, B, N, D)
    made = design(name, itself=False, relative_position=getattr(relative_position, variant))
    for where, the_mask in MASKS.items():
        _, A_BHNN, _ = heads.self_attention(params, x_BND, parts=made, mask=the_mask)
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
    _, A_BHNN, _ = heads.self_attention(params, x_BND, parts=design("pairwise", itself=False), mask=mask.causal)
    assert A_BHNN.dtype == jnp.float32
    np.testing.assert_array_equal(A_BHNN.diagonal(axis1=2, axis2=3), np.broadcast_to(np.arange(N) == 0, (B, H, N)))
    np.testing.assert_allclose(A_BHNN.sum(-1), 1, rtol=1e-6)


# -------------------------------------------------------------------------------- all ways to compute them are the same


@functools.partial(jax.jit, static_argnames="itself")
def averages_and_gradients(qkv: list, allowed_BNN: jax.Array, *, itself: bool) -> dict:
    """Of queries, keys and values in each way: all scores and masks share a compiled program."""

    def loss(qkv: list, compute) -> tuple:
        bias = None if itself else relative_position.apart(None)
        y_BHNV, _ = compute(*qkv, mask=lambda n, s_S: allowed_BNN[:, n][:, :, s_S], scale=0.4, bias=bias)
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
    params, x_BND, made = parameters(name), cases.normal(1, B, N, D), design(name)
    y_BND, _, whole = heads.self_attention(params, x_BND, parts=made, mask=mask.causal)
    cache = jax.tree.map(lambda x: jnp.pad(x[:, :, :4], [(0, 0), (0, 0), (0, N - 2), (0, 0)]), whole)
    for n in range(2, N - 2):
        n_B1 = jnp.array([[n], [n + 2]])
        x_B1D = jnp.take_along_axis(x_BND, n_B1[..., None], 1)
        y_B1D, A_BHNS, cache = heads.self_attention(params, x_B1D, parts=made, mask=mask.causal, n=n_B1, cache=cache)
        cases.close(y_B1D, jnp.take_along_axis(y_BND, n_B1[..., None], 1))
        for b in range(B):
            assert (A_BHNS[b, :, 0, n_B1[b, 0]] == 0).all() != made.itself


@cases.float64()
def test_words_through_the_cache_equal_the_full_pass():
    parts = dict(
        score=score.tied_noself, itself=False, position=position.none, relative_position=relative_position.rotary
    )
    model = cases.model(**parts, sizes=dict(D=12, H=2, K=4, F=7, M=2, N=N))
    params, w_BN = cases.drawn(model.init), cases.words()
    step = jax.jit(functools.partial(kv_cache.step, params, mask=mask.causal, parts=model.parts))
    full_BNW = model.apply(params, w_BN, mask=mask.causal)
    start = dict(capacity=N, mask=mask.causal, parts=model.parts)
    logits_BW, cache = kv_cache.start(params, w_BN[:, :4], jnp.array([2, 4]), **start)
    for t in range(3):
        n_B = jnp.array([2, 4]) + t
        cases.close(logits_BW, full_BNW[jnp.arange(B), n_B - 1], 1e-9)
        logits_BW, cache = step(cache, w_BN[jnp.arange(B), n_B], n_B)


@arms
@cases.float64()
def test_tokens_of_another_sequence_are_all_attended_to(name):
    """Queries of one sequence, keys of another (E26): token 3 of either is not the same."""
    params, x_BND, x_BSD = parameters(name), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    y_BND, A_BHNS, kept = heads.cross_attention(params, x_BND, parts=design(name), memory=block.Memory(x_BSD, None))
    for b, h in [(0, 1), (1, 2)]:
        L = reference_scores.logits(name, params["score"], np.asarray(x_BSD[b]).T, np.asarray(x_BND[b]).T, h)
        features = {"tied_wide": 2 * K, "l2_tied": K + 4}.get(name, K)
        A = reference.attention_matrix(reference.scaled(L, "1/sqrt(K)", K=features, D=D))
        cases.close(A_BHNS[b, h], A.T)
    memory = block.Memory(None, None)
    again, *_ = heads.cross_attention(params, x_BND[:, 3:4], parts=design(name), memory=memory, cache=kept)
    cases.close(again, y_BND[:, 3:4])


# --------------------------------------------------------------------------------------------------------- on devices

SHARED = ("tied_noself", "tied_keynorm", "tied_wide", "tied_signed", "l2_tied", "pairwise")


def summed(params: dict, x_BND: jax.Array, **parts) -> jax.Array:
    """A number for each score that every output moves."""
    over = parts.get("layout", layouts.ONE)

    def of(name: str) -> jax.Array:
        own = layouts.gathered(params[name], over)
        made = design(name, H=4, **parts)
        n = layouts.positions(over, x_BND.shape[1])
        y_BND, *_ = heads.self_attention(own, x_BND, parts=made, mask=mask.causal, n=n)
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

    def gradients(params: dict, x_BND: jax.Array, **parts) -> tuple:
        def total(params: dict) -> tuple:
            whole = jax.lax.psum(summed(params, x_BND, **parts), over.tokens if parts else ())
            return whole.sum(), whole

        return jax.grad(total, has_aux=True)(params)

    share = functools.partial(gradients, layout=over, compute=WAYS["flash"])
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
    design = models.block_parts(tiny.settings("vision", model__score_std=0.5).model)
    init = models.from_numbers(lambda key, *, design: design.score_std, parts=design)
    assert (init(None), init(None, score_std=3.0)) == (0.5, 3.0)
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
