"""What this machine can do, by XLA and by PyTorch in turns: multiply large matrices, and read its memory.

python -m benchmarks.product product|read xla|torch SIZE, started by `measure` (participant.py).
"""

import contextlib
import os
import statistics
from typing import Any

import jax

from benchmarks import limit, participant, sizes

SIZE = 2048  # rows and columns of a product
NUMBERS = 2**28  # that are read: 1 GiB, more than any cache
ROUNDS, TIMES = 7, 4  # turns, and products (or readings) of a turn
NAMES = {"xla": "XLA", "torch": "PyTorch"}


def measure(
    rounds: int | None = None, *, size: int = SIZE, numbers: int = NUMBERS, names: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Rates of float32 products of size x size matrices and of reading, {"xla": {"median", "best"}, ...} in FLOP/s,
    {"read": {"xla": ..., ...}} in bytes/s; "missing": {who: why}.

    "step_flops" is what the products of a training step of our workloads (names; None: all) ask for, and
    "least_seconds" what a program on this machine can hardly go below (limit.py).
    """
    found: dict[tuple[str, str], list[float]] = {}
    missing = {}
    work = {"product": (size, 2 * size**3), "read": (numbers, 4 * numbers)}
    with contextlib.ExitStack() as stack:
        started = {}
        for what, (amount, _) in work.items():
            for who in [who for who in NAMES if who not in missing]:
                try:
                    one = participant.Participant(who, "benchmarks.product", what, who, str(amount))
                except participant.Unavailable as reason:
                    missing[who] = str(reason)
                    continue
                started[what, who] = stack.enter_context(contextlib.closing(one))
        for _ in range(rounds or ROUNDS):
            for (what, who), one in started.items():
                seconds = one.take(TIMES, lead=1)["seconds"] / TIMES
                found.setdefault((what, who), []).append(work[what][1] / seconds)
    rates = {key: {"median": statistics.median(all_), "best": max(all_)} for key, all_ in found.items()}
    product, read = ({who: rates[key, who] for key, who in rates if key == what} for what in work)
    names = tuple(sizes.WORKLOADS) if names is None else names
    steps = {name: limit.step_flops(name) for name in names if sizes.WORKLOADS[name].kind != "generation"}
    fastest = {what: max(rate["median"] for (kind, _), rate in rates.items() if kind == what) for what in work}
    least = {name: limit.seconds(name, **fastest) for name in names}
    return {"size": size, **product, "read": read, "missing": missing, "step_flops": steps, "least_seconds": least}


def show(found: dict[str, Any]) -> str:
    """A line for each."""
    n = found["size"]
    lines = [
        f"{NAMES[who]:8} {found[who]['median'] / 1e9:8,.0f} GFLOP/s (best {found[who]['best'] / 1e9:,.0f}), "
        f"float32, {n} x {n} x {n}"
        for who in NAMES
        if who in found
    ]
    lines += [
        f"{NAMES[who]:8} {rate['median'] / 1e9:8,.1f} GB/s (best {rate['best'] / 1e9:,.1f}) read from memory"
        for who, rate in found["read"].items()
    ]
    lines += [f"{NAMES[who]:8} not measured: {why}" for who, why in found["missing"].items()]
    for name, seconds in found["least_seconds"].items():
        flops = found["step_flops"].get(name)
        why = "words, whose numbers must be read" if flops is None else f"a step, {flops / 1e9:.2f} GFLOP"
        lines.append(f"{name}: at least {1e3 * seconds:,.1f} ms for {why}")
    return "\n".join(lines)


def build(arguments: list[str]) -> participant.Built:
    """Products of square matrices of ones, or sums of ones, one after the other."""
    what, who, size = arguments[0], arguments[1], int(arguments[2])
    if who == "xla":
        import jax.numpy as jnp

        x = jnp.ones((size, size) if what == "product" else size)
        do = jax.jit((lambda x: x @ x) if what == "product" else jnp.sum)

        def steps(n: int) -> float:
            for _ in range(n):
                jax.block_until_ready(do(x))
            return 0.0
    else:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        t = torch.ones((size, size) if what == "product" else size)

        def steps(n: int) -> float:
            for _ in range(n):
                torch.mm(t, t) if what == "product" else torch.sum(t)
            return 0.0

    steps(3)
    return participant.Built(steps, 0, {})


if __name__ == "__main__":
    participant.serve(build)
