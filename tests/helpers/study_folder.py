"""Write the folder of a study with a test's numbers, as the runs of a study leave it."""

import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.studies import runs, statistics, study as studies

WHAT = {
    "config": {"experiment": "ablation", "train": {"steps": 300}},
    "versions": {"jax": "0.0.1"},
    "device": "one small computer",
    "commit": "c0ffee",
}
COSTS = {"flops_per_step": 4e6, "seconds_per_step": 0.5, "wall_seconds": 155.0}


def study(
    arms: Sequence[str] = ("tied", "asymmetric"),
    *,
    conditions: Sequence[str] = ("all",),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    metric: str = "eval/loss",
    threshold: float = 0.0,
    margin: float = 0.0,
    correction: str = "study",
    looks: int = 1,
) -> studies.Study:
    """The last arm is the reference."""
    return studies.Study(
        experiment="language",
        arms=[studies.Named(arm, {"model.score": arm}) for arm in arms],
        conditions=[studies.Named(condition, {}) for condition in conditions],
        seeds=list(seeds),
        reference=arms[-1],
        metric=dict.fromkeys(conditions, metric),
        threshold=dict.fromkeys(conditions, threshold),
        margin=dict.fromkeys(conditions, margin),
        correction=correction,
        looks=looks,
    )


def run(
    folder: pathlib.Path,
    condition: str,
    arm: str,
    seed: int,
    *,
    ends: Mapping[str, float | None],
    evaluations: Sequence[tuple[int, float]] = (),
    rows: Sequence[Mapping] = (),
    **summary: object,
) -> pathlib.Path:
    """One run: `ends` are its final metrics, `evaluations` (step, eval/loss), `rows` more of metrics.jsonl."""
    place = folder / condition / arm / f"seed_{seed}"
    place.mkdir(parents=True)
    content = {"experiment": "language", "condition": condition, "arm": arm, "seed": seed, "steps": 300, "params": 1000}
    content |= {"flops_per_token": 2500.0, "diverged_at": None, **ends, **summary}
    (place / "summary.json").write_text(json.dumps(content))
    lines = [{"step": step, "eval/loss": loss} for step, loss in evaluations] + list(rows)
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def losses(folder: pathlib.Path, condition: str, ends: Mapping[str, Sequence[float]], **summary: object) -> None:
    """For each arm, one run a seed that ends with this loss, and nothing else of note."""
    for arm, losses in ends.items():
        for seed, loss in enumerate(losses):
            run(folder, condition, arm, seed, ends={"eval/loss": loss}, **summary)


def analyse(folder: pathlib.Path, design: studies.Study) -> list[statistics.Condition]:
    """Return the numbers of each condition, from the runs in the folder."""
    return statistics.analyse(design, runs.load(folder, design))


def whole(folder: pathlib.Path, design: studies.Study, *, M: int = 2, H: int = 3, steps: int = 300) -> None:
    """A finished study with everything in it that a run may log; the i-th arm is worse by i/50. A loss falls from about
    5 to about 1.5, with noise that all arms of a seed share in part."""
    for condition in design.conditions:
        for i, arm in enumerate(reversed(design.arms)):
            for seed in design.seeds:
                random, worse, rows = np.random.default_rng([i, seed]), i / 50, []
                noise = random.normal(0, 0.004)
                for step in range(0, steps + 1, max(1, steps // 60)):
                    loss = 1.5 + worse + noise + 3.5 * np.exp(-6 * step / steps)
                    rows.append({"step": step, "train/loss": loss + random.normal(0, 0.08)})
                    if step % (steps // 10) == 0:
                        rows[-1] |= {"eval/loss": loss + random.normal(0, 0.002)}
                        for m in range(1, M + 1):
                            rise = worse * 5 + step / steps * m / M
                            rows[-1] |= {f"symmetry/{m}": np.tanh(rise), f"symmetry_sum/{m}": np.tanh(rise / 2)}
                            rows[-1] |= {f"directionality/{m}": -np.tanh(rise) + random.normal(0, 0.02)}
                ends = {"eval/loss": rows[-1]["eval/loss"], "eval/accuracy": 0.5, "baseline/accuracy": 0.1}
                look = {name: random.uniform(0.1, 0.9, M).tolist() for name in ("entropy", "diagonal", "asymmetry")}
                place = run(folder, condition.name, arm.name, seed, ends=ends, rows=rows, attention=look, **COSTS)
                if seed == design.seeds[0]:
                    np.savez(place / "maps.npz", A_MHNS=random.dirichlet(np.full(7, 0.3), (M, H, 7)))
