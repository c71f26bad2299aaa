"""Estimate the time of a training step on a TPU from the cycles that its compiler expects: for developers.

python -m benchmarks.tpu_estimate configs/gpt2.py v5e-1 [model.remat=full ...]

This is no measurement, and it reads a text whose format no one promises (libtpu 0.0.50). The published step of a model
of 164 M parameters took 1/1.5 (v5e) and 1/2.5 (v6e) of the estimate. Use the ratio between two programs.
"""

import collections
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from experiments.dry_run import dry_run, topology
from experiments.engine import by_name, config_file, run as runs
from experiments.pretrained import adapters

# FLOP/s of bfloat16 products, clock in Hz (cloud.google.com/tpu/docs, v4 to v6e).
CHIPS = {"v4": (275e12, 1.05e9), "v5e": (197e12, 1.5e9), "v5p": (459e12, 1.75e9), "v6e": (918e12, 1.75e9)}
# The compiler expects no time for a Pallas kernel. Assumed: half of the peak, half of the blocks (causal mask), and 7
# products in training for 2 of the forward pass.
KERNEL_PEAK, CAUSAL, TRAINING = 0.5, 0.5, 3.5
NAME = r"%?([\w.\-]+)"
INSTRUCTION = re.compile(rf"^\s*(ROOT )?{NAME} = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$")
COMPUTATION = re.compile(rf"^(ENTRY )?{NAME} \(.*\{{$")
CALLED = re.compile(rf"(condition|body|calls|to_apply)={NAME}")
CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # 2**63 - 1 means unknown
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
# JAX puts transformations around a named scope, and function calls between scopes.
TRANSFORMATION = re.compile(r"((jvp|transpose|vmap|linearize)\()*")
CALL = re.compile(
    r"jit\(|pjit|branch_|.*->|(shard_map|while|body|cond|checkpoint|rematted_computation|closed_call|core_call|"
    r"custom_[jv]\w+|remat2?|custom_lin|eval_jaxpr)$"
)


class Line(NamedTuple):
    """An instruction, `name = shape opcode(rest`, with the computations that it calls."""

    name: str
    opcode: str
    rest: str
    called: dict[str, str]

    @property
    def cycles(self) -> int:
        found = CYCLES.search(self.rest)
        return int(found[1]) if found else 0


class Program(NamedTuple):
    """A compiled program: its computations by name, their last lines, and all lines by name."""

    entry: str
    bodies: dict[str, list[Line]]
    roots: dict[str, Line]
    lines: dict[str, Line]


class Estimate(NamedTuple):
    """Cycles of all but Pallas kernels and collectives, by named scope, most expensive first.

    unknown_loops: loops that count once, because the text does not contain their number of turns.
    """

    cycles: dict[str, int]
    unknown_loops: int


def estimate(text: str) -> Estimate:
    """Estimate a compiled program (`as_text()`). Turns of loops are multiplied; of branches the longest counts."""
    program, cycles, unknown = parse(text), collections.Counter(), 0
    for line, n in executed(program, program.entry):
        unknown += line.opcode == "while" and turns(line, program) is None
        if line.cycles:
            cycles[scope(line, program)] += n * line.cycles
    return Estimate(dict(cycles.most_common()), unknown)


def parse(text: str) -> Program:
    """Read the text of a compiled program."""
    program, body, texts = Program("", {}, {}, {}), [], {}
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            body = texts.setdefault(found[2], [])
            program = program._replace(entry=found[2] if found[1] else program.entry)
        elif INSTRUCTION.match(line):
            body.append(line)
        elif line != "}" and body:  # attributes of a kernel continue on the next lines
            body[-1] += line
    for computation, lines in texts.items():
        for found in map(INSTRUCTION.match, lines):
            line = Line(found[2], found[3], found[4], dict(CALLED.findall(found[4])))
            program.bodies.setdefault(computation, []).append(line)
            program.lines[line.name] = line
            if found[1]:
                program.roots[computation] = line
    return program


def executed(program: Program, computation: str, times: int = 1) -> Iterator[tuple[Line, int]]:
    """Yield each line of a computation and of those that it calls, but fusions, with how often it is executed."""
    for line in program.bodies.get(computation, []):
        yield line, times
        if line.opcode == "while":
            n = turns(line, program)
            yield from executed(program, line.called["body"], times * (1 if n is None else n))
        elif line.opcode == "conditional":
            names = [name for name in re.findall(NAME, line.rest) if name in program.bodies]
            branches = [list(executed(program, name, times)) for name in names]
            yield from max(branches, key=lambda branch: sum(n * one.cycles for one, n in branch))
        elif line.opcode in ("call", "async-start", "call-start"):
            yield from executed(program, line.called.get("to_apply") or line.called["calls"], times)


def scope(line: Line, program: Program) -> str:
    """Return the named scopes of a line, joined by "/"; for a fusion without any, those of its root."""
    found = OP_NAME.search(line.rest)
    if not found:
        root = program.roots.get(line.called["calls"]) if line.opcode == "fusion" else None
        return scope(root, program) if root else "(none)"
    parts = [TRANSFORMATION.sub("", part, count=1) for part in found[1].partition(";")[0].split("/")[:-1]]
    return "/".join(name for part in parts if not CALL.match(part) and (name := part.rstrip(")"))) or "(none)"


def turns(loop: Line, program: Program) -> int | None:
    """Return how often a loop turns, if the text says it or its condition is i < constant: JAX counts from 0 by 1."""
    if found := TRIPS.search(loop.rest):
        return int(found[1])
    test = program.roots[loop.called["condition"]]
    inputs = [program.lines.get(name) for name in re.findall(NAME, test.rest.partition(")")[0])]
    end = inputs[1] if test.opcode == "compare" and "direction=LT" in test.rest else None
    return int(end.rest.partition(")")[0]) if end and end.opcode == "constant" else None


def main(config: str, name: str, *changes: str) -> None:
    """Compile the training step of a config for a topology, and print the estimate."""
    target, (peak, clock) = topology.describe(name), CHIPS[name.partition("-")[0]]
    settings = config_file.load_settings(config, dict(change.split("=", 1) for change in changes))
    mesh = runs.make_mesh(settings, chips=target.devices)
    work = adapters.prepare_work(settings, by_name.load_experiment(settings.experiment), mesh)
    plan, state = runs.prepare(settings, work, mesh, described=True)
    (program,) = topology.compile_programs([next(dry_run.programs(plan, state))])
    if program.compiled is None:
        sys.exit(f"not compiled: it {program.reason}")
    one = estimate(program.compiled.as_text())
    all_flops, kernel_flops = (runs.forward_flops(plan, state, kernels=kernels) for kernels in (False, True))
    kernels = TRAINING * CAUSAL * kernel_flops / (KERNEL_PEAK * mesh.size * peak)
    seconds, ideal = sum(one.cycles.values()) / clock + kernels, 3 * all_flops / (mesh.size * peak)
    print(f"estimate {1e3 * seconds:.4g} ms, {1e3 * kernels:.3g} ms of it kernels; {ideal / seconds:.1%} of the peak")
    facts = dry_run.record(program)
    print(f"memory of a chip {facts['needed_bytes'] / 2**20:.1f} MiB; collectives {facts['collectives']}")
    print(f"loops counted once: {one.unknown_loops}")
    for scopes, n in list(one.cycles.items())[:20]:
        print(f"  {n / clock / seconds:6.1%}  {scopes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
