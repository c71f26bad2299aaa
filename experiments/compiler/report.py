"""What the compiler says of programs, for these devices or for chips that need not be there: as text, and as JSON."""

import functools
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.compiler import hlo, topology
from experiments.engine import compilation, config, disk, errors, mesh, run as runs, train_step as steps

# Of kernels the compiler says no time, nor does the splash kernel say its FLOPs: the share of the peak at which they
# are taken to compute, the blocks that a causal mask leaves, and 7 products in training for 2 of the forward pass.
KERNELS, SHOWN, TRAINED = 0.5, 0.5, 3.5
LISTED = 8  # scopes shown; the file has all
BYTES = ("argument", "output", "alias", "temp")  # of XLA's memory analysis
PARTS = {"argument": "arguments", "temp": "temporaries", "code": "program"}


def dry_run(settings: config.Settings, work: runs.Work, devices: Mesh) -> None:
    """Show what a run would be, and what the compiler says of its step, for the machine's own devices or a topology's;
    for these also of its evaluation. Nothing is run: shapes are enough."""
    plan, state = runs.prepared(settings, work, devices, described=True)

    def requests() -> Iterable[topology.Request]:
        for first, size in zip(plan.growth.firsts, plan.growth.sizes, strict=True):
            batch = mesh.abstract_batch(devices, plan.task.train[first])
            arguments = state, batch, steps.abstract_alive(devices)
            name, flops = f"step of {size:,} examples", (3 * forward * size, False, TRAINED * inside * size)
            yield topology.Request(name, plan.step, arguments, *flops)
        batch = plan.task.evaluation[0]
        arguments, size = (state.params, mesh.abstract_batch(devices, batch)), len(jax.tree.leaves(batch)[0])
        held_out = jax.jit(functools.partial(steps.held_out, task=plan.task, mesh=devices))
        flops = forward * size, True, inside * size
        yield topology.Request(f"evaluation of {size:,} examples", held_out, arguments, *flops)

    with steps.device_errors():
        forward = runs.describe(plan, state) / 3 / plan.growth.sizes[0]  # FLOPs, of an example
        if compilation.described.get():
            inside = SHOWN * runs.forward_flops(plan, state, kernels=True) / plan.growth.sizes[0]
            return show(requests(), parameters=state.params, optimiser=state.opt_state)
        compiled, _ = runs.compile_step(plan, state)
    print(memory(state, compiled.largest(), devices))


def show(requests: Iterable[topology.Request], **parts: Any) -> None:
    """Compile, print what the compiler says, and write it to the file of --json. RunError where it refuses one.

    parts: of the arguments, abstract trees whose bytes on a chip are told.
    """
    chips = compilation.described.get()
    records = [record(program, chips) for program in topology.compiled(requests)]
    parts_bytes = {f"{name}_bytes": compilation.device_bytes(tree) for name, tree in parts.items()}
    refused = "; ".join(f"{one['name']} {one['reason']}" for one in records if not one["compiled"])
    print("\n".join(_lines(records, parts_bytes, chips)), flush=True)
    if chips.file:
        largest = max((one for one in records if not one["beside"]), key=lambda one: one.get("needed_bytes", 0))
        facts = {"topology": chips.name, "chips": len(chips.devices), "hbm_bytes": int(chips.chip.hbm), **parts_bytes}
        facts |= largest | {"compiled": not refused, "reason": refused, "programs": records}
        facts |= {"versions": mesh.versions() | {"libtpu": compilation.libtpu()}}
        try:
            disk.write_json(pathlib.Path(chips.file), facts)
        except OSError as error:
            raise errors.RunError(f"--json={chips.file} cannot be written: {error.strerror}") from error
    if refused:
        raise errors.RunError(f"not compiled for {chips.name}: {refused}")


def record(program: topology.Program, chips: topology.Topology) -> dict[str, Any]:
    """All that is known of a program. Its seconds are the compiler's estimate; ideal: those of chips at their peak."""
    request, chip = program.request, chips.chip
    used = len(jax.tree.leaves(request.arguments)[0].sharding.device_set)  # a mesh may leave chips out
    facts = {"name": request.name, "beside": request.beside, "compiled": program.compiled is not None}
    facts |= {"reason": program.reason, "compile_seconds": program.seconds}
    facts |= {"ideal_seconds": request.flops / (chip.peak * used)}
    if program.compiled is None:
        return facts
    memory = program.compiled.memory_analysis()
    of = hlo.estimate(program.compiled.as_text(), clock=chip.clock, ring=chip.ring)
    bytes_of = {name: getattr(memory, f"{name}_size_in_bytes") for name in BYTES}
    bytes_of["code"] = memory.generated_code_size_in_bytes
    flops = of.kernel_flops + (request.kernel_flops / used if of.silent_kernels else 0)
    kernels = flops / (KERNELS * chip.peak)
    return facts | {
        **{f"{name}_bytes": n for name, n in bytes_of.items()},
        "needed_bytes": sum(bytes_of.values()) - 2 * bytes_of["alias"],  # results in place of arguments count once
        "estimated_seconds": of.seconds + kernels,
        "kernel_seconds": kernels,
        "kernels_without_flops": 0 if request.kernel_flops else of.silent_kernels,
        "loops_counted_once": of.unknown_loops,
        "collectives": {
            kind: {"times": one.times, "bytes": one.size, "beside": one.beside, "waited": one.times - one.beside}
            for kind, one in of.collectives.items()
        },
        "collective_seconds": of.passing,
        "waiting_seconds": of.waited,  # of those, and not among the estimated ones
        "by_scope": of.by_scope,
    }


