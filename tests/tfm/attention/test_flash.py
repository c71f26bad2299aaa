"""Flash, chunked and fused attention equal explicit attention without storing the N x S weights."""

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

from tfm.attention import explicit, flash, fused, mask as masks, relative_position

B, H, N, S, K, V = 2, 3, 23, 37, 5, 7
VALID_BS = np.random.default_rng(0).random((B, S)) > 0.3


def in_chunks(q_BHNK, k_BHSK, v_BHSV, *, mask, n=None, **call):
    """Attend in three chunks of eight queries if the mask is known and saves work, and in one otherwise."""
    with mock.patch.multiple(explicit, MIN_QUERIES=7, MAX_CHUNKS=3):
        chunks = explicit.cut_chunks(mask, q_BHNK.shape[2], k_BHSK.shape[2], tables=6)
    return explicit.attend_chunks(q_BHNK, k_BHSK, v_BHSV, chunks=chunks, mask=mask, **call)


FLASH = averages.in_blocks(8, 16)  # neither N nor S is a multiple
IMPLEMENTATIONS = {"flash": FLASH, "chunked": in_chunks, "fused": fused.attention, "explicit": explicit.attention}
TOLERANCE = {"flash": 1e-10, "chunked": 1e-10, "fused": 1e-5}  # fused has its softmax in float32


def self_bias(b_HR: jax.Array) -> Partial:
    """Return the bias that keeps tokens from attending to themselves if they have other keys. It ignores b_HR."""
    return Partial(relative_position.self_bias, None)


def blind_mask(n, s_S):
    """Return the causal mask, except that the query at position 30 has no keys."""
    return masks.causal(n, s_S) & (n != 30)[..., None]


def all_masks(valid_BS):
    return masks.both(masks.both(masks.causal, masks.padding(valid_BS)), masks.window(11))


def documents_mask(valid_BS):
    """Return the causal mask inside documents, which begin at the tokens that are not valid."""
    return masks.both(masks.causal, masks.documents(jnp.cumsum(~valid_BS, axis=1)))


N_BN = jnp.arange(N) + jnp.array([[3], [11]])  # each sequence has other positions
CASES = {  # mask, bias, heads of q, k, v, positions, cap
    "none": (lambda valid_BS: None, averages.offsets, (1, 1, 1), None, 0.0),
    "blind, capped": (lambda valid_BS: blind_mask, averages.offsets, (H, 1, H), None, 1.3),
    "alone": (lambda valid_BS: masks.window(1), self_bias, (1, 1, H), None, 0.0),
    "padding": (masks.padding, averages.offsets, (H, H, H), None, 0.0),
    "documents": (documents_mask, averages.offsets, (H, H, H), None, 0.0),
    "positions": (all_masks, averages.offsets, (H, H, H), N_BN, 0.0),
}


def draw(heads=(H, H, H)) -> list[jax.Array]:
    """Draw q, k, v and the parameters of a bias."""
    shapes = (B, heads[0], N, K), (B, heads[1], S, K), (B, heads[2], S, V), (H, 2 * S - 1)
    return [cases.normal(i, *shape) for i, shape in enumerate(shapes)]


def gradients(arrays: list, valid_BS, *, way: str, case: str) -> tuple[list, jax.Array]:
    """Return (gradients with respect to q, k, v and b_HR of a number that depends on every output, outputs)."""

    def total(arrays: list) -> tuple[jax.Array, jax.Array]:
        (q_BHNK, k_BHSK, v_BHSV, b_HR), (make_mask, bias, _, n, cap) = arrays, CASES[case]
        call = dict(mask=make_mask(valid_BS), bias=bias(b_HR), n=n, scale=0.7) | ({"cap": cap} if cap else {})
        y_BHNV, _ = IMPLEMENTATIONS[way](q_BHNK, k_BHSK, v_BHSV, **call)
        return jnp.sin(y_BHNV + jnp.arange(V)).sum(), y_BHNV

    return jax.grad(total, has_aux=True)(arrays)


