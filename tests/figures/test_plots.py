"""The figures: complete PNG files, texts that do not overlap, and the numbers that they show."""

import itertools
import types

import numpy as np
import pytest
import study_folder
from matplotlib import colors, font_manager, image, text

from experiments.data import depthwise
from experiments.figures import (
    convolution as convolution_figures,
    images as image_figures,
    inside as inside_figures,
    plots,
)
from experiments.studies import figures as study_figures, runs as study_runs, statistics, styles

DIGITS = [str(c) for c in range(10)]
CLOTHES = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boots-and-more-boots".split()
RNG = np.random.default_rng(0)
FALLING = [{"step": step, "train/loss": 3 * 0.99**step + 0.01 * (step % 3)} for step in range(0, 700, 7)]
RISING = [{"step": 200, "eval/loss": 0.9}, {"step": 400, "eval/loss": 0.5, "train/loss": None}]


def random_attention(M, H, N, S):
    A_MHNS = np.exp(2 * np.random.default_rng(M * H * N * S).normal(size=(M, H, N, S)))
    return A_MHNS / A_MHNS.sum(-1, keepdims=True)


def draw_curves(path, rows, title="vit"):
    plots.loss_curves(path, rows, unit="nats per token", title=title)


def draw_predictions(path, *, B, wrong_indices=(), classes=DIGITS, Z=1):
    label_B = np.arange(B) % 10
    predicted_B = (label_B + np.isin(np.arange(B), wrong_indices)) % 10
    arrays = {"image_BYXZ": RNG.random((B, 8, 8, Z)), "probability_B": np.full(B, 0.973), "classes": classes}
    title = f"{len(wrong_indices)} of {B} wrong"
    image_figures.predictions(path, label_B=label_B, predicted_B=predicted_B, title=title, **arrays)


def draw_confusion(path, C, classes):
    count_CC = np.arange(C * C).reshape(C, C) % 7 + 50 * np.eye(C, dtype=int)
    plots.confusion(path, **list_predictions(count_CC), classes=classes)


def list_predictions(count_CC):
    """Return labels and predictions with these counts."""
    place_2X = np.indices(np.shape(count_CC)).reshape(2, -1)
    return dict(zip(("label_B", "predicted_B"), place_2X.repeat(np.ravel(count_CC), axis=1), strict=True))


def draw_maps(path, *, M, H, class_token, Z=1):
    A_MHNS, picture = random_attention(M, H, 6 + class_token, 6 + class_token), RNG.integers(0, 256, (10, 15, Z))
    image_figures.attention_maps(path, image_YXZ=picture, A_MHNS=A_MHNS, grid=(2, 3), class_token=class_token)


def draw_matrices(path, *, M, H, queries, keys, **options):
    A_MHNS = random_attention(M, H, len(queries), len(keys))
    plots.attention_matrices(path, A_MHNS=A_MHNS, queries=queries, keys=keys, **options)
    return A_MHNS


