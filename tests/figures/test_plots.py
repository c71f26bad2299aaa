"""The figures: whole PNGs, every word inside and clear of the others, and what they show is what was given."""

import itertools

import numpy as np
import pytest
from matplotlib import colors, figure, image, text
from sklearn import datasets

from experiments.figures import plots

DIGITS = [str(c) for c in range(10)]
CLOTHES = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boots-and-more-boots".split()


@pytest.fixture
def words(monkeypatch):
    """Every word of the last figure with the box it was drawn in (pixels), and the box of the figure."""
    seen, draw = {}, text.Text.draw

    def record(self, renderer):
        draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            seen[self] = self.get_window_extent(renderer).frozen(), self.get_figure().bbox.frozen()

    monkeypatch.setattr(text.Text, "draw", record)
    return seen


@pytest.fixture
def drawings(monkeypatch):
    """The figures as they were handed over for writing."""
    handed, write = [], plots.write
    monkeypatch.setattr(plots, "write", lambda drawing, path: (handed.append(drawing), write(drawing, path)))
    return handed


def attention(M, H, N, S, *, causal=False):
    l_MHNS = 2 * np.random.default_rng(M * H * N * S).normal(size=(M, H, N, S))
    A_MHNS = np.exp(l_MHNS) * (np.tri(N, S, S - N) if causal else 1)
    return A_MHNS / A_MHNS.sum(-1, keepdims=True)


def curves(path, *, train, evaluation, title="vit"):
    plots.loss_curves(path, train=train, evaluation=evaluation, ylabel="loss (nats per token)", title=title)


def predictions(path, *, B, wrong=(), classes=DIGITS, Z=1):
    digits = datasets.load_digits()
    label_B, predicted_B = digits.target[:B], digits.target[:B].copy()
    predicted_B[list(wrong)] = (predicted_B[list(wrong)] + 1) % 10
    plots.predictions(
        path,
        image_BYXZ=np.repeat(digits.images[:B, ..., None], Z, -1),
        label_B=label_B,
        predicted_B=predicted_B,
        probability_B=np.full(B, 0.973),
        classes=classes,
        title=f"{len(wrong)} of {B} wrong",
    )


def confusion(path, *, C, classes):
    plots.confusion(path, count_CC=np.arange(C * C).reshape(C, C) ** 2 + 7**5 * np.eye(C, dtype=int), classes=classes)


def maps(path, *, M, H, class_token, Z=1):
    A_MHNS = attention(M, H, 6 + class_token, 6 + class_token)
    picture = np.random.default_rng(0).integers(0, 256, (10, 15, Z))
    plots.attention_maps(path, image_YXZ=picture, A_MHNS=A_MHNS, grid=(2, 3), class_token=class_token)


def matrices(path, *, M, H, N, tokens):
    plots.attention_matrices(path, A_MHNS=attention(M, H, N, len(tokens), causal=True), tokens=tokens)


