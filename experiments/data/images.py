"""Labelled images in a training and an evaluation part, and how they become examples.

The files are .npz, or IDX files as those of the MNIST sets (http://yann.lecun.com/exdb/mnist), gzipped or not: two zero
bytes, a type code, the number of axes, the size of each as a big-endian uint32, then the values, big-endian.
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
EVALUATION_SHARE = image_folder.EVALUATION_SHARE
SHOWN = 10  # classes of which there is no image
CHANNELS = 4  # grey, colour, either with opacity: more are hardly channels
CHUNK, VALUES = 4096, 2**24  # at most so many images, and values, at a time: statistics need float64
UNIT = 1.5  # pixels beyond are of another scale than 0 .. 1; what is a little beyond it was interpolated
FIELDS = {  # settings of the section `image` that several experiments have
    "source": ("digits", "digits (scikit-learn), mnist, fashion_mnist, hub:NAME, or a path (docs/configs.md)"),
    "size": (0, "resize image files to so many pixels high and wide; 0: all have one size and keep it"),
    "patch": (2, "pixels of a patch's side"),
    "augment": ([], "of training images, in this order: shift:0.5, flip, crop:4, mixup:0.2, cutmix (augment.py)"),
}
COMPARED = 16  # images of each part: fewer may differ by chance


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
    values: tuple[float, float]  # black and white

    @property
    def sha256(self) -> str:
        return files.sha256(*(array for array in self if isinstance(array, np.ndarray)))


def configured(source: str, size: int = 0) -> Images:
    """The images of a config's image.source; says what they are. UserError as `load`."""
    data = load(source, size)
    n, held_out, C = len(data.train_label_B), len(data.evaluation_label_B), len(data.classes)
    absent = np.setdiff1d(np.arange(C), data.train_label_B)
    lines = data.said.splitlines()
    lines += [f"{n:,} images to train on, {held_out:,} to evaluate, {C} classes"]
    if len(absent):
        some = ", ".join(data.classes[c] for c in absent[:SHOWN]) + ", ..." * (len(absent) > SHOWN)
        lines[-1] += f"; no image to train on is of {len(absent)} of them: {some}"
    lines += [*class_names.describe(data.classes), *_differences(data)]
    return data._replace(said="\n".join(f"{data.name}: {line}" for line in lines))


def load(source: str, size: int = 0) -> Images:
    """Images from 'digits' (scikit-learn's), from 'mnist' or 'fashion_mnist' (folders of IDX files), or from a path.

    A path leads to an .npz file (ARRAYS), or to a folder of MNIST's four IDX files, of .npz files that are called as
    parts usually are, or of image files in folders of their classes; these, and those of a data set 'hub:NAME', are
    made size x size pixels (image_folder.py). Evaluated is a validation part, else the test part, which is else left
    alone; of one part about 20 %, chosen by content. UserError: nothing is there, damaged or contradictory files.
    """
    config.at_least(0, {"image.size": size}, most=math.isqrt(image_file.LARGEST))
    data = _load(source, size)
    Y, X = data.train_image_BYXZ.shape[1:3]
    if size and (Y, X) != (size, size):
        wrong = f"image.size = {size} is for image files, which are made so many pixels high and wide"
        raise errors.UserError(f"{wrong}; the images of {source} are {Y} x {X}, and stay so: leave image.size at 0")
    return data


