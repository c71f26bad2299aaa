"""Figures per layer: symmetry and directionality over training, and attention's entropy and diagonal at the end."""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import figure, lines

from experiments.engine import figures
from experiments.studies import curves, measures, styles
from experiments.studies import runs as loaded

MOST = 6  # layers shown, evenly spread


def symmetry(
    path: pathlib.Path, *, runs: Sequence[loaded.Run], style: Mapping[str, styles.Style]
) -> list[list[str]] | None:
    """One row of panels for each measure, one column for each layer; None where no run has logged any, else the arms
    whose lines lie on one another."""
    depth = max((loaded.layers(run, name) for run in runs for name in measures.SYMMETRY), default=0)
    names = [name for name in measures.SYMMETRY if any(loaded.layers(run, name) for run in runs)]
    if not depth:
        return None
    shown = styles.spread(depth, MOST)
    drawing = figure.Figure(figsize=(max(7.0, 2.1 * len(shown) + 0.8), 2.1 * len(names) + 1), layout="constrained")
    panels = drawing.subplots(len(names), len(shown), sharex=True, sharey="row", squeeze=False)
    logged = [run for run in runs if any(loaded.layers(run, name) for name in names)]
    by_arm = {arm: [run for run in logged if run.arm == arm] for arm in style}
    by_arm = {arm: mine for arm, mine in by_arm.items() if mine}
    for row, name in zip(panels, names, strict=True):
        for panel, m in zip(row, shown, strict=True):
            for arm, mine in by_arm.items():
                step_I, value_RI = loaded.stack(loaded.curve(run, f"{name}/{m + 1}") for run in mine)
                curves.band(panel, step_I, value_RI, style[arm], many=len(by_arm) > 6)
            panel.grid(alpha=0.3)
            panel.tick_params(labelsize=8)
        row[0].set_ylabel(textwrap.fill(measures.SYMMETRY[name], 16), fontsize=9)
    for m, top, bottom in zip(shown, panels[0], panels[-1], strict=True):
        top.set_title(f"layer {m + 1}", fontsize=9)
        bottom.set_xlabel("step", fontsize=9)
    curves.legend(drawing, [style[arm] for arm in by_arm])
    figures.write(drawing, path)
    return curves.coinciding(panels.flat)


def attention(path: pathlib.Path, *, runs: Sequence[loaded.Run], style: Mapping[str, styles.Style]) -> bool:
    """One panel for each measure: in each layer the arms side by side, seeds as dots, their mean as a bar; False where
    no run has measured any."""
    arms = [arm for arm in style if any(run.arm == arm and run.summary.get("attention") for run in runs)]
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    names = [name for name in measures.ATTENTION if measures.attention_layers(runs, name)]
    if not names:
        return False
    shown = styles.spread(max(len(measures.attention_layers(runs, name)) for name in names), MOST)
    drawing = figure.Figure(figsize=(10, 2.1 * len(names) + 1), layout="constrained")
    panels = drawing.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        for i, arm in enumerate(arms):
            layers = measures.attention_layers(by_arm[arm], name)
            for x, m in enumerate(shown):
                seed_R = [v for v in (layers[m] if m < len(layers) else []) if v is not None]
                _seeds(panel, x + 0.8 * ((i + 0.5) / len(arms) - 0.5), min(0.3 / len(arms), 0.06), seed_R, style[arm])
        panel.set_ylabel(measures.ATTENTION[name], fontsize=9)
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
        panel.grid(axis="y", alpha=0.3)
        panel.tick_params(labelsize=8)
    panels[-1].set_xticks(range(len(shown)), [f"layer {m + 1}" for m in shown])
    handles = [lines.Line2D([], [], color=style[arm].colour, marker=style[arm].marker, lw=2) for arm in arms]
    styles.legend(drawing, handles, [style[arm].label for arm in arms])
    figures.write(drawing, path)
    return True


def _seeds(panel: Any, x: float, half: float, seed_R: Sequence[float], style: styles.Style) -> None:
    """A dot for each seed, and a bar at their mean, `half` wide to each side."""
    if seed_R:
        panel.hlines(np.mean(seed_R), x - half, x + half, color=style.colour, lw=2)
        panel.plot([x] * len(seed_R), seed_R, ls="", marker=style.marker, ms=3, mfc="none", mew=0.7, color=style.colour)
