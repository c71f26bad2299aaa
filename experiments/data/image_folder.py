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
import shutil
import time
import warnings
from collections.abc import Collection, Sequence
from typing import Any, BinaryIO

import numpy as np

from experiments.data import classes, files, image_file, tables
from experiments.engine import disk, errors

ENDS = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
HIDDEN = (".", "__MACOSX")
KEPT = 2**26  # bytes of images from which on they are kept
CHUNK, CHUNK_BYTES = 1024, 2**27  # images, and bytes of them, made at a time
UNPACKED = 16  # bytes of memory for each pixel of a file that is being made an image
CACHE = 2**35  # bytes of all kept images, from which on the oldest are removed
STALE = 86400  # seconds after which nobody writes a draft any more
MADE = 2  # of another number, what is kept is made anew
EVALUATION_SHARE = 0.2
LISTED = 8  # kinds of files in a line
TEXT = ("text/", "application/")  # kinds of files that may lie beside images
Parts = dict[str, list[tuple[files.File, str]]]  # part -> its image files, each with its class


def load(source: str, size: int) -> tuple[list, list[str], tuple[str, ...], tuple[float, float], list[str]]:
    """Return both parts of the images of a folder or of a data set 'hub:NAME', what these are called, the names of the
    classes in order, what is black and white, and lines about what is left out.

    A single part is divided by the bytes of its files, so that runs at two sizes hold out the same images. Raises
    UserError for no image, an image of no class, a class or a part without images, and as `read`."""
    hub = source.startswith(tables.HUB)
    parts, names, lines = _rows(source) if hub else _files(pathlib.Path(os.path.expanduser(source)))
    used = [parts[part] for part in (files.TRAIN, files.evaluated(parts)) if part in parts]
    left = sum(map(len, parts.values())) - sum(map(len, used))
    lines += [f"images left out, in other folders or splits: {left:,}"] * bool(left)
    for file, _ in (example for part in used for example in part if not example[1]):
        raise errors.UserError(f"{file.name} lies in no folder of a class: let {source} have one for each class")
    places = [os.path.join(source, os.path.commonpath([file.inside.parent for file, _ in part])) for part in used]
    if len(used) == 1:
        contents = (b"".join(files.pieces(file, text=False, most=image_file.LARGEST_FILE)) for file, _ in used[0])
        out_B, places = files.held_out(contents, share=EVALUATION_SHARE), []
        used = [[used[0][b] for b in np.flatnonzero(out_B == side)] for side in (False, True)]
    every = [example for part in used for example in part]
    names = names or classes.ordered(name for _, name in every)
    number = {name: c for c, name in enumerate(names)}
    label_B, image_BYXZ = np.array([number[name] for _, name in every]), read([file for file, _ in every], size)
    cut = (slice(len(used[0])), slice(len(used[0]), None))
    return [(image_BYXZ[at], label_B[at]) for at in cut], places, names, (0.0, 255.0), lines


def _files(path: pathlib.Path) -> tuple[Parts, tuple[str, ...], list[str]]:
    """Return the image files of a folder by their part, and lines about the files and links that are left out."""
    every = files.folder(path, HIDDEN)
    found = [file for file in every if file.inside.suffix.lower() in ENDS]
    skipped = [file for file in every if file.inside.suffix.lower() not in ENDS]
    folders = [pathlib.Path(parent, name) for parent, some, _ in os.walk(path) for name in some]
    lines = files.skipped(path, every, found)
    if not found:
        wants = f"images in folders of their classes ({', '.join(ENDS)})"
        raise errors.UserError("; ".join([f"{path} has neither {wants} nor train.npz nor IDX files", *lines]))
    at = _level(found, 0)
    for inside in (folder.relative_to(path).parts for folder in folders if not folder.is_symlink()):
        if (
            len(inside) <= at + 1
            and _part(inside[-1])
            and all(file.inside.parts[: len(inside)] != inside for file in every)
        ):
            wrong = f"{path.joinpath(*inside)} is named as a part of the images and is empty"
            raise errors.UserError(f"{wrong}: fill or remove it")
    tops = {top: [*some] for top, some in itertools.groupby(found, lambda file: file.inside.parts[at])}
    named, parts = _named(path, tops, at), {}
    groups = [(named[top], some) for top, some in tops.items()] if named else [(files.TRAIN, found)]
    for part, some in sorted(groups, key=lambda group: group[0] != files.TRAIN):
        level = _level(some, at + 1, {name for _, name in parts.get(files.TRAIN, ())}) if named else at
        rows = [(file, file.inside.parts[level] if len(file.inside.parts) > level + 1 else "") for file in some]
        parts[part] = parts.get(part, []) + rows
        above, names = some[0].inside.parts[:level], {name for _, name in rows}
        for file in (file for file in skipped if file.inside.parts[:level] == above and file.inside.parts[level + 1 :]):
            if file.inside.parts[level] not in names and not (mimetypes.guess_type(file.name)[0] or "").startswith(
                TEXT
            ):
                wrong = f"{file.name} cannot be read, and its class {file.inside.parts[level]!r} has no other image"
                raise errors.UserError(f"{wrong}: convert its files, to .png for example, or remove its folder")
    return parts, (), lines


