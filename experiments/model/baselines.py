"""Baselines: the metrics of predictions that ignore the input."""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.config import errors


def guess_token(
    evaluation: Sequence[dict], *, W: int, token: int | None = None, owner: str = "training part's"
) -> dict[str, dict]:
    """Return the fields `baseline` and `guess` of a Task: the accuracy of always predicting one of W tokens.

    token: the predicted token; None: the most frequent target of the evaluation. owner: the data in which this token is
    the most frequent, for the description. Raises UserError if no token of the evaluation is a target.
    """
    count_W = np.zeros(W)
    for i in range(len(evaluation)):
        batch = evaluation[i]
        count_W += np.bincount(batch["target_BN"].ravel(), weights=batch["weight_BN"].ravel(), minlength=W)
    if not count_W.any():
        raise errors.UserError("the held-out data has no token to predict. Give more data")
    accuracy = float((count_W.max() if token is None else count_W[token]) / count_W.sum())
    return {"baseline": {"accuracy": accuracy}, "guess": {"accuracy": f"always the {owner} most frequent token"}}


def guess_class(train_label_B: np.ndarray, evaluation_label_B: np.ndarray) -> dict[str, dict]:
    """Return the fields `baseline` and `guess` of a Task: always predict the training data's most frequent class."""
    accuracy = float(np.mean(evaluation_label_B == np.bincount(train_label_B).argmax()))
    guess = "always the training part's most frequent class"
    return {"baseline": {"accuracy": accuracy}, "guess": {"accuracy": guess}}


def average_error(evaluation: Sequence[dict], target: Callable[[dict], np.ndarray], average_NP: np.ndarray) -> float:
    """Return the mean squared error of always predicting average_NP, over the tokens with weight.

    target: a function batch -> target_BNP.
    """
    error = count = 0.0
    for i in range(len(evaluation)):
        weight_BN1 = evaluation[i]["weight_BN"][..., None]
        error += float(np.sum(weight_BN1 * (target(evaluation[i]) - average_NP) ** 2, dtype=np.float64))
        count += float(weight_BN1.sum()) * average_NP.shape[-1]
    return error / count
