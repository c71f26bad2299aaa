"""Compare the speed of training steps and generation with other libraries on this machine.

python -m benchmarks [--only NAME ...] [--json FILE] [--rounds N] [--try]

Every participant (ours, transformers on PyTorch, Flax) is a separate process that builds the same model and warms up.
Participants are timed in turns, A B C A B C ...; while one computes, the others sleep. The ratio of a peer is its time
divided by ours in the same round.
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
PARTICIPANTS = {  # label -> the module, and arguments of its `build`
    OURS: ("benchmarks.ours",),
    "transformers": ("benchmarks.torch_peer", "eager"),
    "transformers compiled": ("benchmarks.torch_peer", "compile"),
    "flax": ("benchmarks.flax_peer",),
}
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    names = [*sizes.WORKLOADS, GROWTH]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, default=[name for name in names[:-1] if name != "gpu"])
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, help="turns of each participant (default: by workload)")
    parser.add_argument("--try", action="store_true", dest="toy", help="use toy sizes")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measure each workload, print its results, and write the JSON file."""
    flags = arguments(argv)
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # for all participants: docs/performance.md
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
    """Return processor, number of cores and library versions in one line."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    model = re.findall(r"model(?: name)?\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    installed = {str(package.name).lower() for package in importlib.metadata.distributions()}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if name in installed]
    return ", ".join([*reversed(model[:2]), f"{len(os.sched_getaffinity(0))} cores", *versions])


def measure(name: str, size: sizes.Workload, start: Any = participant.Participant) -> dict[str, Any]:
    """Return {participant: {"seconds", "median_seconds", "ratio", "ratio_spread", ...} or {"missing"}} for a workload.

    "ratio" is the median over rounds, "ratio_spread" the smallest and the largest. start: starts a participant. Raises
    RuntimeError if the models do not have the same number of parameters.
    """
    participants, turns, results = {}, {}, {label: {} for label in PARTICIPANTS}
    with contextlib.ExitStack() as stack:
        for label, command in PARTICIPANTS.items():
            print(f"{name}: build {label}", file=sys.stderr, flush=True)
            try:
                participants[label] = stack.enter_context(contextlib.closing(start(label, command, size)))
            except participant.Unavailable as reason:
                results[label] = {"missing": str(reason)}
        counts = {label: peer.facts["parameters"] for label, peer in participants.items()}
        if len(set(counts.values())) > 1:
            raise RuntimeError(f"the models have different numbers of parameters: {counts}")
        for _ in range(size.rounds):
            for label, peer in participants.items():
                turns.setdefault(label, []).append(peer.take(size.steps, lead=size.lead))
    baseline = [turn["seconds"] / size.steps for turn in turns[OURS]]
    for label, peer in participants.items():
        seconds = [turn["seconds"] / size.steps for turn in turns[label]]  # a step of generation is all tokens
        ratios = [a / b for a, b in zip(seconds, baseline, strict=True)]
        numbers = {"seconds": seconds, "median_seconds": statistics.median(seconds)}
        numbers |= {"ratio": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}
        results[label] = peer.facts | turns[label][-1] | numbers
    return results


def table(name: str, size: sizes.Workload, results: dict[str, Any]) -> str:
    """Return the results of one workload as a table of text."""
    lines = [f"{name}: {size.title}; {size.dtype}", f"{'':24}{'ms':>12}{'per second':>14}{'x ours':>9}   spread"]
    for label, result in results.items():
        if "missing" in result:
            lines.append(f"  {label:22}missing: {result['missing']}")
            continue
        seconds, (low, high) = result["median_seconds"], result["ratio_spread"]
        times = f"{1e3 * seconds:>12,.4g}{size.items_per_step / seconds:>14,.0f}{result['ratio']:>9.2f}"
        lines.append(f"  {label:22}{times}   {low:.2f}-{high:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
