"""The experiment that constructs convolution as attention (E28), from the construction to the figures."""

import cases
import jax
import numpy as np
import pytest
import reference_positions as slow
import tiny
from cases import B, D, N
from errors import raises

from experiments import convolution
from experiments.config import errors
from experiments.data import depthwise

APPLY = jax.jit(convolution.apply)


def draw(heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random x_BND and kernel_HD."""
    return np.asarray(cases.normal(1, B, N, D)), np.asarray(cases.normal(2, heads, D))


@pytest.mark.parametrize("heads", [1, 2, 5, N])
@cases.float64()
def test_the_constructed_layer_equals_the_convolution(heads):
    """Attention, sliding windows, numpy.convolve and loops give the same numbers."""
    x_BND, kernel_HD = draw(heads)
    params = convolution.construct(kernel_HD, N=N)
    y_BND, A_BHNS = jax.device_get(APPLY(params, x_BND))
    cases.assert_close(y_BND, depthwise.convolve_by_numpy(x_BND, kernel_HD), 1e-13)
    cases.assert_close(depthwise.convolve(x_BND, kernel_HD), y_BND, 1e-6)
    assert depthwise.convolve(x_BND, kernel_HD).dtype == np.float32
    Y = slow.depthwise_convolution(x_BND[1].T, kernel_HD.T, depthwise.offsets(heads), edge=True)
    cases.assert_close(y_BND[1], Y.T, 1e-13)
    if heads < N:  # otherwise no token has all its offsets within the sequence
        A_HNS = np.asarray(A_BHNS[0])
        cases.assert_close(convolution.extract_kernel(params, A_HNS), kernel_HD)
        mix_HH = np.asarray(cases.normal(3, heads, heads))  # mixed heads, with values that invert the mixture
        V_HDD = np.einsum("hk,kde->hde", np.linalg.inv(mix_HH).T, params["value"]["V_HDD"])
        mixed_HNS = np.einsum("hk,kns->hns", mix_HH, A_HNS)
        cases.assert_close(convolution.extract_kernel({"value": {"V_HDD": V_HDD}}, mixed_HNS), kernel_HD)


def test_tokens_are_pixel_columns():
    image_BYXZ = np.arange(2 * 3 * 5 * 2).reshape(2, 3, 5, 2)
    x_BND = depthwise.columns(image_BYXZ)
    assert x_BND.shape == (2, 5, 6)
    np.testing.assert_array_equal(x_BND[1, 4], image_BYXZ[1, :, 4].ravel())


def test_the_weights_depend_on_positions_alone():
    params = jax.jit(lambda key: convolution.init(key, H=3, D=D, N=N))(jax.random.key(0))
    assert not params["relative_position"]["b_HR"].any() and params["score"] == {}
    params["relative_position"]["b_HR"] = cases.normal(4, 3, 2 * N - 1)
    (_, A_BHNS), (_, expected) = (APPLY(params, cases.normal(seed, 1, N, D)) for seed in (1, 2))
    np.testing.assert_array_equal(A_BHNS, expected)


def test_the_metrics_and_figures_of_the_task(tmp_path):
    settings = tiny.settings("convolution", model=False, **{"model.H": 5, "mesh.data": 1})
    work, (files, numbers), out = tiny.make_figures(settings, tmp_path, [{"step": 1, "train/loss": 2.0}])
    assert [file.name for file in files] == ["loss.png", "convolution.png", "images.png"]
    assert numbers["constructed/largest_difference"] < 1e-6 < 1 < numbers["constructed/largest_value"]
    assert f"numpy.convolve by at most {numbers['constructed/largest_difference']:.1e}" in out
    task, params = work.task, tiny.draw_params(work.task)
    x_BND, A_HNS = task.evaluation[0]["x_BND"], np.asarray(APPLY(params, task.evaluation[0]["x_BND"])[1][0])
    kernel_HD = np.random.default_rng(0).standard_normal((5, 8)) / np.sqrt(5)
    error = np.abs(convolution.extract_kernel(params, A_HNS) - kernel_HD).max()
    assert numbers["learned/largest_kernel_error"] == pytest.approx(error, rel=1e-4)
    cases.assert_close(task.evaluation[0]["target_BND"], depthwise.convolve_by_numpy(x_BND, kernel_HD), 1e-5)
    measure = tiny.measure(task)
    batch_measures = [jax.device_get(measure(params, batch)) for batch in task.evaluation]
    loss, explained = (np.sum([one[name] for one in batch_measures], axis=0) for name in ("loss", "explained"))
    assert explained[0] / explained[1] == pytest.approx(1 - loss[0] / loss[1] / tiny.baseline(task)["loss"], rel=1e-4)


def test_a_kernel_longer_than_the_rows_is_refused():
    with raises(errors.UserError, "model.H", 8, 9):
        tiny.task_of(tiny.settings("convolution", model=False, model__H=9))
