"""The TPU's kernel, in Pallas' interpreter: the averages of explicit.py and their gradients, on several devices too."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from tfm import attention
from tfm.attention import explicit, flash, fused, mask, splash

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


def drawn(N, S, G, J):
    shapes = (B, H, N, K), (B, G, S, K), (B, J, S, V)
    return [np.asarray(cases.normal(i, *shape), np.float32) for i, shape in enumerate(shapes)]


def gradients(qkv, *, compute, who, cap=0.0):
    """(y, gradients of a sum over y) of one way."""

    def total(*qkv):
        y_BHNV, _ = compute(*qkv, mask=who, scale=0.3, cap=cap)
        return jnp.sum(jnp.sin(y_BHNV)), y_BHNV

    (_, y_BHNV), slopes = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return y_BHNV, slopes


@pytest.mark.parametrize("name", CASES)
def test_averages_and_gradients_are_those_of_the_definition(name):
    *sizes, who, cap = CASES[name]
    qkv, run = drawn(*sizes), functools.partial(gradients, who=who, cap=cap)
    found, expected = (jax.jit(functools.partial(run, compute=c))(qkv) for c in (SPLASH, explicit.attention))
    jax.tree.map(lambda a, b: cases.close(a, b, 2e-5), found, expected)
    blind = ~np.asarray(found[0]).any((1, 3))
    assert blind[1].all() == ("padding" in name) and blind[0].sum() == name.startswith("one")


def test_inside_shard_map_a_kernel_computes_each_devices_sequences():
    mesh, qkv = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), drawn(128, 128, 2, 2)

    def total(q, k, v):
        y_BHNV, _ = SPLASH(q, k, v, mask=mask.causal, scale=0.3)
        return jax.lax.psum(jnp.sum(jnp.sin(y_BHNV)), "data")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=Spec("data"), out_specs=Spec())
    found = jax.jit(jax.grad(sharded, argnums=(0, 1, 2)))(*qkv)
    expected = jax.jit(functools.partial(gradients, compute=explicit.attention, who=mask.causal))(qkv)[1]
    jax.tree.map(lambda a, b: cases.close(a, b, 2e-5), found, expected)


def kernels(jaxpr) -> int:
    """How many kernels a program starts."""
    inner = [getattr(p, "jaxpr", p) for one in jaxpr.eqns for p in jax.tree.leaves(list(one.params.values()))]
    own = sum(one.primitive.name == "pallas_call" for one in jaxpr.eqns)
    return own + sum(kernels(one) for one in inner if hasattr(one, "eqns") and one is not jaxpr)


def test_features_that_fill_the_lanes_are_handed_to_the_kernel_as_they_lie():
    def moves(K: int) -> int:
        x_BHNK = jax.ShapeDtypeStruct((1, 1, 128, K), jnp.float32)
        call = functools.partial(SPLASH, mask=mask.causal, scale=1.0)
        return str(jax.make_jaxpr(call)(x_BHNK, x_BHNK, x_BHNK)).count("transpose[")

    assert moves(128) == moves(256) == 0 < moves(64)


@pytest.mark.parametrize("policy", ["attention", "nothing"])
def test_what_has_a_name_is_kept_and_the_kernel_not_started_again(policy):
    kept = jax.checkpoint_policies.save_only_these_names(policy)
    qkv = drawn(128, 128, H, H)

    def total(*qkv):
        return jnp.sum(jnp.sin(SPLASH(*qkv, mask=mask.causal, scale=1.0)[0]))

    found = jax.make_jaxpr(jax.grad(jax.checkpoint(total, policy=kept)))(*qkv)
    assert kernels(found.jaxpr) >= 3
    assert (kernels(found.jaxpr) == 3) == (policy == "attention")  # forwards, and two backwards


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        ({"bias": lambda n, s_S: jnp.ones((H, n.size, s_S.size)), "cap": 0.9}, (128, 128, H, H)),
        ({"n": jnp.arange(128)}, (128, 128, H, H)),
    ],
)
def test_what_a_kernel_cannot_know_is_computed_in_blocks(call, sizes):
    qkv, call = drawn(*sizes), {"mask": mask.causal, "scale": 0.3} | call
    programs = [
        jax.jit(functools.partial(way, **how)).lower(*qkv).as_text()
        for way, how in ((splash.attention, call | {"interpret": True}), (flash.attention, call))
    ]
    assert programs[0] == programs[1]


def test_of_few_keys_all_weights_are_formed_at_once_and_not_kept():
    qkv, call = drawn(64, 64, H, H), {"mask": mask.padding(jnp.arange(64) < jnp.array([[64], [9]])), "scale": 0.3}
    call["cap"] = 0.9

    def both(way, *qkv):
        y_BHNV, back = jax.vjp(lambda *qkv: way(*qkv, **call)[0], *qkv)
        return (y_BHNV, back(jnp.sin(y_BHNV))), back

    ways = explicit.attention, splash.attention
    (right, kept), (ours, own) = (jax.jit(functools.partial(both, way))(*qkv) for way in ways)
    cases.agree(ours, right, 1e-6)
    weights = B * H * 64 * 64
    assert [max(x.size for x in jax.tree.leaves(back)) >= weights for back in (kept, own)] == [True, False]


@pytest.mark.parametrize(
    ("compute", "call", "said"),
    [
        (explicit.attention, {}, "explicit"),
        (flash.attention, {}, "flash, in blocks"),
        (attention.on("gpu", jnp.bfloat16, cap=30.0), {"cap": 30.0}, "flash, in blocks: logits with a cap are for no"),
        (splash.attention, {"cap": 30.0}, "flash, the splash kernel (TPU)"),
        (splash.attention, {}, "flash, the splash kernel (TPU)"),
        (splash.attention, {"mask": mask.window(3)}, "flash, the splash kernel (TPU)"),
        (splash.attention, {"bias": jnp.add}, "flash, in blocks: the score has a bias"),
        (splash.attention, {"n": jnp.arange(256)}, "flash, in blocks: the tokens stand"),
        (splash.attention, {"S": 255}, "flash, all weights at once"),
        (splash.attention, {"S": 255, "B": 99}, "flash, in blocks: 255 keys"),
        (splash.attention, {"K": 513}, "flash, in blocks: more than 512 features"),
        (splash.attention, {"dtype": jnp.float64}, "flash, in blocks: numbers of 64 bits"),
        (splash.attention, {"mask": mask.prefix(jnp.array([3, 5]))}, "flash, in blocks: the mask depends on arrays"),
        (fused.attention, {}, "flash, cuDNN's kernel (GPU)"),
        (fused.attention, {"dtype": jnp.float32}, "flash, by XLA: numbers of more than 16 bits"),
        (fused.attention, {"K": 129}, "flash, by XLA: more than 128 features"),
        (fused.attention, {"S": 255}, "flash, by XLA: 256 queries and 255 keys"),
    ],
)
def test_what_computes_is_said_with_the_reason(compute, call, said):
    S, dtype = call.pop("S", 256), call.pop("dtype", jnp.bfloat16)
    q_BHNK, k_BHSK = (jax.ShapeDtypeStruct((call.get("B", B), H, N, call.get("K", K)), dtype) for N in (256, S))
    call = {name: x for name, x in call.items() if name not in "BK"}
    assert attention.way(compute, q_BHNK, k_BHSK, k_BHSK, **{"mask": mask.causal, "scale": 1.0} | call).startswith(said)


def test_masks_of_unknown_arrays_are_not_known_but_padding_is():
    def known(length):
        assert mask.known(mask.prefix(length), np.arange(3), np.arange(3)) == (None, None)
        return length

    jax.jit(known)(jnp.int32(2))
    both = mask.both(mask.both(mask.causal, mask.padding(VALID_BS)), mask.padding(~VALID_BS))
    shown_NS, valid_BS = mask.known(both, np.arange(130), np.arange(130))
    np.testing.assert_array_equal(shown_NS, np.tri(130, dtype=bool))
    assert not np.asarray(valid_BS).any()
    shown_NS, valid_BS = mask.known(None, np.arange(2), np.arange(3))
    assert shown_NS.all() and shown_NS.shape == (2, 3) and valid_BS is None


@pytest.mark.parametrize(
    ("P", "size", "G", "who", "padding", "cap"),
    [(2, 128, 2, mask.causal, False, 0.0), (4, 65, H, mask.causal, True, 0.9), (2, 70, 1, None, False, 0.0)],
)
def test_devices_that_share_tokens_start_a_kernel_in_each_turn(P, size, G, who, padding, cap):
    """The tokens dealt out like cards; of the second sequence nothing may be seen where there is padding."""
    N, axis = P * size, "sequence"
    if padding:
        who = mask.both(who, mask.padding(np.arange(N) % 5 < np.array([[3], [0]])))
    qkv, n = drawn(N, N, G, G), np.arange(N).reshape(-1, P).T.ravel()
    mesh, tokens = jax.make_mesh((P,), (axis,), axis_types=(jax.sharding.AxisType.Auto,)), Spec(None, None, axis)

    def total(n, *qkv):
        y_BHNV, _ = SPLASH(*qkv, mask=who, scale=0.3, cap=cap, n=n, axis=axis)
        return jax.lax.psum(jnp.sum(jnp.sin(y_BHNV)), axis), y_BHNV

    sharded = jax.shard_map(total, mesh=mesh, in_specs=(Spec(axis), *[tokens] * 3), out_specs=(Spec(), tokens))
    run = jax.jit(jax.value_and_grad(sharded, argnums=(1, 2, 3), has_aux=True))
    (_, y_BHNV), slopes = jax.device_get(run(n, *[x[:, :, n] for x in qkv]))
    expected = jax.jit(functools.partial(gradients, compute=explicit.attention, who=who, cap=cap))(qkv)
    back = np.argsort(n)
    jax.tree.map(lambda a, b: cases.close(a[:, :, back], b, 2e-5), (y_BHNV, slopes), expected)
