"""Labelled images, split into a training and an evaluation part, and examples made from them.

The files are .npz, MNIST's IDX files (http://yann.lecun.com/exdb/mnist), gzipped or not, or images in folders.
"""

import importlib.util
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.config import by_name, disk, errors, settings as configs
from experiments.data import augment, classes as class_names, download, files as data_files, image_file, image_folder
from experiments.engine import batches
from tfm import embed as embeds

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
HELD_OUT = ("valid", "val", "validation", "dev", "test")  # the first that exists is evaluated
ARRAYS = (*(("x_train", "y_train", f"x_{part}", f"y_{part}") for part in HELD_OUT), ("x", "y"))
DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}  # of IDX, by type code
GARMENTS = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(",")
DIGITS = tuple("0123456789")
FOLDERS = {"mnist": ("mnist", DIGITS), "fashion_mnist": ("fashion-mnist", tuple(GARMENTS))}  # name -> (folder, classes)
SHOWN = 10  # names of classes without an image in a line
FLOAT32_MAX = float(np.finfo(np.float32).max)
CHANNELS = 4  # the most channels of an image: three colours and opacity
CHUNK, VALUES = 4096, 2**24  # the most images, and values, for which `statistics` needs float64 at a time
UNIT = 1.5  # the largest pixel of images from 0 to 1: interpolation may go a little beyond 1
FIELDS = {  # settings of the section `image` that several experiments have
    "source": ("digits", "digits (scikit-learn), mnist, fashion_mnist, hub:NAME, or a path (docs/configs.md)"),
    "size": (0, "height and width in pixels to which image files are resized; 0: all have one size and keep it"),
    "patch": (2, "pixels of a patch's side"),
    "augment": ([], "changes in training: shift:1, affine:15, elastic:0.5, flip, crop:4, mixup, cutmix, my_file:mine"),
}
COMPARED = 16  # the fewest images of a part whose statistics are compared: fewer may differ by chance


class Images(NamedTuple):
    """Raw pixels (uint8 or float32) and labels 0 .. C-1 (int32) of both parts, and the names of the classes."""

    name: str
    train_image_BYXZ: np.ndarray
    train_label_B: np.ndarray
    evaluation_image_BYXZ: np.ndarray
    evaluation_label_B: np.ndarray
    classes: tuple[str, ...]
    lines: list[str]  # to print; the first says how the parts were made (by content or names), except for named sets
    values: tuple[float, float]  # the pixels of black and white

    @property
    def sha256(self) -> str:
        return data_files.sha256(*self[1:5])  # the arrays


def load_described(source: str, size: int = 0) -> Images:
    """Return `load(source, size)`, the images of a config's image.source, with further `lines` that describe them.

    size: the height and width for image files and images of 'hub:', in pixels; 0: unchanged. Raises UserError as `load`
    does.
    """
    data = load(source, size)
    n, held_out, C = len(data.train_label_B), len(data.evaluation_label_B), len(data.classes)
    line = f"{n:,} images to train on, {held_out:,} to evaluate, {C} classes"
    absent = np.setdiff1d(np.arange(C), data.train_label_B)
    if len(absent):
        names = ", ".join(data.classes[c] for c in absent[:SHOWN]) + ", ..." * (len(absent) > SHOWN)
        line += f" ({len(absent)} without an image to train on: {names})"
    lines = [*data.lines, line, *class_names.describe(data.classes), *compare_parts(data)]
    return data._replace(lines=[f"{data.name}: {line}" for line in lines])


