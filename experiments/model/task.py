"""Make the Work of an experiment from model, loss and data, and compute what the figures of experiments show."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.config import errors, settings as configs
from experiments.engine import run as runs, train_step
from experiments.model import losses, probe
from tfm import layout as layouts, models

BINS = 15  # of the calibration error, as in Guo et al. 2017
RECALLS = 100  # the most classes whose recall is in the summary


def make_work(
    settings: configs.Settings,
    model: models.Model,
    inputs: Callable[..., dict],
    measure: Callable[..., train_step.Ratios],
    data: Mapping[str, Any],
    *,
    baseline: train_step.Baseline | None = None,
    causal: tuple = (),
    predict: Callable | None = None,
    **fields: Any,
) -> runs.Work:
    """Return the work of a model: its task with this loss, its outputs, and the model itself for figures and tools.

    inputs: (batch, layout=ONE) -> the arguments of model.hidden. measure: (params, x_BND, batch, layout) -> metrics, of
    the tokens x_BND before the head. data: fields of the Task (splits.make_splits). baseline, causal: further fields.
    predict: (params, x_BND, batch, layout=ONE) -> outputs; None: the logits. fields: of the Work. Raises UserError
    for a batch norm with train.accumulation, which would normalise each microbatch by itself.
    """

    def loss(params: Any, batch: dict, *, key_B: Any = None, layout: layouts.Layout = layouts.ONE) -> tuple:
        x_BND, aux = model.hidden(params, **inputs(batch, layout), key_B=key_B, layout=layout)
        return measure(params, x_BND, batch, layout), aux

    def apply(params: Any, batch: dict) -> jax.Array:
        x_BND = model.hidden(params, **inputs(batch))[0]
        return predict(params, x_BND, batch) if predict else model.logits(params, x_BND)

    better = {name: metric.better for name, metric in losses.choose_metrics(settings.train.metrics).items()}
    task = train_step.Task(
        init=model.init,
        loss=loss,
        baseline=baseline,
        weights=model.weights,
        layout=model.layout,
        probe=None if settings.model.flax else probe.symmetry_metrics(settings.model),
        lines=model.lines,
        fixed=model.fixed,
        causal=causal,
        **data | {"better": better | data.get("better", {})},
    )
    batch_norm = (a := settings.train.accumulation) > 1 and train_step.has_batch_norm(task)
    errors.refuse((batch_norm, f"train.accumulation = {a} must be 1, because the model has a batch norm"))
    return runs.Work(task, model=model, inputs=inputs, apply=apply, **fields)


def predict_classes(work: runs.Work, params: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (class_B, probability_B): the most likely class of the first n held-out examples, and its probability."""

    @jax.jit
    def predict(params: Any, batch: dict) -> tuple[jax.Array, jax.Array]:
        p_BC = jax.nn.softmax(work.apply(params, batch))
        return p_BC.argmax(-1), p_BC.max(-1)

    held_out = work.task.evaluation
    pairs = [jax.device_get(predict(params, held_out[i])) for i in range(len(held_out))]
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


def look(work: runs.Work, params: Any, batch: dict, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return {name: activation of every layer} (block.Order), and "logits". Not for a Flax module."""
    x_BND, aux = work.model.hidden(params, **work.inputs(batch), look=names)
    return aux.get("look", {}) | {"logits": work.model.logits(params, x_BND)}


def map_first_example(work: runs.Work, params: Any, *, tokens: int | None = None) -> tuple[dict, np.ndarray]:
    """Return the first held-out example as a batch, and its attention weights A_MHNS.

    tokens: use only that many tokens, the first ones; None: all.
    """
    example = work.task.evaluation[0]
    batch = {name: array[:1] if tokens is None else array[:1, :tokens] for name, array in example.items()}
    activations = jax.jit(functools.partial(look, work, names=("A",)))(params, batch)
    return batch, np.asarray(activations["A"])[:, 0]
