"""The colour, line and marker of every arm, the same in all figures of a study, safe for the colour-blind."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import figure, lines

from experiments.figures import plots
from experiments.studies import study as studies

# The palette of Okabe and Ito (2008) without yellow, which is too light for lines, and black, the reference's colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The reference's line is solid. There are 6 colours, 5 lines and 7 markers, pairwise without a common divisor, so that
# no two of the first 35 arms differ in colour alone.
LINES = ((0, (5, 2)), (0, (2, 1.2)), "-.", (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = "sD^vPX*"


class Style(NamedTuple):
    """The look of an arm in figures."""

    colour: str
    line: Any  # a line style of matplotlib: text, or (offset, lengths)
    marker: str
    width: float  # of the line, in points
    label: str

    @property
    def look(self) -> dict[str, Any]:
        """The options of matplotlib's `plot`."""
        return {"color": self.colour, "ls": self.line, "lw": self.width, "marker": self.marker, "ms": 4}


def choose_styles(study: studies.Study) -> dict[str, Style]:
    """Return the style of each arm, by name. The reference is black."""
    styles = {arm.name: number_style(i, shorten(arm.name)) for i, arm in enumerate(study.arms)}
    reference = f"{shorten(study.reference)} (reference)"
    return styles | {study.reference: Style("black", "-", "o", 2.4, reference)}


def number_style(i: int, label: str) -> Style:
    """Return style number i (0 is the first) with this label. Styles repeat if there are too few."""
    return Style(*(values[i % len(values)] for values in (COLOURS, LINES, MARKERS)), 1.5, label)


def shorten(name: str) -> str:
    """Return the name as figures show it: with codes for letters without a font (`plots.name`).

    "…" replaces the middle of a name of more than 28 letters.
    """
    return plots.name(name, 28)


def spell(name: str) -> str:
    """Return the name of a metric or a setting in words: 'calibration error' for 'eval/calibration_error'."""
    return shorten(re.sub(r"^eval/|^[a-z]+\.", "", name).replace("_", " "))


def draw_legend(drawing: figure.Figure, styles: Mapping[str, Style]) -> None:
    """Draw the legend of these arms below all panels, in as few rows as fit."""
    handles = [lines.Line2D([], [], **style.look) for style in styles.values()]
    labels = [style.label for style in styles.values()]
    inches = [0.7 + 0.085 * len(label) for label in labels]
    columns = (n for n in range(len(labels), 1, -1) if _sum_widths(inches, n) <= drawing.get_figwidth())
    drawing.legend(handles, labels, loc="outside lower center", ncols=next(columns, 1), frameon=False)


def _sum_widths(inches: Sequence[float], columns: int) -> float:
    """Return the width of a legend in inches. Labels of these widths fill one column after the other."""
    return sum(max(part) for part in np.array_split(inches, columns))
