"""Augment training images at random: move, mirror or crop them, or mix them with another image of the batch.

image.augment names the changes in their order, such as ["flip", "crop:4", "cutmix"], with the amount after a colon.
Each function here takes image_BYXZ, the amount and a generator.

`shift`, `affine` and `elastic` return a displacement d_B2YX. If they follow one another, their displacements are added
and the images are moved once: each interpolation blurs. The other functions return the new images and `share_B`: the
share of each new image, and of its label, that comes from another image x'. This is the previous image in the batch,
and for the first image the last one. `share_B` is None if the function mixes no images. The user's function,
my_file:my_augment, is (image_BYXZ, rng) -> image_BYXZ.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.config import by_name, errors

Result = tuple[np.ndarray, np.ndarray | None]  # image_BYXZ; share_B, None if images are not mixed
KEY = "image.augment"


def flip(image_BYXZ: np.ndarray, probability: float, rng: np.random.Generator) -> Result:
    """Exchange left and right of each image with this probability. Return the images and None: no image is mixed."""
    flipped_B111 = rng.random((len(image_BYXZ), 1, 1, 1)) < probability
    return np.where(flipped_B111, image_BYXZ[:, :, ::-1], image_BYXZ), None


def crop(image_BYXZ: np.ndarray, border: float, rng: np.random.Generator) -> Result:
    """Add a border of this many pixels of raw value 0 to each image, and cut out a random window of the old size.

    Return the windows and None.
    """
    B, Y, X, _ = image_BYXZ.shape
    padded = np.pad(image_BYXZ, [(0, 0), *[(int(border), int(border))] * 2, (0, 0)])
    down_B, right_B = rng.integers(0, 2 * int(border) + 1, (2, B))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (Y, X), axis=(1, 2))
    return windows[np.arange(B), down_B, right_B].transpose(0, 2, 3, 1), None


def shift(image_BYXZ: np.ndarray, most: float, rng: np.random.Generator) -> np.ndarray:
    """Return d_B211 of a shift: each image moves by a uniform offset in [-most, most]^2 pixels, and d = -offset.

    Fractions of a pixel suit the digits, which fill their 8 rows: a shift by a whole pixel would cut off a row.
    """
    return -rng.uniform(-most, most, (2, len(image_BYXZ))).T[..., None, None]


def affine(image_BYXZ: np.ndarray, percent: float, rng: np.random.Generator) -> np.ndarray:
    """Return displacements d_B2YX of the pixels p, a random rotation, scale and shear: d(p) = E (p - c).

    c: the centre. Each image has its own E, whose four entries are uniform in [-percent/100, percent/100].
    """
    B, Y, X, _ = image_BYXZ.shape
    E_B22 = percent / 100 * rng.uniform(-1, 1, (B, 2, 2))
    return np.einsum("bij,jyx->biyx", E_B22, np.indices((Y, X)) - np.array([(Y - 1) / 2, (X - 1) / 2])[:, None, None])


def elastic(image_BYXZ: np.ndarray, sd: float, rng: np.random.Generator) -> np.ndarray:
    """Return d_B2YX of a smooth random bend (as in Simard et al. 2003, section 2).

    At 3 x 3 points spread over the image, both coordinates of d are drawn from N(0, sd^2), in pixels. Between these
    points d is linear in each coordinate.
    """
    B, Y, X, _ = image_BYXZ.shape
    d_B233 = rng.normal(0, sd, (B, 2, 3, 3))
    weight_Y3, weight_X3 = (np.maximum(0, 1 - abs(np.linspace(0, 2, L)[:, None] - np.arange(3))) for L in (Y, X))
    return np.einsum("yi,xj,bdij->bdyx", weight_Y3, weight_X3, d_B233)


def move(image_BYXZ: np.ndarray, d_B2YX: np.ndarray) -> np.ndarray:
    """Return images whose pixel p has the old value at the point p + d(p), both as (row, column).

    Values between pixels are interpolated linearly in both directions. Outside the image the raw pixel value is 0.
    """
    B, Y, X, Z = image_BYXZ.shape
    padded_PZ = np.pad(image_BYXZ, [(0, 0), (1, 1), (1, 1), (0, 0)]).reshape(-1, Z)  # pixel p is at p + 1
    place_B2YX = np.clip(np.indices((Y, X)) + d_B2YX + 1, 0, np.array([Y + 1, X + 1])[:, None, None])
    corner_B2YX = place_B2YX.astype(int).clip(max=np.array([Y, X])[:, None, None])
    part_2BYX1 = (place_B2YX - corner_B2YX).swapaxes(0, 1)[..., None].astype(np.float32)
    first_BYX = (np.arange(B)[:, None, None] * (Y + 2) + corner_B2YX[:, 0]) * (X + 2) + corner_B2YX[:, 1]

    def mix(left_BYX: np.ndarray) -> np.ndarray:
        left, right = np.take(padded_PZ, left_BYX, axis=0), np.take(padded_PZ, left_BYX + 1, axis=0)
        return (1 - part_2BYX1[1]) * left + part_2BYX1[1] * right

    return (1 - part_2BYX1[0]) * mix(first_BYX) + part_2BYX1[0] * mix(first_BYX + X + 2)


def mixup(image_BYXZ: np.ndarray, alpha: float, rng: np.random.Generator) -> Result:
    """Return (1 - share) x + share x', and the share of each image, drawn from Beta(alpha, alpha).

    x' is the previous image of the batch (Zhang et al. 2018, mixup).
    """
    share_B = rng.beta(alpha, alpha, len(image_BYXZ)).astype(np.float32)
    share_B111 = share_B[:, None, None, None]
    return (1 - share_B111) * image_BYXZ + share_B111 * np.roll(image_BYXZ, 1, axis=0), share_B


def cutmix(image_BYXZ: np.ndarray, alpha: float, rng: np.random.Generator) -> Result:
    """Replace a rectangle by the same one of x', the previous image of a batch (Yun et al. 2019, CutMix, section 3.2).

    The sides of the rectangle are sqrt(s) times the image's sides, s ~ Beta(alpha, alpha). The centre is a random
    pixel. The rectangle is cut off at the edges. The second result, share_B, is the part of the image that it covers.
    """
    B, *sides = image_BYXZ.shape[:3]
    part_B, inside = np.sqrt(rng.beta(alpha, alpha, B)), []
    for L in sides:
        middle_B1, half_B1 = rng.integers(0, L, (B, 1)), (L * part_B / 2).round()[:, None]
        inside.append((np.arange(L) >= middle_B1 - half_B1) & (np.arange(L) < middle_B1 + half_B1))
    inside_BYX = inside[0][:, :, None] & inside[1][:, None]
    mixed_BYXZ = np.where(inside_BYX[..., None], np.roll(image_BYXZ, 1, axis=0), image_BYXZ)
    return mixed_BYXZ, inside_BYX.mean((1, 2), dtype=np.float32)


class Kind(NamedTuple):
    """An augmentation: its function, default amount, and allowed amounts, as a text and as a test.

    is_allowed(amount, side): side is the shorter side of the images in pixels. mixes: whether it mixes two images.
    moves: whether `change` returns the displacement d_B2YX for `move`, not new images and share_B, the second image's
    part of each (None: not mixed).
    """

    change: Callable[[np.ndarray, float, np.random.Generator], Result | np.ndarray]
    default: float
    allowed: str
    is_allowed: Callable[[float, int], bool] = lambda amount, side: 0 < amount < math.inf
    mixes: bool = False
    moves: bool = False


KINDS = {
    "shift": Kind(shift, 1, "above 0 and less than a side", lambda amount, side: 0 < amount < side, moves=True),
    "flip": Kind(flip, 0.5, "above 0 and at most 1", lambda amount, side: 0 < amount <= 1),
    "crop": Kind(crop, 4, "an integer from 1, less than a side", lambda amount, side: amount in range(1, side)),
    "mixup": Kind(mixup, 0.2, "above 0", mixes=True),
    "cutmix": Kind(cutmix, 1, "above 0", mixes=True),
    "affine": Kind(affine, 15, "above 0 and below 100", lambda amount, side: 0 < amount < 100, moves=True),
    "elastic": Kind(elastic, 0.5, "above 0 and less than a side", lambda amount, side: 0 < amount < side, moves=True),
}


def chain(names: Sequence, *, Y: int, X: int) -> Callable[[np.ndarray, np.random.Generator], Result]:
    """Return the function (image_BYXZ, rng) -> (image_BYXZ, share_B) that makes the changes `names` in order.

    names: as in image.augment. share_B: each new image's share of another image; None if no change mixes images. Raises
    UserError if a change is unknown or does not suit images of Y x X pixels, or if two of them mix images.
    """
    steps = [parse(str(name), min(Y, X)) for name in names]
    mixing = [name for name, (kind, _) in zip(names, steps, strict=True) if kind.mixes]
    errors.refuse((len(mixing) > 1, f"{KEY} mixes images by {' and by '.join(map(str, mixing))}. Keep one of them."))
    groups = [(moves, list(group)) for moves, group in itertools.groupby(steps, lambda step: step[0].moves)]

    def change(image_BYXZ: np.ndarray, rng: np.random.Generator) -> Result:
        share_B = None
        for moves, group in groups:
            if moves:
                image_BYXZ = move(image_BYXZ, sum(kind.change(image_BYXZ, amount, rng) for kind, amount in group))
                continue
            for kind, amount in group:
                image_BYXZ, mixed_B = kind.change(image_BYXZ, amount, rng)
                share_B = share_B if mixed_B is None else mixed_B
        return image_BYXZ, share_B

    return change


def parse(name: str, side: int) -> tuple[Kind, float]:
    """Return the augmentation and its amount: "crop:4" has the amount 4, and "crop" the default amount.

    The user's function "my_file:my_augment" gets no amount: it is 0. Raises UserError if the augmentation is unknown,
    or if the amount does not suit images whose shorter side has `side` pixels.
    """
    word, colon, number = name.partition(":")
    is_users = word not in KINDS and by_name.CODE.fullmatch(name)
    functions = {known: kind.change for known, kind in KINDS.items()}
    change = by_name.choose("augmentation", name if is_users else word, functions, KEY)
    if is_users:
        return Kind(functools.partial(_change_by_user, name, change), 0, ""), 0
    kind = KINDS[word]
    try:
        amount = float(number) if colon else kind.default
    except ValueError:
        amount = math.nan
    if not kind.is_allowed(amount, side):
        rule = f"the number after the colon (default: {kind.default}) must be {kind.allowed}"
        raise errors.UserError(f"{KEY} has {name!r}. For a side of {side} pixels, {rule}.")
    return kind, amount


def _change_by_user(name: str, change: Callable, image_BYXZ: np.ndarray, _: float, rng: np.random.Generator) -> Result:
    with by_name.user_errors(f"{KEY} has {name}, which fails"):
        new_BYXZ = np.asarray(change(image_BYXZ, rng))
    if new_BYXZ.shape != image_BYXZ.shape or new_BYXZ.dtype.kind not in "uif":
        found = f"{new_BYXZ.shape} of {new_BYXZ.dtype}"
        rule = f"It must return numbers of the shape {image_BYXZ.shape}"
        raise errors.UserError(f"{KEY} has {name}, which returns {found}. {rule}")
    return new_BYXZ, None
