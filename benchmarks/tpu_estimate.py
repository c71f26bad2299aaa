"""Estimate the time of a training step on a TPU from the cycles that the TPU compiler expects.

python -m benchmarks.tpu_estimate configs/gpt2.py v5e-1 [model.remat=full ...]
python -m benchmarks.tpu_estimate my_file:step v5e-1          # your own function (docs/tpu.md)
python -m benchmarks.tpu_estimate --all [v6e-1]               # a table of ten steps (catalogue.py), in ten minutes

Use it to compare two programs, not as a measurement. For a published step of a model of 164 M parameters, the estimate
was 1.5 (v5e) and 2.5 (v6e) times too long. It reads the text of libtpu 0.0.50, whose format can change.
"""

import collections
import contextlib
import io
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import catalogue
from experiments import command as commands
from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.dry_run import dry_run as dry_runs, topology as topologies

ROW = "{:<34}{:>10}{:>13}{:>9}{:>11}{:>13}"
# JAX's name -> FLOP/s of bfloat16 products, clock rate in Hz (cloud.google.com/tpu/docs, v4 to v6e).
CHIPS = {"TPU v4": (275e12, 1.05e9), "TPU v5 lite": (197e12, 1.5e9)}
CHIPS |= {"TPU v5": (459e12, 1.75e9), "TPU v5p": (459e12, 1.75e9), "TPU v6 lite": (918e12, 1.75e9)}
KERNEL_PEAK = 0.5  # the text has no cycles for Pallas kernels; we assume that they reach half of the peak
NAME = r"%?([\w.\-]+)"
INSTRUCTION = re.compile(rf"^\s*(ROOT )?{NAME} = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$")
COMPUTATION = re.compile(rf"^(ENTRY )?{NAME} \(.*\{{$")
CALLED = re.compile(rf"(condition|body|calls|to_apply)={NAME}")
CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # 2**63 - 1 means unknown
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
# In op_name, JAX puts transformations around a named scope, and function calls between scopes.
TRANSFORMATION = re.compile(r"((jvp|transpose|vmap|linearize)\()*")
CALL = re.compile(
    r"jit\(|pjit|branch_|.*->|(shard_map|while|body|cond|checkpoint|rematted_computation|closed_call|core_call|"
    r"custom_[jv]\w+|remat2?|custom_lin|eval_jaxpr)$"
)


class Line(NamedTuple):
    """An instruction, `name = shape opcode(rest`. called: {body, condition, calls or to_apply: computation}."""

    name: str
    opcode: str
    rest: str
    called: dict[str, str]

    @property
    def cycles(self) -> int:
        """The cycles that the compiler expects; 0 if the text has none."""
        match = CYCLES.search(self.rest)
        return int(match[1]) if match else 0


class Program(NamedTuple):
    """A compiled program: computation -> lines (bodies) and its ROOT line (roots), and name -> line.

    entry: the computation at which execution begins.
    """

    entry: str
    bodies: dict[str, list[Line]]
    roots: dict[str, Line]
    lines: dict[str, Line]


def estimate(text: str) -> tuple[dict[str, int], int]:
    """Return {named scope: cycles} of a compiled program, largest first, and the number of unknown loops.

    text: its `as_text()`. Pallas kernels and collectives have no cycles. Only the longest of several branches counts.
    An unknown loop, whose number of iterations is not in the text, counts as one iteration.
    """
    program, cycles, unknown_loops = parse(text), collections.Counter(), 0
    for line, times in walk(program, program.entry):
        unknown_loops += line.opcode == "while" and count_iterations(line, program) is None
        if line.cycles:
            cycles[find_scope(line, program)] += times * line.cycles
    return dict(cycles.most_common()), unknown_loops


def parse(text: str) -> Program:
    """Parse the text of a compiled program."""
    program, body, texts = Program("", {}, {}, {}), [], {}
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            body = texts.setdefault(match[2], [])
            program = program._replace(entry=match[2] if match[1] else program.entry)
        elif INSTRUCTION.match(line):
            body.append(line)
        elif line != "}" and body:  # attributes of a kernel continue on the next lines
            body[-1] += line
    for computation, lines in texts.items():
        for match in map(INSTRUCTION.match, lines):
            line = Line(match[2], match[3], match[4], dict(CALLED.findall(match[4])))
            program.bodies.setdefault(computation, []).append(line)
            program.lines[line.name] = line
            if match[1]:
                program.roots[computation] = line
    return program


def walk(program: Program, computation: str, times: int = 1) -> Iterator[tuple[Line, int]]:
    """Yield each line that a computation executes, and how many times. A fusion is one line.

    times: how many times the computation itself is executed.
    """
    for line in program.bodies.get(computation, []):
        yield line, times
        if line.opcode == "while":
            n = count_iterations(line, program)
            yield from walk(program, line.called["body"], times * (1 if n is None else n))
        elif line.opcode == "conditional":
            names = [name for name in re.findall(NAME, line.rest) if name in program.bodies]
            branches = [list(walk(program, name, times)) for name in names]
            yield from max(branches, key=lambda branch: sum(n * step.cycles for step, n in branch))
        elif line.opcode in ("call", "async-start", "call-start"):
            yield from walk(program, line.called.get("to_apply") or line.called["calls"], times)


