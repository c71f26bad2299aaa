"""cuDNN's kernel: the masks that it gets as numbers, and its calls traced for a GPU. No test runs it.

On a CPU, fused.attention calls JAX's own implementation of `jax.nn.dot_product_attention` with the same arguments.
"""

import functools
import inspect
import re
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tfm.attention import explicit, fused, mask as masks

B, H, G, N, S, K, V = 4, 4, 2, 13, 17, 5, 7
LENGTH_B = np.array([13, 5, 1, 0])  # the longest sequence has no padding, the last one only padding


def causal_window(w: int) -> masks.Mask:
    """Return the mask of the last w tokens."""
    return masks.both(masks.causal, masks.window(w))


def end_padding(S: int, length_B=LENGTH_B) -> masks.Mask:
    """Return the mask of sequences of these lengths."""
    return masks.padding(jnp.arange(S) < length_B[:, None], at_end=True)


BANDS = {  # masks that the kernel computes
    "none": None,
    "causal": masks.causal,
    **{f"causal window {w}": causal_window(w) for w in (1, 4, 12, 13, 40)},
    "two windows": masks.both(causal_window(9), masks.window(3)),
    "padding": end_padding(N),
    "causal padding": masks.both(end_padding(N), masks.causal),
    **{f"padded window {w}": masks.both(causal_window(w), end_padding(N)) for w in (1, 4, 40)},
}


def test_masks_without_an_array_have_the_values_and_gradients_of_explicit_attention(monkeypatch):
    """A query whose window has only padding gets zeros, with zero gradient."""
    compute, calls = jax.nn.dot_product_attention, []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *qkv, **call: calls.append(call) or compute(*qkv, **call)
    )
    qkv = [cases.normal(i, B, H if i == 0 else G, N, V if i == 2 else K) for i in range(3)]

    def total(qkv, attend, the_mask):
        y_BHNV, _ = attend(*qkv, mask=the_mask, scale=0.7)
        return jnp.sin(y_BHNV + jnp.arange(V)).sum(), y_BHNV

    def compute_all(qkv, attend):
        return {name: jax.grad(total, has_aux=True)(qkv, attend, the_mask) for name, the_mask in BANDS.items()}

    results, expected = (jax.jit(compute_all, static_argnums=1)(qkv, f) for f in (fused.attention, explicit.attention))
    cases.assert_trees_close(results, expected, 1e-5)
    assert len(calls) == len(BANDS) and all(call.get("mask") is None for call in calls)
    y_BHNV = np.asarray(expected["padded window 4"][1])
    assert [int(y_BHNV[b].any((0, 2)).sum()) for b in range(B)] == [13, 8, 4, 0]


def test_other_keys_than_queries_may_have_padding():
    qkv = cases.normal(0, B, H, N, K), cases.normal(1, B, H, S, K), cases.normal(2, B, H, S, V)
    call = {"mask": end_padding(S, LENGTH_B + 4), "scale": 0.7}
    assert not fused.needs_array(call["mask"], N, S)
    attends = fused.attention, explicit.attention
    cases.assert_close(*jax.jit(lambda *qkv: [attend(*qkv, **call)[0] for attend in attends])(*qkv), 1e-5)


CALLS = {  # mask, positions of queries, first query -> arguments of jax.nn.dot_product_attention
    "none": (None, None, 0, {"is_causal": False}),
    "causal": (masks.causal, None, 0, {"is_causal": True}),
    "causal window": (causal_window(3), None, 0, {"is_causal": True, "local_window_size": (2, 0)}),
    "backwards": (masks.causal, np.arange(8)[::-1], 0, "array"),
    "later": (masks.causal, None, 4, "array"),
    "later padding": (end_padding(8, np.array([8, 0])), np.arange(4, 8), 4, {"is_causal": False, "lengths": [8, 1]}),
    "later window": (causal_window(3), None, 4, "array"),
    "window of both sides": (masks.window(3), None, 0, "array"),
    "arbitrary padding": (masks.padding(np.ones((2, 8), bool)), None, 0, "array"),
    "prefix": (masks.prefix(3), None, 0, "array"),
}


