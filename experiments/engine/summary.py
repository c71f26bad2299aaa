"""Output of a run: the parameter table before the training, the summary and the figures after it."""

import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from experiments.config import disk, errors
from experiments.devices import mesh as meshes
from experiments.engine import freeze, run_plan, signals, train_step
from experiments.folder import checkpoint, log, records, workdir as workdirs
from tfm import shapes


def print_model(plan: run_plan.Plan, state: train_step.State) -> int:
    """Print the parameter table and the FLOPs of a step. Return the FLOPs: three times those of the forward pass."""
    shapes.check(state.params)
    forward = run_plan.forward_flops(plan, state)
    batch, tokens = plan.growth.sizes[0], plan.task.tokens_per_example
    print(format_table(state.params, freeze.find_frozen(state.params, plan.task.frozen)))
    for line in plan.task.lines:
        log.say(f"  {line}", "\n")
    for first, size in zip(plan.growth.firsts, plan.growth.sizes, strict=True):
        token = f"; {format_si(forward / (batch * tokens), 'FLOP')} per token forward"
        begin, end = ("", f", after step {first:,}") if first else (" (3 x forward)", token)
        flops = format_si(3 * forward * size / batch, "FLOP")
        print(f"  {flops} per step{begin} of {size} examples, {size * tokens:,} tokens{end}", flush=True)
    return 3 * forward


def format_table(params: Any, frozen: Collection[str] = ()) -> str:
    """Return a line for each parameter (path, axes with sizes, count) and the total.

    frozen: the paths of the frozen parameters.
    """
    rows, n_trained = [], 0
    for path, leaf in shapes.flat(params).items():
        sizes = " ".join(f"{letter}={n}" for letter, n in zip(shapes.letters(path), leaf.shape, strict=True))
        rows.append((path, sizes, f"{leaf.size:,}", "  frozen" if path in frozen else ""))
        n_trained += leaf.size * (path not in frozen)
    note = f", of which {n_trained:,} are trained" if frozen else ""
    rows.append(("total", "", f"{shapes.total(params):,}", note))
    a, b, c, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"  {name:<{a}}  {sizes:<{b}}  {count:>{c}}{note}" for name, sizes, count, note in rows]
    return "\n".join([*lines[:-1], "  " + "-" * (a + b + c + 4), lines[-1]])


def format_si(value: float, unit: str) -> str:
    """Return 1.23e9, "FLOP" as "1.23 GFLOP"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def describe(plan: run_plan.Plan, experiment: str, data_sha256: str | None) -> dict[str, Any]:
    """Return the entries of a run's summary.json that are known before the training."""
    return {
        "experiment": experiment,
        "steps": plan.steps,
        "params": shapes.total(jax.eval_shape(plan.task.init, jax.random.key(0))),
        **{f"baseline/{name}": value for name, (value, _) in plan.baseline.items()},
        "guess": {name: guess for name, (_, guess) in plan.baseline.items()},
        **({"better": dict(plan.task.better)} if plan.task.better else {}),
        "data_sha256": data_sha256,
        "devices": plan.mesh.size,
        "device": meshes.describe(plan.mesh),
        "backend": meshes.backend(plan.mesh),
        "versions": meshes.versions(),
        "commit": workdirs.read_commit()[0],
    }


def write_result(
    plan: run_plan.Plan, figures: Callable, params: Any, folder: pathlib.Path, final: dict, common: dict
) -> dict[str, Any]:
    """Write and print the summary of a trained model, draw its figures, and return the summary.

    figures(params, folder, rows of metrics.jsonl) draws, and yields dicts of further metrics and paths of files. final:
    the final metrics. common: the other entries of summary.json. Both dicts are changed.
    """
    final["params_sha256"] = checkpoint.digest(params)
    if metric := plan.keep_best.metric:
        best = checkpoint.find_best(folder / records.CHECKPOINTS, plan.keep_best)
        final["checkpoints"] = {"best": best, "last": {"step": plan.steps, metric: final[metric]}}
    disk.write_json(folder / records.SUMMARY, final | common)
    files, metrics = draw(figures, params, folder)
    common["guess"] |= metrics.pop("guess", {})
    summary = final | metrics | common
    disk.write_json(folder / records.SUMMARY, summary)
    paths = [str(file) for file in [*files, folder / records.METRICS, folder / records.SUMMARY]]
    log.say(format_result(summary, paths), "\n")
    return summary


def check_result(summary: Mapping[str, Any], steps: int, folder: pathlib.Path) -> None:
    """Raise RunError if the final loss is not finite, or if more than half of the steps were skipped (train.nan)."""
    loss, skipped = summary.get(f"{run_plan.EVAL}{train_step.LOSS}", 0.0), summary.get("skipped") or 0
    faults = [f"{run_plan.EVAL}{train_step.LOSS} is not finite"] * (loss is None or not np.isfinite(loss))
    faults += [f"{skipped:,} of {steps:,} steps were skipped"] * (2 * skipped > steps)
    remedy = "Train a new run with a smaller optim.learning_rate"
    if faults:
        raise errors.RunError(f"the run in {folder} failed: {' and '.join(faults)}. {remedy}")


def draw(figures: Callable, params: Any, folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, Any]]:
    """Draw the figures. Return the paths of the files, and the further metrics.

    figures(params, folder, rows of metrics.jsonl) yields paths of files, and dicts of metrics. If drawing fails, print
    the error and return the results before it. Raises only RunError, or Interrupted (a signal).
    """
    files, metrics = [], {}
    try:
        disk.tidy(disk.folder(folder, "figures"))
        for item in figures(params, folder, records.read_metrics(folder)):
            if isinstance(item, dict):
                metrics.update(item)
            else:
                files.append(item)
            signals.current().raise_if_requested()
    except errors.RunError:
        raise
    except (Exception, SystemExit) as error:  # from a plotting library, or the user's code
        reason = errors.line(error) or "no message"
        print(f"warning: not all figures in {folder} are drawn: {type(error).__name__}: {reason}", flush=True)
    return files, metrics


def format_result(summary: dict[str, Any], files: list[str]) -> str:
    """Return the lines to print at the end of a run: metrics, warnings, checkpoints, time, files."""
    lines, guess = [""], summary.get("guess", {})
    for name, value in summary.items():
        if name.startswith(("eval/", "baseline/")):
            number = f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4g}"
            lines.append(f"  {name:<22} {number}  {guess.get(name.removeprefix('baseline/'), '')}".rstrip())
    for name in guess.keys() & checkpoint.BETTER.keys():
        kinds = (checkpoint.Best(f"{prefix}/{name}", checkpoint.BETTER[name]) for prefix in ("eval", "baseline"))
        measured, baseline = (checkpoint.score(summary, kind) for kind in kinds)
        if measured <= baseline:
            lines.append(f"  warning: eval/{name} is no better than the baseline ({guess[name]})")
    for kind, row in summary.get("checkpoints", {}).items():
        metrics = ", ".join(f"{name} {x:.4f}" for name, x in (row or {}).items() if name != "step")
        lines.append(f"  {kind + ' checkpoint':<22} " + (f"step {row['step']:,}, {metrics}" if row else "none"))
    lines.append(f"  {'time':<22} {summary['wall_seconds']:.1f} s, {summary['compile_seconds']:.1f} s of it compiling")
    if summary["tokens_per_second"]:  # 0 if a run was resumed after its last step
        lines.append(f"  {'throughput':<22} {summary['tokens_per_second']:,.0f} tokens/s")
    return "\n".join([*lines, *(f"  {file}" for file in files)])
