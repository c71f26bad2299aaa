"""Attention that never holds the N x S weights, or asks the backend for them, equals the attention that does."""

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
    """In three chunks of eight queries if the mask is known and saves something, and in one otherwise."""
    with mock.patch.multiple(chunked, SIDE=7, COUNT=3):
        chunks = chunked.cut(mask, q_BHNK.shape[2], k_BHSK.shape[2], tables=6)
    return chunked.attention(q_BHNK, k_BHSK, v_BHSV, chunks, mask=mask, **call), None


FLASH = functools.partial(flash.attention, queries=8, keys=16)  # neither N nor S is a multiple
WAYS = {"flash": FLASH, "chunked": in_chunks, "fused": fused.attention, "explicit": explicit.attention}
TOLERANCE = {"flash": 1e-10, "chunked": 1e-10, "fused": 1e-5}  # fused has its softmax in float32


def apart(b_HR: jax.Array) -> Partial:
    """Tokens attend to others if they can: a bias of constants."""
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
    "alone": (lambda valid_BS: mask.window(1), apart, (1, 1, H), None, 0.0),
    "padding": (mask.padding, averages.offsets, (H, H, H), None, 0.0),
    "positions": (all_three, averages.offsets, (H, H, H), N_BN, 0.0),
}


def drawn(heads=(H, H, H)) -> list[jax.Array]:
    """q, k, v and the parameters of a bias."""
    shapes = (B, heads[0], N, K), (B, heads[1], S, K), (B, heads[2], S, V), (H, 2 * S - 1)
    return [cases.normal(i, *shape) for i, shape in enumerate(shapes)]


def loss(arrays: list, valid_BS, *, way: str, case: str) -> tuple[jax.Array, jax.Array]:
    """A number that every output moves, and the outputs."""
    (q_BHNK, k_BHSK, v_BHSV, b_HR), (of_mask, bias, _, n, cap) = arrays, CASES[case]
    call = dict(mask=of_mask(valid_BS), bias=bias(b_HR), n=n, scale=0.7) | ({"cap": cap} if cap else {})
    y_BHNV, _ = WAYS[way](q_BHNK, k_BHSK, v_BHSV, **call)
    return jnp.sin(y_BHNV + jnp.arange(V)).sum(), y_BHNV


def gradients(arrays, valid_BS, **which) -> tuple[list, jax.Array]:
    """The gradients of q, k, v and the bias, and the outputs."""
    return jax.grad(functools.partial(loss, **which), has_aux=True)(arrays, valid_BS)


@pytest.mark.parametrize("case", [case for case in CASES if case != "padding"])
@cases.float64()
def test_values_and_gradients_equal_the_explicit_ones(case):
    arrays = drawn(CASES[case][2])
    *_, n, cap = CASES[case]  # chunks are always of the last tokens, and cuDNN knows no cap
    skip = {"chunked": n is not None, "fused": cap or CASES[case][1] is not None}  # cuDNN takes neither
    ways = [way for way in WAYS if not skip.get(way)]
    # All in one program, since that takes a test the least time.
    every = jax.jit(lambda arrays: {way: gradients(arrays, VALID_BS, way=way, case=case) for way in ways})
    found = jax.device_get(every(arrays))
    expected = found.pop("explicit")
    for way, each in found.items():
        cases.agree(each, expected, TOLERANCE[way])
    (dq_BHNK, dk_BHSK, dv_BHSV, dbias), y_BHNV = expected
    assert y_BHNV.shape == (B, H, N, V) and dv_BHSV.any() and dbias.any() == (CASES[case][1] is averages.offsets)
    if case == "alone":  # a weight is one whatever the logit is: nothing is to be learned from it
        assert max(np.abs(dq_BHNK).max(), np.abs(dk_BHSK).max()) < 1e-15
        cases.close(y_BHNV, arrays[2][:, :, S - N :])
    else:
        row = 30 - (S - N)
        assert dk_BHSK.any() and dq_BHNK[:, :, row - 1].any() and y_BHNV[:, :, row - 1].all()
        assert y_BHNV[:, :, row].any() == dq_BHNK[:, :, row].any() == (not case.startswith("blind"))


def test_neither_the_size_of_a_block_nor_large_logits_change_anything():
    """In float32, where exp(300) is infinite."""
    *qkv, b_HR = drawn()
    call = dict(mask=all_three(VALID_BS), bias=averages.offsets(b_HR))

    @jax.jit
    def every(qkv):
        expected = {scale: explicit.attention(*qkv, **call, scale=scale)[0] for scale in (0.7, 300.0)}
        pairs = (1, 0.7), (12, 300.0)
        return expected, [flash.attention(*qkv, **call, scale=scale, queries=n, keys=n) for n, scale in pairs]

    expected, found = every(qkv)
    assert all(weights is None and y_BHNV.dtype == jnp.float32 for y_BHNV, weights in found)
    for (y_BHNV, _), scale in zip(found, (0.7, 300.0), strict=True):
        cases.close(y_BHNV, expected[scale], 1e-4 if scale > 1 else 1e-5)


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
    for traced in masks:  # not known: as an argument, or within a function
        assert jax.jit(lambda valid_BS, traced=traced: spans(traced(valid_BS)) is None)(np.ones((2, 256), bool))


