"""Process the image in a file like the images that a model was trained on."""

import contextlib
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments.config import disk, errors
from experiments.data import files as data_files
from experiments.folder import records

LARGEST = 2**26  # pixels of an image
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")  # decoding these runs no program, unlike EPS
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's names for Z channels
# Defaults of the fields of transformers' image processors for ViTs.
VIT = {"do_resize": True, "do_center_crop": False, "do_rescale": True, "do_normalize": True, "do_convert_rgb": False}
VIT |= {"rescale_factor": 1 / 255, "image_mean": 0.5, "image_std": 0.5, "resample": 2}  # bilinear, in Pillow's numbers
# size: 224 in transformers; here the size that the model reads. default_to_square: a single number means both sides
# (True) or the shorter side (False).
VIT |= {"size": None, "default_to_square": True, "crop_size": None}
NAME = "ViTImageProcessor"  # the default
PROCESSORS = {NAME: VIT, "BeitImageProcessor": VIT | {"resample": 3, "crop_size": 224}}
HARMLESS = {  # fields that change no pixel of an image
    *("image_processor_type", "feature_extractor_type", "processor_class", "model_input_names", "image_seq_length"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping", "pad_size"),
    *("do_reduce_labels", "reduce_labels", "_valid_processor_keys"),
}
SLACK = 0.05  # how far values may lie outside the range of the training images, as a share of this range
GREY = ("1", "L", "LA")  # Pillow's modes of grey images
ORIENTATION = 0x0112  # the Exif tag for the camera's rotation
COLOURS = {"L": "grey", "LA": "grey and opacity", "RGB": "colour", "RGBA": "colour and opacity"}


def load_format(path: pathlib.Path, extras: Mapping[str, Any], *, Z: int, C: int | None) -> dict[str, Any]:
    """Return the image format of a trained model of Z channels and C classes (None: any), as in `images.describe`.

    path: the folder of a run, or a published ViT. extras: Trained.facts, with "image" only for the ViT. Fields are
    added. `processor`: the steps that make a file such an image, as fields of transformers. `assumed`: True if no file
    describes these steps. `draft`: True for a run, which decodes large JPEGs at a lower size. Raises UserError if the
    files are missing or damaged, or need a step that is not supported.
    """
    if "image" in extras:
        file, form = read_published_format(path, extras, Z=Z)
    else:
        file, data = path / records.DATA, records.read_data(path)
        with disk.reading(file):
            form = {name: data[name] for name in ("values", "mean", "std", "classes")} | describe_size(*data["image"])
    with disk.reading(file, TypeError):
        numbers = np.array([*form["values"], *form["mean"], *form["std"]], np.float32)
    lengths = {len(form["mean"]), len(form["std"])}
    valid = np.isfinite(numbers).all() and min(form["std"], default=0) > 0 and lengths <= {1, Z}
    check(file, "mean and std", valid, f"1 or {Z} finite numbers, std above 0", [form["mean"], form["std"]])
    check(file, "image", form["image"][2] == Z, f"rows, columns and the model's {Z} channels", form["image"])
    names = form["classes"] or []
    check(file, "classes", C in (None, len(names)), f"the names of the model's {C} classes", names)
    return form


def read_published_format(
    path: pathlib.Path, extras: Mapping[str, Any], *, Z: int
) -> tuple[pathlib.Path, dict[str, Any]]:
    """Return the path of the file that describes a published model's images, and the fields of `load_format`.

    path: the model's folder, or a file in it. extras: has the model's "class_names", and "image": (rows, columns).
    Fields that the file lacks have the defaults of its image processor, and the file may be missing. Raises UserError
    for an unknown processor or field, or an invalid value.
    """
    folder = path if path.is_dir() else path.parent
    file, newest = folder / "preprocessor_config.json", folder / "processor_config.json"
    if not file.exists() and newest.exists():
        file = newest
    saved, assumed = records.read_object(file, {}), not file.exists()
    saved = saved.get("image_processor", {}) if file == newest else saved
    kind = str(saved.get("image_processor_type") or saved.get("feature_extractor_type") or NAME)
    kind = kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")  # the older name
    check(file, "image_processor_type", kind in PROCESSORS, f"one of {', '.join(PROCESSORS)}", kind)
    for name in sorted(saved.keys() - VIT.keys() - HARMLESS):
        check(file, name[:60], not saved[name], "absent or false, because it is not supported", saved[name])
    fields = PROCESSORS[kind] | saved | {"image_processor_type": kind}
    fields |= {name: bool(fields[name]) for name, default in VIT.items() if isinstance(default, bool)}
    factor = fields["rescale_factor"] if fields["do_rescale"] else 1
    normal = [fields["image_mean"], fields["image_std"]] if fields["do_normalize"] else [0, 1]
    mean, std = (value if isinstance(value, list) else [value] * Z for value in normal)
    form = {"values": [0, 255 * factor], "mean": mean, "std": std, "classes": extras["class_names"]}
    form |= {"image": [*extras["image"], Z], "processor": choose_steps(file, fields, *extras["image"])}
    return file, form | {"assumed": assumed}


def choose_steps(file: pathlib.Path, fields: dict[str, Any], Y: int, X: int) -> dict[str, Any]:
    """Return those of an image processor's fields that resize and crop, with sizes as `read_size` returns them.

    Y, X: the pixels that the model reads. Raises UserError for an invalid field, or a fixed size other than Y x X. A
    size that depends on the image is not checked. file: the path of the fields, for messages.
    """
    from PIL import Image  # comes with matplotlib; imported only where it is needed

    names = ("image_processor_type", "do_resize", "do_center_crop", "do_convert_rgb")
    processor, model = {name: fields[name] for name in names}, {"height": Y, "width": X}
    if processor["do_resize"]:
        size = fields["size"]
        if size is None:
            size = 224 if processor["do_center_crop"] else model
        processor["size"] = read_size(file, "size", size, square=fields["default_to_square"])
        processor["resample"] = fields["resample"]
        filters = [*Image.Resampling]
        check(file, "resample", fields["resample"] in filters, "the number of a Pillow filter", fields["resample"])
    if processor["do_center_crop"]:
        processor["crop_size"] = read_size(file, "crop_size", fields["crop_size"], square=True)
    last = "crop_size" if processor["do_center_crop"] else "size"
    if last in processor:  # if only the shorter side is given, the result depends on the image
        valid = processor[last] == model or (last == "size" and "shortest_edge" in processor["size"])
        check(file, last, valid, f"the {Y} x {X} pixels that the model reads", fields[last])
    return processor


def read_size(file: pathlib.Path, name: str, sides: Any, *, square: bool) -> dict[str, int]:
    """Return a size as {"height", "width"} or {"shortest_edge"}.

    sides: the value of the field `name` in a file: a number, [height, width], or a size as returned. square: a number
    means both sides, else the shorter side. Raises UserError for another value.
    """
    size = sides
    if type(sides) is int:
        size = [sides, sides] if square else {"shortest_edge": sides}
    if isinstance(size, list) and len(size) == 2:
        size = {"height": size[0], "width": size[1]}
    valid = isinstance(size, dict) and size.keys() in ({"height", "width"}, {"shortest_edge"})
    valid = valid and all(type(side) is int and 0 < side <= LARGEST for side in size.values())
    check(file, name, valid, "a positive integer, two (height and width), or shortest_edge", sides)
    return size


def check(file: str | pathlib.Path, name: str, valid: bool, allowed: str, value: Any) -> None:
    """Raise UserError unless `valid`: the field `name` of the file has this value, but must be `allowed`."""
    errors.refuse((not valid, f"{file}: {name} is {str(value)[:60]}, but must be {allowed}."))


def describe_size(Y: int, X: int, Z: int) -> dict[str, Any]:
    """Return the `form` that `pixels` needs to resize images to Y x X pixels of Z channels, as runs of tfm do."""
    processor = choose_steps(pathlib.Path(), VIT | {"image_processor_type": NAME}, Y, X)
    return {"image": [Y, X, Z], "processor": processor, "draft": True, "assumed": False}


@contextlib.contextmanager
def open_image(file: data_files.File) -> Iterator[Any]:
    """Context manager: open the file as an image of Pillow, not yet decoded.

    Raises UserError if the file is not an image, or has more than 8 bits per value.
    """
    from PIL import Image, UnidentifiedImageError

    with disk.reading(file.name, SyntaxError, Image.DecompressionBombError), file.open() as content:
        begin = content.peek(8)[:8]
        try:
            image = Image.open(content, formats=FORMATS)
        except UnidentifiedImageError as error:
            kind = f"begins with {begin!r}, so it is not an image ({', '.join(FORMATS)})" if begin else "is empty"
            raise ValueError(f"the file {kind}") from error
        with image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"the image has more than 8 bits per value (mode {image.mode}). Save it with 8 bits.")
            yield image


