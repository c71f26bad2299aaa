"""When which instruction of a compiled program ran, read from what JAX's profiler has recorded.

On a CPU the threads of XLA's pool run several instructions at a time, and an instruction may be under way on all of
them. So a moment belongs, in equal parts, to the instructions that are under way in it. A loop, a branch or a call
counts only while nothing else is under way. What is added up this way is wall time, and no moment is counted twice.
"""

import collections
import contextlib
import math
import pathlib
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

END = "end: "  # begins the name of the event at which an instruction, begun on one thread, is done on another
# Where the last part of an instruction is done on another thread, that one first goes through all instructions that
# have waited for it, within an event of this name, and then, at most so many nanoseconds later, tells the end.
FOLLOWERS, AT_ONCE = "ThunkExecutor::Execute", 5e3


class Interval(NamedTuple):
    """From when to when an instruction was under way, in nanoseconds."""

    name: str
    begin: float
    end: float


@contextlib.contextmanager
def recorded(module: str) -> Iterator[list[Interval]]:
    """What is executed within this, once it has ended: the instructions of the program of this name."""
    found: list[Interval] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield found
        for file in sorted(pathlib.Path(folder).rglob("*.xplane.pb")):
            found += intervals(jax.profiler.ProfileData.from_file(str(file)), module)


def intervals(profile: jax.profiler.ProfileData, module: str) -> list[Interval]:
    """The instructions of this program, by the events that name them: on CPU those of XLA's threads, on GPU kernels."""
    planes = list(profile.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    begun: dict[int, tuple[str, Interval]] = {}  # thread and instruction, by the number to which its end refers
    ended: dict[int, tuple[str, float, float]] = {}  # thread, when the instruction was done, when its end was told
    found = []
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):  # the others tell the same again
                continue
            followed = -math.inf, -math.inf  # when this thread last began and ended to go through FOLLOWERS
            for event in sorted(line.events, key=lambda event: event.start_ns + event.duration_ns):
                stats, end = _stats(event), event.start_ns + event.duration_ns
                if event.name == FOLLOWERS:
                    followed = event.start_ns, end
                elif event.name.startswith(END):
                    told = event.start_ns
                    ended[stats.get("_c")] = line.name, followed[0] if told - followed[1] < AT_ONCE else told, told
                elif stats.get("hlo_module") == module:
                    interval = Interval(stats["hlo_op"], event.start_ns, end)
                    if "_p" in stats:
                        begun[stats["_p"]] = line.name, interval
                    else:
                        found.append(interval)
    for n, (thread, interval) in begun.items():
        other, done, told = ended.get(n, (thread, interval.end, interval.end))
        found.append(interval._replace(end=told if other == thread else done))
    return found


def _stats(event: object) -> dict:
    with warnings.catch_warnings():  # JAX 0.12's type of these has no module, which Python 3.13 minds
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)


def shared(found: Iterable[Interval], containers: Iterable[str]) -> dict[str, float]:
    """Nanoseconds of wall time by instruction; their sum is the time in which any was under way.

    containers: the names of those that last as long as others inside them.
    """
    found, containers = list(found), set(containers)
    edges = [(one.begin, 0, i) for i, one in enumerate(found)] + [(one.end, 1, i) for i, one in enumerate(found)]
    spent: dict[str, float] = collections.defaultdict(float)
    under_way: dict[int, str] = {}
    last = 0.0
    for at, closes, i in sorted(edges):
        names = [name for name in under_way.values() if name not in containers] or list(under_way.values())
        for name in names:
            spent[name] += (at - last) / len(names)
        last = at
        if closes:
            del under_way[i]
        else:
            under_way[i] = found[i].name
    return dict(spent)
