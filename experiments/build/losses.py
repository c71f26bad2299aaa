"""Losses and metrics of the experiments, as {name: (sum, count)}; tfm/loss.py has the mathematics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.build import model as models
from experiments.engine import by_name, config, errors
from experiments.engine.train_step import Ratios
from tfm import layout as layouts, loss

CROSS_ENTROPY = "cross_entropy"


def choose_loss(settings: config.Settings) -> Callable[[jax.Array, jax.Array, jax.Array], Ratios]:
    """Return (logits, target, weight) -> {"loss", "accuracy"}, with the loss that train.loss names.

    Raises UserError if a loss of the user's fails, or does not return (sum, count).
    """
    name = settings.train.loss
    chosen = by_name.choose("loss", name, {CROSS_ENTROPY: loss.cross_entropy})
    if name != CROSS_ENTROPY:
        logits, target, weight = jnp.zeros((2, 5, 3)), jnp.zeros((2, 5), int), jnp.ones((2, 5))
        with by_name.user_errors(f"train.loss = {name}"):
            result = jax.eval_shape(chosen, logits, target, weight)
        if [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(result)] != [(), ()]:
            raise errors.UserError(f"train.loss = {name} must return (sum, count), two numbers")

    def measure(logits: jax.Array, target: jax.Array, weight: jax.Array) -> Ratios:
        return {"loss": chosen(logits, target, weight), "accuracy": loss.accuracy(logits, target, weight)}

    return measure


def choose_token_loss(
    settings: config.Settings, model: models.Model, *, sparse: bool, layout: layouts.Layout
) -> Callable[..., Ratios]:
    """Return (params, x_BND, batch, layout) -> {"loss", "accuracy"} of the tokens with a target (target_BN, weight_BN).

    The cross-entropy never holds the logits of all tokens (loss.next_token); a loss of the user's takes them. sparse:
    few tokens have a target. Raises UserError if the layout shards the logits that the user's loss takes.
    """
    if settings.train.loss == CROSS_ENTROPY:

        def measure(params: Any, x_BND: jax.Array, batch: dict, layout: layouts.Layout) -> Ratios:
            x_BND, head = model.output(params, x_BND, layout=layout)
            target_BN, weight_BN, cap = batch["target_BN"], batch["weight_BN"], model.spec.cap
            return loss.next_token(x_BND, head, target_BN, weight_BN, cap=cap, sparse=sparse, layout=layout)

        return measure
    if layout.vocab:
        raise errors.UserError(f"train.loss = {settings.train.loss} takes whole logits: set mesh.tensor = 1")
    user_loss = choose_loss(settings)

    def measure_logits(params: Any, x_BND: jax.Array, batch: dict, layout: layouts.Layout) -> Ratios:
        logits_BNW = model.logits(params, x_BND, layout=layout)
        return user_loss(logits_BNW, batch["target_BN"], batch["weight_BN"])

    return measure_logits


def choose_class_loss(settings: config.Settings) -> Callable[[jax.Array, dict], Ratios]:
    """Return (logits_BC, batch) -> {"loss", "accuracy"} of labels (label_B, weight_B).

    If two examples are mixed, each label counts by its share (other_label_B, other_share_B).
    """
    measure = choose_loss(settings)

    def measure_classes(logits_BC: jax.Array, batch: dict) -> Ratios:
        label_B, weight_B = batch["label_B"], batch["weight_B"]
        if "other_label_B" not in batch:
            return measure(logits_BC, label_B, weight_B)
        share_B = batch["other_share_B"]
        first = measure(logits_BC, label_B, weight_B * (1 - share_B))
        return jax.tree.map(jnp.add, first, measure(logits_BC, batch["other_label_B"], weight_B * share_B))

    return measure_classes


def explain_variance(prediction_BNP: Any, target_BNP: Any, average_NP: Any, weight_BN: Any) -> Ratios:
    """Return {"loss": squared error, "explained": its share of the squared distance to the average that it removes}."""
    average_BNP = jnp.broadcast_to(average_NP, target_BNP.shape)
    error, count = loss.squared_error(prediction_BNP, target_BNP, weight_BN)
    distance, _ = loss.squared_error(average_BNP, target_BNP, weight_BN)
    return {"loss": (error, count), "explained": (distance - error, distance)}
