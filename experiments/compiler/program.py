"""A compiled program as it is written: its instructions, the named scope of each, and how often a loop turns."""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

NO_SCOPE = "(none)"  # what the compiler added, or what stands in no named scope
_NAME = r"%?([\w.\-]+)"
_INSTRUCTION = re.compile(rf"^\s*(ROOT )?{_NAME} = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(rf"^(ENTRY )?{_NAME} \(.*\{{$")
_CALLED = re.compile(rf"(condition|body|calls|to_apply|(?:true|false)_computation)={_NAME}")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_INDEX = re.compile(r"\bindex=(\d+)")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARED = re.compile(r"direction=([LG])([TE])")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_WHOLE = re.compile(r"[su]\d+\[\]")  # one whole number
_WRAPPED = re.compile(r"^(\w+)\((.*)\)$")
# What JAX puts into the path beside the scopes: transformations around a scope, and calls of functions.
_AROUND = {"jvp", "transpose", "vmap", "linearize"}
_BESIDE = set(
    "shard_map while body cond checkpoint rematted_computation closed_call core_call custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr remat remat2 pjit custom_lin eval_jaxpr".split()
)


class Line(NamedTuple):
    """name = shape opcode(rest, the shape without layout."""

    name: str
    shape: str
    opcode: str
    rest: str


class Program(NamedTuple):
    """Computations by their names, each in the order in which it is written: on a TPU that is its schedule."""

    entry: str
    bodies: dict[str, list[Line]]
    roots: dict[str, Line]
    lines: dict[str, Line]

    def inputs(self, line: Line) -> list[Line]:
        """What an instruction takes."""
        return [self.lines[name] for name in re.findall(_NAME, line.rest.partition(")")[0]) if name in self.lines]

    def inside(self, line: Line) -> list[Line]:
        """What a fusion computes."""
        return self.bodies.get(called(line)["calls"], []) if line.opcode == "fusion" else []

    def op_name(self, line: Line) -> str:
        """The path in the traced program; a fusion without one of its own has that of its root."""
        match = _OP_NAME.search(line.rest)
        root = self.roots.get(called(line)["calls"]) if line.opcode == "fusion" else None
        return match[1] if match else self.op_name(root) if root else ""


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


def parse(text: str) -> Program:
    """The program of a compiled text (`compiled.as_text()`)."""
    entry, body, texts = "", [], {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            body = texts.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line == "}":
            body = []
        elif _INSTRUCTION.match(line):
            body.append(line)
        elif body:  # what is said of a kernel may go on over several lines
            body[-1] += line
    bodies, roots = {}, {}
    for computation, body in texts.items():
        bodies[computation] = []
        for match in map(_INSTRUCTION.match, body):
            line = Line(match[2], _LAYOUT.sub("", match[3]), match[4], match[5])
            bodies[computation].append(line)
            if match[1]:
                roots[computation] = line
    return Program(entry, bodies, roots, {line.name: line for body in bodies.values() for line in body})


def called(line: Line) -> dict[str, str]:
    """The computations that an instruction names, by what they are to it."""
    return dict(_CALLED.findall(line.rest))


def branches(line: Line) -> list[str]:
    """The computations of which a conditional does one."""
    match = _BRANCHES.search(line.rest)
    return re.findall(_NAME, match[1]) if match else [name for _, name in _CALLED.findall(line.rest)]


def instructions(text: str) -> dict[str, Instruction]:
    """Every instruction of the compiled text, by its name."""
    program = parse(text)
    return {name: instruction(line, program) for name, line in program.lines.items()}


def instruction(line: Line, program: Program) -> Instruction:
    """What an instruction is."""
    inside = program.inside(line)
    return Instruction(
        opcode=line.opcode,
        shape=line.shape,
        operands=tuple(one.shape for one in program.inputs(line)),
        op_name=program.op_name(line),
        inside=tuple(one.opcode for one in inside if one.opcode != "parameter"),
        flops=sum(_flops(one, program) for one in [line, *inside] if one.opcode == "dot"),
    )


def _flops(dot: Line, program: Program) -> int:
    """Two for each product of two numbers."""
    left = sizes(program.inputs(dot)[0].shape)
    contracted = _CONTRACTED.search(dot.rest)[1]
    return 2 * math.prod(sizes(dot.shape)) * math.prod(left[int(i)] for i in contracted.split(",") if i)


def sizes(shape: str) -> list[int]:
    """[2, 3] for 'f32[2,3]'."""
    return [int(n) for n in shape.partition("[")[2].partition("]")[0].split(",") if n]


def scope(op_name: str) -> str:
    """The named scopes of a path, outermost first, joined by '/'; of several transformations around them, none.

    Of operations that the compiler has made one, whose paths stand behind each other with ';', those of the first.
    """
    scopes = []
    for part in _parts(op_name.partition(";")[0])[:-1]:  # the last one is the primitive
        scopes += [inner for inner in _unwrapped(part).split("/") if inner and not _is_beside(inner)]
    return "/".join(scopes) or NO_SCOPE


def _is_beside(part: str) -> bool:
    return part in _BESIDE or part.startswith(("jit(", "pjit(", "branch_")) or "->" in part  # an einsum's name


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
    while (match := _WRAPPED.match(part)) and match[1] in _AROUND:
        part = match[2]
    return part


def direction(op_name: str) -> str:
    """'backward', 'recomputed' (a part of the forward pass that the backward one computes again) or 'forward'."""
    if "rematted_computation" in op_name:
        return "recomputed"
    return "backward" if "transpose(" in op_name else "forward"


Numbers = Callable[[int], int | None] | None  # the whole number at a place of the tuple that a computation is given


def turns(loop: Line, program: Program) -> int | None:
    """How often the body of a loop is computed, where its condition compares whole numbers that change evenly.

    On a TPU the text does not say it: it follows from the tuple before the first turn, and from body and condition.
    """
    if match := _TIMES.search(loop.rest):
        return int(match[1])
    test, following = (program.roots[called(loop)[part]] for part in ("condition", "body"))
    left, numbers = [], None
    for source in (program.inputs(loop)[0], following, following):
        numbers = functools.partial(_at, source, program, numbers)
        left.append(_left(test, program, numbers))
    if None in left or left[2] - left[1] != left[1] - left[0]:
        return None
    step = left[0] - left[1]
    return 0 if left[0] <= 0 else -(-left[0] // step) if step > 0 else None


def _left(test: Line, program: Program, numbers: Numbers) -> int | None:
    """What is left until a comparison of whole numbers is false: of x < n, n - x."""
    compared = _COMPARED.search(test.rest) if test.opcode == "compare" else None
    both = [_number(line, program, numbers) for line in program.inputs(test)] if compared else [None]
    if None in both:
        return None
    return (both[1] - both[0]) * (1 if compared[1] == "L" else -1) + (compared[2] == "E")


def _at(source: Line, program: Program, numbers: Numbers, i: int) -> int | None:
    """The whole number at a place of this tuple, where it follows from constants and what a computation is given."""
    if source.opcode == "tuple":
        return _number(program.inputs(source)[i], program, numbers)
    return numbers(i) if numbers and source.opcode == "parameter" else None


def _number(line: Line, program: Program, numbers: Numbers) -> int | None:
    """The whole number that an instruction gives, where it follows from constants and what a computation is given."""
    if not _WHOLE.fullmatch(line.shape):
        return None
    if line.opcode == "constant":
        return int(line.rest.partition(")")[0])
    if line.opcode == "get-tuple-element":
        return _at(program.inputs(line)[0], program, numbers, int(_INDEX.search(line.rest)[1]))
    if line.opcode not in ("add", "copy"):
        return None
    parts = [_number(one, program, numbers) for one in program.inputs(line)]
    return None if None in parts else sum(parts)
