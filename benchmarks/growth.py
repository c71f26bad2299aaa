"""How our training step grows with its layers and tokens: compilation, memory, time."""

import contextlib
from typing import Any

from benchmarks import participant, sizes

DEPTHS, LENGTHS = (1, 2, 4, 8, 16, 48), (256, 512, 1024, 2048, 4096, 8192, 16384)
MOST = 8 * 2**30  # bytes of temporary arrays with which a step is still taken
COLUMNS = {  # name in a row -> factor and format in the table
    "trace_seconds": (1, "{:,.4g}"),
    "compile_seconds": (1, "{:,.4g}"),
    "temporary_bytes": (2**-20, "{:,.0f} MiB"),
    "seconds": (1e3, "{:,.4g} ms"),
    "peak_bytes": (2**-20, "{:,.0f} MiB"),
}


def grown(toy: bool) -> list[sizes.Workload]:
    """Return step_a with M layers, and step_d with N tokens, by flash attention and with all weights."""
    a, d = (sizes.WORKLOADS[name] for name in ("step_a", "step_d"))
    if toy:
        return [a.toy(), d.toy(), d.toy().changed(attention="explicit")]
    deep = [a.changed(M=M) for M in DEPTHS]
    return deep + [d.changed(N=N, attention=way) for N in LENGTHS for way in ("flash", "explicit")]


def measure(*, toy: bool = False) -> list[dict[str, Any]]:
    """Return a row for each size: M, N, attention and the COLUMNS. The seconds of a step are the median of five."""
    rows = []
    for size in grown(toy):
        with contextlib.closing(participant.Participant("ours", ("benchmarks.ours",), size.changed(warm_up=0))) as one:
            row = {name: getattr(size, name) for name in ("M", "N", "attention")}
            row |= {name: one.facts.get(name) for name in COLUMNS}
            if row["temporary_bytes"] <= MOST:
                answers = [one.take(1, lead=2 * (i == 0)) for i in range(5)]
                row["seconds"] = sorted(answer["seconds"] for answer in answers)[2]
                row["peak_bytes"] = answers[-1]["peak_bytes"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'M':>4}{'N':>8}  {'attention':10}" + "".join(f"{name:>18}" for name in COLUMNS)]
    for row in rows:
        cells = ["-" if row[name] is None else form.format(x * row[name]) for name, (x, form) in COLUMNS.items()]
        head = f"{row['M']:4}{row['N']:8,}  {row['attention']:10}"
        lines.append(head + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
