"""Ring attention over sharded tokens equals attention on one device, and no device ever has all keys."""

import functools
import re

import averages
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.sharding import AxisType, Mesh, PartitionSpec

from tfm.attention import explicit, mask as masks

B, H, K, V = 2, 3, 5, 7
AXIS = "sequence"
RING = functools.partial(averages.in_blocks(5, 3), axis=AXIS)  # 11 tokens do not fill the last block
TOKENS = PartitionSpec(None, None, AXIS)


def draw(N: int, heads=(H, H, H)) -> dict[str, np.ndarray]:
    """Draw queries, keys and values, and the parameters of a bias."""
    shapes = {"q": (B, heads[0], N, K), "k": (B, heads[1], N, K), "v": (B, heads[2], N, V)}
    shapes |= {"b_HR": (max(H, *heads), 2 * N - 1)}
    return {name: np.array(cases.normal(i, *shape)) for i, (name, shape) in enumerate(shapes.items())}


def mesh(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def stripe(N: int, P: int) -> np.ndarray:
    """Return the positions of the tokens, device after device, if device i has the positions i, i + P, i + 2 P, ..."""
    return np.arange(N).reshape(-1, P).T.ravel()


def shuffle(N: int, P: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(N)


def reorder(tree: dict, n: np.ndarray) -> dict:
    """Return the tree with its tokens in the order of their positions n."""
    return {name: x if name == "b_HR" else x[:, :, n] for name, x in tree.items()}


def lower(arrays: dict, n: np.ndarray, P: int, **settings) -> jax.stages.Lowered:
    """Lower `averages.gradients` for P devices that share the tokens."""
    specs = {name: PartitionSpec() if name == "b_HR" else TOKENS for name in arrays}
    gradients = functools.partial(averages.gradients, attend=RING, axis_names=AXIS, **settings)
    options = dict(mesh=mesh(**{AXIS: P}), in_specs=(specs, PartitionSpec(AXIS)), out_specs=(specs, TOKENS))
    return jax.jit(jax.shard_map(gradients, **options)).lower(reorder(arrays, n), jnp.asarray(n))


@pytest.mark.parametrize(
    ("name", "P", "order", "bias", "heads", "cap"),
    [("padding", 2, shuffle, True, (H, H, H), 1.3), ("prefix", 4, stripe, False, (6, 2, 2), 0.0)],
)
@cases.float64()
def test_values_and_gradients_equal_those_of_one_device(name, P, order, bias, heads, cap):
    N, arrays = 11 * P, draw(11 * P, heads)
    n, settings = order(N, P), dict(name=name, bias=bias, N=N, cap=cap)
    on_one_device = jax.jit(functools.partial(averages.gradients, attend=explicit.attention, **settings))
    expected, y_BHNV = jax.device_get(on_one_device(arrays, np.arange(N)))
    result = lower(arrays, n, P, **settings).compile()(reorder(arrays, n), jnp.asarray(n))
    cases.assert_trees_close(result, (reorder(expected, n), reorder({"y": y_BHNV}, n)["y"]))
    assert y_BHNV.shape == (B, max(H, *heads), N, V)
    assert all(expected[x].any() for x in "qkv") and expected["b_HR"].any() == bias
    assert y_BHNV.any((1, 3)).all() == (name != "padding")  # with padding, some queries have no keys
    assert all(np.isfinite(gradient).all() for gradient in expected.values())


def test_bfloat16_is_sent_unconverted_and_summed_in_float32():
    arrays = {name: x if name == "b_HR" else x.astype(jnp.bfloat16) for name, x in draw(22).items()}
    lowered = lower(arrays, stripe(22, 2), 2, name="padding", bias=True, N=22)
    dtypes = re.findall(r"collective_permute\".*-> tensor<.*x([a-z]+\d+)>", lowered.as_text())
    # Keys, values, positions and valid tokens are sent twice. Two gradients are also sent after the last hop.
    assert sorted(dtypes) == ["bf16"] * 4 + ["f32"] * 4 + ["i1"] * 2 + ["i32"] * 2
    gradients, y_BHNV = lowered.out_info
    assert all(gradients[name].dtype == x.dtype for name, x in arrays.items()) and y_BHNV.dtype == jnp.bfloat16


@cases.float64()
def test_ring_attention_inside_scan_and_checkpoint_with_sharded_batches_equals_explicit_attention():
    """The mask's lengths are sharded over the axis `data`. The layers' biases are replicated."""
    N, P, length_B = 20, 4, jnp.array([20, 3, 7, 11])
    x_BHNK, b_MHR = np.array(cases.normal(0, 4, H, N, K)), cases.normal(1, 3, H, 2 * N - 1)
    n = stripe(N, P)

    def stack(x_BHNK, b_MHR, length_B, n, attend, axis_names=()):
        @jax.checkpoint
        def layer(x_BHNK, b_HR):
            mask = masks.both(masks.causal, masks.padding(jnp.arange(N) < length_B[:, None]))
            settings = dict(mask=mask, scale=0.7, bias=averages.offsets(b_HR), n=n)
            return x_BHNK + attend(x_BHNK, x_BHNK, x_BHNK, **settings)[0], None

        return jax.lax.psum(jnp.sin(jax.lax.scan(layer, x_BHNK, b_MHR)[0]).sum(), axis_names)

    replicated, tokens = PartitionSpec(), PartitionSpec("data", None, AXIS)
    on_ring = jax.shard_map(
        jax.value_and_grad(functools.partial(stack, attend=RING, axis_names=("data", AXIS)), (0, 1)),
        mesh=mesh(data=2, **{AXIS: P}),
        in_specs=(tokens, replicated, PartitionSpec("data"), PartitionSpec(AXIS)),
        out_specs=(replicated, (tokens, replicated)),
    )
    number, (dx_BHNK, db_MHR) = jax.device_get(jax.jit(on_ring)(x_BHNK[:, :, n], b_MHR, length_B, jnp.asarray(n)))
    on_one_device = jax.jit(jax.value_and_grad(functools.partial(stack, attend=explicit.attention), (0, 1)))
    expected = on_one_device(x_BHNK, b_MHR, length_B, jnp.arange(N))
    cases.assert_trees_close((number, (dx_BHNK[:, :, np.argsort(n)], db_MHR)), expected)


def lower_on_ring(
    P: int, *arguments: jax.Array, bias=None, gradient: bool = False, queries: int = 2
) -> jax.stages.Lowered:
    """Lower causal self-attention of tokens x_BHNK at positions n on P devices, or its gradient."""

    def attend(x_BHNK, n):
        call = dict(mask=masks.causal, scale=0.7, bias=bias, n=n, axis=AXIS)
        return averages.in_blocks(queries, queries)(x_BHNK, x_BHNK, x_BHNK, **call)[0]

    def number(x_BHNK, n):
        return jax.lax.psum(jnp.sin(attend(x_BHNK, n)).sum(), AXIS)

    function, specs = jax.grad(number) if gradient else attend, (TOKENS, PartitionSpec(AXIS))
    sharded = jax.shard_map(function, mesh=mesh(**{AXIS: P}), in_specs=specs, out_specs=TOKENS)
    return jax.jit(sharded).lower(*arguments)


def test_striped_tokens_give_every_device_the_same_number_of_blocks():
    """In each of 4 hops, a device computes the 10 of 4 x 4 blocks that the causal mask allows."""
    blocks = []

    def bias(n, s_S):
        jax.debug.callback(lambda n, s: blocks.append((int(n) % 4, int(s) % 4)), n[0], s_S[0])
        return jnp.zeros((1, n.size, s_S.size)) + 0 * n[:, None]

    arguments = cases.normal(0, 1, 1, 32, K), jnp.asarray(stripe(32, 4))
    jax.block_until_ready(lower_on_ring(4, *arguments, bias=bias).compile()(*arguments))
    jax.effects_barrier()
    assert sorted(blocks) == [(device, other) for device in range(4) for other in range(4) for _ in range(10)]


def test_keys_are_sent_around_the_ring_and_no_device_has_all_of_them():
    """A program may gather only integers: the positions of the tokens and whether they are valid."""
    arguments = jnp.ones((1, 1, 4096, K)), jnp.arange(4096)
    programs = [lower_on_ring(P, *arguments, gradient=True, queries=32).compile() for P in (2, 8)]
    collective = r"= (\w+\[[\d,]*\])\S* (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\("
    collectives = re.findall(collective, programs[1].as_text())
    assert {name for shape, name in collectives if shape != "s32[2,4096]"} == {"collective-permute"}
    memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert memory[1] < memory[0] / 3.3, memory


@pytest.mark.parametrize(("n", "S"), [(None, 4), (jnp.arange(4), 5), (jnp.ones((1, 4), int), 4)])
def test_sharded_tokens_need_positions_and_as_many_keys_as_queries(n, S):
    def attend(x):
        return RING(x[:, :, :4], x[:, :, :S], x[:, :, :S], mask=None, scale=1.0, n=n)[0]

    with raises(ValueError, "N = 4"):
        spec = PartitionSpec()
        run = jax.shard_map(attend, mesh=mesh(**{AXIS: 1}), in_specs=spec, out_specs=spec)
        jax.eval_shape(run, np.ones((1, 1, 5, K)))