def _level(found: Sequence[files.File], at: int, known: Collection[str] = ()) -> int:
    """Return the level of the first folders that differ, if all images are in folders below a single one."""
    single = (
        len({file.inside.parts[at] for file in found} - {*known}) == 1 == len({file.inside.parts[at] for file in found})
    )
    return _level(found, at + 1, known) if single and all(file.inside.parts[at + 2 :] for file in found) else at


def _part(name: str) -> str:
    """Return the part that the name of a folder tells, as training_set, seg_test, train2017 and "Val Images" do."""
    return files.of_name(pathlib.PurePath(re.sub(r"(?<=[a-z])(set|data|images)\b", "", name.lower()).replace(" ", "_")))


def _named(path: pathlib.Path, tops: dict[str, list[files.File]], at: int) -> dict[str, str]:
    """Return the part of each of these folders, {} if they are classes: a part has no images but in folders below.

    A training part is recognised next to another part, or by its bare name. Raises UserError if it may be either."""
    below = {
        top: {file.inside.parts[at + 1] for file in some if file.inside.parts[at + 2 :]} for top, some in tops.items()
    }
    flat = {top for top, some in tops.items() if min(len(file.inside.parts) for file in some) <= at + 2}
    kinds = {top: _part(top) for top in tops}
    deep = {top: kind for top, kind in kinds.items() if kind and top not in flat}
    bare = any(kind == files.TRAIN and top.lower() in files.PARTS for top, kind in deep.items())
    if files.TRAIN in deep.values() and (len({*deep.values()}) > 1 or (bare and not flat)):
        return kinds
    alike = [top for top in deep if below[top] <= set().union(*(below[other] for other in tops if other != top))]
    split = [top for top in tops if {files.TRAIN} < {_part(name) for name in below[top]} - {files.OTHER}]
    if bare or alike or split or all(kinds.values()):
        names = files.listed([path / top for top in alike or split or sorted(kinds, key=kinds.get, reverse=True)])
        wrong = f"{names} may be parts of the images or classes"
        raise errors.UserError(f"{wrong}: let {path} have train/CLASS/ and test/CLASS/, or CLASS/ of other names")
    return {}


def _rows(source: str) -> tuple[Parts, tuple[str, ...], list[str]]:
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
        packed = rows.cast_column(images, type(rows.features[images])(decode=False))
        some = []
        for number, label in enumerate(rows[labels]):
            if label is not None and label >= 0:
                inside, name = pathlib.PurePath(str(split.inside), str(number)), f"{split.name}, row {number:,}"
                open_row = functools.partial(_packed, packed, number, images, name)
                some.append((files.File(inside, name, 0, open_row, version=split.version), names[label]))
        if missing := len(rows) - len(some):
            lines.append(f"rows left out, of no class, in the split {split.inside}: {missing:,}")
        part = files.PARTS.get(str(split.inside).lower(), files.OTHER) if len(splits) > 1 else files.TRAIN
        parts |= {part: parts.get(part, []) + some} if some else {}
    if files.TRAIN not in parts:
        have = ", ".join(str(split.inside) for split in splits)
        raise errors.UserError(f"{source} needs a split called train with images of a class, and has {have}")
    return parts, names, lines


