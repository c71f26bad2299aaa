"""The figures of a study: what they show is what the runs hold, and every word of them can be read."""

import itertools

import numpy as np
import pytest
import study_folder
from matplotlib import colors, text

from experiments.engine import figures
from experiments.studies import curves, drawings, layers, measures, runs, statistics, styles

THIRTEEN = [f"arm_{i}_of_many" for i in range(12)] + ["asymmetric"]


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they were handed over for writing, which none is."""
    handed = []
    monkeypatch.setattr(figures, "write", lambda drawing, path: handed.append(drawing))
    return handed


def load(folder, study):
    finished = runs.load(folder, study)
    return statistics.analyse(study, finished)[0], finished


def lines(panel, colour):
    return [line for line in panel.lines if colors.same_color(line.get_color(), colour)]


def test_course_shows_mean_band_and_paired_difference(tmp_path, drawn):
    study = study_folder.study(seeds=(0, 1), threshold=2.5)
    for seed in (0, 1):
        curve = [(0, 5.0 + seed), (100, 2.0 + seed)]
        study_folder.run(tmp_path, "all", "asymmetric", seed, ends={"eval/loss": 2.0}, evaluations=curve)
        curve = [(0, 6.0 + 2 * seed), (100, 3.0 + 3 * seed)]
        study_folder.run(tmp_path, "all", "tied", seed, ends={"eval/loss": 3.0}, evaluations=curve)
    found, finished = load(tmp_path, study)
    curves.course("", found=found, runs=finished, style=styles.of(study))
    _, held_out, below = drawn[0].axes
    (tied,) = lines(held_out, styles.COLOURS[0])
    assert tied.get_xdata().tolist() == [0, 100] and tied.get_ydata().tolist() == [7.0, 4.5]
    assert [one.get_paths()[0].get_extents().extents.tolist() for one in held_out.collections] == [
        [0, 3, 100, 8],  # tied, the first arm
        [0, 2, 100, 6],
    ]
    (difference,) = lines(below, styles.COLOURS[0])
    assert difference.get_ydata().tolist() == [1.5, 2.0]
    assert below.collections[0].get_paths()[0].get_extents().extents.tolist() == [0, 1, 100, 3]
    assert [2.5, 2.5] in [list(line.get_ydata()) for line in held_out.lines]


def test_early_differences_do_not_hide_late_ones(drawn, tmp_path):
    study = study_folder.study(seeds=(0,))
    for arm, losses in {"asymmetric": (9.0, 2.0, 1.0), "tied": (5.0, 2.02, 1.01)}.items():
        curve = zip((0, 100, 200), losses, strict=True)
        study_folder.run(tmp_path, "all", arm, 0, ends={"eval/loss": losses[-1]}, evaluations=list(curve))
    found, finished = load(tmp_path, study)
    curves.course("", found=found, runs=finished, style=styles.of(study))
    assert drawn[0].axes[2].get_ylim() == pytest.approx((-0.012, 0.032))


def test_lines_on_one_another_are_named_and_both_seen(tmp_path, drawn):
    study = study_folder.study(("alone", "late", "near", "asymmetric"), seeds=(0,))
    ends = {"alone": (5.0, 4.0, 3.0, 2.0), "late": (5.0, 4.5, 3.5, 1.0), "near": (5.0, 2.0, 1.001, 1.0)}
    for arm, losses in (ends | {"asymmetric": (5.0, 2.0, 1.0, 1.0)}).items():
        curve = list(enumerate(losses))
        study_folder.run(tmp_path, "all", arm, 0, ends={"eval/loss": losses[-1]}, evaluations=curve)
    found, finished = load(tmp_path, study)
    caption = drawings.SECTIONS["course"]("", found, finished, styles.of(study))
    held_out = drawn[0].axes[1]
    assert caption.endswith('most of the steps in a panel or more: "near" and "asymmetric (reference)".')
    near, reference = lines(held_out, styles.COLOURS[2])[0], lines(held_out, "black")[0]
    assert near.get_zorder() > reference.get_zorder() and near.get_linewidth() < reference.get_linewidth()
    assert near.is_dashed() and not reference.is_dashed()
    assert near.get_markevery() == (1, 2) and reference.get_markevery() == (0, 2)


def test_accuracies_are_not_drawn_on_a_logarithmic_scale(tmp_path, drawn):
    study = study_folder.study(metric="eval/accuracy", seeds=(0,))
    rows = [{"step": i, "eval/accuracy": x, "train/loss": x} for i, x in enumerate((0.01, 0.5, 0.9))]
    study_folder.run(tmp_path, "all", "tied", 0, ends={"eval/accuracy": 0.9}, rows=rows)
    found, finished = load(tmp_path, study)
    curves.course("", found=found, runs=finished, style=styles.of(study))
    assert [panel.get_yscale() for panel in drawn[0].axes[:2]] == ["log", "linear"]


def test_smoothing_keeps_a_constant_and_a_few_values():
    assert curves._smooth(np.full((2, 200), 3.0)) == pytest.approx(np.full((2, 200), 3.0))
    few_RI = np.random.default_rng(0).normal(size=(2, 50))
    assert curves._smooth(few_RI) is few_RI
    peak_RI = np.zeros((1, 200))
    peak_RI[0, 100] = 5.0
    assert curves._smooth(peak_RI)[0, 97:104].tolist() == [0, 1, 1, 1, 1, 1, 0]


def test_differences_show_seeds_mean_and_interval(tmp_path, drawn):
    study = study_folder.study(("tied", "few", "asymmetric"), seeds=(0, 1, 2))
    study_folder.losses(tmp_path, "all", {"tied": [2.1, 2.2, 2.3], "few": [1.5], "asymmetric": [1.0, 1.0, 1.0]})
    found, _ = load(tmp_path, study)
    curves.differences("", found=found, style=styles.of(study))
    (panel,) = drawn[0].axes
    interval, mean, seeds = lines(panel, styles.COLOURS[0])
    assert (tuple(interval.get_xdata()), interval.get_ydata()[0]) == (found.arms[0].comparison.interval, 0)
    assert mean.get_xdata() == pytest.approx([1.2]) and seeds.get_xdata() == pytest.approx([1.1, 1.2, 1.3])
    assert len(lines(panel, styles.COLOURS[1])) == 2  # one pair: no interval
    assert [words.get_text() for words in panel.get_yticklabels()] == ["tied (n = 3)", "few (n = 1)"]
    assert "left of the line: better than the reference" in panel.get_xlabel()


def test_symmetry_has_a_panel_for_each_layer_and_measure(tmp_path, drawn):
    study = study_folder.study(seeds=(0, 1))
    study_folder.whole(tmp_path, study, M=3, maps=False)
    _, finished = load(tmp_path, study)
    assert layers.symmetry("", runs=finished, style=styles.of(study)) == []
    panels = np.reshape(drawn[0].axes, (3, 3))
    assert [panel.get_title() for panel in panels[0]] == ["layer 1", "layer 2", "layer 3"]
    (reference,) = lines(panels[0, 2], "black")
    assert reference.get_ydata() == pytest.approx(np.tanh(np.linspace(0, 1, 11)))
    (reference,) = lines(panels[1, 0], "black")
    assert reference.get_ydata()[-1] == pytest.approx(np.tanh(1 / 6))
    assert layers.symmetry("", runs=[], style=styles.of(study)) is None and len(drawn) == 1


def test_attention_shows_each_seed_and_their_mean(tmp_path, drawn):
    study = study_folder.study(seeds=(0, 1))
    for arm, seed in itertools.product(("tied", "asymmetric"), (0, 1)):
        attention = {"entropy": [1.0 + seed, 3.0], "diagonal": [0.5, None]} if arm == "tied" else None
        study_folder.run(tmp_path, "all", arm, seed, ends={"eval/loss": 1.0}, attention=attention)
    _, finished = load(tmp_path, study)
    assert layers.attention("", runs=finished, style=styles.of(study))
    entropy, diagonal = drawn[0].axes
    assert [line.get_ydata().tolist() for line in entropy.lines] == [[1.0, 2.0], [3.0, 3.0]]
    assert [bar.get_segments()[0][0, 1] for bar in entropy.collections] == [1.5, 3.0]
    assert len(diagonal.lines) == 1
    assert measures.attention(finished) == {"entropy": [1.5, 3.0], "diagonal": [0.5, None]}
    assert not layers.attention("", runs=[], style=styles.of(study)) and len(drawn) == 1


def test_captions_say_how_to_read_what_is_drawn(tmp_path, drawn):
    study = study_folder.study(seeds=(0, 1))
    study_folder.whole(tmp_path, study)
    found, finished = load(tmp_path, study)
    said = {name: make("", found, finished, styles.of(study)) for name, make in drawings.SECTIONS.items()}
    assert "d is of the sum over heads" in said["symmetry"] and "read it against step 0" in said["symmetry"]
    assert "about 0 for a random one (1/D is expected" in said["symmetry"]
    assert "an entropy of ln n nats" in said["attention"]


def test_styles_differ_and_stay_the_same_arm():
    study = study_folder.study([f"arm{i}" for i in range(24)] + ["asymmetric"])
    found = styles.of(study)
    assert len({(one.colour, one.line) for one in found.values()}) == 25
    assert len({(one.colour, one.marker) for one in found.values()}) == 25
    assert len({(str(one.line), one.marker) for one in found.values()}) == 25  # in grey, too
    assert [name for name, one in found.items() if one.line == "-"] == ["asymmetric"]
    assert list(found) == [arm.name for arm in study.arms] and found["asymmetric"].colour == "black"


def test_names_in_figures_and_files():
    assert styles.label("x" * 28) == "x" * 28 and styles.label("x" * 29) == "x" * 27 + "…"
    assert styles.label("a b\n\x00") == "a b↵<0>"
    assert styles.file_names(["a/b", "a b", "A_B", "c", ""]) == {"a/b": "a_b", "a b": "a_b_2", "A_B": "A_B_3"} | {
        "c": "c",
        "": "_5",
    }
    assert styles.spread(12, 4) == [0, 4, 7, 11] and styles.spread(2, 4) == [0, 1]


def test_no_words_touch_with_thirteen_arms(tmp_path, monkeypatch):
    """Of the figures that have the most words; they are drawn, which alone tells where these stand."""
    seen, draw = {}, text.Text.draw

    def recorded(self, renderer):
        draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            seen[self] = self.get_window_extent(renderer).frozen(), self.get_figure().bbox.frozen()

    monkeypatch.setattr(text.Text, "draw", recorded)
    study = study_folder.study(["$_{many}$"] + THIRTEEN[1:], seeds=(0, 1, 2))
    study_folder.whole(tmp_path, study, M=4, steps=100, maps=False)
    found, finished = load(tmp_path, study)
    for kind in ("course", "differences", "symmetry"):
        seen.clear()
        drawings.SECTIONS[kind](tmp_path / f"{kind}.png", found, finished, styles.of(study))
        named = [words for words in seen if words.get_text().startswith("$_{many}$")]
        assert named and not any(words.get_parse_math() for words in named), kind
        for words, (box, whole) in seen.items():
            inside = whole.x0 - 1 <= box.x0 and box.x1 <= whole.x1 + 1 and whole.y0 - 1 <= box.y0 and box.y1 <= whole.y1
            assert inside, (kind, words)
        for (a, (one, _)), (b, (other, _)) in itertools.combinations(seen.items(), 2):
            assert (
                min(one.x1, other.x1) - max(one.x0, other.x0) < 1 or min(one.y1, other.y1) - max(one.y0, other.y0) < 1
            ), (kind, a, b)
