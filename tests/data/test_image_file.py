"""An image file is processed like the images that a model was trained on, or refused."""

import json
import math

import numpy as np
import pytest
from errors import raises
from PIL import Image

from experiments.config import errors
from experiments.data import image_file


def save(folder, pixels):
    Image.fromarray(pixels).save(folder / "a.png")
    return folder / "a.png"


def run_format(folder, Z=1, **values):
    """Return the format that a run of such images saves."""
    content = {"image": [2, 3, 1], "values": [0.0, 16.0], "mean": [4.0], "std": [2.0], "classes": ["a", "b"]} | values
    (folder / "data.json").write_text(json.dumps(content))
    return image_file.load_format(folder, {}, Z=Z, C=2)


def published_format(folder, fields, *shape, Z=3, file="preprocessor_config.json"):
    """Return the format of a published model whose file has these fields."""
    (folder / file).write_text(json.dumps(fields))
    return image_file.load_format(folder, {"image": list(shape), "class_names": ["a"]}, Z=Z, C=1)


def test_an_image_is_processed_like_the_images_of_a_run(tmp_path):
    image_1YXZ, line = image_file.read(save(tmp_path, np.full((5, 7, 3), 255, np.uint8)), run_format(tmp_path))
    np.testing.assert_allclose(image_1YXZ, np.full((1, 2, 3, 1), (16 - 4) / 2))
    assert "5 x 7 pixels, colour; resized to 2 x 3; grey" in line
    numbers = {"mean": [0.0, 1.0, 2.0], "std": [1.0, 1.0, 1.0], "values": [-1.0, 1.0]}
    colour_format = run_format(tmp_path, 3, image=[2, 3, 3], **numbers)
    image_1YXZ, _ = image_file.read(save(tmp_path, np.zeros((5, 7), np.uint8)), colour_format)
    np.testing.assert_allclose(image_1YXZ[0, 0, 0], [-1, -2, -3])
    wide_YX = np.zeros((2, 12), np.uint8)
    wide_YX[:, 8:] = 255  # the right third is white
    image_1YXZ, _ = image_file.read(save(tmp_path, wide_YX), run_format(tmp_path, mean=[0.0], std=[1.0]))
    assert image_1YXZ[0, :, 0].max() < 1 and image_1YXZ[0, :, 2].min() > 12  # the edge is blurred


WRONG_CHANGES = {  # {field in the message: changes}
    "image": [{"image": [2, 3, 2]}],
    "mean": [{"mean": [1, 2]}, {"mean": ["x"] * 3}, {"mean": [math.inf]}, {"std": [0, 0, 0]}],
    "classes": [{"classes": ["a"]}],
}


def test_an_invalid_format_is_refused(tmp_path):
    valid = {"image": [2, 3, 3], "values": [0.0, 1.0], "mean": [0.5], "std": [1, 2, 3], "classes": ["a", "b"]}
    form = run_format(tmp_path, 3, **valid)
    assert {name: form[name] for name in valid} == valid
    for name, changes in WRONG_CHANGES.items():
        for change in changes:
            with raises(errors.UserError, "data.json", "" if "x" in str(change) else name):
                run_format(tmp_path, 3, **valid | change)
    for change in ({"image_mean": "x"}, {"image_std": [0, 0, 0]}, {"image_mean": None}):
        with raises(errors.UserError, "preprocessor_config.json"):
            published_format(tmp_path, change, 2, 3)


CROP = {"do_center_crop": True, "crop_size": {"height": 4, "width": 6}}
SQUARE = {"do_center_crop": True, "crop_size": 4}
PLAIN = {"do_normalize": False}
PROCESSOR_CASES = {  # {case: (fields, function from an image of 12 x 24 pixels to the expected result)}
    "not normalised": (PLAIN | {"image_mean": [0.3] * 3, "size": [12, 24]}, lambda x: x / 255),
    "not rescaled": ({"do_rescale": False, "image_mean": 100, "size": [12, 24]}, lambda x: (x - 100) / 0.5),
    "not resized": ({"do_resize": False}, lambda x: (x / 255 - 0.5) / 0.5),
    "null is false": ({"do_resize": None, "do_normalize": None}, lambda x: x / 255),
    "cropped": ({"do_resize": False} | PLAIN | CROP, lambda x: x[4:8, 9:15] / 255),
    "as high, and cropped": ({"size": {"shortest_edge": 12}} | PLAIN | CROP, lambda x: x[4:8, 9:15] / 255),
    "cropped square": ({"default_to_square": False, "size": 12} | SQUARE | PLAIN, lambda x: x[4:8, 10:14] / 255),
    "cropped beyond": (
        {"do_resize": False} | SQUARE | {"crop_size": [15, 24]} | PLAIN,
        lambda x: np.pad(x, ((2, 1), (0, 0), (0, 0))) / 255,
    ),
    "nearest": ({"resample": 0, "size": [4, 8]} | PLAIN, lambda x: x[1::3, 1::3] / 255),
    "mean of boxes": ({"resample": 4, "size": [4, 8]} | PLAIN, lambda x: x.reshape(4, 3, 8, 3, 3).mean((1, 3)) / 255),
}


