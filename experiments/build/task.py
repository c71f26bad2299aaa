"""What the experiments share: a task made of a model's answer, what is measured of it, and examples; guesses."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.build import model as models, probe
from experiments.engine import batches, by_name, config, errors, train_step
from tfm import layout as layouts, loss

NAMED = "cross_entropy"
BLOCK, SHARE = 32, 10  # one of SHARE blocks, of so many examples each that have nothing in common, is the third part
RECALLS = 100  # classes in the summary
EVALUATED = 2**14  # tokens at once
Examples = tuple[batches.Fetch, int]  # and how many there are


def parts(settings: config.Settings, train: Examples, evaluation: Examples, *, tokens: int, apart: int = 1) -> dict:
    """The batches of both parts, as a task has them. tokens: of an example. apart: training examples whose numbers
    differ by that much have nothing in common (windows: N)."""

    def made(train: Examples, evaluation: Examples) -> dict[str, Any]:
        t, (fetch, n), (fetch_evaluation, n_evaluation) = settings.train, train, evaluation
        return {
            "train": batches.train(fetch, n=n, batch=t.batch_size, seed=settings.seed, growth=t.growth),
            "evaluation": batches.evaluation(fetch_evaluation, n=n_evaluation, batch=at_once(t, tokens, n_evaluation)),
            "tokens_per_example": tokens,
        }

    return made(train, evaluation) | {"tuning": lambda: made(*third(train, most=evaluation[1], apart=apart))}


def at_once(t: config.Settings, tokens: int, n: int) -> int:
    """How many of n examples, of so many tokens each, are evaluated at once: those of 16,384 tokens, as 256 windows of
    64 (more only need memory), or all. They are whole parts of train.accumulation, which devices share evenly, and one
    at least, which fits where a step does."""
    part = max(1, t.batch_size // max(1, t.accumulation))
    return part * max(1, min(EVALUATED // (part * tokens), -(-n // part)))


def third(train: Examples, *, most: int, apart: int = 1) -> tuple[Examples, Examples]:
    """What is left of the training examples, and the third part, to choose settings by: every tenth block, of which at
    most so many examples are evaluated. No example of one has anything in common with one of the other.
    UserError where there are too few."""
    fetch, n = train
    whole = min(SHARE * BLOCK * apart, n)  # a stretch of left, gap, block, gap
    block, gap = whole // SHARE, apart - 1
    left, each = whole - block - 2 * gap, -(-block // apart)
    stretches = n // whole if whole else 0
    if min(left, block) < 1:
        raise errors.UserError(f"{n} training examples are too few to keep a third part of them for study.tune")
    evaluated = min(each * stretches, most)

    def fetch_left(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        return fetch(index_B // left * whole + index_B % left, rng)

    def fetch_block(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        index_B = index_B * (each * stretches) // evaluated
        return fetch(index_B // each * whole + left + gap + index_B % each * apart, rng)

    return (fetch_left, left * stretches), (fetch_block, evaluated)


def of_model(
    settings: config.Settings, model: models.Model, apply: Callable, measure: Callable, **more: Any
) -> train_step.Task:
    """Return the task of a model that answers with classes or pixels. apply(params, batch, **options of model.hidden)
    -> (answer, aux); measure(answer, batch, layout) -> measures. more: other fields of Task."""

    def evaluate_loss(
        params: Any, batch: dict, *, key_B: jax.Array | None = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[train_step.Ratios, dict]:
        answer, aux = apply(params, batch, key_B=key_B, layout=layout)
        return measure(answer, batch, layout), aux

    return _task(settings, model, evaluate_loss, apply, **more)


def of_tokens(
    settings: config.Settings, model: models.Model, hidden: Callable, *, sparse: bool = False, **more: Any
) -> train_step.Task:
    """Return the task of a model of tokens: loss and accuracy of every token that is a target (target_BN, weight_BN).

    hidden(params, batch, **options of model.hidden) -> (x_BND, aux). sparse: whether few tokens are targets. A loss of
    the user's takes the logits; raises UserError if devices would share these.
    """
    own = measured(settings)
    if settings.train.loss != NAMED:
        if more["layout"].vocab:
            raise errors.UserError(f"train.loss = {settings.train.loss} takes whole logits: mesh.tensor must be 1")

        def apply(params: Any, batch: dict, **options: Any) -> tuple[jax.Array, dict]:
            x_BND, aux = hidden(params, batch, **options)
            return model.logits(params, x_BND, layout=options.get("layout", layouts.ONE)), aux

        def measure(logits_BNW: jax.Array, batch: dict, layout: layouts.Layout) -> train_step.Ratios:
            return own(logits_BNW, batch["target_BN"], batch["weight_BN"])

        return of_model(settings, model, apply, measure, **more)

    def evaluate_loss(
        params: Any, batch: dict, *, key_B: jax.Array | None = None, layout: layouts.Layout = layouts.ONE
    ) -> tuple[train_step.Ratios, dict]:
        x_BND, aux = hidden(params, batch, key_B=key_B, layout=layout)
        x_BND, head = model.output(params, x_BND, layout=layout)
        options = {"cap": model.cap, "sparse": sparse, "layout": layout}
        return loss.next_token(x_BND, head, batch["target_BN"], batch["weight_BN"], **options), aux

    return _task(settings, model, evaluate_loss, hidden, **more)


def _task(
    settings: config.Settings, model: models.Model, evaluate_loss: Callable, apply: Callable, **more: Any
) -> train_step.Task:
    """Return the task with what every model has: its initial parameters, symmetry measures and attention maps."""

    def maps(params: Any, batch: dict) -> jax.Array:
        return apply(params, batch, maps=True)[1]["A_MBHNS"]

    own = {"probe": probe.symmetry_metrics(settings.model), "maps": maps, "lines": (f"attention: {model.attention}",)}
    return train_step.Task(init=model.init, loss=evaluate_loss, **own | more)


def of_classes(
    settings: config.Settings, model: models.Model, apply: Callable, labels: Sequence[np.ndarray], **more: Any
) -> train_step.Task:
    """Return the task of a model that classifies an example (label_B, weight_B). If two examples were mixed, each label
    counts by its share (other_label_B, other_share_B). labels: label_B of both parts. apply: as in of_model."""
    own, (train_B, evaluation_B) = measured(settings), labels

    def measure(logits_BC: jax.Array, batch: dict, layout: layouts.Layout) -> train_step.Ratios:
        answers = [(logits_BC, batch["label_B"], batch["weight_B"])]
        if "other_label_B" in batch:
            weight_B, share_B = batch["weight_B"], batch["other_share_B"]
            answers = [(logits_BC, batch["label_B"], weight_B * (1 - share_B))]
            answers += [(logits_BC, batch["other_label_B"], weight_B * share_B)]
        return jax.tree.map(lambda *sums: functools.reduce(operator.add, sums), *(own(*one) for one in answers))

    guess = {"accuracy": "always the training part's most frequent class"}
    baseline = {"accuracy": float(np.mean(evaluation_B == np.bincount(train_B).argmax()))}
    return of_model(settings, model, apply, measure, baseline=baseline, guess=guess, **more)


def told(task: train_step.Task, apply: Callable, params: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest class of each of the n held-out examples, and its probability. apply: as in of_classes."""

    def likeliest(params: Any, batch: dict) -> tuple[jax.Array, jax.Array]:
        p_BC = jax.nn.softmax(apply(params, batch)[0])
        return p_BC.argmax(-1), p_BC.max(-1)

    answer = jax.jit(likeliest)
    pairs = [jax.device_get(answer(params, task.evaluation[i])) for i in range(len(task.evaluation))]
    predicted_B, probability_B = (np.concatenate(arrays)[:n] for arrays in zip(*pairs, strict=True))
    return predicted_B, probability_B