def _lines(records: list[dict[str, Any]], parts_bytes: dict[str, int], of: topology.Topology) -> Iterable[str]:
    chips, kind = len(of.devices), of.devices[0].device_kind
    yield f"  compiled for {of.name}, {chips} x {kind}, by libtpu {compilation.libtpu()}; nothing is run"
    if parts_bytes:
        each = (f"{name.removesuffix('_bytes')} {disk.size(n)}" for name, n in parts_bytes.items())
        yield f"  on each chip: {', '.join(each)}"
    for one in records:
        if not one["compiled"]:
            yield f"  {one['name']}: not compiled, it {one['reason']}"
            continue
        parts = ", ".join(f"{label} {disk.size(one[f'{name}_bytes'])}" for name, label in PARTS.items())
        yield f"  {one['name']}: compiled in {one['compile_seconds']:.1f} s"
        needed = disk.size(one["needed_bytes"])
        yield f"    memory of a chip: {needed} of {of.chip.hbm / 2**30:.2f} GiB ({parts})"
        if chips > 1:
            passed = (
                f"{kind} {n['times']} x, {disk.size(n['bytes'])}"
                f" ({n['beside']} beside computation, {n['waited']} waited for)"
                for kind, n in one["collectives"].items()
            )
            yield f"    between chips: {', '.join(passed) or 'nothing'}"
        if seconds := chips > 1 and one["collective_seconds"]:
            share, rate = one["waiting_seconds"] / seconds, runs.si(of.chip.ring, "B/s")
            yield f"    which takes {1e3 * seconds:.3g} ms at {rate}; {share:.1%} of it is not beside computation"
        if not one["beside"]:
            yield from _time(one, of.chip)


def _time(one: dict[str, Any], chip: topology.Chip) -> Iterable[str]:
    """The estimate, its share of the peak, and where it would go."""
    seconds, ideal = one["estimated_seconds"], one["ideal_seconds"]
    if not seconds:
        yield "    compiler's estimate: none"
        return
    peak = f"{runs.si(chip.peak, 'FLOP/s')} (of bfloat16, as float32 ones are computed too)"
    times = f"{1e3 * seconds:.3g} ms; {1e3 * ideal:.3g} ms would be its products"
    yield f"    compiler's estimate: {times} at the peak of {peak}: {ideal / seconds:.1%} of it"
    if one["kernel_seconds"] or one["kernels_without_flops"]:
        more = f"; {one['kernels_without_flops']} more do not say their FLOPs" * bool(one["kernels_without_flops"])
        kernels = f"{1e3 * one['kernel_seconds']:.3g} ms"
        yield f"    {kernels} of it are kernels without an estimate, at {KERNELS:.0%} of the peak{more}"
    if one["loops_counted_once"]:
        yield f"    of {one['loops_counted_once']} loops the number of turns is not known: they count once"
    parts = list(one["by_scope"].items())[:LISTED]
    yield "    where it would go: " + ", ".join(f"{name} {part / seconds:.0%}" for name, part in parts)


def memory(state: Any, compiled: Any, devices: Mesh) -> str:
    """Bytes per device: of the state's parts, and as XLA's own analysis of the compiled step has them; and what passes
    between devices, read off the compiled step."""
    lines = ["  bytes per device" + (f", mesh {mesh.shape(devices)}" if devices.size > 1 else "")]
    for name, tree in {"parameters": state.params, "gradients": state.params, "optimiser": state.opt_state}.items():
        size = compilation.device_bytes(tree)
        share = f"  (1/{compilation.tree_bytes(tree) / size:.2f} of the whole)" if devices.size > 1 and size else ""
        lines.append(f"    {name:<11} {runs.si(size, 'B'):>10}{share}")
    analysis = compiled.memory_analysis()
    if analysis is not None:
        sizes = {name: runs.si(getattr(analysis, f"{name}_size_in_bytes"), "B") for name in BYTES}
        lines += ["  XLA's memory analysis of the compiled step, per device"]
        lines += [f"    arguments   {sizes['argument']:>10}"]
        lines += [f"    results     {sizes['output']:>10}  ({sizes['alias']} of them in place of arguments)"]
        lines += [f"    temporary   {sizes['temp']:>10}"]
    if traffic := hlo.estimate(compiled.as_text()).collectives:
        lines += ["  between devices in a step: how often, and the bytes that arrive at each device"]
        lines += [f"    {kind:<18} {one.times:>5} x  {runs.si(one.size, 'B'):>10}" for kind, one in traffic.items()]
    return "\n".join(lines)