def pixels(name: str, image: Any, form: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """Return a Pillow image as image_YXZ (uint8), and a description of what was done to it.

    As in transformers, the image is rotated by its metadata, resized, and cropped around its centre. For Z = 1
    or 3, a transparent image is laid over white. form: the size and the steps, from `load_format` or `describe_size`.
    name: of the image, for the error. Raises UserError if the result does not have the size in `form`.
    """
    from PIL import Image, ImageOps

    (Y, X, Z), processor = form["image"], form["processor"]
    if form.get("draft"):
        image.draft(None, (max(Y, X),) * 2)  # decodes a large JPEG at 1/2, 1/4 or 1/8 of its size
    image = ImageOps.exif_transpose(image)
    if Z in (1, 3) and ("A" in image.getbands() or "transparency" in image.info):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image, steps = resize(image.convert(MODES.get(Z, "RGB")), processor)
    value = f"{image.height} x {image.width} pixels of {len(image.getbands())} channels"
    check(name, "the processed image", value == (allowed := f"{Y} x {X} pixels of {Z} channels"), allowed, value)
    return np.asarray(image).reshape(Y, X, Z), steps


def resize(image: Any, processor: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the Pillow image, resized and cropped, and a text about these steps. processor: as in `load_format`."""
    steps = "not resized"
    if processor["do_resize"]:
        size, shorter = processor["size"], min(image.size)
        if "shortest_edge" in size:  # keeps the aspect ratio
            columns, rows = (int(size["shortest_edge"] * side / shorter) for side in image.size)
        else:
            columns, rows = size["width"], size["height"]
        image, steps = image.resize((columns, rows), processor["resample"]), f"resized to {rows} x {columns}"
    if processor["do_center_crop"]:
        rows, columns = processor["crop_size"]["height"], processor["crop_size"]["width"]
        y, x = (image.height - rows) // 2, (image.width - columns) // 2
        image = image.crop((x, y, x + columns, y + rows))  # black beyond the edges, as in transformers
        steps += f", cropped to the middle {rows} x {columns}"
    return image, steps


def read(path: pathlib.Path, form: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """Return the file's image as image_1YXZ, processed and normalised as `form` says, and a line about it.

    Black and white become the two numbers form["values"]. Then image = (image - mean) / std. Raises UserError if the
    file cannot be read (`open_image`), or if the result of `pixels` has another size than `form`.
    """
    with warnings.catch_warnings(action="ignore"):  # about a large size, and about damaged metadata
        with open_image(data_files.on_disk(path)) as image:
            original = f"{image.height} x {image.width} pixels, {COLOURS.get(image.mode, 'mode ' + image.mode)}"
            image_YXZ, steps = pixels(str(path), image, form)
    low, high = form["values"]
    colours = f"{COLOURS[MODES[form['image'][2]]]}, black {low:g} and white {high:g}"
    line = f"{path}: {original}; {steps}; {colours} like the model's images"
    line += " (assumed: there is no preprocessor_config.json)" * form["assumed"]
    return normalise(image_YXZ[None], form), line


def normalise(image_BYXZ: np.ndarray, form: Mapping[str, Any], *, is_scaled: bool = False) -> np.ndarray:
    """Return (image - mean) / std, float32. Before, 0 (black) ... 255 (white) become the two `values` of the form.

    is_scaled: the images have these values already.
    """
    (low, high), image_BYXZ = form["values"], image_BYXZ.astype(np.float32)
    image_BYXZ = image_BYXZ if is_scaled else low + (high - low) / 255 * image_BYXZ
    return (image_BYXZ - np.float32(form["mean"])) / np.float32(form["std"])


def prepare(images: Any, form: Mapping[str, Any]) -> np.ndarray:
    """Return raw images as image_BYXZ (float32), processed and normalised as `form` says.

    images: an array with the axes YX, YXZ, BYX (grey) or BYXZ, a Pillow image, or a list of these. uint8 arrays have
    any size and values from 0 (black) to 255 (white), and are processed like a file. Arrays of other types must have
    the model's size and scale; so must uint8 arrays within `values` of the form, if these end below 255 (0 to 16).
    Raises UserError for other shapes and numbers, and for numbers that fit several scales.
    """
    from PIL import Image

    (Y, X, Z), (low, high) = form["image"], form["values"]
    if isinstance(images, Image.Image) and Z in MODES and not images.mode.startswith(("I", "F")):
        return normalise(pixels("the image", images.copy(), form)[0][None], form)  # a copy, since `draft` changes it
    if isinstance(images, list | tuple) and any(isinstance(image, Image.Image | np.ndarray) for image in images):
        return np.concatenate([prepare(image, form) for image in images])
    array = np.asarray(images)
    image_BYXZ, label, slack = add_axes(array, Y, X, Z), f"images of shape {array.shape}", SLACK * (high - low)
    valid = image_BYXZ.ndim == 4 and image_BYXZ.size > 0 and image_BYXZ.dtype.kind in "fiu"
    least, most = (float(image_BYXZ.min()), float(image_BYXZ.max())) if valid else (0.0, 0.0)
    is_raw = valid and image_BYXZ.dtype == np.uint8 and not 0 < most <= high < 255
    is_scaled = low - slack * (low < 0) <= least <= most <= high + slack and not 0 < most <= 1 < high / 4
    needs_steps = "draft" not in form or image_BYXZ.shape[1:] != (Y, X, Z)
    if is_raw and needs_steps and image_BYXZ.shape[3] in MODES and Z in MODES:
        squeezed = [image[..., 0] if image.shape[-1] == 1 else image for image in image_BYXZ]
        image_BYXZ = np.stack([pixels(label, Image.fromarray(image), form)[0] for image in squeezed])
    problem = (
        f"{label}, type {array.dtype} and values from {least:g} to {most:g}: the model reads {Y} x {X} x {Z} from"
        f" {low:g} to {high:g}. Pass such numbers, or uint8 from 0 to 255. For normalised images use model.logits."
    )
    errors.refuse((not valid or not (is_raw or is_scaled) or image_BYXZ.shape[1:] != (Y, X, Z), problem))
    return normalise(image_BYXZ, form, is_scaled=not is_raw)


def add_axes(array: np.ndarray, Y: int, X: int, Z: int) -> np.ndarray:
    """Return the array with the axes BYXZ: B is added to a single image, Z to grey images; else it is unchanged.

    For a model of colours (Z > 1), an array of three axes that do not end in channels is unchanged: the axes could be
    BYX or ZYX.
    """
    if array.ndim == 3 and array.shape[-1] in (Z, *MODES) and array.shape[1:] != (Y, X):
        return array[None]
    if array.ndim == 2 or array.ndim == 3 and Z == 1:
        return array.reshape(-1, *array.shape[-2:], 1)
    return array
