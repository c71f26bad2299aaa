"""Attention contains convolution (E28): a layer that knows positions only learns a convolution of real pixel rows.

An image is a sequence of its pixel columns: token n holds the D pixels of column n, one per row (and channel). A
depthwise convolution gives every row a kernel of its own, y_{d,n} = sum_h kernel_{h,d} x_{d,n+o_h} with one head h for
each offset o_h. The layer is Y = sum_h V_h X A_h with all scores 0: A_h follows from the biases b_h(s - n) alone.
Beyond the first and the last column the image goes on as it ends.
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
from experiments.data import images
from experiments.engine import batches, config as configs, errors, run, train_step
from tfm import initial, layout as layouts
from tfm.attention import explicit, heads, relative_position, score, spec as attentions, value

PARTS = {"score": score.constant, "relative_position": relative_position.relative, "value": value.full_rank}
STEEP = 1000.0  # exp(-1000) is 0 in float32 and float64: a weight is 1 or 0
COMPARED = 64  # held-out images that the constructed layer and numpy convolve
SHOWN = 8


def config() -> dict[str, dict]:
    """Return the setting of the images."""
    return {
        "image": {
            "source": ("digits", "digits (scikit-learn), mnist, fashion_mnist, or a path to IDX files or an .npz"),
        }
    }


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """Return images and their convolution with a random kernel, the layer that learns it, its loss, and the figures."""
    data = images.configured(settings.image.source)
    _, Y, X, Z = data.train_image_BYXZ.shape
    H = check(settings, X)
    kernel_HD = np.random.default_rng(settings.seed).standard_normal((H, Y * Z)) / np.sqrt(H)
    train, evaluation, normal = images.both(data)
    convolve = ((functools.partial(examples, fetch, kernel_HD), n) for fetch, n in (train, evaluation))
    fields = splits.make_splits(settings, *convolve, tokens=X)
    average_YXZ = (data.train_image_BYXZ.mean(axis=0, dtype=np.float64) - normal["mean_Z"]) / normal["std_Z"]
    average_ND = convolved(columns(average_YXZ[None]), kernel_HD)[0]

    def loss(
        params: Any, batch: dict, *, key_B: jax.Array | None = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[train_step.Ratios, dict]:
        y_BND, _ = apply(params, batch["x_BND"])
        return losses.explain_variance(y_BND, batch["target_BND"], average_ND, batch["weight_BN"]), {}

    average = baselines.average_error(fields["evaluation"], lambda batch: batch["target_BND"], average_ND)
    task = train_step.Task(
        init=functools.partial(init, H=H, D=Y * Z, N=X),
        loss=loss,
        baseline={"loss": average},
        guess={"loss": "always the average training image, convolved"},
        **fields,
    )
    return run.Work(
        task,
        figures=functools.partial(figures, settings, data, kernel_HD, task),
        apply=lambda params, batch: apply(params, batch["x_BND"])[0],
        lines=data.said.splitlines(),
        data_sha256=data.sha256,
    )


def check(settings: configs.Settings, X: int) -> int:
    """Return H, the pixels of the kernel. Raises UserError for more than X, and for settings of queries and keys."""
    H, G, K = settings.model.H, settings.model.G, settings.model.K
    configs.at_least(1, {"model.H": H}, most=X)
    if G != H:
        raise errors.UserError(f"model.G = {G}: each of the {H} heads of a convolution has its own keys")
    if "model.K" in settings.list_chosen():
        raise errors.UserError(f"model.K = {K} is set, and this layer has neither queries nor keys")
    return H


def init(key: jax.Array, *, H: int, D: int, N: int) -> dict:
    """Return b_h(s - n) = 0 for all offsets, and random V_h. No part has query or key features, so K = 0."""
    sizes = {"score": {"D": D, "bias": False}, "relative_position": {"N": N}, "value": {"D": D, "M": 1, "bias": False}}
    return {name: PARTS[name].init(initial.key(key, name), H=H, K=0, **sizes[name]) for name in PARTS}


def constructed(kernel_HD: np.ndarray, *, N: int) -> dict:
    """Return the parameters that are the convolution: V_h = diag(kernel_h), and b_h so steep that only the key nearest
    to n + o_h has weight."""
    distance_HR = np.abs(np.arange(1 - N, N) - offsets(len(kernel_HD))[:, None])
    V_HDD = np.stack([np.diag(kernel_D) for kernel_D in kernel_HD])
    b_HR = jnp.asarray(-STEEP * distance_HR, float)
    return {"score": {}, "relative_position": {"b_HR": b_HR}, "value": {"V_HDD": jnp.asarray(V_HDD, float)}}


def apply(params: dict, x_BND: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return Y = sum_h V_h X A_h, and the weights A_BHNS, which are the same for every image."""
    H = params["value"]["V_HDD"].shape[0]
    spec = attentions.Spec(**PARTS, attend=explicit.attention, scale=score.SCALES["1"], H=H)
    y_BND, seen = heads.self_attention(params, x_BND, spec, attentions.Call())
    return y_BND, seen["A"]


