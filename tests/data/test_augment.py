"""Training images are shifted, flipped, cropped and mixed as in slow loops; evaluation images are not changed."""

import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st
from scipy import ndimage

from experiments.config import errors
from experiments.data import augment, images
from experiments.engine import batches

B, Y, X = 11, 5, 3
INDEX_B = np.arange(B)


def make_examples(image, *changes, mean=0, std=1):
    label = np.arange(len(image), dtype=np.int32)
    return images.examples(image, label, mean_Z=np.float32([mean]), std_Z=np.float32([std]), changes=changes)


def pixels(seed=0):
    return np.random.default_rng(seed).integers(1, 256, (B, Y, X, 2), np.uint8)


def shift_slowly(image, most, rng):
    offset_2B = rng.uniform(-most, most, (2, B))
    for b in range(B):
        offset = (*offset_2B[:, b], 0)
        yield ndimage.shift(image[b].astype(np.float64), offset, order=1, mode="grid-constant"), 0


def flip_slowly(image, probability, rng):
    for b, uniform in enumerate(rng.random(B)):
        yield image[b, :, ::-1] if uniform < probability else image[b], 0


def crop_slowly(image, border, rng):
    """Shift by whole pixels: the window begins `down` rows and `right` columns after the corner of the border."""
    down_B, right_B = rng.integers(0, 2 * border + 1, (2, B))
    for b in range(B):
        offset = (border - down_B[b], border - right_B[b], 0)
        yield ndimage.shift(image[b].astype(np.float64), offset, order=0, mode="grid-constant"), 0


def mix_slowly(image, alpha, rng):
    for b, share in enumerate(rng.beta(alpha, alpha, B)):
        yield image[b] * (1 - share) + image[b - 1] * share, share


def paste_slowly(image, alpha, rng):
    side_B = np.sqrt(rng.beta(alpha, alpha, B))
    middle_2B = [rng.integers(0, L, (B, 1))[:, 0] for L in (Y, X)]
    for b in range(B):
        image_YXZ, box = image[b].astype(float), []
        for middle_B, L in zip(middle_2B, (Y, X), strict=True):
            half = round(L * side_B[b] / 2)
            box.append(slice(max(0, middle_B[b] - half), max(0, middle_B[b] + half)))
        image_YXZ[*box] = image[b - 1][*box]
        yield image_YXZ, image_YXZ[*box][..., 0].size / (Y * X)


def transform_slowly(image, percent, rng):
    for b, E in enumerate(percent / 100 * rng.uniform(-1, 1, (B, 2, 2))):
        matrix, centre = np.eye(3), np.array([(Y - 1) / 2, (X - 1) / 2, 0])
        matrix[:2, :2] += E
        offset = centre - matrix @ centre
        yield ndimage.affine_transform(image[b].astype(float), matrix, offset, order=1, mode="grid-constant"), 0


def bend_slowly(image, sd, rng):
    grid_2YX = np.meshgrid(np.linspace(0, 2, Y), np.linspace(0, 2, X), indexing="ij")
    for b, d_233 in enumerate(rng.normal(0, sd, (B, 2, 3, 3))):
        source_2YX = np.indices((Y, X)) + [ndimage.map_coordinates(d_33, grid_2YX, order=1) for d_33 in d_233]
        channels = (image[b, ..., z].astype(float) for z in range(2))
        new = [ndimage.map_coordinates(x_YX, source_2YX, order=1, mode="grid-constant") for x_YX in channels]
        yield np.stack(new, axis=-1), 0


SLOW = {"shift": shift_slowly, "flip": flip_slowly, "crop": crop_slowly, "mixup": mix_slowly, "cutmix": paste_slowly}
SLOW |= {"affine": transform_slowly, "elastic": bend_slowly}
AMOUNTS = {
    "shift": st.floats(0.01, 2.9),
    "flip": st.floats(0.01, 1),
    "crop": st.integers(1, X - 1),
    "mixup": st.floats(0.1, 5),
    "cutmix": st.floats(0.1, 5),
    "affine": st.floats(0.1, 99),
    "elastic": st.floats(0.1, 2.9),
}


@pytest.mark.parametrize("kind", augment.KINDS)
@hypothesis.given(st.data(), st.integers(0, 2**32))
@hypothesis.settings(deadline=None, max_examples=10)
def test_a_batch_is_changed_like_single_images_in_a_loop(kind, data, seed):
    image, amount = pixels(), data.draw(AMOUNTS[kind])
    batch = make_examples(image, f"{kind}:{amount}")[0](INDEX_B, np.random.default_rng(seed))
    expected, share_B = zip(*SLOW[kind](image, amount, np.random.default_rng(seed)), strict=True)
    assert batch["image_BYXZ"].dtype == np.float32 and batch["label_B"].tolist() == INDEX_B.tolist()
    np.testing.assert_allclose(batch["image_BYXZ"], expected, atol=1e-3)
    assert ("other_label_B" in batch) == (kind in ("mixup", "cutmix"))
    np.testing.assert_allclose(batch.get("other_share_B", np.zeros(B)), share_B, atol=1e-6)
    assert batch.get("other_label_B", np.roll(INDEX_B, 1)).tolist() == np.roll(INDEX_B, 1).tolist()


