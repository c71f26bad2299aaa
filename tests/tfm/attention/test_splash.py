"""The TPU's kernel in Pallas' interpreter equals explicit attention, and the choice of an implementation."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.sharding import PartitionSpec as Spec

from tfm.attention import explicit, flash, fused, implementations, mask, splash

B, H, K, V = 2, 4, 16, 24
SPLASH = functools.partial(splash.attention, interpret=True)
VALID_BS = np.arange(130) % 5 < np.array([[3], [0]])  # of the second sequence nothing may be seen
PREFIX = mask.either(mask.causal, mask.prefix(30))
CASES = {  # (queries, keys, heads of keys, heads of values, mask, cap)
    "causal, several blocks": (640, 640, 1, 1, mask.causal, 0.0),
    "no mask, tokens that do not fill a block": (65, 65, H, H, None, 0.9),
    "one sees nothing": (128, 128, 1, 1, lambda n, s_S: mask.causal(n, s_S) & (n != 30)[..., None], 0.0),
    "causal, later queries": (100, 130, 2, 1, mask.causal, 0.0),
    "a window, padding": (130, 130, 1, 2, mask.both(mask.both(PREFIX, mask.window(40)), mask.padding(VALID_BS)), 0.9),
}


def draw(N, S, G, J):
    shapes = (B, H, N, K), (B, G, S, K), (B, J, S, V)
    return [np.asarray(cases.normal(i, *shape), np.float32) for i, shape in enumerate(shapes)]


def gradients(qkv, *, attend, allowed, cap=0.0):
    """Return y and the gradients of a sum over y."""

    def total(*qkv):
        y_BHNV, _ = attend(*qkv, mask=allowed, scale=0.3, cap=cap)
        return jnp.sum(jnp.sin(y_BHNV)), y_BHNV

    gradient, y_BHNV = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return y_BHNV, gradient


@pytest.mark.parametrize("name", CASES)
def test_averages_and_gradients_are_those_of_the_definition(name):
    *sizes, allowed, cap = CASES[name]
    qkv, run = draw(*sizes), functools.partial(gradients, allowed=allowed, cap=cap)
    result, expected = (jax.jit(functools.partial(run, attend=c))(qkv) for c in (SPLASH, explicit.attention))
    cases.agree(result, expected, 2e-5)
    blind = ~np.asarray(result[0]).any((1, 3))
    assert blind[1].all() == ("padding" in name) and blind[0].sum() == name.startswith("one")


def test_inside_shard_map_a_kernel_computes_each_devices_sequences():
    mesh, qkv = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), draw(128, 128, 2, 2)

    def total(q, k, v):
        y_BHNV, _ = SPLASH(q, k, v, mask=mask.causal, scale=0.3)
        return jax.lax.psum(jnp.sum(jnp.sin(y_BHNV)), "data")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=Spec("data"), out_specs=Spec())
    expected = jax.jit(functools.partial(gradients, attend=explicit.attention, allowed=mask.causal))(qkv)[1]
    cases.agree(jax.jit(jax.grad(sharded, argnums=(0, 1, 2)))(*qkv), expected, 2e-5)


def count_kernels(jaxpr) -> int:
    """Return how many kernels a program starts."""
    inner = [getattr(p, "jaxpr", p) for one in jaxpr.eqns for p in jax.tree.leaves(list(one.params.values()))]
    own = sum(one.primitive.name == "pallas_call" for one in jaxpr.eqns)
    return own + sum(count_kernels(one) for one in inner if hasattr(one, "eqns") and one is not jaxpr)


def test_features_that_fill_the_lanes_reach_the_kernel_without_a_transpose():
    def moves(K: int) -> int:
        x_BHNK = jax.ShapeDtypeStruct((1, 1, 128, K), jnp.float32)
        call = functools.partial(SPLASH, mask=mask.causal, scale=1.0)
        return str(jax.make_jaxpr(call)(x_BHNK, x_BHNK, x_BHNK)).count("transpose[")

    assert moves(128) == moves(256) == 0 < moves(64)


@pytest.mark.parametrize("policy", ["attention", "nothing"])
def test_a_result_with_a_name_is_saved_and_the_kernel_not_started_again(policy):
    saves = jax.checkpoint_policies.save_only_these_names(policy)

    def total(*qkv):
        return jnp.sum(jnp.sin(SPLASH(*qkv, mask=mask.causal, scale=1.0)[0]))

    program = jax.make_jaxpr(jax.grad(jax.checkpoint(total, policy=saves)))(*draw(128, 128, H, H))
    count = count_kernels(program.jaxpr)
    assert count >= 3 and (count == 3) == (policy == "attention")  # forwards, and two backwards


@pytest.mark.parametrize("call", [{"bias": lambda n, s_S: jnp.ones((H, n.size, s_S.size))}, {"n": jnp.arange(128)}])
def test_the_kernel_refuses_a_bias_and_positions(call):
    with raises(ValueError, "splash"):
        SPLASH(*draw(128, 128, H, H), **{"mask": mask.causal, "scale": 0.3} | call)


PREFIXES = mask.prefix(np.array([3, 5]))
CHOICES = [  # platform, changes of the call, the function, a part of the reason
    ("cpu", {}, flash.attention, ""),
    ("", {}, flash.attention, ""),
    ("tpu", {}, splash.attention, ""),
    ("tpu", {"cap": 30.0}, splash.attention, ""),
    ("tpu", {"mask": mask.window(3)}, splash.attention, ""),
    ("tpu", {"mask": mask.both(mask.causal, mask.padding(np.ones((1, 256), bool)))}, splash.attention, ""),
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
def test_the_implementation_follows_from_platform_and_shapes(platform, call, attend, reason):
    sizes = {"S": 256, "K": K, "dtype": jnp.bfloat16}
    S, features, dtype = (call.get(name, usual) for name, usual in sizes.items())
    q_BHNK, k_BHSK = (jax.ShapeDtypeStruct((B, H, N, features), dtype) for N in (256, S))
    options = {"mask": mask.causal} | {name: x for name, x in call.items() if name not in sizes}
    choice = implementations.choose("flash", platform, q_BHNK, k_BHSK, k_BHSK, **options)
    assert choice.attend is attend and reason in choice.reason and bool(choice.reason) == bool(reason)
    options.pop("axis", None)
    choice = implementations.choose("explicit", platform, q_BHNK, k_BHSK, k_BHSK, **options)
    assert choice.attend is explicit.attention


def test_masks_of_traced_arrays_are_unknown_except_padding():
    def evaluate(length):
        assert mask.evaluate(mask.prefix(length), np.arange(3), np.arange(3)) == (None, None)
        return length

    jax.jit(evaluate)(jnp.int32(2))
    both = mask.both(mask.both(mask.causal, mask.padding(VALID_BS)), mask.padding(~VALID_BS))
    shown_NS, valid_BS = mask.evaluate(both, np.arange(130), np.arange(130))
    np.testing.assert_array_equal(shown_NS, np.tri(130, dtype=bool))
    assert not np.asarray(valid_BS).any()
    shown_NS, valid_BS = mask.evaluate(None, np.arange(2), np.arange(3))
    assert shown_NS.all() and shown_NS.shape == (2, 3) and valid_BS is None
