"""Attention that never holds the N x S weights, or leaves them to the backend, equals explicit attention."""

import functools
import math
import re
from unittest import mock

import averages
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from tfm.attention import chunked, explicit, flash, fused, mask, relative_position

B, H, N, S, K, V = 2, 3, 23, 37, 5, 7
VALID_BS = np.random.default_rng(0).random((B, S)) > 0.3


def in_chunks(q_BHNK, k_BHSK, v_BHSV, *, mask, n=None, **call):
    """Attend in three chunks of eight queries if the mask is known and saves work, and in one otherwise."""
    with mock.patch.multiple(chunked, SIDE=7, COUNT=3):
        chunks = chunked.cut(mask, q_BHNK.shape[2], k_BHSK.shape[2], tables=6)
    return chunked.attention(q_BHNK, k_BHSK, v_BHSV, chunks, mask=mask, **call), None


FLASH = functools.partial(flash.attention, queries=8, keys=16)  # neither N nor S is a multiple
WAYS = {"flash": FLASH, "chunked": in_chunks, "fused": fused.attention, "explicit": explicit.attention}
TOLERANCE = {"flash": 1e-10, "chunked": 1e-10, "fused": 1e-5}  # fused has its softmax in float32


def self_bias(b_HR: jax.Array) -> Partial:
    """Return a bias of constants: tokens attend to others if they can."""
    return Partial(relative_position.self_bias, None)


def blind(n, s_S):
    """The causal mask, but the query at position 30 sees nothing."""
    return mask.causal(n, s_S) & (n != 30)[..., None]


def all_three(valid_BS):
    return mask.both(mask.both(mask.causal, mask.padding(valid_BS)), mask.window(11))


N_BN = jnp.arange(N) + jnp.array([[3], [11]])  # every sequence at its own positions
CASES = {  # mask, bias, heads of q, k, v, positions, cap
    "none": (lambda valid_BS: None, averages.offsets, (1, 1, 1), None, 0.0),
    "blind, capped": (lambda valid_BS: blind, averages.offsets, (H, 1, H), None, 1.3),
    "alone": (lambda valid_BS: mask.window(1), self_bias, (1, 1, H), None, 0.0),
    "padding": (mask.padding, averages.offsets, (H, H, H), None, 0.0),
    "positions": (all_three, averages.offsets, (H, H, H), N_BN, 0.0),
}


def draw(heads=(H, H, H)) -> list[jax.Array]:
    """Draw q, k, v and the parameters of a bias."""
    shapes = (B, heads[0], N, K), (B, heads[1], S, K), (B, heads[2], S, V), (H, 2 * S - 1)
    return [cases.normal(i, *shape) for i, shape in enumerate(shapes)]


def gradients(arrays: list, valid_BS, *, way: str, case: str) -> tuple[list, jax.Array]:
    """Return the gradients of q, k, v and the bias, of a number that depends on every output, and the outputs."""

    def total(arrays: list) -> tuple[jax.Array, jax.Array]:
        (q_BHNK, k_BHSK, v_BHSV, b_HR), (make_mask, bias, _, n, cap) = arrays, CASES[case]
        call = dict(mask=make_mask(valid_BS), bias=bias(b_HR), n=n, scale=0.7) | ({"cap": cap} if cap else {})
        y_BHNV, _ = WAYS[way](q_BHNK, k_BHSK, v_BHSV, **call)
        return jnp.sin(y_BHNV + jnp.arange(V)).sum(), y_BHNV

    return jax.grad(total, has_aux=True)(arrays)


@pytest.mark.parametrize("case", [case for case in CASES if case != "padding"])
@cases.float64()
def test_values_and_gradients_equal_the_explicit_ones(case):
    _, bias, heads, n, cap = CASES[case]
    arrays = draw(heads)
    skip = {"chunked": n is not None, "fused": cap or bias is not None}  # chunks are of the last tokens
    ways = [way for way in WAYS if not skip.get(way)]
    # All in one program, since that takes a test the least time.
    results = jax.device_get(
        jax.jit(lambda arrays: {w: gradients(arrays, VALID_BS, way=w, case=case) for w in ways})(arrays)
    )
    expected = results.pop("explicit")
    for way, result in results.items():
        cases.agree(result, expected, TOLERANCE[way])
    (dq_BHNK, dk_BHSK, dv_BHSV, dbias), y_BHNV = expected
    assert y_BHNV.shape == (B, H, N, V) and dv_BHSV.any() and dbias.any() == (bias is averages.offsets)
    if case == "alone":  # a weight is one, whatever the logit is
        assert max(np.abs(dq_BHNK).max(), np.abs(dk_BHSK).max()) < 1e-15
        cases.close(y_BHNV, arrays[2][:, :, S - N :])
    else:
        row = 30 - (S - N)
        assert dk_BHSK.any() and dq_BHNK[:, :, row - 1].any() and y_BHNV[:, :, row - 1].all()
        assert y_BHNV[:, :, row].any() == dq_BHNK[:, :, row].any() == (not case.startswith("blind"))


