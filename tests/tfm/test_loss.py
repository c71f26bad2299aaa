"""Losses (sum, count): against the slow reference, and in chunks of tokens against all logits at once."""

import functools
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import B, D, N, W
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh as meshes
from tfm import layout as layouts, linear, loss

ROWS = 8  # the fewest tokens of a chunk: 14 tokens are two chunks, of which the second is not full


class Targets(NamedTuple):
    target_BN: jax.Array
    weight_BN: jax.Array
    sparse: bool = False


def make_targets(sparse=False, weight_BN=None) -> Targets:
    """Return targets with weights 0, 1/2 and 1. A target of weight 0 is not a valid token id."""
    random_BN = np.random.default_rng(2).integers(0, 3, (B, N)) / 2.0
    weight_BN = jnp.asarray(random_BN) if weight_BN is None else weight_BN
    return Targets(jnp.where(weight_BN > 0, cases.draw_token_ids(1), W + 5), weight_BN, sparse)


@cases.float64()
def test_cross_entropy_equals_the_reference():
    """The loss is in nats. Targets and logits of tokens with weight 0 do not count."""
    logits, targets = np.array(cases.normal(0, B, N, W, std=3.0)), make_targets()
    target_BN, weight_BN = np.array(cases.draw_token_ids(1)), np.array(targets.weight_BN)
    assert (weight_BN == 0).any() and (weight_BN == 0.5).any()
    slow = 0.0
    for b in range(B):
        slow += reference.cross_entropy([reference.softmax(row) for row in logits[b]], target_BN[b], weight_BN[b])
    cross_entropy, dirty = jax.jit(loss.cross_entropy), np.where(weight_BN[..., None] == 0, np.nan, logits)
    for arguments in ((logits, target_BN), (dirty, targets.target_BN)):
        cases.assert_trees_close(cross_entropy(*arguments, weight_BN), (slow, weight_BN.sum()))
    assert cross_entropy(logits, target_BN, 0 * weight_BN) == (0, 0)


def test_cross_entropy_of_large_and_of_bfloat16_logits_is_float32():
    """Equal logits give the logarithm of their number, also if they are large."""
    cross_entropy = jax.jit(loss.cross_entropy)
    total, count = cross_entropy(np.full((3, 5), 1000.0), np.arange(3), np.ones(3))
    assert float(total / count) == pytest.approx(np.log(5), abs=1e-4)
    logits, target_BN, weight_BN = (
        cases.normal(0, B, N, W).astype(jnp.bfloat16),
        cases.draw_token_ids(1),
        jnp.ones((B, N)),
    )
    total, _ = cross_entropy(logits, target_BN, weight_BN)
    assert total.dtype == jnp.float32
    cases.assert_close(total, cross_entropy(logits.astype(jnp.float32), target_BN, weight_BN)[0], 1e-6)


