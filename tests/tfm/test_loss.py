"""Losses (sum, count): against the slow reference, and in chunks of tokens against all logits at once."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import B, D, N, W
from jax.sharding import PartitionSpec as P

from experiments.devices import mesh as meshes
from tfm import head as heads, layout as layouts, linear, loss

ROWS = 8  # the fewest tokens of a chunk: 14 tokens are two chunks, of which the second is not full


def make_targets(weight_BN=None) -> tuple:
    """Return targets and weights, which are 0, 1/2 and 1. A target of weight 0 is not a valid token id."""
    weight_BN = np.random.default_rng(2).integers(0, 3, (B, N)) / 2.0 if weight_BN is None else weight_BN
    return np.where(weight_BN > 0, cases.draw_token_ids(1), W + 5), weight_BN


@cases.float64()
def test_cross_entropy_equals_the_reference():
    """The loss is in nats. Targets and logits of tokens with weight 0 do not count."""
    logits, (dirty_BN, weight_BN) = np.array(cases.normal(0, B, N, W, std=3.0)), make_targets()
    target_BN, dirty = np.array(cases.draw_token_ids(1)), np.where(weight_BN[..., None] == 0, np.nan, logits)
    assert (weight_BN == 0).any() and (weight_BN == 0.5).any()
    slow = 0.0
    for b in range(B):
        slow += reference.cross_entropy([reference.softmax(row) for row in logits[b]], target_BN[b], weight_BN[b])
    cross_entropy = jax.jit(loss.cross_entropy)
    for arguments in ((logits, target_BN), (dirty, dirty_BN)):
        cases.assert_trees_close(cross_entropy(*arguments, weight_BN), (slow, weight_BN.sum()))
    assert jax.device_get(cross_entropy(logits, target_BN, 0 * weight_BN)) == (0, 0)


def test_cross_entropy_of_bfloat16_logits_is_float32():
    logits_BNW, cross_entropy = np.asarray(cases.normal(0, B, N, W), jnp.bfloat16), jax.jit(loss.cross_entropy)
    narrow, wide = (cross_entropy(l_BNW, *make_targets())[0] for l_BNW in (logits_BNW, np.float32(logits_BNW)))
    assert narrow.dtype == np.float32
    cases.assert_close(narrow, wide, 1e-6)


def test_accuracy_by_hand():
    logits = np.array([[1.0, 2.0, 0.0], [5.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    accuracy = jax.jit(loss.accuracy)
    assert jax.device_get(accuracy(logits, np.array([1, 0, 0, 0]), np.array([1.0, 1.0, 1.0, 0.0]))) == (2, 3)
    assert jax.device_get(accuracy(logits, np.array([0, 2, 2, 0]), np.array([1.0, 1.0, 0.0, 0.0]))) == (0, 2)
    equal_or_nan = np.array([[2.0, 1.0, 2.0], [2.0, 1.0, 2.0], [2.0, np.nan, 1.0], [np.nan, np.nan, np.nan]])
    results = jax.device_get(accuracy(equal_or_nan, np.array([0, 2, 0, 0]), np.ones(4)))
    assert results == (1, 4)  # the first of the largest counts, and a NaN is larger


# Chunks of tokens


@pytest.fixture
def chunks(monkeypatch):
    monkeypatch.setattr(loss, "MIN_CHUNKED", B * N * W)
    monkeypatch.setattr(loss, "CHUNK", ROWS * W)


def in_chunks(head, x_BND, targets, **options):
    return heads.next_word.loss(head, x_BND, *targets, **options)


in_sparse_chunks = functools.partial(in_chunks, sparse=True)


def at_once(params, x_BND, targets, cap=0.0):
    logits_BNW = linear.logits(x_BND, params["G_WD"], params.get("b_W"))
    logits_BNW = cap * jnp.tanh(logits_BNW / cap) if cap else logits_BNW
    return {"loss": loss.cross_entropy(logits_BNW, *targets), "accuracy": loss.accuracy(logits_BNW, *targets)}


def draw(*, bias=True, std=1.0):
    params = {"G_WD": cases.normal(3, W, D, std=std)} | ({"b_W": cases.normal(4, W)} if bias else {})
    return jax.device_get((params, cases.normal(0, B, N, D)))


def gradient(measure, params, x_BND, targets):
    """Return the gradients of 1.5 times the loss with respect to the head and the tokens, and the metrics."""

    def total(arrays):
        metrics = measure(*arrays, targets)
        return 1.5 * metrics["loss"][0] + metrics["accuracy"][0], metrics

    return jax.grad(total, has_aux=True)((params, x_BND))


def compute_gradients(*calls: tuple) -> list:
    """Return `gradient(*call)` of each call, which is a measure and its arrays, from one program."""
    measures = [measure for measure, *_ in calls]
    compute = jax.jit(lambda arrays: [gradient(m, *of_one) for m, of_one in zip(measures, arrays, strict=True)])
    return jax.device_get(compute([call[1:] for call in calls]))


@pytest.mark.parametrize(
    ("bias", "cap", "ways"),
    [(True, 1.7, [("tpu", False), ("cpu", True)]), (True, 0.0, [("cpu", False)]), (False, 0.0, [("tpu", True)])],
)
@cases.float64()
def test_loss_and_gradient_in_chunks_equal_the_reference_and_all_logits_at_once(chunks, bias, cap, ways):
    """The tokens of weight 0 do not count, and their gradient is zero. Most logits are near the cap."""
    (params, x_BND), targets = draw(bias=bias), make_targets()
    has_weight_BN = targets[1] > 0
    dirty_BND = np.where(has_weight_BN[..., None], x_BND, 1e3)
    options = [dict(layout=layouts.Layout(platform=platform), sparse=sparse) for platform, sparse in ways]
    measures = [functools.partial(in_chunks, cap=cap, **option) for option in options]
    calls = [(functools.partial(at_once, cap=cap), params, x_BND, targets)]
    calls += [(measure, params, dirty_BND, targets) for measure in measures]
    expected, *results = compute_gradients(*calls)
    for gradients, metrics in results:
        cases.assert_trees_close((gradients, metrics), expected)
        np.testing.assert_array_equal(gradients[1].any(-1), has_weight_BN)
    if not bias:
        slow = 0.0
        for x_ND, target_N, weight_N in zip(x_BND, *targets, strict=True):
            p = [reference.softmax(row) for row in x_ND @ params["G_WD"].T]
            slow += reference.cross_entropy(p, np.where(weight_N > 0, target_N, 0), weight_N)
        cases.assert_close(metrics["loss"][0], slow)


def test_tpus_that_share_the_vocabulary_have_the_loss_and_gradient_of_one_device(chunks, monkeypatch):
    monkeypatch.setattr(loss, "MIN_CHUNKED", 1)
    (params, x_BND), (target_BN, weight_BN) = draw(), make_targets()
    params, targets = {name: leaf[:22] for name, leaf in params.items()}, (target_BN % 22, weight_BN)
    measure = functools.partial(in_chunks, layout=layouts.Layout(vocab="tensor", platform="tpu"))
    on_device, specs = functools.partial(gradient, measure, targets=targets), (P("tensor"), P())
    sharded = meshes.sharded(on_device, meshes.make(data=1, tensor=2), in_specs=specs, out_specs=(specs, P()))
    (expected,) = compute_gradients((at_once, params, x_BND, targets))
    cases.assert_trees_close(jax.jit(sharded)(params, x_BND), expected, 1e-5)


def test_the_first_of_equal_logits_is_the_prediction_in_chunks_too(chunks):
    b_W = np.float32(2 * np.isin(np.arange(W), (5, 7)) + (np.arange(W) == 11))
    head, x_BND = {"G_WD": np.zeros((W, D)), "b_W": b_W}, np.ones((B, N, D))
    accuracy = jax.jit(lambda *arrays: in_chunks(*arrays)["accuracy"])
    for target, correct in ((5, 14), (7, 0), (11, 0)):
        assert jax.device_get(accuracy(head, x_BND, (np.full((B, N), target), np.ones((B, N))))) == (correct, 14)


def test_without_targets_the_loss_its_count_and_its_gradient_are_zero(chunks):
    calls = [(measure, *draw(), make_targets(np.zeros((B, N)))) for measure in (in_chunks, in_sparse_chunks)]
    for gradients, metrics in compute_gradients(*calls):
        assert metrics == {"loss": (0, 0), "accuracy": (0, 0)}
        assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_large_logits_and_bfloat16_parameters_have_float32_sums(chunks):
    """Sums are float32 whatever the products are; gradients have the types of the parameters and tokens."""
    params, x_BND = draw(std=0.2)
    narrow = params | {"G_WD": params["G_WD"].astype(jnp.bfloat16)}, x_BND.astype(jnp.bfloat16), make_targets()
    large = {"G_WD": np.full((W, D), 1000.0 / D)}, np.ones((B, N, D)), make_targets(np.ones((B, N)))
    calls = [(in_chunks, *large), *((measure, *narrow) for measure in (at_once, in_chunks, in_sparse_chunks))]
    (_, of_large), expected, *results = compute_gradients(*calls)
    total, count = of_large["loss"]
    assert total / count == pytest.approx(np.log(W), abs=1e-3)
    for result in results:
        assert [a.dtype for a in jax.tree.leaves(result)] == [a.dtype for a in jax.tree.leaves(expected)]
        # The product that sums the exponentials is bfloat16 in both.
        cases.assert_trees_close(result[1], expected[1], 1e-4)
        cases.assert_trees_close(*(jax.tree.map(np.float32, gradients) for gradients, _ in (result, expected)), 1e-2)


def test_vmapped_seeds_in_chunks_equal_all_logits_at_once(chunks):
    """The seeds need loops of different lengths: the first has no targets, and all tokens of the last are targets."""
    late_BN = np.arange(B * N).reshape(B, N) >= ROWS  # these targets are in the second chunk
    weights = np.zeros((B, N)), make_targets()[1] * late_BN, np.ones((B, N))
    targets = jax.tree.map(lambda *leaves: np.stack(leaves), *map(make_targets, weights))
    params = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf, -leaf]), draw()[0])
    measures = in_sparse_chunks, at_once
    compute = jax.jit(lambda *arrays: [jax.vmap(functools.partial(gradient, m))(*arrays) for m in measures])
    cases.assert_trees_close(*compute(params, cases.normal(5, 3, B, N, D), targets), 1e-5)


def test_no_product_is_computed_twice_and_none_for_an_unneeded_gradient(monkeypatch):
    monkeypatch.setattr(loss, "MIN_CHUNKED", 1)
    monkeypatch.setattr(loss, "CHUNK", 40 * W)
    arrays = draw()[0], cases.normal(0, 11, N, D), (np.zeros((11, N), int), np.ones((11, N)))
    for function, products in ((in_chunks, 1), (functools.partial(gradient, in_chunks), 3)):
        text = str(jax.make_jaxpr(function)(*arrays))
        assert text.count("dot_general") == products and f"[40,{W}]" in text and f"[80,{W}]" not in text


def test_a_small_number_of_logits_is_computed_at_once(monkeypatch):
    """The program is then the same as cross_entropy's, so that small runs have the same bits."""
    monkeypatch.setattr(loss, "MIN_CHUNKED", B * N * W + 1)
    programs = [functools.partial(gradient, measure, targets=make_targets()) for measure in (in_chunks, at_once)]
    assert len({str(jax.make_jaxpr(program)(*draw())) for program in programs}) == 1
