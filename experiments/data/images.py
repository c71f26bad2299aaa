"""Labelled images in a training and an evaluation part, and how they become examples.

The files are .npz, IDX files as those of the MNIST sets (http://yann.lecun.com/exdb/mnist), gzipped or not, or images.
"""

import functools
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.data import augment, classes as class_names, download, files, image_file, image_folder, tables
from experiments.engine import batches, config, disk, errors

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
HELD_OUT = ("valid", "val", "validation", "dev", "test")  # the first that is there is evaluated
ARRAYS = (*(("x_train", "y_train", f"x_{part}", f"y_{part}") for part in HELD_OUT), ("x", "y"))
DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}  # of IDX, by type code
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
DIGITS = tuple("0123456789")
FOLDERS = {"mnist": ("mnist", DIGITS), "fashion_mnist": ("fashion-mnist", GARMENTS)}  # name -> (folder, classes)
SHOWN = 10  # classes without an image
CHANNELS = 4  # grey, colour, either with opacity: an axis of more is hardly one of channels
CHUNK, VALUES = 4096, 2**24  # at most so many images, and values, at a time: statistics need float64
UNIT = 1.5  # pixels above have another scale than 0 .. 1; interpolation goes a little beyond 1
FIELDS = {  # settings of the section `image` that several experiments have
    "source": ("digits", "digits (scikit-learn), mnist, fashion_mnist, hub:NAME, or a path (docs/configs.md)"),
    "size": (0, "resize image files to so many pixels high and wide; 0: all have one size and keep it"),
    "patch": (2, "pixels of a patch's side"),
    "augment": ([], "of training images, in this order: shift:0.5, flip, crop:4, mixup:0.2, cutmix (augment.py)"),
}
COMPARED = 16  # images of each part: fewer may differ by chance


class Images(NamedTuple):
    """Raw pixels (uint8 or float32) and labels 0 .. C-1 (int32) of both parts, a name for each class; `said`: the part
    that each file or array became, '' for a named set."""

    name: str
    train_image_BYXZ: np.ndarray
    train_label_B: np.ndarray
    evaluation_image_BYXZ: np.ndarray
    evaluation_label_B: np.ndarray
    classes: tuple[str, ...]
    said: str
    values: tuple[float, float]  # black and white

    @property
    def sha256(self) -> str:
        return files.sha256(*(array for array in self if isinstance(array, np.ndarray)))


def configured(source: str, size: int = 0) -> Images:
    """Return the images of a config's image.source, with lines that describe them in `said`."""
    data = load(source, size)
    n, held_out, C = len(data.train_label_B), len(data.evaluation_label_B), len(data.classes)
    absent = np.setdiff1d(np.arange(C), data.train_label_B)
    lines = data.said.splitlines()
    lines += [f"{n:,} images to train on, {held_out:,} to evaluate, {C} classes"]
    if len(absent):
        some = ", ".join(data.classes[c] for c in absent[:SHOWN]) + ", ..." * (len(absent) > SHOWN)
        lines[-1] += f"; no image to train on is of {len(absent)} of them: {some}"
    lines += [*class_names.describe(data.classes), *compare_parts(data)]
    return data._replace(said="\n".join(f"{data.name}: {line}" for line in lines))


def load(source: str, size: int = 0) -> Images:
    """Return images from 'digits' (scikit-learn's), 'mnist' or 'fashion_mnist' (folders of IDX files), or a path.

    A path leads to an .npz file (ARRAYS), or to a folder of MNIST's four IDX files, of .npz files with usual names of
    parts, or of image files in folders of their classes. The latter, and those of a data set 'hub:NAME', are made size
    x size pixels (image_folder.py). The validation part is evaluated, or else the test part; of a single part about 20
    %, chosen by content. Raises UserError if nothing is there, and for damaged or contradictory files."""
    config.at_least(0, {"image.size": size}, most=math.isqrt(image_file.LARGEST))
    data = find(source, size)
    Y, X = data.train_image_BYXZ.shape[1:3]
    if size and (Y, X) != (size, size):
        raise errors.UserError(
            f"image.size = {size} is for image files, and the images of {source} are arrays of {Y} x {X}: leave it at 0"
        )
    return data


