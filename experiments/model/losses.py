"""Losses and metrics of the experiments, each as name -> (sum, count). The equations are in tfm/loss.py."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config import by_name, errors, settings as configs
from experiments.engine.train_step import Ratios
from experiments.folder import checkpoint
from tfm import layout as layouts, loss, models

CROSS_ENTROPY = "cross_entropy"


class Metric(NamedTuple):
    """`measure(logits, target, weight) -> (sum, count)`, and which values are better: "more" or "less"."""

    measure: Callable[..., loss.Ratio]
    better: str


METRICS = {"top5": Metric(loss.top5, "more"), CROSS_ENTROPY: Metric(loss.cross_entropy, "less")}


def choose_loss(settings: configs.Settings) -> Callable[[jax.Array, jax.Array, jax.Array], Ratios]:
    """Return the function (logits, target, weight) -> {metric: (sum, count)} for train.loss and train.metrics.

    The metrics are "loss", "accuracy" and those of train.metrics. Raises UserError if a name is unknown, or if a loss
    or metric of the user's fails or does not return (sum, count). The function raises UserError unless the logits have
    the shape of `target` and a last axis of classes.
    """
    name, metrics = settings.train.loss, choose_metrics(settings.train.metrics)
    if name.partition(":")[0] in NUMBERED:
        chosen = _parse_loss(name)
    else:
        chosen = by_name.choose("loss", name, {CROSS_ENTROPY: loss.cross_entropy} | NUMBERED)
    functions = {f"train.loss = {name}": chosen} if by_name.CODE.fullmatch(name) else {}
    functions |= {f"the metric {metric} of train.metrics": metrics[metric].measure for metric in metrics}
    logits, target, weight = np.zeros((2, 5, 3)), np.zeros((2, 5), int), np.ones((2, 5))
    for label, function in functions.items():
        with by_name.user_errors(label):
            result = jax.eval_shape(function, logits, target, weight)
        if [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(result)] != [(), ()]:
            raise errors.UserError(f"{label} must return (sum, count), two scalars")

    def measure(logits: jax.Array, target: jax.Array, weight: jax.Array) -> Ratios:
        arrays = logits, target, weight
        if logits.shape[:-1] != target.shape:
            raise errors.UserError(
                f"the model returns logits of shape {logits.shape} for targets of {target.shape}. "
                "Return a vector of logits for each target"
            )
        measures = {metric: metrics[metric].measure(*arrays) for metric in metrics}
        return {"loss": chosen(*arrays), "accuracy": loss.accuracy(*arrays)} | measures

    return measure


def choose_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics that train.metrics names; "my_file:top5" is called top5.

    Raises UserError if a name is unknown, used twice or one of checkpoint.BETTER, or if a metric is not a Metric.
    """
    metrics = {name.rpartition(":")[2]: by_name.choose("metric", name, METRICS, "train.metrics") for name in names}
    wrong = [name for name in metrics if name in checkpoint.BETTER or metrics[name].better not in ("more", "less")]
    if wrong or len(metrics) < len(names):
        raise errors.UserError(
            f"train.metrics = {list(names)}: the names after the colons must differ from each other and from "
            f'{", ".join(checkpoint.BETTER)}, and each metric must be a pair (measure, "more" or "less")'
        )
    return metrics


def _parse_loss(name: str) -> Callable[..., loss.Ratio]:
    """Return the loss of "label_smoothing:0.1" or "class_weights:1,2.5,1". Raises UserError for invalid numbers."""
    kind, _, text = name.partition(":")
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    smooths = kind == "label_smoothing"
    form = "label_smoothing:0.1, with a share of at least 0 and less than 1"
    form = form if smooths else "class_weights:1,2.5,1, with weights of at least 0 that are not all 0"
    is_valid = (len(numbers) == 1 and numbers[0] < 1) if smooths else 0 < sum(numbers) < math.inf
    if min(numbers) < 0 or not is_valid:
        raise errors.UserError(f"train.loss = {name} must have the form {form}")
    return NUMBERED[kind](*numbers)


