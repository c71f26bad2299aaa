"""Where the time of our training step goes, by named scope and by instruction.

python -m benchmarks.profile --config configs/shakespeare_char.py [--config.train.steps=8 ...] [--steps 20] [--top 25]
python -m benchmarks.profile --workload step_b

The step is the one that a run takes: of a config, with its data, or of one of the benchmark's workloads.
"""

if __name__ == "__main__":
    from experiments import engine

    engine.large_pages("benchmarks.profile")  # starts this process again, as launch.py does

import argparse
import collections
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import alone, fresh, ours, plans, sizes, trace
from experiments.compiler import program
from experiments.engine import by_name, config, config_file, distributed, errors, mesh, run
from experiments.engine import step as steps

STEPS, WARM = 20, 3  # steps that count, and those before them
NAMES = ("step_a", "step_b")  # the workloads that `python -m benchmarks --only profile` looks into


def settings_of(path: str, overrides: list[str]) -> config.Settings:
    """The settings of a config file, with what '--config.key=value' changes."""
    pairs = [word.removeprefix("--config.").partition("=") for word in overrides]
    base = ours.base()
    found = config_file.load(path, base=base, given={key: value for key, _, value in pairs})
    for key, _, value in pairs:
        config.override(found, key, value)
    return config.Settings(found, config_file.defaults(found, base))


def planned(settings: config.Settings) -> steps.Plan:
    """What a run of this config is made of."""
    experiment = by_name.experiment(settings.experiment)
    if not hasattr(experiment, "prepare"):
        raise errors.UserError(f"{settings.experiment} trains nothing: choose the config of one training run")
    devices = run.devices(settings)
    return run.plan(settings, experiment.prepare(settings, devices).task, devices)


def compiled(made: steps.Plan) -> tuple[steps.State, Any]:
    """The state of step 0, and the step for the first batch, compiled here: a kept one could have older scopes."""
    state = steps.initial_state(made.task, made.optimiser, seed=made.seed, mesh=made.mesh)
    batch = mesh.place_batch(made.mesh, made.task.train[0])
    with fresh.compiled():
        return state, made.step.lower(state, batch, alive(made)).compile()


def alive(made: steps.Plan) -> jax.Array:
    """What the step takes as third argument."""
    return distributed.put(np.True_, mesh.replicated(made.mesh))


def measure(rounds: int | None = None, *, names: Sequence[str] = NAMES, **changes: Any) -> dict[str, dict]:
    """The profiles of these workloads (`profile`), over so many steps. changes: to their configs, by whole keys."""
    how = {"steps": rounds or STEPS, "changes": changes}
    return {name: alone.call("benchmarks.profile", "of_workload", name=name, **how) for name in names}


def of_workload(name: str, *, steps: int, changes: dict[str, Any]) -> dict:
    """The profile of this workload, taken in this process."""
    return profile(workload(name, **changes), steps=steps)


def show(found: dict[str, dict]) -> str:
    """The tables of all."""
    return "\n\n".join(f"{name}: {tables(one)}" for name, one in found.items())


def profile(made: steps.Plan, *, steps: int = STEPS) -> dict:
    """Take steps, with and without the profiler, and say where the time of one goes.

    Returns step_ms (without profiler, the median), fastest_ms, profiled_ms (with it, the mean), covered_ms (any
    instruction under way), instructions (rows, the dearest first) and scopes (scope -> {direction: ms}).
    """
    state, step = compiled(made)
    text = step.as_text()
    lines = program.instructions(text)
    batches = [mesh.place_batch(made.mesh, made.task.train[i]) for i in range(WARM + 2 * steps)]
    state, seconds = taken(step, state, batches[: WARM + steps], alive(made))
    with trace.recorded(program.module(text)) as intervals:
        _, profiled = taken(step, state, batches[WARM + steps :], alive(made))
    containers = {name for name, line in lines.items() if line.opcode in program.CONTAINERS}
    spent = {name: ns / steps / 1e6 for name, ns in trace.shared(intervals, containers).items()}
    calls = {name: n / steps for name, n in collections.Counter(one.name for one in intervals).items()}
    return {
        "step_ms": 1e3 * statistics.median(seconds[WARM:]),
        "fastest_ms": 1e3 * min(seconds[WARM:]),
        "profiled_ms": 1e3 * statistics.mean(profiled),
        "covered_ms": sum(spent.values()),
        "scopes": by_scope(spent, lines),
        "instructions": by_instruction(spent, calls, lines),
    }


def taken(step: Any, state: steps.State, batches: list[dict], given: jax.Array) -> tuple[steps.State, list[float]]:
    """The state after a step on each batch, and the seconds of each."""
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        state, metrics = step(state, batch, given)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    return state, seconds


