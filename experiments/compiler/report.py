"""What the compiler says of programs, for these devices or for chips that need not be there: as text, and as JSON."""

import pathlib
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.compiler import hlo, topology
from experiments.engine import compilation, config, disk, errors, hardware, mesh
from experiments.engine import log as numbers
from experiments.engine import run as runs
from experiments.engine import step as steps

KERNELS = 0.4  # share of the peak at which kernels are taken to compute, of which the compiler says no time
LISTED = 8  # scopes shown; the file has all


def dry_run(settings: config.Settings, work: runs.Work, devices: Mesh) -> None:
    """Show what a run would be, and what the compiler says of its step: for the machine's own devices, or for those of
    a topology. Nothing is run: shapes are enough."""
    plan, state = runs.prepared(settings, work, devices, described=True)
    with steps.device_errors():
        flops = runs.describe(plan, state)
        if topology.current():
            return training(plan, state, flops)
        compiled, _ = runs.compile_step(plan, state)
    print(memory(state, compiled.largest(), devices))


def training(plan: steps.Plan, state: steps.State, flops: int) -> None:
    """Compile and show the step of a run for each size of its batches, and its evaluation.

    state: abstract. flops: of a step with the first batch.
    """
    held_out, forward = jax.jit(steps.held_out(plan.task, plan.mesh)), flops / 3 / plan.growth.sizes[0]

    def requests() -> Iterable[topology.Request]:
        for first, size in zip(plan.growth.firsts, plan.growth.sizes, strict=True):
            batch = mesh.abstract_batch(plan.mesh, plan.task.train[first])
            arguments = state, batch, steps.abstract_alive(plan.mesh)
            yield topology.Request(f"step of {size:,} examples", plan.step, arguments, 3 * forward * size)
        batch = plan.task.evaluation[0]
        arguments = state.params, mesh.abstract_batch(plan.mesh, batch)
        size = len(jax.tree.leaves(batch)[0])
        yield topology.Request(f"evaluation of {size:,} examples", held_out, arguments, forward * size, beside=True)

    show(requests(), parameters=state.params, optimiser=state.opt_state)


def show(requests: Iterable[topology.Request], **parts: Any) -> None:
    """Compile, print what the compiler says, and write it to the file of --json. RunError where it refuses one.

    parts: of the arguments, abstract trees whose bytes on a chip are told.
    """
    chips = topology.current()
    programs = topology.compiled(requests)
    records = [record(program, chips) for program in programs]
    parts_bytes = {f"{name}_bytes": compilation.device_bytes(tree) for name, tree in parts.items()}
    refused = [f"{one['name']} {one['reason']}" for one in records if not one["compiled"]]
    print(text(records, parts_bytes, chips), flush=True)
    if chips.file:
        largest = max((one for one in records if not one["beside"]), key=lambda one: one.get("needed_bytes", 0))
        facts = {"topology": chips.name, "chips": len(chips.devices), "hbm_bytes": int(chips.chip.hbm), **parts_bytes}
        facts |= largest | {"compiled": not refused, "reason": "; ".join(refused), "programs": records}
        facts |= {"versions": mesh.versions() | {"libtpu": hardware.libtpu()}}
        try:
            disk.write(pathlib.Path(chips.file), disk.as_json(facts))
        except OSError as error:
            raise errors.RunError(f"--json={chips.file} cannot be written: {error.strerror}") from error
    if refused:
        raise errors.RunError(f"not compiled for {chips.name}: {'; '.join(refused)}")


def record(program: topology.Program, chips: topology.Topology) -> dict[str, Any]:
    """All that is known of a program. Its seconds are the compiler's estimate; ideal: those of chips at their peak."""
    request, chip = program.request, chips.chip
    used = len(jax.tree.leaves(request.arguments)[0].sharding.device_set)  # a mesh may leave chips out
    facts = {
        "name": request.name,
        "beside": request.beside,
        "compiled": program.compiled is not None,
        "reason": program.reason,
        "compile_seconds": program.seconds,
        "ideal_seconds": request.flops / (chip.peak * used),
    }
    if program.compiled is None:
        return facts
    memory, of = program.compiled.memory_analysis(), hlo.estimate(program.compiled.as_text(), clock=chip.clock)
    bytes_of = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    bytes_of["code"] = memory.generated_code_size_in_bytes
    needed = sum(bytes_of.values()) - 2 * bytes_of["alias"]  # results in place of arguments are counted once
    kernels = sum(one.times * (one.flops or 0) for one in of.kernels) / (KERNELS * chip.peak)
    return facts | {
        **{f"{name}_bytes": n for name, n in bytes_of.items()},
        "needed_bytes": needed,
        "estimated_seconds": of.seconds + kernels,
        "kernel_seconds": kernels,
        "kernels_without_flops": sum(one.flops is None for one in of.kernels),
        "loops_counted_once": of.unknown_loops,
        "not_estimated": of.unestimated,
        "collectives": {
            kind: {"times": one.times, "bytes": one.size, "beside": one.beside, "waited": one.times - one.beside}
            for kind, one in of.collectives.items()
        },
        "by_scope": of.by_scope,
    }


