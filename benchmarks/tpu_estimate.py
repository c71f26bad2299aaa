"""Estimate the time of a training step on a TPU from the cycles that the TPU compiler expects.

python -m benchmarks.tpu_estimate configs/gpt2.py v5e-1 [model.remat=full ...]
python -m benchmarks.tpu_estimate my_file:step v5e-1          # your own function (docs/tpu.md)

Use it to compare two programs, not as a measurement. For a published step of a model of 164 M parameters, the estimate
was 1.5 (v5e) and 2.5 (v6e) times too long. It reads the text of libtpu 0.0.50, whose format can change.
"""

import collections
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend import core

from experiments.config import by_name, files as config_files
from experiments.devices import compilation
from experiments.dry_run import dry_run as dry_runs, topology as topologies, user_function as user_functions
from experiments.engine import run as runs, run_plan
from experiments.pretrained import adapters

# FLOP/s of bfloat16 products, clock rate in Hz (cloud.google.com/tpu/docs, v4 to v6e).
CHIPS = {"v4": (275e12, 1.05e9), "v5e": (197e12, 1.5e9), "v5p": (459e12, 1.75e9), "v6e": (918e12, 1.75e9)}
# The text has no cycles for Pallas kernels. We assume that they reach half of the peak, compute half of the blocks
# (causal mask), and take 7 products in training for every 2 in the forward pass.
KERNEL_PEAK, CAUSAL, TRAINING = 0.5, 0.5, 3.5
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


def main(code: str, name: str, *changes: str) -> None:
    """Compile the step of a config, or a function of the user's, for a topology, and print the estimate."""
    target, (peak, clock) = topologies.describe(name), CHIPS[name.partition("-")[0]]
    load = load_user_function if by_name.CODE.fullmatch(code) else load_step
    request, all_flops, kernel_flops = load(code, target, *changes)
    (program,) = topologies.compile_programs([request])
    if program.compiled is None:
        sys.exit(f"{program.request.name} is not compiled: it {program.reason}")
    cycles, unknown_loops = estimate(program.compiled.as_text())
    kernels = kernel_flops / (KERNEL_PEAK * len(target.devices) * peak)
    seconds, ideal = sum(cycles.values()) / clock + kernels, all_flops / (len(target.devices) * peak)
    print(f"estimate {1e3 * seconds:.4g} ms ({1e3 * kernels:.3g} ms for kernels); {ideal / seconds:.1%} of the peak")
    record = dry_runs.describe_program(program)
    print(f"memory of a chip {record['needed_bytes'] / 2**20:.1f} MiB; collectives {record['collectives']}")
    print(f"loops of unknown length, counted as one iteration: {unknown_loops}")
    for scopes, n in list(cycles.items())[:20]:
        print(f"  {n / clock / seconds:6.1%}  {scopes}")


def load_step(config: str, target: topologies.Topology, *changes: str) -> tuple[topologies.Request, float, float]:
    """Return the request for the step of a config, its FLOPs, and those of its Pallas kernels in unmasked blocks.

    The FLOPs are three times those of the forward pass: they leave out what the backward pass computes again.
    """
    settings = config_files.load_settings(config, dict(change.split("=", 1) for change in changes))
    mesh = runs.make_mesh(settings, chips=target.devices)
    work = adapters.prepare_work(settings, by_name.load_experiment(settings.experiment), mesh)
    plan, state = run_plan.prepare(settings, work.task, mesh, dry_run=True)
    all_flops, kernel_flops = (run_plan.forward_flops(plan, state, kernels=kernels) for kernels in (False, True))
    return next(dry_runs.programs(plan, state)), 3 * all_flops, TRAINING * CAUSAL * kernel_flops


def load_user_function(name: str, target: topologies.Topology) -> tuple[topologies.Request, float, float]:
    """Return the request for a function of the user's, its FLOPs, and those of its Pallas kernels in unmasked blocks.

    The FLOPs are those of the traced function, with all that it computes again. Those inside a shard_map are of one
    device.
    """
    request = user_functions.load(name, target.devices)
    jaxpr = request.function.trace(*request.arguments).jaxpr  # without jit's options and static arguments
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals]
    all_flops, kernel_flops = (
        compilation.flops(core.jaxpr_as_fun(jaxpr), *arrays, kernels=kernels) for kernels in (False, True)
    )
    return request, all_flops, CAUSAL * kernel_flops


if __name__ == "__main__":
    main(*sys.argv[1:])