def _load(source: str, size: int) -> Images:
    path, known = pathlib.Path(os.path.expanduser(source)), ()
    if source == "digits":
        return _images(source, [_digits()], known=DIGITS)
    if source in FOLDERS:
        name, known = FOLDERS[source]
        places = [place / name for place in download.places()]
        path = next(filter(os.path.isdir, places), None)
        if path is None:
            where = f"put the files {', '.join(FILES)} (gzipped or not) into {' or '.join(map(str, places))}"
            raise errors.UserError(f"{source} is not here: {where}")
    elif source.startswith(tables.HUB):
        return _images(source, *image_folder.load(source, size))
    elif not source or not os.path.exists(path):
        names = f"a named set of images ({', '.join(sorted(['digits', *FOLDERS]))})"
        raise errors.UserError(f"{source!r} is neither {names} nor an existing path ({path.absolute()})")
    if os.path.isdir(path):
        return _images(source, *(_folder(path, known) or image_folder.load(source, size)))
    if path.suffix != ".npz" or not os.path.isfile(path):
        raise errors.UserError(f"{path} is neither a folder of images nor an .npz file")
    content = disk.read_npz(path, ARRAYS)
    arrays = [*content.values()]
    return _images(source, [arrays[at : at + 2] for at in range(0, len(arrays), 2)], [*content][::2])


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, read from text only once."""
    from sklearn import datasets  # takes a second that no other set should cost

    digits = datasets.load_digits()  # pixels 0 .. 16, whole numbers stored as float64
    return digits.images.astype(np.uint8), digits.target


def _folder(path: pathlib.Path, known: tuple[str, ...]) -> tuple[list, Sequence, tuple[str, ...]] | None:
    """The parts in a folder, each images and labels, the names of their files, and the classes, where they are known;
    None where there are neither IDX nor .npz files."""
    places = {file: [path / file, path / f"{file}.gz"] for file in FILES}
    idx = {file: place for file, some in places.items() for place in reversed(some) if os.path.isfile(place)}
    named: dict[str, pathlib.Path] = {}
    for word, part in files.PARTS.items():
        file = path / f"{word}.npz"
        if idx or not os.path.isfile(file):
            continue
        if part in named:
            both = f"{named[part].name} and {file.name}"
            raise errors.UserError(f"{path} has {both}: let one of them have another name")
        named[part] = file
    if not named and not idx and not known:
        return None
    if not named:
        if missing := [file for file in FILES if file not in idx]:
            raise errors.UserError(f"the folder {path} lacks {', '.join(missing)} (gzipped or not)")
        arrays = [read_idx(idx[file], axes=axes) for file, axes in zip(FILES, (3, 1, 3, 1), strict=True)]
        return [arrays[:2], arrays[2:]], FILES[::2], known
    if files.TRAIN not in named:
        beside = files.listed([*named.values()])
        raise errors.UserError(f"there is nothing to train on beside {beside}: call it train.npz")
    used = [named[part] for part in (files.TRAIN, files.evaluated(named)) if part in named]
    return [tuple(disk.read_npz(file, [("x", "y")]).values()) for file in used], used, ()


def read_idx(path: pathlib.Path, *, axes: int) -> np.ndarray:
    """The array in an IDX file, of the file's type in native byte order. UserError for any other content."""
    begin, file = 4 + 4 * axes, files.on_disk(path)
    header = files.read(file, copies=1, text=False, most=begin)[:begin]
    if len(header) < 4 or header[:2] != b"\0\0" or header[2] not in DTYPES:
        raise errors.UserError(f"{path} is not an IDX file: it begins with the bytes {header[:4].hex(' ') or '(none)'}")
    if header[3] != axes:
        raise errors.UserError(f"{path} holds an array of {header[3]} axes where {axes} are expected")
    shape, dtype = tuple(np.frombuffer(header.ljust(begin, b"\0"), ">u4")[1:].tolist()), np.dtype(DTYPES[header[2]])
    expected = math.prod(shape) * dtype.itemsize
    disk.check_memory(f"what {path} announces", 2 * expected)
    # Packing makes nothing longer by more than this; zeros behind the end would be read through to the last.
    longer = file.size > expected + expected // 64 + files.CHUNK
    content = b"" if longer else files.read(file, copies=2, text=False, most=begin + expected)
    if len(content) != begin + expected or not expected:
        wrong = "too long" if longer or len(content) > begin + expected else "cut off"
        wrong = wrong if expected else "empty"
        raise errors.UserError(f"{path} is {wrong}: it announces values of shape {shape}, and has others")
    return np.frombuffer(content, dtype, offset=begin).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _images(
    name: str,
    arrays: list,
    files_of: Sequence = (),
    known: tuple[str, ...] = (),
    values: tuple[float, float] | None = None,
    lines: Sequence[str] = (),
) -> Images:
    """The images of two parts, or of one in two, chosen by their bytes; classes are those known, or 0 .. max(label).
    UserError where the parts differ in shape, or labels are out of range (also as many classes as images)."""
    names = [f"{name}, training part", f"{name}, evaluation part"] if len(arrays) == 2 else [name]
    checked = [_labelled(part, *some) for part, some in zip(names, arrays, strict=True)]
    first, last = checked[0][0].shape[1:], checked[-1][0].shape[1:]
    if first != last:
        raise errors.UserError(f"{name}: the images of the two parts differ in shape, {first} and {last}")
    kinds, dtype = [image.dtype for image, _ in arrays], np.result_type(*(image_BYXZ for image_BYXZ, _ in checked))
    if kinds[0] != kinds[-1]:
        lines = [*lines, f"warning: the images of the two parts are of the types {kinds[0]} and {kinds[1]}"]
    _check_scales(name, [image_BYXZ for image_BYXZ, _ in checked])
    classes = _check_labels(names, [label_B for _, label_B in checked], known)
    if len(checked) == 1:
        image_BYXZ, label_B = checked[0]
        remedy = ": name the parts yourself, as train/ and test/"
        disk.check_memory(f"what is split by content, {name},", image_BYXZ.nbytes, remedy=remedy)
        out_B = files.held_out((pixels.tobytes() for pixels in image_BYXZ), share=EVALUATION_SHARE)
        checked = [(image_BYXZ[~out_B], label_B[~out_B]), (image_BYXZ[out_B], label_B[out_B])]
    said = "split by content"
    if len(arrays) == 2 and files_of:
        said = f"by their names, {files_of[0]} to train on; {files_of[1]} to evaluate; all else left alone"
    pairs = ((image_BYXZ.astype(dtype, copy=False), label_B.astype(np.int32)) for image_BYXZ, label_B in checked)
    both = [array for pair in pairs for array in pair]
    values = values or (float(both[0].min()), float(both[0].max()))
    said = [] if name in ("digits", *FOLDERS) else [said]
    return Images(name, *both, classes, "\n".join([*said, *lines]), values)


