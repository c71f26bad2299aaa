"""Measure our training steps and generation and those of peers on this machine, in turns.

python -m benchmarks [--only NAME ...] [--json FILE] [--rounds N] [--try]

Every participant (ours, transformers on PyTorch, Flax) is a process of its own. It builds the same model, warms up and
waits. Participants are timed in turns, A B C A B C ..., while the others sleep; the time of a peer is divided by ours
in the same turn.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import statistics
import sys
from typing import Any

from benchmarks import growth, participant, sizes

OURS, GROWTH = "ours", "growth"
PARTICIPANTS = {  # the module, and arguments of its `build`
    OURS: ("benchmarks.ours",),
    "transformers": ("benchmarks.torch_peer", "eager"),
    "transformers compiled": ("benchmarks.torch_peer", "compile"),
    "flax": ("benchmarks.flax_peer",),
}
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    names = [*sizes.WORKLOADS, GROWTH]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, default=[name for name in names[:-1] if name != "gpu"])
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, help="turns of each participant (default: by workload)")
    parser.add_argument("--try", action="store_true", dest="toy", help="use toy sizes")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measure, print each result as it comes, and write the file."""
    flags = arguments(argv)
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # of all participants: docs/performance.md
    results: dict[str, Any] = {"machine": machine()}
    print(results["machine"], flush=True)
    for name in dict.fromkeys(flags.only):
        if name == GROWTH:
            results[name] = growth.measure(toy=flags.toy)
            print(growth.table(results[name]), flush=True)
        else:
            size = sizes.WORKLOADS[name].toy() if flags.toy else sizes.WORKLOADS[name]
            results[name] = measure(name, size.changed(rounds=flags.rounds or size.rounds))
            print(table(name, size, results[name]), flush=True)
        if flags.json:
            flags.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    """Return processor, cores and versions in a line."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    model = re.findall(r"model(?: name)?\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    installed = {str(one.name).lower() for one in importlib.metadata.distributions()}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if name in installed]
    return ", ".join([*reversed(model[:2]), f"{len(os.sched_getaffinity(0))} cores", *versions])


def measure(name: str, size: sizes.Workload, start: Any = participant.Participant) -> dict[str, Any]:
    """Return {participant: {"seconds", "median_seconds", "ratio", "ratio_spread", ...} or {"missing"}} for a workload.

    A ratio is a peer's time divided by ours of the same turn: the median of all turns, and the smallest and largest.
    Raises RuntimeError if the models do not have the same number of parameters.
    """
    running, results = [], {who: {} for who in PARTICIPANTS}
    with contextlib.ExitStack() as stack:
        for who, command in PARTICIPANTS.items():
            print(f"{name}: build {who}", file=sys.stderr, flush=True)
            try:
                running.append(stack.enter_context(contextlib.closing(start(who, command, size))))
            except participant.Unavailable as reason:
                results[who] = {"missing": str(reason)}
        counts = {one.name: one.facts["parameters"] for one in running}
        if len(set(counts.values())) > 1:
            raise RuntimeError(f"the models have different numbers of parameters: {counts}")
        answers = {one.name: [] for one in running}
        for _ in range(size.rounds):
            for one in running:
                answers[one.name].append(one.take(size.steps, lead=size.lead))
    for one in running:
        turns = answers[one.name]
        seconds = [turn["seconds"] / size.steps for turn in turns]  # of a step; for generation, of all tokens
        results[one.name] = one.facts | {"seconds": seconds, "median_seconds": statistics.median(seconds)}
        results[one.name] |= {"loss": turns[-1]["loss"], "peak_bytes": turns[-1]["peak_bytes"]}
        ratios = [a / b for a, b in zip(seconds, results[OURS]["seconds"], strict=True)]
        results[one.name] |= {"ratio": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}
    return results


def table(name: str, size: sizes.Workload, results: dict[str, Any]) -> str:
    """Return the results of one workload as lines."""
    lines = [f"{name}: {size.title}; {size.dtype}", f"{'':24}{'ms':>12}{'per second':>14}{'x ours':>9}   spread"]
    for who, one in results.items():
        if "missing" in one:
            lines.append(f"  {who:22}missing: {one['missing']}")
            continue
        rate, (low, high) = size.counted / one["median_seconds"], one["ratio_spread"]
        times = f"{1e3 * one['median_seconds']:>12,.4g}{rate:>14,.0f}{one['ratio']:>9.2f}"
        lines.append(f"  {who:22}{times}   {low:.2f}-{high:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
