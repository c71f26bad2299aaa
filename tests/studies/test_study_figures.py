"""The figures of a study: what they show is what the runs hold, and every word of them can be read."""

import itertools
import shutil

import numpy as np
import pytest
import study_folder
from matplotlib import colors

from experiments.engine import errors
from experiments.figures import plots as engine
from experiments.studies import attention, figures, runs, statistics, styles


def drawn(kind, folder, study):
    """The figure of the first condition as it is handed over for writing, and its caption; None where there is none."""
    finished = runs.load(folder, study)
    return figures.drawn(kind, statistics.analyse(study, finished)[0], finished, styles.of(study))


def lines(panel, colour):
    """The means of an arm, not its seeds."""
    mine = [line for line in panel.lines if colors.same_color(line.get_color(), colour)]
    return [line for line in mine if line.get_linewidth() > figures.THIN]


def curves(folder, ends):
    """One run for each arm and each of its curves: evaluations at steps 0, 100, 200 and so on."""
    for arm, of_seeds in ends.items():
        for seed, losses in enumerate(of_seeds):
            evaluations = [(100 * i, loss) for i, loss in enumerate(losses)]
            study_folder.run(folder, "all", arm, seed, ends={"eval/loss": losses[-1]}, evaluations=evaluations)


def test_course_shows_mean_band_and_paired_difference(tmp_path):
    study = study_folder.study(seeds=(0, 1), threshold=2.5)
    curves(tmp_path, {"asymmetric": [(5.0, 2.0), (6.0, 2.0)], "tied": [(6.0, 3.0), (8.0, 6.0)]})
    drawing, caption = drawn("course", tmp_path, study)
    _, held_out, below = drawing.axes
    (tied,) = lines(held_out, styles.COLOURS[0])
    assert tied.get_xdata().tolist() == [0, 100] and tied.get_ydata().tolist() == [7.0, 4.5]
    assert [one.get_paths()[0].get_extents().extents.tolist() for one in held_out.collections] == [
        [0, 3, 100, 8],  # tied, the first arm
        [0, 2, 100, 6],
    ]
    seeds = [line.get_ydata().tolist() for line in held_out.lines if line.get_linewidth() == figures.THIN]
    assert seeds == [[6, 3], [8, 6], [5, 2], [6, 2]]
    (difference,) = lines(below, styles.COLOURS[0])
    assert difference.get_ydata().tolist() == [1.5, 2.5]
    assert below.collections[0].get_paths()[0].get_extents().extents.tolist() == [0, 1, 100, 4]
    assert [2.5, 2.5] in [list(line.get_ydata()) for line in held_out.lines]
    assert "later ones. The dotted line is the threshold, 2.5." in caption


def test_the_metric_is_shown_against_flops_and_seconds_where_the_runs_tell_them(tmp_path):
    study = study_folder.study(seeds=(0, 1))
    for arm, seed in itertools.product(("tied", "asymmetric"), (0, 1)):
        costs = {"flops_per_step": 1e6, "seconds_per_step": 0.5 + seed} if arm == "tied" else {"flops_per_step": 3e6}
        points = [(0, 5.0), (100, 2.0 + seed)]
        study_folder.run(tmp_path, "all", arm, seed, ends={"eval/loss": 2.0}, evaluations=points, **costs)
    drawing, caption = drawn("cost", tmp_path, study)
    flops, seconds = drawing.axes
    assert [lines(flops, colour)[0].get_xdata().tolist() for colour in (styles.COLOURS[0], "black")] == [
        [0, 1e8],
        [0, 3e8],
    ]
    (tied,) = lines(seconds, styles.COLOURS[0])
    assert tied.get_xdata().tolist() == [0, 100] and tied.get_ydata().tolist() == [5, 2.5]
    assert caption.endswith(' Not drawn in "seconds", for want of numbers: "asymmetric".')
    curves(tmp_path / "untold", {"tied": [(5.0, 2.0)], "asymmetric": [(5.0, 2.0)]})
    assert drawn("cost", tmp_path / "untold", study) is None


def test_arms_that_a_figure_leaves_out_are_named(tmp_path):
    curves(tmp_path, {"tied": [(6.0, 3.0)], "asymmetric": [(5.0, 2.0)]})
    study = study_folder.study(("tied", "gone", "lost", "asymmetric"), seeds=(0,))
    without = 'for want of numbers: "gone", "lost".'
    assert drawn("differences", tmp_path, study)[1].endswith(f" Not drawn, {without}")
    course = drawn("course", tmp_path, study)[1]
    assert 'Not drawn in "training loss", for want of numbers: "tied", "gone"' in course and without in course


