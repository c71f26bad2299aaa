"""Draw docs/ring.png from the condition ring of the study of configs/qk_synthetic.py.

python docs/ring.py runs/qk_synthetic
"""

import pathlib
import sys

from experiments.figures import plots
from experiments.studies import figures, results, runs, study as studies, styles

LABELS = {
    "none": "no matrix: products of tokens",
    "tied": "one matrix",
    "tied_noself": "one matrix, a token does not attend to itself",
    "tied_signed": "one matrix, features with signs",
    "pairwise": "one matrix and a K x K matrix between",
    "asymmetric": "two matrices",
}
TITLE = "On a ring, one symmetric head finds at most 11 of 12 predecessors. Two matrices find all."
MOST = (11 + 1 / 24) / 12  # 11 right answers, and one by chance among 24 words: docs/ring.md


def draw(folder):
    """Return the figure: training loss and held-out accuracy of the seeds of each score, and their means."""
    study = studies.read(results.load_settings(folder))
    finished = [run for run in runs.load(folder, study) if run.condition == "ring"]
    scores = {name: [run for run in finished if run.arm == name] for name in LABELS}
    names = {"training loss": "train/loss", "accuracy on held-out rings": "eval/accuracy"}
    panels = []
    for title, name in names.items():
        curves = figures.stack(scores, lambda run, name=name: run.curve(name))
        panels.append(figures.Panel(title, "step", curves, falls=name == "train/loss"))
    style = {name: look._replace(label=LABELS[name]) for name, look in styles.choose_styles(study).items()}
    drawing, [[_, accuracy]], _ = figures.draw_panels([panels], style, width=5.5, height=4)
    accuracy.axhline(MOST, color="grey", lw=0.8, ls=(0, (1, 3)))
    place = {"transform": accuracy.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    accuracy.text(0.98, MOST, "92.0 %: the best to expect of one symmetric head", color="dimgrey", fontsize=8, **place)
    drawing.suptitle(TITLE)
    return drawing


def main(folder):
    """Draw the figure."""
    drawing = draw(pathlib.Path(folder))
    print(plots.write(drawing, pathlib.Path(__file__).with_name("ring.png"), dpi=2 * plots.DPI))


if __name__ == "__main__":
    main(*sys.argv[1:])
