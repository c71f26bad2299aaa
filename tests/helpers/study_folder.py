"""Write folders of studies with chosen numbers, as if runs had written them."""

import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.studies import runs as study_runs, statistics, study as studies

PROVENANCE = {
    "config": {"experiment": "ablation", "train": {"steps": 300}},
    "versions": {"jax": "0.0.1"},
    "device": "one small computer",
    "commit": "c0ffee",
}
COSTS = {"flops_per_step": 4e6, "seconds_per_step": 0.5, "wall_seconds": 155.0}


def make_study(
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
    """Return a study whose reference is the last arm."""
    return studies.Study(
        experiment="language",
        arms=[studies.Arm(arm, {"model.score": arm}) for arm in arms],
        conditions=[studies.Condition(condition, {}, metric, threshold, margin) for condition in conditions],
        seeds=list(seeds),
        correction=correction,
        looks=looks,
    )


def write_run(
    folder: pathlib.Path,
    condition: str,
    arm: str,
    seed: int,
    *,
    metrics: Mapping[str, float | None],
    evaluations: Sequence[tuple[int, float]] = (),
    rows: Sequence[Mapping] = (),
    **summary: object,
) -> pathlib.Path:
    """Write a run with these final metrics. evaluations: (step, eval/loss); rows: more rows of metrics.jsonl.
    Return its folder."""
    run_folder = folder / condition / arm / f"seed_{seed}"
    run_folder.mkdir(parents=True)
    content = {"experiment": "language", "condition": condition, "arm": arm, "seed": seed, "steps": 300, "params": 1000}
    content |= {"flops_per_token": 2500.0, "diverged_at": None, **metrics, **summary}
    (run_folder / "summary.json").write_text(json.dumps(content))
    lines = [{"step": step, "eval/loss": loss} for step, loss in evaluations] + list(rows)
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_folder


def write_losses(
    folder: pathlib.Path, condition: str, losses_of_arms: Mapping[str, Sequence[float]], **summary: object
) -> None:
    """Write one run for each loss of each arm. Its seed is the index of the loss."""
    for arm, losses in losses_of_arms.items():
        for seed, loss in enumerate(losses):
            write_run(folder, condition, arm, seed, metrics={"eval/loss": loss}, **summary)


def analyse(folder: pathlib.Path, design: studies.Study) -> list[statistics.Condition]:
    """Analyse the runs in the folder. Return the statistics of each condition."""
    return statistics.analyse(design, study_runs.load(folder, design))


def write_study(folder: pathlib.Path, design: studies.Study, *, M: int = 2, steps: int = 300) -> None:
    """Write a finished study with everything that a run can log. Arm i, counted from the last, is worse by i/50.
    Losses fall from about 5 to about 1.5, with noise."""
    for condition in design.conditions:
        for i, arm in enumerate(reversed(design.arms)):
            for seed in design.seeds:
                random, penalty, rows = np.random.default_rng([i, seed]), i / 50, []
                noise = random.normal(0, 0.004)
                for step in range(0, steps + 1, max(1, steps // 60)):
                    loss = 1.5 + penalty + noise + 3.5 * np.exp(-6 * step / steps)
                    rows.append({"step": step, "train/loss": loss + random.normal(0, 0.08)})
                    if step % (steps // 10) == 0:
                        rows[-1] |= {"eval/loss": loss + random.normal(0, 0.002)}
                        for m in range(1, M + 1):
                            rise = penalty * 5 + step / steps * m / M
                            rows[-1] |= {f"symmetry/{m}": np.tanh(rise), f"symmetry_sum/{m}": np.tanh(rise / 2)}
                            rows[-1] |= {f"directionality/{m}": -np.tanh(rise) + random.normal(0, 0.02)}
                metrics = {"eval/loss": rows[-1]["eval/loss"], "eval/accuracy": 0.5, "baseline/accuracy": 0.1}
                write_run(folder, condition.name, arm.name, seed, metrics=metrics, rows=rows, **COSTS)
