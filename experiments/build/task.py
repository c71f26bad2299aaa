"""Tasks: what an experiment hands to the training loop, made of a model, a loss and batches; and what figures show."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.build import model as models, probe
from experiments.engine import config, train_step

RECALLS = 100  # the most classes in the summary


def make_task(
    settings: config.Settings, model: models.Model, loss: Callable, inputs: Callable[[dict], dict], **fields: Any
) -> train_step.Task:
    """Return the task of a model: its loss (Task.loss), symmetry metrics and attention maps.

    inputs: batch -> the arguments of model.hidden that are of the batch. fields: other fields of Task.
    """

    def maps(params: Any, batch: dict) -> jax.Array:
        return model.hidden(params, **inputs(batch), maps=True)[1]["A_MBHNS"]

    lines = (f"attention: {model.attention}",)
    common = {"probe": probe.symmetry_metrics(settings.model), "maps": maps, "lines": lines}
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
