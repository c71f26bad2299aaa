"""Grouped heads (MQA, GQA) equal heads with repeated keys and values.

This holds for the slow reference, every implementation (test_ring.py tests the ring), a cache and several devices.
"""

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

from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.model import build, sharding
from tfm import head as heads, layout as layouts, models, shapes
from tfm.attention import explicit, flash, mask as masks, relative_position, value

H, K = 8, 2
D = H * K


def draw(variant, G: int, **sizes) -> dict:
    """Draw the parameters of a score or value whose keys or values have G heads."""
    return cases.draw_params(lambda key: variant.init(key, G=G, H=H, K=K, D=D, **sizes))


def repeat(params: dict) -> dict:
    """Repeat the keys and values of each group for its query heads."""
    params = jax.device_get(params)
    leaves = {name: np.repeat(leaf, H // len(leaf), 0) if "_G" in name else leaf for name, leaf in params.items()}
    return {name.replace("_G", "_H"): leaf for name, leaf in leaves.items()}


def parameters(G: int, bias: bool = True) -> dict:
    params = {"score": draw(SCORES["asymmetric"], G, bias=bias), "value": draw(value.low_rank, G, M=1, bias=bias)}
    return params | {"relative_position": {}}


def attend(params: dict, x_BND: jax.Array, *, positions=relative_position.none, attend_to_self=True, **call) -> tuple:
    implementation = flash.attention if call.get("layout", layouts.ONE).sequence else explicit.attention
    choices = dict(score=SCORES["asymmetric"]._replace(attend_to_self=attend_to_self), relative_position=positions)
    spec = cases.spec(**choices, H=H, attend=implementation).attention
    return cases.self_attention(params, x_BND, spec=spec, mask=masks.causal, **call)


@pytest.mark.parametrize(("G", "bias"), [(2, True), (1, False)])
@cases.float64()
def test_grouped_heads_equal_the_reference_with_repeated_keys_and_values(G, bias):
    params, x_BND = parameters(G, bias), cases.normal(1, 1, N, D)
    y_BND, A_BHNS, cache = jax.device_get(jax.jit(attend)(params, x_BND))
    assert shapes.check(params) == dict(H=H, G=G, K=K, D=D) and {x.shape[1] for x in cache.values()} == {G}
    score_params, p = (jax.tree.map(np.asarray, repeat(params[name])) for name in ("score", "value"))
    X, A = np.asarray(x_BND[0]).T, []
    for h in range(H):
        L = reference.scaled(reference_scores.logits("asymmetric", score_params, X, X, h), "1/sqrt(K)", K=K, D=D)
        A += [reference.attention_matrix(L, np.triu(np.ones((N, N), bool)))]
        cases.assert_close(A_BHNS[0, h], A[h].T)
    Y = reference.low_rank_multi_head(X, p["Uo_HDK"], p["Uv_HKD"], A, p.get("bv_HK"), p.get("bo_D"))
    cases.assert_close(y_BND[0], Y.T)


BLOCKS = {"flash in blocks": averages.in_blocks(3, 2)}
WHOLE_SEQUENCES = {"explicit": explicit.attention, "flash": flash.attention}


@pytest.mark.parametrize(("G", "value_heads", "ways"), [(2, 2, BLOCKS), (4, 1, WHOLE_SEQUENCES)])
@cases.float64()
def test_every_implementation_and_its_gradient_equal_explicit_attention_of_repeated_heads(G, value_heads, ways):
    """The call has a learned bias, padding, and either positions for each sequence or a cap."""
    shape = {"q": (B, H, N, K), "k": (B, G, N, K), "v": (B, value_heads, N, 7), "b_HR": (H, 2 * N - 1)}
    arrays = {name: cases.normal(i, *size) for i, (name, size) in enumerate(shape.items())}

    def repeat_heads(*qkv, **call) -> tuple:
        return explicit.attention(*(jnp.repeat(x, H // x.shape[1], 1) for x in qkv), **call)

    @jax.jit
    def compute_all(arrays) -> list:
        call = {"n": jnp.asarray(cases.ANY_BN % N)} if ways is BLOCKS else {"n": None, "cap": 1.3}
        call |= dict(name="padding", bias=True, N=N)
        return [averages.gradients(arrays, attend=way, **call) for way in (repeat_heads, *ways.values())]

    expected, *results = jax.device_get(compute_all(arrays))
    for result in results:
        cases.assert_trees_close(result, expected, 1e-10)
    assert all(expected[0][name].any() for name in arrays)


@cases.float64()
def test_sharded_heads_and_tokens_have_the_gradient_of_one_device():
    """Each of two devices has two of four key heads and four of eight query heads.

    Every device has the biases of all eight heads, and no token attends to itself.
    """
    mesh, order = meshes.make(fsdp=2, tensor=2, sequence=2), np.array([0, 2, 4, 6, 1, 3, 5, 7])
    params = parameters(4) | {"relative_position": {"b_HR": cases.normal(3, H, 15)}}
    x_BND, layout = cases.normal(1, 2, 8, D), meshes.layout(mesh)
    specs = shapes.specs(params, layout.rules)
    assert specs["score"]["Uk_GKD"] == P("tensor", None, "fsdp") and specs["value"]["bv_GK"] == P("tensor")

    def gradients(params: dict, x_BND: jax.Array, layout: layouts.Layout = layouts.ONE) -> dict:
        def total(params: dict) -> jax.Array:
            n = layouts.positions(layout, x_BND.shape[1]) if layout.sequence else None
            params = layouts.gather_features(params, layout)
            call = dict(positions=relative_position.relative, attend_to_self=False, n=n, layout=layout)
            number = jnp.sin(attend(params, x_BND, **call)[0]).sum()
            return jax.lax.psum(number, layout.tokens if layout.sequence else ())

        return jax.grad(total)(params)

    gradients_on_device = functools.partial(gradients, layout=layout)
    sharded = meshes.sharded(gradients_on_device, mesh, in_specs=(specs, P("fsdp", "sequence")), out_specs=specs)
    cases.assert_trees_close(jax.jit(sharded)(params, x_BND[:, order]), jax.jit(gradients)(params, x_BND))


def test_factors_queries_and_keys_equal_those_of_repeated_keys():
    names = [name for name in SCORES if SCORES[name].supports_gqa and SCORES[name].factors]
    trees = {name: jax.device_get(draw(SCORES[name], 2, bias=True)) for name in names}

    @jax.jit
    def compute_all(trees, repeated, x_BND):
        """Return factors, queries and keys of each score, and those of repeated keys; and initial parameters."""
        factors = [{name: SCORES[name].factors(p, D=D) for name, p in t.items()} for t in (trees, repeated)]
        pairs = [{name: SCORES[name].apply(p, x_BND, x_BND) for name, p in t.items()} for t in (trees, repeated)]
        key = jax.random.key(0)
        return factors, pairs, {name: SCORES[name].init(key, G=2, H=H, K=K, D=D, bias=False) for name in names}

    repeated = {name: repeat(tree) for name, tree in trees.items()}
    factors, pairs, initial = jax.device_get(compute_all(trees, repeated, cases.normal(1, B, N, D)))
    cases.assert_trees_close(*factors, 1e-12)
    for name, (q, k) in pairs[0].items():
        cases.assert_trees_close((q, np.repeat(k, H // 2, 1)), pairs[1][name], 1e-6)
        keys = np.repeat(initial[name]["Uk_GKD"], H // 2, 0)
        assert name == "identity_query" or (keys == initial[name]["Uq_HKD"]).all() == (name == "symmetric_init")


def test_exclusive_heads_subtract_the_value_of_their_group():
    y_BHNK, v_BGNK = cases.normal(1, B, H, N, K), cases.normal(2, B, 2, N, K)
    compute = jax.jit(lambda y_BHNK, *values: [value.exclusive.post_process({}, y_BHNK, None, v) for v in values])
    cases.assert_close(*compute(y_BHNK, v_BGNK, np.repeat(v_BGNK, H // 2, 1)), 1e-6)


def test_parameters_of_key_heads_are_matrices_with_the_sides_of_query_heads():
    for name in ("blocks/score/Uk_GKD", "blocks/value/Uv_GKD"):
        assert shapes.sides(name) == shapes.sides(name.replace("G", "H")) and shapes.is_matrix(name)
    assert not shapes.is_matrix("blocks/score/bk_GK")


def language(**changes) -> models.Model:
    m = tiny.settings("language", **{"model.D": 12, "model.H": 6, "model.relative_position": "rotary"} | changes).model
    return build.language_model(m, head=heads.next_word, W=11, N=8)


def test_a_cache_of_fewer_heads_gives_the_same_logits_with_less_memory_and_fewer_products():
    all_heads, grouped = language(), language(**{"model.G": 2})
    params, call = cases.draw_params(grouped.init), dict(mask=masks.causal)
    w_BN, length_B = np.random.default_rng(0).integers(0, 11, (3, 8)), np.array([3, 3, 3])
    apply, step = (jax.jit(functools.partial(function, **call)) for function in (grouped.apply, grouped.step))
    logits_BNW = np.asarray(apply(params, w_BN)[0])
    _, cache = jax.jit(functools.partial(grouped.start, capacity=8, **call))(params, w_BN[:, :3], length_B)
    for n in range(3, 8):
        logits_BW, cache = step(params, cache, w_BN[:, n], length_B + n - 3)
        cases.assert_close(logits_BW, logits_BNW[:, n], 1e-5)
    tree, start = jax.eval_shape(all_heads.init, jax.random.key(0)), functools.partial(all_heads.start, capacity=8)
    larger_cache = jax.eval_shape(functools.partial(start, **call), tree, w_BN[:, :3], length_B)[1]
    assert 3 * compilation.tree_bytes(cache) == compilation.tree_bytes(larger_cache)
    flops = compilation.flops(functools.partial(all_heads.apply, **call), tree, w_BN)
    saved_flops = 2 * 2 * (6 - 2) * 2 * 12 * 2 * w_BN.size  # layers, keys and values, heads, K, D, two FLOPs, tokens
    assert compilation.flops(apply, params, w_BN) == flops - saved_flops


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.G": 4}, ("model.G = 4", "model.H = 6")),
        ({"model.G": 0}, ("model.G", 1)),
        ({"model.G": 2, "model.score": "tied"}, ("model.G = 2", "model.score = tied", "identity_query")),
        ({"model.G": 3}, ("model.G = 3", "mesh.tensor")),
    ],
)
def test_groups_that_do_not_fit_the_model_or_the_mesh_are_refused(changes, parts):
    with raises(errors.UserError, *parts):
        language(**changes)
        settings = tiny.settings("language", **{"model.D": 12, "model.H": 6} | changes)
        sharding.choose_layout(settings, meshes.make(tensor=2))