def test_neither_the_size_of_a_block_nor_large_logits_change_anything():
    """Attention is in float32, where exp(300) is infinite."""
    *qkv, b_HR = draw()
    bias, near = averages.offsets(b_HR), all_three(VALID_BS)
    pairs = [(1, dict(mask=near, scale=0.7)), (12, dict(mask=near, scale=300.0)), (12, dict(mask=None, scale=300.0))]

    @jax.jit
    def every(qkv):
        explicits = [explicit.attention(*qkv, bias=bias, **call)[0] for _, call in pairs]
        return explicits, [flash.attention(*qkv, bias=bias, **call, queries=n, keys=n) for n, call in pairs]

    for expected, (y_BHNV, weights), (_, call) in zip(*every(qkv), pairs, strict=True):
        assert weights is None and y_BHNV.dtype == jnp.float32
        cases.close(y_BHNV, expected, 1e-4 if call["scale"] > 1 else 1e-5)


def test_chunks_see_the_keys_that_the_mask_allows_any_of_their_queries():
    def spans(mask, N=256, S=256, tables=48):
        cut = chunked.cut(mask, N, S, tables=tables)
        return cut and [(span.start, span.stop) for _, span in cut]

    assert spans(mask.causal) == [(0, 64), (0, 128), (0, 192), (0, 256)]
    assert spans(mask.causal, N=130, S=132) == [(0, 67), (0, 132)]  # the last queries of a longer sequence
    assert spans(mask.both(mask.causal, mask.window(10))) == [(0, 64), (55, 128), (119, 192), (183, 256)]
    assert spans(lambda n, s_S: (n > 99)[..., None] & (s_S > 9)) == [(0, 1), (10, 256), (10, 256), (10, 256)]
    assert spans(mask.padding(np.arange(256) < [[9], [70]])) == [(0, 70)] * 4  # the longest of the batch
    assert spans(None, N=50, S=50) == [(0, 50)] and spans(None) is None
    assert spans(mask.causal, N=1024, S=1024) is None and spans(mask.causal, tables=2000) is None
    masks = (mask.padding, lambda valid_BS: lambda n, s_S: valid_BS[:, None, s_S] & mask.causal(n, s_S))
    for traced in masks:  # unknown, since an argument is traced, or since a function holds it
        assert jax.jit(lambda valid_BS, traced=traced: spans(traced(valid_BS)) is None)(np.ones((2, 256), bool))


def test_bfloat16_is_close_to_float32_and_queries_are_not_rounded_again():
    arrays = [x.astype(jnp.bfloat16) for x in draw()[:3]] + draw()[3:]
    ways = ("explicit", "flash", "chunked")

    @jax.jit
    def every_way(arrays, v_BHSV):
        wide = [x.astype(jnp.float32) for x in arrays]
        exact = gradients(wide, VALID_BS, way="explicit", case="padding")
        narrow = [gradients(arrays, VALID_BS, way=way, case="padding") for way in ways]
        averages_of_float32 = [WAYS["explicit"](*wide[:2], v_BHSV, mask=mask.causal, scale=0.7)]
        averages_of_float32 += [WAYS[way](*arrays[:2], v_BHSV, mask=mask.causal, scale=0.7) for way in ways[1:]]
        return exact, narrow, [y_BHNV for y_BHNV, _ in averages_of_float32]

    exact, narrow, (expected, *others) = every_way(arrays, draw()[2])
    for gradient, y_BHNV in narrow:
        assert y_BHNV.dtype == jnp.bfloat16 and [x.dtype for x in gradient] == [x.dtype for x in arrays]
        cases.agree(jax.tree.map(lambda x: x.astype(jnp.float32), (gradient, y_BHNV)), exact, 2e-2)
    for y_BHNV in others:
        cases.close(y_BHNV, expected, 1e-5)


@cases.float64()
def test_inside_a_loop_over_rematerialised_layers_under_vmap():
    """The loop, the checkpoint and vmap trace the arrays of the bias and of the mask."""
    q_BHNK, k_BHSK, v_BHSV, b_HR = draw()
    b_GMHR, valid_GBS = cases.normal(9, 2, 3, *b_HR.shape), np.stack([VALID_BS, ~VALID_BS])

    def stack(b_MHR, valid_BS, way):
        @jax.checkpoint
        def layer(q_BHNK, b_HR):
            call = dict(mask=all_three(valid_BS), scale=0.7, bias=averages.offsets(b_HR))
            return q_BHNK + WAYS[way](q_BHNK, k_BHSK, v_BHSV, **call)[0][..., :K], None

        return jnp.sin(jax.lax.scan(layer, q_BHNK, b_MHR)[0]).sum()

    gradients = (jax.vmap(jax.grad(functools.partial(stack, way=way))) for way in ("flash", "explicit"))
    cases.agree(*(jax.jit(gradient)(b_GMHR, valid_GBS) for gradient in gradients))


