"""Attention can compute convolutions (E28): a layer whose weights depend only on positions learns one from images.

An image is a sequence of pixel columns, and the target is a depthwise convolution of its rows (data/depthwise.py). The
layer is Y = sum_h V_h X A_h, with a head h for each offset o_h of the kernel. All scores are 0, so A_h depends only on
the biases b_h(s - n) of key s and query n.
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.config import errors, settings as configs
from experiments.data import depthwise, images
from experiments.engine import run as runs, train_step
from experiments.model import baselines, losses, splits
from tfm import initial, layout as layouts
from tfm.attention import explicit, heads as attentions, relative_position, score, value

STAGES = {"score": score.constant, "relative_position": relative_position.relative, "value": value.full_rank}
STEEP = 1000.0  # exp(-1000) is 0 in float32 and float64: a weight is 1 or 0
COMPARED = 64  # number of held-out images on which the constructed layer is compared with numpy


def config() -> dict[str, dict]:
    """Return {"image": {"source": (default, help)}}, the only setting of the images."""
    source = ("digits", "digits (scikit-learn), mnist, fashion_mnist, or a path to IDX files or an .npz")
    return {"image": {"source": source}}


def prepare(settings: configs.Settings, mesh: Mesh) -> runs.Work:
    """Prepare images convolved with a random kernel, the layer that learns this, its loss, and the figures."""
    data = images.load_described(settings.image.source)
    _, Y, X, Z = data.train_image_BYXZ.shape
    H, D = choose_heads(settings, X), Y * Z
    kernel_HD = np.random.default_rng(settings.seed).standard_normal((H, D)) / np.sqrt(H)
    (train, n_train), (evaluation, n_evaluation), normal = images.make_examples(data)
    fields = splits.make_splits(
        settings,
        (depthwise.examples(train, kernel_HD), n_train),
        (depthwise.examples(evaluation, kernel_HD), n_evaluation),
        tokens=X,
    )
    average_YXZ = (data.train_image_BYXZ.mean(axis=0, dtype=np.float64) - normal["mean_Z"]) / normal["std_Z"]
    average_ND = depthwise.convolve(depthwise.columns(average_YXZ[None]), kernel_HD)[0]

    def loss(
        params: Any, batch: dict, *, key_B: jax.Array | None = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[train_step.Ratios, dict]:
        y_BND, _ = apply(params, batch["x_BND"])
        return losses.explain_variance(y_BND, batch["target_BND"], average_ND, batch["weight_BN"]), {}

    baseline = functools.partial(
        baselines.average_error,
        target=lambda batch: batch["target_BND"],
        average_NP=average_ND,
        guess="the average training image, convolved",
    )
    task = train_step.Task(
        init=functools.partial(init, H=H, D=D, N=X),
        loss=loss,
        baseline=baseline,
        **fields,
    )
    return runs.Work(
        task,
        figures=functools.partial(figures, settings, data, kernel_HD),
        apply=lambda params, batch: apply(params, batch["x_BND"])[0],
        lines=data.lines,
        data_sha256=data.sha256,
    )


def choose_heads(settings: configs.Settings, X: int) -> int:
    """Return model.H, the number of heads: one for each weight of the kernel, which moves along rows of X pixels.

    Raises UserError unless 1 <= H <= X, or if model.G or model.K is set.
    """
    H, G, K = settings.model.H, settings.model.G, settings.model.K
    configs.at_least(1, {"model.H": H}, most=X)
    if G != H or "model.K" in settings.list_chosen():
        setting = f"model.G = {G}" if G != H else f"model.K = {K}"
        raise errors.UserError(f"{setting} has no meaning: this layer has no queries and keys. Leave it out")
    return H


def init(key: jax.Array, *, H: int, D: int, N: int) -> dict:
    """Return the initial parameters: b_h(s - n) = 0, and random V_h. There are no queries and keys, so K = 0."""
    sizes = {"score": {"D": D, "bias": False}, "relative_position": {"N": N}, "value": {"D": D, "M": 1, "bias": False}}
    return {name: STAGES[name].init(initial.key(key, name), H=H, K=0, **sizes[name]) for name in STAGES}


def apply(params: dict, x_BND: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return Y = sum_h V_h X A_h, and the weights A_BHNS, which are the same for every image."""
    H = params["value"]["V_HDD"].shape[0]
    spec = attentions.Spec(**STAGES, attend=explicit.attention, scale=score.SCALES["1"], H=H)
    aux = {"measures": {}, "look": {}}
    y_BND = attentions.self_attention(params, x_BND, spec, attentions.Call(look=("A",)), aux)
    return y_BND, aux["look"]["A"]


