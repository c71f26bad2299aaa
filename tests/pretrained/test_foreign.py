"""A parameter tree of another project is imported as a run that every tool can open."""

import contextlib
import io

import jax
import numpy as np
import pytest
import tiny
import tokenizers
from errors import raises
from PIL import Image

from configs import base
from experiments.engine import errors
from experiments.pretrained import foreign, hub, open_model
from experiments.tools import classify, export, sample, translate
from tfm import shapes

LLAMA = {"model.norm": "rms", "model.mlp": "swiglu", "model.position": "none", "model.bias": "none"}
LLAMA |= {"model.relative_position": "rotary_halves", "model.H": 6, "model.G": 2, "model.K": 4, "model.D": 18}
QUERIES = "blocks/score/Uq_HKD"
CASES = {  # {experiment: (settings, mapping from foreign arrays, with numbered or stacked layers, to our paths)}
    "language": (
        LLAMA | {"text.N": 13, "model.M": 2, "model.F": 19},
        {"h.{m}.q": ("D HK", QUERIES), "up": ("M D F", "blocks/mlp/W1_FD"), "words": ("D W", "embed/E_WD")},
    ),
    "vision": (
        {"model.M": 2, "model.D": 8, "model.H": 2, "model.K": 3, "image.patch": 4, "image.head": "class_token"},
        {"conv": ("D Z Y X", "embed/W_DP"), "token": ("1 1 D", "class/c_D")},
    ),
}


def import_tree(folder, experiment: str, mapping, arrays, **changes):
    config = base.get_config(experiment)
    config.update_from_flattened_dict((CASES[experiment][0] if experiment in CASES else {}) | changes)
    with contextlib.redirect_stdout(io.StringIO()):
        return foreign.import_tree(mapping, arrays, config, folder)


def draw(experiment: str, **changes) -> dict:
    """Draw parameters of an experiment. Return {path: array}."""
    task = tiny.task_of(tiny.settings(experiment, model=False, **changes))
    return shapes.flat(jax.device_get(tiny.draw_params(task)))


def to_foreign(experiment: str, flat: dict) -> dict:
    """Convert our arrays by hand to the foreign layout that the mapping above describes."""
    flat = dict(flat)
    if experiment == "language":
        q, up, words = (flat.pop(path) for path in (QUERIES, "blocks/mlp/W1_FD", "embed/E_WD"))
        flat |= {f"h.{m}.q": q[m].reshape(-1, 18).T for m in range(2)}
        return flat | {"up": up.swapaxes(1, 2), "words": words.T}
    kernel = flat.pop("embed/W_DP").reshape(8, 4, 4, 1).transpose(0, 3, 1, 2)
    return flat | {"conv": kernel, "token": flat.pop("class/c_D")[None, None]}


@pytest.fixture(scope="module", params=CASES)
def foreign_run(request, tmp_path_factory):
    """Import a foreign tree. Return (experiment, folder, our arrays)."""
    experiment, folder = request.param, tmp_path_factory.mktemp("runs") / "theirs"
    flat = draw(experiment, **CASES[experiment][0])
    import_tree(folder, experiment, CASES[experiment][1], to_foreign(experiment, flat))
    return experiment, folder, flat


def test_an_imported_tree_is_a_run_for_every_tool(foreign_run, tmp_path):
    experiment, folder, flat = foreign_run
    params = open_model.open(folder).params
    assert shapes.flat(params).keys() == flat.keys()
    for path, leaf in shapes.flat(params).items():
        np.testing.assert_array_equal(leaf, flat[path], err_msg=path)
    if experiment == "vision":
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "digit.png")
        assert tiny.command(classify, checkpoint=folder, file=tmp_path / "digit.png").code == 0
        return
    assert tiny.command(sample, checkpoint=folder, prompt="a", max_new_tokens=1).code == 0
    export.run(folder, family="llama", workdir=tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, hub.read(tmp_path / "out").params, params)


def test_arrays_that_do_not_fit_are_listed_and_nothing_is_written(foreign_run, tmp_path):
    experiment, folder, flat = foreign_run
    mapping, arrays, new = CASES[experiment][1], to_foreign(experiment, flat), tmp_path / "new"
    name = next(iter(mapping)).format(m=1)
    for entries, changes, parts in (
        ({}, {"more": np.zeros(3)}, ["more (3,) is left over"]),
        ({}, {name: None}, [name, "missing"]),
        ({}, {name: np.zeros((5, 7))}, [name, "(5, 7)"]),
        ({}, {name: "a text"}, ["a text"]),
        ({}, {"norm/gain_D": np.zeros(5)}, ["norm/gain_D", "(5,)"]),
        ({}, {"blocks/norm1/gain_D": None}, ["blocks/norm1/gain_D", "missing"]),
        ({"odd": ("D", "blocks/norm/gain_D")}, {"odd": arrays["norm/gain_D"]}, ["blocks/norm/gain_D"]),
        ({name: ("H Q", "norm/gain_D")}, {}, ["Q"]),
    ):
        changed_arrays = {key: array for key, array in (arrays | changes).items() if array is not None}
        with raises(errors.UserError, new, *parts):
            import_tree(new, experiment, mapping | entries, changed_arrays)
    assert not new.exists()
    with raises(errors.UserError, folder):
        import_tree(folder, experiment, mapping, arrays)


def test_an_encoder_decoder_may_have_an_output_bias(tmp_path):
    pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')
    (tmp_path / "pairs.tsv").write_text("".join(f"word {i}\tpalabra {i * i}\n" for i in range(400)))
    changes = {"pairs.source": str(tmp_path / "pairs.tsv"), "pairs.vocabulary": 270, "pairs.N": 7}
    changes |= {"model.M": 1, "model.D": 8, "model.H": 2}
    arrays = draw("translation", **changes)
    content = tiny.work_of(tiny.settings("translation", model=False, **changes)).files["tokenizer.json"]
    (letter,) = tokenizers.Tokenizer.from_str(content.decode()).encode("x").ids
    # The model writes only x.
    bias_W = np.where(np.arange(len(arrays["embed/E_WD"])) == letter, 1e4, 0.0).astype(np.float32)
    mapping = {"final_logits_bias": ("1 W", "head/b_W")}
    arrays["final_logits_bias"] = bias_W[None]
    import_tree(tmp_path / "run", "translation", mapping, arrays, **changes)
    (tmp_path / "text").write_text("word\n")
    np.testing.assert_array_equal(open_model.open(tmp_path / "run").params["head"]["b_W"], bias_W)
    outcome = tiny.command(translate, checkpoint=tmp_path / "run", file=tmp_path / "text")
    assert (outcome.err, outcome.out.strip()) == ("", "x" * 7)
