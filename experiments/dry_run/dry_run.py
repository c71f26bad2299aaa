"""Compile a run without starting it, and report what its programs need: bytes on each device, and collectives."""

import functools
import math
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.dry_run import topology
from experiments.engine import compilation, config, disk, errors, mesh as meshes, run as runs, train_step as steps

BYTES = ("argument", "output", "alias", "temp", "generated_code")  # of XLA's memory analysis
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ((?:{'|'.join(KINDS)})(?:-start)?)\((?:.*(chain_id=\S+?)[,}}])?")
Target = topology.Topology | None
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def dry_run(
    settings: config.Settings, work: runs.Work, mesh: Mesh, target: Target = None, file: str | None = None
) -> None:
    """Print the parameter table, compile step and evaluation of a run for its mesh, and report what they need.

    target, file: as of `compile_and_report`. Raises RunError if the compiler refuses a program.
    """
    plan, state = runs.prepare(settings, work, mesh, described=True)
    with steps.device_errors():
        runs.print_model(plan, state)
        compile_and_report(programs(plan, state), target, file, parameters=state.params, optimiser=state.opt_state)


def programs(plan: steps.Plan, state: steps.State) -> Iterator[topology.Request]:
    """Yield the training step for each size of a batch, and the evaluation."""
    for first, size in zip(plan.growth.firsts, plan.growth.sizes, strict=True):
        batch = meshes.abstract_batch(plan.mesh, plan.task.train[first])
        arguments = state, batch, steps.abstract_alive(plan.mesh)
        yield topology.Request(f"step of {size:,} examples", plan.step, arguments)
    batch = plan.task.evaluation[0]
    arguments, size = (state.params, meshes.abstract_batch(plan.mesh, batch)), len(jax.tree.leaves(batch)[0])
    evaluate = jax.jit(functools.partial(steps.held_out, task=plan.task, mesh=plan.mesh))
    yield topology.Request(f"evaluation of {size:,} examples", evaluate, arguments)


def compile_and_report(
    requests: Iterable[topology.Request], target: Target, file: str | None = None, **parts: Any
) -> None:
    """Compile programs, print what they need, and write it to `file` as JSON. Raises RunError for a refused program.

    target: the chips that the arguments lie on; None: this machine's devices. parts: abstract trees among the
    arguments, whose bytes on each device are printed.
    """
    records = [record(program) for program in topology.compile_programs(requests)]
    print("\n".join(_lines(records, parts, target)), flush=True)
    refused = "; ".join(f"{one['name']} {one['reason']}" for one in records if not one["compiled"])
    if target and file:
        _write(file, records, refused, target, parts)
    if refused:
        raise errors.RunError(f"not compiled for {target.name if target else 'these devices'}: {refused}")


def record(program: topology.Program) -> dict[str, Any]:
    """Return the facts about a program: bytes on each device, and its collectives."""
    facts = {"name": program.request.name, "compiled": program.compiled is not None, "reason": program.reason}
    if program.compiled is None:
        return facts
    analysis = program.compiled.memory_analysis()
    sizes = {name: getattr(analysis, f"{name}_size_in_bytes") for name in BYTES}
    facts["needed_bytes"] = sum(sizes.values()) - 2 * sizes["alias"]  # results in place of arguments count once
    facts |= {f"{name}_bytes": size for name, size in sizes.items()}
    return facts | {"collectives": collectives(program.compiled.as_text())}


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Return {kind: {"times", "bytes"}} of the collectives in a compiled program: bytes of the results on one device.

    The body of a loop counts once. Fusions that do parts of one collective have the same chain_id, and count once.
    """
    found: dict[str, dict[str, int]] = {}
    unique = {match[3] or match.start(): match for match in COLLECTIVE.finditer(text)}
    for match in unique.values():
        one = found.setdefault(match[2].removesuffix("-start"), {"times": 0, "bytes": 0})
        one["times"] += 1
        one["bytes"] += result_bytes(match[1], match[2])
    return found


def result_bytes(shape: str, opcode: str) -> int:
    """Return the bytes of a shape in XLA's notation, such as "(f32[2,3], bf16[4])", without the inputs in it."""
    sizes = []
    for dtype, dimensions in ARRAY.findall(shape):
        bits = int((re.findall(r"\d+", dtype) or [8])[0])  # "pred" has no number: a byte
        sizes.append(max(1, bits // 8) * math.prod(int(n) for n in dimensions.split(",") if n))
    if opcode == "collective-permute-start":  # (input, output, contexts)
        return sizes[1]
    return sum(sizes[len(sizes) // 2 :] if opcode == "all-gather-start" else sizes)  # (inputs, outputs)


def _write(file: str, records: list[dict], refused: str, target: topology.Topology, parts: dict) -> None:
    """Write all facts as JSON."""
    facts = {"topology": target.name, "chips": len(target.devices), "hbm_bytes": int(target.memory)}
    facts |= {f"{name}_bytes": compilation.device_bytes(tree) for name, tree in parts.items()}
    facts |= {"compiled": not refused, "reason": refused, "programs": records}
    facts |= {"versions": meshes.versions() | {"libtpu": compilation.libtpu()}}
    try:
        disk.write_json(pathlib.Path(file), facts)
    except OSError as error:
        raise errors.RunError(f"--json={file} cannot be written: {error.strerror}") from error


def _lines(records: list[dict], parts: dict[str, Any], target: Target) -> Iterator[str]:
    """Yield the lines of the report."""
    if target:
        chips = f"{len(target.devices)} x {target.devices[0].device_kind}"
        yield f"  compiled for {target.name}, {chips}, by libtpu {compilation.libtpu()}; nothing runs"
    if parts:
        yield "  bytes on each device"
    for name, tree in parts.items():
        size = compilation.device_bytes(tree)
        share = compilation.tree_bytes(tree) / size if size else 1
        yield f"    {name:<11} {disk.size(size):>10}" + (f"  (1/{share:.2f} of the whole)" if share > 1 else "")
    for one in records:
        if not one["compiled"]:
            yield f"  {one['name']}: not compiled, it {one['reason']}"
            continue
        limit = f" of {disk.size(target.memory)}" if target else ""
        sizes = ", ".join(f"{kind.replace('_', ' ')} {disk.size(one[f'{kind}_bytes'])}" for kind in BYTES)
        yield f"  {one['name']}: {disk.size(one['needed_bytes'])}{limit} on each device ({sizes})"
        if one["collectives"]:
            each = (f"{kind} {n['times']} x, {disk.size(n['bytes'])}" for kind, n in one["collectives"].items())
            yield f"    collectives (the body of a loop counts once): {', '.join(each)}"
