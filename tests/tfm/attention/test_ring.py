"""Attention over tokens that are spread over devices equals attention on one, and no device ever holds all keys."""

import functools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.tree_util import Partial

from tfm.attention import explicit, flash, mask, nan_guard

B, H, K, V = 2, 3, 5, 7
AXIS = "sequence"
BLOCKS = functools.partial(flash.attention, queries=5, keys=3)  # of 11 tokens: both have blocks that are filled up
LENGTH_B = np.array([40, 3])  # with a window, queries of the second sequence see nothing
NAMES, TOKENS = ("q", "k", "v", "b_HR"), PartitionSpec(None, None, AXIS)


def padded(N: int) -> mask.Mask:
    """A causal window over sequences of unequal lengths, an array that is whole on every device."""
    valid_BS = jnp.arange(N) < LENGTH_B[:, None]
    return mask.both(mask.both(mask.causal, mask.window(9)), mask.padding(valid_BS))


MASKS = {
    "none": lambda N: None,
    "causal": lambda N: mask.causal,
    "window": lambda N: mask.both(mask.causal, mask.window(9)),
    "padding": padded,
    "prefix": lambda N: mask.either(mask.causal, mask.prefix(LENGTH_B)),
}


def offsets(b_HR: jax.Array):
    """A learned bias for every offset s - n."""
    return Partial(lambda b_HR, n, s_S: jnp.moveaxis(b_HR[:, s_S - n[..., None] + b_HR.shape[1] // 2], 0, -3), b_HR)


def drawn(N: int, heads=(H, H, H)) -> dict[str, jax.Array]:
    """Queries, keys and values, and the parameters of a bias."""
    shapes = (B, heads[0], N, K), (B, heads[1], N, K), (B, heads[2], N, V), (H, 2 * N + 1)
    return {name: cases.normal(i, *shape) for i, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))}


def loss(
    arrays: dict, n: jax.Array, *, compute, name: str, bias: bool, N: int, **axis: str
) -> tuple[jax.Array, jax.Array]:
    """A number that every output moves if it is finite, and the outputs."""
    settings = dict(mask=MASKS[name](N), bias=offsets(arrays["b_HR"]) if bias else None, n=n, scale=0.7, **axis)
    y_BHNV, _ = nan_guard.guarded(compute)(arrays["q"], arrays["k"], arrays["v"], **settings)
    return jnp.where(jnp.isfinite(y_BHNV), jnp.sin(y_BHNV + jnp.arange(V)), 0).sum(), y_BHNV


def mesh(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def striped(N: int, P: int) -> np.ndarray:
    """The positions of the tokens, device after device: dealt out like cards."""
    return np.arange(N).reshape(-1, P).T.ravel()


def contiguous(N: int, P: int) -> np.ndarray:
    return np.arange(N)


def mixed(N: int, P: int) -> np.ndarray:
    """Every sequence in an order of its own: (B, N)."""
    return np.stack([np.random.default_rng(b).permutation(N) for b in range(B)])


def dealt(tree: dict, n: np.ndarray) -> dict:
    """The tree with its tokens in the order of their positions n, (N,) or (B, N)."""

    def order(x_BHNK: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_BHNK, jnp.asarray(n)[:, None, :, None], 2) if n.ndim == 2 else x_BHNK[:, :, n]

    return {name: x if name == "b_HR" else order(x) for name, x in tree.items()}


def spread(arrays: dict, n: np.ndarray, P: int, **settings) -> jax.stages.Lowered:
    """`gradients` where each of P devices has its share of the tokens, not yet compiled."""
    specs = {name: PartitionSpec() if name == "b_HR" else TOKENS for name in arrays}
    run = jax.shard_map(
        functools.partial(gradients, compute=BLOCKS, axis=AXIS, **settings),
        mesh=mesh(**{AXIS: P}),
        in_specs=(specs, PartitionSpec(*[None] * (n.ndim - 1), AXIS)),
        out_specs=(specs, TOKENS),
    )
    return jax.jit(run).lower(dealt(arrays, n), jnp.asarray(n))


def gradients(arrays: dict, n: jax.Array, *, compute, **settings) -> tuple[dict, jax.Array]:
    """The gradients of the arrays, summed over the devices, and the outputs."""

    def total(arrays: dict) -> tuple[jax.Array, jax.Array]:
        number, y_BHNV = loss(arrays, n, compute=compute, **settings)
        return jax.lax.psum(number, settings.get("axis", ())), y_BHNV

    return jax.grad(total, has_aux=True)(arrays)


def check(arrays: dict, P: int, order=striped, **settings) -> tuple[dict, jax.Array]:
    """Equal to `explicit` on one device, whose gradients and outputs are returned."""
    N = arrays["q"].shape[2]
    n, settings = order(N, P), settings | dict(N=N)
    whole = jax.jit(functools.partial(gradients, compute=explicit.attention, **settings))
    expected, y_BHNV = whole(arrays, jnp.arange(N))
    found = spread(arrays, n, P, **settings).compile()(dealt(arrays, n), jnp.asarray(n))
    jax.tree.map(cases.close, found, (dealt(expected, n), dealt({"y": y_BHNV}, n)["y"]))
    return expected, y_BHNV


# ------------------------------------------------------------------------------------------------ equal to explicit


@pytest.mark.parametrize(
    ("name", "P", "order", "bias", "heads"),
    [
        ("none", 2, striped, True, (H, H, H)),
        ("causal", 4, striped, False, (1, 1, H)),
        ("window", 2, contiguous, True, (1, 1, 1)),
        ("padding", 2, mixed, True, (H, H, H)),
        ("prefix", 8, contiguous, False, (H, H, H)),
    ],
)
@cases.float64()
def test_values_and_gradients_equal_those_of_one_device(name, P, order, bias, heads):
    found, y_BHNV = check(drawn(11 * P, heads), P, order, name=name, bias=bias)
    assert y_BHNV.shape == (B, H, 11 * P, V)
    assert all(found[x].any() for x in "qkv") and found["b_HR"].any() == bias
    assert y_BHNV.any((1, 3)).all() == (name != "padding")  # there, some queries see nothing


@cases.float64()
def test_nan_stays_behind_the_mask():
    """In the key of token 19 and the value of token 20, which earlier queries do not see, and in a padding."""
    arrays = drawn(22)
    arrays["k"] = arrays["k"].at[0, :, 19, 2].set(np.nan).at[1, 1, 7, 3].set(np.inf)
    arrays["v"] = arrays["v"].at[0, 1, 20, 2].set(-np.inf).at[1, 1, 7, 3].set(np.nan)
    found, y_BHNV = check(arrays, 2, name="padding", bias=True)
    assert jnp.isnan(y_BHNV[0, :, 19:]).all() and jnp.isfinite(y_BHNV[0, :, :19]).all()
    assert jnp.isfinite(y_BHNV[1]).all() and all(jnp.isfinite(gradient).all() for gradient in found.values())


def test_bfloat16_travels_as_it_is_and_is_summed_in_float32():
    N, P, settings = 22, 2, dict(name="padding", bias=True, N=22)
    arrays, n = drawn(N), striped(N, P)
    exact, y_BHNV = jax.jit(functools.partial(gradients, compute=explicit.attention, **settings))(arrays, jnp.arange(N))
    arrays = {name: x if name == "b_HR" else x.astype(jnp.bfloat16) for name, x in arrays.items()}
    lowered = spread(arrays, n, P, **settings)
    sent = re.findall(r"collective_permute\".*-> tensor<.*x([a-z]+\d+)>", lowered.as_text())
    # Keys, values, positions and what is real, twice; two gradients, also after the last turn.
    assert sorted(sent) == ["bf16"] * 4 + ["f32"] * 4 + ["i1"] * 2 + ["i32"] * 2
    found = lowered.compile()(dealt(arrays, n), jnp.asarray(n))
    assert all(found[0][name].dtype == x.dtype for name, x in arrays.items()) and found[1].dtype == jnp.bfloat16
    expected = dealt(exact, n), dealt({"y": y_BHNV}, n)["y"]
    cases.agree(jax.tree.map(lambda x: x.astype(jnp.float32), found), expected, 3e-2)


@cases.float64()
def test_inside_a_loop_over_rematerialised_layers_beside_an_axis_of_data():
    """The mask's lengths are spread over the axis of data; the biases of the layers are on all devices."""
    N, P, length_B = 20, 4, jnp.array([20, 3, 7, 11])
    x_BHNK, b_MHR = cases.normal(0, 4, H, N, K), cases.normal(1, 3, H, 2 * N + 1)
    n = striped(N, P)

    def stack(x_BHNK, b_MHR, length_B, n, compute):
        @jax.checkpoint
        def layer(x_BHNK, b_HR):
            allowed = mask.both(mask.causal, mask.padding(jnp.arange(N) < length_B[:, None]))
            settings = dict(mask=allowed, scale=0.7, bias=offsets(b_HR), n=n)
            return x_BHNK + compute(x_BHNK, x_BHNK, x_BHNK, **settings)[0], None

        return jnp.sin(jax.lax.scan(layer, x_BHNK, b_MHR)[0]).sum()

    def share(*arguments):
        ring = functools.partial(BLOCKS, axis=AXIS)
        total = lambda *two: jax.lax.psum(stack(*two, *arguments[2:], ring), ("data", AXIS))  # noqa: E731
        return jax.value_and_grad(total, (0, 1))(*arguments[:2])

    everywhere, tokens = PartitionSpec(), PartitionSpec("data", None, AXIS)
    run = jax.shard_map(
        share,
        mesh=mesh(data=2, **{AXIS: P}),
        in_specs=(tokens, everywhere, PartitionSpec("data"), PartitionSpec(AXIS)),
        out_specs=(everywhere, (tokens, everywhere)),
    )
    number, (dx_BHNK, db_MHR) = jax.jit(run)(x_BHNK[:, :, n], b_MHR, length_B, jnp.asarray(n))
    whole = jax.jit(jax.value_and_grad(functools.partial(stack, compute=explicit.attention), (0, 1)))
    expected = whole(x_BHNK, b_MHR, length_B, jnp.arange(N))
    jax.tree.map(cases.close, (number, (dx_BHNK[:, :, np.argsort(n)], db_MHR)), expected)


# ------------------------------------------------------------------------------------------------- what it costs


def compiled(P: int, N: int = 4096):
    """The gradient of the causal attention over N tokens on P devices."""

    def step(arrays: dict, n: jax.Array) -> dict:
        def total(arrays: dict) -> jax.Array:
            settings = dict(mask=mask.causal, scale=0.7, n=n, axis=AXIS, queries=32, keys=32)
            return jax.lax.psum(jnp.sin(flash.attention(*arrays.values(), **settings)[0]).sum(), AXIS)

        return jax.grad(total)(arrays)

    arrays = {name: jnp.ones((1, 1, N, K)) for name in "qkv"}
    run = jax.shard_map(step, mesh=mesh(**{AXIS: P}), in_specs=(TOKENS, PartitionSpec(AXIS)), out_specs=TOKENS)
    return jax.jit(run).lower(arrays, jnp.arange(N)).compile()


def test_cards_dealt_are_the_same_work_for_every_device():
    """In each of 4 turns the 10 of 4 x 4 blocks that the causal mask does not forbid."""
    computed = []

    def bias(n, s_S):
        jax.debug.callback(lambda n, s: computed.append((int(n) % 4, int(s) % 4)), n[0], s_S[0])
        return jnp.zeros((1, n.size, s_S.size)) + 0 * n[:, None]

    def step(x_BHNK, n):
        settings = dict(mask=mask.causal, scale=0.7, bias=bias, n=n, axis=AXIS, queries=2, keys=2)
        return flash.attention(x_BHNK, x_BHNK, x_BHNK, **settings)[0]

    run = jax.shard_map(step, mesh=mesh(**{AXIS: 4}), in_specs=(TOKENS, PartitionSpec(AXIS)), out_specs=TOKENS)
    jax.block_until_ready(jax.jit(run)(cases.normal(0, 1, 1, 32, K), jnp.asarray(striped(32, 4))))
    jax.effects_barrier()
    assert sorted(computed) == [(device, other) for device in range(4) for other in range(4) for _ in range(10)]


@pytest.mark.parametrize(("n", "S"), [(None, 4), (jnp.arange(4), 5)])
def test_spread_tokens_need_their_positions_and_as_many_keys(n, S):
    x_BHNK = jnp.ones((1, 1, 5, K))
    with pytest.raises(ValueError, match="positions n, and a key each: 4 queries and"):
        jax.shard_map(
            lambda x: BLOCKS(x[:, :, :4], x[:, :, :S], x[:, :, :S], mask=None, scale=1.0, n=n, axis=AXIS)[0],
            mesh=mesh(**{AXIS: 1}),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )(x_BHNK)


def test_keys_go_around_and_no_device_ever_holds_all_of_them():
    few, many = compiled(2), compiled(8)
    assert set(re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", many.as_text())) == {
        "collective-permute",
    }
    memory = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    assert memory[1] < memory[0] / 3.3, memory
