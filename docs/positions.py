"""Draw docs/positions.png from the study of configs/positions.py, and print the tables of positions.md.

python docs/positions.py runs/positions
"""

import json
import pathlib
import sys

from matplotlib import figure

from experiments.figures import plots
from experiments.studies import statistics

ROWS = {  # title -> arm -> label
    "instead of rotary positions": {
        "none": "no positions",
        "learned": "learned",
        "sinusoidal": "sinusoidal",
        "alibi": "ALiBi",
    },
    "added to rotary positions": {
        "dynamic_tanh": "dynamic tanh",
        "multi_token": "multi-token prediction",
        "stochastic_depth": "stochastic depth",
        "label_smoothing": "label smoothing",
    },
}
CONDITIONS = {
    "D32_300": "32 features",
    "D64_300": "64 features",
    "D128_300": "128 features",
    "D64_100": "64 features, 100 steps",
    "D64_1200": "64 features, 1,200 steps",
}
TITLE = "No other kind of positions, and nothing added to rotary positions, is shown to be better than they are"
COLOURS = {statistics.BETTER: "#009E73", statistics.WORSE: "#D55E00"}
GREY = "#999999"  # no difference found


def load(folder):
    """Return {condition: {arm: its entry in report.json}}."""
    report = json.loads(pathlib.Path(folder, "report.json").read_text(encoding="utf-8"))
    return {part["name"]: {arm["name"]: arm for arm in part["arms"]} for part in report["conditions"]}


def draw(arms):
    """Return the figure: for each condition and arm the difference to rotary positions and its joint interval."""
    drawing, kinds = figure.Figure(figsize=(11, 4.8), layout="constrained"), set()
    panels = drawing.subplots(len(ROWS), len(CONDITIONS), sharex="row", sharey="row")
    for (title, labels), row in zip(ROWS.items(), panels, strict=True):
        row[0].set_yticks(range(len(labels)), labels.values())
        row[0].set_ylim(len(labels) - 0.6, -0.4)
        row[0].set_ylabel(title, fontsize=8)
        for condition, panel in zip(CONDITIONS, row, strict=True):
            for y, name in enumerate(labels):
                difference = arms[condition][name]["difference"]
                colour = COLOURS.get(difference["kind"], GREY)
                kinds.add(difference["kind"])
                panel.plot(difference["interval"], [y, y], color=colour, lw=2)
                panel.plot(difference["mean"], y, "o", color=colour, ms=5)
            panel.axvline(0, color="black", lw=0.8)
            panel.grid(axis="x", alpha=0.3)
    for panel, title in zip(panels[0], CONDITIONS.values(), strict=True):
        panel.set_title(title, fontsize=9)
    label = "held-out loss minus that of rotary positions (nats per character); 300 steps if not stated"
    drawing.supxlabel(label, fontsize=9)
    colours = {kind: COLOURS.get(kind, GREY) for kind in (*COLOURS, statistics.OPEN) if kind in kinds}
    lines = [panels[0, 0].plot([], [], color=colour, lw=2, label=kind) for kind, colour in colours.items()]
    drawing.legend(handles=[line for (line,) in lines], loc="outside lower right", ncols=3, frameon=False)
    drawing.suptitle("" if statistics.BETTER in kinds else TITLE)
    return drawing


def print_tables(arms):
    """Print the differences with their intervals, and the losses of rotary positions."""
    for labels in ROWS.values():
        for name, label in labels.items():
            row = [label]
            for condition in CONDITIONS:
                d = arms[condition][name]["difference"]
                low, high = d["interval"]
                bold = "**" if d["kind"] in COLOURS else ""
                row.append(f"{bold}{d['mean']:+.3f}{bold} ({low:+.3f} to {high:+.3f})")
            print("| " + " | ".join(row) + " |")
    losses = [f"{arms[condition]['rotary']['mean']:.3f}" for condition in CONDITIONS]
    print("| loss of rotary positions | " + " | ".join(losses) + " |")


def main(folder):
    """Print the tables and draw the figure."""
    arms = load(folder)
    print_tables(arms)
    print(plots.write(draw(arms), pathlib.Path(__file__).with_name("positions.png"), dpi=2 * plots.DPI))


if __name__ == "__main__":
    main(*sys.argv[1:])
