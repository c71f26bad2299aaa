"""What passes between devices in one step, read off the compiled program: collectives, how often, how many bytes."""

import math
import re
from typing import NamedTuple

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}  # else 4
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ALONE = re.compile(r"replica_groups=(?:\{(?:\{\d+\},?)*\}|\[\d+,1\])")  # every device a group of its own
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Traffic(NamedTuple):
    """How often a kind of collective is done in a step, and the bytes of its results on one device."""

    times: int
    size: int


def traffic(program: str) -> dict[str, Traffic]:
    """The collectives of a compiled program (`compiled.as_text()`) by their kinds, loops multiplied out.

    A loop whose number of turns XLA does not know counts once; of branches all count. Sums that share one message count
    as one; what a device does with itself alone is none.
    """
    bodies = _computations(program)
    entry = next(name for name, lines in bodies.items() if lines and lines[0] == "ENTRY")
    found: dict[str, list[int]] = {}
    _count(entry, 1, bodies, found)
    return {kind: Traffic(*found[kind]) for kind in KINDS if kind in found}


def largest(program: str, kind: str) -> int:
    """Bytes of the largest array that a collective of this kind brings."""
    lines = (_OPERATION.search(line) for line in program.splitlines())
    return max((max(_arrays(one.group(1))) for one in lines if one and one.group(2) == kind), default=0)


def _computations(program: str) -> dict[str, list[str]]:
    """The lines of each computation by its name; those of the entry begin with ENTRY."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in program.splitlines():
        head = _HEAD.match(line)
        if head and not line.startswith((" ", "HloModule")):
            name = head.group(1)
            bodies[name] = ["ENTRY"] if line.startswith("ENTRY") else [""]
        elif name:
            bodies[name].append(line)
    return bodies


def _count(name: str, times: int, bodies: dict[str, list[str]], found: dict[str, list[int]]) -> None:
    for line in bodies.get(name, []):
        operation = _OPERATION.search(line)
        if operation:
            if not _ALONE.search(line):
                so_far = found.setdefault(operation.group(2), [0, 0])
                so_far[0] += times
                so_far[1] += times * _arrived(*operation.groups())
            continue
        turns = _TIMES.search(line)
        inner = _CALLED.findall(line) + [one.strip("% ") for some in _BRANCHES.findall(line) for one in some.split(",")]
        for called in inner:
            _count(called, times * (int(turns.group(1)) if turns else 1), bodies, found)


def _arrived(result: str, kind: str, started: str | None) -> int:
    """Bytes of the arrays that a collective brings; one that is only started may name more than its results."""
    arrays = _arrays(result)
    if started and kind == "collective-permute":  # (input, output, two contexts)
        arrays = arrays[1:2]
    elif started and kind == "all-gather":  # (inputs, outputs)
        arrays = arrays[len(arrays) // 2 :]
    return sum(arrays)


def _arrays(result: str) -> list[int]:
    """Bytes of each array of a type such as (f32[2,3]{1,0}, f32[4]{0})."""
    plain = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", result)
    return [
        _BYTES.get(kind, 4) * math.prod(int(n) for n in shape.split(",") if n) for kind, shape in _ARRAY.findall(plain)
    ]
