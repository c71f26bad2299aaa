"""Attention contains convolution (E28): a layer that knows positions only learns a convolution of real pixel rows.

An image is a sequence of its pixel columns, and the target is a depthwise convolution of its rows (data/depthwise.py).
The layer is Y = sum_h V_h X A_h, with a head h for each offset o_h of the kernel. All scores are 0: A_h follows from
the biases b_h(s - n) alone.
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.build import baselines, losses, splits
from experiments.data import depthwise, images
from experiments.engine import config as configs, errors, run, train_step
from tfm import initial, layout as layouts
from tfm.attention import explicit, heads, relative_position, score, spec as attentions, value

STAGES = {"score": score.constant, "relative_position": relative_position.relative, "value": value.full_rank}
STEEP = 1000.0  # exp(-1000) is 0 in float32 and float64: a weight is 1 or 0
COMPARED = 64  # held-out images that the constructed layer and numpy convolve


def config() -> dict[str, dict]:
    """Return the setting of the images."""
    source = ("digits", "digits (scikit-learn), mnist, fashion_mnist, or a path to IDX files or an .npz")
    return {"image": {"source": source}}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """Return images and their convolution with a random kernel, the layer that learns it, its loss, and the figures."""
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

    average = baselines.average_error(fields["evaluation"], lambda batch: batch["target_BND"], average_ND)
    task = train_step.Task(
        init=functools.partial(init, H=H, D=D, N=X),
        loss=loss,
        baseline={"loss": average},
        guess={"loss": "always the average training image, convolved"},
        **fields,
    )
    return run.Work(
        task,
        figures=functools.partial(figures, settings, data, kernel_HD, task),
        apply=lambda params, batch: apply(params, batch["x_BND"])[0],
        lines=data.lines,
        data_sha256=data.sha256,
    )


def choose_heads(settings: configs.Settings, X: int) -> int:
    """Return H, the pixels of the kernel. Raises UserError for more than X, and for settings of queries and keys."""
    H, G, K = settings.model.H, settings.model.G, settings.model.K
    configs.at_least(1, {"model.H": H}, most=X)
    if G != H or "model.K" in settings.list_chosen():
        setting = f"model.G = {G}" if G != H else f"model.K = {K}"
        raise errors.UserError(f"{setting}: this layer has no queries and keys: leave out model.G and model.K")
    return H


def init(key: jax.Array, *, H: int, D: int, N: int) -> dict:
    """Return b_h(s - n) = 0 for all offsets, and random V_h. No stage has query or key features, so K = 0."""
    sizes = {"score": {"D": D, "bias": False}, "relative_position": {"N": N}, "value": {"D": D, "M": 1, "bias": False}}
    return {name: STAGES[name].init(initial.key(key, name), H=H, K=0, **sizes[name]) for name in STAGES}


def apply(params: dict, x_BND: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return Y = sum_h V_h X A_h, and the weights A_BHNS, which are the same for every image."""
    H = params["value"]["V_HDD"].shape[0]
    spec = attentions.Spec(**STAGES, attend=explicit.attention, scale=score.SCALES["1"], H=H)
    y_BND, aux = heads.self_attention(params, x_BND, spec, attentions.Call())
    return y_BND, aux["A"]


def construct(kernel_HD: np.ndarray, *, N: int) -> dict:
    """Return the parameters of the convolution: V_h = diag(kernel_h), and b_h that selects the key nearest to n + o_h.

    The bias is so steep that no other key has weight.
    """
    distance_HR = np.abs(np.arange(1 - N, N) - depthwise.offsets(len(kernel_HD))[:, None])
    V_HDD = np.stack([np.diag(kernel_D) for kernel_D in kernel_HD])
    b_HR = jnp.asarray(-STEEP * distance_HR, float)
    return {"score": {}, "relative_position": {"b_HR": b_HR}, "value": {"V_HDD": jnp.asarray(V_HDD, float)}}


def extract_kernel(params: dict, A_HNS: np.ndarray) -> np.ndarray:
    """Return kernel_HD, the layer's factor for each offset o: sum_h (V_h)_{d,d} A_{h,n,n+o}.

    It is the mean over those n that have all their offsets in the sequence. A head may mix offsets if the values of the
    others separate them again.
    """
    H, N = A_HNS.shape[:2]
    n = np.arange(H // 2, N - (H - 1) // 2)
    A_OH = np.array([A_HNS[:, n, n + o].mean(1) for o in depthwise.offsets(H)])
    return A_OH @ np.asarray(params["value"]["V_HDD"]).diagonal(axis1=1, axis2=2)


def figures(
    settings: configs.Settings, data: images.Images, kernel_HD: np.ndarray, task: train_step.Task, params, folder, rows
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Yield the errors of the constructed layer and of the learned kernel; loss curves; kernels and weights; images."""
    from experiments.figures import convolution as draw, plots  # they import matplotlib, which takes a second

    x_BND, folder = task.evaluation[0]["x_BND"][:COMPARED], folder / "figures"
    true_BND = depthwise.convolve_by_numpy(x_BND, kernel_HD)
    with jax.default_matmul_precision("highest"):  # some accelerators round the factors of a product otherwise
        constructed_BND, constructed_BHNS = jax.jit(apply)(construct(kernel_HD, N=x_BND.shape[1]), x_BND)
    learned_BND, learned_BHNS = jax.jit(apply)(params, x_BND)
    learned_HNS = np.asarray(learned_BHNS[0])
    learned_HD = extract_kernel(params, learned_HNS)
    difference, largest = float(np.abs(constructed_BND - true_BND).max()), float(np.abs(true_BND).max())
    error = float(np.abs(learned_HD - kernel_HD).max())
    print(f"  constructed layer: differs from numpy.convolve by at most {difference:.1e} (values up to {largest:.1f})")
    print(f"  learned kernel: error at most {error:.1e} (largest entry {np.abs(kernel_HD).max():.1f})")
    yield {
        "constructed/largest_difference": difference,
        "constructed/largest_value": largest,
        "learned/largest_kernel_error": error,
    }
    title = f"{settings.experiment}: {data.name}"
    yield plots.loss_curves(folder / "loss.png", rows, unit="squared error", title=title)
    yield draw.kernels_and_weights(
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
    yield draw.convolved_images(folder / "images.png", tokens, Z=data.train_image_BYXZ.shape[-1], title=title)
