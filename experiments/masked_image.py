"""Image to image: most patches are hidden, and their pixels are predicted from the others (E26)."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models
from experiments.data import images, masking
from experiments.engine import batches, run, step
from experiments.engine import config as configs
from tfm import embed, head, loss
from tfm import layout as layouts


def config() -> dict[str, ConfigDict]:
    """The images, and how much of them is hidden."""
    image = ConfigDict()
    image.source = "digits"  # digits (scikit-learn), mnist, fashion_mnist, or a path to IDX files or an .npz
    image.patch = 2  # pixels of a patch's side
    image.mask_ratio = 0.75  # share of hidden patches
    image.shift = 0.0  # augmentation: each training image is moved by up to so many pixels (or parts of one) each way
    return {"image": image}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The images, what is hidden of them, the model, what is measured."""
    size = settings.image.patch
    data = images.configured(settings.image)
    mean_Z, std_Z = images.statistics(data.train_image_BYXZ)
    normal = {"mean_Z": mean_Z, "std_Z": std_Z}
    average_YXZ = (data.train_image_BYXZ.mean(axis=0, dtype=np.float64).astype(np.float32) - mean_Z) / std_Z
    N, P = models.patches(*data.train_image_BYXZ.shape[1:], patch=size)
    training, evaluation = parts(settings, data, normal, N=N)
    model, mask = build(settings, N=N, P=P), models.masked(settings.model, None)

    def predict(params: Any, batch: dict, over: layouts.Layout = layouts.ONE, **options: Any) -> Any:
        v_BNP = layouts.own(embed.cut(batch["image_BYXZ"], size=size), over)
        return model.apply(params, {"v_BNP": v_BNP, "hidden_BN": batch["hidden_BN"]}, mask=mask, over=over, **options)

    def loss_and_metrics(
        params: Any, batch: dict, key_B: jax.Array | None, over: layouts.Layout = layouts.ONE
    ) -> step.Ratios:
        prediction_BNP, seen = predict(params, batch, over, key_B=key_B)
        return measures(prediction_BNP, batch, average_YXZ, size=size, over=over) | step.running(seen)

    task = step.Task(
        init=model.init,
        loss_and_metrics=loss_and_metrics,
        train=training,
        evaluation=evaluation,
        tokens_per_example=N,
        baseline={"loss": baseline(evaluation, average_YXZ, size=size)},
        guess={"loss": "always the average training image"},
        layout=models.layout(settings.model, devices, N=N),
        probe=models.probe(settings.model),
        maps=lambda params, batch: predict(params, batch, maps=True)[1]["A_MBHNS"],
    )
    show = functools.partial(figures, settings, data, normal, task, predict)
    return run.Work(task, show, lambda params, batch: predict(params, batch)[0], lines=data.said.splitlines())


def parts(settings: configs.Settings, data: images.Images, normal: dict, *, N: int) -> tuple[Any, Any]:
    """Batches of normalised images with hidden patches: of the training part, and of the one held out."""
    t, hide = settings.train, functools.partial(masking.patches, N=N, share=settings.image.mask_ratio)
    fetch, n = images.examples(data.train_image_BYXZ, data.train_label_B, shift=settings.image.shift, **normal)
    fetch_evaluation, n_evaluation = images.examples(data.evaluation_image_BYXZ, data.evaluation_label_B, **normal)
    return (
        batches.train(hide(fetch), n=n, batch=t.batch_size, seed=settings.seed, growth=t.growth),
        batches.evaluation(hide(fetch_evaluation), n=n_evaluation, batch=t.evaluate_batch),
    )


def build(settings: configs.Settings, *, N: int, P: int) -> models.Model:
    """The transformer from patches, some of them hidden, to the pixels of all of them."""
    return models.build(
        settings.model,
        embed=models.sized(embed.masked_patches, P=P),
        head=models.sized(head.pixels, P=P),
        N=N,
    )


def measures(
    prediction_BNP: Any, batch: dict, average_YXZ: np.ndarray, *, size: int, over: layouts.Layout = layouts.ONE
) -> step.Ratios:
    """The squared error per hidden pixel, and the share it explains of the squared distance from the average image."""
    target_BNP = layouts.own(embed.cut(batch["image_BYXZ"], size=size), over)
    average_BNP = jnp.broadcast_to(layouts.own(embed.cut(average_YXZ[None], size=size), over), target_BNP.shape)
    error, pixels = loss.squared_error(prediction_BNP, target_BNP, batch["weight_BN"])
    distance, _ = loss.squared_error(average_BNP, target_BNP, batch["weight_BN"])
    return {"loss": (error, pixels), "explained": (distance - error, distance)}


def baseline(evaluation: Any, average_YXZ: np.ndarray, *, size: int) -> float:
    """The loss, on what the evaluation asks for, of predicting the average training image whatever is seen."""
    average_NP = embed.cut(average_YXZ[None], size=size)[0]
    error = pixels = 0.0
    for i in range(len(evaluation)):
        weight_BN = evaluation[i]["weight_BN"]
        difference_BNP = embed.cut(evaluation[i]["image_BYXZ"], size=size) - average_NP
        error += float(np.sum(weight_BN[..., None] * difference_BNP**2, dtype=np.float64))
        pixels += float(weight_BN.sum()) * difference_BNP.shape[-1]
    return error / pixels


def figures(
    settings, data: images.Images, normal: dict, task: step.Task, predict, params, folder: pathlib.Path, rows: list
):
    """Loss curves; what the first held-out images were, looked like and became; where the tokens of one attend."""
    from experiments.figures import images as image_figures
    from experiments.figures import plots as draw  # matplotlib, only where something is drawn

    size, image_BYXZ = settings.image.patch, data.evaluation_image_BYXZ[: image_figures.MOST_IMAGES]
    B, Y, X, _ = image_BYXZ.shape
    batch = {name: array[:B] for name, array in task.evaluation[0].items()}
    v_BNP, seen = jax.jit(functools.partial(predict, maps=True))(params, batch)
    prediction_BYXZ = np.asarray(embed.join(v_BNP, Y=Y, X=X, size=size)) * normal["std_Z"] + normal["mean_Z"]
    explained = [row["eval/explained"] for row in rows if row.get("eval/explained") is not None][-1]
    files = {name: folder / "figures" / f"{name}.png" for name in ("loss", "prediction", "attention")}
    unit = "squared error of a hidden pixel (pixels have variance 1)"
    draw.loss_figure(files["loss"], rows, unit=unit, title=f"{settings.experiment}: {data.name}")
    image_figures.hidden_patches(
        files["prediction"],
        image_BYXZ=image_BYXZ,
        prediction_BYXZ=prediction_BYXZ,
        hidden_BN=batch["hidden_BN"],
        size=size,
        title=f"held-out images, {int(batch['hidden_BN'][0].sum())} of {v_BNP.shape[1]} patches hidden:"
        f" the prediction explains {100 * explained:.0f} % of the hidden pixels' variance",
    )
    draw.attention_maps(
        files["attention"],
        image_YXZ=image_figures.seen(image_BYXZ[:1], batch["hidden_BN"][:1], size=size)[0],
        A_MHNS=np.asarray(seen["A_MBHNS"])[:, 0],
        grid=(Y // size, X // size),
        class_token=False,
    )
    return list(files.values())