@pytest.mark.parametrize("case", PROCESSOR_CASES)
def test_the_fields_of_a_processor_are_applied(tmp_path, case):
    fields, compute_expected = PROCESSOR_CASES[case]
    x_YXZ = np.random.default_rng(0).integers(0, 256, (12, 24, 3), np.uint8)
    expected_YXZ = compute_expected(x_YXZ.astype(float))
    image_format = published_format(tmp_path, fields, *expected_YXZ.shape[:2])
    image_1YXZ, line = image_file.read(save(tmp_path, x_YXZ), image_format)
    np.testing.assert_allclose(image_1YXZ[0], expected_YXZ, atol=1.01 / 255 if case == "mean of boxes" else 1e-5)
    assert "assumed" not in line


def test_transparent_pixels_become_white(tmp_path):
    """This holds for colour, grey, and palettes with a transparent colour, with and without conversion to RGB."""
    file = save(tmp_path, np.array([[[0, 0, 0, 255], [0, 0, 0, 0]]], np.uint8))
    grey, palette = tmp_path / "grey.png", tmp_path / "palette.png"
    Image.open(file).convert("LA").save(grey)
    flat = Image.frombytes("P", (2, 1), bytes([0, 1]))
    flat.putpalette([0, 0, 0, 0, 0, 0])
    flat.save(palette, transparency=1)
    for fields, Z in (({"do_convert_rgb": True}, 3), ({"do_convert_rgb": False}, 3), ({}, 1)):
        form = published_format(tmp_path, fields | PLAIN, 1, 2, Z=Z)
        for path in (file, grey, palette):
            np.testing.assert_allclose(image_file.read(path, form)[0][0, 0, :, Z // 2], [0, 1], atol=1e-6)


REFUSED = [  # (fields, names and values in the message)
    ({"image_processor_type": "CLIPImageProcessor"}, ["image_processor_type", "CLIPImageProcessor"]),
    ({"feature_extractor_type": "CLIPFeatureExtractor"}, ["CLIPImageProcessor"]),
    ({"do_flip_channel_order": True}, ["do_flip_channel_order"]),
    ({"auto_map": {"AutoImageProcessor": "mine.Processor"}}, ["auto_map", "mine.Processor"]),
    ({"resample": 99}, ["resample", 99]),
    ({"size": 7}, ["size", "4 x 6", 7]),
    ({"size": {"longest_edge": 7}}, ["size", "longest_edge"]),
    ({"do_center_crop": True}, ["crop_size", None]),
    ({"do_center_crop": True, "crop_size": {"shortest_edge": 4}}, ["crop_size", "4 x 6"]),
    ({"size": {"shortest_edge": 4}}, ["a.png", "4 x 8", "4 x 6"]),
    ({"do_resize": False}, ["a.png", "12 x 24", "4 x 6"]),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_a_processor_that_is_not_supported_is_refused(tmp_path, fields, words):
    file = save(tmp_path, np.zeros((12, 24, 3), np.uint8))
    with raises(errors.UserError, *words):
        image_file.read(file, published_format(tmp_path, fields, 4, 6))


def test_processor_config_json_is_read(tmp_path):
    """Newer versions of transformers write it instead of preprocessor_config.json."""
    newest, fields = {"Z": 1, "file": "processor_config.json"}, {"image_processor": {"image_mean": [9]} | PLAIN}
    form = published_format(tmp_path, fields, 4, 6, **newest)
    assert (form["mean"], form["std"], form["assumed"]) == ([0], [1], False)
    assert published_format(tmp_path, {"image_mean": [0.25]}, 4, 6, Z=1)["mean"] == [0.25]
