"""Images to classes: patches as tokens, a pooled or class-token head (E2, E25)."""

import functools
import pathlib
from typing import Any

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models, task as tasks
from experiments.data import images
from experiments.engine import config as configs, disk, errors, run, train_step
from tfm import embed, layout as layouts


def config() -> dict[str, ConfigDict]:
    """The images and their patches."""
    image = ConfigDict()
    image.source = "digits"  # digits (scikit-learn), mnist, fashion_mnist, hub:NAME, or a path (docs/configs.md)
    image.size = 0  # image files are made so many pixels high and wide; 0: they stay as they are, all alike
    image.patch = 2  # pixels of a patch's side
    image.head = "pooled"  # pooled, class_token, distilled (head.py)
    image.augment = []  # of training images, in this order: shift:0.5, flip, crop:4, mixup:0.2, cutmix (augment.py)
    return {"image": image}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The images, the model, what is measured."""
    i = settings.image
    data = images.configured(i.source, i.size)
    if len(data.classes) < 2:
        wrong = f"{data.name} has images of one class alone, {data.classes[0]!r}"
        raise errors.UserError(f"{wrong}: at least two are needed, each in a folder of its own there")
    _, Y, X, Z = data.train_image_BYXZ.shape
    model = models.vision(settings.model, answer=i.head, Y=Y, X=X, Z=Z, patch=i.patch, C=len(data.classes))
    mask = models.masked(settings.model, None)
    train, evaluation, _ = images.both(data, i.augment)

    def logits(params: Any, batch: dict, over: layouts.Layout = layouts.ONE, **options: Any) -> Any:
        v_BNP = layouts.own(embed.cut(batch["image_BYXZ"], size=i.patch), over)
        return model.apply(params, v_BNP, mask=mask, over=over, **options)

    N, _ = models.patches(Y, X, Z, patch=i.patch)
    tokens = N + models.FIRST.get(i.head, 0)
    task = tasks.of_classes(
        settings,
        model,
        logits,
        (data.train_label_B, data.evaluation_label_B),
        layout=models.layout(settings.model, devices, N=tokens, head=i.head),
        **tasks.parts(settings, train, evaluation, tokens=tokens),
    )
    files = {"data.json": disk.as_json(images.describe(data))}
    show = functools.partial(figures, settings, data, task, logits)
    return run.Work(
        task, show, lambda *inputs: logits(*inputs)[0], files, lines=data.said.splitlines(), data_sha256=data.sha256
    )


def figures(
    settings, data: images.Images, task: train_step.Task, logits, params: Any, folder: pathlib.Path, rows: list[dict]
):
    """Recall; loss curves, a grid of test images, the confusion matrix, the attention maps of one image."""
    from experiments.figures import (
        images as draw,  # matplotlib, only where something is drawn
        plots,
    )

    folder = folder / "figures"
    image_BYXZ, label_B = data.evaluation_image_BYXZ, data.evaluation_label_B
    predicted_B, probability_B = tasks.told(task, logits, params, len(label_B))
    yield tasks.recalls(label_B, predicted_B, data.classes)
    wrong = int(np.sum(predicted_B != label_B))
    first = np.argsort(label_B == predicted_B, kind="stable")[: draw.MOST_PREDICTIONS]  # the wrong ones
    title = f"{settings.experiment}: {data.name}"
    yield plots.loss_curves(folder / "loss.png", rows, unit="nats per image", title=title)
    yield draw.predictions(
        folder / "predictions.png",
        image_BYXZ=image_BYXZ[first],
        label_B=label_B[first],
        predicted_B=predicted_B[first],
        probability_B=probability_B[first],
        classes=data.classes,
        title=f"predicted class and its probability; {wrong} of {len(label_B)} test images wrong"
        + ", these first" * (wrong > 0),
    )
    where = folder / "confusion.png"
    yield from plots.confusion_of(where, label_B=label_B, predicted_B=predicted_B, classes=data.classes)
    yield draw.attention_maps(
        folder / "attention.png",
        image_YXZ=image_BYXZ[0],
        A_MHNS=tasks.example(task, params)[1],
        grid=tuple(n // settings.image.patch for n in image_BYXZ.shape[1:3]),
        class_token=models.FIRST.get(settings.image.head, 0),
    )
