"""The tool symmetry: symmetry and directionality of a model's layers."""

import jax
import numpy as np
import published
import pytest
import reference_symmetry as reference
import tiny
from errors import raises

from experiments.config import errors
from experiments.model import build, probe
from experiments.pretrained import open_model
from experiments.tools import symmetry as symmetry_tool
from tfm import symmetry


def measure_by_reference(score: dict, m: int) -> list[float]:
    """Return s (mean over heads, median, s of the sum) and d of layer m by the reference."""
    Uq_HKD, Uk_GKD = score["Uq_HKD"][m], score["Uk_HKD" if "Uk_HKD" in score else "Uk_GKD"][m]
    Uk_HKD = np.repeat(Uk_GKD, len(Uq_HKD) // len(Uk_GKD), 0)
    Uq_HDK, Uk_HDK = (np.swapaxes(np.asarray(U_HKD, np.float64), 1, 2) for U_HKD in (Uq_HKD, Uk_HKD))
    s_H = [reference.symmetry(reference.form([q], [k])) for q, k in zip(Uq_HDK, Uk_HDK, strict=True)]
    M_DD = reference.form(Uq_HDK, Uk_HDK)
    return [np.mean(s_H), np.median(s_H), reference.symmetry(M_DD), reference.directionality(M_DD)]


def check_table(checkpoint, out: str) -> None:
    """Check the numbers of each line against the reference, and the last line against their median."""
    head, *lines = out.splitlines()
    assert head.split()[0] == "layer" and len(set(map(len, [head, *lines]))) == 1
    table = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in lines}
    score = open_model.open(checkpoint).params["blocks"]["score"]
    expected = np.array([measure_by_reference(score, m) for m in range(len(score["Uq_HKD"]))])
    assert list(table) == [*(str(m + 1) for m in range(len(expected))), "median"]
    np.testing.assert_allclose([*table.values()], [*expected, np.median(expected, axis=0)], atol=6e-4)


def test_the_table_of_a_run_equals_the_reference(tmp_path, monkeypatch):
    folder = published.write_run(tmp_path / "run", "vision", image__patch=4)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    check_table(folder, tiny.command(symmetry_tool, checkpoint=folder).out)
    assert not any((tmp_path / "empty").iterdir())  # nothing is written
    outcome = tiny.command(symmetry_tool, workdir=tmp_path / "out", checkpoint=folder)
    assert (outcome.code, outcome.err) == (0, "") and (tmp_path / "out" / "symmetry.txt").read_text() == outcome.out
    with raises(errors.UserError, "model.score", "constant"):
        symmetry_tool.run(published.copy_with_changes(folder, tmp_path / "a", model__score="constant"))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_table_of_a_published_model_equals_the_reference(family, tmp_path):
    folder = published.save(tmp_path, family)
    check_table(folder, tiny.command(symmetry_tool, checkpoint=folder).out)


def test_medians_exclude_layers_without_a_form():
    s_MH = np.array([[np.nan, 0.25, 0.75], [np.nan] * 3])
    layer = symmetry.Layer(s_MH, np.array([0.5, np.nan]), np.array([-0.5, 0.0]))
    assert symmetry_tool.tabulate({"encoder/": layer}).rows == [
        ["encoder/1", "0.500", "0.500", "0.500", "-0.500"],
        ["encoder/2", "nan", "nan", "nan", "0.000"],
        ["encoder/median", "0.500", "0.500", "0.500", "-0.250"],
    ]


def test_both_sides_of_an_encoder_decoder_have_measures():
    def build_probe(**changes):
        m = tiny.settings("language", **{f"model__{name}": value for name, value in changes.items()}).model
        return probe.symmetry_metrics(m), m

    measure, m = build_probe(K=5, score="tied")
    tree = jax.eval_shape(build.encoder_decoder(m, W=11, N=3, tied_output=True).init, jax.random.key(0))
    names = ("symmetry", "symmetry_sum", "directionality")
    sides = {f"{name}/{side}/{i}" for name in names for side in ("encoder", "decoder") for i in "12"}
    measures = jax.eval_shape(measure, tree)
    assert set(measures) == sides and all(x.shape == () for x in measures.values())
    assert build_probe(score="constant")[0] is None
