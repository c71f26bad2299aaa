"""What a person reads before and after training: the parameter table, the costs, the result."""

from typing import Any

import jax
from jax.sharding import Mesh

from experiments.compiler import hlo
from experiments.engine import compilation
from experiments.engine import mesh as meshes
from tfm import shapes


def table(params: Any) -> str:
    """One line per parameter: name, letters with their sizes, count; and the total."""
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sizes = " ".join(f"{letter}={n}" for letter, n in zip(shapes.letters(path), leaf.shape, strict=True))
        rows.append(("/".join(shapes.names(path)), sizes, f"{leaf.size:,}"))
    rows.append(("total", "", f"{shapes.total(params):,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"  {name:<{widths[0]}}  {sizes:<{widths[1]}}  {count:>{widths[2]}}" for name, sizes, count in rows]
    rule = "  " + "-" * (sum(widths) + 4)
    return "\n".join([*lines[:-1], rule, lines[-1]])


def si(value: float, unit: str) -> str:
    """1.23e9, 'FLOP' -> '1.23 GFLOP'."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def memory(state: Any, compiled: Any, mesh: Mesh) -> str:
    """Bytes per device: of the state's parts, and as XLA's own analysis of the compiled step has them; and what passes
    between devices, read off the compiled step."""
    parameters, moments = compilation.device_bytes(state.params), compilation.device_bytes(state.opt_state)
    lines = [
        "  bytes per device" + (f", mesh {meshes.shape(mesh)}" if mesh.size > 1 else ""),
        f"    parameters  {si(parameters, 'B'):>10}" + _share(parameters, state.params, mesh),
        f"    gradients   {si(parameters, 'B'):>10}",
        f"    optimiser   {si(moments, 'B'):>10}" + _share(moments, state.opt_state, mesh),
    ]
    analysis = compiled.memory_analysis()
    if analysis is not None:
        lines += [
            "  XLA's memory analysis of the compiled step, per device",
            f"    arguments   {si(analysis.argument_size_in_bytes, 'B'):>10}",
            f"    results     {si(analysis.output_size_in_bytes, 'B'):>10}  "
            f"({si(analysis.alias_size_in_bytes, 'B')} of them in place of arguments)",
            f"    temporary   {si(analysis.temp_size_in_bytes, 'B'):>10}",
        ]
    found = hlo.traffic(compiled.as_text())
    if found:
        lines += ["  between devices in a step: how often, and the bytes that arrive at each device"]
        lines += [f"    {kind:<18} {one.times:>5} x  {si(one.size, 'B'):>10}" for kind, one in found.items()]
    return "\n".join(lines)


def _share(size: int, tree: Any, mesh: Mesh) -> str:
    """What part of the whole that is, where devices share it."""
    return f"  (1/{compilation.tree_bytes(tree) / size:.2f} of the whole)" if mesh.size > 1 and size else ""


def result(summary: dict[str, Any], files: list[str]) -> str:
    """The block at the end of a run."""
    lines, guess = [""], summary.get("guess", {})
    for name, value in summary.items():
        if name.startswith(("eval/", "baseline/")):
            told = f"  {guess.get(name.removeprefix('baseline/'), '')}"
            lines.append(f"  {name:<22} {value:.4f}{told}".rstrip())
    lines.append(f"  {'time':<22} {summary['wall_seconds']:.1f} s, {summary['compile_seconds']:.1f} s of it compiling")
    if summary["tokens_per_second"]:  # 0 where a run was resumed behind its last step
        lines.append(f"  {'throughput':<22} {summary['tokens_per_second']:,.0f} tokens/s")
    return "\n".join([*lines, *(f"  {file}" for file in files)])
