"""Image to image: most patches are hidden, and their pixels are predicted from the others (E26)."""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.build import baselines, losses, model as models, sharding, splits, task as tasks
from experiments.data import images, windows
from experiments.engine import config as configs, run, train_step
from tfm import embed, head, layout as layouts


def config() -> dict[str, dict]:
    """Return the settings of the images, and of the share that is hidden."""
    return {"image": images.FIELDS | {"mask_ratio": (0.75, "share of hidden patches")}}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """Return the images with hidden patches, the model, its loss, and the figures."""
    i, data = settings.image, images.load_described(settings.image.source, settings.image.size)
    train, evaluation, normal = images.make_examples(data, i.augment)
    N, P = models.count_patches(*data.train_image_BYXZ.shape[1:], patch=i.patch)
    hide = functools.partial(windows.patches, N=N, share=i.mask_ratio)
    fields = splits.make_splits(settings, (hide(train[0]), train[1]), (hide(evaluation[0]), evaluation[1]), tokens=N)
    embedding, output = models.bind_sizes(embed.masked_patches, P=P), models.bind_sizes(head.pixels, P=P)
    layout, mask = sharding.choose_layout(settings.model, devices, N=N), models.add_window(settings.model, None)
    model = models.build_model(settings.model, embed=embedding, head=output, N=N, layout=layout, mask=mask)
    average_YXZ = data.train_image_BYXZ.mean(axis=0, dtype=np.float64).astype(np.float32)
    average_YXZ = (average_YXZ - normal["mean_Z"]) / normal["std_Z"]

    def cut(image_BYXZ: Any, layout: layouts.Layout = layouts.ONE) -> Any:
        return layouts.take_own_tokens(embed.cut(image_BYXZ, size=i.patch), layout)

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        patches = {"v_BNP": cut(batch["image_BYXZ"], layout), "hidden_BN": batch["hidden_BN"]}
        return {"inputs": patches, "mask": mask}

    def loss(params: Any, batch: dict, *, key_B: Any = None, layout: layouts.Layout = layouts.ONE) -> tuple:
        prediction_BNP, aux = model.apply(params, **inputs(batch, layout), key_B=key_B, layout=layout)
        target_BNP, average_NP = cut(batch["image_BYXZ"], layout), cut(average_YXZ[None], layout)
        return losses.explain_variance(prediction_BNP, target_BNP, average_NP, batch["weight_BN"]), aux

    def predict(params: Any, batch: dict) -> jax.Array:
        return model.apply(params, **inputs(batch))[0]

    def target(batch: dict) -> np.ndarray:
        return cut(batch["image_BYXZ"])

    average = baselines.average_error(fields["evaluation"], target, cut(average_YXZ[None]))
    fields |= {"baseline": {"loss": average}, "guess": {"loss": "always the average training image"}}
    task = tasks.make_task(settings, model, loss, inputs, layout=layout, **fields)
    return run.Work(
        task,
        figures=functools.partial(figures, settings, data, normal, task, predict),
        apply=predict,
        lines=data.lines,
        data_sha256=data.sha256,
    )


def figures(
    settings: configs.Settings, data: images.Images, normal: dict, task: train_step.Task, predict, params, folder, rows
) -> Iterator[pathlib.Path]:
    """Yield loss curves; the first held-out images, what was seen and predicted of them; the attention of one image."""
    from experiments.figures import images as draw, plots  # they import matplotlib, which takes a second

    folder, size, image_BYXZ = folder / "figures", settings.image.patch, data.evaluation_image_BYXZ[: draw.MOST_IMAGES]
    unit = "squared error of a hidden pixel (pixels have variance 1)"
    title = f"{settings.experiment}: {data.name}"
    yield plots.loss_curves(folder / "loss.png", rows, unit=unit, title=title)
    B, Y, X, _ = image_BYXZ.shape
    batch = {name: array[:B] for name, array in task.evaluation[0].items()}
    v_BNP = jax.jit(predict)(params, batch)
    explained = [row["eval/explained"] for row in rows if row.get("eval/explained") is not None][-1]
    yield draw.hidden_patches(
        folder / "prediction.png",
        image_BYXZ=image_BYXZ,
        prediction_BYXZ=np.asarray(embed.join(v_BNP, Y=Y, X=X, size=size)) * normal["std_Z"] + normal["mean_Z"],
        hidden_BN=batch["hidden_BN"],
        size=size,
        title=f"held-out images, {int(batch['hidden_BN'][0].sum())} of {v_BNP.shape[1]} patches hidden:"
        f" the prediction explains {100 * explained:.0f} % of the hidden pixels' variance",
    )
    yield draw.attention_maps(
        folder / "attention.png",
        image_YXZ=draw.hide(image_BYXZ[:1], batch["hidden_BN"][:1], size=size)[0],
        A_MHNS=tasks.map_first_example(task, params)[1],
        grid=(Y // size, X // size),
        class_token=False,
    )
