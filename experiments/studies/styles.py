"""How an arm looks in every figure, its colour, line and marker safe for the colour-blind; and names fit to show."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib import figure, lines

from experiments.figures import plots
from experiments.studies import study as studies

# Okabe and Ito's palette without its yellow, which is too light for lines; black is the reference's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Of the arms, which are drawn on top of the reference's whole line, and show it where they lie on it. As many lines,
# markers and colours as have no common divisor: no two of the first 35 arms differ in colour alone.
LINES = ((0, (5, 2)), (0, (2, 1.2)), "-.", (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = "sD^vPX*"


class Style(NamedTuple):
    colour: str
    line: Any  # as matplotlib has it: a word, or (offset, lengths)
    marker: str
    width: float
    label: str
    turn: int  # the arm's number: at which steps its markers are, so that lines on one another show those of all

    @property
    def look(self) -> dict[str, Any]:
        """The options of a line."""
        return {"color": self.colour, "ls": self.line, "lw": self.width, "marker": self.marker, "ms": 4}


def of(study: studies.Study) -> dict[str, Style]:
    """Arm -> its style, the same in all figures of the study. 35 arms beside the reference are told apart."""
    others = [arm.name for arm in study.arms if arm.name != study.reference]
    styles = {study.reference: Style("black", "-", "o", 2.4, f"{label(study.reference)} (reference)", 0)}
    for i, name in enumerate(others):
        colour, line, marker = (each[i % len(each)] for each in (COLOURS, LINES, MARKERS))
        styles[name] = Style(colour, line, marker, 1.5, label(name), i + 1)
    return {arm.name: styles[arm.name] for arm in study.arms}


def label(name: str) -> str:
    """The name as a figure can show it, in at most 28 letters."""
    return plots.name(name, 28)


def legend(drawing: figure.Figure, styles: Mapping[str, Style], **look: Any) -> None:
    """The arms below all panels, by their line and marker, or as `look` says. Labels are set afterwards: one that
    begins with _ would be left out."""
    handles = [lines.Line2D([], [], **(style.look | look)) for style in styles.values()]
    numbers = [str(i) for i in range(len(handles))]
    columns = max(1, min(len(handles), int(drawing.get_figwidth() / 2.3)))  # a narrow figure cuts the ends of more
    box = drawing.legend(handles, numbers, loc="outside lower center", ncols=columns, frameon=False)
    for text, style in zip(box.get_texts(), styles.values(), strict=True):
        text.set(text=style.label, **plots.LITERAL)
