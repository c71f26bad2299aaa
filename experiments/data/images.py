"""Labelled images in a training and an evaluation part, and how they become examples."""

import os
import pathlib
from typing import NamedTuple

import numpy as np

from experiments.data import download, image_files, parts
from experiments.engine import batches, config, errors

GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
DIGITS = tuple("0123456789")
FOLDERS = {"mnist": ("mnist", DIGITS), "fashion_mnist": ("fashion-mnist", GARMENTS)}  # name -> (folder, classes)
EVALUATION_SHARE = 0.2
SHOWN = 10  # classes of which there is no image
CHANNELS = 4  # grey, colour, either with opacity: more are hardly channels
CHUNK = 4096  # images at a time: statistics need float64, and all images at once would not fit


class Images(NamedTuple):
    """Raw pixels (uint8 or float32) and labels 0 .. C-1 (int32) of both parts, a name for each class; `said`: which
    file or array became what, '' of a named set."""

    name: str
    train_image_BYXZ: np.ndarray
    train_label_B: np.ndarray
    evaluation_image_BYXZ: np.ndarray
    evaluation_label_B: np.ndarray
    classes: tuple[str, ...]
    said: str


def configured(section: config.Settings) -> Images:
    """The images of a config's image.source; says what they are.

    Raises UserError as `load` does.
    """
    data = load(section.source)
    n, held_out, C = len(data.train_label_B), len(data.evaluation_label_B), len(data.classes)
    absent = np.setdiff1d(np.arange(C), data.train_label_B)
    lines = [data.said] if data.said else []
    lines += [f"{n:,} images to train on, {held_out:,} to evaluate, {C} classes"]
    if len(absent):
        some = ", ".join(data.classes[c] for c in absent[:SHOWN]) + ", ..." * (len(absent) > SHOWN)
        lines[-1] += f"; no image to train on is of {len(absent)} of them: {some}"
    return data._replace(said="\n".join(f"{data.name}: {line}" for line in lines))


def load(source: str, *, data_dir: str = "") -> Images:
    """Images from 'digits' (scikit-learn's), from 'mnist' or 'fashion_mnist' (folders of IDX files), or from a path.

    A path leads to an .npz file or a folder of files, whose names tell the parts (`image_files`). What does not come
    in parts is split by content, about 20 % for evaluation.

    Raises:
      UserError: neither a name nor a path that exists; missing, damaged or contradictory files; labels out of range.
    """
    if source == "digits":
        return _digits()
    if source in FOLDERS:
        return _named(source, data_dir=data_dir)
    path = pathlib.Path(os.path.expanduser(source))
    if source and os.path.isdir(path):
        return _whole(source, image_files.folder(path), known=())
    if source and os.path.isfile(path) and path.suffix == ".npz":
        return _whole(source, image_files.archived(path), known=())
    if source and os.path.exists(path):
        raise errors.UserError(f"{path} is neither a folder of IDX files nor an .npz file")
    names = ", ".join(sorted(["digits", *FOLDERS]))
    raise errors.UserError(
        f"{source!r} is neither a named set of images ({names}) nor an existing path ({path.absolute()})"
    )


