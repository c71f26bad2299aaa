"""The figure: every participant's time beside ours, in one group of bars for each workload."""

import pathlib
from typing import Any

import matplotlib.figure
import matplotlib.patches

from benchmarks import table

COLOURS = {"ours": "#1b6ca8", "transformers": "#d9822b", "transformers compiled": "#e8b877", "flax": "#7a9e7e"}
WIDTH = 0.2  # of a bar, where the groups are 1 apart
HIGHEST = 8.0  # of what is drawn: a bar that would be higher is cut there, and its number tells


def draw(file: pathlib.Path, results: dict[str, dict[str, Any]], *, machine: dict[str, Any]) -> None:
    """Write the PNG: times relative to ours, which are 1; the medians of the turns, with their spread.

    results: of workloads, by their names, as `session.measure` returns them.
    """
    canvas = matplotlib.figure.Figure(figsize=(max(1.7 * len(results) + 1, 6), 4.2), dpi=150, layout="constrained")
    axes = canvas.subplots()
    names = ["ours", *dict.fromkeys(peer for result in results.values() for peer in result["peers"])]
    for group, result in enumerate(results.values()):
        bars(axes, group, result, [name for name in names if name in ("ours", *result["peers"])])
    axes.axhline(1, color=COLOURS["ours"], linewidth=0.8, zorder=0)
    axes.set_xlim(-0.6, len(results) - 0.4)
    axes.set_ylim(0, 1.08 * min(HIGHEST, axes.get_ylim()[1]))
    axes.set_xticks(range(len(results)), [foot(name, result) for name, result in results.items()], fontsize=8)
    axes.set_ylabel("time, relative to ours (less is faster)")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [matplotlib.patches.Patch(color=COLOURS.get(name, "grey"), label=name) for name in names]
    canvas.legend(handles=handles, frameon=False, fontsize=8, ncols=len(names), loc="outside upper center")
    axes.set_xlabel(f"{machine['processor']}, {machine['cores']} cores, float32", fontsize=8, color="0.4")
    canvas.savefig(file)


def foot(name: str, result: dict[str, Any]) -> str:
    """What stands under a group: the workload, and what 1 is there."""
    return f"{name}\n{result['title']}\nours: {table.duration(result['ours']['median_seconds'])}"


def bars(axes: Any, group: int, result: dict[str, Any], names: list[str]) -> None:
    """The bars of one workload, side by side around its place."""
    for i, name in enumerate(names):
        x = group + (i - (len(names) - 1) / 2) * WIDTH
        colour = COLOURS.get(name, "grey")
        if name == "ours":
            axes.bar(x, 1, WIDTH * 0.92, color=colour)
            continue
        ratio, (low, high) = result["peers"][name]["ratio"], result["peers"][name]["ratio_spread"]
        axes.bar(x, min(ratio, HIGHEST), WIDTH * 0.92, color=colour)
        if high <= HIGHEST:
            axes.errorbar(x, ratio, [[ratio - low], [high - ratio]], color="0.3", elinewidth=0.8)
        told = f"{ratio:.2f}" if ratio <= HIGHEST else f"↑ {ratio:.1f}"
        axes.annotate(told, (x, min(high, HIGHEST)), (0, 2), textcoords="offset points", ha="center", fontsize=7)
