"""Image to image: most patches are hidden, and their pixels are predicted from the others (E26)."""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models, task as tasks
from experiments.data import images, windows
from experiments.engine import config as configs, run, train_step
from tfm import embed, head, layout as layouts


def config() -> dict[str, ConfigDict]:
    """The images, and how much of them is hidden."""
    image = ConfigDict()
    image.source = "digits"  # digits (scikit-learn), mnist, fashion_mnist, hub:NAME, or a path (docs/configs.md)
    image.size = 0  # image files are made so many pixels high and wide; 0: they stay as they are, all alike
    image.patch = 2  # pixels of a patch's side
    image.mask_ratio = 0.75  # share of hidden patches
    image.augment = []  # of training images, in this order: shift:0.5, flip, crop:4, mixup:0.2, cutmix (augment.py)
    return {"image": image}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The images, what is hidden of them, the model, what is measured."""
    i = settings.image
    data = images.configured(i.source, i.size)
    train, evaluation, normal = images.both(data, i.augment)
    average_YXZ = data.train_image_BYXZ.mean(axis=0, dtype=np.float64).astype(np.float32)
    average_YXZ = (average_YXZ - normal["mean_Z"]) / normal["std_Z"]
    N, P = models.patches(*data.train_image_BYXZ.shape[1:], patch=i.patch)
    hide = functools.partial(windows.patches, N=N, share=i.mask_ratio)
    parts = tasks.parts(settings, *((hide(fetch), n) for fetch, n in (train, evaluation)), tokens=N)
    places = {"embed": models.sized(embed.masked_patches, P=P), "head": models.sized(head.pixels, P=P)}
    model, mask = models.build(settings.model, **places, N=N), models.masked(settings.model, None)

    def cut(image_BYXZ: Any, over: layouts.Layout = layouts.ONE) -> Any:
        return layouts.own(embed.cut(image_BYXZ, size=i.patch), over)

    def predict(params: Any, batch: dict, over: layouts.Layout = layouts.ONE, **options: Any) -> Any:
        inputs = {"v_BNP": cut(batch["image_BYXZ"], over), "hidden_BN": batch["hidden_BN"]}
        return model.apply(params, inputs, mask=mask, over=over, **options)

    def measure(prediction_BNP: jax.Array, batch: dict, over: layouts.Layout) -> train_step.Ratios:
        target_BNP, average_NP = cut(batch["image_BYXZ"], over), cut(average_YXZ[None], over)
        return tasks.explained(prediction_BNP, target_BNP, average_NP, batch["weight_BN"])

    average = tasks.always_average(parts["evaluation"], lambda batch: cut(batch["image_BYXZ"]), cut(average_YXZ[None]))
    task = tasks.of_model(
        settings,
        model,
        predict,
        measure,
        baseline={"loss": average},
        guess={"loss": "always the average training image"},
        layout=models.layout(settings.model, devices, N=N),
        **parts,
    )
    show = functools.partial(figures, settings, data, normal, task, predict)
    return run.Work(
        task, show, lambda *inputs: predict(*inputs)[0], lines=data.said.splitlines(), data_sha256=data.sha256
    )


def figures(
    settings,
    data: images.Images,
    normal: dict,
    task: train_step.Task,
    predict,
    params,
    folder: pathlib.Path,
    rows: list,
):
    """Loss curves; what the first held-out images were, looked like and became; where the tokens of one attend."""
    from experiments.figures import (
        images as draw,  # matplotlib, only where something is drawn
        plots,
    )

    folder, size, image_BYXZ = folder / "figures", settings.image.patch, data.evaluation_image_BYXZ[: draw.MOST_IMAGES]
    B, Y, X, _ = image_BYXZ.shape
    batch = {name: array[:B] for name, array in task.evaluation[0].items()}
    v_BNP, seen = jax.jit(functools.partial(predict, maps=True))(params, batch)
    prediction_BYXZ = np.asarray(embed.join(v_BNP, Y=Y, X=X, size=size)) * normal["std_Z"] + normal["mean_Z"]
    explained = [row["eval/explained"] for row in rows if row.get("eval/explained") is not None][-1]
    unit = "squared error of a hidden pixel (pixels have variance 1)"
    return [
        plots.loss_curves(folder / "loss.png", rows, unit=unit, title=f"{settings.experiment}: {data.name}"),
        draw.hidden_patches(
            folder / "prediction.png",
            image_BYXZ=image_BYXZ,
            prediction_BYXZ=prediction_BYXZ,
            hidden_BN=batch["hidden_BN"],
            size=size,
            title=f"held-out images, {int(batch['hidden_BN'][0].sum())} of {v_BNP.shape[1]} patches hidden:"
            f" the prediction explains {100 * explained:.0f} % of the hidden pixels' variance",
        ),
        draw.attention_maps(
            folder / "attention.png",
            image_YXZ=draw.seen(image_BYXZ[:1], batch["hidden_BN"][:1], size=size)[0],
            A_MHNS=np.asarray(seen["A_MBHNS"])[:, 0],
            grid=(Y // size, X // size),
            class_token=False,
        ),
    ]
