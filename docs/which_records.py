"""Redo the statistics of modded-nanogpt's third track, for docs/which_records.md: python docs/which_records.py

Reads $TFM_DATA/track3/final_losses.csv and table.csv. Prints the tables of the page, and writes which_records.png and
records.csv, which experiments.tools.verdict reads, into the folder of the first argument (default: docs).
"""

import csv
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import figure
from scipy import stats

LINE, RULE_SD, RULE_P = 3.28, 0.0013, 0.01  # the track's target, and its test: mean < LINE with this SD and p
COPIES = ("fake_log", "final_val_loss", "batch_combined", "seed0_stdout", "seed1_stdout")  # of runs in other files
LONGEST = 210  # steps from a claimed step to the end of its logs
DRAWS = 400_000
Groups = Mapping[tuple[str, int], list[float]]  # (folder, last step) -> the losses of its runs


class Row(NamedTuple):
    """A row of the track's table: a set of runs with its mean loss at the claimed step."""

    name: int
    steps: int
    is_record: int
    loss: float
    n: int


def read(folder: pathlib.Path) -> tuple[list[dict[str, str]], list[Row]]:
    """Return the rows of the two files."""
    texts = ((folder / name).read_text(encoding="utf-8") for name in ("final_losses.csv", "table.csv"))
    runs, table = (list(csv.reader(text.splitlines())) for text in texts)
    rows = [
        Row(*(kind(cell) for kind, cell in zip((int, int, int, float, int), row, strict=True))) for row in table[1:]
    ]
    return [dict(zip(runs[0], run, strict=True)) for run in runs[1:]], rows


def group(runs: Sequence[Mapping[str, str]]) -> Groups:
    """Return the losses of each folder and last step, without second copies. Runs directly in results/ stay single."""
    groups: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        if not run["run"].startswith(COPIES):
            top, _, rest = run["entry"].partition("/")
            name = "/".join(part for part in rest.split("/") if not part.startswith(("seed_", "code_logs", "idea_")))
            groups.setdefault((name or f"{top}/{run['run']}", int(run["steps"])), []).append(float(run["final_loss"]))
    return groups


def match(table: Sequence[Row], groups: Groups) -> dict[int, tuple[str, int]]:
    """Return row -> its group: as many runs, the same step and mean; else a later end with a lower mean."""
    size = {folder: sum(len(x) for (name, _), x in groups.items() if name == folder) for folder, _ in groups}
    most = {folder: max(len(x) for (name, _), x in groups.items() if name == folder) for folder, _ in groups}
    pairs: dict[int, tuple[str, int]] = {}
    for longest in (0, LONGEST):  # first the groups that end at the claimed step
        for row in table:
            near = []
            for place, losses in groups.items():
                later, drop = place[1] - row.steps, row.loss - np.mean(losses)
                fits = abs(drop) < 1e-4 if not later else 1e-5 < drop / later < 1e-4
                same_n = row.n in (len(losses), size[place[0]]) and len(losses) == most[place[0]]
                if same_n and fits and 0 <= later <= longest and place not in pairs.values():
                    near.append((later, abs(drop), place))
            if near and row.name not in pairs:
                pairs[row.name] = min(near)[-1]
    return pairs


def pool(several: Sequence[list[float]]) -> tuple[float, float, float]:
    """Return the pooled SD over the runs of each group, and its 95 % interval (chi-squared)."""
    df, squares = sum(len(losses) - 1 for losses in several), sum(np.var(losses) * len(losses) for losses in several)
    return tuple(float(np.sqrt(squares / x)) for x in (df, *stats.chi2.ppf([0.975, 0.025], df)))


def measure_slopes(table: Sequence[Row], groups: Groups, pairs: Mapping[int, tuple[str, int]]) -> dict[int, tuple]:
    """Return row -> (fall of the loss in a step from the claimed step to the end of the logs, these steps)."""
    later = [(row, pairs[row.name]) for row in table if row.name in pairs and pairs[row.name][1] > row.steps]
    return {
        row.name: ((row.loss - np.mean(groups[place])) / (place[1] - row.steps), place[1] - row.steps)
        for row, place in later
    }


