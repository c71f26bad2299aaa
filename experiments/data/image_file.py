"""One image from a file, made like the images that a model was trained on."""

import contextlib
import pathlib
import struct
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments.data import files
from experiments.engine import disk, errors

LARGEST = 2**26  # pixels of a file, looked at before they are unpacked
LARGEST_FILE = 2**28  # bytes; as many pixels, packed by nobody
LARGEST_VALUE = 1e30  # a float32, and so is what is made of it
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")  # plain pixels: no format that runs a program
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # of the channels Z, as Pillow calls them
# The image processors of transformers that a ViT may have, in their words: what each does where its file says nothing.
VIT = {
    "do_resize": True,
    "size": None,  # theirs has 224; here it is the side of the model, and of another one theirs is no use
    "default_to_square": True,  # a `size` of one number: both sides, or the shorter one
    "resample": 2,  # bilinear, in Pillow's numbers
    "do_center_crop": False,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": 0.5,
    "image_std": 0.5,
    "do_convert_rgb": False,
}
NAME = "ViTImageProcessor"  # where nothing is said
PROCESSORS = {
    NAME: VIT,
    "DeiTImageProcessor": VIT | {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224},
    "BeitImageProcessor": VIT | {"resample": 3, "crop_size": 224},
}
HARMLESS = {  # what else stands in their files: nothing of it changes a pixel of one image
    *("image_processor_type", "feature_extractor_type", "processor_class", "model_input_names", "image_seq_length"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping", "pad_size"),
    *("do_reduce_labels", "reduce_labels", "_valid_processor_keys"),
}
SLACK = 0.05  # of the range of values that training images had: how far others may lie outside
PLAIN = {"mean": 0, "std": 1}  # of images that are not normalised
GREY = ("1", "L", "LA")  # modes
ORIENTATION = 0x0112  # in the metadata of a camera
COLOURS = {"L": "grey", "LA": "grey and opacity", "RGB": "colour", "RGBA": "colour and opacity"}


def expected(path: pathlib.Path, extras: Mapping[str, Any], *, Z: int, C: int) -> dict[str, Any]:
    """What `images.describe` says about the images of a trained model of Z channels and C classes: of a run's folder,
    or of a published ViT (`extras`). And `processor`: how a file becomes such an image, in the words of transformers;
    `assumed`: whether nobody says it. UserError where that is absent, damaged, or not done here."""
    if "image" not in extras:
        file, prefix, assumed = path / "data.json", "", False
        facts = disk.read_json(file, says="what the model's images are like")
        if facts.keys() != {"image", "values", "mean", "std", "classes"}:
            raise errors.UserError(f"{file} is damaged: it does not describe images")
    else:
        folder, prefix = path if path.is_dir() else path.parent, "image_"
        file, newest = folder / "preprocessor_config.json", folder / "processor_config.json"
        file = newest if newest.exists() and not file.exists() else file
        assumed = not file.exists()
        saved = {} if assumed else disk.read_json(file, says="how images are normalised")
        saved = saved.get("image_processor", {}) if file == newest else saved
        _check(file, "image_processor", isinstance(saved, dict), "an object", saved)
        fields = _fields(file, saved)
        factor = fields["rescale_factor"] if fields["do_rescale"] else 1
        _check(file, "rescale_factor", _numbers([factor], (1,)) and factor > 0, "a number above 0", factor)
        usual = {"mean": fields["image_mean"], "std": fields["image_std"]} if fields["do_normalize"] else PLAIN
        facts = {name: [value] * Z if _numbers([value], (1,)) else value for name, value in usual.items()}
        facts |= {"image": [*extras["image"], Z], "values": [0, 255 * factor], "classes": extras["class_names"]}
    image, classes = facts["image"], facts["classes"]
    sides = isinstance(image, list) and len(image) == 3 and all(type(side) is int and side > 0 for side in image)
    _check(file, "image", sides and image[2] == Z, f"rows, columns and the model's {Z} channels", image)
    _check(file, "values", _numbers(facts["values"], (2,)), "two finite numbers", facts["values"])
    for name in ("mean", "std"):
        right = _numbers(facts[name], (1, Z)) and (name == "mean" or min(facts[name]) > 0)
        _check(file, prefix + name, right, f"1 or {Z} finite numbers{' above 0' * (name == 'std')}", facts[name])
        facts[name] = facts[name] * (Z // len(facts[name]))
    named = isinstance(classes, list) and len(classes) == C and all(isinstance(one, str) for one in classes)
    _check(file, "classes", named, f"the names of the model's {C} classes", classes)
    made = {"processor": _processor(file, fields, *image)} if "image" in extras else own(*image)
    return facts | made | {"assumed": assumed}


def _fields(file: pathlib.Path, saved: dict[str, Any]) -> dict[str, Any]:
    """What the file says, and what its image processor does beyond that."""
    kind = str(saved.get("image_processor_type") or saved.get("feature_extractor_type") or NAME)
    kind = kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")  # as it was called before
    _check(file, "image_processor_type", kind in PROCESSORS, f"one of {', '.join(PROCESSORS)}", kind)
    for name in sorted(saved.keys() - VIT.keys() - HARMLESS):
        off = saved[name] is None or saved[name] is False
        _check(file, name[:60], off, "absent or false, since it is not known here", saved[name])
    fields = PROCESSORS[kind] | saved
    for name in (name for name, usual in VIT.items() if isinstance(usual, bool)):
        fields[name] = False if fields[name] is None else fields[name]  # as to them
        _check(file, name, isinstance(fields[name], bool), "true or false", fields[name])
    return fields | {"image_processor_type": kind}


def _processor(file: pathlib.Path, fields: dict[str, Any], Y: int, X: int, Z: int) -> dict[str, Any]:
    """Of the fields those that say how an image gets its rows, columns and channels, in one form each."""
    from PIL import Image  # comes with matplotlib; only here and below, where it is needed

    names = ("image_processor_type", "do_resize", "do_center_crop", "do_convert_rgb")
    rules, model = {name: fields[name] for name in names}, {"height": Y, "width": X}
    _check(file, "do_convert_rgb", Z == 3 or not rules["do_convert_rgb"], f"false for {Z} channels", True)
    steps = ["size"] * rules["do_resize"] + ["crop_size"] * rules["do_center_crop"]
    for name in steps:
        sides = fields[name]
        if sides is None and name == "size":
            sides = 224 if rules["do_center_crop"] else model
        if type(sides) is int:
            square = fields["default_to_square"] or name == "crop_size"
            sides = {"height": sides, "width": sides} if square else {"shortest_edge": sides}
        elif isinstance(sides, list) and len(sides) == 2:
            sides = {"height": sides[0], "width": sides[1]}
        right = isinstance(sides, dict) and sides.keys() in ({"height", "width"}, {"shortest_edge"})
        right = right and all(type(side) is int and 0 < side <= LARGEST for side in sides.values())
        _check(file, name, right, "one number above 0 or two, height and width, or shortest_edge", fields[name])
        rules[name] = sides
    if rules["do_resize"]:
        rules["resample"] = resample = fields["resample"]
        right = type(resample) is int and resample in [*Image.Resampling]
        _check(file, "resample", right, "the number of a filter of Pillow", resample)
    for last in steps[-1:]:  # of the shorter side alone it depends on the image what becomes of it
        right = rules[last] == model or (last == "size" and "shortest_edge" in rules["size"])
        _check(file, last, right, f"the {Y} x {X} pixels that the model reads", fields[last])
    return rules


def _numbers(value: Any, lengths: tuple[int, ...]) -> bool:
    numbers = isinstance(value, list) and all(type(one) in (int, float) and abs(one) < LARGEST_VALUE for one in value)
    return numbers and len(value) in lengths


def _check(file: pathlib.Path, name: str, right: bool, what: str, value: Any) -> None:
    if not right:
        raise errors.UserError(f"{file}: {name} must be {what}, and {str(value)[:60]} is not")


def own(Y: int, X: int, Z: int) -> dict[str, Any]:
    """What `pixels` needs to know to make images of this size and so many channels, as runs of our own have them."""
    rules = _processor(pathlib.Path(), VIT | {"image_processor_type": NAME}, Y, X, Z)
    return {"image": [Y, X, Z], "processor": rules, "draft": True}


@contextlib.contextmanager
def opened(file: files.File) -> Iterator[Any]:
    """Within this, the image of Pillow in the file, not yet unpacked. UserError for no image, a damaged one, too many
    pixels, more than 8 bits a value."""
    from PIL import Image

    try:
        if file.size > LARGEST_FILE:
            raise errors.UserError(f"{file.name} has {file.size:,} bytes, and at most {LARGEST_FILE:,} are read")
        with file.open() as content, Image.open(content, formats=FORMATS) as image:
            _check_pixels(file.name, *image.size)
            if image.mode.startswith(("I", "F")):
                raise errors.UserError(f"{file.name} has more than 8 bits a value (mode {image.mode}): save it with 8")
            yield image
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        formats = ", ".join(FORMATS)
        raise errors.UserError(f"{file.name} is no image that can be read here ({formats}): {error}") from error


def upright(image: Any) -> tuple[int, int]:
    """Its rows and columns, when it is turned as its camera says."""
    turned = image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
    return image.size if turned else image.size[::-1]


def pixels(name: str, image: Any, like: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """An `opened` image as image_YXZ (uint8), and what was done to it, as transformers does it with Pillow: turned as
    its camera says, resized, cropped around its middle. UserError for other sides than the model's."""
    from PIL import Image, ImageOps

    (Y, X, Z), rules = like["image"], like["processor"]
    if like.get("draft"):
        image.draft(None, (max(Y, X),) * 2)  # a large JPEG is soon unpacked at 1/2, 1/4 or 1/8 of its size
    image = ImageOps.exif_transpose(image)
    if Z in (1, 3) and ("A" in image.getbands() or "transparency" in image.info):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image, steps = _formed(name, image.convert(MODES[Z]), rules)
    if (image.height, image.width) != (Y, X):
        raise errors.UserError(f"{name} becomes {image.height} x {image.width} pixels, and the model reads {Y} x {X}")
    return np.asarray(image).reshape(Y, X, Z), steps


def read(path: pathlib.Path, like: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """The file's image as image_1YXZ, made and normalised as `expected` says; and what was done to it. Black and white
    become the least and the greatest of `values`; then image = (image - mean) / std. UserError as `opened` and
    `pixels`."""
    Z = like["image"][2]
    if Z not in MODES:
        raise errors.UserError(f"the model reads images of {Z} channels, and no image file has them")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a large size, which is looked at here, and of damaged metadata
        with opened(files.on_disk(path)) as image:
            was = f"{image.height} x {image.width} pixels, {COLOURS.get(image.mode, 'mode ' + image.mode)}"
            image_YXZ, steps = pixels(str(path), image, like)
    low, high = like["values"]
    colours = f"{COLOURS[MODES[Z]]}, black {low:g} and white {high:g}"
    sentence = f"{path}: {was}, {steps}, {colours} as the model's own images"
    sentence += " (assumed: there is no preprocessor_config.json)" * like["assumed"]
    return normalised(scaled(image_YXZ[None], like), like), sentence


def scaled(image_BYXZ: np.ndarray, like: Mapping[str, Any]) -> np.ndarray:
    """Return images of 0 to 255 with the `values` of the model's own images for black and white, float32."""
    low, high = like["values"]
    return low + (high - low) / 255 * image_BYXZ.astype(np.float32)


def normalised(image_BYXZ: np.ndarray, like: Mapping[str, Any]) -> np.ndarray:
    """Return (image - mean) / std, float32."""
    return (image_BYXZ.astype(np.float32) - np.float32(like["mean"])) / np.float32(like["std"])


def prepared(images: Any, like: Mapping[str, Any]) -> np.ndarray:
    """Return raw images as image_BYXZ, made and normalised as `expected` says (float32).

    images: of the axes YX, YXZ, BYX (grey) or BYXZ, of Pillow, or a list of these. Of type uint8 they are 0 (black) to
    255 (white), of any size, and are made as `pixels` makes the image of a file. Of another type, or if they are no
    larger than the model's own data are (`values`, as 0 to 16), they are numbers of such data, of the model's size.
    Raises UserError for other shapes and numbers: also if one cannot know what they mean.
    """
    from PIL import Image

    (Y, X, Z), (low, high) = like["image"], like["values"]
    if isinstance(images, Image.Image) and Z in MODES and not images.mode.startswith(("I", "F")):
        image_1YXZ = pixels("the image", images.copy(), like)[0][None]  # a copy, since `draft` changes it
        return normalised(scaled(image_1YXZ, like), like)
    if isinstance(images, list | tuple) and any(isinstance(one, Image.Image | np.ndarray) for one in images):
        return np.concatenate([prepared(one, like) for one in images])
    image_BYXZ = np.asarray(images)
    given = f"images of shape {image_BYXZ.shape} and type {image_BYXZ.dtype}"
    if image_BYXZ.ndim == 3 and (image_BYXZ.shape[-1] in (Z, *MODES) and image_BYXZ.shape[1:] != (Y, X)):
        image_BYXZ = image_BYXZ[None]
    elif image_BYXZ.ndim == 2 or image_BYXZ.ndim == 3 and Z == 1:  # of colour it could be ZYX as well
        image_BYXZ = image_BYXZ.reshape(-1, *image_BYXZ.shape[-2:], 1)
    same = image_BYXZ.shape[1:] == (Y, X, Z)
    if image_BYXZ.ndim != 4 or not image_BYXZ.size or image_BYXZ.dtype.kind not in "fiu":
        raise errors.UserError(f"{given}: the model reads numbers of the axes BYXZ, {Y} x {X} x {Z} each")
    least, most, slack = float(image_BYXZ.min()), float(image_BYXZ.max()), SLACK * (high - low)
    if image_BYXZ.dtype == np.uint8 and not 0 < most <= high < 255:
        if (not same or "draft" not in like) and image_BYXZ.shape[3] in MODES and Z in MODES:
            squeezed = (one[..., 0] if one.shape[-1] == 1 else one for one in image_BYXZ)
            image_BYXZ = np.stack([pixels(given, Image.fromarray(one), like)[0] for one in squeezed])
            same = True
        image_BYXZ = scaled(image_BYXZ, like)
    elif not low - slack * (low < 0) <= least <= most <= high + slack or 0 < most <= 1 < high / 4:
        what = f"{given} have values from {least:g} to {most:g}, and the model's own images {low:g} to {high:g}"
        raise errors.UserError(f"{what}: give these, or uint8 of 0 to 255; what is normalised already: model.logits")
    if not same:
        raise errors.UserError(f"{given}: the model reads {Y} x {X} x {Z}; of other sizes it takes uint8 of 0 to 255")
    return normalised(image_BYXZ, like)


def _formed(name: str, image: Any, processor: Mapping[str, Any]) -> tuple[Any, str]:
    """The Pillow image resized and cropped, and what was done."""
    steps = "as it is"
    if processor["do_resize"]:
        size, shorter = processor["size"], min(image.size)
        if "shortest_edge" in size:  # of the same form
            columns, rows = (int(size["shortest_edge"] * side / shorter) for side in image.size)
        else:
            columns, rows = size["width"], size["height"]
        _check_pixels(name, columns, rows)
        image, steps = image.resize((columns, rows), processor["resample"]), f"made {rows} x {columns}"
    if processor["do_center_crop"]:
        rows, columns = processor["crop_size"]["height"], processor["crop_size"]["width"]
        top, left = (image.height - rows) // 2, (image.width - columns) // 2
        image = image.crop((left, top, left + columns, top + rows))  # black where it is beyond the edges, as theirs
        steps += f", of it the middle {rows} x {columns}"
    return image, steps


def _check_pixels(name: str, columns: int, rows: int) -> None:
    if columns * rows > LARGEST:
        raise errors.UserError(f"{name} has {columns * rows:,} pixels, and at most {LARGEST:,} are read")