def test_cudnn_gets_an_array_only_for_a_mask_that_it_cannot_compute(monkeypatch):
    calls, arrays = {}, ("mask", "query_seq_lengths", "key_value_seq_lengths")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    @jax.jit
    def compute_all(x_BHNK):
        """Return the arrays that cuDNN's call gets for each mask. Its other arguments are in `calls`."""
        result = {}
        for name, (the_mask, n, first, _) in CALLS.items():
            with mock.patch.object(jax.nn, "dot_product_attention", side_effect=lambda q, *_, **call: q) as cudnn:
                fused.attention(x_BHNK[:, :, first:], x_BHNK, x_BHNK, mask=the_mask, scale=1.0, n=n)
            (calls[name],) = (dict(call.kwargs) for call in cudnn.call_args_list)
            result[name] = {array: calls[name].pop(array) for array in arrays if array in calls[name]}
        return result

    for name, result in compute_all(np.ones((2, 4, 8, 16), jnp.bfloat16)).items():
        (_, _, first, expected), call = CALLS[name], calls[name]
        assert call.pop("implementation") == "cudnn" and call.pop("scale") == 1.0, name
        if expected == "array":  # cuDNN needs even numbers of queries and keys
            assert call == {} and result.keys() == {"mask"}, name
            assert result["mask"].shape == (*((2, 4) if name == "arbitrary padding" else (1, 1)), 8 - first, 8), name
        else:
            options, lengths = expected.copy(), {}
            if "lengths" in options:
                lengths = {"query_seq_lengths": [8 - first] * 2, "key_value_seq_lengths": options.pop("lengths")}
            assert call == options and {array: x.tolist() for array, x in result.items()} == lengths, name


@pytest.mark.parametrize(
    ("dtype", "length", "features", "changes", "reason"),
    [
        (jnp.bfloat16, 8, 5, {"mask": masks.window(5)}, ""),
        (jnp.float16, 7, 5, {}, ""),  # the causal mask needs no array
        (jnp.bfloat16, 7, 5, {"mask": causal_window(5)}, ""),
        (jnp.bfloat16, 7, 5, {"mask": masks.window(5)}, "7 queries"),
        (jnp.bfloat16, 8, 129, {}, "128 features"),
        (jnp.bfloat16, 8, 5, {"bias": True}, "bias"),  # JAX 0.7.2 has the gradient of a bias for one shape only
    ],
)
def test_cudnn_refuses_what_it_cannot_do(monkeypatch, dtype, length, features, changes, reason):
    """test_splash.py tests other refusals: float32, capped logits."""
    x_BHNK = jax.ShapeDtypeStruct((1, 1, length, features), dtype)
    call = {"mask": masks.causal, "bias": False, "cap": 0.0} | changes
    monkeypatch.setattr(jax, "__version_info__", fused.MIN_JAX)
    limitation = fused.find_limitation(x_BHNK, x_BHNK, x_BHNK, **call)
    assert reason in limitation and bool(limitation) == bool(reason)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    assert (reason or "Install JAX 0.10.2") in fused.find_limitation(x_BHNK, x_BHNK, x_BHNK, **call)


