"""Image files in folders of their classes, and the images of data sets: made alike, and read once by all cores.

DIR/class/*.jpg, or the same in DIR/train, DIR/valid and DIR/test. Each is squashed to `size` x `size` pixels, so that
all of it stays in sight, or taken as it is (0). Many are kept in the cache folder, in a file that is mapped to memory.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from experiments.data import files, image_file, tables
from experiments.engine import disk, errors

ENDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
HIDDEN = (".", "__MACOSX")
KEPT = 2**26  # bytes of images from which on they are kept
CHUNK = 1024  # images at a time
MADE = 1  # of another number, what is kept is made anew
Parts = list[tuple[np.ndarray, np.ndarray]]  # image_BYXZ and label_B of those to train on and those to evaluate


def load(source: str, size: int) -> tuple[Parts, list[str], tuple[str, ...], tuple[float, float]]:
    """The images of a folder, or of a data set 'hub:NAME', in one part or in two, what is called so, the names of the
    classes, in order, and what is black and white. UserError for no image, one of no class, and as `read`."""
    of_data_set = source.startswith(tables.HUB)
    path = pathlib.Path(os.path.expanduser(source))
    found = _rows(source) if of_data_set else files.folder(path, HIDDEN)
    found = [file for file in found if of_data_set or file.inside.suffix.lower() in ENDS]
    if not found:
        kinds = f"images in folders of their classes ({', '.join(ENDS)})"
        raise errors.UserError(f"{source} has neither {kinds} nor train.npz nor IDX files")
    parts: dict[str, list[files.File]] = {files.TRAIN: found}
    tops = {name: files.PARTS.get(name.lower(), files.OTHER) for name in {file.inside.parts[0] for file in found}}
    if named := files.TRAIN in tops.values():
        parts = {part: [file for file in found if tops[file.inside.parts[0]] == part] for part in tops.values()}
    used = {part: parts[part] for part in (files.TRAIN, files.evaluated(parts)) if part in parts}
    every, split = [file for part in used.values() for file in part], len(used[files.TRAIN])
    for file in (file for file in every if len(file.inside.parts) < 2 + named):
        raise errors.UserError(f"{file.name} lies in no folder of a class: let {source} have one for each class")
    classes, label_B = np.unique([file.inside.parts[named] for file in every], return_inverse=True)
    image_BYXZ = read(every, size)
    cut = [slice(None, split), slice(split, None)][: len(used)]
    places = [os.path.join(source, part[0].inside.parts[0]) for part in used.values()] if len(used) == 2 else []
    return [(image_BYXZ[part], label_B[part]) for part in cut], places, tuple(classes.tolist()), (0.0, 255.0)


def _rows(source: str) -> list[files.File]:
    """The rows of a data set that have a class, as files SPLIT/CLASS/NUMBER. UserError where it has no such columns."""
    found, splits = [], tables.hub(source, stream=False)
    for split in splits:
        rows = split.open()
        columns = {type(kind).__name__: name for name, kind in reversed(rows.features.items())}  # the first of each
        if not {"Image", "ClassLabel"} <= columns.keys():
            has = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in rows.features.items())
            raise errors.UserError(f"{split.name} needs a column Image and one ClassLabel, and has {has}")
        images, labels = columns["Image"], columns["ClassLabel"]
        part = split.inside if len(splits) > 1 else files.TRAIN
        names = [name.replace("/", "_") for name in rows.features[labels].names]
        packed = rows.cast_column(images, type(rows.features[images])(decode=False))
        for number, label in enumerate(rows[labels]):
            if label is not None and label >= 0:
                inside, name = pathlib.PurePath(part, names[label], str(number)), f"{split.name}, row {number:,}"
                open_row = functools.partial(_packed, packed, number, images, name)
                found.append(files.File(inside, name, 0, open_row, version=split.version))
    return found


def _packed(rows: Any, number: int, column: str, name: str) -> BinaryIO:
    """The image file in a row of a data set."""
    packed = rows[number][column] or {}
    if packed.get("bytes") is None and not packed.get("path"):
        raise errors.UserError(f"{name} has no image")
    return disk.opened(packed["path"]) if packed.get("bytes") is None else io.BytesIO(packed["bytes"])


def read(found: Sequence[files.File], size: int) -> np.ndarray:
    """image_BYXZ (uint8) of these files: Z is 1 where all of them are grey, else 3. Many are mapped from the cache
    folder. UserError for a damaged one, by its name; for images that are not alike; where the disk is full."""
    facts = [[file.name, file.size, file.version or os.stat(file.name).st_mtime_ns] for file in found]
    digest = hashlib.sha256(json.dumps([MADE, size, os.getcwd(), facts]).encode()).hexdigest()
    kept = disk.cache_folder() / "images" / f"{digest[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # it is not there, or damaged
        return np.load(kept, mmap_mode="r", allow_pickle=False)

    def look(file: files.File) -> tuple[bool, tuple[int, int]]:
        with image_file.opened(file) as image:
            return image.mode in image_file.GREY, (size, size) if size else image_file.upright(image)

    def made(file: files.File) -> np.ndarray:
        with image_file.opened(file) as image:
            return image_file.pixels(file.name, image, like)[0]

    with warnings.catch_warnings(), concurrent.futures.ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore")  # of damaged metadata
        seen = list(pool.map(look, found))
        Y, X = seen[0][1]
        for file, (_, sides) in zip(found, seen, strict=True):
            if sides != (Y, X):
                wrong = f"{file.name} has {sides[0]} x {sides[1]} pixels, and {found[0].name} {Y} x {X}"
                raise errors.UserError(f"{wrong}: --config.image.size=64, say, makes all of them 64 x 64")
        like = image_file.own(Y, X, 1 if all(grey for grey, _ in seen) else 3)
        shape = (len(found), *like["image"])
        parts = [found[at : at + CHUNK] for at in range(0, len(found), CHUNK)]
        chunks = (np.stack([*pool.map(made, part)]) for part in parts)
        if math.prod(shape) < KEPT:
            return np.concatenate([*chunks])
        with disk.writing(kept, disk.OTHER_CACHE):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with disk.draft(kept) as new:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(new, header)
                for image_BYXZ in chunks:
                    new.write(image_BYXZ)
        return np.load(kept, mmap_mode="r", allow_pickle=False)
