"""The tool lens: the tokens that a language model would predict after each layer."""

import csv
import functools

import numpy as np
import published
import pytest
import tiny
from matplotlib import image
from scipy.special import softmax

from experiments.figures import inside as figures
from experiments.pretrained import open_model
from experiments.tools import lens
from tfm import inside

IDS = [5, 3, 22, 8, 5, 3]
PROMPT = " ".join(map(str, IDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a random GPT-2 of two layers, without a tokenizer."""
    return published.save(tmp_path_factory.mktemp("gpt2"), "gpt2")


def read_csv(file) -> list[dict]:
    with open(file, encoding="utf-8", newline="") as content:
        return [*csv.DictReader(content)]


def read_directly(model, id_N: np.ndarray, *, jacobian: bool = False) -> np.ndarray:
    """Return the probabilities p_MNW after each layer."""
    run = functools.partial(model.run, id_N[None])
    hidden = run(look=("hidden",))[1]["hidden"]
    return softmax((inside.jacobian_lens if jacobian else inside.logit_lens)(run, hidden)[:, 0], axis=-1)


@pytest.mark.parametrize("jacobian", [False, True])
def test_a_row_has_the_top_tokens_and_the_rank_of_the_next_one(folder, jacobian, tmp_path):
    values = dict(checkpoint=folder, prompt=PROMPT, jacobian=jacobian)
    code, out, err = tiny.command(lens, **values, output=tmp_path / "a.csv", workdir=tmp_path / "out")
    assert (code, err) == (0, "") and (tmp_path / "out" / "lens.txt").read_text() == out
    model, rows = open_model.open(folder), read_csv(tmp_path / "a.csv")
    p_MNW = read_directly(model, np.array(IDS), jacobian=jacobian)
    if not jacobian:  # after the last layer, the lens is the model
        np.testing.assert_allclose(p_MNW[-1], softmax(model(np.array([IDS]))[0], axis=-1), atol=1e-6)
    assert [(row["layer"], row["position"]) for row in rows] == [(f"{m}", f"{n}") for m in "12" for n in range(1, 7)]
    ranks_MN, right_MN = np.zeros((2, 5)), np.zeros((2, 5))
    for row in rows:
        m, n = int(row["layer"]) - 1, int(row["position"]) - 1
        p_W = p_MNW[m, n]
        order = [row[f"top_{r}"] for r in range(1, 6)]
        assert row["token"] == str(IDS[n]) and order == [str(w) for w in np.argsort(-p_W)[:5]]
        np.testing.assert_allclose([float(row[f"p_{r}"]) for r in range(1, 6)], np.sort(p_W)[:-6:-1], rtol=1e-4)
        if n == 5:
            assert (row["right_token"], row["rank"], row["probability"]) == ("", "", "")
            continue
        assert row["right_token"] == str(IDS[n + 1])
        ranks_MN[m, n] = 1 + sum(p_W > p_W[IDS[n + 1]])
        right_MN[m, n] = p_W[IDS[n + 1]]
        assert float(row["rank"]) == ranks_MN[m, n]
        assert float(row["probability"]) == pytest.approx(right_MN[m, n], rel=1e-4)
    assert len(np.unique(ranks_MN)) > 3
    name, _, *table, note = out.splitlines()
    assert name.startswith("Jacobian lens" if jacobian else "logit lens") and note.startswith("wrote 12 rows")
    for m, line in enumerate(table):
        layer, rank, p, *tops = line.split()
        assert (layer, rank, p) == (f"{m + 1}", f"{ranks_MN[m].mean():.1f}", f"{right_MN[m].mean():.4f}")
        assert tops[::2] == [f"'{w}'" for w in np.argsort(-p_MNW[m, -1])[:5]]
        assert tops[1::2] == [f"{p:.3f}" for p in np.sort(p_MNW[m, -1])[:-6:-1]]


def test_a_masked_model_is_right_if_it_predicts_the_token_itself(tmp_path):
    published.save_bert_with_tokenizer(tmp_path / "bert")
    prompt, names = "word1 [MASK] word2", ["[CLS]", "word1", "[MASK]", "word2", "[SEP]"]
    code, out, err = tiny.command(lens, checkpoint=tmp_path / "bert", prompt=prompt, output=tmp_path / "a.csv")
    rows, p_MNW = (
        read_csv(tmp_path / "a.csv"),
        read_directly(open_model.open(tmp_path / "bert"), np.array([2, 6, 4, 7, 3])),
    )
    assert (code, err) == (0, "") and "the token itself" in out and "top at 3, '[MASK]'" in out
    assert [row["token"] for row in rows] == names * 2
    assert [row["right_token"] for row in rows] == [*names[:2], "", *names[3:]] * 2
    assert [float(row["probability"]) for row in rows[5:7]] == pytest.approx([p_MNW[1, 0, 2], p_MNW[1, 1, 6]], rel=1e-4)
    assert rows[2]["rank"] == ""


def test_the_figure_is_of_the_right_tokens(folder, tmp_path, monkeypatch):
    drawn, model = {}, open_model.open(folder)
    ids = [5, 3, int(model(np.array([[5, 3]]))[0, 1].argmax()), 8]  # the model predicts the third
    names = [*map(str, ids)]
    monkeypatch.setattr(figures, "lens", lambda path, **arrays: drawn.update(arrays) or path)
    assert tiny.command(lens, checkpoint=folder, prompt=" ".join(names), figure=tmp_path / "a.svg").code == 0
    p_MNW = read_directly(model, np.array(ids))
    np.testing.assert_allclose(drawn["p_MN"][:, :3], p_MNW[:, np.arange(3), ids[1:]], rtol=1e-4)
    assert np.isnan(drawn["p_MN"][:, 3]).all() and not drawn["is_right_MN"][:, 3].any()
    np.testing.assert_array_equal(drawn["is_right_MN"][:, :3], p_MNW.argmax(-1)[:, :3] == ids[1:])
    assert drawn["is_right_MN"][1, 1] and drawn["top_MN"].tolist() == p_MNW.argmax(-1).astype(str).tolist()
    assert (drawn["tokens"], drawn["right"]) == (names, [*names[1:], ""])


def test_the_figure_is_written(folder, tmp_path):
    outcome = tiny.command(lens, checkpoint=folder, prompt=PROMPT, figure=tmp_path / "new" / "lens.png")
    assert outcome.code == 0 and outcome.out.endswith(f"wrote {tmp_path / 'new' / 'lens.png'}\n")
    assert image.imread(tmp_path / "new" / "lens.png").std() > 0.01


def test_a_prompt_of_one_token_has_no_right_token(folder):
    code, out, err = tiny.command(lens, checkpoint=folder, prompt="5")
    assert (code, err) == (0, "") and "mean rank" not in out and "top at 1, '5'" in out


def test_files_that_exist_or_have_another_suffix_are_refused(folder, tmp_path):
    (tmp_path / "old.png").touch()
    values = dict(checkpoint=folder, prompt=PROMPT)
    assert "exists already" in tiny.refusal(lens, **values, figure=tmp_path / "old.png")
    for name in ("a.txt", "a"):
        error = tiny.refusal(lens, **values, figure=tmp_path / name)
        assert f"--figure = {tmp_path / name}" in error and ".png" in error
    assert "--output" in tiny.refusal(lens, **values, output=tmp_path / "a.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["old.png"]


def test_another_kind_of_model_and_too_much_memory_are_refused(folder, tmp_path, monkeypatch):
    published.save(tmp_path / "vit", "vit")
    assert "classifies images" in tiny.refusal(lens, checkpoint=tmp_path / "vit", prompt=PROMPT)
    assert "--prompt is missing" in tiny.refusal(lens, checkpoint=folder)
    needed = 3 * 4 * published.M * len(IDS) * published.W
    monkeypatch.setattr(lens.disk, "host_memory", lambda: needed - 1)
    assert "Shorten the --prompt" in tiny.refusal(lens, checkpoint=folder, prompt=PROMPT)
    monkeypatch.setattr(lens.disk, "host_memory", lambda: needed)
    assert tiny.command(lens, checkpoint=folder, prompt=PROMPT).code == 0