def test_blocks_that_the_mask_forbids_are_not_computed():
    computed = []

    def bias(n, s_S):
        jax.debug.callback(lambda n, s: computed.append((int(n), int(s))), n[0], s_S[0])
        return jnp.zeros((1, n.size, s_S.size))

    x_BHNK = cases.normal(0, 1, 1, 32, K)
    call = dict(mask=mask.causal, scale=1.0, bias=bias, queries=8, keys=8)
    jax.block_until_ready(jax.jit(functools.partial(flash.attention, **call))(*[x_BHNK] * 3))
    jax.effects_barrier()
    assert sorted(computed) == [(n, s) for n in range(0, 32, 8) for s in range(0, n + 1, 8)]


@pytest.mark.parametrize(
    ("dtype", "length", "features", "changes", "reason"),
    [
        (jnp.bfloat16, 8, 5, {"mask": mask.window(5)}, ""),
        (jnp.float16, 7, 5, {}, ""),  # the causal mask needs no array
        (jnp.bfloat16, 7, 5, {"mask": mask.window(5)}, "7 queries"),
        (jnp.bfloat16, 8, 129, {}, "128 features"),
        (jnp.bfloat16, 8, 5, {"bias": True}, "bias"),  # JAX 0.7.2 has its gradient for one shape only
        (jnp.bfloat16, 8, 5, {"axis": "sequence"}, "devices"),
    ],
)
def test_cudnn_refuses_what_it_cannot_do(dtype, length, features, changes, reason):
    """test_splash.py has more: products of 32 bits, capped logits."""
    x_BHNK = jax.ShapeDtypeStruct((1, 1, length, features), dtype)
    call = {"mask": mask.causal, "bias": False, "cap": 0.0, "axis": None} | changes
    refusal = fused.refuse(x_BHNK, x_BHNK, x_BHNK, **call)
    assert reason in refusal and bool(refusal) == bool(reason)


CUDNN = {  # mask, positions, first query, whether the kernel makes the mask
    "causal": (mask.causal, None, 0, True),
    "backwards": (mask.causal, np.arange(8)[::-1], 0, False),
    "later": (mask.causal, None, 4, False),
    "padding": (mask.padding(np.ones((2, 8), bool)), None, 0, False),
}


@pytest.mark.parametrize("name", CUDNN)
def test_cudnn_makes_the_causal_mask_of_whole_sequences_and_gets_other_masks_for_every_head(monkeypatch, name):
    """jax.vmap of a gradient reshapes a mask to (R B, H, N, S), up to JAX 0.12 without repeating heads."""
    (the_mask, n, first, is_causal), call = CUDNN[name], {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **settings: call.update(settings) or q)
    x_BHNK = jax.ShapeDtypeStruct((2, 4, 8, 16), jnp.bfloat16)
    attend = functools.partial(fused.attention, mask=the_mask, scale=1.0, n=n)
    jax.eval_shape(lambda x_BHNK: attend(x_BHNK[:, :, first:], x_BHNK, x_BHNK), x_BHNK)
    assert call["implementation"] == "cudnn" and call["is_causal"] == is_causal == (call["mask"] is None)
    assert name != "padding" or call["mask"].shape == (2, 4, 8, 8)


def training_step(attend, N: int):
    """Compile a training step of a loop over two layers of attention to N tokens."""

    def error(scale, x_BHNK):
        def layer(x_BHNK, _):
            return x_BHNK + attend(scale * x_BHNK, x_BHNK, x_BHNK, mask=mask.causal, scale=0.35)[0], None

        return jnp.mean(jax.lax.scan(layer, x_BHNK, length=2)[0] ** 2)

    return jax.jit(jax.value_and_grad(error)).lower(1.0, jnp.ones((1, 1, N, 8))).compile()


def largest(compiled) -> int:
    """Return the number of elements of the largest array in the compiled program."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_a_step_on_16384_tokens_never_holds_their_weights():
    step = training_step(flash.attention, 16384)
    assert step.memory_analysis().temp_size_in_bytes < 4 * 16384**2 / 20
    assert largest(step) <= 16384 * 512
    assert largest(training_step(explicit.attention, 512)) >= 512**2  # so the search would find them