def text(records: list[dict[str, Any]], parts_bytes: dict[str, int], of: topology.Topology) -> str:
    """What a person reads."""
    chips, kind = len(of.devices), of.devices[0].device_kind
    each = ", ".join(f"{name.removesuffix('_bytes')} {disk.size(n)}" for name, n in parts_bytes.items())
    lines = [f"  compiled for {of.name}, {chips} x {kind}, by libtpu {hardware.libtpu()}; nothing is run"]
    lines += [f"  on each chip: {each}"] if each else []
    for one in records:
        if not one["compiled"]:
            lines.append(f"  {one['name']}: not compiled, it {one['reason']}")
            continue
        lines += [f"  {one['name']}: compiled in {one['compile_seconds']:.1f} s", f"    {_memory(one, of.chip)}"]
        lines += [f"    {line}" for line in [*_collectives(one, chips), *(() if one["beside"] else _time(one, of))]]
    return "\n".join(lines)


def _memory(one: dict[str, Any], chip: topology.Chip) -> str:
    of = ", ".join(f"{label} {disk.size(one[f'{name}_bytes'])}" for name, label in PARTS.items())
    return f"memory of a chip: {disk.size(one['needed_bytes'])} of {chip.hbm / 2**30:.2f} GiB ({of})"


PARTS = {"argument": "arguments", "temp": "temporaries", "code": "program"}


def _collectives(one: dict[str, Any], chips: int) -> list[str]:
    of = [
        f"{kind} {n['times']} x, {disk.size(n['bytes'])} ({n['beside']} beside computation, {n['waited']} waited for)"
        for kind, n in one["collectives"].items()
    ]
    return [f"between chips: {', '.join(of) or 'nothing'}"] if chips > 1 else []


def _time(one: dict[str, Any], of: topology.Topology) -> list[str]:
    """The estimate, its share of the peak, and where it would go."""
    seconds, peak = one["estimated_seconds"], numbers.si(of.chip.peak, "FLOP/s")
    if not seconds:
        return ["compiler's estimate: none"]
    lines = [
        f"compiler's estimate: {1e3 * seconds:.3g} ms; {1e3 * one['ideal_seconds']:.3g} ms would be its products at the"
        f" peak of {peak} (of bfloat16, as float32 ones are computed too): {one['ideal_seconds'] / seconds:.1%} of it"
    ]
    if one["kernel_seconds"] or one["kernels_without_flops"]:
        lines.append(
            f"{1e3 * one['kernel_seconds']:.3g} ms of it are kernels without an estimate, at {KERNELS:.0%} of the peak"
            + f"; {one['kernels_without_flops']} more do not say their FLOPs" * bool(one["kernels_without_flops"])
        )
    if one["loops_counted_once"]:
        lines.append(f"of {one['loops_counted_once']} loops the number of turns is not known: they count once")
    parts = list(one["by_scope"].items())[:LISTED]
    lines.append("where it would go: " + ", ".join(f"{name} {part / seconds:.0%}" for name, part in parts))
    return lines


def memory(state: Any, compiled: Any, devices: Mesh) -> str:
    """Bytes per device: of the state's parts, and as XLA's own analysis of the compiled step has them; and what passes
    between devices, read off the compiled step."""
    parameters, moments = compilation.device_bytes(state.params), compilation.device_bytes(state.opt_state)
    lines = [
        "  bytes per device" + (f", mesh {mesh.shape(devices)}" if devices.size > 1 else ""),
        f"    parameters  {numbers.si(parameters, 'B'):>10}" + _share(parameters, state.params, devices),
        f"    gradients   {numbers.si(parameters, 'B'):>10}",
        f"    optimiser   {numbers.si(moments, 'B'):>10}" + _share(moments, state.opt_state, devices),
    ]
    analysis = compiled.memory_analysis()
    if analysis is not None:
        lines += [
            "  XLA's memory analysis of the compiled step, per device",
            f"    arguments   {numbers.si(analysis.argument_size_in_bytes, 'B'):>10}",
            f"    results     {numbers.si(analysis.output_size_in_bytes, 'B'):>10}  "
            f"({numbers.si(analysis.alias_size_in_bytes, 'B')} of them in place of arguments)",
            f"    temporary   {numbers.si(analysis.temp_size_in_bytes, 'B'):>10}",
        ]
    traffic = hlo.traffic(compiled.as_text())
    if traffic:
        lines += ["  between devices in a step: how often, and the bytes that arrive at each device"]
        lines += [f"    {kind:<18} {one.times:>5} x  {numbers.si(one.size, 'B'):>10}" for kind, one in traffic.items()]
    return "\n".join(lines)


def _share(size: int, tree: Any, devices: Mesh) -> str:
    """What part of the whole that is, where devices share it."""
    return f"  (1/{compilation.tree_bytes(tree) / size:.2f} of the whole)" if devices.size > 1 and size else ""
