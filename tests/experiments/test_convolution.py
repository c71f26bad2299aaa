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
from matplotlib import figure

from experiments import convolution
from experiments.figures import convolution as convolution_figure

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "convolution.py")


def drawn(heads: int) -> tuple[np.ndarray, np.ndarray]:
    """x_BND and kernel_HD."""
    return np.asarray(cases.normal(1, B, N, D)), np.asarray(cases.normal(2, heads, D))


@pytest.mark.parametrize("heads", [1, 2, 5, N])
@cases.float64()
def test_the_constructed_layer_is_the_convolution(heads):
    """Four ways to the same numbers: attention, sliding windows, numpy.convolve and loops."""
    x_BND, kernel_HD = drawn(heads)
    y_BND, _ = convolution.apply(convolution.constructed(kernel_HD, N=N), x_BND)
    cases.close(y_BND, convolution.convolved_by_numpy(x_BND, kernel_HD), 1e-13)
    cases.close(convolution.convolved(x_BND, kernel_HD), y_BND, 1e-6)
    assert convolution.convolved(x_BND, kernel_HD).dtype == np.float32
    Y = slow.depthwise_convolution(x_BND[1].T, kernel_HD.T, convolution.offsets(heads), edge=True)
    cases.close(y_BND[1], Y.T, 1e-13)


def test_offsets_are_centred():
    assert [list(convolution.offsets(heads)) for heads in (1, 4, 5)] == [[0], [-2, -1, 0, 1], [-2, -1, 0, 1, 2]]


@pytest.mark.parametrize("heads", [2, 5])
@cases.float64()
def test_the_learned_kernel_is_read_off_the_layer(heads):
    """Off the constructed one, and off the same layer with its heads mixed and its values taking them apart again."""
    x_BND, kernel_HD = drawn(heads)
    params = convolution.constructed(kernel_HD, N=N)
    A_HNS = np.asarray(convolution.apply(params, x_BND)[1][0])
    cases.close(convolution.learned_kernel(params, A_HNS), kernel_HD)
    mix_HH = np.asarray(cases.normal(3, heads, heads))
    V_HDD = np.einsum("hk,kde->hde", np.linalg.inv(mix_HH).T, params["value"]["V_HDD"])
    mixed = np.einsum("hk,kns->hns", mix_HH, A_HNS)
    cases.close(convolution.learned_kernel({"value": {"V_HDD": V_HDD}}, mixed), kernel_HD)


def test_tokens_are_pixel_columns():
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


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_a_run_from_its_command_to_its_figures(tmp_path):
    changes = ["--config.train.steps=30", "--config.train.evaluate_every=0", "--config.optim.warmup_steps=5"]
    outcome = tiny.run("--config", CONFIG, "--workdir", str(tmp_path / "run"), *changes)
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["constructed/largest_difference"] < 1e-6 < 1 < summary["constructed/largest_value"]
    assert f"numpy.convolve by at most {summary['constructed/largest_difference']:.1e}" in outcome.out
    assert 0 < summary["eval/loss"] < 0.9 * summary["baseline/loss"]
    assert summary["eval/explained"] == pytest.approx(1 - summary["eval/loss"] / summary["baseline/loss"], abs=1e-4)
    files = {file.name for file in (tmp_path / "run" / "figures").iterdir()}
    assert files == {"loss.png", "convolution.png", "images.png"}


def test_a_kernel_longer_than_the_rows_is_refused(tmp_path):
    outcome = tiny.run("--config", CONFIG, "--workdir", str(tmp_path / "run"), "--config.model.H=9")
    assert outcome.code == 2
    assert outcome.err == "error: a kernel of 9 pixels (model.H) does not fit into rows of 8 pixels\n"


@pytest.fixture
def drawings(monkeypatch) -> list[figure.Figure]:
    """Collects what would be written."""
    kept: list[figure.Figure] = []
    monkeypatch.setattr(convolution_figure.plots, "write", lambda drawing, path: kept.append(drawing))
    return kept


@pytest.mark.parametrize("heads", [1, 5, 11])
def test_the_figure_shows_kernels_and_weights(drawings, heads):
    kernel_HD, learned_HD = np.asarray(cases.normal(0, heads, D)), np.asarray(cases.normal(1, heads, D))
    learned_HNS, built_HNS = (np.random.default_rng(i).random((heads, 13, 13)) for i in range(2))
    offsets = convolution.offsets(heads)
    kernels = dict(kernel_HD=kernel_HD, learned_HD=learned_HD, offsets=offsets, difference=1.25e-7)
    convolution_figure.kernels_and_weights("a.png", **kernels, learned_HNS=learned_HNS, constructed_HNS=built_HNS)
    above, middle, below = drawings[0].subfigs
    true, learned, difference = (panel.images[0].get_array() for panel in above.axes[:3])
    np.testing.assert_array_equal(true, kernel_HD.T)
    np.testing.assert_array_equal(learned, learned_HD.T)
    np.testing.assert_array_equal(difference, learned - true)
    for part, A_HNS in ((middle, learned_HNS), (below, built_HNS)):
        panels = [panel for panel in part.axes if panel.images]
        assert len(panels) == min(heads, 8)
        np.testing.assert_array_equal([panel.images[0].get_array() for panel in panels], A_HNS[:8])
        assert ("(8 of 11 heads)" in part.get_suptitle()) == (heads == 11)
    assert "within 1.2e-07 of numpy.convolve" in below.get_suptitle()
    assert below.axes[heads // 2 if heads < 8 else 5].get_title() == "s = n"


def test_rows_of_images_share_one_scale_but_the_first(drawings):
    pictures = {name: np.random.default_rng(i).random((3, 4, 5)) * (i + 1) for i, name in enumerate("abc")}
    convolution_figure.rows_of_images("a.png", pictures, title="of $5")
    shown = [panel.images[0] for panel in drawings[0].axes]
    np.testing.assert_array_equal([image.get_array() for image in shown], np.concatenate([*pictures.values()]))
    both = np.concatenate([pictures["b"], pictures["c"]])
    assert shown[0].get_clim() == (pictures["a"].min(), pictures["a"].max())
    assert {image.get_clim() for image in shown[3:]} == {(both.min(), both.max())}
