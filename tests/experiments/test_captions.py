"""Images and names in one sequence: tokens against the reference, the mask, names written letter by letter."""

import cases
import jax
import numpy as np
import pytest
import reference
import tiny
import translate
from errors import raises

from experiments import captions
from experiments.engine import errors, mesh
from tfm import embed

SMALL = {"image__patch": 4, "model__M": 1, "model__norm": "rms", "model__mlp": "relu", "model__attention": "explicit"}


@cases.float64()
def test_patches_and_then_letters_are_the_tokens_of_the_reference():
    image_BYXZ, w_BN = cases.normal(1, 2, 4, 6, 3), np.array([[3, 0, 2], [1, 1, 4]])
    params = cases.drawn(lambda key: embed.mixed.init(key, P=12, W=5, D=7))
    x_BND = embed.mixed.apply(params, {"v_BNP": embed.cut(image_BYXZ, size=2), "w_BN": w_BN})
    for b in range(2):
        X = reference.patch_tokens(np.asarray(image_BYXZ[b]), np.asarray(params["W_DP"]), 2)
        X = reference.total(X, np.tile(np.asarray(params["b_D"])[:, None], (1, 6)))
        words = reference.embedded(reference.one_hot(w_BN[b], 5), np.asarray(params["E_WD"]))
        cases.close(x_BND[b], np.concatenate([translate.columns(X), words]))


def test_names_are_spelled_and_their_ends_are_targets():
    letters, w_CL = captions.spell(["ab", "7", "b"])
    assert letters == "\nabensv"
    assert ["".join(letters[w] for w in w_L) for w_L in w_CL] == ["ab\n\n\n\n", "seven\n", "b\n\n\n\n\n"]

    def fetch(index_B, rng):
        return {"image_BYXZ": np.zeros((3, 4, 4, 1)), "label_B": index_B, "weight_B": np.ones(3)}

    batch = captions.add_captions(fetch, w_CL, 2)(np.arange(3), None)
    np.testing.assert_array_equal(batch["weight_BN"].sum(1), [3, 6, 2])
    np.testing.assert_array_equal(batch["target_BN"][:, 1:], w_CL)
    assert not batch["weight_BN"][:, 0].any() and batch["w_BL"].shape == (3, 5)


def test_a_letter_sees_the_image_and_earlier_letters_and_the_most_likely_is_written(tmp_path):
    work, (_, numbers), _ = tiny.shown(tiny.settings("captions", **SMALL), tmp_path, [])
    params, batch = tiny.drawn(work.task), {name: x[:3] for name, x in work.task.evaluation[0].items()}
    run, written_BL = jax.jit(work.apply), np.asarray(work.figures.args[3](params, batch["image_BYXZ"]))
    batch = batch | {"w_BL": written_BL[:, :-1]}
    first = np.asarray(run(params, batch))
    np.testing.assert_array_equal(first[:, 3:].argmax(-1), written_BL)  # the last of four patches predicts, too
    other = np.asarray(run(params, batch | {"w_BL": batch["w_BL"].copy() ^ (np.arange(5) >= 2)}))
    np.testing.assert_array_equal((first != other).any((0, 2)), np.arange(9) >= 4 + 2)
    other = np.asarray(run(params, batch | {"image_BYXZ": batch["image_BYXZ"] * (np.arange(8) < 4)[:, None]}))
    assert (first != other).any(2).all()  # patches see later patches
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
def test_settings_that_captions_cannot_have_are_refused(changes, devices, setting):
    with raises(errors.UserError, setting):
        work = tiny.work_of(tiny.settings("captions", **SMALL | changes), mesh.make(data=1, **devices))
        work.task.train[0]
