"""Tasks: what an experiment hands to the training loop, made of a model, a loss and batches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.build import baselines, losses, model as models, probe
from experiments.engine import config, train_step
from experiments.engine.train_step import Ratios
from tfm import layout as layouts

RECALLS = 100  # the most classes in the summary
CLASS_GUESS = "always the training part's most frequent class"


def make_task(
    settings: config.Settings, model: models.Model, apply: Callable, measure: Callable, **fields: Any
) -> train_step.Task:
    """Return the task of a model that predicts classes or pixels.

    apply(params, batch, **options of model.hidden) -> (prediction, aux). measure(prediction, batch, layout) -> metrics.
    fields: other fields of Task.
    """

    def loss(
        params: Any, batch: dict, *, key_B: jax.Array | None = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[Ratios, dict]:
        prediction, aux = apply(params, batch, key_B=key_B, layout=layout)
        return measure(prediction, batch, layout), aux

    return _complete(settings, model, loss, apply, **fields)


def make_token_task(
    settings: config.Settings, model: models.Model, hidden: Callable, *, sparse: bool = False, **fields: Any
) -> train_step.Task:
    """Return the task of a model of tokens: loss and accuracy of the tokens with a target (target_BN, weight_BN).

    hidden(params, batch, **options of model.hidden) -> (x_BND, aux). sparse: few tokens have a target. fields: other
    fields of Task.
    """
    measure = losses.choose_token_loss(settings, model, sparse=sparse, layout=fields["layout"])

    def loss(
        params: Any, batch: dict, *, key_B: jax.Array | None = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[Ratios, dict]:
        x_BND, aux = hidden(params, batch, key_B=key_B, layout=layout)
        return measure(params, x_BND, batch, layout), aux

    return _complete(settings, model, loss, hidden, **fields)


def make_class_task(
    settings: config.Settings, model: models.Model, apply: Callable, labels: Sequence[np.ndarray], **fields: Any
) -> train_step.Task:
    """Return the task of a classifier (label_B, weight_B). labels: label_B of the training and of the held-out data.

    apply and fields: as in make_task.
    """
    measure = losses.choose_class_loss(settings)
    baseline = {"accuracy": baselines.class_accuracy(*labels)}
    fields |= {"baseline": baseline, "guess": {"accuracy": CLASS_GUESS}}
    return make_task(settings, model, apply, lambda logits_BC, batch, _: measure(logits_BC, batch), **fields)


def _complete(
    settings: config.Settings, model: models.Model, loss: Callable, apply: Callable, **fields: Any
) -> train_step.Task:
    """Return the task with what every model has: initial parameters, symmetry metrics and attention maps."""

    def maps(params: Any, batch: dict) -> jax.Array:
        return apply(params, batch, maps=True)[1]["A_MBHNS"]

    common = {"probe": probe.symmetry_metrics(settings.model), "maps": maps}
    common["lines"] = (f"attention: {model.attention}",)
    return train_step.Task(init=model.init, loss=loss, **common | fields)


def predict_classes(task: train_step.Task, apply: Callable, params: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely class of each of the n held-out examples, and its probability."""

    @jax.jit
    def predict(params: Any, batch: dict) -> tuple[jax.Array, jax.Array]:
        p_BC = jax.nn.softmax(apply(params, batch)[0])
        return p_BC.argmax(-1), p_BC.max(-1)

    pairs = [jax.device_get(predict(params, task.evaluation[i])) for i in range(len(task.evaluation))]
    predicted_B, probability_B = (np.concatenate(arrays)[:n] for arrays in zip(*pairs, strict=True))
    return predicted_B, probability_B


def measure_recalls(label_B: np.ndarray, predicted_B: np.ndarray, classes: Sequence[str]) -> dict[str, dict]:
    """Return {"recall": {class: share of its examples that are predicted correctly}}, of the RECALLS lowest classes."""
    count_C = np.bincount(label_B, minlength=len(classes))
    correct_C = np.bincount(label_B[label_B == predicted_B], minlength=len(classes))
    recall_C = np.where(count_C > 0, correct_C / np.maximum(count_C, 1), np.inf)
    lowest = np.argsort(recall_C, kind="stable")[: min(RECALLS, np.count_nonzero(count_C))]
    return {"recall": {classes[c]: float(recall_C[c]) for c in np.sort(lowest)}}


def map_first_example(task: train_step.Task, params: Any, *, tokens: int | None = None) -> tuple[dict, np.ndarray]:
    """Return the first held-out example, with at most so many tokens, and its attention weights A_MHNS."""
    batch = {name: array[:1] if tokens is None else array[:1, :tokens] for name, array in task.evaluation[0].items()}
    return batch, np.asarray(jax.jit(task.maps)(params, batch))[:, 0]