def find(source: str, size: int) -> Images:
    """Return the images that a source names."""
    path, known = pathlib.Path(os.path.expanduser(source)), ()
    if source == "digits":
        return combine(source, [digits()], known=DIGITS)
    if source.startswith(tables.HUB):
        return combine(source, *image_folder.load(source, size))
    if source in FOLDERS:
        name, known = FOLDERS[source]
        places = [place / name for place in download.places()]
        path = next(filter(os.path.isdir, places), places[0])
    if known or source and os.path.isdir(path):
        return combine(source, *(read_arrays(path, known) or image_folder.load(source, size)))
    if path.suffix != ".npz" or not os.path.isfile(path):
        names = f"a named set of images ({', '.join(sorted(['digits', *FOLDERS]))})"
        raise errors.UserError(
            f"{source!r} is neither {names} nor a folder of images nor an .npz file ({path.absolute()})"
        )
    content = disk.read_npz(path, ARRAYS)
    arrays = [*content.values()]
    return combine(source, [arrays[at : at + 2] for at in range(0, len(arrays), 2)], [*content][::2])


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of scikit-learn's digits."""
    from sklearn import datasets  # takes a second that no other set should cost

    found = datasets.load_digits()  # pixels 0 .. 16, whole numbers stored as float64
    return found.images.astype(np.uint8), found.target


def read_arrays(path: pathlib.Path, known: tuple[str, ...]) -> tuple[list, Sequence, tuple[str, ...]] | None:
    """Return the parts in a folder, each images and labels, the names of their files, and the known classes; None if it
    has neither IDX files nor a train.npz."""
    places = {file: [path / file, path / f"{file}.gz"] for file in FILES}
    idx = {file: place for file, both in places.items() for place in reversed(both) if os.path.isfile(place)}
    if idx or known:
        if missing := [file for file in FILES if file not in idx]:
            raise errors.UserError(f"put the files {', '.join(missing)} (gzipped or not) into the folder {path}")
        arrays = [read_idx(idx[file]) for file in FILES]
        return [arrays[:2], arrays[2:]], FILES[::2], known
    named = {part: path / f"{name}.npz" for name, part in files.PARTS.items() if os.path.isfile(path / f"{name}.npz")}
    if files.TRAIN not in named:
        return None
    used = [named[part] for part in (files.TRAIN, files.evaluated(named)) if part in named]
    return [tuple(disk.read_npz(file, [("x", "y")]).values()) for file in used], used, ()


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Return the array in an IDX file, in native byte order.

    It has two zero bytes, a type code, the number of axes, the size of each as a big-endian uint32, then the values,
    big-endian. Raises UserError for other content."""
    with disk.reading(path):
        content = files.read(files.on_disk(path), text=False)
        if content[:2] != b"\0\0" or len(content) < 4 or content[2] not in DTYPES:
            raise ValueError(f"not an IDX file: it begins with the bytes {content[:4].hex(' ') or '(none)'}")
        dtype, axes = np.dtype(DTYPES[content[2]]), content[3]
        shape = np.frombuffer(content, ">u4", axes, offset=4)
        values = np.frombuffer(content, dtype, offset=4 + 4 * axes)
        return values.reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def combine(
    name: str,
    arrays: list,
    places: Sequence = (),
    known: tuple[str, ...] = (),
    values: tuple[float, float] | None = None,
    lines: Sequence[str] = (),
) -> Images:
    """Return the images of two parts, called `places`, or of one part that is divided by its bytes.

    Classes are those known, or 0 .. max(label). Raises UserError for contradictory parts."""
    names = [f"{name}, training part", f"{name}, evaluation part"] if len(arrays) == 2 else [name]
    parts = [check_arrays(part, *pair) for part, pair in zip(names, arrays, strict=True)]
    check_alike(name, [image_BYXZ for image_BYXZ, _ in parts])
    classes = check_labels(name, [label_B for _, label_B in parts], known)
    if (kinds := [image.dtype for image, _ in arrays])[0] != kinds[-1]:
        lines = [*lines, f"warning: the images of the two parts are of the types {kinds[0]} and {kinds[1]}"]
    said = "split by content"
    if len(arrays) == 2 and places:
        said = f"by their names, {places[0]} to train on; {places[1]} to evaluate; all else left alone"
    dtype = np.result_type(*(image_BYXZ for image_BYXZ, _ in parts))
    if len(parts) == 1:
        image_BYXZ, label_B = parts[0]
        out_B = files.held_out((pixels.tobytes() for pixels in image_BYXZ), share=image_folder.EVALUATION_SHARE)
        parts = [(image_BYXZ[~out_B], label_B[~out_B]), (image_BYXZ[out_B], label_B[out_B])]
    both = [array for image, label_B in parts for array in (image.astype(dtype, copy=False), label_B.astype(np.int32))]
    values = values or (float(both[0].min()), float(both[0].max()))
    said = [] if name in ("digits", *FOLDERS) else [said]
    return Images(name, *both, classes, "\n".join([*said, *lines]), values)


def check_arrays(part: str, image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `image_BYXZ` of (B, Y, X) or (B, Y, X, Z) numbers, uint8 if they are whole and lie in 0 .. 255, else
    float32; and `label_B` of integers of shape (B,) or (B, 1). Raises UserError for other arrays."""
    why = ""
    if image.dtype.kind not in "buif" or image.ndim not in (3, 4) or 0 in image.shape:
        why = f"images must be numbers of axes (B, Y, X) or (B, Y, X, Z), and these are {image.dtype} of {image.shape}"
    elif image.ndim == 4 and image.shape[1] <= CHANNELS < image.shape[3]:
        why = f"images must have axes (B, Y, X, Z), and these seem to have their channels Z first, {image.shape}:"
        why += " move that axis with np.moveaxis(x, 1, -1)"
    elif label.dtype.kind not in "ui" or label.shape not in ((len(image),), (len(image), 1)):
        why = f"{len(image)} images need as many integers for labels, and these are {label.dtype} of {label.shape}"
    if why:
        raise errors.UserError(f"{part}: {why}")
    image_BYXZ = image if image.ndim == 4 else image[..., None]
    if image.dtype == np.uint8:  # it may be mapped from a file that is larger than the memory
        return np.ascontiguousarray(image_BYXZ), label.reshape(-1)
    small = image.dtype.kind in "bui" and image.min() >= 0 and image.max() <= 255
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
        image_BYXZ = np.ascontiguousarray(image_BYXZ, np.uint8 if small else np.float32)
    if not np.isfinite(image_BYXZ).all():
        raise errors.UserError(f"{part}: a pixel is not a finite number")
    return image_BYXZ, label.reshape(-1)