def test_changes_share_one_generator_in_their_order_and_evaluation_has_none():
    image = pixels()
    fetch, n = make_examples(image, "flip", "cutmix", "shift:2", mean=4, std=2)
    rng = np.random.default_rng(0)
    expected, _ = augment.flip(image, 0.5, rng)
    expected, other_share_B = augment.cutmix(expected, 1.0, rng)
    expected = augment.move(expected, augment.shift(expected, 2.0, rng))
    batch = fetch(INDEX_B, np.random.default_rng(0))
    np.testing.assert_array_equal(batch["image_BYXZ"], (expected - np.float32(4)) / np.float32(2))
    np.testing.assert_array_equal(batch["other_share_B"], other_share_B)
    evaluation_batch = batches.evaluation(fetch, n=n, batch=4)[0]
    assert evaluation_batch.keys() == {"image_BYXZ", "label_B", "weight_B"}
    np.testing.assert_allclose(evaluation_batch["image_BYXZ"], (image[:4] - 4.0) / 2, atol=1e-6)
    first, equal, different = (batches.train(fetch, n=n, batch=8, seed=seed)[3]["image_BYXZ"] for seed in (1, 1, 2))
    assert np.array_equal(first, equal) and not np.array_equal(first, different)


def test_displacements_that_follow_one_another_are_added_and_interpolated_once():
    image = pixels()
    fetch, _ = make_examples(image, "affine:20", "shift:2", "flip", "elastic:0.5")
    rng = np.random.default_rng(0)
    turned = augment.move(image, augment.affine(image, 20, rng) + augment.shift(image, 2, rng))
    turned, _ = augment.flip(turned, 0.5, rng)
    expected = augment.move(turned, augment.elastic(turned, 0.5, rng))
    np.testing.assert_allclose(fetch(INDEX_B, np.random.default_rng(0))["image_BYXZ"], expected, rtol=1e-6)


DEFAULTS = {"shift": 1, "flip": 0.5, "mixup": 0.2, "cutmix": 1, "affine": 15, "elastic": 0.5}


@pytest.mark.parametrize(("name", "amount"), DEFAULTS.items())
def test_a_change_without_an_amount_has_its_default(name, amount):
    images = (
        make_examples(pixels(), text)[0](INDEX_B, np.random.default_rng(0)) for text in (name, f"{name}:{amount}")
    )
    np.testing.assert_array_equal(*(batch["image_BYXZ"] for batch in images))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["shift:-1"], ["image.augment", "'shift:-1'", 3]),
        (["shift:3"], ["'shift:3'"]),  # nothing of the image would be left
        (["flip", "crop:1.5"], ["'crop:1.5'"]),
        (["flip:2"], ["'flip:2'"]),
        (["cutmix:nan"], ["'cutmix:nan'"]),
        (["crop:"], ["'crop:'"]),
        (["mixup", "cutmix:0.5"], ["mixup", "cutmix:0.5"]),
        (["flop"], ["flop", '"flip"', "shift, flip, crop, mixup, cutmix"]),
        *(([name], [f"'{name}'"]) for name in ("flip:0", "shift:0", "crop:0", "mixup:0", "cutmix:0", "affine:100")),
        (["elastic:3"], ["'elastic:3'", "above 0 and less than a side"]),
        (["flip:often"], ["'flip:often'"]),
        (["no_such_file:blur"], ["no_such_file:blur"]),
        (["test_augment:Y"], ["test_augment:Y", "function"]),
    ],
)
def test_amounts_that_do_not_suit_the_images_are_refused(changes, words):
    with raises(errors.UserError, *words):
        make_examples(pixels(), *changes)


def darken(image_BYXZ, rng):
    return image_BYXZ * rng.uniform(0.5, 1, (len(image_BYXZ), 1, 1, 1))


def lose_a_row(image_BYXZ, rng):
    return image_BYXZ[:, 1:]


def fail(image_BYXZ, rng):
    return image_BYXZ["all"]


def test_a_function_of_the_users_changes_images():
    image = pixels()
    fetch, _ = make_examples(image, "flip", "test_augment:darken")
    rng = np.random.default_rng(0)
    expected = darken(augment.flip(image, 0.5, rng)[0], rng)
    np.testing.assert_allclose(fetch(INDEX_B, np.random.default_rng(0))["image_BYXZ"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    [("lose_a_row", ["returns", (B, Y - 1, X, 2), (B, Y, X, 2)]), ("fail", ["fails", "test_augment.py, line"])],
)
def test_a_function_of_the_users_that_returns_no_images_is_refused(name, words):
    fetch, _ = make_examples(pixels(), f"test_augment:{name}")
    with raises(errors.UserError, "image.augment", f"test_augment:{name}", *words):
        fetch(INDEX_B, np.random.default_rng(0))
