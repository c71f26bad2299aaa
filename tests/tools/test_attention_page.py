"""The tool attention: a page with the weights of all layers and heads, and the table of the heads."""

import base64
import html.parser
import json
import re

import numpy as np
import published
import pytest
import tiny
from PIL import Image

from experiments.data import image_file
from experiments.pretrained import open_model
from experiments.tools import attention

IDS = [5, 3, 22, 8, 5, 3]
PROMPT = " ".join(map(str, IDS))


class Page(html.parser.HTMLParser):
    """The texts of the elements of a page, by tag, and all its attributes. Elements that are not closed fail."""

    def __init__(self, text: str):
        super().__init__()
        self.texts, self.attributes, self.open = {}, [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        self.texts.setdefault(tag, []).append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data


def read_data(text: str) -> tuple[dict, np.ndarray]:
    """Return the data of a page, and its weights A_MHNN."""
    data = json.loads(Page(text).texts["script"][0])
    weights = np.frombuffer(base64.b64decode(data["weights"], validate=True), np.uint8)
    N = len(data["names"])
    return data, data["unit"] * weights.reshape(data["M"], data["H"], N, N)


def check_page(file, A_MHNN: np.ndarray, names: list[str]) -> None:
    """Check that the page has these names, and these weights within its rounding."""
    data, weight_MHNN = read_data(file.read_text(encoding="utf-8"))
    assert data["names"] == names and data["unit"] <= 1 / 255 + 1e-9
    np.testing.assert_allclose(weight_MHNN, A_MHNN, atol=data["unit"] / 2 + 1e-6)
    assert weight_MHNN.max() == pytest.approx(A_MHNN.max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a random GPT-2 of two layers and three heads, without a tokenizer."""
    return published.save(tmp_path_factory.mktemp("gpt2"), "gpt2")


def test_the_page_has_the_weights_and_the_table_their_means(folder, tmp_path):
    file = tmp_path / "new" / "a.html"
    code, out, err = tiny.command(attention, checkpoint=folder, prompt=PROMPT, output=file, workdir=tmp_path / "out")
    assert (code, err) == (0, "") and (tmp_path / "out" / "attention.txt").read_text() == out
    A_MHNN = open_model.open(folder).look(np.array([IDS]), names=("A",))["A"][:, 0]
    check_page(file, A_MHNN, [*map(str, IDS)])
    head, *lines, note = out.splitlines()
    assert head.split() == ["layer", "head", "most", "attended", "previous", "itself", "next", "first", "entropy"]
    assert len(lines) == 6 and note.startswith(f"wrote {file}")
    for line, (m, h) in zip(lines, np.ndindex(2, 3), strict=True):
        A_NN = A_MHNN[m, h].astype(float)
        means = {
            "previous": np.mean([A_NN[n, n - 1] for n in range(1, 6)]),
            "itself": np.mean([A_NN[n, n] for n in range(6)]),
            "next": np.mean([A_NN[n, n + 1] for n in range(5)]),
            "first": np.mean([A_NN[n, 0] for n in range(6)]),
        }
        entropy = -np.mean([sum(a * np.log(a) for a in A_N if a > 0) for A_N in A_NN])
        layer, number, relation, *numbers = line.split()
        assert (layer, number, relation) == (f"{m + 1}", f"{h + 1}", max(means, key=means.get))
        np.testing.assert_allclose([*map(float, numbers)], [*means.values(), entropy], atol=6e-4)
        label = f"{relation} token {means[relation]:.2f}"
        assert read_data(file.read_text())[0]["relations"][3 * m + h] == label


@pytest.mark.parametrize("kind", ["masked", "classes", "tokens", "headless"])
def test_every_model_of_texts_has_a_page_with_its_special_tokens(kind, tmp_path):
    if kind == "masked":
        published.save_bert_with_tokenizer(tmp_path / "bert")
    else:
        published.save_bert_classifier(tmp_path / "bert", of_tokens=kind == "tokens")
    if kind == "headless":
        body = {name: x for name, x in published.tensors("bert").items() if not name.startswith("cls.")}
        published.save(tmp_path / "bert", "bert", body, architectures=["BertModel"])
    model = open_model.open(tmp_path / "bert")
    assert bool(model.facts.get("headless")) == (kind == "headless") and (model.kind == kind or kind == "headless")
    outcome = tiny.command(attention, checkpoint=tmp_path / "bert", prompt="word1 word0", output=tmp_path / "a.html")
    assert (outcome.code, outcome.err) == (0, "")
    A_MHNN = model.look(np.array([[2, 6, 5, 3]]), names=("A",))["A"][:, 0]
    check_page(tmp_path / "a.html", A_MHNN, ["[CLS]", "word1", "word0", "[SEP]"])


@pytest.mark.parametrize("head", ["class_token", "pooled"])
def test_a_classifier_of_images_has_a_page_of_its_patches(head, tmp_path, monkeypatch):
    run = published.write_run(tmp_path / "run", "vision", image__patch=4, image__head=head)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    outcome = tiny.command(attention, checkpoint=run, file=tmp_path / "a.png", output=tmp_path / "a.html")
    assert (outcome.code, outcome.err) == (0, "") and f"{tmp_path / 'a.png'}: 8 x 8 pixels" in outcome.out
    model = open_model.open(run)
    image_BYXZ, _ = image_file.read(tmp_path / "a.png", model.image_format)
    A_MHNN = np.asarray(model.compute(model.params, image_BYXZ, names=("A",), output="features")[1]["A"])[:, 0]
    check_page(tmp_path / "a.html", A_MHNN, ["class"] * (head == "class_token") + ["1,1", "1,2", "2,1", "2,2"])
    assert "Give --file, not --prompt" in tiny.refusal(attention, checkpoint=run, prompt="a")
    monkeypatch.setattr(attention, "MOST", A_MHNN.size - 1)
    error = tiny.refusal(attention, checkpoint=run, file=tmp_path / "a.png")
    assert "Choose a model with fewer patches" in error and "--prompt" not in error
    assert "--file is missing" in tiny.refusal(attention, checkpoint=run)


def test_texts_are_escaped_and_the_page_loads_nothing():
    names = ["</script><script>alert(1)</script>", "<b>&amp;", "\"'\\", "\x00\u2028", "漢"]
    A_MHNN = np.full((1, 2, 5, 5), 0.2, np.float32)
    text = attention.render("<i>run</i> & \x1b", A_MHNN, names, attention.measure(A_MHNN))
    page = Page(text)
    assert len(page.texts["script"]) == 2 and not {"b", "i", "img", "link"} & page.texts.keys()
    assert page.texts["h1"] == ["Attention of <i>run</i> & \N{REPLACEMENT CHARACTER}"]
    assert read_data(text)[0]["names"] == names
    assert not {"src", "href", "onload"} & {name for name, _ in page.attributes} and "innerHTML" not in text
    assert not re.search(r"https?:|url\(|@import|import\(|fetch|XMLHttp|WebSocket|importScripts|sendBeacon", text)
    assert any("default-src 'none'" in (value or "") for _, value in page.attributes)


def test_the_page_has_each_element_that_its_script_asks_for_once():
    A_MHNN = np.full((1, 2, 3, 3), 0.2, np.float32)
    page = Page(attention.render("a", A_MHNN, ["a", "b", "c"], attention.measure(A_MHNN)))
    ids = [value for name, value in page.attributes if name == "id"]
    wanted = {*re.findall(r'(?:find|getElementById|addTokens)\("(\w+)"\)', page.texts["script"][1])}
    assert {"data", "layer", "head", "reading", "from", "to", "heads"} <= wanted <= {*ids} and len(ids) == len({*ids})


def test_weights_above_one_and_below_zero_fit_into_bytes():
    A_MHNN = np.array([[[[3.0, -1.0], [0.5, 2.0]]]], np.float32)  # as functions of the user's may return
    data, weight_MHNN = read_data(attention.render("a", A_MHNN, ["a", "b"], attention.measure(A_MHNN)))
    assert data["unit"] == pytest.approx(3 / 255)
    np.testing.assert_allclose(weight_MHNN, np.maximum(A_MHNN, 0), atol=data["unit"] / 2 + 1e-6)


def test_one_token_has_no_neighbours(folder):
    code, out, err = tiny.command(attention, checkpoint=folder, prompt="5")
    assert (code, err) == (0, "") and "previous" not in out and "next" not in out
    assert [line.split()[2:] for line in out.splitlines()[1:]] == [["itself", "1.000", "1.000", "0.000"]] * 6


def test_invalid_flags_and_pages_that_are_too_large_are_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "old.html").touch()
    values = dict(checkpoint=folder, prompt=PROMPT)
    assert "exists already" in tiny.refusal(attention, **values, output=tmp_path / "old.html")
    assert "ends in .html" in tiny.refusal(attention, **values, output=tmp_path / "a.txt")
    assert "Give --prompt, not --file" in tiny.refusal(attention, **values, file=tmp_path / "a.png")
    assert "--prompt is missing" in tiny.refusal(attention, checkpoint=folder)
    monkeypatch.setattr(attention, "MOST", 2 * 3 * 6 * 6 - 1)
    error = tiny.refusal(attention, **values)
    assert "2 layers, 3 heads and 6 tokens" in error and "216 weights" in error and "--prompt" in error
    monkeypatch.setattr(attention, "MOST", 2 * 3 * 6 * 6)
    assert tiny.command(attention, **values).code == 0


def test_another_kind_of_model_is_refused(tmp_path):
    run = published.write_run(tmp_path / "run", "masked_image", image__patch=4)
    assert "predicts masked patches" in tiny.refusal(attention, checkpoint=run, prompt="a")
