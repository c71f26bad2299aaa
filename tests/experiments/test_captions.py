"""Captions: patches and letters in one sequence, the mask, and names that are written letter by letter."""

import cases
import jax
import numpy as np
import pytest
import reference
import tiny
import translate
from errors import raises

from experiments import captions
from experiments.config import errors
from experiments.devices import mesh as meshes
from tfm import embed as embeds

SMALL = {"image__patch": 4, "model__M": 1, "model__norm": "rms", "model__mlp": "relu", "model__attention": "explicit"}


@cases.float64()
def test_patches_and_then_letters_are_the_tokens_of_the_reference():
    image_BYXZ, w_BN = np.asarray(cases.normal(1, 2, 4, 6, 3)), np.array([[3, 0, 2], [1, 1, 4]])
    params = jax.device_get(cases.draw_params(lambda key: embeds.mixed.init(key, P=12, W=5, D=7)))
    embed = jax.jit(lambda params: embeds.mixed.apply(params, {"v_BNP": embeds.cut(image_BYXZ, size=2), "w_BN": w_BN}))
    x_BND = np.asarray(embed(params))
    for b in range(2):
        X = reference.patch_tokens(image_BYXZ[b], params["W_DP"], 2)
        X = reference.total(X, np.tile(params["b_D"][:, None], (1, 6)))
        words = reference.embedded(reference.one_hot(w_BN[b], 5), params["E_WD"])
        cases.assert_close(x_BND[b], np.concatenate([translate.columns(X), words]))


def test_names_of_classes_become_letters_and_their_ends_are_targets():
    letters, w_CL = captions.spell(["ab", "7", "b"])
    assert letters == "\nabensv"
    assert ["".join(letters[w] for w in w_L) for w_L in w_CL] == ["ab\n\n\n\n", "seven\n", "b\n\n\n\n\n"]

    def fetch(index_B, rng):
        return {"v_BNP": np.zeros((3, 2, 8)), "label_B": index_B, "weight_B": np.ones(3)}

    batch = captions.add_captions(fetch, w_CL, 2)(np.arange(3), None)
    np.testing.assert_array_equal(batch["weight_BN"].sum(1), [3, 6, 2])
    np.testing.assert_array_equal(batch["target_BN"][:, 1:], w_CL)
    assert not batch["weight_BN"][:, 0].any() and batch["w_BL"].shape == (3, 5)


def test_letters_attend_to_the_image_and_earlier_letters_and_captions_have_the_most_likely_ones(tmp_path):
    work, (_, numbers), _ = tiny.make_figures(tiny.settings("captions", **SMALL), tmp_path, [])
    params, batch = tiny.draw_params(work.task), {name: x[:3] for name, x in work.task.evaluation[0].items()}
    apply, written_BL = (
        jax.jit(work.apply),
        np.asarray(captions.make_writer(work.apply, 4, 6)(params, batch["v_BSP"])),
    )
    batch = batch | {"w_BL": written_BL[:, :-1]}
    first = np.asarray(apply(params, batch))
    # The last of four patches predicts the first letter.
    np.testing.assert_array_equal(first[:, 3:].argmax(-1), written_BL)
    changed_BNW = np.asarray(apply(params, batch | {"w_BL": batch["w_BL"].copy() ^ (np.arange(5) >= 2)}))
    np.testing.assert_array_equal((first != changed_BNW).any((0, 2)), np.arange(9) >= 4 + 2)
    changed_BNW = np.asarray(apply(params, batch | {"v_BSP": batch["v_BSP"] * (np.arange(4) < 2)[:, None]}))
    assert (first != changed_BNW).any(2).all()  # patches attend to later patches
    lines = (tmp_path / "captions.txt").read_text().splitlines()
    assert len(lines) == 1 + captions.SHOWN and {line.partition(": ")[0] for line in lines[1:]} <= {*captions.DIGITS}
    assert 0 <= numbers["eval/names_right"] < 0.5


@pytest.mark.parametrize(
    ("changes", "devices", "setting"),
    [
        ({"image__augment": ["mixup"]}, {}, "image.augment"),
        ({"model__norm": "instance"}, {}, "model.norm = instance"),
        ({}, {"sequence": 2}, "mesh.sequence"),
    ],
)
def test_settings_that_captions_do_not_support_are_refused(changes, devices, setting):
    with raises(errors.UserError, setting):
        work = tiny.work_of(tiny.settings("captions", **SMALL | changes), meshes.make(data=1, **devices))
        work.task.train[0]
