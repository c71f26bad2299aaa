"""All figures of a report, each with a caption that says what is drawn and over how many runs."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.engine import disk, figures
from experiments.studies import curves, layers, maps, overall, statistics, styles, verdict
from experiments.studies import runs as loaded
from experiments.studies import study as studies


class Drawn(NamedTuple):
    """A figure that has been written."""

    file: pathlib.Path
    section: str  # of the report: course, differences, symmetry, attention, maps
    condition: str
    caption: str


def draw(
    folder: pathlib.Path,
    study: studies.Study,
    conditions: Sequence[statistics.Condition],
    runs: Sequence[loaded.Run],
) -> list[Drawn]:
    """Write the figures of each condition into folder/figures; none where there is nothing to be seen."""
    disk.tidy(disk.folder(folder, "figures"))
    style, names = styles.of(study), styles.file_names(one.name for one in conditions)
    drawn = []
    for found in conditions:
        good = {(one.name, seed) for one in found.arms for seed in one.values}
        kept = [run for run in runs if run.condition == found.name and (run.arm, run.seed) in good]
        for section, make in SECTIONS.items() if kept else ():
            file = folder / "figures" / f"{section}_{names[found.name]}.png"
            caption = make(file, found, kept, style)
            if caption:
                words = f"{found.name}: {caption}" if len(conditions) > 1 else caption[0].upper() + caption[1:]
                drawn.append(Drawn(file, section, found.name, words))
    return drawn


Make = Callable[[pathlib.Path, statistics.Condition, list[loaded.Run], Mapping[str, styles.Style]], str]


def _course(file: pathlib.Path, found: statistics.Condition, runs: list[loaded.Run], style: Mapping) -> str:
    alike = curves.course(file, found=found, runs=runs, style=style)
    threshold = f" The dotted line is the threshold, {found.threshold:g}." if found.threshold else ""
    return (
        f"training loss (smoothed), {found.metric} on held-out data, and its difference to {found.reference} of the "
        f"same seed over training. Lines are means over seeds, bands reach from the smallest to the largest. Early "
        f"differences are cut off where they would hide the later ones.{threshold}{_alike(alike)}"
    )


def _differences(file: pathlib.Path, found: statistics.Condition, runs: list[loaded.Run], style: Mapping) -> str:
    if not any(one.comparison and one.comparison.differences for one in found.arms):
        return ""
    curves.differences(file, found=found, style=style)
    bars = "bars 95 % intervals" + f" for {found.comparisons} comparisons together" * (found.comparisons > 1)
    if not any(one.comparison and one.comparison.interval for one in found.arms):
        bars = "there are no intervals"
    return (
        f"each arm's {found.metric} minus {found.reference}'s, paired by seed. Circles are seeds, upright lines "
        f"their means, {bars}."
    )


def _symmetry(file: pathlib.Path, found: statistics.Condition, runs: list[loaded.Run], style: Mapping) -> str:
    alike = layers.symmetry(file, runs=runs, style=style)
    if alike is None:
        return ""
    return (
        "how symmetric and how directional the scores of each layer are over training. s is 1 for a symmetric form, -1 "
        "for a skew one, about 0 for a random one (1/D is expected of D features). d is of the sum over heads: 0 for a "
        "symmetric form, negative where the key side dominates. With few features d is anywhere between -1 and 1 "
        "before any training (95 % of random factors: -1 to 1 at D = 32 and 64, -0.53 to 0.70 at D = 256), so read it "
        f"against step 0. Means over seeds, bands from smallest to largest.{_alike(alike)}"
    )


def _alike(groups: Sequence[Sequence[str]]) -> str:
    """A sentence on lines that hide each other."""
    said = "; ".join(overall.joined([verdict.quoted([name]) for name in group]) for group in groups)
    return f" Lines that lie on one another, for most of the steps in a panel or more: {said}." if said else ""


def _attention(file: pathlib.Path, found: statistics.Condition, runs: list[loaded.Run], style: Mapping) -> str:
    if not layers.attention(file, runs=runs, style=style):
        return ""
    return (
        "attention on held-out examples at the end of training, per layer, averaged over heads. Marks are seeds, bars "
        "their means. Attention that is uniform over n keys has an entropy of ln n nats, and 1/n of it on the diagonal."
    )


def _maps(file: pathlib.Path, found: statistics.Condition, runs: list[loaded.Run], style: Mapping) -> str:
    shown = maps.first(runs)
    if not shown:
        return ""
    maps.side_by_side(file, found=shown, style=style)
    one, seeds = next(iter(shown.values())), sorted({one.seed for one in shown.values()})
    tokens = f" Its tokens: {' '.join(map(figures.visible, one.tokens))}" if one.tokens else ""
    return (
        f"attention on one held-out example (seed {', '.join(map(str, seeds))}), query (row) by key (column). Shades "
        f"are in proportion to the square root of the weight, and mean the same in all panels.{tokens}"
    )


SECTIONS: dict[str, Make] = {
    "course": _course,
    "differences": _differences,
    "symmetry": _symmetry,
    "attention": _attention,
    "maps": _maps,
}
