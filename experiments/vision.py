"""Images to classes: patches as tokens, a pooled or class-token head (E2, E25)."""

import functools
import pathlib
from typing import Any

import jax
import numpy as np

from experiments import model as models
from experiments.engine import config, errors, job, train
from experiments.engine.data import batches, images
from tfm import embed, head, loss

HEADS = {"pooled": head.pooled, "class_token": head.class_token}


def run(settings: config.Settings, folder: pathlib.Path | None) -> None:
    """Train and evaluate what the config says, and show predictions, confusions and attention maps."""
    devices = job.devices(settings)
    size, t = settings.image.patch, settings.train
    data = images.load(settings.image.source, data_dir=settings.data_dir)
    model = build(settings, data)
    mean_Z, std_Z = images.statistics(data.train_image_BYXZ)
    normal = {"mean_Z": mean_Z, "std_Z": std_Z}
    fetch, n = images.examples(data.train_image_BYXZ, data.train_label_B, shift=settings.image.shift, **normal)
    fetch_evaluation, n_evaluation = images.examples(data.evaluation_image_BYXZ, data.evaluation_label_B, **normal)

    def logits(params: Any, image_BYXZ: jax.Array, **options: Any) -> Any:
        return model.apply(params, embed.cut(image_BYXZ, size=size), mask=None, **options)

    def measure(params: Any, batch: dict, key: jax.Array) -> train.Ratios:
        answer = logits(params, batch["image_BYXZ"]), batch["label_B"], batch["weight_B"]
        return {"loss": loss.cross_entropy(*answer), "accuracy": loss.accuracy(*answer)}

    task = train.Task(
        init=model.init,
        measure=measure,
        train=batches.train(fetch, n=n, batch=t.batch, seed=settings.seed),
        evaluation=batches.evaluation(fetch_evaluation, n=n_evaluation, batch=t.evaluate_batch),
        tokens_per_example=tokens(settings, data),
        baseline={"accuracy": float(np.mean(data.evaluation_label_B == np.bincount(data.train_label_B).argmax()))},
    )
    job.run(settings, folder, task, devices, functools.partial(figures, settings, data, task, logits))


def tokens(settings: config.Settings, data: images.Images) -> int:
    """Tokens of one image, the class token included."""
    _, Y, X, _ = data.train_image_BYXZ.shape
    return (Y // settings.image.patch) * (X // settings.image.patch) + (settings.image.head == "class_token")


def build(settings: config.Settings, data: images.Images) -> models.Model:
    """The vision transformer for these images. Raises UserError for a patch that does not divide them."""
    _, Y, X, Z = data.train_image_BYXZ.shape
    size = settings.image.patch
    if size < 1 or Y % size or X % size:
        raise errors.UserError(
            f"images of {Y} x {X} pixels do not divide into patches of {size} x {size} (image.patch)"
        )
    answer = config.choose("head", settings.image.head, HEADS)
    return models.build(
        settings.model,
        embed_init=functools.partial(embed.patches.init, P=size * size * Z),
        embed_apply=embed.patches.apply,
        head_init=functools.partial(answer.init, C=len(data.classes)),
        head_apply=answer.apply,
        N=tokens(settings, data),
        class_token=settings.image.head == "class_token",
    )


def figures(
    settings, data: images.Images, task: train.Task, logits, params: Any, folder: pathlib.Path, rows: list[dict]
):
    """Loss curves, a grid of test images, the confusion matrix, the attention maps of one image."""
    from experiments.engine import figures as draw  # matplotlib, only where something is drawn

    probability = jax.jit(lambda params, image_BYXZ: jax.nn.softmax(logits(params, image_BYXZ)))
    found = [np.asarray(probability(params, task.evaluation[i]["image_BYXZ"])) for i in range(len(task.evaluation))]
    p_BC = np.concatenate(found)[: len(data.evaluation_label_B)]
    predicted_B = p_BC.argmax(-1)
    count_CC = np.zeros((len(data.classes),) * 2, int)
    np.add.at(count_CC, (data.evaluation_label_B, predicted_B), 1)
    wrong = int(np.sum(predicted_B != data.evaluation_label_B))
    show = np.argsort(data.evaluation_label_B == predicted_B, kind="stable")[:40]  # the wrong ones first
    files = {name: folder / "figures" / f"{name}.png" for name in ("loss", "predictions", "confusion", "attention")}
    job.loss_figure(files["loss"], rows, unit="nats per image", title=f"{settings.experiment}: {data.name}")
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
    first = task.evaluation[0]["image_BYXZ"][:1]
    _, A_MBHNS = jax.jit(functools.partial(logits, maps=True))(params, first)
    draw.attention_maps(
        files["attention"],
        image_YXZ=data.evaluation_image_BYXZ[0],
        A_MHNS=np.asarray(A_MBHNS)[:, 0],
        grid=tuple(n // settings.image.patch for n in data.evaluation_image_BYXZ.shape[1:3]),
        class_token=settings.image.head == "class_token",
    )
    return list(files.values())
