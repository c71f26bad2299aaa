"""The figures of a study show the numbers of its runs."""

import itertools

import numpy as np
import pytest
import study_folder
from matplotlib import colors

from experiments.figures import plots
from experiments.studies import figures as study_figures, runs as study_runs, statistics, styles


def draw(kind, folder, study):
    """Draw a figure of the first condition. Return (figure, caption), or None if there are no numbers."""
    finished = study_runs.load(folder, study)
    return study_figures.draw_kind(kind, statistics.analyse(study, finished)[0], finished, styles.choose_styles(study))


def find_means(panel, colour):
    """Return the lines of this colour that are means, not seeds."""
    lines = [line for line in panel.lines if colors.same_color(line.get_color(), colour)]
    return [line for line in lines if line.get_linewidth() > study_figures.THIN]


def write_curves(folder, ends):
    """Write a run for each arm and each of its curves, with evaluations at steps 0, 100, 200 and so on."""
    for arm, seed_losses in ends.items():
        for seed, losses in enumerate(seed_losses):
            evaluations = [(100 * i, loss) for i, loss in enumerate(losses)]
            study_folder.write_run(folder, "all", arm, seed, metrics={"eval/loss": losses[-1]}, evaluations=evaluations)


def test_course_shows_mean_band_and_paired_difference(tmp_path):
    study = study_folder.make_study(("tied", "gone", "asymmetric"), seeds=(0, 1), threshold=2.5)
    write_curves(tmp_path, {"asymmetric": [(5.0, 2.0), (6.0, 2.0)], "tied": [(6.0, 3.0), (8.0, 6.0)]})
    drawing, caption = draw("course", tmp_path, study)
    _, held_out, paired = drawing.axes
    (tied,) = find_means(held_out, styles.COLOURS[0])
    assert tied.get_xdata().tolist() == [0, 100] and tied.get_ydata().tolist() == [7.0, 4.5]
    extents = [band.get_paths()[0].get_extents().extents.tolist() for band in held_out.collections]
    assert extents == [[0, 3, 100, 8], [0, 2, 100, 6]]
    seeds = [line.get_ydata().tolist() for line in held_out.lines if line.get_linewidth() == study_figures.THIN]
    assert seeds == [[6, 3], [8, 6], [5, 2], [6, 2]]
    (difference,) = find_means(paired, styles.COLOURS[0])
    assert difference.get_ydata().tolist() == [1.5, 2.5]
    assert paired.collections[0].get_paths()[0].get_extents().extents.tolist() == [0, 1, 100, 4]
    assert [2.5, 2.5] in [list(line.get_ydata()) for line in held_out.lines]  # the threshold
    assert "2.5" in caption and '"gone"' in caption and '"tied"' not in caption
    (reference,) = find_means(held_out, "black")
    assert tied.get_zorder() > reference.get_zorder() and tied.is_dashed() and not reference.is_dashed()


def test_the_metric_is_shown_against_flops_and_seconds_if_the_reference_knows_them(tmp_path):
    study = study_folder.make_study(seeds=(0, 1))
    for arm, seed in itertools.product(("tied", "asymmetric"), (0, 1)):
        costs = {"flops_per_step": 1e6} if arm == "tied" else {"flops_per_step": 3e6, "seconds_per_step": 0.5 + seed}
        points = [(0, 5.0), (100, 2.0 + seed)]
        study_folder.write_run(tmp_path, "all", arm, seed, metrics={"eval/loss": 2.0}, evaluations=points, **costs)
    drawing, caption = draw("cost", tmp_path, study)
    flops, seconds = drawing.axes
    assert "one after the other" in seconds.get_xlabel() and "no benchmark" in caption
    ends = [find_means(flops, colour)[0].get_xdata().tolist() for colour in (styles.COLOURS[0], "black")]
    assert ends == [[0, 1e8], [0, 3e8]] and find_means(seconds, styles.COLOURS[0]) == []
    (reference,) = find_means(seconds, "black")
    assert reference.get_xdata().tolist() == [0, 100] and reference.get_ydata().tolist() == [5, 2.5]
    swapped = study._replace(arms=study.arms[::-1])  # now the reference has no seconds
    assert [panel.get_title() for panel in draw("cost", tmp_path, swapped)[0].axes] == ["loss against FLOPs"]
    write_curves(tmp_path / "unknown", {"tied": [(5.0, 2.0)], "asymmetric": [(5.0, 2.0)]})
    assert draw("cost", tmp_path / "unknown", study) is None


@pytest.mark.parametrize(("early", "is_cut"), [(5.0, True), (8.8, True), (8.95, False)])
def test_early_differences_do_not_hide_late_ones(tmp_path, early, is_cut):
    write_curves(tmp_path, {"asymmetric": [(9.0, 2.0, 1.0)], "tied": [(early, 2.02, 1.01)]})
    drawing, _ = draw("course", tmp_path, study_folder.make_study(seeds=(0,)))
    assert (drawing.axes[2].get_ylim() == pytest.approx((-0.012, 0.032))) == is_cut


