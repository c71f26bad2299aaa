"""The statistics of the batch norm (E17): on one device, on eight, and what a loss asks of them."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import reference_tokens
import translate
from cases import B, D, N
from jax.sharding import PartitionSpec as P

from experiments.engine import by_name, mesh
from tfm import layout, norm

KEPT = {"mean_D", "var_D"}


def drawn_params() -> dict:
    params = cases.drawn(lambda key: norm.batch.init(key, D=D))
    return params | {"var_D": jnp.square(params["var_D"]) + 0.1}


def eight_devices(function, *, batched: tuple[bool, ...]):
    """The compiled function on eight devices, each with an eighth of what is batched."""
    return jax.jit(mesh.sharded(function, mesh.make(data=8), in_specs=tuple(P("data") if b else P() for b in batched)))


def gathered(x_BND: jax.Array) -> jax.Array:
    """The whole batch on every device: each puts its share among zeros, and the devices are added."""
    share = jnp.arange(8) == jax.lax.axis_index(mesh.DATA)
    return jax.lax.psum(share[:, None, None, None] * x_BND, mesh.DATA).reshape(-1, *x_BND.shape[1:])


@cases.float64()
def test_the_statistics_of_a_batch_equal_the_reference():
    """And with them a batch has mean shift and variance gain^2, feature by feature."""
    params, x_BND = drawn_params(), cases.normal(1, B, N, D) * 3 + 2
    observed = norm.batch.observe(x_BND)
    means, variances = reference_tokens.batch_statistics([translate.columns(x) for x in x_BND])
    assert set(observed) == KEPT < set(params)
    cases.close(observed["mean_D"], means)
    cases.close(observed["var_D"], variances)
    y_BND = np.asarray(norm.batch.apply(params | observed, x_BND, eps=0.0))
    cases.close(y_BND.mean((0, 1)), params["shift_D"])
    cases.close(y_BND.var((0, 1)), np.square(params["gain_D"]))


def test_only_the_batch_norm_keeps_statistics():
    assert {name for name, chosen in by_name.candidates(norm).items() if chosen.observe} == {"batch"}


def test_a_large_mean_leaves_the_variance_its_digits():
    """float32 holds 10000^2 to the nearest 8 only, so E[x^2] - E[x]^2 would be noise; the means themselves to 0.001."""
    x_BND = cases.normal(1, 8, 61, D) + 1e4
    exact = np.var(np.asarray(x_BND, np.float64), axis=(0, 1))
    cases.close(norm.batch.observe(x_BND)["var_D"], exact, 1e-3)
    spread = eight_devices(
        lambda x_BND: norm.batch.observe(x_BND, layout=layout.Layout(batch=(mesh.DATA,))), batched=(True,)
    )
    cases.close(spread(x_BND)["var_D"], exact, 1e-3)


def test_bfloat16_tokens_have_float32_statistics():
    """A mean of 9 hides the last bits of what bfloat16 would add up."""
    x_BND = (cases.normal(1, B, 47, D) + 9).astype(jnp.bfloat16)
    observed = norm.batch.observe(x_BND)
    means, variances = reference_tokens.batch_statistics([translate.columns(x) for x in x_BND])
    assert observed["mean_D"].dtype == observed["var_D"].dtype == np.float32
    cases.close(observed["mean_D"], means, 1e-5)
    cases.close(observed["var_D"], variances, 1e-5)


def whole_loss(params: dict, x_BND: jax.Array, axis: str | None):
    """A loss over all devices in which every token meets every other: (loss, (statistics, output))."""
    observed = norm.batch.observe(x_BND, axis=axis)
    y_BND = norm.batch.apply(params | observed, x_BND, eps=1e-5)
    total = jnp.sum(jnp.sin(y_BND) * jnp.cos(x_BND) + y_BND**3)
    total = total if axis is None else jax.lax.psum(total, axis)
    return total + jnp.sum(observed["mean_D"] * observed["var_D"]), (observed, y_BND)


def test_eight_devices_equal_one_in_statistics_output_and_gradients():
    """The devices' shares differ in their means, so a device could not do with its own."""
    params, x_BND = drawn_params(), cases.normal(1, 16, N, D) + 10 * cases.normal(2, 16, 1, D)
    differentiated = jax.value_and_grad(whole_loss, argnums=(0, 1), has_aux=True)

    def local(params, x_BND):
        (loss, (observed, y_BND)), (of_params, of_x) = differentiated(params, x_BND, mesh.DATA)
        return (loss, (observed, gathered(y_BND))), (of_params, gathered(of_x))

    one = jax.jit(lambda params, x_BND: differentiated(params, x_BND, None))(params, x_BND)
    eight = eight_devices(local, batched=(False, True))(params, x_BND)
    jax.tree.map(lambda spread, single: cases.close(spread, single, 1e-5), eight, one)
    assert min(np.abs(leaf).max() for leaf in (one[1][0]["gain_D"], one[1][0]["shift_D"], one[1][1])) > 1


@cases.float64()
def test_gradients_pass_through_the_statistics():
    """As through the formula written out, in which mean and variance are functions of the tokens."""
    params, x_BND, w_BND = drawn_params(), cases.normal(1, B, N, D), cases.normal(2, B, N, D)

    def by_hand(x_BND):
        return jnp.sum(w_BND * params["gain_D"] * (x_BND - x_BND.mean((0, 1))) / jnp.sqrt(x_BND.var((0, 1)) + 0.1))

    def observed(x_BND):
        return jnp.sum(w_BND * norm.batch.apply(params | norm.batch.observe(x_BND), x_BND, eps=0.1))

    cases.close(jax.grad(observed)(x_BND), jax.grad(by_hand)(x_BND))


def test_training_asks_nothing_of_the_running_averages():
    """Their gradient is exactly zero while the batch's own statistics are used, so no optimiser moves them."""
    params, x_BND = drawn_params(), cases.normal(1, B, N, D)
    of_params = jax.grad(lambda params: whole_loss(params, x_BND, None)[0])(params)
    assert not of_params["mean_D"].any() and not of_params["var_D"].any()
    assert of_params["gain_D"].all() and of_params["shift_D"].all()


def test_a_token_in_evaluation_does_not_depend_on_its_batch():
    """Nor on the length of its sequence: only the averages of past batches stand between it and the result."""
    params, x_BND = drawn_params(), cases.normal(1, B, N, D)
    y_BND = norm.batch.apply(params, x_BND, eps=1e-5)
    np.testing.assert_array_equal(norm.batch.apply(params, x_BND[1:, 2:3], eps=1e-5), y_BND[1:, 2:3])