def load(source: str, size: int = 0) -> Images:
    """Return images from 'digits' (scikit-learn's), 'mnist', 'fashion_mnist' (folders of IDX files), or another place.

    A place is a data set 'hub:NAME', or the path of an .npz file (ARRAYS) or a folder. The folder has MNIST's four IDX
    files, .npz files named after the parts (train.npz), or image files in folders of their classes. Image files, and
    images of 'hub:NAME', become size x size pixels (0: keep their size). The validation part is evaluated, or else the
    test part. A single part is split by content, about 20 % to evaluate. Raises UserError for a missing source, an
    invalid size, and damaged or contradictory files. If the source defines both parts, it also raises UserError for a
    class that is evaluated but not trained on.
    """
    configs.at_least(0, {"image.size": size}, most=math.isqrt(image_file.LARGEST))
    splits = read_arrays(source) or image_folder.load(source, size)
    data = combine(source, splits, size)
    if len(splits.arrays) == 2 and splits.places:  # names define the parts: `load_described` reports chance
        trained, evaluated = ([data.classes[c] for c in np.unique(label_B)] for label_B in (data[2], data[4]))
        class_names.check_trained(source, trained, evaluated)
    return data


def read_arrays(source: str) -> image_folder.Splits | None:
    """Return the images of a named set, or of .npz or IDX files; None for another folder and for hub:NAME.

    Raises UserError if the source or a file of it is missing, or is not readable.
    """
    path = pathlib.Path(os.path.expanduser(source))
    if source == "digits":
        return read_digits()
    if source in FOLDERS:
        folder, names = FOLDERS[source]
        paths = [place / folder for place in download.places()]
        return read_idx_files(next(filter(os.path.isdir, paths), paths[0]), names)
    if source.startswith(by_name.HUB):
        return None
    if source and os.path.isdir(path):
        return read_idx_files(path) or read_npz_files(path)
    data_files.find(source, f"a named set of images ({', '.join(sorted(['digits', *FOLDERS]))})")
    content = disk.read_npz(path, ARRAYS)
    arrays = [*content.values()]
    return image_folder.Splits([*zip(arrays[::2], arrays[1::2], strict=True)], name_pairs([*content]))


def read_digits() -> image_folder.Splits:
    """Return scikit-learn's digits, pixels 0 .. 16. Its module is not imported, because that takes a second."""
    folder = importlib.util.find_spec("sklearn").submodule_search_locations[0]
    text = data_files.load_text(data_files.on_disk(pathlib.Path(folder, "datasets", "data", "digits.csv.gz")))
    rows = np.array([line.split(",") for line in text.split()]).astype(np.uint8)  # 8 x 8 pixels and the label
    return image_folder.Splits([(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1])], classes=DIGITS)


def read_idx_files(path: pathlib.Path, classes: tuple[str, ...] = ()) -> image_folder.Splits | None:
    """Return the Splits in MNIST's four files (FILES) in a folder, gzipped or not; None if it has none of the files.

    classes: the class names of a named set; () for a folder of the user's. Raises UserError if a file is invalid, or if
    some of the files are missing, or, for a named set, all of them.
    """
    paths = {file: place for file in FILES for place in (path / f"{file}.gz", path / file) if os.path.isfile(place)}
    if not paths and not classes:
        return None
    if missing := [file for file in FILES if file not in paths]:
        raise errors.UserError(f"{path} has no {', '.join(missing)}. Put these files there, gzipped or not.")
    arrays = [read_idx(paths[file]) for file in FILES]
    return image_folder.Splits([arrays[:2], arrays[2:]], name_pairs(FILES), classes)


