"""Loss and accuracy of tokens in chunks, against the slow reference and against all logits at once."""

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
from tfm import layout, linear, loss

ROWS = 8  # tokens of a chunk, the fewest there may be: 14 are two chunks, the second not full


class Targets(NamedTuple):
    target_BN: jax.Array
    weight_BN: jax.Array
    sparse: bool = False


def measure(head, x_BND, targets, **options):
    """loss.next_token of these targets."""
    return loss.next_token(x_BND, head, *targets[:2], sparse=targets.sparse, **options)


@pytest.fixture
def chunks(monkeypatch):
    monkeypatch.setattr(loss, "FROM", B * N * W)
    monkeypatch.setattr(loss, "LOGITS", ROWS * W)


def asked(few=False, weight_BN=None):
    """Six of fourteen tokens are not asked, and of the others most count half."""
    own_BN = np.random.default_rng(2).integers(0, 3, (B, N)) / 2.0
    weight_BN = jnp.asarray(own_BN) if weight_BN is None else weight_BN
    return Targets(jnp.where(weight_BN > 0, cases.words(1), W + 5), weight_BN, few)


def drawn(*, bias=True, std=1.0):
    params = {"G_WD": cases.normal(3, W, D, std=std)} | ({"b_W": cases.normal(4, W)} if bias else {})
    return params, cases.normal(0, B, N, D)


def at_once(params, x_BND, asked, cap=0.0):
    logits_BNW = linear.logits(x_BND, params["G_WD"], params.get("b_W"))
    logits_BNW = cap * jnp.tanh(logits_BNW / cap) if cap else logits_BNW
    answer = logits_BNW, asked.target_BN, asked.weight_BN
    return {"loss": loss.cross_entropy(*answer), "accuracy": loss.accuracy(*answer)}


def gradient(of, params, x_BND, asked):
    """The gradient of 1.5 times the loss with respect to the head and the tokens, and the measures."""

    def sums(given, target_BN, weight_BN):
        found = of(*given, Targets(target_BN, weight_BN, asked.sparse))
        return 1.5 * found["loss"][0] + found["accuracy"][0], found

    return jax.jit(jax.grad(sums, has_aux=True))((params, x_BND), asked.target_BN, asked.weight_BN)


@cases.float64()
def test_loss_and_gradient_in_chunks_equal_the_reference_and_those_of_all_at_once(chunks):
    """Whatever stands where nothing is asked; there the gradient is zero. On a CPU, and elsewhere; with a cap that most
    logits feel."""
    both = [("tpu", False), ("cpu", True)]
    for bias, cap, ways in ((True, 1.7, both), (True, 0.0, both), (False, 0.0, [("tpu", True)])):
        given = *drawn(bias=bias), asked()
        expected = gradient(functools.partial(at_once, cap=cap), *given)
        shown_BN = np.asarray(given[-1].weight_BN) > 0
        dirty = np.where(shown_BN[..., None], given[1], 1e3)
        for platform, few in ways:
            in_chunks = functools.partial(measure, cap=cap, layout=layout.Layout(platform=platform))
            (d_params, dx_BND), found = gradient(in_chunks, given[0], dirty, given[2]._replace(sparse=few))
            cases.agree(((d_params, dx_BND), found), expected)
            np.testing.assert_array_equal(np.asarray(dx_BND).any(-1), shown_BN)
    slow = 0.0
    for x_ND, target_N, weight_N in zip(*jax.device_get((given[1], *given[2][:2])), strict=True):
        p = [reference.softmax(row) for row in x_ND @ np.asarray(given[0]["G_WD"]).T]
        slow += reference.cross_entropy(p, np.where(weight_N > 0, target_N, 0), weight_N)
    cases.close(found["loss"][0], slow)


def test_tpus_that_share_the_words_have_the_loss_and_gradient_of_one(chunks, monkeypatch):
    monkeypatch.setattr(loss, "FROM", 1)
    over, (params, x_BND), ask = layout.Layout(vocab="tensor", platform="tpu"), drawn(), asked()
    params, ask = {name: leaf[:22] for name, leaf in params.items()}, ask._replace(target_BN=ask.target_BN % 22)
    share = functools.partial(gradient, functools.partial(measure, layout=over), asked=ask)
    specs = P("tensor"), P()
    spread = meshes.sharded(share, meshes.make(data=1, tensor=2), in_specs=specs, out_specs=(specs, P()))
    cases.agree(jax.jit(spread)(params, x_BND), gradient(at_once, params, x_BND, ask), 1e-5)


