"""Draw docs/qk.png, the answer of qk_results.md, and print its tables on text.

python docs/qk.py runs/qk_heads runs/qk_positions runs/qk_matched
"""

import json
import pathlib
import sys

from matplotlib import figure

from experiments.figures import plots
from experiments.studies import statistics

SCORES = {  # arm -> label and colour
    "tied": ("tied: one matrix", "#D55E00"),
    "tied_noself": ("tied, without attention to oneself", "#E69F00"),
    "sym_plus_skew_2": ("one matrix and a direction of rank 2", "#56B4E9"),
    "pairwise": ("one matrix, and K x K numbers in each head", "#009E73"),
    "asymmetric": ("two matrices", "#000000"),
}
POSITIONS = {
    "learned": "learned",
    "rotary": "rotary",
    "buckets": "relative, buckets",
    "alibi": "ALiBi",
    "none": "none (causal mask)",
}
SIZES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4), (3, 1), (3, 4)]  # layers and heads of qk_heads
BOUND = 92.0  # % on average, if one symmetric head serves 11 of 12 tokens: docs/ring.md


def load(folder):
    """Return {condition: {arm: its entry in report.json}}."""
    report = json.loads(pathlib.Path(folder, "report.json").read_text(encoding="utf-8"))
    return {part["name"]: {arm["name"]: arm for arm in part["arms"]} for part in report["conditions"]}


def draw_ring(panel, arms):
    """Draw the accuracy of each score at each size: the mean and the range of ten seeds."""
    for i, (name, (_, colour)) in enumerate(SCORES.items()):
        values = [[100 * x for x in arms[f"layers_{M}_heads_{H}"][name]["values"].values()] for M, H in SIZES]
        x_J = [j + 0.13 * (i - 2) for j in range(len(SIZES))]
        panel.vlines(x_J, [*map(min, values)], [*map(max, values)], color=colour, lw=1.5)
        panel.plot(x_J, [sum(x) / len(x) for x in values], "o", color=colour, ms=4)
    panel.axhline(BOUND, color="gray", ls=":", lw=1)
    panel.text(7.5, BOUND - 0.7, "bound of one symmetric head, 92 %", color="gray", fontsize=7, ha="right", va="top")
    panel.set_xticks(range(len(SIZES)), [f"{M} x {H}" for M, H in SIZES])
    panel.set_xlabel("layers x heads")
    panel.set_ylabel("accuracy in %, mean and range of ten seeds")
    panel.set_title("The predecessor on a ring of twelve tokens:\nwith eight heads one matrix is enough", fontsize=10)


def draw_text(panel, arms):
    """Draw the loss of each score minus that of two matrices, with joint intervals, for each kind of positions."""
    for i, (name, (_, colour)) in enumerate([*SCORES.items()][:-1]):
        for j, condition in enumerate(POSITIONS):
            difference = arms[condition][name]["difference"]
            y = j + 0.16 * (i - 1.5)
            if difference["interval"]:
                panel.plot(difference["interval"], [y, y], color=colour, lw=1.5)
            panel.plot(difference["mean"], y, "o", color=colour, ms=4)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(POSITIONS)), POSITIONS.values())
    panel.set_ylim(len(POSITIONS) - 0.5, -0.5)
    panel.set_xlabel("held-out loss minus that of two matrices, nats per character")
    panel.set_ylabel("positions")


def print_table(arms, conditions):
    """Print the loss of two matrices and the differences of the others, a row for each condition."""
    for condition in conditions:
        row = [POSITIONS[condition], f"{arms[condition]['asymmetric']['mean']:.3f}"]
        for name in [*SCORES][:-1]:
            d = arms[condition][name]["difference"]
            bold = "**" if d["kind"] in (statistics.WORSE, statistics.BETTER) else ""
            low, high = d["interval"]
            row.append(f"{bold}{d['mean']:+.3f}{bold} ({low:+.3f} to {high:+.3f})")
        print("| " + " | ".join(row) + " |")


def main(heads, positions, matched, title="Characters of Shakespeare:\nwhat one matrix costs"):
    """Print the tables and draw the figure. title: of the panel on text."""
    arms = load(positions)
    print_table(arms, POSITIONS)
    print()
    print_table(load(matched), ["learned", "rotary"])
    drawing = figure.Figure(figsize=(11, 4.6), layout="constrained")
    left, right = drawing.subplots(1, 2)
    draw_ring(left, load(heads))
    draw_text(right, arms)
    right.set_title(title, fontsize=10)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    lines = [left.plot([], [], "o", color=colour, ms=5, label=label)[0] for label, colour in SCORES.values()]
    drawing.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    print(plots.write(drawing, pathlib.Path(__file__).with_name("qk.png")))


if __name__ == "__main__":
    main(*sys.argv[1:])
