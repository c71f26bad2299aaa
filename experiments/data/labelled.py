"""What raw arrays must satisfy to be labelled images; `part` says in messages which arrays are meant."""

import numpy as np

from experiments.engine import errors

CHANNELS = 4  # grey, colour, either with opacity: more are hardly channels


def images(part: str, array: np.ndarray) -> np.ndarray:
    """(B, Y, X) or (B, Y, X, Z) numbers as `image_BYXZ`: uint8 if they are whole and lie in 0 .. 255, else float32.

    Raises:
      UserError: not numbers, another number of axes, no image or no pixel, channels that come first (Y up to 4 and Z
      above 4), a pixel that is not finite.
    """
    if array.dtype.kind not in "buif":
        raise errors.UserError(f"{part}: images must be real numbers, and these are of type {array.dtype}")
    if array.ndim not in (3, 4) or 0 in array.shape:
        raise errors.UserError(
            f"{part}: images must have axes (B, Y, X) or (B, Y, X, Z), none of them empty, and these are {array.shape}"
        )
    if array.ndim == 4 and array.shape[1] <= CHANNELS < array.shape[3]:
        raise errors.UserError(
            f"{part}: images must have axes (B, Y, X, Z), and these seem to have their channels Z first, {array.shape}:"
            " move that axis with np.moveaxis(x, 1, -1)"
        )
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
    """One integer label for each of n images, as they are; of shape (n,) or (n, 1).

    Raises:
      UserError: not integers, another number of axes, not as many as images.
    """
    if array.dtype.kind not in "ui":
        raise errors.UserError(f"{part}: labels must be integers, and these are of type {array.dtype}")
    if array.shape not in ((n,), (n, 1)):
        raise errors.UserError(f"{part}: {n} images need labels of shape ({n},), and these are {array.shape}")
    return array.reshape(n)


def classes(part: str, label_B: np.ndarray, *, known: tuple[str, ...], least: int) -> tuple[str, ...]:
    """The names of the C classes: those known, or the numbers 0 .. max(label). least: the smallest label of all parts.

    Raises:
      UserError: no label 0, or none from 0 on; more classes than images, which only a wrong label can cause.
    """
    if known:
        return known
    most = int(label_B.max())
    if most < 0:
        raise errors.UserError(f"{part}: the label {most} is out of range: classes are counted from 0")
    if least > 0:
        told = f"the smallest label is {least}, and classes are counted from 0: subtract {least} from all labels"
        raise errors.UserError(f"{part}: {told}")
    if most >= len(label_B):
        raise errors.UserError(f"{part}: the label {most} is out of range: {len(label_B)} images show fewer classes")
    return tuple(map(str, range(most + 1)))


def in_range(part: str, label_B: np.ndarray, *, C: int) -> np.ndarray:
    """The labels as int32. Raises UserError unless all lie in 0 .. C-1."""
    for label in (int(label_B.min()), int(label_B.max())):
        if not 0 <= label < C:
            raise errors.UserError(f"{part}: the label {label} is out of range: it must lie in 0 .. {C - 1}")
    return label_B.astype(np.int32)
