"""Draw docs/ladder.png from four studies, and print the tables of ladder.md.

python docs/ladder.py runs/ladder runs/ladder_digits runs/leave_one_out runs/leave_one_out_digits
"""

import itertools
import json
import pathlib
import sys

import numpy as np
from matplotlib import figure

from experiments.figures import plots
from experiments.studies import inference, statistics

RUNGS = {  # what each rung adds, from the first
    "alone": "each token alone",
    "similarity": "attention: softmax(XᵀX)",
    "one_matrix": "one matrix: XᵀUᵀUX",
    "two_matrices": "two matrices: XᵀUkᵀUqX",
    "values": "values V",
    "heads": "four heads",
    "low_rank": "values of low rank",
    "mlp": "MLP",
    "residual": "residual connections",
    "norm": "token norm",
    "positions": "learned positions",
    "rotary": "rotary positions instead",
}
WITHOUT = {
    "no_attention": "attention to other tokens",
    "no_residual": "residual connections",
    "no_positions": "positions",
    "one_matrix": "the second matrix of the score",
    "no_mlp": "MLP",
    "no_values": "values V",
    "no_norm": "token norm",
    "one_head": "heads (one of 64 features)",
    "rotary": "learned positions (rotary instead)",
}
TITLES = ("characters of Shakespeare", "handwritten digits")
COLOURS = {statistics.BETTER: "#009E73", statistics.WORSE: "#D55E00"}  # lower loss, higher loss
GREY = "#777777"  # undecided


def load(folder, names):
    """Return these arms of report.json, and the variance of a mean that comes from tuning, 0 if it is not known."""
    report = json.loads(pathlib.Path(folder, "report.json").read_text(encoding="utf-8"))
    arms = {arm["name"]: arm for arm in report["conditions"][0]["arms"]}
    return [arms[name] for name in names], np.mean([choice["variance"] or 0 for choice in report["tuned"]] or 0)


def compare_steps(arms, variance):
    """Return the comparison of each rung with the one before it; the intervals hold for all steps together."""
    pairs = [*itertools.pairwise(arms)]
    options = {"m": len(pairs), "better": "less", "extra": 2 * variance}
    return [statistics.compare(arm["values"], before["values"], **options) for before, arm in pairs]


def describe(kind, mean):
    """Return the colour of a difference, and its text: the number if it is shown."""
    return COLOURS.get(kind, GREY), f"{mean:+.2f}" if kind in COLOURS else "undecided"


def draw_ladder(panel, arms, steps):
    """Draw the loss of each rung, downward: seeds, a 95 % interval, and a coloured line from the rung before."""
    means = [arm["mean"] for arm in arms]
    for y, arm in enumerate(arms):
        losses = np.array([*arm["values"].values()])
        panel.plot(losses, np.full(len(losses), y), ".", color="black", alpha=0.3, ms=4)
        panel.plot(inference.interval(losses, 1), [y, y], color="black", lw=1)
        panel.plot(means[y], y, "o", color="black", ms=5)
    for y, step in enumerate(steps):
        colour, text = describe(step.kind, step.mean)
        panel.plot(means[y : y + 2], [y, y + 1], color=colour, lw=2.5, zorder=0)
        panel.text(1.02, y + 1, text, transform=panel.get_yaxis_transform(), va="center", color=colour, fontsize=8)
    panel.set_xlabel("held-out loss in nats; at the right, the step from the row above", fontsize=8)


def draw_without(panel, arms):
    """Draw the loss of each arm minus that of the whole transformer, with its joint 95 % interval."""
    for y, arm in enumerate(arms):
        difference = arm["difference"]
        colour, text = describe(difference["kind"], difference["mean"])
        panel.plot(difference["interval"], [y, y], color=colour, lw=2)
        panel.plot(difference["mean"], y, "o", color=colour, ms=5)
        panel.text(1.02, y, text, transform=panel.get_yaxis_transform(), va="center", color=colour, fontsize=8)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_xlabel("held-out loss minus that of the whole transformer, in nats", fontsize=8)


def draw(ladders, leave_outs):
    """Return the figure: the ladders above, and below what is lost without each element; a column for each data set."""
    drawing = figure.Figure(figsize=(9.5, 7.6), layout="constrained")
    parts = drawing.subfigures(2, 1, height_ratios=[12, 10])
    titles = ("One element after the other, from top to bottom", "The whole transformer without one element")
    for part, title, names in zip(parts, titles, (RUNGS, WITHOUT), strict=True):
        part.suptitle(title, fontsize=11)
        panels = part.subplots(1, 2, sharey=True)
        panels[0].set_yticks(range(len(names)), names.values())
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        for panel, data in zip(panels, TITLES, strict=True):
            panel.set_title(data, fontsize=9)
            panel.grid(axis="x", alpha=0.3)
        if names is RUNGS:
            for panel, (arms, steps) in zip(panels, ladders, strict=True):
                draw_ladder(panel, arms, steps)
        else:
            for panel, arms in zip(panels, leave_outs, strict=True):
                draw_without(panel, arms)
    return drawing


def print_row(arm, difference, names):
    """Print a row of the page: name, sizes, loss, and a difference with its joint interval and corrected p."""
    row = [f"`{arm['name']}`: {names[arm['name']]}"]
    row += [f"{arm['params']:,}", f"{arm['flops_per_token']:,.0f}", f"{arm['mean']:.3f}"]
    if difference and difference["interval"]:
        bold = "**" if difference["kind"] in COLOURS else ""
        low, high = difference["interval"]
        numbers = [f"{bold}{difference['mean']:+.3f}{bold}", f"{low:+.3f}", f"{high:+.3f}"]
        row += [*numbers, f"{difference['p_corrected']:.2g}"]
    else:
        row += ["", "", "", difference["kind"] if difference else ""]
    print("| " + " | ".join(row) + " |")


def main(*folders):
    """Print a table for each study, and draw the figure."""
    ladders, leave_outs = [], []
    for folder, data in zip(folders[:2], TITLES, strict=True):
        arms, variance = load(folder, RUNGS)
        ladders.append((arms, compare_steps(arms, variance)))
        print(f"\n{data}: SD from tuning {variance**0.5:.4f}")
        for arm, step in zip(arms, [None, *ladders[-1][1]], strict=True):
            print_row(arm, step and vars(step), RUNGS)
    for folder, data in zip(folders[2:], TITLES, strict=True):
        (*arms, whole), variance = load(folder, [*WITHOUT, "whole"])
        leave_outs.append(arms)
        print(f"\n{data}, without one element: SD from tuning {variance**0.5:.4f}")
        for arm in (whole, *arms):
            print_row(arm, arm["difference"], WITHOUT | {"whole": "the whole transformer"})
    print(plots.write(draw(ladders, leave_outs), pathlib.Path(__file__).with_name("ladder.png"), dpi=200))


if __name__ == "__main__":
    main(*sys.argv[1:])
