"""Make the Task that an experiment gives to the training loop, and compute what the figures of experiments show."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.config import settings as configs
from experiments.engine import train_step
from experiments.model import flax_model, losses, model as models, probe

BINS = 15  # of the calibration error, as in Guo et al. 2017
RECALLS = 100  # the most classes whose recall is in the summary


def make_task(
    settings: configs.Settings,
    model: models.Model | flax_model.FlaxModel,
    loss: Callable,
    inputs: Callable[[dict], dict],
    **fields: Any,
) -> train_step.Task:
    """Return the task of a model, with symmetry metrics and attention maps.

    loss: Task.loss. inputs: a function batch -> the arguments of model.hidden for this batch. fields: other fields of
    the Task.
    """

    def maps(params: Any, batch: dict) -> jax.Array:
        return model.hidden(params, **inputs(batch), look=("A",))[1]["look"]["A"]

    def look(params: Any, batch: dict, names: tuple[str, ...]) -> dict[str, jax.Array]:
        x_BND, aux = model.hidden(params, **inputs(batch), look=names)
        return aux.get("look", {}) | {"logits": model.logits(params, x_BND)}

    common = {"lines": (f"attention: {model.attention}",), "weights": model.weights}
    metrics = losses.choose_metrics(settings.train.metrics)
    common["better"] = {name: metric.better for name, metric in metrics.items()} | fields.pop("better", {})
    if isinstance(model, flax_model.FlaxModel):
        common |= {"lines": common["lines"] + tuple(model.lines), "fixed": model.fixed}
    else:
        common |= {"probe": probe.symmetry_metrics(settings.model), "maps": maps, "look": look}
    return train_step.Task(init=model.init, loss=loss, **common | fields)


def predict_classes(task: train_step.Task, logits: Callable, params: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely class of each of the n held-out examples, and its probability."""

    @jax.jit
    def predict(params: Any, batch: dict) -> tuple[jax.Array, jax.Array]:
        p_BC = jax.nn.softmax(logits(params, batch))
        return p_BC.argmax(-1), p_BC.max(-1)

    pairs = [jax.device_get(predict(params, task.evaluation[i])) for i in range(len(task.evaluation))]
    predicted_B, probability_B = (np.concatenate(arrays)[:n] for arrays in zip(*pairs, strict=True))
    return predicted_B, probability_B


def measure_calibration(label_B: np.ndarray, predicted_B: np.ndarray, probability_B: np.ndarray) -> dict[str, float]:
    """Return {"eval/calibration_error"}: E = sum_b n_b / n |accuracy_b - confidence_b| (Guo et al. 2017, eq. 3).

    Bin b has the n_b examples whose probability of the predicted class is in (b / BINS, (b + 1) / BINS]; confidence_b
    is the mean of these probabilities. 0 is best: of the predictions made with 90 %, 90 % are correct.
    """
    bin_B = np.clip(np.ceil(probability_B * BINS).astype(int) - 1, 0, BINS - 1)
    excess_B = (label_B == predicted_B) - probability_B.astype(np.float64)  # its mean in a bin: accuracy - confidence
    return {"eval/calibration_error": float(np.abs(np.bincount(bin_B, excess_B)).sum() / len(label_B))}


def measure_recalls(label_B: np.ndarray, predicted_B: np.ndarray, classes: Sequence[str]) -> dict[str, dict]:
    """Return {"recall": {class: share of its examples that are predicted correctly}}, of the RECALLS worst classes."""
    count_C = np.bincount(label_B, minlength=len(classes))
    correct_C = np.bincount(label_B[label_B == predicted_B], minlength=len(classes))
    recall_C = np.where(count_C > 0, correct_C / np.maximum(count_C, 1), np.inf)
    lowest = np.argsort(recall_C, kind="stable")[: min(RECALLS, np.count_nonzero(count_C))]
    return {"recall": {classes[c]: float(recall_C[c]) for c in np.sort(lowest)}}


def map_first_example(task: train_step.Task, params: Any, *, tokens: int | None = None) -> tuple[dict, np.ndarray]:
    """Return the first held-out example as a batch, and its attention weights A_MHNS.

    tokens: use only that many tokens, the first ones; None: all.
    """
    batch = {name: array[:1] if tokens is None else array[:1, :tokens] for name, array in task.evaluation[0].items()}
    return batch, np.asarray(jax.jit(task.maps)(params, batch))[:, 0]
