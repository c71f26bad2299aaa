"""What a person reads before and after training: the parameter table, the costs, the result."""

from typing import Any

import jax

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
