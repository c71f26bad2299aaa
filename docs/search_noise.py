"""Replay searches on the losses of configs/search_noise.py: print the tables of docs/search_noise.md, draw its figure.

python docs/search_noise.py                  # only the searches with simulated losses
python docs/search_noise.py STUDY [FIGURE]

STUDY: the folder of the study, with report.json. FIGURE: the file to write. Default: docs/search_noise.png.
Arrays: O orders of the losses, E edits (loss 0 is the start's), I runs of an edit, R runs of the study, S sizes.
"""

import json
import math
import pathlib
import sys

import numpy as np
from matplotlib import figure
from scipy import stats

from experiments.figures import plots
from experiments.studies import inference

EDITS, ORDERS, SEEDS = 100, 10_000, 10  # SEEDS: runs of an edit under the verdict, and of each side of the final test
RULES = {"keep if better": (EDITS, 1), "verdict": (EDITS, SEEDS), "verdict, ten edits": (EDITS // 10, SEEDS)}
SPEEDRUN = [0.325, 0.217, 0.069, 0.047, 0.035, 0.030, 0.027, 0.026, 0.011, 0.007]  # docs/study_results.md
GAINS = {  # the true gains of some of the edits, and of each other edit
    "none": ([], 0.0),
    "ten of 0.01": ([0.01] * 10, 0.0),
    "ten of 0.01, ninety harm by 0.005": ([0.01] * 10, -0.005),
    "ten of 0.03": ([0.03] * 10, 0.0),
    "the speedrun's ten": (SPEEDRUN, 0.0),
}
SD = 0.0108  # of the 101 losses
SIMULATED = {  # rule -> runs of an edit in the screen, and after it; 0: there is no such stage
    "keep if better": (1, 0),
    "keep if the mean of 6 is better": (6, 0),
    "verdict on every edit": (0, 10),
    "screen, then verdict": (1, 10),
    "screen, then verdict, 18 seeds": (1, 18),
    "screen all, then one verdict": (1, 10),
}


def count_looks(edits: int) -> int:
    """Return study.looks for so many verdicts: the k-th is at 0.05 / (k looks), and their sum is at most 0.05."""
    return math.ceil(sum(1 / k for k in range(1, edits + 1)))


def is_better(difference_OI: np.ndarray, m: int) -> np.ndarray:
    """Return whether a single run has a lower loss; for several runs, whether the interval at 1 - 0.05/m is below 0."""
    return difference_OI[:, 0] < 0 if difference_OI.shape[1] == 1 else inference.interval(difference_OI, m)[1] < 0


def replay(loss_OEI: np.ndarray, gain_OE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replay searches whose edits truly lower the loss by gain_OE. Return kept_OE, and best_OE: the log's best loss."""
    best_OI, true_O, kept, looks = loss_OEI[:, 0], np.zeros(len(loss_OEI)), [], count_looks(gain_OE.shape[1])
    best = [best_OI.mean(-1)]
    for k, gain_O in enumerate(gain_OE.T, start=1):
        value_OI = loss_OEI[:, k] - (true_O + gain_O)[:, None]
        kept.append(is_better(value_OI - best_OI, k * looks))
        best_OI, true_O = np.where(kept[-1][:, None], value_OI, best_OI), true_O + kept[-1] * gain_O
        best.append(best_OI.mean(-1))
    return np.stack(kept, 1), np.stack(best, 1)


def reorder(loss_R: np.ndarray, edits: int, runs: int) -> np.ndarray:
    """Return losses (ORDERS, edits + 1, runs): random orders of the real ones; drawn with replacement if too few."""
    draw, n = np.random.default_rng(0), (edits + 1) * runs
    enough = n <= len(loss_R)
    loss_OR = draw.permuted(np.tile(loss_R, (ORDERS, 1)), axis=1)[:, :n] if enough else draw.choice(loss_R, (ORDERS, n))
    return loss_OR.reshape(ORDERS, edits + 1, runs)


def tabulate(loss_R: np.ndarray, scenario: str, rule: str) -> str:
    """Return a row of the table: means over ORDERS, with the true gains of the scenario at random places."""
    (edits, runs), (gains, other), draw = RULES[rule], GAINS[scenario], np.random.default_rng(1)
    gains = [*gains, *[other] * (EDITS - len(gains))]
    gain_OE = draw.permuted(np.tile(gains, (ORDERS, 1)), axis=1)[:, :edits]
    kept_OE, best_OE = replay(reorder(loss_R, edits, runs), gain_OE)
    true_O, false_O = (kept_OE * gain_OE).sum(1), (kept_OE & (gain_OE <= 0)).sum(1)
    found, claim_O = (kept_OE & (gain_OE > 0)).sum(1).mean(), best_OE[:, 0] - best_OE[:, -1]
    fresh_OI = np.subtract(*draw.choice(loss_R, (2, ORDERS, SEEDS))) - true_O[:, None]
    survive_O = kept_OE.any(1) & is_better(fresh_OI, 1)
    cells = [scenario, rule, f"{(edits + 1) * runs:,}", f"{false_O.mean():.2f}", f"{100 * (false_O > 0).mean():.1f}"]
    cells += [f"{found:.1f} of {(gain_OE > 0).sum(1).mean():.0f}", f"{claim_O.mean():.3f}", f"{true_O.mean():.3f}"]
    return f"| {' | '.join(cells)} | {100 * survive_O.mean():.0f} |"


def is_below(difference_OI: np.ndarray, m_O: np.ndarray) -> np.ndarray:
    """Return whether the interval of each mean, at its own level 1 - 0.05/m, is below 0."""
    n = difference_OI.shape[1]
    t_O = difference_OI.mean(1) / difference_OI.std(1, ddof=1) * math.sqrt(n)
    return t_O < -stats.t.isf((1 - inference.LEVEL) / 2 / np.maximum(m_O, 1), n - 1)


def sample(draw: np.random.Generator, shape: tuple[int, ...], runs: int, loss_R: np.ndarray | None) -> np.ndarray:
    """Return means of `runs` losses minus the true mean: normal, or drawn with replacement from those of real runs."""
    if loss_R is None:
        return draw.normal(0, SD / math.sqrt(runs), shape)
    return draw.choice(loss_R - loss_R.mean(), (*shape, runs)).mean(-1)


def search(
    gain_OE: np.ndarray, screen: int, runs: int, at_once: bool, loss_R: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Simulate searches with normal losses, or with those of real runs. Return kept_OE, and the runs of each search.

    screen: runs of an edit in the screen, which it passes if their mean is below that of the best so far. runs: fresh
    runs of an edit that passed, for the verdict. 0: no such stage. In a sequence, the k-th verdict is at the level
    0.05/(k looks). at_once: all edits are compared with the start, and K verdicts are at 0.05/K.
    """
    draw, (O, E), looks = np.random.default_rng(3), gain_OE.shape, count_looks(gain_OE.shape[1])
    screen_OE, best_OI = sample(draw, (O, E + 1), screen or 1, loss_R), sample(draw, (O, runs), 1, loss_R)
    best_O, true_O, count_O = screen_OE[:, 0], np.zeros(O), np.zeros(O)
    kept, passed_OE = [], screen_OE[:, 1:] - gain_OE < best_O[:, None]
    for k in range(E):
        value_O, value_OI = screen_OE[:, k + 1] - true_O - gain_OE[:, k], sample(draw, (O, runs), 1, loss_R)
        value_OI -= (true_O + gain_OE[:, k])[:, None]
        passed_O = (value_O < best_O) if screen else np.ones(O, bool)
        count_O += passed_O
        m_O = passed_OE.sum(1) if at_once else count_O * looks
        kept.append(passed_O & is_below(value_OI - best_OI, m_O) if runs else passed_O)
        if not at_once:
            best_O, best_OI = np.where(kept[-1], value_O, best_O), np.where(kept[-1][:, None], value_OI, best_OI)
            true_O = true_O + kept[-1] * gain_OE[:, k]
    return np.stack(kept, 1), (E + 1) * screen + (count_O + 1) * runs


def simulate(scenario: str, rule: str, loss_R: np.ndarray | None = None) -> str:
    """Return a row of the table of simulated searches, with the losses of real runs if they are given."""
    (gains, other), (screen, runs) = GAINS[scenario], SIMULATED[rule]
    gains = np.tile([*gains, *[other] * (EDITS - len(gains))], (ORDERS, 1))
    gain_OE = np.random.default_rng(1).permuted(gains, axis=1)
    kept_OE, runs_O = search(gain_OE, screen, runs, at_once="all" in rule, loss_R=loss_R)
    false_O, found_O = (kept_OE & (gain_OE <= 0)).sum(1), (kept_OE & (gain_OE > 0)).sum(1)
    cells = [scenario, rule, f"{runs_O.mean():,.0f}", f"{false_O.mean():.2f}", f"{100 * (false_O > 0).mean():.1f}"]
    return f"| {' | '.join(cells)} | {found_O.mean():.2f} of {(gain_OE > 0).sum(1).mean():.0f} |"


def simulate_gate(sizes: int) -> str:
    """Return how many null edits pass a gate: one run at each of S sizes, all better than the runs of the best."""
    loss_OES = np.random.default_rng(4).normal(size=(ORDERS, EDITS + 1, sizes))
    best_OS, count_O, first = loss_OES[:, 0], np.zeros(ORDERS), 0.0
    for k in range(1, EDITS + 1):
        passed_O = (loss_OES[:, k] < best_OS).all(1)
        best_OS, count_O = np.where(passed_O[:, None], loss_OES[:, k], best_OS), count_O + passed_O
        first = first or passed_O.mean()
    searches = 100 * (count_O > 0).mean()
    return f"gate of {sizes} sizes: {100 * first:.1f} % of first null edits pass, {count_O.mean():.2f} of {EDITS}, " + (
        f"at least one in {searches:.0f} % of searches"
    )


def describe_real_edit(edit_R: np.ndarray, start_R: np.ndarray) -> str:
    """Return how often each rule keeps a real edit, whose runs have the seeds of the start's."""
    difference_R, one = edit_R - start_R, 100 * np.mean(edit_R[:, None] < start_R)
    sample_OI = np.random.default_rng(2).choice(difference_R, (ORDERS, SEEDS))
    low, high = inference.interval(difference_R, 1)
    first, last = (100 * is_better(sample_OI, k * count_looks(EDITS)).mean() for k in (1, EDITS))
    return (
        f"a real edit: {difference_R.mean():+.4f} ({low:+.4f} to {high:+.4f}), SD of a pair "
        f"{difference_R.std(ddof=1):.4f}, correlation {np.corrcoef(edit_R, start_R)[0, 1]:.2f}; kept in {one:.0f} % "
        f"after one run of each, by the verdict in {first:.0f} % as the first edit, in {last:.0f} % as the last"
    )


def draw_figure(loss_R: np.ndarray, file: pathlib.Path) -> str:
    """Draw the best logged loss of both rules over null edits. Return what keep-if-better does in the real order."""
    drawing = figure.Figure(figsize=(8, 3.6), layout="constrained")
    panels, edit_E, results = drawing.subplots(1, 2, sharey=True), np.arange(EDITS + 1), []
    for panel, (rule, (edits, runs)) in zip(panels, [*RULES.items()][:2], strict=True):
        loss_OEI = reorder(loss_R, edits, runs)
        loss_OEI[0] = np.resize(loss_R, (EDITS + 1, 1)) if runs == 1 else loss_OEI[0]  # the real order
        kept_OE, best_OE = replay(loss_OEI, np.zeros((ORDERS, edits)))
        claim_OE, start = best_OE - best_OE[:, :1], best_OE[0, 0]
        for low, shade in ((5, 0.15), (25, 0.3)):
            ends = np.percentile(claim_OE, [low, 100 - low], axis=0)
            panel.fill_between(edit_E, *ends, color=plots.BLUE, alpha=shade, lw=0, label=f"{100 - 2 * low} % of orders")
        panel.plot(edit_E, loss_OEI[0].mean(-1) - start, ".", color="gray", ms=4, label="an edit, mean of its runs")
        panel.step(edit_E, claim_OE[0], where="post", color="black", lw=2.2, label="the log's best")
        panel.set(title=f"{rule}: {runs} run{'s' * (runs > 1)} of an edit", xlabel="edits that change only the seed")
        panel.grid(alpha=0.3)
        results.append(f"{rule}: {kept_OE[0].sum()} of {edits} edits kept, {start - best_OE[0, -1]:.4f} claimed")
    panels[0].set_ylabel("held-out loss minus the start's")
    panels[1].legend(frameon=False, fontsize="small", loc="lower right")
    plots.write(drawing, file)
    return f"the real order, {results[0]}"


def main(folder: str = "", file: str = "docs/search_noise.png") -> None:
    """Print everything, and draw the figure; without a folder, only what is simulated."""
    print("\n".join(simulate(scenario, rule) for scenario in (*GAINS,)[:4] for rule in SIMULATED))
    print("\n".join(map(simulate_gate, (1, 2, 4))))
    if not folder:
        return
    report = json.loads(pathlib.Path(folder, "report.json").read_text(encoding="utf-8"))
    half_R, start_R = (np.array([*arm["values"].values()]) for arm in report["conditions"][0]["arms"])
    print(f"{len(start_R)} runs: mean {start_R.mean():.4f}, SD {start_R.std(ddof=1):.4f}")
    print(draw_figure(start_R, pathlib.Path(file)))
    print(describe_real_edit(start_R, half_R))
    print("\n".join(tabulate(start_R, scenario, rule) for scenario in GAINS for rule in RULES))
    print("\n".join(simulate(scenario, rule, start_R) for scenario in (*GAINS,)[:4] for rule in SIMULATED))


if __name__ == "__main__":
    main(*sys.argv[1:])
