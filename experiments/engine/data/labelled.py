"""What raw arrays must satisfy to be labelled images; `part` says in messages which arrays are meant."""

import numpy as np

from experiments.engine import errors


def images(part: str, array: np.ndarray) -> np.ndarray:
    """(B, Y, X) or (B, Y, X, Z) numbers as `image_BYXZ`: uint8 if they are whole and lie in 0 .. 255, else float32.

    Raises:
      UserError: not numbers, another number of axes, no image or no pixel, a pixel that is not finite.
    """
    if array.dtype.kind not in "buif":
        raise errors.UserError(f"{part}: images must be real numbers, and these are of type {array.dtype}")
    if array.ndim not in (3, 4) or 0 in array.shape:
        raise errors.UserError(f"{part}: images must have axes (B, Y, X) or (B, Y, X, Z), and these are {array.shape}")
    image_BYXZ = array if array.ndim == 4 else array[..., None]
    if image_BYXZ.dtype.kind in "bui":
        whole = image_BYXZ.min() >= 0 and image_BYXZ.max() <= 255
        return np.ascontiguousarray(image_BYXZ, np.uint8 if whole else np.float32)
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        image_BYXZ = np.ascontiguousarray(image_BYXZ, np.float32)
    if not np.isfinite(image_BYXZ).all():
        raise errors.UserError(f"{part}: a pixel is not a finite number")
    return image_BYXZ


def labels(part: str, array: np.ndarray, *, n: int) -> np.ndarray:
    """One integer label for each of n images, as they are.

    Raises:
      UserError: not integers, another number of axes, not as many as images.
    """
    if array.dtype.kind not in "ui":
        raise errors.UserError(f"{part}: labels must be integers, and these are of type {array.dtype}")
    if array.shape != (n,):
        raise errors.UserError(f"{part}: {n} images need labels of shape ({n},), and these are {array.shape}")
    return array


def classes(part: str, label_B: np.ndarray, *, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the C classes: those known, or the numbers 0 .. max(label).

    Raises:
      UserError: more classes than images, which only a wrong label can cause.
    """
    C = len(known) or int(label_B.max()) + 1
    if not known and C > len(label_B):
        raise errors.UserError(f"{part}: the label {C - 1} is out of range: {len(label_B)} images show fewer classes")
    return known or tuple(map(str, range(C)))


def in_range(part: str, label_B: np.ndarray, *, C: int) -> np.ndarray:
    """The labels as int32. Raises UserError unless all lie in 0 .. C-1."""
    for label in (int(label_B.min()), int(label_B.max())):
        if not 0 <= label < C:
            raise errors.UserError(f"{part}: the label {label} is out of range: it must lie in 0 .. {C - 1}")
    return label_B.astype(np.int32)