def test_accuracy_by_hand():
    logits = jnp.array([[1.0, 2.0, 0.0], [5.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert loss.accuracy(logits, jnp.array([1, 0, 0, 0]), jnp.array([1.0, 1.0, 1.0, 0.0])) == (2, 3)
    assert loss.accuracy(logits, jnp.array([0, 2, 2, 0]), jnp.array([1.0, 1.0, 0.0, 0.0])) == (0, 2)


# Chunks of tokens


@pytest.fixture
def chunks(monkeypatch):
    monkeypatch.setattr(loss, "MIN_CHUNKED", B * N * W)
    monkeypatch.setattr(loss, "CHUNK", ROWS * W)


def in_chunks(head, x_BND, targets, **options):
    return loss.next_token(x_BND, head, *targets[:2], sparse=targets.sparse, **options)


def at_once(params, x_BND, targets, cap=0.0):
    logits_BNW = linear.logits(x_BND, params["G_WD"], params.get("b_W"))
    logits_BNW = cap * jnp.tanh(logits_BNW / cap) if cap else logits_BNW
    arguments = logits_BNW, targets.target_BN, targets.weight_BN
    return {"loss": loss.cross_entropy(*arguments), "accuracy": loss.accuracy(*arguments)}


def draw(*, bias=True, std=1.0):
    params = {"G_WD": cases.normal(3, W, D, std=std)} | ({"b_W": cases.normal(4, W)} if bias else {})
    return params, cases.normal(0, B, N, D)


def gradient(measure, params, x_BND, targets):
    """Return the gradients of 1.5 times the loss with respect to the head and the tokens, and the metrics."""

    def total(arrays, target_BN, weight_BN):
        metrics = measure(*arrays, Targets(target_BN, weight_BN, targets.sparse))
        return 1.5 * metrics["loss"][0] + metrics["accuracy"][0], metrics

    return jax.jit(jax.grad(total, has_aux=True))((params, x_BND), targets.target_BN, targets.weight_BN)


@cases.float64()
def test_loss_and_gradient_in_chunks_equal_the_reference_and_all_logits_at_once(chunks):
    """The tokens of weight 0 do not count, and their gradient is zero. Most logits are near the cap."""
    all_ways = [("tpu", False), ("cpu", True)]
    for bias, cap, ways in ((True, 1.7, all_ways), (True, 0.0, all_ways), (False, 0.0, [("tpu", True)])):
        (params, x_BND), targets = draw(bias=bias), make_targets()
        expected = gradient(functools.partial(at_once, cap=cap), params, x_BND, targets)
        has_weight_BN = np.asarray(targets.weight_BN) > 0
        dirty_BND = np.where(has_weight_BN[..., None], x_BND, 1e3)
        for platform, sparse in ways:
            measure = functools.partial(in_chunks, cap=cap, layout=layouts.Layout(platform=platform))
            gradients, metrics = gradient(measure, params, dirty_BND, targets._replace(sparse=sparse))
            cases.assert_trees_close((gradients, metrics), expected)
            np.testing.assert_array_equal(np.asarray(gradients[1]).any(-1), has_weight_BN)
    slow = 0.0
    for x_ND, target_N, weight_N in zip(*jax.device_get((x_BND, *targets[:2])), strict=True):
        p = [reference.softmax(row) for row in x_ND @ np.asarray(params["G_WD"]).T]
        slow += reference.cross_entropy(p, np.where(weight_N > 0, target_N, 0), weight_N)
    cases.assert_close(metrics["loss"][0], slow)


def test_tpus_that_share_the_vocabulary_have_the_loss_and_gradient_of_one_device(chunks, monkeypatch):
    monkeypatch.setattr(loss, "MIN_CHUNKED", 1)
    layout, (params, x_BND), targets = layouts.Layout(vocab="tensor", platform="tpu"), draw(), make_targets()
    params = {name: leaf[:22] for name, leaf in params.items()}
    targets = targets._replace(target_BN=targets.target_BN % 22)
    gradient_on_device = functools.partial(gradient, functools.partial(in_chunks, layout=layout), targets=targets)
    specs = P("tensor"), P()
    sharded = meshes.sharded(gradient_on_device, meshes.make(data=1, tensor=2), in_specs=specs, out_specs=(specs, P()))
    cases.assert_trees_close(jax.jit(sharded)(params, x_BND), gradient(at_once, params, x_BND, targets), 1e-5)


def test_the_first_of_equal_logits_is_the_prediction_in_chunks_too(chunks):
    b_W = np.float32(2 * np.isin(np.arange(W), (5, 7)) + (np.arange(W) == 11))
    head, x_BND = {"G_WD": jnp.zeros((W, D)), "b_W": b_W}, jnp.ones((B, N, D))
    accuracy = jax.jit(lambda target_BN: in_chunks(head, x_BND, Targets(target_BN, jnp.ones((B, N))))["accuracy"])
    for target, correct in ((5, 14), (7, 0), (11, 0)):
        assert accuracy(np.full((B, N), target)) == (correct, 14)


def test_without_targets_the_loss_its_count_and_its_gradient_are_zero(chunks):
    for sparse in (False, True):
        gradients, metrics = gradient(in_chunks, *draw(), make_targets(sparse, jnp.zeros((B, N))))
        assert metrics == {"loss": (0, 0), "accuracy": (0, 0)}
        assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_large_logits_and_bfloat16_parameters_have_float32_sums(chunks):
    """Sums are float32 whatever the products are; gradients have the types of the parameters and tokens."""
    large = {"G_WD": jnp.full((W, D), 1000.0 / D)}, jnp.ones((B, N, D))
    total, count = jax.jit(lambda: in_chunks(*large, make_targets(weight_BN=jnp.ones((B, N))))["loss"])()
    assert float(total / count) == pytest.approx(np.log(W), abs=1e-3)
    params, x_BND = draw(std=0.2)
    narrow = {"G_WD": params["G_WD"].astype(jnp.bfloat16), "b_W": params["b_W"]}, x_BND.astype(jnp.bfloat16)
    for sparse in (False, True):
        result, expected = (gradient(measure, *narrow, make_targets(sparse)) for measure in (in_chunks, at_once))
        assert [a.dtype for a in jax.tree.leaves(result)] == [a.dtype for a in jax.tree.leaves(expected)]
        # The product that sums the exponentials is bfloat16 in both.
        cases.assert_trees_close(result[1], expected[1], 1e-4)
        cases.assert_trees_close(
            *(jax.tree.map(np.float32, gradients_and_metrics[0]) for gradients_and_metrics in (result, expected)), 1e-2
        )


def test_vmapped_seeds_in_chunks_equal_all_logits_at_once(chunks):
    """The seeds need loops of different lengths: the first has no targets, and all tokens of the last are targets."""
    weight_RBN = jnp.stack([jnp.zeros((B, N)), make_targets().weight_BN, jnp.ones((B, N))])
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), draw()[0])

    def of_seed(measure, params, x_BND, weight_BN):
        return gradient(measure, params, x_BND, make_targets(True, weight_BN))

    functions = (jax.vmap(functools.partial(of_seed, measure)) for measure in (in_chunks, at_once))
    cases.assert_trees_close(*(seeds(params, cases.normal(5, 3, B, N, D), weight_RBN) for seeds in functions), 1e-5)


def test_no_product_is_computed_twice_and_none_for_an_unneeded_gradient(monkeypatch):
    monkeypatch.setattr(loss, "MIN_CHUNKED", 1)
    monkeypatch.setattr(loss, "CHUNK", 40 * W)
    arrays = draw()[0], cases.normal(0, 11, N, D), Targets(jnp.zeros((11, N), int), jnp.ones((11, N)))
    for function, products in ((in_chunks, 1), (functools.partial(gradient, in_chunks), 3)):
        program = jax.make_jaxpr(lambda *arrays, function=function: function(*arrays[:-1], Targets(*arrays[-1][:2])))(
            *arrays
        )
        text = str(program)
        assert text.count("dot_general") == products and f"[40,{W}]" in text and f"[80,{W}]" not in text


def test_a_small_number_of_logits_is_computed_at_once(monkeypatch):
    """The program is then the same as cross_entropy's, so that small runs have the same bits."""
    monkeypatch.setattr(loss, "MIN_CHUNKED", B * N * W + 1)
    programs = [functools.partial(gradient, measure, targets=make_targets()) for measure in (in_chunks, at_once)]
    assert len({str(jax.make_jaxpr(program)(*draw())) for program in programs}) == 1
