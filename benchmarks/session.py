"""One workload measured: all participants are started, and then timed in turns while the others sleep."""

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import participant, sizes

OURS = "ours"
PEERS = {  # the module, and the way in which it does it
    "transformers": ("benchmarks.torch_peer", "eager"),
    "transformers compiled": ("benchmarks.torch_peer", "compile"),
    "flax": ("benchmarks.flax_peer",),
}
# The environment of our own side (docs/performance.md); a peer has what its user sets.
LARGE_PAGES = {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")}


def peers(size: sizes.Workload) -> dict[str, tuple[str, ...]]:
    """Who is measured beside ours: of products and of reading PyTorch alone, on a GPU not Flax."""
    if size.kind in ("product", "read"):
        return {"PyTorch": PEERS["transformers"]}
    return {name: way for name, way in PEERS.items() if size.platform == "cpu" or name != "flax"}


def measure(
    name: str,
    size: sizes.Workload,
    others: Mapping[str, tuple[str, ...]],
    *,
    start: Callable[..., participant.Participant] = participant.Participant,
) -> dict[str, Any]:
    """The workload's times: {"title", "ours", "peers", "missing", "fastest_peer", "ratio", "ratio_spread", ...}.

    A ratio is a peer's time divided by ours of the same turn, A B C A B C ...: the median of all turns, and the
    smallest and largest. RuntimeError where the participants' models have not equally many parameters.
    """
    participants, missing = [], {}
    with contextlib.ExitStack() as stack:
        for who, command in {OURS: ("benchmarks.ours",), **others}.items():
            print(f"{name}: {who} is built and warmed up", file=sys.stderr, flush=True)
            try:
                one = start(who, command, size, LARGE_PAGES if who == OURS else {})
            except participant.Unavailable as reason:
                missing[who] = str(reason)
                print(f"{name}: without {who}: {reason}", file=sys.stderr, flush=True)
            else:
                participants.append(stack.enter_context(contextlib.closing(one)))
        counts = {one.name: one.facts["parameters"] for one in participants}
        if len(set(counts.values())) > 1:
            each = ", ".join(f"{who} {count:,}" for who, count in counts.items())
            raise RuntimeError(f"the models are not of one size: {each} parameters")
        answers = {one.name: [] for one in participants}
        for _ in range(size.rounds):
            for one in participants:
                answers[one.name].append(one.take(size.steps, lead=size.lead))
    reports = {}
    for one in participants:
        mine = answers[one.name]
        seconds = [answer["seconds"] / size.steps for answer in mine]  # of a step; of generation, of all its words
        median = statistics.median(seconds)
        times = {"seconds": seconds, "median_seconds": median, "per_second": size.counted / median}
        reports[one.name] = {**one.facts, **times, "loss": mine[-1]["loss"], "peak_bytes": mine[-1]["peak_bytes"]}
    ours = reports.pop(OURS)
    for peer in reports.values():
        ratios = [a / b for a, b in zip(peer["seconds"], ours["seconds"], strict=True)]
        peer |= {"ratio": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}
    what = {"title": size.title, "unit": sizes.UNITS[size.kind], "steps_of_a_turn": size.steps}
    result = {**what, "ours": ours, "peers": reports, "missing": missing}
    if reports:
        fastest = min(reports, key=lambda who: reports[who]["ratio"])
        result |= {"fastest_peer": fastest} | {key: reports[fastest][key] for key in ("ratio", "ratio_spread")}
    return result