@pytest.mark.parametrize("case", [case for case in CASES if case != "padding"])
@cases.float64()
def test_values_and_gradients_equal_the_explicit_ones(case):
    _, bias, heads, n, cap = CASES[case]
    arrays = draw(heads)
    skip = {"chunked": n is not None, "fused": cap or bias is not None}  # chunked attention needs the last positions
    ways = [way for way in IMPLEMENTATIONS if not skip.get(way)]
    # One program for all, because it compiles fastest.
    results = jax.device_get(
        jax.jit(lambda arrays: {w: gradients(arrays, VALID_BS, way=w, case=case) for w in ways})(arrays)
    )
    expected = results.pop("explicit")
    for way, result in results.items():
        cases.assert_trees_close(result, expected, TOLERANCE[way])
    (dq_BHNK, dk_BHSK, dv_BHSV, dbias), y_BHNV = expected
    assert y_BHNV.shape == (B, H, N, V) and dv_BHSV.any() and dbias.any() == (bias is averages.offsets)
    if case == "alone":  # the only weight is 1 and does not depend on the logit
        assert max(np.abs(dq_BHNK).max(), np.abs(dk_BHSK).max()) < 1e-15
        cases.assert_close(y_BHNV, arrays[2][:, :, S - N :])
    else:
        row = 30 - (S - N)
        assert dk_BHSK.any() and dq_BHNK[:, :, row - 1].any() and y_BHNV[:, :, row - 1].all()
        assert y_BHNV[:, :, row].any() == dq_BHNK[:, :, row].any() == (not case.startswith("blind"))


def test_neither_the_size_of_a_block_nor_large_logits_change_anything():
    """In float32, exp(300) is infinite, so the maximum must be subtracted."""
    *qkv, b_HR = draw()
    bias, mask = averages.offsets(b_HR), all_masks(VALID_BS)
    pairs = [(1, dict(mask=mask, scale=0.7)), (12, dict(mask=mask, scale=300.0)), (12, dict(mask=None, scale=300.0))]

    @jax.jit
    def compute_all(qkv):
        explicits = [explicit.attention(*qkv, bias=bias, **call)[0] for _, call in pairs]
        return explicits, [averages.in_blocks(n, n)(*qkv, bias=bias, **call) for n, call in pairs]

    for expected, (y_BHNV, weights), (_, call) in zip(*compute_all(qkv), pairs, strict=True):
        assert weights is None and y_BHNV.dtype == jnp.float32
        cases.assert_close(y_BHNV, expected, 1e-4 if call["scale"] > 1 else 1e-5)


