"""Image files in folders of their classes, and the images of data sets: resized, and read once by all cores.

DIR/class/*.jpg, or the same in DIR/train, DIR/valid and DIR/test. Each image is squashed to `size` x `size` pixels, so
that nothing is cut off; 0 keeps its size. Many images are cached in a file that is mapped to memory.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import itertools
import json
import math
import mimetypes
import os
import pathlib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from experiments.data import classes, files, image_file, tables
from experiments.engine import disk, errors

ENDS = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
HIDDEN = (".", "__MACOSX")
CACHED = 2**26  # bytes of images from which on they are cached
CHUNK, CHUNK_BYTES = 1024, 2**27  # the most images, and bytes of them, made at a time
VERSION = 2  # of the files in the cache
EVALUATION_SHARE = 0.2
TEXT = ("text/", "application/")  # kinds of files that may lie next to images
Parts = dict[str, list[tuple[files.File, str]]]  # part -> its image files, each with its class


class Splits(NamedTuple):
    """Images and labels of a training and an evaluation part, or of one part that is to be split."""

    arrays: Sequence[Sequence[np.ndarray]]  # (images, labels) of each part
    places: Sequence = ()  # the file or array that each part comes from
    classes: tuple[str, ...] = ()  # names, () if the labels are numbers
    values: tuple[float, float] | None = None  # black and white, if they are known
    lines: Sequence[str] = ()  # about files and rows that are left out


def load(source: str, size: int) -> Splits:
    """Return both parts of the images of a folder or of a data set 'hub:NAME'.

    A single part is split by the bytes of its files, so that runs at two sizes hold out the same images. Raises
    UserError if there is no image, an image of no class, or a class or a part without images; and as `read`.
    """
    hub = source.startswith(tables.HUB)
    parts, names, lines = find_rows(source) if hub else find_files(pathlib.Path(os.path.expanduser(source)))
    used = [parts[part] for part in (files.TRAIN, files.evaluation_part(parts)) if part in parts]
    if unused := sum(map(len, parts.values())) - sum(map(len, used)):
        lines.append(f"images left out, in other folders or splits: {unused:,}")
    if lost := [file.name for part in used for file, name in part if not name]:
        raise errors.UserError(f"{lost[0]} is in no folder of a class: {source} must have a folder for each class")
    places = [os.path.join(source, os.path.commonpath([file.inside.parent for file, _ in part])) for part in used]
    if len(used) == 1:
        contents = (files.read(file, text=False) for file, _ in used[0])
        out_B, places = files.held_out(contents, share=EVALUATION_SHARE), []
        used = [[used[0][b] for b in np.flatnonzero(out_B == side)] for side in (False, True)]
    every = [example for part in used for example in part]
    names = names or classes.sort_names(name for _, name in every)
    number = {name: c for c, name in enumerate(names)}
    label_B, image_BYXZ = np.array([number[name] for _, name in every]), read([file for file, _ in every], size)
    n = len(used[0])
    arrays = [(image_BYXZ[:n], label_B[:n]), (image_BYXZ[n:], label_B[n:])]
    return Splits(arrays, places, names, (0.0, 255.0), lines)


def find_files(path: pathlib.Path) -> tuple[Parts, tuple[str, ...], list[str]]:
    """Return the image files of a folder by their part, and lines about the files and links that are left out."""
    every = files.folder(path, HIDDEN)
    images = [file for file in every if file.inside.suffix.lower() in ENDS]
    not_images = [file for file in every if file.inside.suffix.lower() not in ENDS]
    lines = files.describe_skipped(path, every, images)
    if not images:
        formats = f"images in folders of their classes ({', '.join(ENDS)})"
        raise errors.UserError("; ".join([f"{path} has neither {formats} nor train.npz nor IDX files", *lines]))
    at = first_level(images, 0)  # the level of the parts or, without parts, of the classes
    tops = {top: [*group] for top, group in itertools.groupby(images, lambda file: file.inside.parts[at])}
    part_of_top, parts = name_parts(path, tops, at), {}
    groups = [(part_of_top[top], group) for top, group in tops.items()] if part_of_top else [(files.TRAIN, images)]
    for part, group in sorted(groups, key=lambda pair: pair[0] != files.TRAIN):
        trained = {name for _, name in parts.get(files.TRAIN, ())}
        level = first_level(group, at + 1, trained) if part_of_top else at  # of the classes
        rows = [(file, file.inside.parts[level] if len(file.inside.parts) > level + 1 else "") for file in group]
        parts[part] = parts.get(part, []) + rows
        check_classes({name for _, name in rows}, group[0].inside.parts[:level], not_images)
    return parts, (), lines


def check_classes(names: Collection[str], above: tuple[str, ...], not_images: Sequence[files.File]) -> None:
    """Raise UserError if a folder at the level of the classes has images of unknown formats only."""
    level = len(above)
    for file in not_images:
        inside, kind = file.inside.parts, mimetypes.guess_type(file.name)[0] or ""
        in_class = inside[:level] == above and len(inside) > level + 1
        if in_class and inside[level] not in names and not kind.startswith(TEXT):
            problem = f"{file.name} cannot be read, and its class {inside[level]!r} has no other image"
            raise errors.UserError(f"{problem}: convert its files, to .png for example, or remove its folder")


def first_level(images: Sequence[files.File], at: int, classes: Collection[str] = ()) -> int:
    """Return the level of the first folders that differ, if all images are in folders below a single one."""
    names = {file.inside.parts[at] for file in images}
    single = len(names) == 1 and not names & {*classes}
    nested = single and all(file.inside.parts[at + 2 :] for file in images)
    return first_level(images, at + 1, classes) if nested else at


def part_of(name: str) -> str:
    """Return the part that the name of a folder means, such as training_set, seg_test, train2017 or "Val Images"."""
    stem = re.sub(r"(?<=[a-z])(set|data|images)\b", "", name.lower())
    return files.part_of_name(pathlib.PurePath(stem.replace(" ", "_")))


def name_parts(path: pathlib.Path, tops: dict[str, list[files.File]], at: int) -> dict[str, str]:
    """Return the part of each of these folders, {} if they are classes. A part has images in folders below only.

    A training part is recognised next to another part, or by its bare name. Raises UserError if it may be either.
    """
    below = {}  # folders in each folder
    for top, group in tops.items():
        below[top] = {file.inside.parts[at + 1] for file in group if file.inside.parts[at + 2 :]}
    flat = {top for top, group in tops.items() if min(len(file.inside.parts) for file in group) <= at + 2}
    kinds = {top: part_of(top) for top in tops}
    deep = {top: kind for top, kind in kinds.items() if kind and top not in flat}
    bare = any(kind == files.TRAIN and top.lower() in files.PARTS for top, kind in deep.items())
    if files.TRAIN in deep.values() and (len({*deep.values()}) > 1 or (bare and not flat)):
        return kinds
    alike = [top for top in deep if below[top] <= set().union(*(below[other] for other in tops if other != top))]
    split = [top for top in tops if {files.TRAIN} < {part_of(name) for name in below[top]} - {files.OTHER}]
    if bare or alike or split or all(kinds.values()):
        folders = files.join_names([path / top for top in alike or split or deep or kinds])
        remedy = "give it train/CLASS/ and test/CLASS/, or CLASS/ of other names"
        raise errors.UserError(f"{folders} may be parts or classes of {path}: {remedy}")
    return {}


def find_rows(source: str) -> tuple[Parts, tuple[str, ...], list[str]]:
    """Return the rows of a data set that have a class, the names of its classes, and lines about the other rows.

    Raises UserError without columns of images and classes, and without a training split.
    """
    parts, lines, splits = {}, [], tables.load_hub(source, stream=False)
    for split in splits:
        rows = split.open()
        columns = {type(kind).__name__: name for name, kind in reversed(rows.features.items())}  # the first of each
        if not {"Image", "ClassLabel"} <= columns.keys():
            kinds = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in rows.features.items())
            raise errors.UserError(f"{split.name} needs a column Image and one ClassLabel, and has {kinds}")
        images, names = columns["Image"], classes.read_names(splits, columns["ClassLabel"])
        packed = rows.cast_column(images, type(rows.features[images])(decode=False))
        part = files.PARTS.get(str(split.inside).lower(), files.OTHER) if len(splits) > 1 else files.TRAIN
        labelled = {b: label for b, label in enumerate(rows[columns["ClassLabel"]]) if label is not None and label >= 0}
        for b, label in labelled.items():
            inside, name = split.inside / str(b), f"{split.name}, row {b:,}"
            file = files.File(inside, name, 0, functools.partial(open_image, packed, b, images), version=split.version)
            parts.setdefault(part, []).append((file, names[label]))
        if unlabelled := len(rows) - len(labelled):
            lines.append(f"rows left out, of no class, in the split {split.inside}: {unlabelled:,}")
    if files.TRAIN not in parts:
        available = ", ".join(str(split.inside) for split in splits)
        raise errors.UserError(f"{source} needs a split called train with images of a class, and has {available}")
    return parts, names, lines


def open_image(rows: Any, number: int, column: str) -> BinaryIO:
    """Open the image file in a row of a data set. Raises ValueError if it is missing."""
    packed = rows[number][column]
    if not packed:
        raise ValueError("it has no image")
    content = packed.get("bytes")
    return open(packed["path"], "rb") if content is None else io.BufferedReader(io.BytesIO(content))


def read(images: Sequence[files.File], size: int) -> np.ndarray:
    """Return image_BYXZ (uint8) of these files: Z is 1 if all of them are grey, else 3.

    Many images are mapped from a file in the cache folder. Raises UserError for a damaged file, images of different
    sizes, or a full disk.
    """
    versions = [[file.name, file.size, file.version or os.stat(file.name).st_mtime_ns] for file in images]
    digest = hashlib.sha256(json.dumps([VERSION, size, os.getcwd(), versions]).encode()).hexdigest()
    cache = disk.cache_folder() / "images" / f"{digest[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or damaged
        return np.load(cache, mmap_mode="r", allow_pickle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damaged metadata
        like = choose_size(images, size)
        shape = (len(images), *like["image"])
        if math.prod(shape) < CACHED:
            return np.stack([*make(images, like)])
        with disk.writing(cache, disk.OTHER_CACHE):
            cache.parent.mkdir(parents=True, exist_ok=True)
            with disk.draft(cache) as new:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(new, header)
                for image_YXZ in make(images, like):
                    new.write(image_YXZ)
    return np.load(cache, mmap_mode="r", allow_pickle=False)


def choose_size(images: Sequence[files.File], size: int) -> dict[str, Any]:
    """Return the arguments of image_file.pixels that give these files one size: size x size, or their own if size = 0.

    Raises UserError if size = 0 and their sizes differ.
    """

    def look(file: files.File) -> tuple[bool, tuple[int, int]]:
        with image_file.open_image(file) as image:
            rotated = image.getexif().get(image_file.ORIENTATION) in (5, 6, 7, 8)  # by the camera: rows are columns
            sides = image.size if rotated else image.size[::-1]
            return image.mode in image_file.GREY, (size, size) if size else sides

    with concurrent.futures.ThreadPoolExecutor() as pool:
        grey, sides = zip(*pool.map(look, images), strict=True)
    Y, X = sides[0]
    for file, (rows, columns) in zip(images, sides, strict=True):
        if (rows, columns) != (Y, X):
            problem = f"{file.name} has {rows} x {columns} pixels, and {images[0].name} {Y} x {X}"
            raise errors.UserError(f"{problem}: resize all images, for example with --config.image.size=64")
    return image_file.describe_size(Y, X, 1 if all(grey) else 3)


def make(images: Sequence[files.File], like: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Yield image_YXZ of each file, made by all cores, at most CHUNK_BYTES at a time."""

    def make_one(file: files.File) -> np.ndarray:
        with image_file.open_image(file) as image:
            return image_file.pixels(file.name, image, like)[0]

    chunk = max(1, min(CHUNK, CHUNK_BYTES // math.prod(like["image"])))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for at in range(0, len(images), chunk):
            yield from pool.map(make_one, images[at : at + chunk])