def _packed(rows: Any, number: int, column: str, name: str) -> BinaryIO:
    """The image file in a row of a data set."""
    packed = rows[number][column] or {}
    if packed.get("bytes") is None and not packed.get("path"):
        raise errors.UserError(f"{name} has no image")
    return open(packed["path"], "rb") if packed.get("bytes") is None else io.BufferedReader(io.BytesIO(packed["bytes"]))


def read(found: Sequence[files.File], size: int) -> np.ndarray:
    """image_BYXZ (uint8) of these files: Z is 1 where all of them are grey, else 3. Many are mapped from the cache
    folder. UserError for a damaged one, by its name; for images that are not alike; where disk or memory are full."""
    facts = [[file.name, file.size, file.version or os.stat(file.name).st_mtime_ns] for file in found]
    digest = hashlib.sha256(json.dumps([MADE, size, os.getcwd(), facts]).encode()).hexdigest()
    kept = disk.cache_folder() / "images" / f"{digest[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # it is not there, or damaged
        image_BYXZ = np.load(kept, mmap_mode="r", allow_pickle=False)
        os.utime(kept)  # used now
        return image_BYXZ

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged metadata
        like, each = _looked(found, size)
        shape, room = (len(found), *like["image"]), disk.host_memory()
        disk.check_memory(f"the largest image of {found[0].name} and {len(found) - 1:,} more", each, room)
        chunk = max(1, min(CHUNK, CHUNK_BYTES // math.prod(like["image"])))

        def made(file: files.File) -> np.ndarray:
            with image_file.opened(file) as image:
                return image_file.pixels(file.name, image, like)[0]

        with concurrent.futures.ThreadPoolExecutor(max(1, min((os.cpu_count() or 1) + 4, room // 2 // each))) as pool:
            images = (image for at in range(0, len(found), chunk) for image in pool.map(made, found[at : at + chunk]))
            if math.prod(shape) < KEPT:
                return np.stack([*images])
            with disk.writing(kept, disk.OTHER_CACHE):
                kept.parent.mkdir(parents=True, exist_ok=True)
                _make_room(kept.parent, math.prod(shape))
                with disk.draft(kept) as new:
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(new, header)
                    for image_YXZ in images:
                        new.write(image_YXZ)
        return np.load(kept, mmap_mode="r", allow_pickle=False)


def _looked(found: Sequence[files.File], size: int) -> tuple[dict[str, Any], int]:
    """Return what image_file.pixels needs to know to make these files alike, and the bytes that the largest takes."""

    def look(file: files.File) -> tuple[bool, tuple[int, int], int]:
        with image_file.opened(file) as image:
            sides = (size, size) if size else image_file.upright(image)
            return image.mode in image_file.GREY, sides, image.width * image.height

    with concurrent.futures.ThreadPoolExecutor() as pool:
        grey, sides, pixels = zip(*pool.map(look, found), strict=True)
    Y, X = sides[0]
    for file, other in zip(found, sides, strict=True):
        if other != (Y, X):
            wrong = f"{file.name} has {other[0]} x {other[1]} pixels, and {found[0].name} {Y} x {X}"
            raise errors.UserError(f"{wrong}: --config.image.size=64, say, makes all of them 64 x 64")
    return image_file.own(Y, X, 1 if all(grey) else 3), UNPACKED * max(pixels)


def _make_room(folder: pathlib.Path, needed: int) -> None:
    """Remove drafts that nobody writes any more, and if all would be more than CACHE bytes, what was used longest ago.

    Raises UserError if the disk has less than `needed` bytes left."""
    with contextlib.suppress(FileNotFoundError):  # another process does the same
        entries = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir())
        total = needed + sum(n for _, n, _ in entries)
        for used, n, file in entries:
            if time.time() - used > STALE if file.name.endswith(disk.DRAFT) else total > CACHE:
                file.unlink()
                total -= n
                print(f"{file} is removed: no kept images are unused for longer", flush=True)
    if needed > (free := shutil.disk_usage(folder).free):
        there = f"{disk.size(free)} are free there: set image.size (--config.image.size=224, say)"
        raise errors.UserError(f"the images need {disk.size(needed)} in {folder}, and {there}{disk.OTHER_CACHE}")
