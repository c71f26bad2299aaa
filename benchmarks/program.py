"""The instructions of a compiled program: what each one is, its shapes, and the named scope that it was written in."""

import math
import re
from typing import NamedTuple

NO_SCOPE = "(none)"  # what the compiler added, or what stands in no named scope
_NAME = r"%?([\w.\-]+)"
_INSTRUCTION = re.compile(rf"^\s*(ROOT )?{_NAME} = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(rf"^(?:ENTRY )?{_NAME} \(.*\{{$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(rf"calls={_NAME}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_WRAPPED = re.compile(r"^(\w+)\((.*)\)$")
# What JAX puts into the path beside the scopes: transformations around a scope, and calls of functions.
_AROUND = {"jvp", "transpose", "vmap", "linearize"}
_BESIDE = {"shard_map", "while", "body", "cond", "checkpoint", "rematted_computation", "closed_call", "core_call"}
_BESIDE |= {
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "remat",
    "remat2",
    "pjit",
    "custom_lin",
    "eval_jaxpr",
}
CONTAINERS = {"while", "call", "conditional", "async-start", "async-done"}  # they last as long as what is inside them


class Instruction(NamedTuple):
    """One line of the program."""

    opcode: str
    shape: str  # of the result, without layout
    operands: tuple[str, ...]  # the shapes of what it takes
    op_name: str  # the path in the traced program: 'jit(step)/transpose(jvp(blocks))/mlp/dot_general'
    inside: tuple[str, ...]  # opcodes of what a fusion computes
    flops: int  # of the matrix products in it


UNKNOWN = Instruction("?", "", (), "", (), 0)


def module(text: str) -> str:
    """The name of the program."""
    return re.search(r"HloModule ([\w.\-]+)", text).group(1)


def instructions(text: str) -> dict[str, Instruction]:
    """Every instruction of the compiled text, by its name. A fusion without a path of its own has that of its root."""
    lines, bodies, roots, body = {}, {}, {}, []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            body = bodies.setdefault(found[1], [])
            where = found[1]
        elif found := _INSTRUCTION.match(line):
            lines[found[2]] = found
            body.append(found[2])
            if found[1]:
                roots[where] = found[2]
    return {name: _instruction(found, lines, bodies, roots) for name, found in lines.items()}


def _instruction(found: re.Match, lines: dict, bodies: dict, roots: dict) -> Instruction:
    _, _, shape, opcode, rest = found.groups()
    called = _CALLED.search(rest)
    inside = [lines[name] for name in bodies.get(called[1], [])] if called else []
    root = roots.get(called[1]) if called else None
    return Instruction(
        opcode=opcode,
        shape=_LAYOUT.sub("", shape),
        operands=_operands(rest, lines),
        op_name=_path(rest) or (_path(lines[root][5]) if root else ""),
        inside=tuple(line[4] for line in inside if line[4] != "parameter"),
        flops=sum(_flops(line, lines) for line in [found, *inside] if line[4] == "dot"),
    )


def _operands(rest: str, lines: dict) -> tuple[str, ...]:
    names = re.findall(_NAME, rest.partition(")")[0])
    return tuple(_LAYOUT.sub("", lines[name][3]) for name in names if name in lines)


def _flops(dot: re.Match, lines: dict) -> int:
    """Two for each product of two numbers."""
    left = _sizes(_operands(dot[5], lines)[0])
    contracted = _CONTRACTED.search(dot[5])[1]
    return 2 * math.prod(_sizes(dot[3])) * math.prod(left[int(i)] for i in contracted.split(",") if i)


def _sizes(shape: str) -> list[int]:
    """[2, 3] for 'f32[2,3]{1,0}'."""
    return [int(n) for n in shape.partition("[")[2].partition("]")[0].split(",") if n]


def _path(rest: str) -> str:
    found = _OP_NAME.search(rest)
    return found[1] if found else ""


def scope(op_name: str) -> str:
    """The named scopes of a path, outermost first, joined by '/'; of several transformations around them, none."""
    kept = []
    for part in _parts(op_name)[:-1]:  # the last one is the primitive
        kept += [inner for inner in _unwrapped(part).split("/") if inner and not _is_beside(inner)]
    return "/".join(kept) or NO_SCOPE


def _is_beside(part: str) -> bool:
    return part in _BESIDE or part.startswith(("jit(", "pjit(", "branch_"))


def _parts(path: str) -> list[str]:
    """The path cut at each '/' that stands in no brackets."""
    parts, depth = [""], 0
    for letter in path:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _unwrapped(part: str) -> str:
    while (found := _WRAPPED.match(part)) and found[1] in _AROUND:
        part = found[2]
    return part


def direction(op_name: str) -> str:
    """'backward', 'recomputed' (a part of the forward pass that the backward one computes again) or 'forward'."""
    if "rematted_computation" in op_name:
        return "recomputed"
    return "backward" if "transpose(" in op_name else "forward"
