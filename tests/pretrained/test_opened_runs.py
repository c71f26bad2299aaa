"""The model of a run can be called with raw images and with texts."""

import numpy as np
import published
import pytest
from errors import raises
from PIL import Image

from experiments.config import errors
from experiments.data import image_file, images
from experiments.pretrained import open_model


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """Return a model of scikit-learn's digits: images of 8 x 8 pixels with values from 0 to 16."""
    changes = {"image.patch": 4, "image.head": "class_token"}
    return open_model.open(published.write_run(tmp_path_factory.mktemp("runs") / "image", "vision", **changes))


@pytest.fixture(scope="module")
def digits():
    return images.load("digits")


def test_raw_images_are_normalised_as_in_training(vision, digits):
    raw_BYXZ, (mean_Z, std_Z) = digits.evaluation_image_BYXZ[:9], images.statistics(digits.train_image_BYXZ)
    assert raw_BYXZ.dtype == np.uint8 and raw_BYXZ.max() == 16
    expected_BC = np.asarray(vision.logits((raw_BYXZ - mean_Z) / std_Z))
    assert np.abs(expected_BC - np.asarray(vision.logits(raw_BYXZ))).max() > 0.01  # normalisation changes the logits
    for batch in (raw_BYXZ, raw_BYXZ[..., 0], raw_BYXZ.astype(np.float64), raw_BYXZ.astype(np.int64)):
        np.testing.assert_allclose(vision(batch), expected_BC, atol=2e-6)
    for image in (raw_BYXZ[0], raw_BYXZ[0, ..., 0], [raw_BYXZ[0, ..., 0].tolist()]):
        np.testing.assert_allclose(vision(image), expected_BC[:1], atol=2e-6)
    white_BYX = np.round(raw_BYXZ[..., 0] * 255 / 16).astype(np.uint8)
    np.testing.assert_allclose(vision(white_BYX), expected_BC, atol=0.05)


@pytest.mark.parametrize("shape", [(20, 12), (16, 16, 3), (9, 7, 4)])
def test_images_of_another_size_or_with_colours_equal_their_file(vision, tmp_path, shape):
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "image.png")
    expected_1YXZ, _ = image_file.read(tmp_path / "image.png", vision.image_format)
    batch = image.reshape(1, *shape[:2], -1)
    np.testing.assert_array_equal(image_file.prepare(batch, vision.image_format), expected_1YXZ)
    np.testing.assert_array_equal(vision(batch), vision.logits(expected_1YXZ))


AMBIGUOUS = [
    (lambda raw: (raw - 4.9) / 6.0, "model.logits"),  # normalised already
    (lambda raw: raw / 16, "0 to 16"),
    (lambda raw: np.where(raw > 15, np.nan, raw), "nan"),
    (lambda raw: np.repeat(raw, 2, 1), "16, 8"),
    (lambda raw: raw.astype(bool), "bool"),
]


@pytest.mark.parametrize(("change", "part"), AMBIGUOUS)
def test_ambiguous_images_are_refused(vision, digits, change, part):
    with raises(errors.UserError, part):
        vision(change(digits.evaluation_image_BYXZ[:4].astype(np.float64)))


PHOTO = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
COLOUR = image_file.describe_size(12, 16, 3) | {"values": [0, 255], "mean": [120.0] * 3, "std": [70.0] * 3}
GREY = image_file.describe_size(8, 8, 1) | {"values": [0, 16], "mean": [5.0], "std": [6.0]}


@pytest.mark.parametrize("like", [COLOUR, GREY], ids=["colour", "grey"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "CMYK", "turned"])
def test_an_image_of_pillow_equals_its_file(tmp_path, like, mode):
    exif, file = Image.Exif(), tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    exif[image_file.ORIENTATION] = 6 if mode == "turned" else 1
    Image.fromarray(PHOTO).convert("RGB" if mode == "turned" else mode).save(file, exif=exif)
    expected_1YXZ, _ = image_file.read(file, like | {"assumed": False})
    with Image.open(file) as image:
        np.testing.assert_array_equal(image_file.prepare(image, like), expected_1YXZ)
        both_2YXZ = image_file.prepare([image, image.resize((20, 20))], like)
        assert both_2YXZ.shape == (2, *like["image"])
        if mode in ("RGB", "RGBA", "L"):  # one array of axes YX or YXZ, whatever the model's channels are
            np.testing.assert_array_equal(image_file.prepare(np.asarray(image), like), expected_1YXZ)


@pytest.mark.parametrize("image", [PHOTO.transpose(2, 0, 1), PHOTO[:12, :16] / 100 - 1, PHOTO[:12, :16] / 255])
def test_colours_that_come_first_or_are_normalised_are_refused(image):
    with raises(errors.UserError, image.shape):
        image_file.prepare(image, COLOUR)
