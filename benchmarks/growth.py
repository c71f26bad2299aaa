"""How our training step grows with its layers and tokens: compilation, memory, time."""

import contextlib
from typing import Any

from benchmarks import participant, sizes

DEPTHS, LENGTHS = (1, 2, 4, 8, 16, 48), (256, 512, 1024, 2048, 4096, 8192, 16384)
MOST = 8 * 2**30  # bytes of temporary arrays with which a step is still taken
COLUMNS = ("M", "N", "attention", "trace_seconds", "compile_seconds", "temporary_bytes", "seconds", "peak_bytes")


def grown(toy: bool) -> list[sizes.Workload]:
    """Return step_a with M layers, and step_d with N tokens, by flash attention and with all weights."""
    a, d = (sizes.WORKLOADS[name] for name in ("step_a", "step_d"))
    if toy:
        return [a.toy(), d.toy(), d.toy().changed(attention="explicit")]
    deep = [a.changed(M=M) for M in DEPTHS]
    return deep + [d.changed(N=N, attention=way) for N in LENGTHS for way in ("flash", "explicit")]


def measure(*, toy: bool = False) -> list[dict[str, Any]]:
    """Return a row of COLUMNS for each size. The seconds of a step are the median of five."""
    rows = []
    for size in grown(toy):
        with contextlib.closing(participant.Participant("ours", ("benchmarks.ours",), size.changed(warm_up=0))) as one:
            row = {name: one.facts.get(name, getattr(size, name, None)) for name in COLUMNS}
            if row["temporary_bytes"] <= MOST:
                answers = [one.take(1, lead=2 * (i == 0)) for i in range(5)]
                row["seconds"] = sorted(answer["seconds"] for answer in answers)[2]
                row["peak_bytes"] = answers[-1]["peak_bytes"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    cells = [[f"{x:,.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    return "\n".join("".join(f"{cell:>17}" for cell in row) for row in (COLUMNS, *cells))