def _check_labels(names: Sequence[str], parts: Sequence[np.ndarray], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the classes. Raises UserError for labels that are out of range."""
    least, most, why = min(int(label_B.min()) for label_B in parts), int(parts[0].max()), ""
    if most < 0:
        why = f"the label {most} is out of range: classes are counted from 0"
    elif least > 0:
        why = f"the smallest label is {least}, and classes are counted from 0: subtract {least} from all labels"
    elif most >= len(parts[0]):
        why = f"the label {most} is out of range: {len(parts[0])} images show fewer classes"
    if why and not known:
        raise errors.UserError(f"{names[0]}: {why}")
    classes = known or tuple(map(str, range(most + 1)))
    for part, label_B in zip(names, parts, strict=True):
        if len(wrong_B := label_B[(label_B < 0) | (label_B >= len(classes))]):
            right = f"it must lie in 0 .. {len(classes) - 1}"
            raise errors.UserError(f"{part}: the label {wrong_B[0]} is out of range: {right}")
    return classes


def _check_scales(name: str, parts: Sequence[np.ndarray]) -> None:
    """Raise UserError if only one part has pixels from 0 to 1, or from -1 to 1; a part of one colour has any scale."""
    ends = [(float(image_BYXZ.min()), float(image_BYXZ.max())) for image_BYXZ in parts]
    wide = [max(-low, high) for low, high in ends if low < high]
    beyond, signed = {most > UNIT for most in wide}, {low < -1 / 4 for low, high in ends if low < high}
    if len(beyond) == 2 and max(wide) > UNIT * min(wide) or beyond == {False} and len(signed) == 2:
        each = " and ".join(f"from {low:g} to {high:g}" for low, high in ends)
        raise errors.UserError(f"{name}: the pixels of the two parts go {each}: give both parts one scale")


def _differences(data: Images) -> list[str]:
    """Return lines about pixels of the two parts that seem to differ in scale or in the order of the channels, and
    about images that are in both."""
    train, held_out = data.train_image_BYXZ, data.evaluation_image_BYXZ
    (mean_Z, std_Z), (other_mean_Z, other_std_Z) = statistics(train), statistics(held_out)
    gap, turned = (float(abs(other_Z - mean_Z).mean()) for other_Z in (other_mean_Z, other_mean_Z[::-1]))
    std, other_std, lines = float(std_Z.mean()), float(other_std_Z.mean()), []
    if min(len(train), len(held_out)) < COMPARED:
        pass
    elif train.shape[-1] == 3 and gap > std / 10 and turned < gap / 4:
        lines += ["warning: the colours of the two parts seem to be in the opposite order (RGB and BGR)"]
    elif gap > std or not std / 3 < other_std < 3 * std:
        numbers = f"mean {mean_Z.mean():.4g} and {other_mean_Z.mean():.4g}, deviation {std:.4g} and {other_std:.4g}"
        lines += [f"warning: the pixels of the two parts seem to have different scales: {numbers}"]
    known = {files.digest(image_YXZ.tobytes()) for image_YXZ in train}
    equal = sum(files.digest(image_YXZ.tobytes()) in known for image_YXZ in held_out)
    return lines + [f"warning: {equal:,} of {len(held_out):,} images to evaluate are also trained on"] * bool(equal)


def _labelled(part: str, image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`image_BYXZ` of (B, Y, X) or (B, Y, X, Z) numbers: uint8 if they are whole and lie in 0 .. 255, else float32; and
    one integer label for each, of shape (B,) or (B, 1). UserError for other arrays."""
    why = ""
    if image.dtype.kind not in "buif":
        why = f"images must be real numbers, and these are of type {image.dtype}"
    elif image.ndim not in (3, 4) or 0 in image.shape:
        why = f"images must have axes (B, Y, X) or (B, Y, X, Z), none of them empty, and these are {image.shape}"
    elif image.ndim == 4 and image.shape[1] <= CHANNELS < image.shape[3]:
        why = f"images must have axes (B, Y, X, Z), and these seem to have their channels Z first, {image.shape}:"
        why += " move that axis with np.moveaxis(x, 1, -1)"
    elif label.dtype.kind not in "ui":
        why = f"labels must be integers, and these are of type {label.dtype}"
    elif label.shape not in ((len(image),), (len(image), 1)):
        why = f"{len(image)} images need labels of shape ({len(image)},), and these are {label.shape}"
    if why:
        raise errors.UserError(f"{part}: {why}")
    image_BYXZ = image if image.ndim == 4 else image[..., None]
    if image.dtype == np.uint8:  # it may be mapped from a file that is larger than the memory
        return np.ascontiguousarray(image_BYXZ), label.reshape(-1)
    small = image.dtype.kind in "bui" and image.min() >= 0 and image.max() <= 255
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        image_BYXZ = np.ascontiguousarray(image_BYXZ, np.uint8 if small else np.float32)
    if not np.isfinite(image_BYXZ).all():
        raise errors.UserError(f"{part}: a pixel is not a finite number")
    return image_BYXZ, label.reshape(-1)


def describe(data: Images) -> dict[str, Any]:
    """What must be known about images to make another one like them, and the names of their classes; for JSON."""
    mean_Z, std_Z = statistics(data.train_image_BYXZ)
    facts = {"image": list(data.train_image_BYXZ.shape[1:]), "values": list(data.values)}
    return facts | {"mean": mean_Z.tolist(), "std": std_Z.tolist(), "classes": list(data.classes)}


def statistics(image_BYXZ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the raw pixels of each channel, float32; a deviation of 0 is given as 1."""
    B, Y, X, Z = image_BYXZ.shape
    row_RXZ, most = image_BYXZ.reshape(B * Y, X, Z), max(1, min(CHUNK * Y, VALUES // (X * Z)))
    chunks = [row_RXZ[at : at + most] for at in range(0, B * Y, most)]
    mean_Z = sum(chunk.sum((0, 1), dtype=np.float64) for chunk in chunks) / (B * Y * X)
    std_Z = np.sqrt(sum(np.square(chunk - mean_Z).sum((0, 1)) for chunk in chunks) / (B * Y * X))
    return mean_Z.astype(np.float32), np.where(std_Z > 0, std_Z, 1).astype(np.float32)


def examples(
    image_BYXZ: np.ndarray, label_B: np.ndarray, *, mean_Z: np.ndarray, std_Z: np.ndarray, changes: Sequence = ()
) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: `image_BYXZ` less the mean, divided by the deviation (float32), `label_B` (int32),
    and `weight_B` 1 (float32).

    With an `rng`, the images are first changed as `augment.chain` says. Where that mixes two of the batch, there are
    also `other_label_B`, and `other_share_B` of `weight_B`. UserError of `augment.chain`.
    """
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
    """`examples` of the training part, changed so, and of the other as it is; and the pixels' statistics."""
    normal = dict(zip(("mean_Z", "std_Z"), statistics(data.train_image_BYXZ), strict=True))
    train = examples(data.train_image_BYXZ, data.train_label_B, changes=changes, **normal)
    return train, examples(data.evaluation_image_BYXZ, data.evaluation_label_B, **normal), normal