def _weigh_classes(*weights: float) -> Callable[..., loss.Ratio]:
    def measure(logits: jax.Array, target: jax.Array, weight: jax.Array) -> loss.Ratio:
        if logits.shape[-1] != len(weights):
            raise errors.UserError(
                f"train.loss has {len(weights)} class weights for {logits.shape[-1]} classes. Give one for each class"
            )
        return loss.weighted_cross_entropy(logits, target, weight, weight_C=jnp.array(weights))

    return measure


NUMBERED = {
    "label_smoothing": lambda share: functools.partial(loss.smoothed_cross_entropy, smoothing=share),
    "class_weights": _weigh_classes,
}


def choose_token_loss(
    settings: configs.Settings, model: models.Model, *, sparse: bool, layout: layouts.Layout
) -> Callable[..., Ratios]:
    """Return a function (params, x_BND, batch, layout) -> {metric: (sum, count)} of batches of target_BN and weight_BN.

    x_BND: the tokens before the head. The metrics are "loss", "accuracy" and those of train.metrics. The cross-entropy
    never stores the logits of all tokens (loss.in_chunks), but any other loss, and train.metrics, receive them. sparse:
    True if few tokens have a target. Raises UserError if train.loss or train.metrics is invalid, or if one needs all
    logits and devices share the vocabulary.
    """
    if settings.train.loss == CROSS_ENTROPY and not settings.train.metrics:
        loss_of_head = functools.partial(model.loss, sparse=sparse)
        return lambda params, x_BND, batch, layout: loss_of_head(
            params, x_BND, batch["target_BN"], batch["weight_BN"], layout=layout
        )
    if layout.vocab:
        name = "metrics" if settings.train.loss == CROSS_ENTROPY else f"loss = {settings.train.loss}"
        raise errors.UserError(
            f"train.{name} needs the logits of the whole vocabulary on each device. Set mesh.tensor = 1"
        )
    measure_tokens = choose_loss(settings)

    def measure_logits(params: Any, x_BND: jax.Array, batch: dict, layout: layouts.Layout) -> Ratios:
        logits_BNW = model.logits(params, x_BND, layout=layout)
        return measure_tokens(logits_BNW, batch["target_BN"], batch["weight_BN"])

    return measure_logits


def choose_class_loss(
    settings: configs.Settings, model: models.Model, predict: Callable | None = None
) -> Callable[..., Ratios]:
    """Return a function (params, x_BND, batch, layout) -> {metric: (sum, count)} for batches of label_B and weight_B.

    The metrics are "loss", "accuracy" and those of train.metrics. predict: (params, x_BND, batch, layout) -> logits_BC;
    None: the logits of the model's head. If the images are mixed (mixup, cutmix), the metrics of other_label_B have the
    weight other_share_B, and those of label_B 1 - other_share_B.
    """
    measure = choose_loss(settings)

    def measure_classes(params: Any, x_BND: jax.Array, batch: dict, layout: layouts.Layout) -> Ratios:
        label_B, weight_B = batch["label_B"], batch["weight_B"]
        if predict:
            logits_BC = predict(params, x_BND, batch, layout)
        else:
            logits_BC = model.logits(params, x_BND, layout=layout)
        if "other_label_B" not in batch:
            return measure(logits_BC, label_B, weight_B)
        share_B = batch["other_share_B"]
        first = measure(logits_BC, label_B, weight_B * (1 - share_B))
        return jax.tree.map(jnp.add, first, measure(logits_BC, batch["other_label_B"], weight_B * share_B))

    return measure_classes


def explain_variance(prediction_BNP: Any, target_BNP: Any, average_NP: Any, weight_BN: Any) -> Ratios:
    """Return {"loss": (error, count), "explained": (variance - error, variance)}.

    error and variance are the weighted sums of the squared distances of the targets from the predictions and from
    average_NP. count is the weighted number of pixels.
    """
    average_BNP = jnp.broadcast_to(average_NP, target_BNP.shape)
    error, count = loss.squared_error(prediction_BNP, target_BNP, weight_BN)
    distance, _ = loss.squared_error(average_BNP, target_BNP, weight_BN)
    return {"loss": (error, count), "explained": (distance - error, distance)}