def test_chunks_have_the_keys_that_any_of_their_queries_may_attend_to():
    def spans(mask, N=256, S=256, tables=48):
        cut = explicit.cut_chunks(mask, N, S, tables=tables)
        return cut and [(span.start, span.stop) for _, span in cut]

    assert spans(masks.causal) == [(0, 64), (0, 128), (0, 192), (0, 256)]
    assert spans(masks.causal, N=130, S=132) == [(0, 67), (0, 132)]  # the last queries of a longer sequence
    assert spans(masks.both(masks.causal, masks.window(10))) == [(0, 64), (55, 128), (119, 192), (183, 256)]
    assert spans(lambda n, s_S: (n > 99)[..., None] & (s_S > 9)) == [(0, 1), (10, 256), (10, 256), (10, 256)]
    assert spans(masks.padding(np.arange(256) < [[9], [70]])) == [(0, 70)] * 4  # the keys of the longest sequence
    documents = masks.documents(np.arange(256)[None] // 9)
    assert spans(masks.both(masks.causal, documents)) == spans(masks.causal) and spans(documents) is None
    assert spans(None, N=50, S=50) == [(0, 50)] and spans(None) is None
    assert spans(masks.causal, N=1024, S=1024) is None and spans(masks.causal, tables=2000) is None
    mask_makers = (masks.padding, lambda valid_BS: lambda n, s_S: valid_BS[:, None, s_S] & masks.causal(n, s_S))
    for make_mask in mask_makers:  # the mask is unknown: an argument, or an array in a closure, is traced
        assert jax.jit(lambda valid_BS, make_mask=make_mask: spans(make_mask(valid_BS)) is None)(
            np.ones((2, 256), bool)
        )


def test_bfloat16_is_close_to_float32_and_queries_are_not_rounded_again():
    arrays = [x.astype(jnp.bfloat16) for x in draw()[:3]] + draw()[3:]
    ways = ("explicit", "flash", "chunked")

    @jax.jit
    def compute_all(arrays, v_BHSV):
        wide_arrays = [x.astype(jnp.float32) for x in arrays]
        exact = gradients(wide_arrays, VALID_BS, way="explicit", case="padding")
        narrow = [gradients(arrays, VALID_BS, way=way, case="padding") for way in ways]
        averages_of_float32 = [IMPLEMENTATIONS["explicit"](*wide_arrays[:2], v_BHSV, mask=masks.causal, scale=0.7)]
        averages_of_float32 += [
            IMPLEMENTATIONS[way](*arrays[:2], v_BHSV, mask=masks.causal, scale=0.7) for way in ways[1:]
        ]
        return exact, narrow, [y_BHNV for y_BHNV, _ in averages_of_float32]

    exact, narrow, (expected, *averages_BHNV) = compute_all(arrays, draw()[2])
    for gradient, y_BHNV in narrow:
        assert y_BHNV.dtype == jnp.bfloat16 and [x.dtype for x in gradient] == [x.dtype for x in arrays]
        cases.assert_trees_close(jax.tree.map(lambda x: x.astype(jnp.float32), (gradient, y_BHNV)), exact, 2e-2)
    for y_BHNV in averages_BHNV:
        cases.assert_close(y_BHNV, expected, 1e-5)


@cases.float64()
def test_flash_attention_inside_scan_checkpoint_and_vmap_equals_explicit_attention():
    """scan, checkpoint and vmap trace the arrays of the bias and of the mask."""
    q_BHNK, k_BHSK, v_BHSV, b_HR = draw()
    b_GMHR, valid_GBS = cases.normal(9, 2, 3, *b_HR.shape), np.stack([VALID_BS, ~VALID_BS])

    def stack(b_MHR, valid_BS, way):
        @jax.checkpoint
        def layer(q_BHNK, b_HR):
            call = dict(mask=all_masks(valid_BS), scale=0.7, bias=averages.offsets(b_HR))
            return q_BHNK + IMPLEMENTATIONS[way](q_BHNK, k_BHSK, v_BHSV, **call)[0][..., :K], None

        return jnp.sin(jax.lax.scan(layer, q_BHNK, b_MHR)[0]).sum()

    gradients = (jax.vmap(jax.grad(functools.partial(stack, way=way))) for way in ("flash", "explicit"))
    cases.assert_trees_close(*(jax.jit(gradient)(b_GMHR, valid_GBS) for gradient in gradients))


def test_blocks_that_are_fully_masked_are_not_computed():
    blocks = []

    def bias(n, s_S):
        jax.debug.callback(lambda n, s: blocks.append((int(n), int(s))), n[0], s_S[0])
        return jnp.zeros((1, n.size, s_S.size))

    x_BHNK = cases.normal(0, 1, 1, 32, K)
    call = dict(mask=masks.causal, scale=1.0, bias=bias)
    jax.block_until_ready(jax.jit(functools.partial(averages.in_blocks(8, 8), **call))(*[x_BHNK] * 3))
    jax.effects_barrier()
    assert sorted(blocks) == [(n, s) for n in range(0, 32, 8) for s in range(0, n + 1, 8)]


def training_step(attend, N: int):
    """Compile a training step of a loop over two layers of attention to N tokens."""

    def error(scale, x_BHNK):
        def layer(x_BHNK, _):
            return x_BHNK + attend(scale * x_BHNK, x_BHNK, x_BHNK, mask=masks.causal, scale=0.35)[0], None

        return jnp.mean(jax.lax.scan(layer, x_BHNK, length=2)[0] ** 2)

    return jax.jit(jax.value_and_grad(error)).lower(1.0, jnp.ones((1, 1, N, 8))).compile()


def largest_array(program) -> int:
    """Return the number of elements of the largest array in the compiled program."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_a_step_on_16384_tokens_never_has_the_attention_matrix_in_memory():
    step = training_step(flash.attention, 16384)
    assert step.memory_analysis().temp_size_in_bytes < 4 * 16384**2 / 20
    assert largest_array(step) <= 16384 * 512
    # The search must find the weights of explicit attention.
    assert largest_array(training_step(explicit.attention, 512)) >= 512**2
