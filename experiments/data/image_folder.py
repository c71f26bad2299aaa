"""Image files in folders of their classes, and the images of data sets: made alike, and read once by all cores.

DIR/class/*.jpg, or the same in DIR/train, DIR/valid and DIR/test. Each is squashed to `size` x `size` pixels, so that
all of it stays in sight, or taken as it is (0). Many are kept in the cache folder, in a file that is mapped to memory.
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
from typing import Any, BinaryIO

import numpy as np

from experiments.data import classes, files, image_file, tables
from experiments.engine import disk, errors

ENDS = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
HIDDEN = (".", "__MACOSX")
KEPT = 2**26  # bytes of images from which on they are kept
CHUNK, CHUNK_BYTES = 1024, 2**27  # images, and bytes of them, made at a time
MADE = 2  # version of the files in the cache
EVALUATION_SHARE = 0.2
TEXT = ("text/", "application/")  # kinds of files that may lie next to images
Parts = dict[str, list[tuple[files.File, str]]]  # part -> its image files, each with its class


def load(source: str, size: int) -> tuple[list, list[str], tuple[str, ...], tuple[float, float], list[str]]:
    """Return both parts of the images of a folder or of a data set 'hub:NAME', their places, the names of the classes
    in order, the values of black and white, and lines about what is left out.

    A single part is divided by the bytes of its files, so that runs at two sizes hold out the same images. Raises
    UserError for no image, an image of no class, a class or a part without images, and as `read`."""
    hub = source.startswith(tables.HUB)
    parts, names, lines = find_rows(source) if hub else find_files(pathlib.Path(os.path.expanduser(source)))
    used = [parts[part] for part in (files.TRAIN, files.evaluated(parts)) if part in parts]
    left = sum(map(len, parts.values())) - sum(map(len, used))
    lines += [f"images left out, in other folders or splits: {left:,}"] * bool(left)
    for file, _ in (example for part in used for example in part if not example[1]):
        raise errors.UserError(f"{file.name} lies in no folder of a class: let {source} have one for each class")
    places = [os.path.join(source, os.path.commonpath([file.inside.parent for file, _ in part])) for part in used]
    if len(used) == 1:
        contents = (files.read(file, text=False) for file, _ in used[0])
        out_B, places = files.held_out(contents, share=EVALUATION_SHARE), []
        used = [[used[0][b] for b in np.flatnonzero(out_B == side)] for side in (False, True)]
    every = [example for part in used for example in part]
    names = names or classes.ordered(name for _, name in every)
    number = {name: c for c, name in enumerate(names)}
    label_B, image_BYXZ = np.array([number[name] for _, name in every]), read([file for file, _ in every], size)
    cut = (slice(len(used[0])), slice(len(used[0]), None))
    return [(image_BYXZ[at], label_B[at]) for at in cut], places, names, (0.0, 255.0), lines


def find_files(path: pathlib.Path) -> tuple[Parts, tuple[str, ...], list[str]]:
    """Return the image files of a folder by their part, and lines about the files and links that are left out."""
    every = files.folder(path, HIDDEN)
    found = [file for file in every if file.inside.suffix.lower() in ENDS]
    others = [file for file in every if file.inside.suffix.lower() not in ENDS]
    lines = files.skipped(path, every, found)
    if not found:
        wants = f"images in folders of their classes ({', '.join(ENDS)})"
        raise errors.UserError("; ".join([f"{path} has neither {wants} nor train.npz nor IDX files", *lines]))
    at = first_level(found, 0)
    check_empty(path, at, every)
    tops = {top: [*some] for top, some in itertools.groupby(found, lambda file: file.inside.parts[at])}
    named, parts = name_parts(path, tops, at), {}
    groups = [(named[top], some) for top, some in tops.items()] if named else [(files.TRAIN, found)]
    for part, some in sorted(groups, key=lambda group: group[0] != files.TRAIN):
        trained = {name for _, name in parts.get(files.TRAIN, ())}
        level = first_level(some, at + 1, trained) if named else at
        rows = [(file, file.inside.parts[level] if len(file.inside.parts) > level + 1 else "") for file in some]
        parts[part] = parts.get(part, []) + rows
        check_classes({name for _, name in rows}, some[0].inside.parts[:level], others)
    return parts, (), lines


def check_empty(path: pathlib.Path, at: int, every: Sequence[files.File]) -> None:
    """Raise UserError if a folder is named as a part and is empty."""
    for parent, names, _ in os.walk(path):
        for folder in (pathlib.Path(parent, name) for name in names if part_of(name)):
            inside = folder.relative_to(path).parts
            filled = any(file.inside.parts[: len(inside)] == inside for file in every)
            if len(inside) <= at + 1 and not filled and not folder.is_symlink():
                raise errors.UserError(f"{folder} is named as a part of the images and is empty: fill or remove it")


def check_classes(names: Collection[str], above: tuple[str, ...], others: Sequence[files.File]) -> None:
    """Raise UserError if a folder at the level of the classes has images of unknown kinds only."""
    level = len(above)
    for file in (file for file in others if file.inside.parts[:level] == above and file.inside.parts[level + 1 :]):
        name, kind = file.inside.parts[level], mimetypes.guess_type(file.name)[0] or ""
        if name not in names and not kind.startswith(TEXT):
            wrong = f"{file.name} cannot be read, and its class {name!r} has no other image"
            raise errors.UserError(f"{wrong}: convert its files, to .png for example, or remove its folder")


def first_level(found: Sequence[files.File], at: int, known: Collection[str] = ()) -> int:
    """Return the level of the first folders that differ, if all images are in folders below a single one."""
    names = {file.inside.parts[at] for file in found}
    single = len(names) == 1 and not names & {*known}
    return first_level(found, at + 1, known) if single and all(file.inside.parts[at + 2 :] for file in found) else at


def part_of(name: str) -> str:
    """Return the part that the name of a folder tells, as training_set, seg_test, train2017 and "Val Images" do."""
    return files.of_name(pathlib.PurePath(re.sub(r"(?<=[a-z])(set|data|images)\b", "", name.lower()).replace(" ", "_")))


def name_parts(path: pathlib.Path, tops: dict[str, list[files.File]], at: int) -> dict[str, str]:
    """Return the part of each of these folders, {} if they are classes: a part has images in folders below only.

    A training part is recognised next to another part, or by its bare name. Raises UserError if it may be either."""
    below = {
        top: {file.inside.parts[at + 1] for file in some if file.inside.parts[at + 2 :]} for top, some in tops.items()
    }
    flat = {top for top, some in tops.items() if min(len(file.inside.parts) for file in some) <= at + 2}
    kinds = {top: part_of(top) for top in tops}
    deep = {top: kind for top, kind in kinds.items() if kind and top not in flat}
    bare = any(kind == files.TRAIN and top.lower() in files.PARTS for top, kind in deep.items())
    if files.TRAIN in deep.values() and (len({*deep.values()}) > 1 or (bare and not flat)):
        return kinds
    alike = [top for top in deep if below[top] <= set().union(*(below[other] for other in tops if other != top))]
    split = [top for top in tops if {files.TRAIN} < {part_of(name) for name in below[top]} - {files.OTHER}]
    if bare or alike or split or all(kinds.values()):
        wrong = f"{files.listed([path / top for top in alike or split or deep or kinds])} may be parts or classes"
        raise errors.UserError(f"{wrong}: let {path} have train/CLASS/ and test/CLASS/, or CLASS/ of other names")
    return {}


def find_rows(source: str) -> tuple[Parts, tuple[str, ...], list[str]]:
    """Return the rows of a data set that have a class, the names of the classes in their order, and lines about the
    others. Raises UserError if it has no such columns, or no training split."""
    parts, lines, splits = {}, [], tables.hub(source, stream=False)
    for split in splits:
        rows = split.open()
        columns = {type(kind).__name__: name for name, kind in reversed(rows.features.items())}  # the first of each
        if not {"Image", "ClassLabel"} <= columns.keys():
            has = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in rows.features.items())
            raise errors.UserError(f"{split.name} needs a column Image and one ClassLabel, and has {has}")
        images, labels = columns["Image"], columns["ClassLabel"]
        names = classes.declared(splits, labels)
        packed, found = rows.cast_column(images, type(rows.features[images])(decode=False)), []
        for number, label in enumerate(rows[labels]):
            if label is not None and label >= 0:
                inside, name = pathlib.PurePath(str(split.inside), str(number)), f"{split.name}, row {number:,}"
                open_row = functools.partial(open_image, packed, number, images)
                found.append((files.File(inside, name, 0, open_row, version=split.version), names[label]))
        if missing := len(rows) - len(found):
            lines.append(f"rows left out, of no class, in the split {split.inside}: {missing:,}")
        part = files.PARTS.get(str(split.inside).lower(), files.OTHER) if len(splits) > 1 else files.TRAIN
        parts |= {part: parts.get(part, []) + found} if found else {}
    if files.TRAIN not in parts:
        have = ", ".join(str(split.inside) for split in splits)
        raise errors.UserError(f"{source} needs a split called train with images of a class, and has {have}")
    return parts, names, lines


def open_image(rows: Any, number: int, column: str) -> BinaryIO:
    """Open the image file in a row of a data set. Raises ValueError if there is none."""
    packed = rows[number][column]
    if not packed:
        raise ValueError("it has no image")
    inside = packed.get("bytes")
    return open(packed["path"], "rb") if inside is None else io.BufferedReader(io.BytesIO(inside))


def read(found: Sequence[files.File], size: int) -> np.ndarray:
    """Return image_BYXZ (uint8) of these files: Z is 1 if all of them are grey, else 3. Many are mapped from the cache
    folder. Raises UserError for a damaged file, images that are not alike, or a full disk."""
    facts = [[file.name, file.size, file.version or os.stat(file.name).st_mtime_ns] for file in found]
    digest = hashlib.sha256(json.dumps([MADE, size, os.getcwd(), facts]).encode()).hexdigest()
    kept = disk.cache_folder() / "images" / f"{digest[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # it is not there, or damaged
        return np.load(kept, mmap_mode="r", allow_pickle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damaged metadata
        like = look(found, size)
        shape = (len(found), *like["image"])
        if math.prod(shape) < KEPT:
            return np.stack([*make(found, like)])
        with disk.writing(kept, disk.OTHER_CACHE):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with disk.draft(kept) as new:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(new, header)
                for image_YXZ in make(found, like):
                    new.write(image_YXZ)
    return np.load(kept, mmap_mode="r", allow_pickle=False)


def look(found: Sequence[files.File], size: int) -> dict[str, Any]:
    """Return what image_file.pixels needs to make these files alike. Raises UserError if their sizes differ."""

    def look_at(file: files.File) -> tuple[bool, tuple[int, int]]:
        with image_file.opened(file) as image:
            return image.mode in image_file.GREY, (size, size) if size else image_file.upright(image)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        grey, sides = zip(*pool.map(look_at, found), strict=True)
    Y, X = sides[0]
    for file, other in zip(found, sides, strict=True):
        if other != (Y, X):
            wrong = f"{file.name} has {other[0]} x {other[1]} pixels, and {found[0].name} {Y} x {X}"
            raise errors.UserError(f"{wrong}: --config.image.size=64, say, makes all of them 64 x 64")
    return image_file.own(Y, X, 1 if all(grey) else 3)


def make(found: Sequence[files.File], like: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Yield image_YXZ of each file, made by all cores, CHUNK_BYTES or fewer at a time."""

    def make_one(file: files.File) -> np.ndarray:
        with image_file.opened(file) as image:
            return image_file.pixels(file.name, image, like)[0]

    chunk = max(1, min(CHUNK, CHUNK_BYTES // math.prod(like["image"])))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for at in range(0, len(found), chunk):
            yield from pool.map(make_one, found[at : at + chunk])
