"""Classify images: patches are the tokens, and the head uses their mean or a class token (E2, E25)."""

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.config import disk, errors, settings as configs
from experiments.data import images
from experiments.engine import run as runs, train_step
from experiments.model import baselines, build, losses, sharding, splits, task as tasks
from tfm import layout as layouts, models


def config() -> dict[str, dict]:
    """Return {"image": {setting: (default, comment)}}, the settings of the images and their patches."""
    return {"image": images.FIELDS | {"head": ("pooled", "pooled, class_token (tfm/head.py)")}}


def prepare(
    settings: configs.Settings,
    mesh: Mesh,
    *,
    read: Callable[..., images.Images] = images.load_described,
    change: Callable[[models.Model], models.Model] = models.unchanged,
    loss: Callable[..., Callable[..., train_step.Ratios]] = losses.choose_class_loss,
) -> runs.Work:
    """Prepare the images, a model of their patches, its loss and the figures. Raises UserError for a single class.

    read(source, size) returns the images, and change(model) the model to train. loss: like losses.choose_class_loss.
    """
    i, data = settings.image, read(settings.image.source, settings.image.size)
    if len(data.classes) < 2:
        raise errors.UserError(f"image.source = {data.name} has only the class {data.classes[0]!r}. Give at least two")
    train, evaluation, _ = images.make_examples(data, i.augment, patch=0 if settings.model.flax else i.patch)
    model, N = make_model(settings, mesh, data)
    model, mask = change(model), build.add_window(settings.model, None)

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        if settings.model.flax:
            return {"inputs": batch["image_BYXZ"]}
        return {"inputs": batch["v_BNP"], "mask": mask}

    return tasks.make_work(
        settings,
        model,
        inputs,
        loss(settings, model),
        splits.make_splits(settings, train, evaluation, tokens=N),
        baseline=functools.partial(baselines.guess_image, data=data),
        figures=functools.partial(figures, settings, data),
        files={runs.DATA: disk.as_json(images.describe(data))},
        lines=data.lines,
        data_sha256=data.sha256,
    )


def make_model(settings: configs.Settings, mesh: Mesh, data: images.Images) -> tuple[models.Model, int]:
    """Return the model of the settings, or the user's Flax module, and N, the number of its tokens (Flax: 1)."""
    i, m, (_, Y, X, Z) = settings.image, settings.model, data.train_image_BYXZ.shape
    sizes = {"Y": Y, "X": X, "Z": Z, "C": len(data.classes)}
    if m.flax:
        from experiments.model import flax_model  # imports flax.nnx, which takes 0.1 s

        images_like = jax.ShapeDtypeStruct((2, Y, X, Z), jnp.float32)
        return flax_model.build(m, mesh, images_like, (2, sizes["C"]), **sizes), 1
    N = build.count_patches(Y, X, Z, patch=i.patch)[0] + (i.head == "class_token")
    options = {"layout": sharding.choose_layout(settings, mesh, N=N, head=i.head), "mask": build.add_window(m, None)}
    return build.vision_model(m, output=i.head, patch=i.patch, **sizes, **options), N


def figures(
    settings: configs.Settings,
    data: images.Images,
    work: runs.Work,
    params: Any,
    folder: pathlib.Path,
    rows: list[dict],
) -> Iterator[pathlib.Path | dict]:
    """Yield the calibration error and recalls as dicts of metrics; then the paths of the figures, which it draws.

    Figures: loss curves, predictions, the confusion matrix, and attention weights of one image (not of a Flax module).
    folder: of the run. rows: of its metrics.jsonl.
    """
    from experiments.figures import images as image_figures, plots  # import matplotlib, which takes a second

    folder, title = folder / "figures", f"{settings.experiment}: {data.name}"
    image_BYXZ, label_B = data.evaluation_image_BYXZ, data.evaluation_label_B
    predicted_B, probability_B = tasks.predict_classes(work, params, len(label_B))
    yield tasks.measure_calibration(label_B, predicted_B, probability_B)
    yield tasks.measure_recalls(label_B, predicted_B, data.classes)
    yield plots.loss_curves(folder / "loss.png", rows, unit="nats per image", title=title)
    mistakes = int(np.sum(predicted_B != label_B))
    first = np.argsort(label_B == predicted_B, kind="stable")[: image_figures.MOST_PREDICTIONS]  # wrong ones come first
    yield image_figures.predictions(
        folder / "predictions.png",
        image_BYXZ=image_BYXZ[first],
        label_B=label_B[first],
        predicted_B=predicted_B[first],
        probability_B=probability_B[first],
        classes=data.classes,
        title=f"predicted class and its probability; {mistakes} of {len(label_B)} held-out images wrong"
        + ", these first" * (mistakes > 0),
    )
    yield from plots.confusion(folder / "confusion.png", label_B=label_B, predicted_B=predicted_B, classes=data.classes)
    if settings.model.flax:
        return
    yield image_figures.attention_maps(
        folder / "attention.png",
        image_YXZ=image_BYXZ[0],
        A_MHNS=tasks.map_first_example(work, params)[1],
        grid=tuple(n // settings.image.patch for n in image_BYXZ.shape[1:3]),
        class_token=settings.image.head == "class_token",
    )
