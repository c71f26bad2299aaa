"""Measure how compilation, memory and time of a training step grow with layers and tokens."""

import contextlib
import statistics
from typing import Any

from benchmarks import participant, sizes

DEPTHS, LENGTHS = (1, 2, 4, 8, 16, 48), (256, 512, 1024, 2048, 4096, 8192, 16384)
MAX_BYTES = 8 * 2**30  # of temporary arrays; a step that needs more is compiled but not run
COLUMNS = ("M", "N", "attention", "trace_seconds", "compile_seconds", "temporary_bytes", "seconds", "peak_bytes")


def workloads(toy: bool) -> list[sizes.Workload]:
    """Return step_a with each of DEPTHS, and step_d with each of LENGTHS in flash and in explicit attention."""
    a, d = sizes.WORKLOADS["step_a"], sizes.WORKLOADS["step_d"]
    if toy:
        return [a.toy(), d.toy(), d.toy().changed(attention="explicit")]
    long = [d.changed(N=N, attention=attention) for N in LENGTHS for attention in ("flash", "explicit")]
    return [a.changed(M=M) for M in DEPTHS] + long


def measure(*, toy: bool = False) -> list[dict[str, Any]]:
    """Return a row of COLUMNS for each workload. Seconds of a step are the median of five; None: not run."""
    rows = []
    for size in workloads(toy):
        size = size.changed(warm_up=0)
        with contextlib.closing(participant.Participant("ours", ("benchmarks.ours",), size)) as ours:
            row = dict.fromkeys(COLUMNS) | {"M": size.M, "N": size.N, "attention": size.attention}
            row |= {name: ours.facts[name] for name in COLUMNS if name in ours.facts}
            if row["temporary_bytes"] <= MAX_BYTES:
                turns = [ours.take(1, lead=lead) for lead in (2, 0, 0, 0, 0)]
                row["seconds"] = statistics.median(turn["seconds"] for turn in turns)
                row["peak_bytes"] = turns[-1]["peak_bytes"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, one line each."""
    cells = [[f"{x:,.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    return "\n".join("".join(f"{cell:>17}" for cell in row) for row in (COLUMNS, *cells))
