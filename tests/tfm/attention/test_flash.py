"""Attention that never holds the N x S weights, or asks the backend for them, equals the attention that does."""

import functools
import math
import re
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from experiments.engine import mesh
from tfm.attention import chunked, explicit, flash, fused, mask, relative_position, score, value

B, H, N, S, K, V = 2, 3, 23, 37, 5, 7
VALID_BS = np.random.default_rng(0).random((B, S)) > 0.3
BLOCKS = functools.partial(flash.attention, queries=8, keys=16)  # neither N nor S is a multiple


def in_chunks(*arguments, **settings):
    """In six chunks of four queries where the mask is known and saves something, and in one otherwise."""
    with mock.patch.multiple(chunked, SIDE=4, COUNT=6):
        return flash.attention(*arguments, **settings)


WAYS = {"flash": BLOCKS, "chunked": in_chunks, "fused": fused.attention, "explicit": explicit.attention}
TOLERANCE = {"flash": 1e-10, "chunked": 1e-10, "fused": 1e-5}  # fused has its softmax in float32


def blind(n, s_S):
    """The causal mask, but the query at position 30 sees nothing."""
    return mask.causal(n, s_S) & (n != 30)[..., None]


def all_three(valid_BS):
    return mask.both(mask.both(mask.causal, mask.padding(valid_BS)), mask.window(11))


MASKS = {
    "none": lambda valid_BS: None,
    "causal": lambda valid_BS: mask.causal,
    "padding": mask.padding,
    "window": lambda valid_BS: mask.window(5),
    "all three": all_three,
    "blind": lambda valid_BS: blind,
}
N_BN = jnp.arange(N) + jnp.array([[3], [11]])  # every sequence at its own positions
CASES = {  # mask, bias, heads of q, k, v, positions
    "none": ("none", True, (H, H, H), None),
    "causal": ("causal", False, (1, 1, H), None),
    "padding": ("padding", False, (H, H, H), None),
    "window": ("window", True, (1, 1, 1), None),
    "blind": ("blind", True, (H, H, H), None),
    "positions": ("all three", True, (H, H, H), N_BN),
}


