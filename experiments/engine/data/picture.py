"""One image from a file, made like the images that a model was trained on."""

import math
import pathlib
import struct
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.engine import errors, json_file
from experiments.engine.data import images

LARGEST = 2**26  # pixels of a file, looked at before they are unpacked
LARGEST_FILE = 2**28  # bytes; as many pixels, packed by nobody
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")  # plain pixels: no format that runs a program
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # of the channels Z, as Pillow calls them
COLOURS = {"L": "grey", "LA": "grey and opacity", "RGB": "colour", "RGBA": "colour and opacity"}


def describe(data: images.Images) -> dict[str, Any]:
    """What must be known about images to make another one like them, and the names of their classes; for JSON."""
    image_BYXZ = data.train_image_BYXZ
    mean_Z, std_Z = images.statistics(image_BYXZ)
    return {
        "image": list(image_BYXZ.shape[1:]),
        "values": [float(image_BYXZ.min()), float(image_BYXZ.max())],
        "mean": mean_Z.tolist(),
        "std": std_Z.tolist(),
        "classes": list(data.classes),
    }


def expected(path: pathlib.Path, extras: Mapping[str, Any], *, Z: int, C: int) -> dict[str, Any]:
    """What `describe` says about the images of a trained model: of a run's folder, or of a published ViT (`extras`).

    Z, C: the channels and classes of the model. Raises UserError where the file that says it is absent or damaged.
    """
    if "image" not in extras:
        file = path / "data.json"
        saved = json_file.read(file, says="what the model's images are like")
        if saved.keys() != {"image", "values", "mean", "std", "classes"}:
            raise errors.UserError(f"{file} is damaged: it does not describe images")
        return _whole(file, saved, Z, C, {name: name for name in saved})
    file = (path if path.is_dir() else path.parent) / "preprocessor_config.json"
    # What it does not say is as the ViTs of transformers have it.
    saved = json_file.read(file, says="how images are normalised") if file.exists() else {}
    factor = saved.get("rescale_factor", 1 / 255) if saved.get("do_rescale", True) else 1
    _check(file, "rescale_factor", _number(factor) and factor > 0, "a number above 0", factor)
    mean, std = (0.5, 0.5) if saved.get("do_normalize", True) else (0, 1)
    found = {
        "image": [*extras["image"], Z],
        "values": [0, 255 * factor],
        "mean": saved.get("image_mean", [mean] * Z),
        "std": saved.get("image_std", [std] * Z),
        "classes": extras["class_names"],
    }
    return _whole(file, found, Z, C, {name: name for name in found} | {"mean": "image_mean", "std": "image_std"})


def _whole(file: pathlib.Path, found: dict[str, Any], Z: int, C: int, called: Mapping[str, str]) -> dict[str, Any]:
    """What was found, if each of its entries can be used; `called` has their names in the file. A number for all
    channels is made one for each."""
    image, values, classes = found["image"], found["values"], found["classes"]
    sides = isinstance(image, list) and len(image) == 3 and all(type(side) is int and side > 0 for side in image)
    _check(file, called["image"], sides and image[2] == Z, f"rows, columns and the model's {Z} channels", image)
    _check(file, called["values"], _numbers(values, (2,)), "two finite numbers", values)
    for name in ("mean", "std"):
        right = _numbers(found[name], (1, Z)) and (name == "mean" or min(found[name]) > 0)
        _check(file, called[name], right, f"1 or {Z} finite numbers{' above 0' * (name == 'std')}", found[name])
    named = isinstance(classes, list) and len(classes) == C and all(isinstance(one, str) for one in classes)
    _check(file, called["classes"], named, f"the names of the model's {C} classes", classes)
    return found | {name: found[name] * (Z // len(found[name])) for name in ("mean", "std")}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(value: Any, lengths: tuple[int, ...]) -> bool:
    return isinstance(value, list) and len(value) in lengths and all(map(_number, value))


def _check(file: pathlib.Path, name: str, right: bool, what: str, value: Any) -> None:
    if not right:
        raise errors.UserError(f"{file}: {name} must be {what}, and {str(value)[:60]} is not")


def read(path: pathlib.Path, like: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """The file's image as image_1YXZ, normalised like the images that `like` describes; and what was done to it.

    Black and white become the least and the greatest of their values, rows and columns are resized to theirs.

    Raises:
      UserError: no such file; no image, or a damaged one; one of too many pixels, or of more than 8 bits a value.
    """
    from PIL import Image, ImageOps  # comes with matplotlib; only here, where it is needed

    Y, X, Z = like["image"]
    if Z not in MODES:
        raise errors.UserError(f"the model reads images of {Z} channels, and no image file has them")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise errors.UserError(f"{path} has {path.stat().st_size:,} bytes, and at most {LARGEST_FILE:,} are read")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is looked at here
            warnings.simplefilter("ignore", UserWarning)  # what it says of damaged metadata is of no use here
            with Image.open(path, formats=FORMATS) as file:
                was = f"{file.height} x {file.width} pixels, {COLOURS.get(file.mode, 'mode ' + file.mode)}"
                _refuse(path, file.size, file.mode)
                image = ImageOps.exif_transpose(file).convert(MODES[Z]).resize((X, Y), Image.Resampling.BILINEAR)
    except FileNotFoundError:
        raise errors.UserError(f"there is no image file {path}") from None
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise errors.UserError(f"{path} is no image that can be read here ({', '.join(FORMATS)}): {error}") from error
    low, high = like["values"]
    image_1YXZ = low + (high - low) / 255 * np.asarray(image, np.float32).reshape(1, Y, X, Z)
    told = f"{path}: {was}, made {Y} x {X}, {COLOURS[MODES[Z]]}, black {low:g} and white {high:g}"
    return (image_1YXZ - np.float32(like["mean"])) / np.float32(like["std"]), told + " as the model's own images"


def _refuse(path: pathlib.Path, size: tuple[int, int], mode: str) -> None:
    if size[0] * size[1] > LARGEST:
        raise errors.UserError(f"{path} has {size[0] * size[1]:,} pixels, and at most {LARGEST:,} are read")
    if mode.startswith(("I", "F")):
        raise errors.UserError(f"{path} has more than 8 bits a value (mode {mode}): save it with 8")