@pytest.mark.parametrize(("early", "cut"), [(5.0, True), (8.8, True), (8.95, False)])
def test_early_differences_do_not_hide_late_ones(tmp_path, early, cut):
    curves(tmp_path, {"asymmetric": [(9.0, 2.0, 1.0)], "tied": [(early, 2.02, 1.01)]})
    drawing, _ = drawn("course", tmp_path, study_folder.study(seeds=(0,)))
    assert (drawing.axes[2].get_ylim() == pytest.approx((-0.012, 0.032))) == cut


def test_lines_on_one_another_are_both_seen(tmp_path):
    curves(tmp_path, {"near": [(5.0, 2.0, 1.001, 1.0)], "asymmetric": [(5.0, 2.0, 1.0, 1.0)]})
    drawing, _ = drawn("course", tmp_path, study_folder.study(("near", "asymmetric"), seeds=(0,)))
    near, reference = (lines(drawing.axes[1], colour)[0] for colour in (styles.COLOURS[0], "black"))
    assert near.get_zorder() > reference.get_zorder() and near.get_linewidth() < reference.get_linewidth()
    assert near.is_dashed() and not reference.is_dashed()
    assert near.get_markevery() == (1, 2) and reference.get_markevery() == (0, 2)


def test_training_losses_are_smoothed_and_accuracies_not_on_a_logarithmic_scale(tmp_path):
    study = study_folder.study(metric="eval/accuracy", seeds=(0,))
    peak = [1.0] * 100 + [101.0] + [1.0] * 99
    for arm, accuracies in (("tied", (0.01, 0.5, 0.9)), ("asymmetric", (0.01, 0.5, 0.9))):
        rows = [{"step": i, "train/loss": x} for i, x in enumerate(peak if arm == "tied" else peak[:50])]
        rows += [{"step": i, "eval/accuracy": x} for i, x in enumerate(accuracies)]
        study_folder.run(tmp_path, "all", arm, 0, ends={"eval/accuracy": 0.9}, rows=rows)
    training, held_out, _ = drawn("course", tmp_path, study)[0].axes
    assert [training.get_yscale(), held_out.get_yscale()] == ["log", "linear"]
    assert training.yaxis.get_major_formatter()(0.5) == "0.5"  # and no formula
    (tied,), (few,) = lines(training, styles.COLOURS[0]), lines(training, "black")
    assert tied.get_ydata()[97:104] == pytest.approx([1, 21, 21, 21, 21, 21, 1])
    assert few.get_ydata() == pytest.approx(np.ones(50))


def test_differences_show_seeds_mean_and_interval(tmp_path):
    study = study_folder.study(("tied", "few", "asymmetric"), seeds=(0, 1, 2))
    study_folder.losses(tmp_path, "all", {"tied": [2.1, 2.2, 2.3], "few": [1.5], "asymmetric": [1.0, 1.0, 1.0]})
    condition = statistics.analyse(study, runs.load(tmp_path, study))[0]
    drawing, caption = drawn("differences", tmp_path, study)
    (panel,) = drawing.axes
    interval, mean, seeds = lines(panel, styles.COLOURS[0])
    assert (tuple(interval.get_xdata()), interval.get_ydata()[0]) == (condition.arms[0].difference.interval, 0)
    assert mean.get_xdata() == pytest.approx([1.2]) and seeds.get_xdata() == pytest.approx([1.1, 1.2, 1.3])
    assert len(lines(panel, styles.COLOURS[1])) == 2  # one pair: no interval
    assert [words.get_text() for words in panel.get_yticklabels()] == ["tied (n = 3)", "few (n = 1)"]
    assert "left of the line: better than the reference" in panel.get_xlabel()
    assert caption.endswith("bars 95 % intervals for the 2 comparisons of this study together.")
    few = study._replace(arms=study.arms[1:])
    assert drawn("differences", tmp_path, few)[1].endswith("there are no intervals.")


def test_symmetry_has_a_panel_for_each_layer_and_measure(tmp_path):
    study = study_folder.study(seeds=(0, 1))
    study_folder.whole(tmp_path, study, M=3)
    drawing, caption = drawn("symmetry", tmp_path, study)
    panels = np.reshape(drawing.axes, (3, 3))
    assert [panel.get_title() for panel in panels[0]] == ["layer 1", "layer 2", "layer 3"]
    (reference,) = lines(panels[0, 2], "black")
    assert reference.get_ydata() == pytest.approx(np.tanh(np.linspace(0, 1, 11)))
    (reference,) = lines(panels[1, 0], "black")
    assert reference.get_ydata()[-1] == pytest.approx(np.tanh(1 / 6))
    assert "about 0 for a random one (1/D is expected" in caption
    assert "d is of the sum over heads" in caption and "read it against step 0" in caption


