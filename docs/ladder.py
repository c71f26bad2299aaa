"""Draw docs/ladder.png from the studies of configs/ladder.py and ladder_digits.py, and print the tables of ladder.md.

python docs/ladder.py runs/ladder runs/ladder_digits
"""

import functools
import itertools
import json
import pathlib
import sys

import numpy as np
from matplotlib import figure

from experiments.figures import plots
from experiments.studies import inference, statistics

# What each rung adds, from the lowest.
LABELS = {
    "alone": "each token alone",
    "similarity": "attention: XᵀX",
    "one_matrix": "one matrix U: XᵀUᵀUX",
    "two_matrices": "two matrices Uk, Uq: XᵀUkᵀUqX",
    "values": "values V",
    "heads": "four heads",
    "low_rank": "values of low rank",
    "mlp": "MLP",
    "residual": "residual connections",
    "norm": "token norm",
    "positions": "learned positions",
    "rotary": "rotary positions instead",
}
COLOURS = {statistics.BETTER: "#009E73", statistics.WORSE: "#D55E00"}  # of a step from one rung to the next
GREY = "#999999"  # no difference found


def load(folder):
    """Return the arms of report.json from the lowest rung, and the step to each rung but the first."""
    report = json.loads(pathlib.Path(folder, "report.json").read_text(encoding="utf-8"))
    arms = {arm["name"]: arm for arm in report["conditions"][0]["arms"]}
    arms = [arms[name] for name in LABELS]
    pairs = [*itertools.pairwise(arms)]
    compare = functools.partial(statistics.compare, m=len(pairs), better="less")
    return arms, [compare(above["values"], below["values"]) for below, above in pairs]


def draw_panel(panel, arms, steps, title):
    """Draw the loss of each rung with its 95 % interval, seeds as dots, and parameters and FLOPs at the right."""
    for y, arm in enumerate(arms):
        losses = np.array([*arm["values"].values()])
        low, high = inference.interval(losses, 1)
        panel.plot(losses, np.full(len(losses), y), ".", color="black", alpha=0.3, ms=4)
        panel.plot([low, high], [y, y], color="black", lw=1)
        panel.plot(losses.mean(), y, "o", color="black", ms=5)
        cost = f"{losses.mean():4.2f}{arm['params'] / 1e3:6.0f} k{arm['flops_per_token'] / 1e3:9.0f} k"
        panel.text(1.02, y, cost, transform=panel.get_yaxis_transform(), va="center", family="monospace", fontsize=7)
    for y, step in enumerate(steps):
        means = [np.mean([*arm["values"].values()]) for arm in arms[y : y + 2]]
        panel.plot(means, [y, y + 1], color=COLOURS.get(step.kind, GREY), lw=2.5, zorder=0)
    header, place = "loss  params FLOP/token", panel.get_yaxis_transform()
    panel.text(1.02, len(arms) - 0.4, header, transform=place, va="bottom", family="monospace", fontsize=7)
    panel.set(title=title, xlabel="held-out loss (nats)", yticks=range(len(arms)), ylim=(-0.6, len(arms) - 0.4))
    panel.grid(axis="x", alpha=0.3)


def print_table(arms, steps):
    """Print the rows of the page: loss, the step from the rung below with its joint interval, p times 11."""
    for arm, step in zip(arms, [None, *steps], strict=True):
        row = [f"`{arm['name']}`", f"{arm['params']:,}", f"{arm['flops_per_token']:,.0f}", f"{arm['mean']:.3f}"]
        if step and step.interval:
            bold = "**" if step.kind in COLOURS else ""
            low, high = step.interval
            row += [f"{bold}{step.mean:+.3f}{bold}", f"{low:+.3f}", f"{high:+.3f}", f"{step.p_corrected:.2g}"]
        else:
            row += ["", "", "", step.kind if step else ""]
        print("| " + " | ".join(row) + " |")


def main(folders):
    """Draw the figure and print a table for each study."""
    drawing = figure.Figure(figsize=(10, 4.6), layout="constrained")
    panels = drawing.subplots(1, len(folders), sharey=True, squeeze=False)[0]
    for panel, folder, title in zip(panels, folders, ("characters of Shakespeare", "handwritten digits"), strict=False):
        arms, steps = load(folder)
        draw_panel(panel, arms, steps, title)
        print(f"\n{title}")
        print_table(arms, steps)
    panels[0].set_yticks(range(len(LABELS)), LABELS.values())
    kinds = {**COLOURS, statistics.OPEN: GREY}
    lines = [panels[0].plot([], [], color=colour, lw=2.5, label=kind) for kind, colour in kinds.items()]
    drawing.legend(handles=[line for (line,) in lines], loc="outside lower center", ncols=3, frameon=False)
    print(plots.write(drawing, pathlib.Path(__file__).with_name("ladder.png")))


if __name__ == "__main__":
    main(sys.argv[1:])
