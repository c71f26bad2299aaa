"""Baselines: the metrics of guesses that ignore the input."""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.engine import errors


def guess_token(
    evaluation: Sequence[dict], *, W: int, answer: int | None = None, name: str = "training part's"
) -> dict[str, dict]:
    """Return the fields `baseline` and `guess` of a Task: always predict the token `answer`.

    answer: None for the most frequent target. name: the data in which this token is the most frequent.
    """
    count_W = np.zeros(W)
    for i in range(len(evaluation)):
        batch = evaluation[i]
        count_W += np.bincount(batch["target_BN"].ravel(), weights=batch["weight_BN"].ravel(), minlength=W)
    if not count_W.any():
        raise errors.UserError("no held-out token is a target. Give more text")
    accuracy = float((count_W.max() if answer is None else count_W[answer]) / count_W.sum())
    return {"baseline": {"accuracy": accuracy}, "guess": {"accuracy": f"always the {name} most frequent token"}}


def guess_class(train_label_B: np.ndarray, evaluation_label_B: np.ndarray) -> dict[str, dict]:
    """Return the fields `baseline` and `guess` of a Task: always predict the training data's most frequent class."""
    accuracy = float(np.mean(evaluation_label_B == np.bincount(train_label_B).argmax()))
    guess = "always the training part's most frequent class"
    return {"baseline": {"accuracy": accuracy}, "guess": {"accuracy": guess}}


def average_error(evaluation: Sequence[dict], target: Callable[[dict], np.ndarray], average_NP: np.ndarray) -> float:
    """Return the squared error of always predicting the average. target: batch -> target_BNP."""
    error = count = 0.0
    for i in range(len(evaluation)):
        weight_BN1 = evaluation[i]["weight_BN"][..., None]
        error += float(np.sum(weight_BN1 * (target(evaluation[i]) - average_NP) ** 2, dtype=np.float64))
        count += float(weight_BN1.sum()) * average_NP.shape[-1]
    return error / count
