"""Images to classes: patches as tokens, a pooled or class-token head (E2, E25)."""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models
from experiments.data import image_file, images
from experiments.engine import batches, disk, run, step
from experiments.engine import config as configs
from tfm import embed, loss
from tfm import layout as layouts


def config() -> dict[str, ConfigDict]:
    """The images and their patches."""
    image = ConfigDict()
    image.source = "digits"  # digits (scikit-learn), mnist, fashion_mnist, or a path to IDX files or an .npz
    image.patch = 2  # pixels of a patch's side
    image.head = "pooled"  # pooled, class_token (head.py)
    image.shift = 0.0  # augmentation: each training image is moved by up to so many pixels (or parts of one) each way
    return {"image": image}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The images, the model, what is measured."""
    size, t = settings.image.patch, settings.train
    data = images.configured(settings.image)
    model, mask = build(settings, data), models.masked(settings.model, None)
    mean_Z, std_Z = images.statistics(data.train_image_BYXZ)
    normal = {"mean_Z": mean_Z, "std_Z": std_Z}
    fetch, n = images.examples(data.train_image_BYXZ, data.train_label_B, shift=settings.image.shift, **normal)
    fetch_evaluation, n_evaluation = images.examples(data.evaluation_image_BYXZ, data.evaluation_label_B, **normal)

    def logits(params: Any, image_BYXZ: jax.Array, over: layouts.Layout = layouts.ONE, **options: Any) -> Any:
        v_BNP = layouts.own(embed.cut(image_BYXZ, size=size), over)
        return model.apply(params, v_BNP, mask=mask, over=over, **options)

    def loss_and_metrics(
        params: Any, batch: dict, key_B: jax.Array | None, over: layouts.Layout = layouts.ONE
    ) -> step.Ratios:
        logits_BC, seen = logits(params, batch["image_BYXZ"], over, key_B=key_B)
        answer = logits_BC, batch["label_B"], batch["weight_B"]
        return {"loss": loss.cross_entropy(*answer), "accuracy": loss.accuracy(*answer)} | step.running(seen)

    N, _ = models.patches(*data.train_image_BYXZ.shape[1:], patch=size)
    tokens = N + (settings.image.head == "class_token")
    task = step.Task(
        init=model.init,
        loss_and_metrics=loss_and_metrics,
        train=batches.train(fetch, n=n, batch=t.batch_size, seed=settings.seed, growth=t.growth),
        evaluation=batches.evaluation(fetch_evaluation, n=n_evaluation, batch=t.evaluate_batch),
        tokens_per_example=tokens,
        baseline={"accuracy": float(np.mean(data.evaluation_label_B == np.bincount(data.train_label_B).argmax()))},
        guess={"accuracy": "always the training part's most frequent class"},
        layout=models.layout(settings.model, devices, N=tokens, head=settings.image.head),
        probe=models.probe(settings.model),
        maps=lambda params, batch: logits(params, batch["image_BYXZ"], maps=True)[1]["A_MBHNS"],
    )
    kept = {"data.json": disk.as_json(image_file.describe(data))}
    show = functools.partial(figures, settings, data, task, logits)
    return run.Work(
        task, show, lambda params, batch: logits(params, batch["image_BYXZ"])[0], kept, lines=data.said.splitlines()
    )


def build(settings: configs.Settings, data: images.Images) -> models.Model:
    """The vision transformer for these images."""
    _, Y, X, Z = data.train_image_BYXZ.shape
    i = settings.image
    return models.vision(settings.model, answer=i.head, Y=Y, X=X, Z=Z, patch=i.patch, C=len(data.classes))


def figures(
    settings, data: images.Images, task: step.Task, logits, params: Any, folder: pathlib.Path, rows: list[dict]
):
    """Loss curves, a grid of test images, the confusion matrix, the attention maps of one image."""
    from experiments.figures import plots as draw  # matplotlib, only where something is drawn

    probability = jax.jit(lambda params, image_BYXZ: jax.nn.softmax(logits(params, image_BYXZ)[0]))
    found = [np.asarray(probability(params, task.evaluation[i]["image_BYXZ"])) for i in range(len(task.evaluation))]
    p_BC = np.concatenate(found)[: len(data.evaluation_label_B)]
    predicted_B = p_BC.argmax(-1)
    count_CC = np.zeros((len(data.classes),) * 2, int)
    np.add.at(count_CC, (data.evaluation_label_B, predicted_B), 1)
    wrong = int(np.sum(predicted_B != data.evaluation_label_B))
    show = np.argsort(data.evaluation_label_B == predicted_B, kind="stable")[:40]  # the wrong ones first
    files = {name: folder / "figures" / f"{name}.png" for name in ("loss", "predictions", "confusion", "attention")}
    draw.loss_figure(files["loss"], rows, unit="nats per image", title=f"{settings.experiment}: {data.name}")
    draw.predictions(
        files["predictions"],
        image_BYXZ=data.evaluation_image_BYXZ[show],
        label_B=data.evaluation_label_B[show],
        predicted_B=predicted_B[show],
        probability_B=p_BC.max(-1)[show],
        classes=data.classes,
        title=f"predicted class and its probability; {wrong} of {len(p_BC)} test images wrong, these first",
    )
    draw.confusion(files["confusion"], count_CC=count_CC, classes=data.classes)
    first = {name: array[:1] for name, array in task.evaluation[0].items()}
    A_MBHNS = jax.jit(task.maps)(params, first)
    draw.attention_maps(
        files["attention"],
        image_YXZ=data.evaluation_image_BYXZ[0],
        A_MHNS=np.asarray(A_MBHNS)[:, 0],
        grid=tuple(n // settings.image.patch for n in data.evaluation_image_BYXZ.shape[1:3]),
        class_token=settings.image.head == "class_token",
    )
    return list(files.values())
