"""The experiment that shows attention to contain convolution (E28), from its construction to its figures."""

import json
import pathlib

import cases
import jax
import numpy as np
import pytest
import reference_positions as slow
import tiny
from cases import B, D, N

from experiments import convolution

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "convolution.py")


def drawn(heads: int) -> tuple[np.ndarray, np.ndarray]:
    """x_BND and kernel_HD."""
    return np.asarray(cases.normal(1, B, N, D)), np.asarray(cases.normal(2, heads, D))


@pytest.mark.parametrize("heads", [1, 2, 5, N])
@cases.float64()
def test_the_constructed_layer_is_the_convolution(heads):
    """Four ways to the same numbers: attention, sliding windows, numpy.convolve and loops."""
    x_BND, kernel_HD = drawn(heads)
    params = convolution.constructed(kernel_HD, N=N)
    y_BND, A_BHNS = convolution.apply(params, x_BND)
    cases.close(y_BND, convolution.convolved_by_numpy(x_BND, kernel_HD), 1e-13)
    cases.close(convolution.convolved(x_BND, kernel_HD), y_BND, 1e-6)
    assert convolution.convolved(x_BND, kernel_HD).dtype == np.float32
    Y = slow.depthwise_convolution(x_BND[1].T, kernel_HD.T, convolution.offsets(heads), edge=True)
    cases.close(y_BND[1], Y.T, 1e-13)
    if heads < N:  # else no token has all its offsets within the sequence
        A_HNS = np.asarray(A_BHNS[0])
        cases.close(convolution.learned_kernel(params, A_HNS), kernel_HD)
        mix_HH = np.asarray(cases.normal(3, heads, heads))  # heads mixed, and values that take them apart again
        V_HDD = np.einsum("hk,kde->hde", np.linalg.inv(mix_HH).T, params["value"]["V_HDD"])
        mixed = np.einsum("hk,kns->hns", mix_HH, A_HNS)
        cases.close(convolution.learned_kernel({"value": {"V_HDD": V_HDD}}, mixed), kernel_HD)


def test_offsets_are_centred_and_tokens_are_pixel_columns():
    assert [list(convolution.offsets(heads)) for heads in (1, 4, 5)] == [[0], [-2, -1, 0, 1], [-2, -1, 0, 1, 2]]
    image_BYXZ = np.arange(2 * 3 * 5 * 2).reshape(2, 3, 5, 2)
    x_BND = convolution.columns(image_BYXZ)
    assert x_BND.shape == (2, 5, 6)
    np.testing.assert_array_equal(x_BND[1, 4], image_BYXZ[1, :, 4].ravel())


def test_the_weights_follow_from_positions_alone():
    params = convolution.init(jax.random.key(0), H=3, K=1, D=D, N=N)
    assert not params["relative_position"]["b_HR"].any() and params["score"] == {}
    params["relative_position"]["b_HR"] = cases.normal(4, 3, 2 * N - 1)
    one, other = (convolution.apply(params, cases.normal(seed, 1, N, D)) for seed in (1, 2))
    np.testing.assert_array_equal(one[1], other[1])
    assert not np.allclose(one[0], other[0])


def test_a_run_from_its_command_to_its_figures(tmp_path):
    changes = "train.steps=30 train.evaluate_every=0 optim.warmup_steps=5 mesh.data=1".split()
    words = [f"--config.{change}" for change in changes]
    outcome = tiny.run("--config", CONFIG, "--workdir", str(tmp_path / "run"), *words)
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["constructed/largest_difference"] < 1e-6 < 1 < summary["constructed/largest_value"]
    assert f"numpy.convolve by at most {summary['constructed/largest_difference']:.1e}" in outcome.out
    assert 0 < summary["learned/largest_kernel_error"] < 10
    assert 0 < summary["eval/loss"] < 0.9 * summary["baseline/loss"]
    assert summary["eval/explained"] == pytest.approx(1 - summary["eval/loss"] / summary["baseline/loss"], abs=1e-4)
    files = {file.name for file in (tmp_path / "run" / "figures").iterdir()}
    assert files == {"loss.png", "convolution.png", "images.png"}
    outcome = tiny.run("--config", CONFIG, "--workdir", str(tmp_path / "more"), "--config.model.H=9")
    assert outcome.code == 2
    assert outcome.err == "error: a kernel of 9 pixels (model.H) does not fit into rows of 8 pixels\n"
