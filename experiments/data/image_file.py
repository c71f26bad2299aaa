"""Make the image in a file like the images that a model was trained on."""

import contextlib
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments.data import files
from experiments.engine import disk, errors

LARGEST = 2**26  # pixels of an image
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")  # plain pixels: no format that runs a program
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's names for Z channels
# The image processors of transformers that a ViT may have, in their words: the values of absent fields.
VIT = {
    "do_resize": True,
    "size": None,  # theirs has 224; here it is the side of the model, and no other size is of use
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
NAME = "ViTImageProcessor"  # the default
PROCESSORS = {
    NAME: VIT,
    "DeiTImageProcessor": VIT | {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224},
    "BeitImageProcessor": VIT | {"resample": 3, "crop_size": 224},
}
HARMLESS = {  # fields of their files that change no pixel of an image
    *("image_processor_type", "feature_extractor_type", "processor_class", "model_input_names", "image_seq_length"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping", "pad_size"),
    *("do_reduce_labels", "reduce_labels", "_valid_processor_keys"),
}
SLACK = 0.05  # of the range of the training images' values: how far others may lie outside
PLAIN = {"mean": 0, "std": 1}  # for images that are not normalised
GREY = ("1", "L", "LA")  # modes
ORIENTATION = 0x0112  # in the metadata of a camera
COLOURS = {"L": "grey", "LA": "grey and opacity", "RGB": "colour", "RGBA": "colour and opacity"}


def expected(path: pathlib.Path, extras: Mapping[str, Any], *, Z: int, C: int) -> dict[str, Any]:
    """Return what `images.describe` says about the images of a trained model of Z channels and C classes: of a run's
    folder, or of a published ViT (`extras`).

    `processor` says how a file becomes such an image, in the words of transformers; `assumed`: that no file says it.
    Raises UserError if the files are absent, damaged, or ask for what is not done here."""
    if "image" not in extras:
        file = path / "data.json"
        data = disk.read_json(file, says="what the model's images are like")
        with disk.reading(file, TypeError):
            like = {name: data[name] for name in ("values", "mean", "std", "classes")} | own(*data["image"])
        like["assumed"] = False
    else:
        file, saved = read_processor(path if path.is_dir() else path.parent)
        fields = complete(file, saved or {})
        factor = fields["rescale_factor"] if fields["do_rescale"] else 1
        usual = {"mean": fields["image_mean"], "std": fields["image_std"]} if fields["do_normalize"] else PLAIN
        like = {name: value if isinstance(value, list) else [value] * Z for name, value in usual.items()}
        like |= {"image": [*extras["image"], Z], "values": [0, 255 * factor], "classes": extras["class_names"]}
        like |= {"processor": choose_steps(file, fields, *extras["image"]), "assumed": saved is None}
    with disk.reading(file, TypeError):
        numbers = np.array([*like["values"], *like["mean"], *like["std"]], np.float32)
    right = np.isfinite(numbers).all() and min(like["std"]) > 0 and {len(like["mean"]), len(like["std"])} <= {1, Z}
    check(file, "mean and std", right, f"1 or {Z} finite numbers, std above 0", [like["mean"], like["std"]])
    check(file, "image", like["image"][2] == Z, f"rows, columns and the model's {Z} channels", like["image"])
    check(file, "classes", len(like["classes"]) == C, f"the names of the model's {C} classes", like["classes"])
    return like


def read_processor(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any] | None]:
    """Return the file of a published model that describes its image processor, and the description; None if it has
    none."""
    file, newest = folder / "preprocessor_config.json", folder / "processor_config.json"
    if file.exists():
        return file, disk.read_json(file, says="how images are normalised")
    if newest.exists():
        return newest, disk.read_json(newest, says="how images are normalised").get("image_processor", {})
    return file, None


def complete(file: pathlib.Path, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a file with the defaults of its image processor. Raises UserError for unknown ones."""
    kind = str(saved.get("image_processor_type") or saved.get("feature_extractor_type") or NAME)
    kind = kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")  # its older name
    check(file, "image_processor_type", kind in PROCESSORS, f"one of {', '.join(PROCESSORS)}", kind)
    for name in sorted(saved.keys() - VIT.keys() - HARMLESS):
        off = saved[name] is None or saved[name] is False
        check(file, name[:60], off, "absent or false, since it is not known here", saved[name])
    fields = PROCESSORS[kind] | saved
    switches = {name: bool(fields[name]) for name, usual in VIT.items() if isinstance(usual, bool)}
    return fields | switches | {"image_processor_type": kind}


def choose_steps(file: pathlib.Path, fields: dict[str, Any], Y: int, X: int) -> dict[str, Any]:
    """Return the fields that tell how an image gets its rows and columns, in one form each. Raises UserError if these
    are not the model's."""
    from PIL import Image  # comes with matplotlib; imported only where it is needed

    names = ("image_processor_type", "do_resize", "do_center_crop", "do_convert_rgb")
    rules, model = {name: fields[name] for name in names}, {"height": Y, "width": X}
    steps = ["size"] * rules["do_resize"] + ["crop_size"] * rules["do_center_crop"]
    for name in steps:
        sides, square = fields[name], fields["default_to_square"] or name == "crop_size"
        if sides is None and name == "size":
            sides = 224 if rules["do_center_crop"] else model
        if type(sides) is int:
            sides = {"height": sides, "width": sides} if square else {"shortest_edge": sides}
        elif isinstance(sides, list) and len(sides) == 2:
            sides = {"height": sides[0], "width": sides[1]}
        right = isinstance(sides, dict) and sides.keys() in ({"height", "width"}, {"shortest_edge"})
        right = right and all(type(side) is int and 0 < side <= LARGEST for side in sides.values())
        check(file, name, right, "one number above 0 or two, height and width, or shortest_edge", fields[name])
        rules[name] = sides
    if rules["do_resize"]:
        rules["resample"] = fields["resample"]
        filters = [*Image.Resampling]
        check(file, "resample", rules["resample"] in filters, "the number of a filter of Pillow", fields["resample"])
    for last in steps[-1:]:  # if it is the shorter side alone, the result depends on the image
        right = rules[last] == model or (last == "size" and "shortest_edge" in rules["size"])
        check(file, last, right, f"the {Y} x {X} pixels that the model reads", fields[last])
    return rules


def check(file: pathlib.Path, name: str, right: bool, what: str, value: Any) -> None:
    """Raise UserError unless the field is right."""
    if not right:
        raise errors.UserError(f"{file}: {name} must be {what}, and {str(value)[:60]} is not")


def own(Y: int, X: int, Z: int) -> dict[str, Any]:
    """Return what `pixels` needs to make images of this size and number of channels, as our own runs do."""
    rules = choose_steps(pathlib.Path(), VIT | {"image_processor_type": NAME}, Y, X)
    return {"image": [Y, X, Z], "processor": rules, "draft": True}


@contextlib.contextmanager
def opened(file: files.File) -> Iterator[Any]:
    """Open the file as an image of Pillow, not yet unpacked. Raises UserError if it is not an image, and for more than
    8 bits a value."""
    from PIL import Image

    with disk.reading(file.name, SyntaxError, Image.DecompressionBombError):
        with file.open() as content, Image.open(content, formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise errors.UserError(f"{file.name} has more than 8 bits a value (mode {image.mode}): save it with 8")
            yield image


def upright(image: Any) -> tuple[int, int]:
    """Return rows and columns of the image turned as its camera says."""
    turned = image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
    return image.size if turned else image.size[::-1]


def pixels(name: str, image: Any, like: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """Return an `opened` image as image_YXZ (uint8), and what was done to it.

    As transformers does it with Pillow: turned as its camera says, resized, cropped around its middle. Raises UserError
    for other sides than the model's."""
    from PIL import Image, ImageOps

    (Y, X, Z), rules = like["image"], like["processor"]
    if like.get("draft"):
        image.draft(None, (max(Y, X),) * 2)  # unpacks a large JPEG at 1/2, 1/4 or 1/8 of its size
    image = ImageOps.exif_transpose(image)
    if Z in (1, 3) and ("A" in image.getbands() or "transparency" in image.info):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image, steps = resize(image.convert(MODES[Z]), rules)
    if (image.height, image.width) != (Y, X):
        raise errors.UserError(f"{name} becomes {image.height} x {image.width} pixels, and the model reads {Y} x {X}")
    return np.asarray(image).reshape(Y, X, Z), steps


def resize(image: Any, processor: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the Pillow image resized and cropped, and what was done."""
    steps = "as it is"
    if processor["do_resize"]:
        size, shorter = processor["size"], min(image.size)
        if "shortest_edge" in size:  # keeps the form
            columns, rows = (int(size["shortest_edge"] * side / shorter) for side in image.size)
        else:
            columns, rows = size["width"], size["height"]
        image, steps = image.resize((columns, rows), processor["resample"]), f"made {rows} x {columns}"
    if processor["do_center_crop"]:
        rows, columns = processor["crop_size"]["height"], processor["crop_size"]["width"]
        top, left = (image.height - rows) // 2, (image.width - columns) // 2
        image = image.crop((left, top, left + columns, top + rows))  # black beyond the edges, like theirs
        steps += f", of it the middle {rows} x {columns}"
    return image, steps


def read(path: pathlib.Path, like: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """Return the file's image as image_1YXZ, made and normalised as `expected` says; and what was done to it.

    Black and white become the least and the greatest of `values`; then image = (image - mean) / std."""
    Z = like["image"][2]
    if Z not in MODES:
        raise errors.UserError(f"the model reads images of {Z} channels, and no image file has them")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a large size, and about damaged metadata
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
    elif image_BYXZ.ndim == 2 or image_BYXZ.ndim == 3 and Z == 1:  # colour could be ZYX as well
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