def check_labels(name: str, parts: Sequence[np.ndarray], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the classes. Raises UserError for labels that are out of range."""
    least, most = min(int(label_B.min()) for label_B in parts), max(int(label_B.max()) for label_B in parts)
    C = len(known) or min(int(parts[0].max()) + 1, len(parts[0]))  # as many classes as images are a mistake
    if least > 0 and not known:
        raise errors.UserError(
            f"{name}: the smallest label is {least}, and classes are counted from 0: subtract {least} from all labels"
        )
    if least < 0 or most >= C:
        raise errors.UserError(f"{name}: the labels go from {least} to {most}, and must be the classes 0 .. {C - 1}")
    return known or tuple(map(str, range(C)))


def check_alike(name: str, parts: Sequence[np.ndarray]) -> None:
    """Raise UserError if the parts differ in shape, or if only one has pixels from 0 to 1, or from -1 to 1. A part of
    one colour has any scale."""
    shapes = [image_BYXZ.shape[1:] for image_BYXZ in parts]
    if shapes[0] != shapes[-1]:
        raise errors.UserError(f"{name}: the images of the two parts differ in shape, {shapes[0]} and {shapes[1]}")
    ends = [(float(image_BYXZ.min()), float(image_BYXZ.max())) for image_BYXZ in parts]
    wide = [max(-low, high) for low, high in ends if low < high]
    beyond, signed = {most > UNIT for most in wide}, {low < -1 / 4 for low, high in ends if low < high}
    if len(beyond) == 2 and max(wide) > UNIT * min(wide) or beyond == {False} and len(signed) == 2:
        each = " and ".join(f"from {low:g} to {high:g}" for low, high in ends)
        raise errors.UserError(f"{name}: the pixels of the two parts go {each}: give both parts one scale")


def compare_parts(data: Images) -> list[str]:
    """Return warnings if the parts seem to differ in scale or in the order of the channels, and share images."""
    train, held_out = data.train_image_BYXZ, data.evaluation_image_BYXZ
    (mean_Z, std_Z), (other_mean_Z, other_std_Z) = statistics(train), statistics(held_out)
    gap, turned = (float(abs(other_Z - mean_Z).mean()) for other_Z in (other_mean_Z, other_mean_Z[::-1]))
    std, other_std, lines = float(std_Z.mean()), float(other_std_Z.mean()), []
    many = min(len(train), len(held_out)) >= COMPARED
    if many and train.shape[-1] == 3 and gap > std / 10 and turned < gap / 4:
        lines += ["warning: the colours of the two parts seem to be in the opposite order (RGB and BGR)"]
    elif many and (gap > std or not std / 3 < other_std < 3 * std):
        numbers = f"mean {mean_Z.mean():.4g} and {other_mean_Z.mean():.4g}, deviation {std:.4g} and {other_std:.4g}"
        lines += [f"warning: the pixels of the two parts seem to have different scales: {numbers}"]
    known = {files.digest(image_YXZ.tobytes()) for image_YXZ in train}
    equal = sum(files.digest(image_YXZ.tobytes()) in known for image_YXZ in held_out)
    return lines + [f"warning: {equal:,} of {len(held_out):,} images to evaluate are also trained on"] * bool(equal)


def describe(data: Images) -> dict[str, Any]:
    """Return what is needed to make another image like these, and the names of the classes; for JSON."""
    mean_Z, std_Z = statistics(data.train_image_BYXZ)
    facts = {"image": list(data.train_image_BYXZ.shape[1:]), "values": list(data.values)}
    return facts | {"mean": mean_Z.tolist(), "std": std_Z.tolist(), "classes": list(data.classes)}


def statistics(image_BYXZ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the raw pixels of each channel, float32; 1 for a deviation of 0."""
    B, Y, X, Z = image_BYXZ.shape
    row_RXZ, most = image_BYXZ.reshape(B * Y, X, Z), max(1, min(CHUNK * Y, VALUES // (X * Z)))
    chunks = [row_RXZ[at : at + most] for at in range(0, B * Y, most)]
    mean_Z = sum(chunk.sum((0, 1), dtype=np.float64) for chunk in chunks) / (B * Y * X)
    std_Z = np.sqrt(sum(np.square(chunk - mean_Z).sum((0, 1)) for chunk in chunks) / (B * Y * X))
    return mean_Z.astype(np.float32), np.where(std_Z > 0, std_Z, 1).astype(np.float32)


def examples(
    image_BYXZ: np.ndarray, label_B: np.ndarray, *, mean_Z: np.ndarray, std_Z: np.ndarray, changes: Sequence = ()
) -> tuple[batches.Fetch, int]:
    """Return `(fetch, n)` for `batches`: `image_BYXZ` minus the mean, divided by the deviation (float32), `label_B`
    (int32), and `weight_B` 1 (float32).

    With an `rng`, `augment.chain` first changes the images. If that mixes two of the batch, there are also
    `other_label_B`, and `other_share_B` of `weight_B`."""
    change = augment.chain(changes, Y=image_BYXZ.shape[1], X=image_BYXZ.shape[2])

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        batch_BYXZ, share_B = image_BYXZ[index_B], None
        if rng is not None:
            batch_BYXZ, share_B = change(batch_BYXZ, rng)
        image = (batch_BYXZ.astype(np.float32) - mean_Z) / std_Z
        batch = {"image_BYXZ": image, "label_B": label_B[index_B], "weight_B": np.ones(len(index_B), np.float32)}
        if share_B is not None:
            batch |= {"other_label_B": np.roll(batch["label_B"], 1), "other_share_B": share_B}
        return batch

    return fetch, len(image_BYXZ)


def both(data: Images, changes: Sequence = ()) -> tuple[tuple, tuple, dict[str, np.ndarray]]:
    """Return `examples` of the training part with these changes, of the other without; and the pixels' statistics."""
    normal = dict(zip(("mean_Z", "std_Z"), statistics(data.train_image_BYXZ), strict=True))
    train = examples(data.train_image_BYXZ, data.train_label_B, changes=changes, **normal)
    return train, examples(data.evaluation_image_BYXZ, data.evaluation_label_B, **normal), normal