def test_bfloat16_is_close_to_float32():
    arrays = [x.astype(jnp.bfloat16) for x in drawn()[:3]] + drawn()[3:]

    @jax.jit
    def every_way(arrays):
        exact = gradients([x.astype(jnp.float32) for x in arrays], VALID_BS, way="explicit", case="padding")
        return exact, [gradients(arrays, VALID_BS, way=way, case="padding") for way in ("flash", "chunked")]

    exact, found = every_way(arrays)
    for of_arrays, y_BHNV in found:
        assert y_BHNV.dtype == jnp.bfloat16 and [x.dtype for x in of_arrays] == [x.dtype for x in arrays]
        cases.agree(jax.tree.map(lambda x: x.astype(jnp.float32), (of_arrays, y_BHNV)), exact, 2e-2)


def test_queries_of_bfloat16_are_not_rounded_again():
    """Values of float32 show it."""
    *qk, v_BHSV, _ = drawn()

    @jax.jit
    def every_way(*qk):
        wide = [x.astype(jnp.float32) for x in qk]
        sides = {"explicit": wide, "flash": qk, "chunked": qk}
        return {way: WAYS[way](*two, v_BHSV, mask=mask.causal, scale=0.7)[0] for way, two in sides.items()}

    found = every_way(*(x.astype(jnp.bfloat16) for x in qk))
    for way in ("flash", "chunked"):
        cases.close(found[way], found["explicit"], 1e-5)


@cases.float64()
def test_inside_a_loop_over_rematerialised_layers_under_vmap():
    """A bias and a mask of arrays that the loop, the checkpoint and vmap trace."""
    q_BHNK, k_BHSK, v_BHSV, b_HR = drawn()
    b_GMHR, valid_GBS = cases.normal(9, 2, 3, *b_HR.shape), np.stack([VALID_BS, ~VALID_BS])

    def stack(b_MHR, valid_BS, way):
        @jax.checkpoint
        def layer(q_BHNK, b_HR):
            call = dict(mask=all_three(valid_BS), scale=0.7, bias=averages.offsets(b_HR))
            return q_BHNK + WAYS[way](q_BHNK, k_BHSK, v_BHSV, **call)[0][..., :K], None

        return jnp.sin(jax.lax.scan(layer, q_BHNK, b_MHR)[0]).sum()

    def run(way):
        return jax.jit(jax.vmap(jax.grad(functools.partial(stack, way=way))))(b_GMHR, valid_GBS)

    cases.agree(run("flash"), run("explicit"))


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
        (jnp.float32, 8, 5, {}, "16 bits"),
        (jnp.bfloat16, 8, 129, {}, "128 features"),
        (jnp.bfloat16, 8, 5, {"bias": True}, "bias"),  # JAX 0.7.2 has its gradient for one shape only
        (jnp.bfloat16, 8, 5, {"cap": 30.0}, "capped"),
        (jnp.bfloat16, 8, 5, {"axis": "sequence"}, "devices"),
    ],
)
def test_cudnn_refuses_what_it_cannot_do(dtype, length, features, changes, reason):
    x_BHNK = jax.ShapeDtypeStruct((1, 1, length, features), dtype)
    call = {"mask": mask.causal, "bias": False, "cap": 0.0, "axis": None} | changes
    said = fused.refuse(x_BHNK, x_BHNK, x_BHNK, **call)
    assert reason in said and bool(said) == bool(reason)


@pytest.mark.parametrize(("name", "first"), [("causal", 0), ("backwards", 0), ("later", 4)])
def test_cudnn_forms_the_causal_mask_of_whole_sequences_by_itself(monkeypatch, name, first):
    asked = {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **settings: asked.update(settings) or q)
    x_BHNK, n = jax.ShapeDtypeStruct((1, 1, 8, 5), jnp.bfloat16), np.arange(8)[::-1] if name == "backwards" else None
    attend = functools.partial(fused.attention, mask=mask.causal, scale=1.0, n=n)
    jax.eval_shape(lambda x_BHNK: attend(x_BHNK[:, :, first:], x_BHNK, x_BHNK), x_BHNK)
    assert asked["implementation"] == "cudnn" and asked["is_causal"] == (name == "causal") == (asked["mask"] is None)


def training_step(compute, N: int):
    """A step of a loop over two layers of attention to N tokens, compiled."""

    def error(scale, x_BHNK):
        def layer(x_BHNK, _):
            return x_BHNK + compute(scale * x_BHNK, x_BHNK, x_BHNK, mask=mask.causal, scale=0.35)[0], None

        return jnp.mean(jax.lax.scan(layer, x_BHNK, length=2)[0] ** 2)

    return jax.jit(jax.value_and_grad(error)).lower(1.0, jnp.ones((1, 1, N, 8))).compile()


def largest(compiled) -> int:
    """The number of elements of the largest array in the compiled program."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_a_step_on_16384_tokens_never_holds_their_weights():
    step = training_step(flash.attention, 16384)
    assert step.memory_analysis().temp_size_in_bytes < 4 * 16384**2 / 20
    assert largest(step) <= 16384 * 512
    assert largest(training_step(explicit.attention, 512)) >= 512**2  # so the search would have found it


def test_the_mask_of_padding_has_every_head_for_cudnn(monkeypatch):
    """jax.vmap of a gradient reshapes it to (R B, H, N, S), up to JAX 0.12 without repeating heads."""
    shapes = []

    def record(q_BNHK, k_BSHK, v_BSHV, *, mask, **_):
        shapes.append(mask.shape)
        return q_BNHK

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    x_BHNK, valid_BS = jax.ShapeDtypeStruct((2, 4, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8), bool)
    jax.eval_shape(lambda x, valid: fused.attention(x, x, x, mask=mask.padding(valid), scale=1.0), x_BHNK, valid_BS)
    assert set(shapes) == {(2, 4, 8, 8)}