def name_pairs(names: Sequence[str]) -> list[str]:
    """Return 'x_train with y_train' for each pair. names: of images, their labels, images, their labels, and so on."""
    return [f"{images} with {labels}" for images, labels in zip(names[::2], names[1::2], strict=True)]


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Return the array in an IDX file, in native byte order.

    The file has two zero bytes, a type code, the number of axes, their sizes (big-endian uint32), and the values
    (big-endian). Raises UserError for other content.
    """
    with disk.reading(path):
        content = data_files.read(data_files.on_disk(path))
        if content[:2] != b"\0\0" or len(content) < 4 or content[2] not in DTYPES:
            raise ValueError(f"not an IDX file: it begins with the bytes {content[:4].hex(' ') or '(none)'}")
        dtype, axes = np.dtype(DTYPES[content[2]]), content[3]
        shape = np.frombuffer(content, ">u4", axes, offset=4)
        values = np.frombuffer(content, dtype, offset=4 + 4 * axes)
        return values.reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_npz_files(path: pathlib.Path) -> image_folder.Splits | None:
    """Return the images and labels in a folder's .npz files, such as train.npz; None if it has no training part.

    Raises UserError for a damaged file, or one without the arrays x and y.
    """
    names = ((part, path / f"{name}.npz") for name, part in data_files.PARTS.items())
    paths = {part: file for part, file in names if os.path.isfile(file)}
    if data_files.TRAIN not in paths:
        return None
    used = data_files.used_parts(paths)
    return image_folder.Splits([[*disk.read_npz(file, [("x", "y")]).values()] for file in used], used)


def combine(name: str, splits: image_folder.Splits, size: int) -> Images:
    """Return the images of two parts; a single part is split by the bytes of its images.

    If the classes have no names, the names are 0 .. max(label). name: of the data set. size: the required pixels of a
    side; 0: any. Raises UserError for another size, and for invalid or contradictory parts.
    """
    two = len(splits.arrays) == 2
    names = [f"{name}, training part", f"{name}, evaluation part"] if two else [name]
    parts = [check_arrays(part, *pair) for part, pair in zip(names, splits.arrays, strict=True)]
    classes = check_parts(name, *zip(*parts, strict=True), splits.classes, size)
    lines, places = [*splits.lines], splits.places
    dtypes = [image.dtype for image, _ in splits.arrays]
    if dtypes[0] != dtypes[-1]:
        lines.append(f"warning: the images of the two parts are of the types {dtypes[0]} and {dtypes[1]}")
    split = "split by content"
    if two and places:
        split = f"by their names, {places[0]} to train on; {places[1]} to evaluate; all else is not used"
    if name not in ("digits", *FOLDERS):
        lines.insert(0, split)
    if not two:
        image_BYXZ, label_B = parts[0]
        digests, share = (data_files.digest(pixels.tobytes()) for pixels in image_BYXZ), image_folder.EVALUATION_SHARE
        parts = [(image_BYXZ[b], label_B[b]) for b in data_files.divide(range(len(label_B)), digests, share=share)]
    dtype = np.result_type(*(image_BYXZ for image_BYXZ, _ in parts))
    arrays = [x for image, label in parts for x in (image.astype(dtype, copy=False), label.astype(np.int32))]
    values = splits.values or (float(arrays[0].min()), float(arrays[0].max()))
    return Images(name, *arrays, classes, lines, values)


def check_arrays(part: str, image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return image_BYXZ and label_B. part: their name in messages.

    image: finite numbers of shape (B, Y, X) or (B, Y, X, Z), not empty. label: integers of shape (B,) or (B, 1). Pixels
    become uint8 if they are integers in 0 .. 255, else float32. Raises UserError for other arrays.
    """
    if image.dtype.kind not in "buif" or image.ndim not in (3, 4) or 0 in image.shape:
        problem = f"the images are {image.dtype} of shape {image.shape}, not numbers with the axes (B, Y, X[, Z])."
    elif image.ndim == 4 and image.shape[1] <= CHANNELS < image.shape[3]:
        problem = f"the images of shape {image.shape} seem to have their channels Z first, but must have the axes"
        problem += " (B, Y, X, Z). Move that axis with np.moveaxis(x, 1, -1)."
    elif label.dtype.kind not in "ui" or label.shape not in ((len(image),), (len(image), 1)):
        problem = f"the labels are {label.dtype} of shape {label.shape}, but {len(image)} images need one integer each."
    elif not -FLOAT32_MAX <= image.min() <= image.max() <= FLOAT32_MAX:
        problem = "a pixel is not a finite number in float32. Correct or remove its image."
    else:
        image_BYXZ = image if image.ndim == 4 else image[..., None]
        small = image.dtype.kind in "bui" and image.min() >= 0 and image.max() <= 255
        return np.ascontiguousarray(image_BYXZ, np.uint8 if small else np.float32), label.reshape(-1)
    raise errors.UserError(f"{part}: {problem}")


