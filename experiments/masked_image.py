"""Masked image modelling: predict the pixels of masked patches from the other patches (E26 of docs/mathematics.md)."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.config import disk, settings as configs
from experiments.data import images, windows
from experiments.engine import run as runs, train_step
from experiments.model import baselines, build, losses, sharding, splits, task as tasks
from tfm import embed as embeds, layout as layouts, models

MASKED = 0.75  # share of the patches that are masked (He et al. 2021)


def config() -> dict[str, dict]:
    """Return {"image": {setting: (default, comment)}}, the settings of the images and their patches."""
    return {"image": images.FIELDS}


def prepare(
    settings: configs.Settings,
    mesh: Mesh,
    *,
    read: Callable[..., images.Images] = images.load_described,
    change: Callable[[models.Model], models.Model] = models.unchanged,
) -> runs.Work:
    """Prepare the images with masked patches, the model, its loss, and the figures.

    read(source, size) -> images.Images. change(model) -> model, as in language.prepare.
    """
    i, data = settings.image, read(settings.image.source, settings.image.size)
    *examples, normal = images.make_examples(data, i.augment, patch=i.patch)
    sizes = dict(zip("YXZ", data.train_image_BYXZ.shape[1:], strict=True), patch=i.patch)
    N, _ = build.count_patches(**sizes)
    hidden = [(windows.patches(fetch, N=N, share=MASKED), n) for fetch, n in examples]
    layout, mask = sharding.choose_layout(settings, mesh, N=N), build.add_window(settings.model, None)
    model = change(build.masked_image_model(settings.model, **sizes, layout=layout, mask=mask))
    average_1NP = embeds.cut(average_images(data, normal)[None], size=i.patch)

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        return {"inputs": {name: batch[name] for name in ("v_BNP", "hidden_BN")}, "mask": mask}

    def measure(params: Any, x_BND: Any, batch: dict, layout: layouts.Layout) -> train_step.Ratios:
        prediction_BNP = model.logits(params, x_BND, layout=layout)
        average_NP = layouts.take_own_tokens(average_1NP, layout)
        return losses.explain_variance(prediction_BNP, batch["v_BNP"], average_NP, batch["weight_BN"])

    def baseline(evaluation: Sequence[dict]) -> dict:
        guess = {"average_NP": average_1NP, "guess": "the average training image"}
        return baselines.average_error(evaluation, target=lambda batch: batch["v_BNP"], **guess)

    return tasks.make_work(
        settings,
        model,
        inputs,
        measure,
        splits.make_splits(settings, *hidden, tokens=N),
        baseline=baseline,
        figures=functools.partial(figures, settings, data, normal),
        files={runs.DATA: disk.as_json(images.describe(data))},
        lines=data.lines,
        data_sha256=data.sha256,
    )


def average_images(data: images.Images, normal: dict) -> np.ndarray:
    """Return the mean image mean_YXZ of the training data, normalised like a batch: by mean_Z and std_Z in `normal`."""
    mean_YXZ = data.train_image_BYXZ.mean(axis=0, dtype=np.float64).astype(np.float32)
    return (mean_YXZ - normal["mean_Z"]) / normal["std_Z"]


def figures(
    settings: configs.Settings, data: images.Images, normal: dict, work: runs.Work, params, folder, rows
) -> Iterator[pathlib.Path]:
    """Yield figures: loss curves; held-out images with masks and predictions; attention weights of one image."""
    from experiments.figures import images as image_figures, plots  # import matplotlib, which takes a second

    folder, size, image_BYXZ = (
        folder / "figures",
        settings.image.patch,
        data.evaluation_image_BYXZ[: image_figures.MOST_IMAGES],
    )
    unit = "squared error of a hidden pixel (pixels have variance 1)"
    title = f"{settings.experiment}: {data.name}"
    yield plots.loss_curves(folder / "loss.png", rows, unit=unit, title=title)
    B, Y, X, _ = image_BYXZ.shape
    batch = {name: array[:B] for name, array in work.task.evaluation[0].items()}
    v_BNP = jax.jit(work.apply)(params, batch)
    explained = [row["eval/explained"] for row in rows if row.get("eval/explained") is not None][-1]
    yield image_figures.hidden_patches(
        folder / "prediction.png",
        image_BYXZ=image_BYXZ,
        prediction_BYXZ=np.asarray(embeds.join(v_BNP, Y=Y, X=X, size=size)) * normal["std_Z"] + normal["mean_Z"],
        hidden_BN=batch["hidden_BN"],
        size=size,
        title=f"held-out images, {int(batch['hidden_BN'][0].sum())} of {v_BNP.shape[1]} patches hidden:"
        f" the prediction explains {100 * explained:.0f} % of the hidden pixels' variance",
    )
    yield image_figures.attention_maps(
        folder / "attention.png",
        image_YXZ=image_figures.hide(image_BYXZ[:1], batch["hidden_BN"][:1], size=size)[0],
        A_MHNS=tasks.map_first_example(work, params)[1],
        grid=(Y // size, X // size),
        class_token=False,
    )