def find_scope(line: Line, program: Program) -> str:
    """Return the named scopes of a line, joined by "/". A fusion without op_name has the scopes of its ROOT line."""
    match = OP_NAME.search(line.rest)
    if not match:
        root = program.roots.get(line.called["calls"]) if line.opcode == "fusion" else None
        return find_scope(root, program) if root else "(none)"
    parts = [TRANSFORMATION.sub("", part, count=1) for part in match[1].partition(";")[0].split("/")[:-1]]
    return "/".join(name for part in parts if not CALL.match(part) and (name := part.rstrip(")"))) or "(none)"


def count_iterations(loop: Line, program: Program) -> int | None:
    """Return a loop's number of iterations, from the text or from its condition i < constant; None if unknown.

    JAX counts i from 0.
    """
    if match := TRIPS.search(loop.rest):
        return int(match[1])
    test = program.roots[loop.called["condition"]]
    inputs = [program.lines.get(name) for name in re.findall(NAME, test.rest.partition(")")[0])]
    end = inputs[1] if test.opcode == "compare" and "direction=LT" in test.rest else None
    return int(end.rest.partition(")")[0]) if end and end.opcode == "constant" else None


class Estimate(NamedTuple):
    """The time of a compiled program, of this its Pallas kernels, and its share of the peak; NaN without cycles.

    scopes: {named scope: share of the time}, largest first. record: memory and collectives (dry_run.describe_program).
    """

    seconds: float
    kernels: float
    share: float
    scopes: dict[str, float]
    unknown_loops: int
    record: dict[str, Any]

    @property
    def mebibytes(self) -> float:
        """Return the memory that the program needs on each chip."""
        return self.record["needed_bytes"] / 2**20


def compile_step(step: catalogue.Step, devices: Sequence[Any]) -> tuple[jax.stages.Compiled, Estimate]:
    """Compile a step for the devices. Return it with its estimate. Raises RunError if the compiler refuses it."""
    (program,) = topologies.compile_programs([step.request])
    if program.compiled is None:
        raise errors.RunError(f"{program.request.name} is not compiled: it {program.reason}")
    cycles, unknown_loops = estimate(program.compiled.as_text())
    peak, clock = CHIPS.get(devices[0].device_kind if cycles else "", (math.nan, math.nan))
    peak *= len(devices)
    kernels = step.kernel_flops / (KERNEL_PEAK * peak)
    seconds = sum(cycles.values()) / clock + kernels
    scopes, record = {name: n / clock / seconds for name, n in cycles.items()}, dry_runs.describe_program(program)
    return program.compiled, Estimate(seconds, kernels, step.flops / peak / seconds, scopes, unknown_loops, record)


def print_estimate(result: Estimate) -> None:
    """Print an estimate with the largest named scopes."""
    times = f"estimate {1e3 * result.seconds:.4g} ms ({1e3 * result.kernels:.3g} ms for kernels)"
    print(f"{times}; {result.share:.1%} of the peak")
    print(f"memory of a chip {result.mebibytes:.1f} MiB; collectives {result.record['collectives']}")
    print(f"loops of unknown length, counted as one iteration: {result.unknown_loops}")
    for scopes, share in list(result.scopes.items())[:20]:
        print(f"  {share:6.1%}  {scopes}")


def print_table(target: topologies.Topology) -> None:
    """Print a line for each of catalogue.STEPS: its estimate, or the reason why there is none."""
    print(f"{target.name}, jax {meshes.versions()['jax']}, libtpu {compilation.libtpu()}: estimates, not measurements")
    print(ROW.format("step", "ms", "kernels, ms", "of peak", "MiB", "compiled in"))
    for name, command in catalogue.STEPS.items():
        code, *changes = command.split()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                step, begin = catalogue.load(code, target.devices, *changes), time.perf_counter()
                _, result = compile_step(step, target.devices)
        except (errors.UserError, errors.RunError) as error:
            print(f"{name:<34} none: {errors.line(error)}", flush=True)
            continue
        times = f"{1e3 * result.seconds:.4g}", f"{1e3 * result.kernels:.3g}", f"{result.share:.1%}"
        print(ROW.format(name, *times, f"{result.mebibytes:,.1f}", f"{time.perf_counter() - begin:.0f} s"), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Print the estimate of a step, or with --all the table of steps. Raises UserError for invalid arguments."""
    match arguments:
        case ["--all", *names] if len(names) < 2:
            print_table(topologies.describe(*names or ["v5e-1"]))
        case [code, name, *changes]:
            target = topologies.describe(name)
            print_estimate(compile_step(catalogue.load(code, target.devices, *changes), target.devices)[1])
        case _:
            raise errors.UserError("write python -m benchmarks.tpu_estimate configs/vit.py v5e-1, or --all")


if __name__ == "__main__":
    sys.exit(commands.exit_code(lambda: main(sys.argv[1:])))