def check_parts(
    name: str, images: Sequence[np.ndarray], labels: Sequence[np.ndarray], classes: tuple[str, ...], size: int
) -> tuple[str, ...]:
    """Return the names of the classes: `classes`, or "0", "1", ... if it is empty.

    images, labels: one array for each part. name: of the data set. Raises UserError if the shapes of two parts differ,
    or their scales: only one has pixels from 0 to 1, or from -1 to 1. (A part of a single colour has any scale.) Labels
    out of range raise UserError too, as do images that do not have size x size pixels (unless size = 0).
    """
    shapes = [image_BYXZ.shape[1:] for image_BYXZ in images]
    ends = [(float(image_BYXZ.min()), float(image_BYXZ.max())) for image_BYXZ in images]
    ranges = [(low, high) for low, high in ends if low < high]
    largest = [max(-low, high) for low, high in ranges]
    beyond, signed = {most > UNIT for most in largest}, {low < -1 / 4 for low, _ in ranges}
    scales_differ = len(beyond) == 2 and max(largest) > UNIT * min(largest) or beyond == {False} and len(signed) == 2
    least, most = min(int(label_B.min()) for label_B in labels), max(int(label_B.max()) for label_B in labels)
    C = len(classes) or min(int(labels[0].max()) + 1, len(labels[0]))  # a larger label is a mistake
    if shapes[0] != shapes[-1] or scales_differ:
        texts = [f"{shape}, pixels from {low:g} to {high:g}" for shape, (low, high) in zip(shapes, ends, strict=True)]
        problem = f"the images of the two parts differ, {' and '.join(texts)}. Give both the same shape and scale."
    elif (least > 0 and not classes) or least < 0 or most >= C:
        remedy = f" Subtract {least} from all labels." if least > 0 else ""
        problem = f"the labels go from {least} to {most}, but must be the classes 0 .. {C - 1}.{remedy}"
    elif size and shapes[0][:2] != (size, size):
        problem = f"image.size = {size} is for image files, not for arrays of {shapes[0][0]} x {shapes[0][1]}. Use 0."
    else:
        return classes or tuple(map(str, range(C)))
    raise errors.UserError(f"{name}: {problem}")


def compare_parts(data: Images) -> list[str]:
    """Return warnings if training and held-out images seem to differ in scale or in RGB and BGR, or share images."""
    train, held_out, lines = data.train_image_BYXZ, data.evaluation_image_BYXZ, []
    (mean_Z, std_Z), (other_mean_Z, other_std_Z) = statistics(train), statistics(held_out)
    gap, gap_reversed = (float(abs(other_Z - mean_Z).mean()) for other_Z in (other_mean_Z, other_mean_Z[::-1]))
    std, other_std = float(std_Z.mean()), float(other_std_Z.mean())
    enough = min(len(train), len(held_out)) >= COMPARED
    if enough and train.shape[-1] == 3 and gap > std / 10 and gap_reversed < gap / 4:
        lines.append("warning: the colours of the two parts seem to be in the opposite order (RGB and BGR)")
    elif enough and (gap > std or not std / 3 < other_std < 3 * std):
        numbers = f"mean {mean_Z.mean():.4g} and {other_mean_Z.mean():.4g}, deviation {std:.4g} and {other_std:.4g}"
        lines.append(f"warning: the pixels of the two parts seem to have different scales: {numbers}")
    digests = {data_files.digest(image_YXZ.tobytes()) for image_YXZ in train}
    if equal := sum(data_files.digest(image_YXZ.tobytes()) in digests for image_YXZ in held_out):
        lines.append(f"warning: {equal:,} of {len(held_out):,} images to evaluate are also trained on")
    return lines