def statistics(image_BYXZ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the raw pixels of each channel, float32; a deviation of 0 is given as 1."""
    chunks = [image_BYXZ[at : at + CHUNK] for at in range(0, len(image_BYXZ), CHUNK)]
    pixels = np.prod(image_BYXZ.shape[:-1])
    mean_Z = sum(chunk.sum((0, 1, 2), dtype=np.float64) for chunk in chunks) / pixels
    variance_Z = sum(np.square(chunk - mean_Z).sum((0, 1, 2)) for chunk in chunks) / pixels
    std_Z = np.sqrt(variance_Z)
    return mean_Z.astype(np.float32), np.where(std_Z > 0, std_Z, 1).astype(np.float32)


def examples(
    image_BYXZ: np.ndarray, label_B: np.ndarray, *, mean_Z: np.ndarray, std_Z: np.ndarray, shift: float = 0.0
) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: normalised `image_BYXZ` (float32), `label_B` (int32), and `weight_B` 1 (float32).

    Normalised is a pixel less the mean, divided by the deviation. With an `rng`, each image is first moved by its own
    uniform offset in [-shift, shift]^2 pixels, interpolated linearly between pixels (the digits fill their 8 rows, and
    a whole pixel would cut one off); the border it uncovers has raw pixel value 0, the background.

    Raises:
      UserError: a shift that is negative or could move an image out of sight.
    """
    if not 0 <= shift < min(image_BYXZ.shape[1:3]):
        rows, columns = image_BYXZ.shape[1:3]
        raise errors.UserError(f"images of {rows} x {columns} pixels cannot be shifted by {shift}")

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        batch_BYXZ = image_BYXZ[index_B]
        if shift and rng is not None:
            batch_BYXZ = _moved(batch_BYXZ, rng.uniform(-shift, shift, (2, len(index_B))))
        image = (batch_BYXZ.astype(np.float32) - mean_Z) / std_Z
        return {"image_BYXZ": image, "label_B": label_B[index_B], "weight_B": np.ones(len(index_B), np.float32)}

    return fetch, len(image_BYXZ)


def _moved(image_BYXZ: np.ndarray, offset_2B: np.ndarray) -> np.ndarray:
    """Each image moved (down, right) by its offset in pixels, interpolated linearly, 0 where nothing was."""
    moved_YBXZ = _moved_along_first(image_BYXZ.swapaxes(0, 1), offset_2B[0])
    moved_XBYZ = _moved_along_first(moved_YBXZ.transpose(2, 1, 0, 3), offset_2B[1])
    return moved_XBYZ.transpose(1, 2, 0, 3)


def _moved_along_first(x_LB: np.ndarray, offset_B: np.ndarray) -> np.ndarray:
    """y[l, b] = (1 - part) x[l - whole, b] + part x[l - whole - 1, b], the offset being whole + part."""
    L, B = x_LB.shape[:2]
    whole_B = np.floor(offset_B).astype(int)
    part_B = (offset_B - whole_B).astype(np.float32).reshape(B, *[1] * (x_LB.ndim - 2))
    from_LB = np.arange(L)[:, None] - whole_B

    def taken(from_LB: np.ndarray) -> np.ndarray:
        inside_LB = (from_LB >= 0) & (from_LB < L)
        x = x_LB[np.clip(from_LB, 0, L - 1), np.arange(B)]
        return np.where(inside_LB.reshape(L, B, *[1] * (x_LB.ndim - 2)), x, np.zeros((), x.dtype))

    return (1 - part_B) * taken(from_LB) + part_B * taken(from_LB - 1)


def _digits() -> Images:
    # Imported where it is needed: scikit-learn takes a second that no other set should cost.
    from sklearn import datasets

    digits = datasets.load_digits()  # pixels 0 .. 16, whole numbers stored as float64
    return _split("digits", digits.images.astype(np.uint8), digits.target, known=DIGITS, said="")


def _named(name: str, *, data_dir: str) -> Images:
    folder_name, known = FOLDERS[name]
    places = [place / folder_name for place in download.places(data_dir)]
    for folder in places:
        if os.path.isdir(folder):
            return _whole(name, image_files.idx_folder(folder)._replace(said=""), known=known)
    where = " or ".join(map(str, places))
    raise errors.UserError(
        f"{name} is not here: put the files {', '.join(image_files.FILES)} (gzipped or not) into {where}"
    )


def _whole(name: str, source: image_files.Parts, *, known: tuple[str, ...]) -> Images:
    """The images of two parts, or of one in two."""
    if source.evaluation is None:
        return _split(name, *source.train, known=known, said="split by content")
    first, second = f"{name}, training part", f"{name}, evaluation part"
    train_image_BYXZ, train_label_B = _checked(first, *source.train)
    evaluation_image_BYXZ, evaluation_label_B = _checked(second, *source.evaluation)
    if train_image_BYXZ.shape[1:] != evaluation_image_BYXZ.shape[1:]:
        shapes = f"{train_image_BYXZ.shape[1:]} and {evaluation_image_BYXZ.shape[1:]}"
        raise errors.UserError(f"{name}: the images of the two parts differ in shape, {shapes}")
    least = min(int(train_label_B.min()), int(evaluation_label_B.min()))
    classes = _class_names(first, train_label_B, known=known, least=least)
    train_label_B = _in_range(first, train_label_B, C=len(classes))
    evaluation_label_B = _in_range(second, evaluation_label_B, C=len(classes))
    held_out = evaluation_image_BYXZ, evaluation_label_B
    return Images(name, train_image_BYXZ, train_label_B, *held_out, classes, source.said)


def _checked(part: str, image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    image_BYXZ = _pixels(part, image)
    return image_BYXZ, _labels(part, label, n=len(image_BYXZ))


def _split(name: str, image: np.ndarray, label: np.ndarray, *, known: tuple[str, ...], said: str) -> Images:
    """One set in two: about 20 % of the different images are held out, chosen by their bytes."""
    image_BYXZ, label_B = _checked(name, image, label)
    classes = _class_names(name, label_B, known=known, least=int(label_B.min()))
    label_B = _in_range(name, label_B, C=len(classes))
    out_B = parts.held_out([pixels.tobytes() for pixels in image_BYXZ], share=EVALUATION_SHARE)
    held_out = image_BYXZ[out_B], label_B[out_B]
    return Images(name, image_BYXZ[~out_B], label_B[~out_B], *held_out, classes, said)


# What raw arrays must satisfy to be labelled images; `part` says in messages which arrays are meant.


def _pixels(part: str, array: np.ndarray) -> np.ndarray:
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


def _labels(part: str, array: np.ndarray, *, n: int) -> np.ndarray:
    """One integer label for each of n images, as they are; of shape (n,) or (n, 1).

    Raises:
      UserError: not integers, another number of axes, not as many as images.
    """
    if array.dtype.kind not in "ui":
        raise errors.UserError(f"{part}: labels must be integers, and these are of type {array.dtype}")
    if array.shape not in ((n,), (n, 1)):
        raise errors.UserError(f"{part}: {n} images need labels of shape ({n},), and these are {array.shape}")
    return array.reshape(n)


def _class_names(part: str, label_B: np.ndarray, *, known: tuple[str, ...], least: int) -> tuple[str, ...]:
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
        why = f"the smallest label is {least}, and classes are counted from 0: subtract {least} from all labels"
        raise errors.UserError(f"{part}: {why}")
    if most >= len(label_B):
        raise errors.UserError(f"{part}: the label {most} is out of range: {len(label_B)} images show fewer classes")
    return tuple(map(str, range(most + 1)))


def _in_range(part: str, label_B: np.ndarray, *, C: int) -> np.ndarray:
    """The labels as int32. Raises UserError unless all lie in 0 .. C-1."""
    for label in (int(label_B.min()), int(label_B.max())):
        if not 0 <= label < C:
            raise errors.UserError(f"{part}: the label {label} is out of range: it must lie in 0 .. {C - 1}")
    return label_B.astype(np.int32)