def by_scope(spent: dict[str, float], lines: dict[str, program.Instruction]) -> dict[str, dict[str, float]]:
    """Milliseconds by scope and direction; the dearest scope first."""
    table: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for name, ms in spent.items():
        path = lines.get(name, program.UNKNOWN).op_name
        table[program.scope(path)][program.direction(path)] += ms
    return {scope: dict(row) for scope, row in sorted(table.items(), key=lambda item: -sum(item[1].values()))}


def by_instruction(
    spent: dict[str, float], calls: dict[str, float], lines: dict[str, program.Instruction]
) -> list[dict]:
    """The instructions as rows, the dearest first; those of several layers that are alike are one row."""
    rows: dict[tuple, dict] = {}
    for name, ms in spent.items():
        line = lines.get(name, program.UNKNOWN)
        row = rows.setdefault(tuple(line), {"ms": 0.0, "calls": 0.0, "name": name, **line._asdict()})
        row["ms"] += ms
        row["calls"] += calls[name]
    return sorted(rows.values(), key=lambda row: -row["ms"])


def tables(found: dict, *, top: int = 25) -> str:
    """The tables."""
    whole = found["covered_ms"]
    kinds = [kind for kind in ("forward", "recomputed", "backward") if any(kind in r for r in found["scopes"].values())]
    lines = [
        f"a step: {found['step_ms']:.2f} ms (the fastest {found['fastest_ms']:.2f}); with the profiler "
        f"{found['profiled_ms']:.2f} ms, in {whole:.2f} ms of which an instruction is under way",
        "a moment in which several are under way is divided equally among them; a fusion counts where its root does",
        "",
        f"{'scope':44}" + "".join(f"{kind:>12}" for kind in kinds) + f"{'ms':>10}{'share':>8}",
    ]
    for scope, row in found["scopes"].items():
        total = sum(row.values())
        cells = "".join(f"{row.get(kind, 0):12.3f}" for kind in kinds)
        lines.append(f"{scope:44}{cells}{total:10.3f}{total / whole:8.1%}")
    sums = "".join(f"{sum(row.get(kind, 0) for row in found['scopes'].values()):12.3f}" for kind in kinds)
    lines += [f"{'all':44}{sums}{whole:10.3f}{1:8.1%}", ""]
    lines.append(f"{'ms':>8} {'share':>6} {'calls':>5} {'GFLOP/s':>8}  instruction")
    for row in found["instructions"][:top]:
        rate = row["flops"] * row["calls"] / row["ms"] / 1e6
        head = f"{row['ms']:8.3f} {row['ms'] / whole:6.1%} {row['calls']:5.0f} {f'{rate:.0f}' if rate else '':>8}  "
        what = row["opcode"] if not row["inside"] else f"{row['opcode']} of {_several(row['inside'])}"
        path = row["op_name"]
        lines.append(f"{head}{program.direction(path)} {program.scope(path)}: {path.rpartition('/')[2]}")
        lines.append(f"{'':32}{row['name']}: {what}: {row['shape']} <- {', '.join(row['operands'])}")
    return "\n".join(lines)


def _several(opcodes: tuple[str, ...]) -> str:
    """'2 dot, add' without what costs nothing."""
    free = {"constant", "bitcast", "broadcast", "tuple", "get-tuple-element", "reshape"}
    count = collections.Counter(opcode for opcode in opcodes if opcode not in free)
    return ", ".join(f"{n} {opcode}" if n > 1 else opcode for opcode, n in count.most_common()) or "nothing"


def main(argv: list[str]) -> int:
    """Profile the step that the arguments name, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", help="a config file; --config.key=value changes it")
    which.add_argument("--workload", help="a workload of the benchmark: step_a, step_b, step_c, step_d")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--top", type=int, default=25, help="instructions to show")
    overrides = [word for word in argv if word.startswith("--config.")]
    given = parser.parse_args([word for word in argv if word not in overrides])
    try:
        made = workload(given.workload) if given.workload else planned(settings_of(given.config, overrides))
        print(tables(profile(made, steps=given.steps), top=given.top))
    except errors.UserError as error:
        print(f"error: {errors.line(error)}", file=sys.stderr)
        return 2
    return 0


def workload(name: str, **changes: Any) -> steps.Plan:
    """The plan of one of the benchmark's training steps."""
    right = [name for name, size in sizes.WORKLOADS.items() if size.kind != "generation"]
    if name not in right:
        raise errors.UserError(f'unknown workload "{name}"; the right ones are: {", ".join(right)}')
    return plans.made(name, **changes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