def describe(data: Images) -> dict[str, Any]:
    """Return the image format and the class names for data.json, from which `image_file.load_format` reads them."""
    mean_Z, std_Z = statistics(data.train_image_BYXZ)
    sizes = {"image": list(data.train_image_BYXZ.shape[1:]), "values": list(data.values)}
    return sizes | {"mean": mean_Z.tolist(), "std": std_Z.tolist(), "classes": list(data.classes)}


def statistics(image_BYXZ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the raw pixels of each channel, float32; 1 for a deviation of 0."""
    B, Y, X, Z = image_BYXZ.shape
    row_RXZ, chunk = image_BYXZ.reshape(B * Y, X, Z), max(1, min(CHUNK * Y, VALUES // (X * Z)))
    chunks = [row_RXZ[at : at + chunk] for at in range(0, B * Y, chunk)]
    mean_Z = sum(chunk.sum((0, 1), dtype=np.float64) for chunk in chunks) / (B * Y * X)
    std_Z = np.sqrt(sum(np.square(chunk - mean_Z).sum((0, 1)) for chunk in chunks) / (B * Y * X))
    return mean_Z.astype(np.float32), np.where(std_Z > 0, std_Z, 1).astype(np.float32)


def examples(
    image_BYXZ: np.ndarray,
    label_B: np.ndarray,
    *,
    mean_Z: np.ndarray,
    std_Z: np.ndarray,
    changes: Sequence = (),
    patch: int = 0,
) -> tuple[batches.Fetch, int]:
    """Return (fetch, n): a function (index_B, rng or None) -> batch, and the number of images.

    A batch has normalised patches `v_BNP`, `label_B`, and `weight_B` = 1. Patches and weights are float32.
    patch: the side of a patch in pixels; 0: a batch has whole images `image_BYXZ`. Images are cut here and not on the
    device, because a TPU copies them several times: 1.15 of 7.05 ms for 2 layers of ViT-S/16 (estimated). If
    `fetch` receives an `rng`, it first applies `changes`, the names for `augment.chain`. If they mix each image with
    another one, the batch also has the other image's `other_label_B` and its share `other_share_B`. Raises UserError
    as `augment.chain` does.
    """
    change = augment.chain(changes, Y=image_BYXZ.shape[1], X=image_BYXZ.shape[2])

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        batch_BYXZ, share_B = image_BYXZ[index_B], None
        if rng is not None:
            batch_BYXZ, share_B = change(batch_BYXZ, rng)
        image = (batch_BYXZ.astype(np.float32) - mean_Z) / std_Z
        batch = {"v_BNP": embeds.cut(image, size=patch)} if patch else {"image_BYXZ": image}
        batch |= {"label_B": label_B[index_B], "weight_B": np.ones(len(index_B), np.float32)}
        if share_B is not None:
            batch |= {"other_label_B": np.roll(batch["label_B"], 1), "other_share_B": share_B}
        return batch

    return fetch, len(image_BYXZ)


def make_examples(
    data: Images, changes: Sequence = (), *, patch: int = 0
) -> tuple[tuple, tuple, dict[str, np.ndarray]]:
    """Return `examples` of the training part (with the changes) and of the evaluation part (without), and mean and std.

    The mean and the standard deviation of the training pixels, {"mean_Z", "std_Z"}, normalise both parts. changes:
    names of augmentations. patch: the side of a patch in pixels; 0: whole images. Raises UserError as augment.chain.
    """
    mean_Z, std_Z = statistics(data.train_image_BYXZ)
    normal, cut = {"mean_Z": mean_Z, "std_Z": std_Z}, {"patch": patch}
    train = examples(data.train_image_BYXZ, data.train_label_B, changes=changes, **normal, **cut)
    return train, examples(data.evaluation_image_BYXZ, data.evaluation_label_B, **normal, **cut), normal
