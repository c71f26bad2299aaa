"""What a compiled program says of a step: what passes between devices, and the TPU compiler's estimate of its time."""

import collections
import math
import re
from typing import NamedTuple

from experiments.compiler import program as programs

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}  # else 4
_ARRAY = re.compile(r"(\w+)(\[[\d,]*\])")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FLOPS = re.compile(r'"cost_estimate":\{[^}]*?"flops":"(\d+)"')
_WORK = ("fusion", "sort", "reduce-window", "custom-call")
_NO_WORK = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"')
_CHAIN = re.compile(r'chain_id="\d+"|$')  # the same for all parts of a collective that several fusions do
_ALONE = re.compile(r"replica_groups=(?:\{(?:\{\d+\},?)*\}|\[\d+,1\])")  # every device a group of its own
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}")  # the groups as mesh['x'=4,'y'=2] {'x'}


class Traffic(NamedTuple):
    """How often a kind of collective is done in a step, and the bytes of its results on one device.

    beside: how many of these times something is computed while it is under way; the others are waited for.
    """

    times: int
    size: int
    beside: int


class Kernel(NamedTuple):
    """A Pallas kernel, of whose time the compiler says nothing. flops: of one time, if its `cost_estimate` says it."""

    times: int
    flops: int | None


class Estimate(NamedTuple):
    """What the TPU compiler says of a program. Its seconds are those of neither kernels nor collectives."""

    seconds: float
    by_scope: dict[str, float]  # seconds, the dearest scope first
    kernels: list[Kernel]
    collectives: dict[str, Traffic]
    unknown_loops: int  # their number of turns does not follow from the text, and they count once
    unestimated: dict[str, int]  # times by scope: work of which the compiler says no cycles (gather, scatter, sort)


def estimate(text: str, *, clock: float) -> Estimate:
    """The estimate of a compiled TPU program (`compiled.as_text()`): its `estimated_cycles`, loops multiplied out.

    clock: cycles in a second. Of branches the dearest counts.
    """
    program = programs.parse(text)
    total = _of_computation(program.entry, program)
    seconds = {scope: n / clock for scope, n in collections.Counter(_part(total, "cycles")).most_common()}
    return Estimate(
        seconds=sum(seconds.values()),
        by_scope=seconds,
        kernels=[_kernel(program.lines[name], n) for name, n in _part(total, "kernel").items()],
        collectives=_traffic(total),
        unknown_loops=len(_part(total, "unknown")),
        unestimated=_part(total, "unestimated"),
    )


def traffic(text: str) -> dict[str, Traffic]:
    """The collectives of a compiled program (`compiled.as_text()`) by their kinds, loops multiplied out.

    A loop whose number of turns does not follow from the text counts once; of branches the dearest counts. Sums that
    share one message count as one; what a device does with itself alone is none.
    """
    program = programs.parse(text)
    return _traffic(_of_computation(program.entry, program))


def largest(text: str, kind: str) -> int:
    """Bytes of the largest array that a collective of this kind brings."""
    lines = programs.parse(text).lines.values()
    return max((max(_arrays(line.shape)) for line in lines if line.opcode in (kind, f"{kind}-start")), default=0)


# Amounts by what they are of: ("cycles", scope), ("kernel", its name), ("times" or "size" or "beside", kind), ...
Total = collections.Counter[tuple[str, str]]


def _part(total: Total, what: str) -> dict[str, int]:
    return {of: n for (kind, of), n in total.items() if kind == what and n}


def _traffic(total: Total) -> dict[str, Traffic]:
    return {kind: Traffic(*(total[what, kind] for what in Traffic._fields)) for kind in KINDS if total["times", kind]}


def _work(total: Total) -> int:
    """Cycles, and kernels, which have some."""
    return sum(n for (what, _), n in total.items() if what in ("cycles", "kernel"))


def _of_computation(name: str, program: programs.Program) -> Total:
    """What is done in a computation."""
    total: Total = collections.Counter()
    under_way: dict[str, tuple[Total, int]] = {}  # collectives, and the work before them
    for line in program.bodies[name]:
        done = _of_line(line, program)
        began, before = under_way.pop(_end(line, program), (None, 0))
        if began and _work(total) > before:
            total.update({("beside", kind): n for kind, n in _part(began, "times").items()})
        total.update(done)
        if start := _start(line, program):
            under_way[start] = done, _work(total)
    return total


