"""The TPU's kernel in Pallas' interpreter equals explicit attention, and the choice of an implementation."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.sharding import PartitionSpec as Spec

from tfm.attention import explicit, flash, fused, implementations, mask as masks, splash

B, H, K, V = 2, 4, 16, 24
SPLASH = functools.partial(splash.attention, interpret=True)
VALID_BS = np.arange(130) % 5 < np.array([[3], [0]])  # the second sequence has only padding
DOCUMENT_BS = np.cumsum(np.random.default_rng(0).random((B, 256)) < [[0.2], [0.02]], axis=1)
IN_DOCUMENTS = masks.both(masks.window(40), masks.documents(DOCUMENT_BS[:, :130]))
PREFIX_IN_WINDOW = masks.both(masks.prefix(30), masks.window(40))
CASES = {  # (queries, keys, key heads, value heads, mask, cap)
    "causal, several blocks": (640, 640, 1, 1, masks.causal, 0.0),
    "no mask, tokens that do not fill a block": (65, 65, H, H, None, 0.9),
    "one sees nothing": (128, 128, 1, 1, lambda n, s_S: masks.causal(n, s_S) & (n != 30)[..., None], 0.0),
    "a window, documents, padding": (130, 130, H, H, masks.both(IN_DOCUMENTS, masks.padding(VALID_BS)), 0.0),
    "none sees itself, documents": (130, 130, 1, 1, masks.both(lambda n, s_S: s_S != n[..., None], IN_DOCUMENTS), 0.0),
    "causal, later queries": (100, 130, 2, 1, masks.causal, 0.0),
    "a window, padding": (130, 130, 1, 2, masks.both(PREFIX_IN_WINDOW, masks.padding(VALID_BS)), 0.9),
}


def draw(N, S, G, J):
    shapes = (B, H, N, K), (B, G, S, K), (B, J, S, V)
    return [np.asarray(cases.normal(i, *shape), np.float32) for i, shape in enumerate(shapes)]


def gradients(qkv, *, attend, mask, cap=0.0):
    """Return y and the gradients of a sum over y."""

    def total(*qkv):
        y_BHNV, _ = attend(*qkv, mask=mask, scale=0.3, cap=cap)
        return jnp.sum(jnp.sin(y_BHNV)), y_BHNV

    gradient, y_BHNV = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return y_BHNV, gradient


@pytest.mark.parametrize("name", CASES)
def test_averages_and_gradients_equal_explicit_attention(name):
    *sizes, mask, cap = CASES[name]
    qkv, compute = draw(*sizes), functools.partial(gradients, mask=mask, cap=cap)
    compute_all = jax.jit(lambda qkv: [compute(qkv, attend=attend) for attend in (SPLASH, explicit.attention)])
    result, expected = compute_all(qkv)
    cases.assert_trees_close(result, expected, 2e-5)
    blind, expected_blind = (~np.asarray(y_BHNV).any((1, 3)) for y_BHNV in (result[0], expected[0]))
    assert blind.tolist() == expected_blind.tolist() and blind[1].all() == ("padding" in name)
    assert blind[0].any() == (name.startswith("one") or name.endswith(("documents, padding", "itself, documents")))


def test_inside_shard_map_the_kernel_equals_explicit_attention():
    mesh, qkv = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), draw(128, 128, 2, 2)

    def total(q, k, v):
        y_BHNV, _ = SPLASH(q, k, v, mask=masks.causal, scale=0.3)
        return jax.lax.psum(jnp.sum(jnp.sin(y_BHNV)), "data")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=Spec("data"), out_specs=Spec())
    expected = jax.jit(functools.partial(gradients, attend=explicit.attention, mask=masks.causal))(qkv)[1]
    cases.assert_trees_close(jax.jit(jax.grad(sharded, argnums=(0, 1, 2)))(*qkv), expected, 2e-5)


def count_kernels(jaxpr) -> int:
    """Count the Pallas kernels in a jaxpr."""
    inner = [getattr(p, "jaxpr", p) for one in jaxpr.eqns for p in jax.tree.leaves(list(one.params.values()))]
    count = sum(one.primitive.name == "pallas_call" for one in jaxpr.eqns)
    return count + sum(count_kernels(one) for one in inner if hasattr(one, "eqns") and one is not jaxpr)


def test_features_that_fill_the_lanes_reach_the_kernel_without_a_transpose():
    def moves(K: int) -> int:
        x_BHNK = jax.ShapeDtypeStruct((1, 1, 128, K), jnp.float32)
        call = functools.partial(SPLASH, mask=masks.causal, scale=1.0)
        return str(jax.make_jaxpr(call)(x_BHNK, x_BHNK, x_BHNK)).count("transpose[")

    assert moves(128) == moves(256) == 0 < moves(64)


@pytest.mark.parametrize("policy", ["attention", "nothing"])
def test_a_checkpoint_policy_can_save_the_result_of_the_kernel(policy):
    saves = jax.checkpoint_policies.save_only_these_names(policy)

    def total(*qkv):
        return jnp.sum(jnp.sin(SPLASH(*qkv, mask=masks.causal, scale=1.0)[0]))

    program = jax.make_jaxpr(jax.grad(jax.checkpoint(total, policy=saves)))(*draw(128, 128, H, H))
    count = count_kernels(program.jaxpr)
    assert count >= 3 and (count == 3) == (policy == "attention")  # one forward and two backward kernels


@pytest.mark.parametrize("call", [{"bias": lambda n, s_S: jnp.ones((H, n.size, s_S.size))}, {"n": jnp.arange(128)}])
def test_the_kernel_refuses_a_bias_and_positions(call):
    with raises(ValueError, "splash"):
        SPLASH(*draw(128, 128, H, H), **{"mask": masks.causal, "scale": 0.3} | call)


PREFIXES = masks.prefix(np.array([3, 5]))
CHOICES = [  # (platform, changes to the call, expected function, part of the reason)
    ("cpu", {}, flash.attention, ""),
    ("", {}, flash.attention, ""),
    ("tpu", {}, splash.attention, ""),
    ("tpu", {"cap": 30.0}, splash.attention, ""),
    ("tpu", {"mask": masks.window(3)}, splash.attention, ""),
    ("tpu", {"mask": masks.both(masks.causal, masks.padding(np.ones((1, 256), bool)))}, splash.attention, ""),
    ("tpu", {"mask": masks.both(masks.causal, masks.documents(np.zeros((1, 256), int)))}, splash.attention, ""),
    ("tpu", {"bias": True}, flash.attention, "bias"),
    ("tpu", {"S": 255}, explicit.attention, "256 keys"),
    ("tpu", {"K": 513}, flash.attention, "512 features"),
    ("tpu", {"dtype": jnp.float64}, flash.attention, "64 bits"),
    ("tpu", {"mask": PREFIXES}, flash.attention, "traced"),
    ("tpu", {"axis": "sequence"}, flash.attention, ""),
    ("gpu", {}, fused.attention, ""),
    ("gpu", {"dtype": jnp.float32}, flash.attention, "16 bits"),
    ("gpu", {"cap": 30.0}, flash.attention, "capped"),
]


@pytest.mark.parametrize(("platform", "call", "attend", "reason"), CHOICES)
def test_the_implementation_follows_from_platform_and_shapes(monkeypatch, platform, call, attend, reason):
    monkeypatch.setattr(jax, "__version_info__", fused.MIN_JAX)
    sizes = {"S": 256, "K": K, "dtype": jnp.bfloat16}
    S, features, dtype = (call.get(name, default) for name, default in sizes.items())
    q_BHNK, k_BHSK = (jax.ShapeDtypeStruct((B, H, N, features), dtype) for N in (256, S))
    options = {"mask": masks.causal} | {name: x for name, x in call.items() if name not in sizes}
    choice = implementations.choose("flash", platform, q_BHNK, k_BHSK, k_BHSK, **options)
    assert choice.attend is attend and reason in choice.reason and bool(choice.reason) == bool(reason)
    options.pop("axis", None)
    choice = implementations.choose("explicit", platform, q_BHNK, k_BHSK, k_BHSK, **options)
    assert choice.attend is explicit.attention


def test_a_mask_of_traced_arrays_is_unknown_during_tracing():
    def evaluate(length):
        assert masks.evaluate(masks.prefix(length), np.arange(3), np.arange(3)) is None
        return length

    jax.jit(evaluate)(jnp.int32(2))
    allowed_NS = masks.evaluate(masks.prefix(2), np.arange(2), np.arange(3))
    np.testing.assert_array_equal(allowed_NS, [[1, 1, 0], [1, 1, 0]])
    assert isinstance(allowed_NS, np.ndarray)
