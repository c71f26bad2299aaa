"""Compile the programs of a run without running them, and report their bytes on each device and collectives."""

import math
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.config import disk, errors, settings as configs
from experiments.devices import compilation, mesh as meshes
from experiments.dry_run import topology as topologies
from experiments.engine import run as runs, run_plan, summary as summaries, train_step

MEMORY = ("argument", "output", "alias", "temp", "generated_code")  # kinds of memory in XLA's analysis
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ((?:{'|'.join(KINDS)})(?:-start)?)\((?:.*(chain_id=\S+?)[,}}])?")
Target = topologies.Topology | None
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def dry_run(
    settings: configs.Settings, work: runs.Work, mesh: Mesh, target: Target = None, file: str | None = None
) -> None:
    """Print a run's parameter table, compile its step and evaluation, and print their memory and collectives.

    target: the machine to compile for; None: this one. file: the JSON report to write if there is a target. Raises
    RunError if the compiler refuses a program.
    """
    plan, state = run_plan.prepare(settings, work.task, mesh, dry_run=True)
    with train_step.device_errors():
        summaries.print_model(plan, state)
        compile_and_report(programs(plan, state), target, file, parameters=state.params, optimiser=state.opt_state)


def programs(plan: run_plan.Plan, state: train_step.State) -> Iterator[topologies.Request]:
    """Yield requests to compile the training step at each batch size, and the evaluation."""
    for first, size in zip(plan.growth.firsts, plan.growth.sizes, strict=True):
        batch = meshes.abstract_batch(plan.mesh, plan.task.train[first])
        arguments = state, batch, train_step.abstract_alive(plan.mesh)
        yield topologies.Request(f"step of {size:,} examples", plan.step, arguments)
    batch = plan.task.evaluation[0]
    arguments, size = (state.params, meshes.abstract_batch(plan.mesh, batch)), len(jax.tree.leaves(batch)[0])
    evaluate = jax.jit(train_step.make_held_out(plan.task, plan.mesh))
    yield topologies.Request(f"evaluation of {size:,} examples", evaluate, arguments)


def compile_and_report(
    requests: Iterable[topologies.Request], target: Target, file: str | None = None, **parts: Any
) -> None:
    """Compile programs for the target (None: this machine), and print memory and collectives.

    file: the JSON file to write if there is a target. parts: abstract pytrees by name, to report their bytes on each
    device. Raises RunError if the compiler refuses a program.
    """
    records = [describe_program(program) for program in topologies.compile_programs(requests)]
    print("\n".join(report_lines(records, parts, target)), flush=True)
    failures = "; ".join(f"{record['name']} {record['reason']}" for record in records if not record["compiled"])
    if target and file:
        write_report(file, records, failures, target, parts)
    if failures:
        raise errors.RunError(f"not compiled for {target.name if target else 'these devices'}: {failures}")


def describe_program(program: topologies.Program) -> dict[str, Any]:
    """Return a record for the report: name, whether it was compiled, and the reason why not.

    If it was compiled, also its bytes on each device and its collectives.
    """
    record = {"name": program.request.name, "compiled": program.compiled is not None, "reason": program.reason}
    if program.compiled is None:
        return record
    memory = program.compiled.memory_analysis()
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY}
    # A result that reuses an argument's memory counts once.
    record["needed_bytes"] = sum(sizes.values()) - 2 * sizes["alias"]
    record |= {f"{name}_bytes": size for name, size in sizes.items()}
    return record | {"collectives": count_collectives(program.compiled.as_text())}


def count_collectives(text: str) -> dict[str, dict[str, int]]:
    """Return {kind: {"times", "bytes"}} of the collectives in a compiled program; bytes of results on each device.

    The body of a loop counts once. Fusions with the same chain_id are parts of one collective and count once.
    """
    counts: dict[str, dict[str, int]] = {}
    for match in {match[3] or match.start(): match for match in COLLECTIVE.finditer(text)}.values():
        count = counts.setdefault(match[2].removesuffix("-start"), {"times": 0, "bytes": 0})
        count["times"] += 1
        count["bytes"] += result_bytes(match[1], match[2])
    return counts


def result_bytes(shape: str, opcode: str) -> int:
    """Return the bytes of a collective's outputs. shape: in XLA's notation, such as "(f32[2,3], bf16[4])".

    opcode: its name in XLA. For all-gather-start and collective-permute-start, `shape` also has the inputs.
    """
    sizes = []
    for dtype, dimensions in ARRAY.findall(shape):
        bits = int((re.findall(r"\d+", dtype) or [8])[0])  # "pred" has no number and takes a byte
        sizes.append(max(1, bits // 8) * math.prod(int(n) for n in dimensions.split(",") if n))
    if opcode == "collective-permute-start":  # (input, output, contexts)
        return sizes[1]
    return sum(sizes[len(sizes) // 2 :] if opcode == "all-gather-start" else sizes)  # (inputs, outputs)


def write_report(file: str, records: list[dict], failures: str, target: topologies.Topology, parts: dict) -> None:
    """Write a report of the compilation for `target` as JSON. Raises RunError if the file cannot be written.

    records: of the programs. failures: why programs did not compile, or ''. parts: {name: arrays}; the report has the
    bytes of each on a device.
    """
    report = {"topology": target.name, "chips": len(target.devices), "hbm_bytes": int(target.memory)}
    report |= {f"{name}_bytes": compilation.device_bytes(tree) for name, tree in parts.items()}
    report |= {"compiled": not failures, "reason": failures, "programs": records}
    report["versions"] = meshes.versions() | {"libtpu": compilation.libtpu()}
    try:
        disk.write_json(pathlib.Path(file), report)
    except OSError as error:
        raise errors.RunError(f"--json={file} cannot be written ({error.strerror}). Choose another file.") from error


def report_lines(records: list[dict], parts: dict[str, Any], target: Target) -> Iterator[str]:
    """Yield the lines of the report: the bytes of each part, and the memory and collectives of each program.

    All sizes are of one device. records: of `describe_program`. parts, target: as in `compile_and_report`.
    """
    if target:
        chips = f"{len(target.devices)} x {target.devices[0].device_kind}"
        yield f"  compiled for {target.name}, {chips}, by libtpu {compilation.libtpu()}; not run"
    yield from ["  bytes on each device"] * bool(parts)
    for name, tree in parts.items():
        size = compilation.device_bytes(tree)
        share = compilation.tree_bytes(tree) / size if size else 1
        yield f"    {name:<11} {disk.size(size):>10}" + (f"  (1/{share:.2f} of the whole)" if share > 1 else "")
    limit = f" of {disk.size(target.memory)}" if target else ""
    for record in records:
        if not record["compiled"]:
            yield f"  {record['name']}: not compiled. It {record['reason']}"
            continue
        sizes = ", ".join(f"{part.replace('_', ' ')} {disk.size(record[f'{part}_bytes'])}" for part in MEMORY)
        yield f"  {record['name']}: {disk.size(record['needed_bytes'])}{limit} on each device ({sizes})"
        counts = (f"{kind} {n['times']} x, {disk.size(n['bytes'])}" for kind, n in record["collectives"].items())
        if text := ", ".join(counts):
            yield f"    collectives (the body of a loop counts once): {text}"
