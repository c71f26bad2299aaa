"""Draw docs/qk.png, the answer of qk_results.md, and print its tables on text.

python docs/qk.py runs/qk_heads runs/qk_positions runs/qk_matched
"""

import json
import pathlib
import sys

import numpy as np
from matplotlib import figure

from experiments.figures import plots
from experiments.studies import inference, statistics

SCORES = {  # arm -> label, colour, and whether tokens attend to themselves
    "tied": ("one matrix", "#D55E00", True),
    "tied_noself": ("one matrix, not to itself", "#D55E00", False),
    "sym_plus_skew_2": ("one matrix and a direction of rank 2", "#0072B2", True),
    "sym_plus_skew_2_noself": ("the same, not to itself", "#0072B2", False),
    "pairwise": ("one matrix, and K x K numbers in each head", "#009E73", True),
    "asymmetric_noself": ("two matrices, not to itself", "#000000", False),
    "asymmetric": ("two matrices", "#000000", True),
}
ON_RING = ["tied", "tied_noself", "sym_plus_skew_2", "pairwise", "asymmetric"]  # arms of qk_heads
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


def style_of(name):
    """Return the label and the look of a score: hollow if tokens do not attend to themselves."""
    label, colour, is_filled = SCORES[name]
    return label, {"color": colour, "marker": "o", "ls": "", "ms": 5, "mfc": colour if is_filled else "white"}


def draw_ring(panel, arms):
    """Draw the accuracy of each score at each size: the mean and the range of ten seeds."""
    for i, name in enumerate(ON_RING):
        _, look = style_of(name)
        values = [[100 * x for x in arms[f"layers_{M}_heads_{H}"][name]["values"].values()] for M, H in SIZES]
        x_J = [j + 0.14 * (i - 2) for j in range(len(SIZES))]
        panel.vlines(x_J, [*map(min, values)], [*map(max, values)], color=look["color"], lw=1.5)
        panel.plot(x_J, [sum(x) / len(x) for x in values], **look)
    panel.axhline(BOUND, color="gray", ls=":", lw=1)
    panel.text(7.4, 46, "dotted: bound of one symmetric head", color="gray", fontsize=8, ha="right")
    panel.set_xticks(range(len(SIZES)), [f"{M} x {H}" for M, H in SIZES])
    panel.set_xlabel("layers x heads")
    panel.set_ylabel("accuracy in %: mean and range of ten seeds")
    panel.set_title(
        "The predecessor on a ring of twelve tokens:\none head with one matrix fails in one layer", fontsize=10
    )


def draw_text(panel, arms):
    """Draw the loss of each score minus that of two matrices, with joint intervals, for each kind of positions."""
    names = [*SCORES][:-1]
    for i, name in enumerate(names):
        _, look = style_of(name)
        for j, condition in enumerate(POSITIONS):
            difference = arms[condition][name]["difference"]
            y = j + 0.13 * (i - 2.5)
            if difference["interval"]:
                panel.plot(difference["interval"], [y, y], color=look["color"], lw=1.5, zorder=1)
            panel.plot(difference["mean"], y, **look)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(POSITIONS)), POSITIONS.values())
    panel.set_ylim(len(POSITIONS) - 0.5, -0.5)
    panel.set_xlabel("held-out loss minus that of two matrices, nats per character")
    panel.set_ylabel("positions")
    title = "The next character of Shakespeare: no cost of one matrix\nis shown if no token attends to itself"
    panel.set_title(title, fontsize=10)


def print_table(arms, conditions):
    """Print the loss of two matrices and the differences of the others, a row for each condition."""
    for condition in conditions:
        row = [POSITIONS[condition], f"{arms[condition]['asymmetric']['mean']:.3f}"]
        for name in [*SCORES][:-1]:
            if name not in arms[condition]:
                continue
            d = arms[condition][name]["difference"]
            bold = "**" if d["kind"] in (statistics.WORSE, statistics.BETTER) else ""
            low, high = d["interval"] or (float("nan"), float("nan"))
            row.append(f"{bold}{d['mean']:+.3f}{bold} ({low:+.3f} to {high:+.3f})")
        print("| " + " | ".join(row) + " |")


def print_noself(arms):
    """Print the loss of one matrix minus that of two if no token attends to itself in either, in pairs of seeds.

    The intervals hold for all kinds of positions together, and leave out the chance in tuning.
    """
    for condition, label in POSITIONS.items():
        one, two = (arms[condition][name]["values"] for name in ("tied_noself", "asymmetric_noself"))
        difference = np.array([one[seed] - two[seed] for seed in two])
        low, high = inference.interval(difference, len(POSITIONS))
        print(f"| not to itself: {label} | {difference.mean():+.3f} ({low:+.3f} to {high:+.3f}) |")


def main(heads, positions, matched=""):
    """Print the tables and draw the figure."""
    arms = load(positions)
    print_table(arms, POSITIONS)
    print_noself(arms)
    if matched:
        print_table(load(matched), ["learned", "rotary"])
    drawing = figure.Figure(figsize=(11, 5), layout="constrained")
    left, right = drawing.subplots(1, 2)
    draw_ring(left, load(heads))
    draw_text(right, arms)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    styles = [style_of(name) for name in SCORES]
    lines = [left.plot([], [], label=label, **look)[0] for label, look in styles]
    drawing.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    print(plots.write(drawing, pathlib.Path(__file__).with_name("qk.png"), dpi=200))


if __name__ == "__main__":
    main(*sys.argv[1:])