def test_training_losses_are_smoothed_and_accuracies_not_on_a_logarithmic_scale(tmp_path):
    study = study_folder.make_study(metric="eval/accuracy", seeds=(0,))
    peak = [1.0] * 100 + [101.0] + [1.0] * 99
    for arm, n in (("tied", 200), ("asymmetric", 50)):
        rows = [{"step": i, "train/loss": x} for i, x in enumerate(peak[:n])]
        rows += [{"step": i, "eval/accuracy": x} for i, x in enumerate((0.01, 0.5, 0.9))]
        study_folder.write_run(tmp_path, "all", arm, 0, metrics={"eval/accuracy": 0.9}, rows=rows)
    training, held_out, _ = draw("course", tmp_path, study)[0].axes
    assert [training.get_yscale(), held_out.get_yscale()] == ["log", "linear"]
    (tied,), (few,) = find_means(training, styles.COLOURS[0]), find_means(training, "black")
    assert tied.get_ydata()[97:104] == pytest.approx([1, 21, 21, 21, 21, 21, 1])
    assert few.get_ydata() == pytest.approx(np.ones(50))


def test_differences_show_seeds_mean_and_interval(tmp_path):
    study = study_folder.make_study(("tied", "few", "asymmetric"), seeds=(0, 1, 2))
    study_folder.write_losses(tmp_path, "all", {"tied": [2.1, 2.2, 2.3], "few": [1.5], "asymmetric": [1.0, 1.1, 1.0]})
    condition = statistics.analyse(study, study_runs.load(tmp_path, study))[0]
    drawing, caption = draw("differences", tmp_path, study)
    (panel,) = drawing.axes
    interval, mean, seeds = find_means(panel, styles.COLOURS[0])
    assert (tuple(interval.get_xdata()), interval.get_ydata()[0]) == (condition.arms[0].difference.interval, 0)
    assert mean.get_xdata() == pytest.approx([3.5 / 3]) and seeds.get_xdata() == pytest.approx([1.1, 1.1, 1.3])
    assert len(find_means(panel, styles.COLOURS[1])) == 2  # one pair has no interval
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels == ["tied (n = 3)", "few (n = 1)", "asymmetric (reference)"]
    assert [2] in [list(line.get_ydata()) for line in find_means(panel, "black")]  # the mark of the reference
    assert "left of the line: better" in panel.get_xlabel() and "2 comparisons" in caption


def test_symmetry_shows_a_panel_for_each_measure_and_layer(tmp_path):
    study = study_folder.make_study(seeds=(0,))
    study_folder.write_study(tmp_path, study, M=3)
    panels = np.reshape(draw("symmetry", tmp_path, study)[0].axes, (3, 3))
    assert [panel.get_title() for panel in panels[1]] == [f"symmetry of the sum, layer {m}" for m in (1, 2, 3)]
    (reference,) = find_means(panels[0, 2], "black")
    assert reference.get_ydata() == pytest.approx(np.tanh(np.linspace(0, 1, 11)))
    (reference,) = find_means(panels[1, 0], "black")
    assert reference.get_ydata()[-1] == pytest.approx(np.tanh(1 / 6))
    other = [study.arms[0]._replace(changes={"model.norm": "rms"}), study.arms[1]._replace(changes={})]
    assert draw("symmetry", tmp_path, study._replace(arms=other)) is None  # the arms have the same score
    write_curves(tmp_path / "without", {"asymmetric": [(5.0, 2.0)]})
    assert draw("symmetry", tmp_path / "without", study) is None


def test_a_legend_has_as_few_rows_as_fit(tmp_path):
    for names, rows in ((["a", "b", "base"], 1), (["x" * 28] * 5, 3), (["x" * 80] * 2, 2)):
        drawing, _ = plots.canvas(7.0, 3)
        styles.draw_legend(drawing, {str(i): styles.number_style(i, name) for i, name in enumerate(names)})
        plots.write(drawing, tmp_path / "legend.png")
        assert len({round(text.get_window_extent().y0) for text in drawing.legends[0].get_texts()}) == rows
    names = {
        "eval/calibration_error": "calibration error",
        "optim.learning_rate": "learning rate",
        "val_loss": "val loss",
    }
    assert {name: styles.spell(name) for name in names} == names


def test_styles_differ_and_long_names_are_shortened():
    study = study_folder.make_study([f"arm{i}" for i in range(24)] + ["asymmetric"])
    style = styles.choose_styles(study)
    # The last pair also distinguishes arms in grey.
    for names in (("colour", "line"), ("colour", "marker"), ("line", "marker")):
        assert len({tuple(getattr(arm_style, name) for name in names) for arm_style in style.values()}) == 25
    assert list(style) == [arm.name for arm in study.arms] and style["asymmetric"].colour == "black"
    assert styles.shorten("x" * 28) == "x" * 28 and styles.shorten("x" * 29) == "x" * 14 + "…" + "x" * 13
    assert plots.spread(12, 4) == [0, 4, 7, 11] and plots.spread(2, 4) == [0, 1]