def draw_hidden_patches(path, *, B, Y, Z=1):
    """Draw hidden patches. Return the arrays that are in the figure."""
    image_BYXZ = RNG.integers(0, 256, (B, Y, 6, Z)).astype(np.uint8)
    image_BYXZ[0, 0, :2, 0] = [0, 255]
    prediction_BYXZ, hidden_BN = RNG.normal(128, 200, image_BYXZ.shape), RNG.random((B, Y // 2 * 3)) < 0.7
    title = "12 of 16 patches hidden, $5 of them: the prediction explains 45 % of the hidden pixels' variance"
    arrays = {"image_BYXZ": image_BYXZ, "prediction_BYXZ": prediction_BYXZ, "hidden_BN": hidden_BN}
    image_figures.hidden_patches(path, **arrays, size=2, title=title)
    return arrays


def draw_study_figure(path, kind):
    """Draw a study figure of 13 arms, the figure with the most text."""
    study = study_folder.make_study(["a" * 40, *(f"arm_{i}_of_many" for i in range(11)), "asymmetric"], seeds=(0, 1))
    folder = path.parent.parent / "study"
    study_folder.write_study(folder, study, steps=100)
    finished = study_runs.load(folder, study)
    analysed = statistics.analyse(study, finished)[0]
    plots.write(study_figures.draw_kind(kind, analysed, finished, styles.choose_styles(study))[0], path)


def draw_lens(path, *, M, N, tokens):
    """Draw what a lens reads, with NaN for the last token. Return the probabilities and the top tokens."""
    rng = np.random.default_rng(0)
    p_MN, top_MN = rng.random((M, N)), np.array(tokens, object)[rng.integers(0, len(tokens), (M, N))]
    p_MN[:, -1] = np.nan
    texts = [tokens[n % len(tokens)] for n in range(N + 1)]
    right = [*texts[1:N], ""]
    is_right_MN = top_MN == np.array(right, object)
    title = "most likely token after each layer"
    inside_figures.lens(
        path, p_MN=p_MN, top_MN=top_MN, is_right_MN=is_right_MN, tokens=texts[:N], right=right, title=title
    )
    return p_MN, top_MN, is_right_MN, texts


def draw_grids(path, *, M, sizes, words):
    """Draw random panels of these sizes, one with values above its limit and one of NaN. Return the values."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(M, size)) for size in sizes] + [np.full((M, 2), np.nan)]
    labels = [[f"{i + 1} {words[i % len(words)]}" for i in range(x_MI.shape[1])] for x_MI in values]
    panels = [inside_figures.Panel("restored $5", *pair, is_signed=True) for pair in zip(values, labels, strict=True)]
    panels.append(inside_figures.Panel("entropy of the weights, nats", np.abs(values[0]), labels[0], limit=0))
    inside_figures.grids(path, panels, title="How much of the clean answer does one patch restore?")
    return values


WORDS = ["The", " permutation-equivariant", "\n", "漢", "\t", "$"]
FIGURES = {
    "curves, nothing": lambda p: draw_curves(p, []),
    "curves, long title": lambda p: draw_curves(p, FALLING + RISING, title=r"a $\nosuch$ title of many words " * 6),
    "predictions": lambda p: draw_predictions(p, B=13, wrong_indices=[3, 11], classes=CLOTHES),
    "predictions, one, colour": lambda p: draw_predictions(p, B=1, wrong_indices=[0], classes=["$x^2$"] * 10, Z=3),
    "confusion, many": lambda p: draw_confusion(p, 61, [f"category {c}" for c in range(61)]),
    "maps, one layer": lambda p: draw_maps(p, M=1, H=13, class_token=False, Z=3),
    "matrices, mean": lambda p: draw_matrices(p, M=2, H=2, queries=WORDS[1:], keys=WORDS, mean=True),
    "lens": lambda p: draw_lens(p, M=5, N=7, tokens=WORDS),
    "lens, long": lambda p: draw_lens(p, M=1, N=40, tokens=["MMMMMMMMM", "5", "$"]),
    "lens, one token": lambda p: draw_lens(p, M=12, N=1, tokens=["5"]),
    "grids": lambda p: draw_grids(p, M=2, sizes=(5, 4, 3, 2), words=WORDS),
    "grids, large": lambda p: draw_grids(p, M=24, sizes=(64, 16), words=["MMMMMMMMM"]),
    "course of a study": lambda p: draw_study_figure(p, "course"),
    "differences of a study": lambda p: draw_study_figure(p, "differences"),
    "hidden patches": lambda p: draw_hidden_patches(p, B=4, Y=8),
}


def test_grids_show_their_values_between_their_limits(monkeypatch, tmp_path):
    drawings = []
    monkeypatch.setattr(plots, "write", lambda drawing, path: drawings.append(drawing))
    values = draw_grids(tmp_path / "a.png", M=3, sizes=(5, 2), words=WORDS)
    images = [axes.images[0] for axes in drawings[0].axes if axes.images]
    largest = np.abs(values[0]).max()
    assert largest > 1 and [picture.get_clim() for picture in images] == [(-1, 1)] * 3 + [(0, largest)]
    for picture, x_MI in zip(images, [*values, np.abs(values[0])], strict=True):
        np.testing.assert_array_equal(picture.get_array().filled(np.nan), x_MI)
        assert picture.origin == "lower"


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_a_png_is_complete_and_texts_are_inside_and_do_not_overlap(draw, monkeypatch, tmp_path, caplog):
    boxes, original_draw = {}, text.Text.draw  # {text: (its box, box of the figure)}

    def record(self, renderer):
        original_draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            boxes[self] = self.get_window_extent(renderer).frozen(), self.get_figure().bbox.frozen()

    monkeypatch.setattr(text.Text, "draw", record)
    path = tmp_path / "made" / "here.png"
    draw(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content[-8:-4] == b"IEND"
    assert image.imread(path)[..., :3].std() > 0.01 and "Clipping" not in caplog.text
    assert [p.name for p in path.parent.iterdir()] == ["here.png"]
    assert boxes
    for item, (box, figure_box) in boxes.items():
        is_inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure_box.x1 and box.y1 <= figure_box.y1
        assert is_inside, f"{item.get_text()!r} at {box} is cut off by {figure_box}"
    for (item, (a, _)), (other_item, (b, _)) in itertools.combinations(boxes.items(), 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(overlap) < 1, f"{item.get_text()!r} overlaps {other_item.get_text()!r}"


@pytest.fixture
def draw_figure(monkeypatch):
    """Return a function that calls a drawing function and returns its figure without writing it."""
    figures = []
    monkeypatch.setattr(plots, "write", lambda figure, path: figures.append(figure))

    def draw(function, *arguments, **options):
        function("a.png", *arguments, **options)
        return figures[-1]

    return draw


def read_texts(figure):
    return [t.get_text() for t in figure.findobj(text.Text)]


def read_ticks(labels):
    return [label.get_text() for label in labels]


def test_curves_show_the_points_in_order_without_numbers_that_are_not_finite(draw_figure):
    train = {5: 2.0, 3: 4.0, 7: float("nan"), 9: float("inf")}
    rows = [{"step": step, "train/loss": loss} for step, loss in train.items()]
    rows += [{"step": 8, "eval/loss": 3.0}, {"step": 9, "eval/loss": -float("inf")}, {"step": 10, "eval/loss": None}]
    axes = draw_figure(draw_curves, rows).axes[0]
    training, evaluation = axes.lines
    assert training.get_xydata().tolist() == [[3, 4], [5, 2]] and evaluation.get_xydata().tolist() == [[8, 3]]
    assert axes.get_title() == "vit (4 values not finite)" and axes.get_ylabel() == "loss, nats per token"
    # Beyond one decade of positive values, the axis is logarithmic.
    for low, scale in ((1.1, "linear"), (0.9, "log"), (0.0, "linear"), (-1.0, "linear")):
        rows = [{"step": 1, "train/loss": 10.0, "eval/loss": low}]
        assert draw_figure(draw_curves, rows).axes[0].get_yscale() == scale


def test_smoothed_curve_is_the_centred_mean(draw_figure):
    value_I = np.random.default_rng(0).uniform(1, 2, 83)
    rows = [{"step": i, "train/loss": value} for i, value in enumerate(value_I)]
    raw, smooth = (line.get_ydata() for line in draw_figure(draw_curves, rows).axes[0].lines)
    np.testing.assert_array_equal(raw, value_I)
    means = [value_I[0], value_I[:3].mean(), value_I[37:44].mean(), value_I[80:].mean(), value_I[82]]
    np.testing.assert_allclose(smooth[[0, 1, 40, 81, 82]], means)


def test_wrong_predictions_are_red_with_the_true_class(draw_figure):
    figure = draw_figure(draw_predictions, B=53, wrong_indices=[4])
    assert len(figure.axes) == 40
    for b, panel in enumerate(figure.axes):
        assert panel.get_title() == ("5  97 %\ntrue: 4" if b == 4 else f"\n{b % 10}  97 %")
        assert panel.title.get_color() == (plots.RED if b == 4 else "black")
    assert "1 of 53 wrong" in read_texts(figure)


def test_pixels_are_coloured_between_the_darkest_and_the_brightest():
    image_BYXZ = np.zeros((2, 5, 7, 1), np.uint8)
    for high in (0, 255):
        image_BYXZ[1, 2, 3] = high
        np.testing.assert_array_equal(image_figures.colour(image_BYXZ), np.repeat(image_BYXZ / 255, 3, -1))
    scaled = image_figures.colour(np.array([[[[-3.0, 1.0, 9.0]]]]), scale=np.array([0, 2.0]))
    np.testing.assert_array_equal(scaled, [[[[0, 0.5, 1]]]])
    means = image_figures.colour(np.array([[[[0, 4.0]]], [[[1, 1]]]])).ravel()
    np.testing.assert_allclose(means, [0.5] * 3 + [0.25] * 3)


def test_confusion_has_true_rows_normalised_and_predicted_columns(draw_figure):
    counts = list_predictions([[3, 1, 0], [0, 0, 0], [0, 4, 12]])
    axes = draw_figure(plots.confusion, **counts, classes=["cat", "dog", "cow"]).axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.75, 0.25, 0], [0, 0, 0], [0, 0.25, 0.75]])
    result = {(t.get_text(), *t.get_position()) for t in axes.texts}
    assert result == {("3", 0, 0), ("1", 1, 0), ("4", 1, 2), ("12", 2, 2)}
    assert axes.get_title() == "accuracy 75.00 %\n15 of 20 right"
    assert read_ticks(axes.get_yticklabels()) == ["cat  75%", "dog", "cow  75%"]
    empty = draw_figure(plots.confusion, **list_predictions(np.zeros((3, 3), int)), classes=["a", "b", "c"])
    assert empty.axes[0].get_title() == "no examples"


@pytest.mark.parametrize("class_token", [True, False])
def test_maps_show_the_class_token_or_the_mean_over_queries(class_token, draw_figure):
    A_MHNS = random_attention(2, 3, 6 + class_token, 6 + class_token)
    options = {"image_YXZ": np.eye(10)[..., None], "grid": (2, 3), "class_token": class_token}
    figure = draw_figure(image_figures.attention_maps, A_MHNS=A_MHNS, **options)
    panels = [axes for axes in figure.axes if len(axes.images) == 2]
    assert len(panels) == 6
    for panel, A_NS in zip(panels, A_MHNS.reshape(6, *A_MHNS.shape[2:]), strict=True):
        weight_S = A_NS[0, 1:] if class_token else sum(A_NS) / len(A_NS)
        np.testing.assert_allclose(panel.images[1].get_array(), [weight_S[:3], weight_S[3:]])
        assert panel.images[1].get_extent() == panel.images[0].get_extent()
        assert colors.same_color(panel.images[1].cmap(0.0), (*colors.to_rgb(plots.ORANGE), 0))
    assert any(("class token" in label) == class_token for label in read_texts(figure) if "attend" in label)


def test_figures_state_the_number_of_layers_and_heads_that_are_shown(draw_figure):
    labels = read_texts(draw_figure(draw_maps, M=23, H=1, class_token=True))
    assert "where the class token attends\n(12 of 23 layers)" in labels and {"layer 1", "layer 23"} <= set(labels)
    assert sum(w.startswith("layer") for w in labels) == 12
    labels = read_texts(draw_figure(draw_matrices, M=1, H=11, queries="a", keys="a"))
    assert any("(8 of 11 heads)" in label for label in labels) and {"head 1", "head 11"} <= set(labels)
    assert sum(w.startswith("head") for w in labels) == 8


def test_matrices_label_queries_and_keys_and_keep_the_last_tokens(draw_figure):
    tokens, A_MHNS = [f"t{s}" for s in range(41)], random_attention(1, 1, 37, 41)
    figure = draw_figure(plots.attention_matrices, A_MHNS=A_MHNS, queries=tokens[4:], keys=tokens)
    panel = figure.axes[0]
    np.testing.assert_array_equal(panel.images[0].get_array(), A_MHNS[0, 0, 5:, 9:])
    assert read_ticks(panel.get_xticklabels()) == read_ticks(panel.get_yticklabels()) == tokens[9:]
    assert figure.get_suptitle().endswith(", the last 32 of 37 queries, the last 32 of 41 keys")
    keys, queries = ["I", " $won", "!", "é", "[EOS]"], list("abcdefg")
    A_MHNS = random_attention(2, 3, 7, 5)
    axes = draw_figure(plots.attention_matrices, A_MHNS=A_MHNS, queries=queries, keys=keys, mean=True).axes
    assert read_ticks(axes[0].get_yticklabels()) == queries and read_ticks(axes[1].get_yticklabels()) == []
    assert read_ticks(axes[4].get_xticklabels()) == ["I", "␣$won", "!", "é", "[EOS]"]
    assert [axes[i].get_title() for i in (0, 2, 6)] == ["mean of heads", "head 2", ""]
    np.testing.assert_allclose(axes[4].images[0].get_array(), A_MHNS[1].mean(0))
    np.testing.assert_array_equal(axes[6].images[0].get_array(), A_MHNS[1, 1])


def test_a_lens_has_the_last_layer_on_top_and_frames_the_tokens_that_are_right(draw_figure):
    arrays = []
    figure = draw_figure(lambda path: arrays.extend(draw_lens(path, M=3, N=41, tokens=["a", " b", "$c", "d"])))
    (axes, _), (p_MN, top_MN, is_right_MN, texts) = figure.axes, arrays
    np.testing.assert_array_equal(axes.images[0].get_array().filled(np.nan), p_MN[:, 9:])
    assert axes.images[0].get_clim() == (0, 1) and axes.get_ylim() == (-0.5, 2.5)
    assert read_ticks(axes.get_yticklabels()) == ["1", "2", "3"]
    shown = {t.get_position(): (t.get_text(), t.get_weight() == "bold") for t in axes.texts}
    expected = {
        (n, m): (plots.visible(top_MN[m, 9 + n]), bool(is_right_MN[m, 9 + n])) for m in range(3) for n in range(32)
    }
    assert shown == expected and len(axes.patches) == is_right_MN[:, 9:].sum() > 3
    assert read_ticks(axes.get_xticklabels()) == [plots.visible(token) for token in texts[9:41]]
    assert read_ticks(axes.child_axes[0].get_xticklabels()) == [*map(plots.visible, texts[10:41]), ""]
    assert figure.get_suptitle().replace("\n", " ").endswith("the last 32 of 41 positions")


def test_letters_are_drawn_with_any_font_that_has_them_or_as_codes(monkeypatch):
    class Font:
        def __init__(self, file):
            self.get_char_index = lambda code: code < 128 or (file == "two.ttf" and code == ord("好"))

    entries = [types.SimpleNamespace(name="Two Letters", fname="two.ttf", style="normal")]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", entries)
    monkeypatch.setattr(font_manager, "get_font", Font)
    monkeypatch.setattr(font_manager, "findfont", lambda name: f"{name}.ttf")
    plots._find_font.cache_clear()
    assert (plots._find_font("好"), plots._find_font("a")) == ("Two Letters", plots.FONT)
    assert plots.name("好 a 漢") == "好 a <6f22>"
    plots._find_font.cache_clear()


def test_the_confusion_of_many_classes_is_not_drawn(tmp_path, capsys):
    label_B, names = np.arange(5), [str(c) for c in range(100_000)]
    assert plots.confusion(tmp_path / "a.png", label_B=label_B, predicted_B=label_B, classes=names) == []
    assert "100,000" in capsys.readouterr().out


def test_control_characters_and_unknown_letters_become_visible():
    assert plots.visible(" a\n\t\r") == "␣a↵⇥␍" and plots.name("a b") == "a b"
    assert plots.visible("\x00é漢") == "<0>é<6f22>"
    assert plots.visible("x" * 14) == "x" * 14 and plots.visible("species number 12") == "species…ber␣12"


@pytest.mark.parametrize(("count", "Z", "Y"), [(3, 3, 4), (11, 1, 8)])
def test_hidden_patches_show_input_prediction_and_truth(count, Z, Y, draw_figure):
    arrays = {}
    figure = draw_figure(lambda path: arrays.update(draw_hidden_patches(path, B=count, Y=Y, Z=Z)))
    panels = np.reshape(figure.axes, (3, min(count, 8)))
    assert [row[0].get_ylabel() for row in panels] == ["input", "prediction", "truth"]
    for b, column in enumerate(panels.T):
        input_YXZ, prediction_YXZ, truth_YXZ = (np.asarray(panel.images[0].get_array()) for panel in column)
        np.testing.assert_allclose(truth_YXZ, np.broadcast_to(arrays["image_BYXZ"][b] / 255, (Y, 6, 3)), atol=1e-6)
        for y, x in itertools.product(range(Y), range(6)):
            is_hidden = arrays["hidden_BN"][b, y // 2 * 3 + x // 2]
            expected = np.clip(arrays["prediction_BYXZ"][b, y, x] / 255, 0, 1) if is_hidden else truth_YXZ[y, x]
            np.testing.assert_allclose(prediction_YXZ[y, x], np.broadcast_to(expected, 3), atol=1e-6)
            shown = image_figures.HIDDEN if is_hidden else truth_YXZ[y, x]
            np.testing.assert_allclose(input_YXZ[y, x], shown, atol=1e-6)


@pytest.mark.parametrize("heads", [5, 11])
def test_kernels_and_weights_are_shown(draw_figure, heads):
    kernel_HD, learned_HD = np.random.default_rng(0).normal(size=(2, heads, 6))
    learned_HNS, constructed_HNS = np.random.default_rng(1).random((2, heads, 13, 13))
    offsets = depthwise.offsets(heads)
    arrays = {"kernel_HD": kernel_HD, "learned_HD": learned_HD, "offsets": offsets, "difference": 1.25e-7}
    arrays |= {"learned_HNS": learned_HNS, "constructed_HNS": constructed_HNS}
    figure = draw_figure(convolution_figures.kernels_and_weights, **arrays)
    kernel_row, learned_row, constructed_row = figure.subfigs
    true_DH, learned_DH, difference = (panel.images[0].get_array() for panel in kernel_row.axes[:3])
    np.testing.assert_array_equal(true_DH, kernel_HD.T)
    np.testing.assert_array_equal(learned_DH, learned_HD.T)
    np.testing.assert_array_equal(difference, learned_DH - true_DH)
    labelled = offsets[:: 1 + (heads > 9)]
    assert read_ticks(kernel_row.axes[0].get_xticklabels()) == [f"{n:+d}" if n else "0" for n in labelled]
    for row, A_HNS in ((learned_row, learned_HNS), (constructed_row, constructed_HNS)):
        panels = [panel for panel in row.axes if panel.images]
        assert len(panels) == min(heads, 8)
        np.testing.assert_array_equal([panel.images[0].get_array() for panel in panels], A_HNS[:8])
        assert ("(8 of 11 heads)" in row.get_suptitle()) == (heads == 11)
    assert "within 1.2e-07 of numpy.convolve" in constructed_row.get_suptitle()
    assert learned_row.axes[0].get_title() == "head 1"
    assert constructed_row.axes[heads // 2 if heads < 8 else 5].get_title() == "s = n"


def test_steps_have_round_ticks():
    drawing, [[panel]] = plots.canvas(7, 4)
    panel.set_xlim(0, 300)
    panel.xaxis.set_major_locator(plots.round_ticks(6))
    assert panel.get_xticks().tolist() == [0, 50, 100, 150, 200, 250, 300]
    panel.set_xlim(1, 3)
    assert panel.get_xticks().tolist() == [1, 2, 3]  # no half steps