def test_of_equal_logits_the_first_is_the_answer_in_chunks_too(chunks):
    b_W = np.float32(2 * np.isin(np.arange(W), (5, 7)) + (np.arange(W) == 11))

    @jax.jit
    def accuracy(target):
        every = Targets(jnp.full((B, N), target), jnp.ones((B, N)))
        return measure({"G_WD": jnp.zeros((W, D)), "b_W": b_W}, jnp.ones((B, N, D)), every)["accuracy"]

    for target, right in ((5, 14), (7, 0), (11, 0)):
        assert accuracy(target) == (right, 14)


def test_nothing_asked_is_a_loss_of_nothing(chunks):
    params, x_BND = drawn()
    for few in (False, True):
        grads, found = gradient(measure, params, x_BND, asked(few, jnp.zeros((B, N))))
        assert found == {"loss": (0, 0), "accuracy": (0, 0)} and not any(leaf.any() for leaf in jax.tree.leaves(grads))


def test_large_logits_and_narrow_products(chunks):
    """Sums are float32 whatever the products are, and gradients of the parameters' and tokens' own dtype."""
    large = {"G_WD": jnp.full((W, D), 1000.0 / D)}, jnp.ones((B, N, D))
    total, count = jax.jit(lambda: measure(*large, asked(weight_BN=jnp.ones((B, N))))["loss"])()
    assert float(total / count) == pytest.approx(np.log(W), abs=1e-3)
    params, x_BND = drawn(std=0.2)
    narrow = {"G_WD": params["G_WD"].astype(jnp.bfloat16), "b_W": params["b_W"]}, x_BND.astype(jnp.bfloat16)
    for few in (False, True):
        found, expected = (gradient(of, *narrow, asked(few)) for of in (measure, at_once))
        assert [a.dtype for a in jax.tree.leaves(found)] == [a.dtype for a in jax.tree.leaves(expected)]
        cases.agree(found[1], expected[1], 1e-4)  # the exponentials are as narrow in the product that adds them up
        jax.tree.map(
            lambda one, other: cases.close(*(a.astype(np.float32) for a in (one, other)), 1e-2), found, expected
        )


def test_several_seeds_at_once(chunks):
    """Each has its own loop's end: of the first nothing is asked, of the last all."""
    weight_RBN = jnp.stack([jnp.zeros((B, N)), asked().weight_BN, jnp.ones((B, N))])
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), drawn()[0])
    x_RBND, ask = cases.normal(5, 3, B, N, D), lambda weight_BN: asked(True, weight_BN)

    def one(of, params, x_BND, weight_BN):
        return gradient(of, params, x_BND, ask(weight_BN))

    found = jax.vmap(functools.partial(one, measure))(params, x_RBND, weight_RBN)
    cases.agree(found, jax.vmap(functools.partial(one, at_once))(params, x_RBND, weight_RBN), 1e-5)


def test_no_product_is_made_twice_and_none_for_a_gradient_that_nobody_asks_for(monkeypatch):
    monkeypatch.setattr(loss, "FROM", 1)
    monkeypatch.setattr(loss, "LOGITS", 40 * W)
    given = drawn()[0], cases.normal(0, 11, N, D), Targets(jnp.zeros((11, N), int), jnp.ones((11, N)))
    for of, products in ((measure, 1), (functools.partial(gradient, measure), 3)):
        text = str(jax.make_jaxpr(lambda *arrays, of=of: of(*arrays[:-1], Targets(*arrays[-1][:2])))(*given))
        assert text.count("dot_general") == products and f"[40,{W}]" in text and f"[80,{W}]" not in text


def test_few_logits_are_made_at_once(monkeypatch):
    """As by loss.py, to the last bit: small runs stay what they were."""
    given, weight = drawn(), asked()
    monkeypatch.setattr(loss, "FROM", B * N * W + 1)
    makes = [lambda *arrays, of=of: gradient(of, *arrays, weight) for of in (measure, at_once)]
    assert len({str(jax.make_jaxpr(make)(*given)) for make in makes}) == 1