FALLING = {step: 3 * 0.99**step + 0.01 * (step % 3) for step in range(0, 700, 7)}
DRAWN = {
    "curves": lambda p: curves(p, train=FALLING, evaluation={200: 0.9, 400: 0.5}),
    "curves, one evaluation": lambda p: curves(p, train={}, evaluation={11: 2.5}),
    "curves, flat, short": lambda p: curves(p, train={3: 2.0, 5: 2.0}, evaluation={5: 2.0}),
    "curves, nothing": lambda p: curves(p, train={}, evaluation={}),
    "curves, wide": lambda p: curves(p, train={n: 10.0**-n for n in range(9)}, evaluation={}),
    "curves, a decade and a bit": lambda p: curves(p, train={1: 1.0, 2: 0.09}, evaluation={}),
    "curves, long title": lambda p: curves(p, train=FALLING, evaluation={}, title="a title of many words " * 8),
    "curves, dollars": lambda p: curves(p, train=FALLING, evaluation={}, title=r"$\nosuch$"),
    "predictions": lambda p: predictions(p, B=53, wrong=[3, 11], classes=CLOTHES),
    "predictions, one, colour": lambda p: predictions(p, B=1, wrong=[0], classes=CLOTHES, Z=3),
    "predictions, eleven": lambda p: predictions(p, B=11, classes=["$x^2$"] * 10),
    "confusion": lambda p: confusion(p, C=10, classes=CLOTHES),
    "confusion, one": lambda p: confusion(p, C=1, classes=["only"]),
    "confusion, twenty": lambda p: confusion(p, C=20, classes=[f"category {c}" for c in range(20)]),
    "confusion, many": lambda p: confusion(p, C=61, classes=[f"category {c}" for c in range(61)]),
    "maps": lambda p: maps(p, M=4, H=4, class_token=True),
    "maps, one": lambda p: maps(p, M=1, H=1, class_token=False, Z=3),
    "maps, one layer": lambda p: maps(p, M=1, H=13, class_token=True),
    "maps, one head": lambda p: maps(p, M=13, H=1, class_token=True),
    "matrices": lambda p: matrices(p, M=2, H=3, N=5, tokens=["The", " permutation-equivariant", "\n", "漢", "\t", "$"]),
    "matrices, letters": lambda p: matrices(p, M=2, H=2, N=29, tokens=list("it costs $5\nand $7 for both, ")),
    "matrices, one": lambda p: matrices(p, M=1, H=1, N=1, tokens=["a"]),
    "matrices, cut": lambda p: matrices(p, M=1, H=9, N=37, tokens=["word"] * 37),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_png_is_whole_and_every_word_lies_inside_and_free(draw, words, tmp_path):
    path = tmp_path / "made" / "here.png"
    draw(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content[-8:-4] == b"IEND"
    assert image.imread(path)[..., :3].std() > 0.01
    assert [p.name for p in path.parent.iterdir()] == ["here.png"]
    assert words
    for word, (box, whole) in words.items():
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
        assert inside, f"{word.get_text()!r} at {box} is cut off by {whole}"
    for (word, (a, _)), (other, (b, _)) in itertools.combinations(words.items(), 2):
        over = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(over) < 1, f"{word.get_text()!r} lies over {other.get_text()!r}"


def said(drawing):
    return [t.get_text() for t in drawing.findobj(text.Text)]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path):
    path = tmp_path / "curves.png"
    path.write_bytes(b"old")

    def full_disk(self, target, **_):
        target.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(figure.Figure, "savefig", full_disk)
    with pytest.raises(OSError, match="no space left"):
        curves(path, train=FALLING, evaluation={})
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"] and path.read_bytes() == b"old"


def test_curves_show_the_points_in_order_and_leave_out_what_is_not_finite(drawings, tmp_path):
    train = {5: 2.0, 3: 4.0, 7: float("nan"), 9: float("inf")}
    curves(tmp_path / "a.png", train=train, evaluation={8: 3.0, 9: -float("inf")})
    training, evaluation = drawings[0].axes[0].lines
    assert training.get_xydata().tolist() == [[3, 4], [5, 2]] and evaluation.get_xydata().tolist() == [[8, 3]]
    assert drawings[0].axes[0].get_title() == "vit (3 values not finite)"


@pytest.mark.parametrize(("low", "scale"), [(1.1, "linear"), (0.9, "log"), (0.0, "linear"), (-1.0, "linear")])
def test_curves_are_logarithmic_beyond_one_decade_of_positive_values(low, scale, drawings, tmp_path):
    curves(tmp_path / "a.png", train={1: 10.0}, evaluation={1: low})
    assert drawings[0].axes[0].get_yscale() == scale


def test_smoothed_curve_is_the_centred_mean(drawings, tmp_path):
    value_I = np.random.default_rng(0).uniform(1, 2, 83)
    curves(tmp_path / "a.png", train=dict(enumerate(value_I)), evaluation={})
    raw, smooth = (line.get_ydata() for line in drawings[0].axes[0].lines)
    np.testing.assert_array_equal(raw, value_I)
    np.testing.assert_allclose(smooth[[0, 1, 40, 81, 82]], [
        value_I[0], value_I[:3].mean(), value_I[37:44].mean(), value_I[80:].mean(), value_I[82],
    ])  # fmt: skip


def test_wrong_predictions_are_red_and_say_the_truth(drawings, tmp_path):
    predictions(tmp_path / "a.png", B=13, wrong=[4])
    for b, panel in enumerate(drawings[0].axes[:13]):
        words = "5  97 %\ntrue: 4" if b == 4 else f"\n{b % 10}  97 %"
        assert panel.get_title() == words
        assert panel.title.get_color() == (plots.RED if b == 4 else "black")
    assert any("1 of 13 wrong" in words for words in said(drawings[0]))


def test_a_black_image_and_unsigned_pixels_are_shown_as_they_are(drawings, tmp_path):
    image_BYXZ = np.zeros((2, 5, 7, 1), np.uint8)
    for high in (0, 255):
        image_BYXZ[1, 2, 3] = high
        said = {"label_B": [0, 0], "predicted_B": [0, 0], "probability_B": [1.0, 1.0], "classes": ["a"], "title": ""}
        plots.predictions(tmp_path / "a.png", image_BYXZ=image_BYXZ, **said)
        shown_YX = drawings[-1].axes[1].images[0].get_array()
        np.testing.assert_array_equal(shown_YX, image_BYXZ[1, ..., 0] / 255)


def test_confusion_has_true_rows_normalised_and_predicted_columns(drawings, tmp_path):
    count_CC = np.array([[3, 1, 0], [0, 0, 0], [0, 4, 12]])
    plots.confusion(tmp_path / "a.png", count_CC=count_CC, classes=["cat", "dog", "cow"])
    axes = drawings[0].axes[0]
    share_CC = [[0.75, 0.25, 0], [0, 0, 0], [0, 0.25, 0.75]]
    np.testing.assert_allclose(axes.images[0].get_array(), share_CC)
    assert {(t.get_text(), *t.get_position()) for t in axes.texts} == {
        ("3", 0, 0), ("1", 1, 0), ("4", 1, 2), ("12", 2, 2),
    }  # fmt: skip
    assert axes.get_title() == "accuracy 75.00 %\n15 of 20 right"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["cat", "dog", "cow"]


def test_confusion_of_no_examples_says_so(drawings, tmp_path):
    plots.confusion(tmp_path / "a.png", count_CC=np.zeros((3, 3), int), classes=["a", "b", "c"])
    assert drawings[0].axes[0].get_title() == "no examples"


@pytest.mark.parametrize("class_token", [True, False])
def test_maps_show_the_class_token_or_the_mean_over_queries(class_token, drawings, tmp_path):
    A_MHNS = attention(2, 3, 6 + class_token, 6 + class_token)
    path = tmp_path / "a.png"
    plots.attention_maps(path, image_YXZ=np.eye(10)[..., None], A_MHNS=A_MHNS, grid=(2, 3), class_token=class_token)
    panels = [axes for axes in drawings[0].axes if len(axes.images) == 2]
    assert len(panels) == 6
    for panel, A_NS in zip(panels, A_MHNS.reshape(6, *A_MHNS.shape[2:]), strict=True):
        looked_S = A_NS[0, 1:] if class_token else sum(A_NS) / len(A_NS)
        shown = panel.images[1]
        np.testing.assert_allclose(shown.get_array(), [looked_S[:3], looked_S[3:]])
        assert shown.get_extent() == panel.images[0].get_extent()
        assert colors.same_color(shown.cmap(0.0), (*colors.to_rgb(plots.ORANGE), 0))
    assert any(("class token" in words) == class_token for words in said(drawings[0]) if "attend" in words)


def test_maps_and_matrices_say_which_layers_and_heads_are_shown(drawings, tmp_path):
    maps(tmp_path / "a.png", M=23, H=11, class_token=True)
    words = said(drawings[0])
    assert "where the class token attends\n(12 of 23 layers, 8 of 11 heads)" in words
    assert {"layer 1", "layer 23", "head 1", "head 11"} <= set(words)
    assert sum(w.startswith("layer") for w in words) == 12 and sum(w.startswith("head") for w in words) == 8


def test_matrices_label_queries_and_keys_and_keep_the_last_tokens(drawings, tmp_path):
    tokens = [f"t{s}" for s in range(41)]
    A_MHNS = attention(1, 1, 37, 41)
    plots.attention_matrices(tmp_path / "a.png", A_MHNS=A_MHNS, tokens=tokens)
    panel = drawings[0].axes[0]
    np.testing.assert_array_equal(panel.images[0].get_array(), A_MHNS[0, 0, 5:, 9:])
    assert [t.get_text() for t in panel.get_xticklabels()] == tokens[9:]
    assert any("the last 32 of 41 tokens" in words for words in said(drawings[0]))
    plots.attention_matrices(tmp_path / "a.png", A_MHNS=attention(1, 1, 2, 5), tokens=list("ab\n d"))
    panel = drawings[1].axes[0]
    assert [t.get_text() for t in panel.get_xticklabels()] == ["a", "b", "↵", "␣", "d"]
    assert [t.get_text() for t in panel.get_yticklabels()] == ["␣", "d"]


def test_visible():
    assert plots.visible(" a\n\t\r") == "␣a↵⇥␍"
    assert plots.visible("\x00é漢") == "<0>é<6f22>"
    assert plots.visible("x" * 14) == "x" * 14 and plots.visible("x" * 15) == "x" * 13 + "…"


def test_attention_that_does_not_fit_is_refused(tmp_path):
    path, image_YXZ = tmp_path / "a.png", np.ones((4, 6, 1))
    with pytest.raises(ValueError, match="6 keys does not fit 2 x 3 patches"):
        A_MHNS = np.ones((1, 1, 6, 6))
        plots.attention_maps(path, image_YXZ=image_YXZ, A_MHNS=A_MHNS, grid=(2, 3), class_token=True)
    with pytest.raises(ValueError, match="5 keys does not fit 3 tokens"):
        plots.attention_matrices(path, A_MHNS=np.ones((1, 1, 5, 5)), tokens=["a", "b", "c"])
    assert list(tmp_path.iterdir()) == []