def draw_crossings(records: Sequence[Row], slopes: Mapping[int, tuple], sd: float, is_common: bool) -> np.ndarray:
    """Return draws (records, DRAWS) of the step at which each record's mean loss crosses LINE.

    A draw has the noise of the seeds, of the table's rounding, and of the slope. The slope is the record's measured
    one, or else that of a random entry. If `is_common`, it is the mean of a bootstrap sample of all measured slopes.
    """
    random, every = np.random.default_rng(0), np.array([slope for slope, _ in slopes.values()])
    common_X = random.choice(every, (DRAWS, len(every))).mean(1)
    crossings = []
    for row in records:
        slope_X = random.choice(every, DRAWS)
        rounding_X = random.uniform(-5e-5, 5e-5, DRAWS)
        if row.name in slopes:
            slope_X = np.maximum(slopes[row.name][0] + rounding_X / slopes[row.name][1], 1e-5)
        loss_X = row.loss + rounding_X + random.normal(0, sd / np.sqrt(row.n), DRAWS)
        crossings.append(row.steps - (LINE - loss_X) / (common_X if is_common else slope_X))
    return np.array(crossings)


def simulate_gain(n_old: int, n_new: int, sd: float, slope: float) -> np.ndarray:
    """Return DRAWS gains that an entry without any improvement claims, in steps.

    Both entrants claim the smallest multiple of 5 steps at which the mean of their runs passes the track's test.
    """
    random, needed = np.random.default_rng(0), stats.norm.isf(RULE_P) * RULE_SD
    first = random.uniform(0, 5, DRAWS)  # the place of the true crossing between two multiples of 5
    claims = []
    for n in (n_old, n_new):
        noise_X = random.normal(0, sd / np.sqrt(n), DRAWS)
        claims.append(5 * np.ceil((first + (needed / np.sqrt(n) + noise_X) / slope) / 5))
    return claims[0] - claims[1]


def draw_figure(records: Sequence[Row], end_R3: np.ndarray, p: Sequence[float], file: pathlib.Path) -> None:
    """Draw the claimed step of each record, and the step at which its mean loss crosses LINE with its interval."""
    drawing = figure.Figure(figsize=(7.5, 6), layout="constrained")
    panel, y_R = drawing.add_subplot(), np.arange(len(records))
    for y, (low, middle, high), is_earlier in zip(y_R, end_R3, [False, *(x < 0.05 for x in p)], strict=True):
        colour = "#0072B2" if is_earlier else "#999999"
        panel.plot([low, high], [y, y], color=colour, lw=5, alpha=0.4, solid_capstyle="butt")
        panel.plot(middle, y, "o", color=colour, ms=5)
    panel.plot([row.steps for row in records], y_R, ls="", marker="|", ms=13, mew=2, color="#D55E00")
    for marker, colour, label in (
        ("o", "#0072B2", "crosses 3.28: shown to be earlier than the record above"),
        ("o", "#999999", "crosses 3.28: not shown"),
        ("|", "#D55E00", "claimed step"),
    ):
        panel.plot([], [], ls="", marker=marker, color=colour, mew=2, label=label)
    panel.set_yticks(y_R, [f"row {row.name} (n = {row.n})" for row in records])
    panel.invert_yaxis()
    panel.set_xlabel("training steps (bars: 95 % intervals, each for one number)")
    panel.grid(axis="x", alpha=0.3)
    panel.legend(loc="lower right", fontsize=9)
    drawing.savefig(file, dpi=110, metadata={"Software": None})


