"""Heads that share keys and values in groups (MQA, GQA) are heads with their own, some of them equal: in the slow
reference, in every way of computing the averages (on a ring: test_ring.py), in a smaller cache, on several devices."""

import functools

import averages
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_scores
import tiny
from cases import B, N
from errors import raises
from jax.sharding import PartitionSpec as P
from score_cases import SCORES

from experiments.build import model as models, sharding
from experiments.engine import compilation, errors, mesh as meshes
from tfm import head, layout as layouts, shapes
from tfm.attention import explicit, flash, mask, relative_position, value

H, K = 8, 2
D = H * K


def drawn(variant, G: int, **sizes) -> dict:
    """Parameters of a score or value whose keys or values have G heads."""
    return cases.drawn(lambda key: variant.init(key, G=G, H=H, K=K, D=D, **sizes))


def repeated(params: dict) -> dict:
    """The same where each query head has keys and values of its own, those of one group equal ones."""
    params = jax.device_get(params)
    many = {name: np.repeat(leaf, H // len(leaf), 0) if "_G" in name else leaf for name, leaf in params.items()}
    return {name.replace("_G", "_H"): leaf for name, leaf in many.items()}


def parameters(G: int, bias: bool = True) -> dict:
    params = {"score": drawn(SCORES["asymmetric"], G, bias=bias), "value": drawn(value.low_rank, G, M=1, bias=bias)}
    return params | {"relative_position": {}}


def attended(params: dict, x_BND: jax.Array, *, positions=relative_position.none, attend_to_self=True, **call) -> tuple:
    own = SCORES["asymmetric"]._replace(attend_to_self=attend_to_self)
    attend = flash.attention if call.get("layout", layouts.ONE).sequence else explicit.attention
    parts = cases.spec(score=own, H=H, relative_position=positions, attend=attend).attention
    return cases.self_attention(params, x_BND, spec=parts, mask=mask.causal, **call)


@pytest.mark.parametrize(("G", "bias"), [(2, True), (1, False)])
@cases.float64()
def test_the_slow_reference_with_equal_keys_and_values_for_the_heads_of_a_group(G, bias):
    params, x_BND = parameters(G, bias), cases.normal(1, 1, N, D)
    y_BND, A_BHNS, kept = jax.device_get(jax.jit(attended)(params, x_BND))
    assert shapes.check(params) == dict(H=H, G=G, K=K, D=D) and {x.shape[1] for x in kept.values()} == {G}
    own, p = (jax.tree.map(np.asarray, repeated(params[name])) for name in ("score", "value"))
    X, A, seen = np.asarray(x_BND[0]).T, [], np.triu(np.ones((N, N), bool))
    for h in range(H):
        L = reference.scaled(reference_scores.logits("asymmetric", own, X, X, h), "1/sqrt(K)", K=K, D=D)
        A += [reference.attention_matrix(L, seen)]
        cases.close(A_BHNS[0, h], A[h].T)
    Y = reference.low_rank_multi_head(X, p["Uo_HDK"], p["Uv_HKD"], A, p.get("bv_HK"), p.get("bo_D"))
    cases.close(y_BND[0], Y.T)


WAYS = {
    "explicit": explicit.attention,
    "flash": flash.attention,
}
WAYS["flash in blocks"] = functools.partial(flash.attention, queries=3, keys=2)


@pytest.mark.parametrize(("G", "of_values", "ways"), [(2, 2, ("flash in blocks",)), (4, 1, ("explicit", "flash"))])
@cases.float64()
def test_every_way_and_its_gradient_equal_explicit_attention_of_repeated_heads(G, of_values, ways):
    """Beside a bias that is learned, of each sequence's own positions too, and the lengths of a batch."""
    shape = {"q": (B, H, N, K), "k": (B, G, N, K), "v": (B, of_values, N, 7), "b_HR": (H, 2 * N - 1)}
    arrays = {name: cases.normal(i, *size) for i, (name, size) in enumerate(shape.items())}

    def of_own_heads(*qkv, **call) -> tuple:
        return explicit.attention(*(jnp.repeat(x, H // x.shape[1], 1) for x in qkv), **call)

    @jax.jit
    def every(arrays) -> dict:
        call = {"n": jnp.asarray(cases.ANY_BN % N)} if "flash in blocks" in ways else {"n": None, "cap": 1.3}
        call |= dict(name="padding", bias=True, N=N)
        computed = {way: WAYS[way] for way in ways} | {"repeated": of_own_heads}
        return {way: averages.gradients(arrays, attend=compute, **call) for way, compute in computed.items()}

    found = jax.device_get(every(arrays))
    expected = found.pop("repeated")
    for each in found.values():
        cases.agree(each, expected, 1e-10)
    assert all(expected[0][name].any() for name in arrays)


@cases.float64()
def test_devices_that_share_heads_and_tokens_compute_what_one_does():
    """Of four heads of keys each of two devices has two, for four of the eight of queries; the bias has all eight, and
    nobody attends to itself."""
    mesh, dealt = meshes.make(fsdp=2, tensor=2, sequence=2), np.array([0, 2, 4, 6, 1, 3, 5, 7])
    params = parameters(4) | {"relative_position": {"b_HR": cases.normal(3, H, 15)}}
    x_BND, over, how = cases.normal(1, 2, 8, D), meshes.layout(mesh), {"positions": relative_position.relative}
    specs = shapes.specs(params, over.rules)
    assert specs["score"]["Uk_GKD"] == P("tensor", None, "fsdp") and specs["value"]["bv_GK"] == P("tensor")

    def gradients(params: dict, x_BND: jax.Array, layout: layouts.Layout = layouts.ONE) -> dict:
        def total(params: dict) -> jax.Array:
            own, n = layouts.gather_features(params, layout), layouts.positions(layout, x_BND.shape[1])
            y_BND, *_ = attended(own, x_BND, **how, attend_to_self=False, n=n, layout=layout)
            return jax.lax.psum(jnp.sin(y_BND).sum(), over.tokens if layout.sequence else ())

        return jax.grad(total)(params)

    share = functools.partial(gradients, layout=over)
    spread = meshes.sharded(share, mesh, in_specs=(specs, P("fsdp", "sequence")), out_specs=specs)
    found, expected = jax.jit(spread)(params, x_BND[:, dealt]), jax.jit(gradients)(params, x_BND)
    cases.agree(found, expected)


@pytest.mark.parametrize("name", [name for name in SCORES if SCORES[name].supports_gqa and SCORES[name].factors])
def test_factors_queries_and_keys_are_those_of_repeated_keys(name):
    params, x_BND = drawn(SCORES[name], 2, bias=True), cases.normal(1, B, N, D)
    cases.agree(*(SCORES[name].factors(p, D=D) for p in (params, repeated(params))), 1e-12)
    apply = jax.jit(SCORES[name].apply)
    (q, k), own = jax.device_get([apply(p, x_BND, x_BND) for p in (params, repeated(params))])
    cases.agree((q, np.repeat(k, H // 2, 1)), own, 1e-6)
    begun = SCORES[name].init(jax.random.key(0), G=2, H=H, K=K, D=D, bias=False)
    keys = np.repeat(begun["Uk_GKD"], H // 2, 0)
    assert name == "identity_query" or (keys == np.asarray(begun["Uq_HKD"])).all() == (name == "symmetric_init")


def test_heads_leave_out_the_value_of_their_group():
    y_BHNK, v_BGNK = cases.normal(1, B, H, N, K), cases.normal(2, B, 2, N, K)
    both = v_BGNK, np.repeat(v_BGNK, H // 2, 1)
    cases.close(*(value.exclusive.post_process({}, y_BHNK, None, v) for v in both), 1e-6)


def test_the_optimiser_takes_heads_of_keys_for_heads():
    for name in ("blocks/score/Uk_GKD", "blocks/value/Uv_GKD"):
        assert shapes.sides(name) == shapes.sides(name.replace("G", "H")) and shapes.is_matrix(name)
    assert not shapes.is_matrix("blocks/score/bk_GK")


def language(**changes) -> models.Model:
    m = tiny.settings("language", **{"model.D": 12, "model.H": 6, "model.relative_position": "rotary"} | changes).model
    return models.build_language_model(m, head=head.next_word, W=11, N=8)


def test_a_cache_of_fewer_heads_says_the_same_in_less_memory_after_fewer_products():
    own, few = language(), language(**{"model.G": 2})
    params, call = cases.drawn(few.init), dict(mask=mask.causal)
    w_BN, length_B = jnp.asarray(np.random.default_rng(0).integers(0, 11, (3, 8))), jnp.array([3, 3, 3])
    apply, step = (jax.jit(functools.partial(of, **call)) for of in (few.apply, few.step))
    logits_BNW, _ = apply(params, w_BN)
    _, cache = jax.jit(functools.partial(few.start, capacity=8, **call))(params, w_BN[:, :3], length_B)
    for n in range(3, 8):
        found_BW, cache = step(params, cache, w_BN[:, n], length_B + n - 3)
        cases.close(found_BW, logits_BNW[:, n], 1e-5)
    params_own = jax.eval_shape(own.init, jax.random.key(0))
    whole = jax.eval_shape(functools.partial(own.start, capacity=8, **call), params_own, w_BN[:, :3], length_B)[1]
    assert 3 * compilation.tree_bytes(cache) == compilation.tree_bytes(whole)
    flops = compilation.flops(functools.partial(own.apply, **call), params_own, w_BN)
    saved = 2 * 2 * (6 - 2) * 2 * 12 * 2 * w_BN.size  # layers, keys and values, heads, K, D, two FLOPs, tokens
    assert compilation.flops(apply, params, w_BN) == flops - saved


REFUSED = {
    ("model.G = 4", "model.H = 6"): {"model.G": 4},
    ("model.G", "at least 1"): {"model.G": 0},
    ("model.G = 2", "model.score = tied", "identity_query"): {"model.G": 2, "model.score": "tied"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_no_group_can_share_is_refused(words):
    with raises(errors.UserError, *words):
        language(**REFUSED[words])
    m = tiny.settings("language", **{"model.D": 12, "model.H": 6, "model.G": 3}).model
    with raises(errors.UserError, "model.G = 3", "mesh.tensor"):
        sharding.choose_layout(m, meshes.make(tensor=2))
