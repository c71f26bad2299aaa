"""What passes between devices in a step, and the TPU compiler's estimate of its time: read off the compiled text."""

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
# Bytes that come to each of n devices in a ring, from both sides, for one of the result; what is permuted comes from
# one side, which takes twice as long. (Austin et al. 2025, How to scale your model, chapters 2 and 3.)
PASSED: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-permute": lambda n: 2,
    "all-to-all": lambda n: n / 4,
}
NO_SCOPE = "(none)"  # what the compiler added, or what stands in no named scope
_NAME = r"%?([\w.\-]+)"
_INSTRUCTION = re.compile(rf"^\s*(ROOT )?{_NAME} = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(rf"^(ENTRY )?{_NAME} \(.*\{{$")
_CALLED = re.compile(rf"(condition|body|calls|to_apply|(?:true|false)_computation)={_NAME}")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARED = re.compile(r"direction=([LG])([TE])")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_WHOLE = re.compile(r"[su]\d+\[\]")  # one whole number
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}  # else 4
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # 2**63 - 1: none is known (v6e's gathers)
_FLOPS = re.compile(r'"cost_estimate":\{[^}]*?"flops":"(\d+)"')
_CHAIN = re.compile(r'chain_id="\d+"|$')  # the same for all parts of a collective that several fusions do
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")  # its devices, or their number
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}")  # the groups as mesh['x'=4,'y'=2] {'x'}
# What JAX puts into the path beside the scopes: transformations around a scope, and calls of functions.
_AROUND = re.compile(r"((jvp|transpose|vmap|linearize)\()*")
_BESIDE = set(
    "shard_map while body cond checkpoint rematted_computation closed_call core_call custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr remat remat2 pjit custom_lin eval_jaxpr".split()
)


class Traffic(NamedTuple):
    """How often a kind of collective is done in a step, and the bytes of its results on one device.

    beside: how many of these times something is computed while it is under way; the others are waited for.
    """

    times: int
    size: int
    beside: int


class Estimate(NamedTuple):
    """What the TPU compiler says of a program. Its seconds are those of neither kernels nor collectives.

    A collective takes as long as its bytes need over the links of a ring of chips, one after the other; it is waited
    for where what is computed meanwhile takes less (kernels, of whose time nothing is said, count as nothing).
    """

    seconds: float
    by_scope: dict[str, float]  # seconds, the dearest scope first
    kernel_flops: int  # of Pallas kernels, of whose time the compiler says nothing, by their `cost_estimate`
    silent_kernels: int  # those that do not say it
    collectives: dict[str, Traffic]
    passing: float  # seconds of all collectives
    waited: float  # those of them in which nothing is computed
    unknown_loops: int  # their number of turns does not follow from the text, and they count once


def estimate(text: str, *, clock: float = 1.0, ring: float = math.inf) -> Estimate:
    """Of a compiled program (`as_text()`): what passes between devices and, of a TPU's, its `estimated_cycles`.

    clock: cycles in a second; ring: bytes that a chip of a ring can be sent in a second, from both sides. Loops are
    multiplied out, and of branches the dearest counts. Sums that share one message count as one; what a device does
    with itself alone is none.
    """
    program = _parse(text)._replace(bytes_per_cycle=ring / clock)
    total = _of_computation(program.entry, program)
    kinds = [kind for kind in KINDS if total["times", kind]]
    seconds = {scope: n / clock for scope, n in collections.Counter(_part(total, "cycles")).most_common()}
    flops = {name: _FLOPS.search(program.lines[name].rest) for name in _part(total, "kernel")}
    return Estimate(
        seconds=sum(seconds.values()),
        by_scope=seconds,
        kernel_flops=sum(total["kernel", name] * int(match[1]) for name, match in flops.items() if match),
        silent_kernels=sum(match is None for match in flops.values()),
        collectives={kind: Traffic(*(total[what, kind] for what in Traffic._fields)) for kind in kinds},
        passing=total["passing", ""] / clock,
        waited=total["waited", ""] / clock,
        unknown_loops=len(_part(total, "unknown")),
    )


class _Line(NamedTuple):
    """name = shape opcode(rest, the shape without layout. called: computations, by what they are to it."""

    name: str
    shape: str
    opcode: str
    rest: str
    called: dict[str, str]


class _Program(NamedTuple):
    """Computations by their names, each in the order in which it is written: on a TPU that is its schedule."""

    entry: str
    bodies: dict[str, list[_Line]]
    roots: dict[str, _Line]
    lines: dict[str, _Line]
    bytes_per_cycle: float = math.inf  # that collectives bring

    def inputs(self, line: _Line) -> list[_Line]:
        """What an instruction takes."""
        return [self.lines[name] for name in re.findall(_NAME, line.rest.partition(")")[0]) if name in self.lines]

    def inside(self, line: _Line) -> list[_Line]:
        """What a fusion computes."""
        return self.bodies.get(line.called["calls"], []) if line.opcode == "fusion" else []

    def scope(self, line: _Line) -> str:
        """The named scopes in which an instruction stands, joined by '/': of a fusion without any, its root's; of
        operations that the compiler has made one, whose paths stand behind each other with ';', the first one's."""
        match = _OP_NAME.search(line.rest)
        if not match:
            root = self.roots.get(line.called["calls"]) if line.opcode == "fusion" else None
            return self.scope(root) if root else NO_SCOPE
        path = [_AROUND.sub("", part, count=1) for part in match[1].partition(";")[0].split("/")[:-1]]  # no primitive
        calls = ("jit(", "pjit(", "branch_")
        names = [part.rstrip(")") for part in path if not (part.startswith(calls) or "->" in part)]  # an einsum's name
        return "/".join(name for name in names if name and name not in _BESIDE) or NO_SCOPE


def _parse(text: str) -> _Program:
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
    program = _Program(entry, {}, {}, {})
    for computation, body in texts.items():
        matches = [_INSTRUCTION.match(line) for line in body]
        lines = [_Line(m[2], _LAYOUT.sub("", m[3]), m[4], m[5], dict(_CALLED.findall(m[5]))) for m in matches]
        program.bodies[computation] = lines
        program.roots.update((computation, line) for line, match in zip(lines, matches, strict=True) if match[1])
        program.lines.update((line.name, line) for line in lines)
    return program


# Amounts by what they are of: ("cycles", scope), ("kernel", its name), ("times" or "size" or "beside", kind), ...;
# ("takes", ""): cycles of a collective, ("passing" or "waited", ""): those in which any passes, or nothing is computed.
_Total = collections.Counter[tuple[str, str]]


def _part(total: _Total, what: str) -> dict[str, float]:
    return {of: n for (kind, of), n in total.items() if kind == what and n}


def _work(total: _Total) -> int:
    """Cycles, and kernels, which have some."""
    return sum(n for (what, _), n in total.items() if what in ("cycles", "kernel"))


def _of_computation(name: str, program: _Program) -> _Total:
    """What is done in a computation."""
    total: _Total = collections.Counter()
    under_way: dict[str, tuple[_Total, float, float]] = {}  # collectives, the work before them, and when they end
    # Cycles in which something was computed or waited for; and when the links are free again, in both directions.
    now, free = 0.0, [0.0, 0.0]
    for line in program.bodies[name]:
        done = _of_line(line, program)
        began, before, end = under_way.pop(_end(line, program), (None, 0, 0.0))
        if began and _work(total) > before:
            total.update({("beside", kind): n for kind, n in _part(began, "times").items()})
        start = _start(line, program)
        if takes := done.pop(("takes", ""), 0):
            used, last = _directions(line), max(free)
            end = max(now, *(free[i] for i in used)) + takes
            free = [end if i in used else free[i] for i in (0, 1)]
            total["passing", ""] += min(takes, max(0.0, end - last))
        if start:
            under_way[start] = done, _work(total + done), end
        elif end > now:
            total["waited", ""] += end - now
            now = end
        now += sum(_part(done, "cycles").values())
        total.update(done)
    return total


def _of_line(line: _Line, program: _Program) -> _Total:
    """What one instruction does, with all that it calls."""
    if line.opcode == "while":
        n, turn = _turns(line, program), _of_computation(line.called["body"], program)
        if n is None:
            return turn + collections.Counter({("unknown", line.name): 1})
        return collections.Counter({what: n * amount for what, amount in turn.items()})
    if line.opcode == "conditional":
        match = _BRANCHES.search(line.rest)
        branches = re.findall(_NAME, match[1]) if match else line.called.values()
        of_branches = [_of_computation(name, program) for name in branches]
        return max(of_branches, key=lambda total: (_work(total), sum(_part(total, "size").values())))
    if line.opcode in ("call", "async-start", "call-start"):
        inside = _of_computation(line.called.get("to_apply") or line.called["calls"], program)
        if line.opcode != "call":
            inside["takes", ""] = inside.pop(("passing", ""), 0)
            inside.pop(("waited", ""), 0)
        return inside
    total: _Total = collections.Counter()
    for one in (line, *program.inside(line)):
        kind = one.opcode.removesuffix("-start")
        if kind == "all-reduce" and "all-reduce-scatter" in line.called.get("calls", ""):  # and a part of the result
            kind, one = "reduce-scatter", one._replace(shape=line.shape)
        goes_on = '"async_collective_fusion_config"' in one.rest and not _start(line, program)  # another began it
        n = _group(one.rest)
        if kind in KINDS and n > 1 and not goes_on:
            size = _arrived(one)
            cycles = PASSED[kind](n) * size / program.bytes_per_cycle
            total.update({("times", kind): 1, ("size", kind): size, ("takes", ""): cycles})
        elif one.opcode == "custom-call" and '"tpu_custom_call"' in one.rest:
            total["kernel", one.name] += 1
    if cycles := _CYCLES.search(line.rest):
        total["cycles", program.scope(line)] += int(cycles[1])
    return total


def _start(line: _Line, program: _Program) -> str:
    """The key of a collective that this starts, and that goes on beside what follows; '' where it starts none."""
    return line.name if line.opcode.endswith("-start") else _marked("AsyncCollectiveStart", line, program)


def _end(line: _Line, program: _Program) -> str:
    """The key of the collective that this waits for; '' where it waits for none."""
    if line.opcode.endswith("-done"):
        begun = program.inputs(line)[0]
        return program.inputs(begun)[0].name if begun.opcode.endswith("-update") else begun.name
    return _marked("AsyncCollectiveDone", line, program)


def _marked(mark: str, fusion: _Line, program: _Program) -> str:
    """The key of the collective in a fusion that starts or ends it, as libtpu writes them; '' in another one."""
    inside = program.inside(fusion)
    if not any(mark in line.rest for line in inside if line.opcode == "custom-call"):
        return ""
    return next(line.opcode + _CHAIN.search(line.rest)[0] for line in inside if line.opcode in KINDS)


def _group(rest: str) -> int:
    """Among how many devices something passes; 2 of those that go in pairs."""
    if named := _AXES.search(rest):
        size = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(size.get(axis, 2)) for axis in re.findall(r"'(\w+)'", named[2]))
    if match := _GROUP.search(rest):
        return int(match[2] or match[1].count(",") + 1)
    return 1 if "replica_groups={}" in rest else 2


def _directions(line: _Line) -> tuple[int, ...]:
    """The directions of a ring that a collective needs: what is permuted one, by its first neighbours; others both."""
    pairs = re.findall(r"\{(\d+),(\d+)\}", line.rest.partition("source_target_pairs=")[2].partition("}}")[0] + "}")
    if not pairs:
        return (0, 1)
    before = {there: here for here, there in pairs}
    here, there = pairs[0]
    return (int(int(there) > int(before.get(here, 0))),)


def _arrived(line: _Line) -> int:
    """Bytes of the arrays that a collective brings; one that is only started may name more than its results."""
    arrays = _arrays(line.shape)
    if line.opcode == "collective-permute-start":  # (input, output, two contexts)
        arrays = arrays[1:2]
    elif line.opcode == "all-gather-start":  # (inputs, outputs)
        arrays = arrays[len(arrays) // 2 :]
    return sum(arrays)


def _arrays(shape: str) -> list[int]:
    """Bytes of each array of a type such as (f32[2,3], f32[4])."""
    arrays = _ARRAY.findall(shape)
    return [_BYTES.get(kind, 4) * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in arrays]


_Numbers = Callable[[int], int | None]  # the whole number at a place of the tuple that a computation is given


def _turns(loop: _Line, program: _Program) -> int | None:
    """How often a loop is turned; where a TPU's text does not say it, it follows from the tuple before the first turn,
    body and condition, if that compares whole numbers that change evenly."""
    if match := _TIMES.search(loop.rest):
        return int(match[1])
    test, following = (program.roots[loop.called[part]] for part in ("condition", "body"))
    compared = _COMPARED.search(test.rest) if test.opcode == "compare" else None
    left, numbers = [], None  # left: of x < n, n - x, before the first three turns
    for source in (program.inputs(loop)[0], following, following):
        numbers = functools.partial(_at, source, program, numbers)
        both = [_number(line, program, numbers) for line in program.inputs(test)] if compared else [None]
        if None in both:
            return None
        left.append((both[1] - both[0]) * (1 if compared[1] == "L" else -1) + (compared[2] == "E"))
    step = left[0] - left[1]
    if left[1] - left[2] != step:
        return None
    return 0 if left[0] <= 0 else -(-left[0] // step) if step > 0 else None


def _at(source: _Line, program: _Program, numbers: _Numbers | None, i: int) -> int | None:
    """The whole number at a place of this tuple, where it follows from constants and what a computation is given."""
    if source.opcode == "tuple":
        return _number(program.inputs(source)[i], program, numbers)
    return numbers(i) if numbers and source.opcode == "parameter" else None


def _number(line: _Line, program: _Program, numbers: _Numbers | None) -> int | None:
    """The whole number that an instruction gives, as `_at`."""
    if not _WHOLE.fullmatch(line.shape):
        return None
    if line.opcode == "constant":
        return int(line.rest.partition(")")[0])
    if line.opcode == "get-tuple-element":
        return _at(program.inputs(line)[0], program, numbers, int(_INDEX.search(line.rest)[1]))
    parts = [_number(one, program, numbers) for one in program.inputs(line)] if line.opcode in ("add", "copy") else []
    return None if None in parts or not parts else sum(parts)