def recalls(label_B: np.ndarray, predicted_B: np.ndarray, classes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the share of the held-out examples of each class that are predicted right; of many classes the lowest."""
    count_C = np.bincount(label_B, minlength=len(classes))
    right_C = np.bincount(label_B[label_B == predicted_B], minlength=len(classes))
    recall_C = np.where(count_C > 0, right_C / np.maximum(count_C, 1), np.inf)
    lowest = np.argsort(recall_C, kind="stable")[: min(RECALLS, np.count_nonzero(count_C))]
    return {"recall": {classes[c]: float(recall_C[c]) for c in np.sort(lowest)}}


def measured(settings: config.Settings) -> Callable[..., train_step.Ratios]:
    """(logits, target, weight) -> the loss that train.loss names, and the accuracy. UserError for a loss of one's own
    that raises, or is not (sum, count)."""
    name = settings.train.loss
    own = by_name.choose("loss", name, {NAMED: loss.cross_entropy})
    if name != NAMED:
        logits, target, weight = jnp.zeros((2, 5, 3)), jnp.zeros((2, 5), int), jnp.ones((2, 5))
        with by_name.told(called := f"train.loss = {name}"):
            found = jax.eval_shape(own, logits, target, weight)
        if [getattr(one, "shape", None) for one in jax.tree.leaves(found)] != [(), ()]:
            raise errors.UserError(f"{called}: (logits, target, weight) -> (sum, count) is expected, two numbers")
    return lambda *answer: {"loss": own(*answer), "accuracy": loss.accuracy(*answer)}


def example(task: train_step.Task, params: Any, *, tokens: int | None = None) -> tuple[dict, np.ndarray]:
    """The first held-out example, of words up to so many of them, and its attention weights A_MHNS."""
    batch = {name: array[:1] if tokens is None else array[:1, :tokens] for name, array in task.evaluation[0].items()}
    return batch, np.asarray(jax.jit(task.maps)(params, batch))[:, 0]


def always(evaluation: Any, *, W: int, answer: int | None = None) -> float:
    """The accuracy, on what the evaluation asks for, of always giving this answer; None: its most frequent one."""
    count_W = np.zeros(W)
    for i in range(len(evaluation)):
        batch = evaluation[i]
        count_W += np.bincount(batch["target_BN"].ravel(), weights=batch["weight_BN"].ravel(), minlength=W)
    if not count_W.any():
        raise errors.UserError("not one held-out word is hidden: give more text")
    return float((count_W.max() if answer is None else count_W[answer]) / count_W.sum())


def explained(prediction_BNP: Any, target_BNP: Any, average_NP: Any, weight_BN: Any) -> train_step.Ratios:
    """The squared error per number asked for, and the share it explains of the squared distance from the average."""
    average_BNP = jnp.broadcast_to(average_NP, target_BNP.shape)
    error, count = loss.squared_error(prediction_BNP, target_BNP, weight_BN)
    distance, _ = loss.squared_error(average_BNP, target_BNP, weight_BN)
    return {"loss": (error, count), "explained": (distance - error, distance)}


def always_average(evaluation: Any, target: Callable[[dict], np.ndarray], average_NP: np.ndarray) -> float:
    """The squared error, on what the evaluation asks for, of always giving the average. target: of a batch."""
    error = count = 0.0
    for i in range(len(evaluation)):
        weight_BN1 = evaluation[i]["weight_BN"][..., None]
        error += float(np.sum(weight_BN1 * (target(evaluation[i]) - average_NP) ** 2, dtype=np.float64))
        count += float(weight_BN1.sum()) * average_NP.shape[-1]
    return error / count
