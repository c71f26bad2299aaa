"""Image files in folders of their classes, and the images of data sets: made alike, and read once by all cores.

DIR/class/*.jpg, or the same in DIR/train, DIR/valid and DIR/test. Each image is squashed to `size` x `size` pixels, so
that all of it stays in sight, or taken as it is (0). Where these are many, they are kept in the cache folder, in a file
that is mapped into memory.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.data import files, image_file
from experiments.engine import disk, errors

ENDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
HIDDEN = (".", "__MACOSX")
KEPT = 2**26  # bytes of images from which on they are kept
MADE = 1  # of another number, what is kept is made anew
Parts = list[tuple[np.ndarray, np.ndarray]]  # image_BYXZ and label_B of those to train on and those to evaluate


def load(path: pathlib.Path, size: int) -> tuple[Parts, list[pathlib.Path], tuple[str, ...], tuple[float, float]]:
    """The images of a folder, in one part or in two, the folders of the parts, the names of the classes, in order, and
    what is black and white. UserError for no image, one in no folder of a class, and as `read`."""
    found = [file for file in files.folder(path, HIDDEN) if file.inside.suffix.lower() in ENDS]
    parts: dict[str, list[files.File]] = {files.TRAIN: found}
    tops = {name: files.PARTS.get(name.lower(), files.OTHER) for name in {file.inside.parts[0] for file in found}}
    if named := files.TRAIN in tops.values():
        parts = {part: [file for file in found if tops[file.inside.parts[0]] == part] for part in tops.values()}
    if not found:
        kinds = f"images in folders of their classes ({', '.join(ENDS)})"
        raise errors.UserError(f"the folder {path} has neither {kinds} nor train.npz nor IDX files")
    used = {part: parts[part] for part in (files.TRAIN, files.evaluated(parts)) if part in parts}
    for file in (file for part in used.values() for file in part if len(file.inside.parts) < 2 + named):
        raise errors.UserError(f"{file.name} lies in no folder of a class: let {path} have one for each class")
    every, split = [file for part in used.values() for file in part], len(used[files.TRAIN])
    classes, label_B = np.unique([file.inside.parts[named] for file in every], return_inverse=True)
    image_BYXZ = _kept(path, every, size)
    cut = [slice(None, split), slice(split, None)][: len(used)]
    places = [path / part[0].inside.parts[0] for part in used.values()] if len(used) == 2 else []
    return [(image_BYXZ[part], label_B[part]) for part in cut], places, tuple(classes.tolist()), (0.0, 255.0)


def _kept(path: pathlib.Path, found: Sequence[files.File], size: int) -> np.ndarray:
    """The images of these files as `read` gives them, from the cache folder where they are kept there."""
    facts = [[str(file.inside), file.size, os.stat(file.name).st_mtime_ns] for file in found]
    digest = hashlib.sha256(json.dumps([MADE, size, str(path.absolute()), facts]).encode()).hexdigest()
    file = disk.cache_folder() / "images" / f"{digest[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # it is not there, or damaged
        return np.load(file, mmap_mode="r", allow_pickle=False)
    return read(found, size, file)


def read(found: Sequence[files.File], size: int, kept: pathlib.Path | None = None) -> np.ndarray:
    """image_BYXZ (uint8) of these files: Z is 1 where all of them are grey, else 3. Read again from `kept`, if they are
    many. UserError that names the first of the damaged ones; for images that are not alike; for too much memory."""

    def each(do: Callable[[int], Any]) -> list[Any]:
        futures = [pool.submit(do, b) for b in range(len(found))]
        wrong = [error for future in futures if (error := future.exception()) is not None]
        for error in wrong[:1]:
            more = f" ({len(wrong) - 1:,} more such)" * (len(wrong) > 1)
            raise errors.UserError(f"{error}{more}") if isinstance(error, errors.UserError) else error
        return [future.result() for future in futures]

    def look(b: int) -> tuple[bool, tuple[int, int]]:
        with image_file.opened(found[b]) as image:
            return image.mode in image_file.GREY, (size, size) if size else image_file.upright(image)

    def fill(image_BYXZ: np.ndarray) -> None:
        def one(b: int) -> None:
            with image_file.opened(found[b]) as image:
                image_BYXZ[b] = image_file.pixels(found[b].name, image, like)[0]

        each(one)

    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged metadata
        pool = concurrent.futures.ThreadPoolExecutor()
        stack.callback(pool.shutdown, cancel_futures=True)
        seen = each(look)
        Y, X = seen[0][1]
        for file, (_, sides) in zip(found, seen, strict=True):
            if sides != (Y, X):
                wrong = f"{file.name} has {sides[0]} x {sides[1]} pixels, and {found[0].name} {Y} x {X}"
                raise errors.UserError(f"{wrong}: --config.image.size=64, say, makes all of them 64 x 64")
        shape = (len(found), Y, X, 1 if all(grey for grey, _ in seen) else 3)
        like = image_file.own(*shape[1:])
        n = int(np.prod(shape))
        if kept is None or n < KEPT or not _room(kept.parent, n):
            disk.check_memory(f"{len(found):,} images of {Y} x {X} pixels", n)
            fill(image_BYXZ := np.empty(shape, np.uint8))
            return image_BYXZ
        with disk.draft(kept) as new:
            image_BYXZ = np.lib.format.open_memmap(new.name, mode="w+", dtype=np.uint8, shape=shape)
            fill(image_BYXZ)
            image_BYXZ.flush()
        return np.load(kept, mmap_mode="r", allow_pickle=False)


def _room(folder: pathlib.Path, n: int) -> bool:
    """Whether the folder can be written and has room for so many bytes: a full disk ends a process that has mapped a
    file of it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > n + KEPT
    return False
