"""The colour, line and marker of every arm, the same in all figures of a study, safe for the colour-blind."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib import figure, lines

from experiments.figures import plots
from experiments.studies import study as studies

# The palette of Okabe and Ito without its yellow, which is too light for lines; black is the reference's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The reference's line is solid and below all others. The numbers of lines, markers and colours have no common divisor:
# no two of the first 30 arms differ in colour alone.
LINES = ((0, (5, 2)), (0, (2, 1.2)), "-.", (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = "sD^vPX*"


class Style(NamedTuple):
    colour: str
    line: Any  # a line style of matplotlib: text, or (offset, lengths)
    marker: str
    width: float
    label: str

    @property
    def look(self) -> dict[str, Any]:
        """The options of matplotlib's `plot`."""
        return {"color": self.colour, "ls": self.line, "lw": self.width, "marker": self.marker, "ms": 4}


def choose_styles(study: studies.Study) -> dict[str, Style]:
    """Return arm -> style."""
    styles = {}
    for i, arm in enumerate(study.arms):
        colour, line, marker = (values[i % len(values)] for values in (COLOURS, LINES, MARKERS))
        styles[arm.name] = Style(colour, line, marker, 1.5, shorten(arm.name))
    reference = f"{shorten(study.reference)} (reference)"
    return styles | {study.reference: Style("black", "-", "o", 2.4, reference)}


def shorten(name: str) -> str:
    """Shorten a name to 28 letters."""
    return plots.name(name, 28)


def draw_legend(drawing: figure.Figure, styles: Mapping[str, Style]) -> None:
    """Draw the legend of these arms below all panels."""
    handles = [lines.Line2D([], [], **style.look) for style in styles.values()]
    labels = [style.label for style in styles.values()]
    columns = max(1, min(len(handles), int(drawing.get_figwidth() / 2.3)))  # a narrow figure cuts the ends of more
    drawing.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