def _of_line(line: programs.Line, program: programs.Program) -> Total:
    """What one instruction does, with all that it calls."""
    called = programs.called(line)
    if line.opcode == "while":
        n, turn = programs.turns(line, program), _of_computation(called["body"], program)
        if n is None:
            return turn + collections.Counter({("unknown", line.name): 1})
        return collections.Counter({what: n * amount for what, amount in turn.items()})
    if line.opcode == "conditional":
        of_branches = [_of_computation(name, program) for name in programs.branches(line)]
        return max(of_branches, key=lambda total: (_work(total), sum(_part(total, "size").values())))
    if line.opcode in ("call", "async-start", "call-start"):
        return _of_computation(called.get("to_apply") or called["calls"], program)
    total: Total = collections.Counter()
    for one in (line, *program.inside(line)):
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS and not _alone(one.rest) and not _goes_on(one, line, program):
            total.update({("times", kind): 1, ("size", kind): _arrived(one.shape, kind, started=kind != one.opcode)})
        elif one.opcode == "custom-call" and '"tpu_custom_call"' in one.rest:
            total["kernel", one.name] += 1
    scope = programs.scope(program.op_name(line))
    if cycles := _CYCLES.search(line.rest):
        total["cycles", scope] += int(cycles[1])
    elif line.opcode in _WORK and not total and not _end(line, program) and not _NO_WORK.search(line.rest):
        total["unestimated", scope] += 1
    return total


def _start(line: programs.Line, program: programs.Program) -> str:
    """The key of a collective that this starts, and that goes on beside what follows; '' where it starts none."""
    return line.name if line.opcode.endswith("-start") else _marked("AsyncCollectiveStart", line, program)


def _end(line: programs.Line, program: programs.Program) -> str:
    """The key of the collective that this waits for; '' where it waits for none."""
    if line.opcode.endswith("-done"):
        begun = program.inputs(line)[0]
        return program.inputs(begun)[0].name if begun.opcode.endswith("-update") else begun.name
    return _marked("AsyncCollectiveDone", line, program)


def _marked(mark: str, fusion: programs.Line, program: programs.Program) -> str:
    """The key of the collective in a fusion that starts or ends it, as libtpu writes them; '' in another one."""
    inside = program.inside(fusion)
    if not any(mark in line.rest for line in inside if line.opcode == "custom-call"):
        return ""
    return next(line.opcode + _CHAIN.search(line.rest)[0] for line in inside if line.opcode in KINDS)


def _goes_on(collective: programs.Line, fusion: programs.Line, program: programs.Program) -> bool:
    """Whether this is only a later part of a collective that another fusion has started."""
    return '"async_collective_fusion_config"' in collective.rest and not _start(fusion, program)


def _alone(rest: str) -> bool:
    """Whether every device of a collective is a group of its own."""
    if named := _AXES.search(rest):
        size = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return all(size.get(axis) == "1" for axis in re.findall(r"'(\w+)'", named[2]))
    return bool(_ALONE.search(rest))


def _arrived(result: str, kind: str, *, started: bool) -> int:
    """Bytes of the arrays that a collective brings; one that is only started may name more than its results."""
    arrays = _arrays(result)
    if started and kind == "collective-permute":  # (input, output, two contexts)
        arrays = arrays[1:2]
    elif started and kind == "all-gather":  # (inputs, outputs)
        arrays = arrays[len(arrays) // 2 :]
    return sum(arrays)


def _arrays(result: str) -> list[int]:
    """Bytes of each array of a type such as (f32[2,3], f32[4])."""
    return [_BYTES.get(kind, 4) * math.prod(programs.sizes(shape)) for kind, shape in _ARRAY.findall(result)]


def _kernel(line: programs.Line, times: int) -> Kernel:
    flops = _FLOPS.search(line.rest)
    return Kernel(times, int(flops[1]) if flops else None)