def construct(kernel_HD: np.ndarray, *, N: int) -> dict:
    """Return parameters with which the layer is the convolution: V_h = diag(kernel_h), and A_h selects key n + o_h.

    N: columns of an image. o_h = h - H // 2 is the offset of head h. If n + o_h is outside the image, A_h selects the
    nearest column. The bias b_h is so steep that all other columns have weight 0.
    """
    distance_HR = np.abs(np.arange(1 - N, N) - depthwise.offsets(len(kernel_HD))[:, None])
    V_HDD = np.stack([np.diag(kernel_D) for kernel_D in kernel_HD])
    b_HR = jnp.asarray(-STEEP * distance_HR, float)
    return {"score": {}, "relative_position": {"b_HR": b_HR}, "value": {"V_HDD": jnp.asarray(V_HDD, float)}}


def extract_kernel(params: dict, A_HNS: np.ndarray) -> np.ndarray:
    """Return the kernel_HD of a layer: for each of H offsets o, the mean over n of sum_h (V_h)_{d,d} A_{h,n,n+o}.

    params: of this attention layer. The offsets are depthwise.offsets(H). The mean is over the queries n whose offsets
    all lie in the sequence. A head may attend to several offsets, because only the sum over heads matters.
    """
    H, N = A_HNS.shape[:2]
    n = np.arange(H // 2, N - (H - 1) // 2)
    A_OH = np.array([A_HNS[:, n, n + o].mean(1) for o in depthwise.offsets(H)])
    return A_OH @ np.asarray(params["value"]["V_HDD"]).diagonal(axis1=1, axis2=2)


def figures(
    settings: configs.Settings, data: images.Images, kernel_HD: np.ndarray, work: runs.Work, params, folder, rows
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Yield a dict of the errors of the constructed layer and the learned kernel, then paths of figures.

    The figures show the loss, kernels and images. kernel_HD: the true kernel, from which the layer is constructed.
    """
    from experiments.figures import (
        convolution as convolution_figures,
        plots,
    )  # import matplotlib, which takes a second

    x_BND, folder = work.task.evaluation[0]["x_BND"][:COMPARED], folder / "figures"
    true_BND = depthwise.convolve_by_numpy(x_BND, kernel_HD)
    with jax.default_matmul_precision("highest"):  # without this, some accelerators round the factors of a product
        constructed_BND, constructed_BHNS = jax.jit(apply)(construct(kernel_HD, N=x_BND.shape[1]), x_BND)
    learned_BND, learned_BHNS = jax.jit(apply)(params, x_BND)
    learned_HNS = np.asarray(learned_BHNS[0])
    learned_HD = extract_kernel(params, learned_HNS)
    difference, largest = float(np.abs(constructed_BND - true_BND).max()), float(np.abs(true_BND).max())
    error = float(np.abs(learned_HD - kernel_HD).max())
    print(f"  constructed layer: differs from numpy.convolve by at most {difference:.1e} (largest value {largest:.1f})")
    print(f"  learned kernel: error at most {error:.1e} (largest entry {np.abs(kernel_HD).max():.1f})")
    yield {
        "constructed/largest_difference": difference,
        "constructed/largest_value": largest,
        "learned/largest_kernel_error": error,
    }
    title = f"{settings.experiment}: {data.name}"
    yield plots.loss_curves(folder / "loss.png", rows, unit="squared error", title=title)
    yield convolution_figures.kernels_and_weights(
        folder / "convolution.png",
        kernel_HD=kernel_HD,
        learned_HD=learned_HD,
        offsets=depthwise.offsets(len(kernel_HD)),
        learned_HNS=learned_HNS,
        constructed_HNS=np.asarray(constructed_BHNS[0]),
        difference=difference,
    )
    tokens = {"input": x_BND, "numpy.convolve": true_BND, "learned": learned_BND, "constructed": constructed_BND}
    title = f"{data.name}: held-out images, each pixel row convolved"
    yield convolution_figures.convolved_images(
        folder / "images.png", tokens, Z=data.train_image_BYXZ.shape[-1], title=title
    )