def offsets(b_HR: jax.Array):
    """A learned bias for every offset s - n."""
    return Partial(lambda b_HR, n, s_S: jnp.moveaxis(b_HR[:, s_S - n[..., None] + b_HR.shape[1] // 2], 0, -3), b_HR)


def drawn(heads=(H, H, H), B: int = B) -> list[jax.Array]:
    """q, k, v and the parameters of a bias."""
    shapes = (B, heads[0], N, K), (B, heads[1], S, K), (B, heads[2], S, V), (H, 2 * S + 1)
    return [cases.normal(i, *shape) for i, shape in enumerate(shapes)]


def loss(arrays: list, valid_BS, n=None, *, way: str, name: str, bias: bool):
    """A number that every output moves, and the outputs."""
    q_BHNK, k_BHSK, v_BHSV, b_HR = arrays
    call = dict(mask=MASKS[name](valid_BS), bias=offsets(b_HR) if bias else None, n=n, scale=0.7)
    y_BHNV, _ = WAYS[way](q_BHNK, k_BHSK, v_BHSV, **call)
    return jnp.sin(y_BHNV + jnp.arange(V)).sum(), y_BHNV


def gradients(arrays, valid_BS, n=None, **settings):
    """The gradients of q, k, v and the bias, and the outputs."""
    return jax.grad(functools.partial(loss, **settings), has_aux=True)(arrays, valid_BS, n)


@pytest.mark.parametrize("case", CASES)
@cases.float64()
def test_values_and_gradients_equal_the_explicit_ones(case):
    name, bias, heads, n = CASES[case]
    arrays = drawn(heads)

    @jax.jit  # all in one program, since that takes a test the least time
    def every_way(arrays):
        return {way: gradients(arrays, VALID_BS, n, way=way, name=name, bias=bias) for way in WAYS}

    found = every_way(arrays)
    expected = found.pop("explicit")
    for way, each in found.items():
        cases.agree(each, expected, TOLERANCE[way])
    of_arrays, y_BHNV = expected
    assert y_BHNV.shape == (B, H, N, V)
    assert all(gradient.any() for gradient in of_arrays[:3]) and of_arrays[3].any() == bias
    row = 30 - (S - N)
    assert y_BHNV[:, :, row - 1].all() and y_BHNV[:, :, row].any() == of_arrays[0][:, :, row].any() == (case != "blind")


def test_the_size_of_a_block_changes_nothing():
    """In float32; 64 is more than there are tokens."""
    q_BHNK, k_BHSK, v_BHSV, b_HR = drawn()
    call = dict(mask=all_three(VALID_BS), scale=0.7, bias=offsets(b_HR))
    expected, _ = explicit.attention(q_BHNK, k_BHSK, v_BHSV, **call)
    for size in (1, 12, 64):
        compute = jax.jit(functools.partial(flash.attention, **call, queries=size, keys=size))
        found, weights = compute(q_BHNK, k_BHSK, v_BHSV)
        assert weights is None and found.dtype == jnp.float32
        cases.close(found, expected, 1e-5)


def test_chunks_see_the_keys_that_the_mask_allows_any_of_their_queries():
    def spans(mask, N=256, S=256, tables=48):
        cut = chunked.cut(mask, N, S, tables=tables)
        return cut and [(span.start, span.stop) for _, span in cut]

    assert spans(mask.causal) == [(0, 64), (0, 128), (0, 192), (0, 256)]
    assert spans(mask.causal, N=130, S=132) == [(0, 67), (0, 132)]  # the last queries of a longer sequence
    assert spans(mask.both(mask.causal, mask.window(10))) == [(0, 64), (55, 128), (119, 192), (183, 256)]
    assert spans(blind, N=256)[0] == (0, 64)
    assert spans(lambda n, s_S: (n > 99)[..., None] & (s_S > 9)) == [(0, 1), (10, 256), (10, 256), (10, 256)]
    assert spans(mask.padding(np.arange(256) < [[9], [70]])) == [(0, 70)] * 4  # the longest of the batch
    assert jax.jit(lambda valid_BS: spans(mask.padding(valid_BS)) is None)(np.ones((2, 256), bool))  # not known
    assert spans(None, N=50, S=50) == [(0, 50)] and spans(None) is None
    assert spans(mask.causal, N=1024, S=1024) is None and spans(mask.causal, tables=2000) is None


def test_large_logits_do_not_overflow():
    qkv = drawn()[:3]
    expected, _ = explicit.attention(*qkv, mask=mask.causal, scale=300.0)
    cases.close(BLOCKS(*qkv, mask=mask.causal, scale=300.0)[0], expected, 1e-4)


def test_bfloat16_is_close_to_float32():
    arrays = [x.astype(jnp.bfloat16) for x in drawn()[:3]] + drawn()[3:]

    @jax.jit
    def every_way(arrays):
        wide = [x.astype(jnp.float32) for x in arrays]
        exact = gradients(wide, VALID_BS, way="explicit", name="all three", bias=True)
        return exact, [gradients(arrays, VALID_BS, way=way, name="all three", bias=True) for way in TOLERANCE]

    exact, found = every_way(arrays)
    for of_arrays, y_BHNV in found:
        assert y_BHNV.dtype == jnp.bfloat16 and [x.dtype for x in of_arrays] == [x.dtype for x in arrays]
        cases.agree(jax.tree.map(lambda x: x.astype(jnp.float32), (of_arrays, y_BHNV)), exact, 2e-2)


# ------------------------------------------------------------------------------------------- transformations of JAX


@cases.float64()
def test_inside_a_loop_over_rematerialised_layers_under_vmap():
    """A bias and a mask of arrays that the loop, the checkpoint and vmap trace."""
    q_BHNK, k_BHSK, v_BHSV, b_HR = drawn()
    b_GMHR, valid_GBS = cases.normal(9, 2, 3, *b_HR.shape), np.stack([VALID_BS, ~VALID_BS])

    def stack(b_MHR, valid_BS, compute):
        @jax.checkpoint
        def layer(q_BHNK, b_HR):
            call = dict(mask=all_three(valid_BS), scale=0.7, bias=offsets(b_HR))
            return q_BHNK + compute(q_BHNK, k_BHSK, v_BHSV, **call)[0][..., :K], None

        return jnp.sin(jax.lax.scan(layer, q_BHNK, b_MHR)[0]).sum()

    def run(compute):
        return jax.jit(jax.vmap(jax.grad(functools.partial(stack, compute=compute))))(b_GMHR, valid_GBS)

    cases.agree(run(BLOCKS), run(explicit.attention))


@cases.float64()
def test_eight_devices_equal_one():
    """The mask's arrays are spread over the devices, which then skip different blocks; the bias is on all of them."""
    *qkv, b_HR = drawn(B=8)
    valid_BS = np.random.default_rng(1).random((8, S)) > 0.9

    def share(b_HR, qkv, valid_BS):
        def of(way):
            def total(arrays):
                return jax.lax.psum(loss(arrays, valid_BS, way=way, name="padding", bias=True)[0], mesh.DATA)

            *of_qkv, of_bias = jax.grad(total)([*qkv, b_HR])
            return [jax.lax.psum((x * x).sum((0, 2)), mesh.DATA) for x in of_qkv], of_bias

        return {way: of(way) for way in TOLERANCE}

    spread = jax.jit(mesh.sharded(share, mesh.make(data=8), in_specs=(P(), P("data"), P("data"))))
    one = jax.jit(functools.partial(gradients, way="explicit", name="padding", bias=True))
    *of_qkv, of_bias = one([*qkv, b_HR], valid_BS)[0]
    for way, found in spread(b_HR, qkv, valid_BS).items():
        cases.agree(found, ([(x * x).sum((0, 2)) for x in of_qkv], of_bias), TOLERANCE[way])


def test_blocks_that_the_mask_forbids_are_not_computed():
    computed = []

    def bias(n, s_S):
        jax.debug.callback(lambda n, s: computed.append((int(n), int(s))), n[0], s_S[0])
        return jnp.zeros((1, n.size, s_S.size))

    x_BHNK = cases.normal(0, 1, 1, 32, K)
    call = dict(mask=mask.causal, scale=1.0, bias=bias, queries=8, keys=8)
    jax.block_until_ready(flash.attention(x_BHNK, x_BHNK, x_BHNK, **call))
    jax.effects_barrier()
    assert sorted(computed) == [(n, s) for n in range(0, 32, 8) for s in range(0, n + 1, 8)]


def test_a_bias_of_constants_leaves_the_other_gradients_right():
    """alibi's slopes are constants: gradients are those of queries, keys and values alone."""
    alibi = Partial(functools.partial(relative_position.alibi.bias, H=H), {})
    qkv = drawn()[:3]

    def total(qkv):
        return BLOCKS(*qkv, mask=mask.causal, scale=0.7, bias=alibi)[0].sum()

    def expected(qkv):
        return explicit.attention(*qkv, mask=mask.causal, scale=0.7, bias=alibi)[0].sum()

    cases.agree(jax.jit(jax.grad(total))(qkv), jax.jit(jax.grad(expected))(qkv), 1e-5)


# ------------------------------------------------------------------------------------------------------------ fused


@pytest.mark.parametrize(
    ("backend", "dtype", "length", "features", "name", "expected"),
    [
        ("gpu", jnp.bfloat16, 8, 5, "window", "cudnn"),
        ("gpu", jnp.float16, 7, 5, "causal", "cudnn"),  # no dense mask
        ("gpu", jnp.bfloat16, 7, 5, "window", "xla"),
        ("gpu", jnp.float32, 8, 5, "window", "xla"),
        ("gpu", jnp.bfloat16, 8, 129, "none", "xla"),
        ("cpu", jnp.bfloat16, 8, 5, "none", "xla"),
    ],
)
def test_cudnn_is_asked_only_for_what_it_can_do(monkeypatch, backend, dtype, length, features, name, expected):
    asked, implementations = {}, set()

    def record(q_BNHK, k_BSHK, v_BSHV, **settings):
        asked.update(settings, features=q_BNHK.shape[-1])
        implementations.add(settings["implementation"])
        return v_BSHV

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    x_BHNK = jnp.ones((1, 1, length, features), dtype)
    jax.eval_shape(lambda x_BHNK: fused.attention(x_BHNK, x_BHNK, x_BHNK, mask=MASKS[name](None), scale=1.0), x_BHNK)
    assert ("cudnn" in implementations) == (expected == "cudnn") and asked["features"] % 8 == 0
    assert asked["is_causal"] == (name == "causal") and (asked["mask"] is None) == (name != "window")


# ----------------------------------------------------------------------------------------------------------- memory


def training_step(compute, N: int):
    """A step of a loop over two layers of attention to N tokens, compiled, and its parameters and tokens."""
    sizes = dict(H=1, K=8, D=8)
    params = {"score": cases.drawn(lambda key: score.asymmetric.init(key, **sizes, bias=True))}
    params |= {"value": cases.drawn(lambda key: value.low_rank.init(key, **sizes, M=1, bias=True))}
    x_BND = cases.normal(5, 1, N, 8)

    def error(params, x_BND):
        def layer(x_BND, _):
            q_BHNK, k_BHSK = score.asymmetric.apply(params["score"], x_BND, x_BND)
            v_BHSV = value.low_rank.apply(params["value"], x_BND)
            y_BHNV, _ = compute(q_BHNK, k_BHSK, v_BHSV, mask=mask.causal, scale=0.35)
            return x_BND + value.low_rank.combine(params["value"], y_BHNV), None

        return jnp.mean(jax.lax.scan(layer, x_BND, length=2)[0] ** 2)

    def step(params, x_BND):
        loss, gradient = jax.value_and_grad(error)(params, x_BND)
        return jax.tree.map(lambda leaf, d: leaf - 0.1 * d, params, gradient), loss

    return jax.jit(step).lower(params, x_BND).compile()


def largest(compiled) -> int:
    """The number of elements of the largest array in the compiled program."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_a_step_on_16384_tokens_never_holds_their_weights():
    steps = [training_step(flash.attention, n) for n in (4096, 16384)]
    temporary = [compiled.memory_analysis().temp_size_in_bytes for compiled in steps]
    assert temporary[1] < 4 * 16384**2 / 20, temporary
    assert temporary[1] < 4.4 * temporary[0], temporary  # a line, not a square
    assert largest(steps[1]) < 16384**2 / 100
    assert largest(training_step(explicit.attention, 512)) >= 512**2  # so the search would have found it