def write_table(records: Sequence[Row], groups: Groups, pairs: Mapping, slope: float, file: pathlib.Path) -> None:
    """Write a table for experiments.tools.verdict: the step at which each run of a record would cross LINE."""
    lines = ["arm,crossing"]
    for row in (row for row in records if row.name in pairs):
        losses = np.array(groups[pairs[row.name]])
        lines += [f"row {row.name},{row.steps - (LINE - x) / slope:.1f}" for x in row.loss + losses - losses.mean()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def print_spread(runs: Sequence[Mapping[str, str]], table: Sequence[Row], groups: Groups, pairs: Mapping) -> float:
    """Print the numbers on runs, their SD, and rows that are not shown to be below LINE. Return the pooled SD."""
    several = [losses for losses in groups.values() if len(losses) > 1]
    early = sum(int(run["steps"]) < int(run["of"]) for run in runs)
    distinct = sum(map(len, groups.values()))
    print(f"{len(runs)} losses, {len(runs) - distinct} copies; {early} runs ended before the last planned step")
    print(f"{len(pairs)} of {len(table)} rows have {sum(len(groups[place]) for place in pairs.values())} runs")
    sd, low, high = pool(several)
    print(f"pooled SD {sd:.5f} ({low:.5f} to {high:.5f}), {sum(map(len, several))} runs in {len(several)} groups")
    sds = [np.std(losses, ddof=1) for losses in several if len(losses) > 4]
    print(f"SDs of the groups of 5 or more: {min(sds):.5f} to {max(sds):.5f}")
    print(f"equal SDs: Bartlett p = {stats.bartlett(*several).pvalue:.2f}, Levene {stats.levene(*several).pvalue:.2f}")
    for name, x in (("the rule's SD", RULE_SD), ("the pooled SD", sd)):
        p = [stats.norm.sf((LINE - row.loss) / x * np.sqrt(row.n)) for row in table]
        failed = [row.name for row, q in zip(table, p, strict=True) if len(p) * q >= 0.05]
        print(f"not below {LINE} by Bonferroni with {name}: rows {failed}")
    return sd


def main(data: pathlib.Path, output: pathlib.Path) -> None:
    """Print the numbers of the page, and write its figure and records.csv."""
    output.mkdir(parents=True, exist_ok=True)
    runs, table = read(data)
    groups = group(runs)
    pairs = match(table, groups)
    sd = print_spread(runs, table, groups, pairs)
    slopes, records = measure_slopes(table, groups, pairs), [row for row in table if row.is_record]
    every = [slope for slope, _ in slopes.values()]
    slope = float(np.mean(every))
    print(f"slope {1e5 * slope:.1f}e-5 a step, SD {1e5 * np.std(every, ddof=1):.1f}e-5, {len(every)} entries")
    results = []
    for is_common in (False, True):
        crossing_RX = draw_crossings(records, slopes, sd, is_common)
        later = (np.diff(crossing_RX, axis=0) >= 0).mean(1)
        p = np.minimum(1, len(later) * 2 * np.minimum(later, 1 - later))  # two-sided, Bonferroni
        results.append((np.quantile(crossing_RX, [0.025, 0.5, 0.975], axis=1).T, p))
        print(
            f"one slope for all: {is_common}; shown {sum(x < 0.05 for x in p)} of {len(p)}, expected number that are "
            f"no improvement {later.sum():.1f}"
        )
    (end_R3, p), (_, p_common) = results
    chances = [
        (simulate_gain(old.n, new.n, sd, slope) >= old.steps - new.steps).mean()
        for old, new in zip(records, records[1:], strict=False)
    ]
    print("| row | claimed step | runs | crosses 3.28 at (95 % interval) | p, own slopes | p, one slope | chance |")
    for row, (low, middle, high), *cells in zip(
        records, end_R3, ["", *p], ["", *p_common], ["", *chances], strict=True
    ):
        texts = [x if x == "" else "< 0.001" if x < 0.001 else f"{x:.3f}" for x in cells]
        crossing = f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"
        print(f"| {row.name} | {row.steps:,} | {row.n} | {crossing} | {' | '.join(texts)} |")
    for n_old, n_new in ((10, 10), (8, 20)):
        gain_X = simulate_gain(n_old, n_new, sd, slope)
        print(n_old, n_new, {g: round(float((gain_X >= g).mean()), 3) for g in (5, 10, 15, 25, 40, 60)})
    draw_figure(records, end_R3, p, output / "which_records.png")
    write_table(records, groups, pairs, slope, output / "records.csv")


if __name__ == "__main__":
    main(
        pathlib.Path(os.environ["TFM_DATA"]) / "track3",
        pathlib.Path([*sys.argv, str(pathlib.Path(__file__).parent)][1]),
    )