@pytest.fixture
def lower(monkeypatch):
    """Return a function that lowers a program for a GPU, and returns cuDNN's calls and the kinds of their masks.

    JAX has no public way to trace cuDNN's call without a GPU, so its check of cuDNN's version is replaced.
    """
    call_cudnn = inspect.unwrap(jax.nn.dot_product_attention).__globals__["cudnn_dot_product_attention"]
    monkeypatch.setitem(call_cudnn.__globals__, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def lower_calls(function, *arrays) -> tuple[list[str], set[str]]:
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        kinds = re.findall(r"mask_type\\22: \\22(\w+)\\22", text)  # \22 is a quote
        return re.findall(r"@__cudnn\$fmha(\w+)", text), set(kinds)

    return lower_calls


KERNEL, WITH_ARRAY = ["Softmax", "SoftmaxBackward"], ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]
TRACED = {  # valid_BS -> mask; the calls, and the kind of mask in their settings
    "causal": (lambda valid_BS: masks.causal, KERNEL, "CAUSAL"),
    "padding": (lambda valid_BS: masks.padding(valid_BS, at_end=True), KERNEL, "PADDING"),
    "padded window": (
        lambda valid_BS: masks.both(causal_window(3), masks.padding(valid_BS, at_end=True)),
        KERNEL,
        "PADDING_CAUSAL",
    ),
    "arbitrary padding": (masks.padding, WITH_ARRAY, "NO_MASK"),
    "window of both sides": (lambda valid_BS: masks.window(3), WITH_ARRAY, "NO_MASK"),
}


def loss(q_BHNK, k_BHSK, v_BHSV, valid_BS, *, make_mask) -> jax.Array:
    """Return a number whose gradient depends on all outputs."""
    y_BHNV, _ = fused.attention(q_BHNK, k_BHSK, v_BHSV, mask=make_mask(valid_BS), scale=0.3)
    return jnp.sin(y_BHNV.astype(jnp.float32)).sum()


SHARED_HEADS = {"causal": H, "padding": G, "padded window": H, "arbitrary padding": G, "window of both sides": H}


@pytest.mark.parametrize(("name", "G"), SHARED_HEADS.items())
def test_a_study_of_several_seeds_is_traced_for_a_gpu(lower, name, G):
    """Rows of jax.vmap may have the same queries, or the same padding, which JAX before 0.12 does not repeat."""
    make_mask, calls, kind = TRACED[name]
    gradient = jax.grad(functools.partial(loss, make_mask=make_mask), (0, 1, 2))
    shapes = [jax.ShapeDtypeStruct((3, B, heads, 8, 16), jnp.bfloat16) for heads in (H, G, G)]
    valid_RBS = jax.ShapeDtypeStruct((3, B, 8), bool)
    assert lower(jax.vmap(gradient), *shapes, valid_RBS) == (calls, {kind})
    row, *rows = jax.ShapeDtypeStruct(shapes[0].shape[1:], jnp.bfloat16), *shapes[1:]
    shared = jax.ShapeDtypeStruct(valid_RBS.shape[1:], bool)
    text = str(jax.make_jaxpr(jax.vmap(gradient, in_axes=(None, 0, 0, None)))(row, *rows, shared))
    assert lower(jax.vmap(gradient, in_axes=(None, 0, 0, None)), row, *rows, shared) == (calls, {kind})
    assert name != "arbitrary padding" or f"bf16[{3 * B},{H},8,8]" in text  # a mask for every row, not for the first


@pytest.mark.skipif(jax.__version_info__ < fused.MIN_JAX, reason="find_limitation refuses this version of JAX")
@pytest.mark.parametrize("name", ["padded window", "arbitrary padding", "window of both sides"])
def test_a_training_step_on_two_devices_is_traced_for_a_gpu(lower, name):
    """The weights are the same on both devices, and their gradient is a sum over both."""
    make_mask, calls, kind = TRACED[name]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    data = PartitionSpec("data")

    def device_loss(b_HK, x_BHNK, valid_BS):
        x_BHNK = x_BHNK + b_HK[:, None]
        return jax.lax.psum(loss(x_BHNK, x_BHNK, x_BHNK, valid_BS, make_mask=make_mask), "data")

    step = jax.shard_map(
        jax.grad(device_loss), mesh=mesh, in_specs=(PartitionSpec(), data, data), out_specs=PartitionSpec()
    )
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((H, 16), (B, H, 8, 16))]
    assert lower(step, *arrays, jax.ShapeDtypeStruct((B, 8), bool)) == (calls, {kind})
