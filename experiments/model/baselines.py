"""Baselines: the metrics of predictions without a model."""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.config import errors
from experiments.data import images

WORK = 2**31  # multiplications; about a second of a core


def guess_token(evaluation: Sequence[dict], *, W: int, token: int | None = None) -> dict[str, tuple[float, str]]:
    """Return a Task's baseline {"accuracy": (share, description)}: the accuracy of always predicting one of W tokens.

    token: the most frequent one of the training data; None: the most frequent target of the evaluation. Raises
    UserError if no token of the evaluation is a target.
    """
    count_W = np.zeros(W)
    for i in range(len(evaluation)):
        batch = evaluation[i]
        count_W += np.bincount(batch["target_BN"].ravel(), weights=batch["weight_BN"].ravel(), minlength=W)
    if not count_W.any():
        raise errors.UserError("the held-out data has no token to predict. Give more data")
    accuracy = float((count_W.max() if token is None else count_W[token]) / count_W.sum())
    owner = "held-out examples" if token is None else "training part"
    return {"accuracy": (accuracy, f"constant answer: the most frequent token of the {owner}")}


def guess_class(
    evaluation: Sequence[dict], *, train_label_B: np.ndarray, classes: Sequence[str]
) -> dict[str, tuple[float, str]]:
    """Return a Task's baseline {"accuracy": (share, description)}: always predict the most frequent training class.

    share: the weight of the examples of this class in `evaluation` (batches of label_B and weight_B), of all weights.
    """
    label, right, count = np.bincount(train_label_B).argmax(), 0.0, 0.0
    for i in range(len(evaluation)):
        batch = evaluation[i]
        right += float(np.sum(batch["weight_B"] * (batch["label_B"] == label)))
        count += float(np.sum(batch["weight_B"]))
    return {"accuracy": (right / count, f"always {classes[label]!r}, the most frequent class of the training part")}


def guess_image(evaluation: Sequence[dict], *, data: images.Images) -> dict[str, tuple[float, str]]:
    """Return the baseline of `guess_class`, and {"neighbour": (accuracy, description)}: the class of the nearest image.

    This is the training image with the smallest squared distance of pixels, sum_p (x_p - x'_p)^2, as of scikit-learn's
    KNeighborsClassifier(1). "neighbour" is missing if the distances need more than WORK multiplications.
    """
    result = guess_class(evaluation, train_label_B=data.train_label_B, classes=data.classes)
    train_BP, held_out_EP = (
        image_BYXZ.reshape(len(image_BYXZ), -1) for image_BYXZ in (data.train_image_BYXZ, data.evaluation_image_BYXZ)
    )
    if train_BP.size * len(held_out_EP) <= WORK:
        train_BP, held_out_EP = train_BP.astype(np.float32), held_out_EP.astype(np.float32)
        nearest_E = (np.square(train_BP).sum(1) - 2 * held_out_EP @ train_BP.T).argmin(1)  # plus |x'|^2, equal for all
        share = float(np.mean(data.train_label_B[nearest_E] == data.evaluation_label_B))
        result["neighbour"] = share, "accuracy of the class of the nearest training image"
    return result


def average_error(
    evaluation: Sequence[dict], *, target: Callable[[dict], np.ndarray], average_NP: np.ndarray, guess: str
) -> dict[str, tuple[float, str]]:
    """Return a Task's baseline {"loss": (error, description)}: the mean squared error of always predicting average_NP.

    Only tokens with weight count. target: a function batch -> target_BNP. guess: a description of average_NP.
    """
    error = count = 0.0
    for i in range(len(evaluation)):
        weight_BN1 = evaluation[i]["weight_BN"][..., None]
        error += float(np.sum(weight_BN1 * (target(evaluation[i]) - average_NP) ** 2, dtype=np.float64))
        count += float(weight_BN1.sum()) * average_NP.shape[-1]
    return {"loss": (error / count, f"constant answer: {guess}")}
