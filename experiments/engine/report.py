"""What a person reads before and after training: the parameter table, the costs, the result."""

from typing import Any

import jax

from experiments.engine import cost
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


def memory(state: Any, compiled: Any) -> str:
    """Bytes per device: of the state's parts, and as XLA's own analysis of the compiled step has them."""
    parameters, moments = cost.tree_bytes(state.params), cost.tree_bytes(state.opt_state)
    lines = [
        "  bytes per device",
        f"    parameters  {si(parameters, 'B'):>10}",
        f"    gradients   {si(parameters, 'B'):>10}",
        f"    optimiser   {si(moments, 'B'):>10}",
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
    return "\n".join(lines)


def result(summary: dict[str, Any], files: list[str]) -> str:
    """The block at the end of a run."""
    lines = [""]
    for name, value in summary.items():
        if name.startswith(("eval/", "baseline/")):
            lines.append(f"  {name:<22} {value:.4f}")
    lines.append(f"  {'time':<22} {summary['wall_seconds']:.1f} s, {summary['compile_seconds']:.1f} s of it compiling")
    lines.append(f"  {'throughput':<22} {summary['tokens_per_second']:,.0f} tokens/s")
    return "\n".join([*lines, *(f"  {file}" for file in files)])