def test_attention_shows_each_seed_and_their_mean(tmp_path):
    study = study_folder.study(seeds=(0, 1))
    for arm, seed in itertools.product(("tied", "asymmetric"), (0, 1)):
        own = {"entropy": [1.0 + seed, 3.0], "diagonal": [0.5, None]} if arm == "tied" else {}
        study_folder.run(tmp_path, "all", arm, seed, ends={"eval/loss": 1.0}, attention=own)
    drawing, caption = drawn("attention", tmp_path, study)
    entropy, diagonal = drawing.axes
    assert [line.get_ydata().tolist() for line in entropy.lines] == [[1.0, 2.0], [3.0, 3.0]]
    assert [bar.get_segments()[0][0, 1] for bar in entropy.collections] == [1.5, 3.0]
    assert len(diagonal.lines) == 1 and "an entropy of ln n nats" in caption
    without = study._replace(arms=study.arms[1:])
    assert all(drawn(kind, tmp_path, without) is None for kind in ("attention", "symmetry", "maps"))


def test_maps_stand_side_by_side_on_one_scale(tmp_path):
    study = study_folder.study(seeds=(0, 1))
    study_folder.whole(tmp_path, study, M=5, H=3)
    shutil.copy(tmp_path / "all/asymmetric/seed_0/maps.npz", tmp_path / "all/tied/seed_1/maps.npz")
    drawing, caption = drawn("maps", tmp_path, study)
    panels = np.reshape(drawing.axes[:-1], (2, 8))  # the last is the colour bar
    titles = [panel.get_title() for panel in panels[0]]
    assert titles == [f"layer {m}, head {h}" for m in (1, 2, 4, 5) for h in (1, 2)]
    for row, arm in enumerate(("tied", "asymmetric")):
        A_MHNS = attention.read(tmp_path / f"all/{arm}/seed_0/maps.npz")
        np.testing.assert_array_equal(panels[row, 5].images[0].get_array(), A_MHNS[3, 1])
    (norm,) = {panel.images[0].norm for panel in panels.flat}
    assert norm.vmax == max(panel.images[0].get_array().max() for panel in panels.flat) and norm(norm.vmax / 4) == 0.5
    assert "(seed 0)" in caption and "square root of the weight" in caption
    assert attention.columns(1, 12) == [(0, h) for h in range(8)] and len(attention.columns(12, 16)) == 8


def panels_of(rows, columns, **A_MHNS):
    return np.reshape(attention.side_by_side(A_MHNS, {arm: arm for arm in A_MHNS}).axes[:-1], (rows, columns))


def test_a_map_of_all_heads_and_of_other_layers_is_named_so():
    one, two = np.full((2, 1, 3, 3), 0.1), np.full((2, 2, 3, 3), 0.2)
    panels = panels_of(3, 4, none=one, tied=two, asymmetric=two)
    heads = [f"layer {m}, head {h}" for m in (1, 2) for h in (1, 2)]
    assert [[panel.get_title() for panel in row] for row in panels] == [
        ["layer 1, all heads", "", "layer 2, all heads", ""],
        heads,
        [""] * 4,
    ]
    assert [panel.axison for panel in panels[0]] == [True, False, True, False] and not panels[1, 0].get_xticklabels()
    panels = panels_of(2, 4, tied=one, asymmetric=np.full((9, 1, 3, 3), 0.1))
    assert [[panel.get_title() for panel in row] for row in panels] == [
        ["layer 1, head 1", "layer 2, head 1", "", ""],
        ["", *(f"layer {m}, head 1" for m in (4, 6, 9))],
    ]


def test_damaged_maps_are_told(tmp_path):
    file = tmp_path / "maps.npz"
    for arrays, sentence in (
        ({"A": np.ones(3)}, "needs the arrays .A_MHNS."),
        ({"A_MHNS": np.ones(3)}, "4 axes, and it has 1"),
        ({"A_MHNS": np.full((1, 1, 1, 1), "x")}, "must hold numbers"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(errors.UserError, match=sentence):
            attention.read(file)


def test_styles_differ_and_stay_the_same_arm():
    study = study_folder.study([f"arm{i}" for i in range(24)] + ["asymmetric"])
    style = styles.of(study)
    for looks in (("colour", "line"), ("colour", "marker"), ("line", "marker")):  # the last in grey, too
        assert len({tuple(getattr(one, look) for look in looks) for one in style.values()}) == 25
    assert [name for name, one in style.items() if one.line == "-"] == ["asymmetric"]
    assert list(style) == [arm.name for arm in study.arms] and style["asymmetric"].colour == "black"


def test_names_in_figures():
    assert styles.label("x" * 28) == "x" * 28 and styles.label("x" * 29) == "x" * 14 + "…" + "x" * 13
    assert styles.label("a b\n\x00") == "a b↵<0>"
    assert engine.spread(12, 4) == [0, 4, 7, 11] and engine.spread(2, 4) == [0, 1]
