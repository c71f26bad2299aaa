"""Draw docs/positions.png from the study of configs/positions_wide.py, and print the tables of positions.md.

python docs/positions.py runs/positions_wide runs/positions
"""

import json
import pathlib
import sys

from matplotlib import figure

from experiments.figures import plots
from experiments.studies import statistics

KINDS = {  # arm of positions_wide -> label
    "none": "none (causal mask)",
    "learned": "learned",
    "sinusoidal": "sinusoidal",
    "scaled": "sinusoidal, scaled",
    "alibi": "ALiBi",
}
TECHNIQUES = {  # arm of positions -> label
    "dynamic_tanh": "dynamic tanh",
    "multi_token": "multi-token prediction",
    "stochastic_depth": "stochastic depth",
    "label_smoothing": "label smoothing",
}
CONDITIONS = ["D32_300", "D64_300", "D128_300", "D64_100", "D64_1200"]
PANELS = {  # title -> condition -> label, colour and marker
    "Three widths, 300 steps": {
        "D32_300": ("32 features", plots.PALE, "v"),
        "D64_300": ("64 features", plots.BLUE, "o"),
        "D128_300": ("128 features", "black", "^"),
    },
    "Three lengths of training, 64 features": {
        "D64_100": ("100 steps", plots.PALE, "v"),
        "D64_300": ("300 steps", plots.BLUE, "o"),
        "D64_1200": ("1,200 steps", "black", "^"),
    },
}
TITLE = "Rotary positions have the lowest loss; with more training, learned and sinusoidal ones come closer"


def load(folder):
    """Return {condition: {arm: its entry in report.json}}."""
    report = json.loads(pathlib.Path(folder, "report.json").read_text(encoding="utf-8"))
    return {part["name"]: {arm["name"]: arm for arm in part["arms"]} for part in report["conditions"]}


def draw(arms):
    """Return the figure: loss of each kind of positions minus that of rotary ones, with joint intervals."""
    drawing = figure.Figure(figsize=(11, 4.4), layout="constrained")
    panels = drawing.subplots(1, len(PANELS), sharex=True, sharey=True)
    for panel, (title, conditions) in zip(panels, PANELS.items(), strict=True):
        for i, (condition, (label, colour, marker)) in enumerate(conditions.items()):
            for y, name in enumerate(KINDS):
                difference = arms[condition][name]["difference"]
                height, is_open = y + 0.2 * (i - 1), difference["kind"] == statistics.OPEN
                panel.plot(difference["interval"], [height, height], color=colour, lw=1.5, zorder=1)
                face = "white" if is_open else colour
                panel.plot(difference["mean"], height, marker, color=colour, mfc=face, ms=6)
            panel.plot([], [], marker, color=colour, ls="-", label=label)
        panel.axvline(0, color="black", lw=0.8)
        panel.set_title(title, fontsize=10)
        panel.grid(axis="x", alpha=0.3)
        panel.legend(loc="lower right", frameon=False, fontsize=9)
    panels[0].set_yticks(range(len(KINDS)), KINDS.values())
    panels[0].set_ylim(len(KINDS) - 0.5, -0.5)
    label = "held-out loss minus that of rotary positions, nats per character (hollow: no difference found)"
    drawing.supxlabel(label, fontsize=10)
    kinds = {arms[condition][name]["difference"]["kind"] for condition in CONDITIONS for name in KINDS}
    drawing.suptitle("" if statistics.BETTER in kinds else TITLE, fontsize=11)
    return drawing


def print_table(arms, labels):
    """Print the differences with their intervals, and the losses of rotary positions."""
    for name, label in labels.items():
        row = [label]
        for condition in CONDITIONS:
            d = arms[condition][name]["difference"]
            low, high = d["interval"]
            bold = "**" if d["kind"] in (statistics.BETTER, statistics.WORSE) else ""
            row.append(f"{bold}{d['mean']:+.3f}{bold} ({low:+.3f} to {high:+.3f})")
        print("| " + " | ".join(row) + " |")
    losses = [f"{arms[condition]['rotary']['mean']:.3f}" for condition in CONDITIONS]
    print("| loss of rotary positions | " + " | ".join(losses) + " |")


def main(wide, techniques=""):
    """Print the tables and draw the figure."""
    arms = load(wide)
    print_table(arms, KINDS)
    if techniques:
        print_table(load(techniques), TECHNIQUES)
    print(plots.write(draw(arms), pathlib.Path(__file__).with_name("positions.png"), dpi=200))


if __name__ == "__main__":
    main(*sys.argv[1:])
