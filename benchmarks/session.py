"""One workload measured: all participants are started, and then timed in turns while the others sleep."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import participant, sizes
from experiments import engine

OURS = "ours"
PEERS = {  # the module, and the way in which it does it
    "transformers": ("benchmarks.torch_peer", "eager"),
    "transformers compiled": ("benchmarks.torch_peer", "compile"),
    "flax": ("benchmarks.flax_peer",),
}
PYTORCH = {"PyTorch": ("benchmarks.torch_peer", "eager")}
# launch.py starts a run with this, unless it is set; a peer has what its user sets
AS_LAUNCHED = {engine.VARIABLE: os.environ.get(engine.VARIABLE, engine.LARGE)}


def peers(size: sizes.Workload) -> dict[str, tuple[str, ...]]:
    """Who is measured beside ours: of products and of reading PyTorch alone, on a GPU not Flax."""
    if size.kind in ("product", "read"):
        return PYTORCH
    return {name: way for name, way in PEERS.items() if size.platform == "cpu" or name != "flax"}


def measure(
    name: str,
    size: sizes.Workload,
    others: Mapping[str, tuple[str, ...]],
    *,
    start: Callable[..., participant.Participant] = participant.Participant,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The workload's times: {"title", "ours", "peers", "missing", "fastest_peer", "ratio", "ratio_spread", ...}.

    A ratio is a peer's time divided by ours of the same turn: the median of all turns, and the smallest and largest.
    RuntimeError where the participants' models have not equally many parameters.
    """
    with contextlib.ExitStack() as stack:
        participants, missing = [], {}
        for who, command in {OURS: ("benchmarks.ours",), **others}.items():
            say(f"{name}: {who} is built and warmed up")
            try:
                one = start(who, command, size, AS_LAUNCHED if who == OURS else {})
            except participant.Unavailable as reason:
                missing[who] = str(reason)
                say(f"{name}: without {who}: {reason}")
                continue
            participants.append(stack.enter_context(contextlib.closing(one)))
        agree(participants)
        turns, awake = in_turns(participants, size)
    return summary(size, participants, turns) | {"missing": missing, "awake_share": awake}


def agree(participants: Sequence[participant.Participant]) -> None:
    """RuntimeError unless all models have equally many parameters."""
    counts = {one.name: one.facts["parameters"] for one in participants}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise RuntimeError(f"the models are not of one size: {each} parameters")


def in_turns(
    participants: Sequence[participant.Participant], size: sizes.Workload
) -> tuple[list[dict[str, dict[str, float]]], float]:
    """What each participant answers in each round, A B C A B C ..., and the share of the time others were awake in.

    That share is the processor time that those used whose turn it was not, for each second of the measurement.
    """
    turns, awake, begin = [], 0.0, time.perf_counter()
    for _ in range(size.rounds):
        turns.append({})
        for one in participants:
            others = [other for other in participants if other is not one]
            before = sum(other.cpu_seconds() for other in others)
            turns[-1][one.name] = one.take(size.steps, lead=size.lead)
            awake += sum(other.cpu_seconds() for other in others) - before
    return turns, awake / (time.perf_counter() - begin)


def summary(
    size: sizes.Workload, participants: Sequence[participant.Participant], turns: list[dict[str, dict[str, float]]]
) -> dict[str, Any]:
    """The numbers of a workload, from every round's answers; ours are the first."""
    reports = {}
    for one in participants:
        answers = [turn[one.name] for turn in turns]
        seconds = [answer["seconds"] / size.steps for answer in answers]  # of a step; of generation, of all its words
        median = statistics.median(seconds)
        times = {"seconds": seconds, "median_seconds": median, "per_second": size.counted / median}
        reports[one.name] = {**one.facts, **times, **{name: answers[-1][name] for name in ("loss", "peak_bytes")}}
    ours = reports.pop(OURS)
    compared = {name: report | ratio(report["seconds"], ours["seconds"]) for name, report in reports.items()}
    result = {"title": size.title, "unit": size.unit, "steps_of_a_turn": size.steps, "ours": ours, "peers": compared}
    if compared:
        fastest = min(compared, key=lambda name: compared[name]["ratio"])
        result |= {"fastest_peer": fastest} | {name: compared[fastest][name] for name in ("ratio", "ratio_spread")}
    return result


def ratio(peer: list[float], ours: list[float]) -> dict[str, Any]:
    """The peer's time divided by ours, turn by turn: their median, and the smallest and the largest."""
    ratios = [a / b for a, b in zip(peer, ours, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}
