"""How our training step grows with its layers and tokens, and how long a process takes to its first step."""

import contextlib
import tempfile
import time
from typing import Any

from benchmarks import participant, session, sizes

DEPTHS, LENGTHS = (1, 2, 4, 8, 16, 48), (256, 512, 1024, 2048, 4096, 8192, 16384)
MOST = 8 * 2**30  # bytes of intermediate values with which a step is still taken
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
COLUMNS = {  # name in a row -> the factor and form in which it is shown
    "trace_seconds": (1, "{:,.4g}"),
    "compile_seconds": (1, "{:,.4g}"),
    "temporary_bytes": (2**-20, "{:,.0f} MiB"),
    "seconds": (1e3, "{:,.4g} ms"),
    "peak_bytes": (2**-20, "{:,.0f} MiB"),
}


def grown(toy: bool) -> list[sizes.Workload]:
    """step_a of M layers; step_d of N tokens, by flash attention and with all weights."""
    a, d = (sizes.WORKLOADS[name] for name in ("step_a", "step_d"))
    if toy:
        return [a.toy(), d.toy(), d.toy().changed(attention="explicit")]
    deep = [a.changed(M=M) for M in DEPTHS]
    return deep + [d.changed(N=N, attention=way) for N in LENGTHS for way in ("flash", "explicit")]


def measure(*, toy: bool = False) -> list[dict[str, Any]]:
    """A row for each size: M, N, attention and the COLUMNS; of steps the median of five, None where
    one would take too much memory. Each is a process of its own."""
    rows = []
    for size in grown(toy):
        ours = (session.OURS, ("benchmarks.ours",), size.changed(warm_up=0), session.LARGE_PAGES | UNCACHED)
        with contextlib.closing(participant.Participant(*ours)) as one:
            row = {name: getattr(size, name) for name in ("M", "N", "attention")}
            row |= {name: one.facts.get(name) for name in COLUMNS}
            if row["temporary_bytes"] <= MOST:
                answers = [one.take(1, lead=2 * (i == 0)) for i in range(5)]
                row["seconds"] = sorted(answer["seconds"] for answer in answers)[2]
                row["peak_bytes"] = answers[-1]["peak_bytes"]
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'M':>4}{'N':>8}  {'attention':10}" + "".join(f"{name:>18}" for name in COLUMNS)]
    for row in rows:
        shown = {name: "-" if row[name] is None else form.format(x * row[name]) for name, (x, form) in COLUMNS.items()}
        head = f"{row['M']:4}{row['N']:8,}  {row['attention']:10}"
        lines.append(head + "".join(f"{cell:>18}" for cell in shown.values()))
    return "\n".join(lines)


def start(*, toy: bool = False) -> dict[str, Any]:
    """Seconds from the shell to the end of the first step of step_a: {who: {"cold": .., "warm": ..}, "missing": {..}}.

    The first start finds empty caches of compiled programs, the second one those that the first has filled.
    """
    size = sizes.WORKLOADS["step_a"]
    size, result = (size.toy() if toy else size).changed(warm_up=1), {"missing": {}}
    for who, command in {session.OURS: ("benchmarks.ours",), **session.PEERS}.items():
        with tempfile.TemporaryDirectory() as folder:
            environment = dict(session.LARGE_PAGES if who == session.OURS else {})
            environment |= {"JAX_COMPILATION_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            try:
                seconds = {}
                for cache in ("cold", "warm"):
                    began = time.perf_counter()
                    with contextlib.closing(participant.Participant(who, command, size, environment)):
                        seconds[cache] = time.perf_counter() - began
                result[who] = seconds
            except participant.Unavailable as reason:
                result["missing"][who] = str(reason)
    return result


def show_start(result: dict[str, Any]) -> str:
    lines = [f"{'':24}{'cold':>10}{'warm':>10}"]
    lines += [f"{who:24}{r['cold']:>8.1f} s{r['warm']:>8.1f} s" for who, r in result.items() if who != "missing"]
    return "\n".join(lines + [f"{who:24}not measured: {why}" for who, why in result["missing"].items()])
