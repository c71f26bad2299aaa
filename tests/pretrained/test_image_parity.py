"""Image files are processed as by transformers' image processors, and a published ViT has equal probabilities."""

import json

import jax
import numpy as np
import pytest
from errors import raises
from PIL import Image
from transformers_models import VIT, make_random, torch, transformers

from experiments.config import errors
from experiments.data import image_file
from experiments.pretrained import hub, open_model
from experiments.tools import export

# Files of image processors: how an image file of 31 x 47 pixels becomes the input of a ViT.
VIT_FIELDS = {"image_processor_type": "ViTImageProcessor", "size": {"height": 15, "width": 10}}
CROP = {"do_center_crop": True, "crop_size": {"height": 15, "width": 10}}
PROCESSING = {
    "another mean": {"image_mean": [0.1, 0.5, 0.9], "image_std": [0.3, 0.2, 0.4]},
    "one mean for all": {"image_mean": 0.1, "image_std": 0.3},
    "no rescaling": {"do_rescale": False, "image_mean": [90, 130, 120], "image_std": [60, 50, 70]},
    "a crop": {"size": {"height": 24, "width": 29}} | CROP,
    "a crop of the same form": {"size": {"shortest_edge": 17}} | CROP,
    "one number for the shorter side": {"size": 19, "default_to_square": False} | CROP,
    "one number for both sides": {"size": 21} | CROP,
    "a crop beyond the edges": {"size": [12, 7]} | CROP,
    "a crop without resizing": {"do_resize": False} | CROP,
    "null is false": {"do_normalize": None, "image_mean": None, "do_center_crop": None, "do_convert_rgb": None},
    "BEiT": {"image_processor_type": None, "feature_extractor_type": "BeitFeatureExtractor", "reduce_labels": True},
    "fast": {"image_processor_type": "ViTImageProcessorFast", "data_format": "channels_first", "resample": 3},
    "opacity": {"do_convert_rgb": True},
} | {f"filter {number}": {"resample": number} for number in range(6)}
PLAIN = "filter 2"  # the defaults


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Return (folder of a ViT, probabilities by transformers, probabilities by our model), as functions of an image."""
    reference = make_random("ViTForImageClassification", VIT | {"num_channels": 3})
    reference.save_pretrained(folder := tmp_path_factory.mktemp("vit"))
    model = open_model.open(folder)

    def compute_reference(image_1ZYX):
        with torch.no_grad():
            return reference(image_1ZYX).logits.softmax(-1)[0].numpy()

    return folder, compute_reference, lambda image_1YXZ: np.asarray(jax.nn.softmax(model.logits(image_1YXZ)[0]))


def photograph(folder, mode="RGB"):
    """Write an image file with details of every size, and transparent pixels if it has opacity. Return its path."""
    rng, channels = np.random.default_rng(3), len(mode)
    y_YX, x_YX = np.mgrid[:31, :47]
    waves = [np.sin(x_YX / (3 + z) + z) + np.cos(y_YX / (5 - z)) + (x_YX > 11 * z) for z in range(channels)]
    pixels = 40 * np.stack(waves, -1) + 80 + 30 * rng.standard_normal((31, 47, channels))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8).squeeze()).save(folder / f"{mode}.png")
    return folder / f"{mode}.png"


@pytest.mark.parametrize("case", PROCESSING)
def test_an_image_file_has_the_probabilities_of_transformers(tmp_path, classes, case):
    folder, compute_reference, compute = classes
    file = photograph(tmp_path, "RGBA" if case == "opacity" else "RGB")
    fields = {name: x for name, x in (VIT_FIELDS | PROCESSING[case]).items() if name != "image_processor_type" or x}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    with Image.open(file) as image:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        image_1ZYX = processor(images=image, return_tensors="pt")["pixel_values"]
    facts = hub.read(folder).facts
    image_1YXZ, _ = image_file.read(file, image_file.load_format(folder, facts, Z=3, C=3))
    np.testing.assert_allclose(image_1YXZ, image_1ZYX.permute(0, 2, 3, 1), atol=1e-5, rtol=1e-5)
    expected = compute_reference(image_1ZYX)
    np.testing.assert_allclose(compute(image_1YXZ), expected, atol=1e-5)
    plain_1YXZ, _ = image_file.read(file, image_file.load_format(folder.parent, facts, Z=3, C=3))  # the defaults
    is_plain = np.abs(compute(plain_1YXZ) - expected).max() < 1e-4
    assert is_plain == (case in (PLAIN, "opacity"))  # all other cases change the image


@pytest.mark.parametrize(
    "fields",
    [{"size": {"shortest_edge": 9}}, {"size": 14}, CROP | {"crop_size": 15}, {"do_resize": False}, {"resample": 99}],
)
def test_fields_that_transformers_refuses_are_refused(tmp_path, classes, fields):
    folder, compute_reference, _ = classes
    (folder / "preprocessor_config.json").write_text(json.dumps(VIT_FIELDS | fields))
    file = photograph(tmp_path)
    with pytest.raises(ValueError):
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        compute_reference(processor(images=str(file), return_tensors="pt")["pixel_values"])
    with raises(errors.UserError):
        image_file.read(file, image_file.load_format(folder, hub.read(folder).facts, Z=3, C=3))


@pytest.mark.parametrize("values", [[0, 1], [0, 16], [0, 255], [-1, 1], [3.5, 7]])
@pytest.mark.parametrize(("mode", "file_mode"), [("L", "L"), ("RGB", "RGB"), ("RGB", "L")])
def test_an_exported_preprocessor_makes_the_same_pixels(tmp_path, mode, file_mode, values):
    Z = len(mode)
    data = {"image": [15, 10, Z], "values": values, "classes": ["a"]}
    data |= {"mean": [0.7, 2, -1][:Z], "std": [0.25, 3, 1][:Z]}
    (tmp_path / "data.json").write_text(json.dumps(data))
    run_format = image_file.load_format(tmp_path, {}, Z=Z, C=1)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(export.preprocessor(run_format)))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    file = photograph(tmp_path, file_mode)
    with Image.open(file) as image:
        expected = processor(images=image, return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    exported_format = image_file.load_format(tmp_path, {"image": [15, 10], "class_names": ["a"]}, Z=Z, C=1)
    for image_format in (run_format, exported_format):
        np.testing.assert_allclose(image_file.read(file, image_format)[0], expected, atol=1e-5, rtol=1e-5)
    assert np.ptp(expected) > 0.3