def learned_kernel(params: dict, A_HNS: np.ndarray) -> np.ndarray:
    """Return kernel_HD, what the layer does with each offset o: sum_h (V_h)_{d,d} A_{h,n,n+o}, averaged over those n
    that have all their offsets in the sequence. A head may mix offsets if the others' values separate them again."""
    H, N = A_HNS.shape[:2]
    n = np.arange(H // 2, N - (H - 1) // 2)
    A_OH = np.array([A_HNS[:, n, n + o].mean(1) for o in offsets(H)])
    return A_OH @ np.asarray(params["value"]["V_HDD"]).diagonal(axis1=1, axis2=2)


def offsets(H: int) -> np.ndarray:
    """Return o_h = s - n, -2 ... 2 for five heads, -2 ... 1 for four."""
    return np.arange(H) - H // 2


def columns(image_BYXZ: np.ndarray) -> np.ndarray:
    """Return x_BND: token n is pixel column n, and its features are the pixels of that column."""
    B, Y, X, Z = image_BYXZ.shape
    return image_BYXZ.swapaxes(1, 2).reshape(B, X, Y * Z)


def continued(x_BND: np.ndarray, H: int) -> np.ndarray:
    """Repeat the first and the last token as often as the farthest offsets need."""
    return np.pad(x_BND, [(0, 0), (H // 2, (H - 1) // 2), (0, 0)], mode="edge")


def convolved(x_BND: np.ndarray, kernel_HD: np.ndarray) -> np.ndarray:
    """Return y_{n,d} = sum_h kernel_{h,d} x_{n+o_h,d}, float32: the targets of the layer."""
    x_BNDH = np.lib.stride_tricks.sliding_window_view(continued(x_BND, len(kernel_HD)), len(kernel_HD), axis=1)
    return np.einsum("bndh,hd->bnd", x_BNDH, kernel_HD).astype(np.float32)


def convolved_by_numpy(x_BND: np.ndarray, kernel_HD: np.ndarray) -> np.ndarray:
    """Return the convolution by numpy.convolve in float64, row by row; its kernels run backwards."""
    long_BND = continued(x_BND.astype(np.float64), len(kernel_HD))
    rows = [
        [np.convolve(row_N, kernel_H[::-1], "valid") for row_N, kernel_H in zip(x_ND.T, kernel_HD.T, strict=True)]
        for x_ND in long_BND
    ]
    return np.array(rows).swapaxes(1, 2)


def examples(
    fetch: batches.Fetch, kernel_HD: np.ndarray, index_B: np.ndarray, rng: np.random.Generator | None
) -> batches.Batch:
    """Return tokens x_BND, their convolution target_BND, and weight_BN = 1."""
    x_BND = columns(fetch(index_B, rng)["image_BYXZ"])
    weight_BN = np.ones(x_BND.shape[:2], np.float32)
    return {"x_BND": x_BND, "target_BND": convolved(x_BND, kernel_HD), "weight_BN": weight_BN}


def figures(
    settings: configs.Settings, data: images.Images, kernel_HD: np.ndarray, task: train_step.Task, params, folder, rows
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Yield the largest differences of the constructed layer from numpy.convolve and of the learned kernel from the
    true one; loss curves; kernels and weights; images, and what the layers and numpy make of them."""
    from experiments.figures import convolution as draw, plots  # they import matplotlib, which takes a second

    x_BND, folder = task.evaluation[0]["x_BND"][:COMPARED], folder / "figures"
    true_BND = convolved_by_numpy(x_BND, kernel_HD)
    with jax.default_matmul_precision("highest"):  # some accelerators round the factors of a product otherwise
        built_BND, built_BHNS = jax.jit(apply)(constructed(kernel_HD, N=x_BND.shape[1]), x_BND)
    learned_BND, learned_BHNS = jax.jit(apply)(params, x_BND)
    learned_HNS = np.asarray(learned_BHNS[0])
    learned_HD = learned_kernel(params, learned_HNS)
    difference, largest = float(np.abs(built_BND - true_BND).max()), float(np.abs(true_BND).max())
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
        offsets=offsets(len(kernel_HD)),
        learned_HNS=learned_HNS,
        constructed_HNS=np.asarray(built_BHNS[0]),
        difference=difference,
    )
    shown = {"input": x_BND, "numpy.convolve": true_BND, "learned": learned_BND, "constructed": built_BND}
    yield draw_images(folder / "images.png", data, {name: np.asarray(x[:SHOWN]) for name, x in shown.items()})


def draw_images(path: pathlib.Path, data: images.Images, tokens: dict[str, np.ndarray]) -> pathlib.Path:
    """Draw a row of grey images for each name, from x_BND. All rows but the input's have one scale of brightness."""
    from experiments.figures import images as draw

    _, Y, X, Z = data.evaluation_image_BYXZ.shape
    grey = {name: x_BND.swapaxes(1, 2).reshape(-1, Y, Z, X).mean(2)[..., None] for name, x_BND in tokens.items()}
    outputs = np.concatenate([grey[name] for name in grey if name != "input"])
    rows = {name: draw.coloured(x, scale=x if name == "input" else outputs) for name, x in grey.items()}
    return draw.rows(path, rows, title=f"{data.name}: held-out images, each pixel row convolved")
