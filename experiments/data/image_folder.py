"""Read image files from folders of their classes, or images from data sets, and resize them on all cores.

The folders are DIR/class/*.jpg, or DIR/train/class/*.jpg, and so on. Each image is squashed to `size` x `size` pixels,
so that nothing is cut off; 0 keeps its size. Many images are cached in a file that is mapped into memory.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import io
import json
import math
import mimetypes
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from experiments.config import disk, errors
from experiments.data import classes as class_names, files as data_files, image_file, tables

ENDS = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
CACHED = 2**26  # bytes: images of at least this size in total are cached
CHUNK, CHUNK_BYTES = 1024, 2**27  # the most images, and bytes of them, decoded at a time
VERSION = 2  # of the format of the cached files
EVALUATION_SHARE = 0.2
LISTED = 10  # damaged files in a message
NO_CLASS = "{} is not in a folder of a class. {} needs a folder per class."
TEXT = ("text/", "application/")  # MIME types of other files that may be next to images
Parts = dict[str, list[data_files.File]]  # part -> its image files, with their classes


class Splits(NamedTuple):
    """Images and labels of a training and an evaluation part, or of one part that is to be split."""

    arrays: Sequence[Sequence[np.ndarray]]  # (images, labels) of each part
    places: Sequence = ()  # the file, folder or array that each part comes from
    classes: tuple[str, ...] = ()  # names; () if the files have only numbers as labels
    values: tuple[float, float] | None = None  # black and white, if they are known
    lines: Sequence[str] = ()  # about files and rows that are left out


def load(source: str, size: int) -> Splits:
    """Return both parts, training and evaluation, of the images of a folder or of a data set 'hub:NAME'.

    size: pixels of a side; 0: keep it. A single part is split by the bytes of its files, so that runs at two sizes hold
    out the same images. Raises UserError as `find_parts` and `read` do, for example if there is no image, an image
    without a class, or a class or part without images.
    """
    (train, evaluation), places, names, lines = find_parts(source)
    errors.refuse((not names, NO_CLASS.format(train[0].name, source)))
    files, number = [*train, *evaluation], {name: c for c, name in enumerate(names)}
    label_B, image_BYXZ = np.array([number[file.label] for file in files]), read(files, size)
    arrays = [*zip(*(np.split(array, [len(train)]) for array in (image_BYXZ, label_B)), strict=True)]
    return Splits(arrays, places, names, (0.0, 255.0), lines)


def find_parts(source: str) -> tuple[list[list[data_files.File]], Sequence, tuple[str, ...], list[str]]:
    """Return [training, held-out] image files, the folders of these parts, class names, and lines on files left out.

    There are no folders if one part was split by content. If no image has a class, all are in the first part, and there
    are no classes. Raises UserError if there is no image, if only some have a class, or if folders may be parts or
    classes. A class or part without a readable image, and a part to split without two different images, raise it too.
    """
    hub = source.startswith(tables.HUB)
    parts, names, lines = find_rows(source) if hub else find_files(pathlib.Path(os.path.expanduser(source)))
    used = data_files.used_parts(parts)
    if unused := sum(map(len, parts.values())) - sum(map(len, used)):
        lines.append(f"images left out, because they are in other folders or splits: {unused:,}")
    files = [file for part in used for file in part]
    unlabelled = [file.name for file in files if not file.label]
    if len(unlabelled) == len(files):
        return [files, []], [], (), lines
    if unlabelled:
        raise errors.UserError(NO_CLASS.format(unlabelled[0], source))
    places = [os.path.join(source, os.path.commonpath([file.inside.parent for file in part])) for part in used]
    if len(used) == 1:
        digests = (data_files.digest(data_files.read(file)) for file in files)
        used, places = data_files.divide(files, digests, share=EVALUATION_SHARE), []
    return used, places, names or class_names.sort_names(file.label for file in files), lines


def find_files(path: pathlib.Path) -> tuple[Parts, tuple[str, ...], list[str]]:
    """Return ({part: image files of the folder}, (), lines about files left out).

    The () stands for names of classes, which the labels of the files give.
    Raises UserError if there is no image, if a class has only images of unsupported formats, or if folders may be parts
    or classes.
    """
    files = data_files.folder(path)
    images = [file for file in files if file.inside.suffix.lower() in ENDS]
    not_images = [file for file in files if file.inside.suffix.lower() not in ENDS]
    lines = data_files.describe_skipped(path, files, images)
    if not images:
        formats = f"images in folders of their classes ({', '.join(ENDS)})"
        raise errors.UserError("; ".join([f"{path} has neither {formats} nor train.npz nor IDX files", *lines]))
    parts, folders, more = class_names.divide(path, images)
    for above, names in folders:
        level = len(above)
        for file in not_images:
            inside, kind = file.inside.parts, mimetypes.guess_type(file.name)[0] or ""
            in_class = inside[:level] == above and len(inside) > level + 1
            if in_class and inside[level] not in names and not kind.startswith(TEXT):
                problem = f"{file.name} cannot be read, and its class {inside[level]!r} has no supported image"
                raise errors.UserError(f"{problem}. Convert its files, for example to .png, or remove its folder.")
    return parts, (), lines + more


def find_rows(source: str) -> tuple[Parts, tuple[str, ...], list[str]]:
    """Return {part: a File for each row with a class} of a data set, its class names, and lines about other rows.

    source: 'hub:NAME', as in tables.find. Raises UserError if a split has no column of images or of classes, or if
    there is no training split with a row that has a class.
    """
    parts, lines, splits = {}, [], tables.find(source, stream=False)
    for split in splits:
        rows = split.open()
        columns = {type(kind).__name__: name for name, kind in reversed(rows.features.items())}  # the first of each
        if not {"Image", "ClassLabel"} <= columns.keys():
            kinds = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in rows.features.items())
            rule = "needs a column of the type Image and a column of the type ClassLabel"
            raise errors.UserError(f"{split.name} {rule}, but has {kinds}.")
        column, names = columns["Image"], class_names.read_names(splits, columns["ClassLabel"])
        packed = rows.cast_column(column, type(rows.features[column])(decode=False))
        part = data_files.part_of_name(split.inside) if len(splits) > 1 else data_files.TRAIN
        labels = [tables.name_class(label, names) for label in rows[columns["ClassLabel"]]]
        for b in filter(labels.__getitem__, range(len(labels))):
            read_row = functools.partial(open_image, packed, b, column)
            fields = {"version": split.version, "label": labels[b]}
            file = data_files.File(split.inside / str(b), f"{split.name}, row {b:,}", 0, read_row, **fields)
            parts.setdefault(part, []).append(file)
        if unlabelled := labels.count(""):
            lines.append(f"rows left out, because they have no class, in the split {split.inside}: {unlabelled:,}")
    if data_files.TRAIN not in parts:
        available = ", ".join(str(split.inside) for split in splits)
        fault = "the data set needs a split called train, with rows that have a class"
        raise errors.UserError(f"{source}: {fault}. Its splits are: {available}.")
    return parts, names, lines


def open_image(rows: Any, number: int, column: str) -> BinaryIO:
    """Open the image file in a row of a data set. Raises ValueError if it is missing."""
    packed = rows[number][column]
    if not packed:
        raise ValueError("the row has no image")
    content = packed.get("bytes")
    return disk.open_regular(packed["path"]) if content is None else io.BufferedReader(io.BytesIO(content))


def read(images: Sequence[data_files.File], size: int) -> np.ndarray:
    """Return image_BYXZ (uint8) of these files: Z is 1 if all are grey, else 3.

    size: pixels of a side; 0: keep it. Many images are mapped from a file in the cache folder. Raises UserError for a
    damaged file, images of different sizes, or a full disk.
    """
    versions = [[file.name, file.size, file.version or os.stat(file.name).st_mtime_ns] for file in images]
    digest = hashlib.sha256(json.dumps([VERSION, size, os.getcwd(), versions]).encode()).hexdigest()
    cache = disk.cache_folder() / "images" / f"{digest[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or damaged
        return np.load(cache, mmap_mode="r", allow_pickle=False)
    with warnings.catch_warnings(action="ignore"):  # about damaged metadata
        form = choose_size(images, size)
        shape = (len(images), *form["image"])
        if math.prod(shape) < CACHED:
            return np.stack([*make(images, form)])
        with disk.writing(cache, disk.OTHER_CACHE):
            cache.parent.mkdir(parents=True, exist_ok=True)
            with disk.draft(cache) as new:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(new, header)
                for image_YXZ in make(images, form):
                    new.write(image_YXZ)
    return np.load(cache, mmap_mode="r", allow_pickle=False)


def choose_size(images: Sequence[data_files.File], size: int) -> dict[str, Any]:
    """Return the `form` with which image_file.pixels makes these files size x size, or keeps their size if size = 0.

    Raises UserError if size = 0 and their sizes differ, or if a file is damaged.
    """

    def look(file: data_files.File) -> tuple[bool, tuple[int, int]]:
        with image_file.open_image(file) as image:
            rotated = image.getexif().get(image_file.ORIENTATION) in (5, 6, 7, 8)  # by 90 degrees
            sides = image.size if rotated else image.size[::-1]
            return image.mode in image_file.GREY, (size, size) if size else sides

    try:
        grey, sides = zip(*map_images(look, images), strict=True)
    except errors.UserError:
        collections.deque(make(images, image_file.describe_size(1, 1, 3)), 0)  # its error also lists truncated files
        raise
    Y, X = sides[0]
    for file, (rows, columns) in zip(images, sides, strict=True):
        if (rows, columns) != (Y, X):
            problem = f"{file.name} has {rows} x {columns} pixels, and {images[0].name} {Y} x {X}"
            raise errors.UserError(f"{problem}. Resize all images, for example with --config.image.size=64.")
    return image_file.describe_size(Y, X, 1 if all(grey) else 3)


def make(images: Sequence[data_files.File], form: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Yield image_YXZ of each file, decoded on all cores in chunks of at most CHUNK_BYTES.

    form: the result of `choose_size`.
    """

    def make_one(file: data_files.File) -> np.ndarray:
        with image_file.open_image(file) as image:
            return image_file.pixels(file.name, image, form)[0]

    return map_images(make_one, images, max(1, min(CHUNK, CHUNK_BYTES // math.prod(form["image"]))))


def read_batch(files: Sequence[data_files.File], form: Mapping[str, Any]) -> np.ndarray:
    """Return the images of the files as image_BYXZ (float32), processed and normalised as `form` says."""
    with warnings.catch_warnings(action="ignore"):  # about damaged metadata
        image_BYXZ = np.stack([*make(files, form)])
    return image_file.normalise(image_BYXZ, form)


def map_images(function: Callable, images: Sequence[data_files.File], chunk: int = CHUNK) -> Iterator[Any]:
    """Yield function(file) of each file, computed on all cores for `chunk` files at a time.

    If the function raises UserError, check the other files too, without yielding more. Then raise one UserError with
    the number of such files and up to LISTED messages.
    """

    def call(file: data_files.File) -> Any:
        try:
            return function(file)
        except errors.UserError as error:
            return error

    damaged = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for at in range(0, len(images), chunk):
            for result in pool.map(call, images[at : at + chunk]):
                if isinstance(result, errors.UserError):
                    damaged.append(str(result))
                elif not damaged:
                    yield result
    if damaged:
        listed = "; ".join(damaged[:LISTED]) + f"; and {len(damaged) - LISTED:,} more" * (len(damaged) > LISTED)
        count = f"{len(damaged):,} of {len(images):,} images cannot be read: " if len(damaged) > 1 else ""
        raise errors.UserError(f"{count}{listed.removesuffix('.')}. Remove or replace such files.")
