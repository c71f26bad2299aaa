"""The rate of a large matrix product on this machine, by XLA and by PyTorch in turns: what all else is compared with.

python -m benchmarks.product xla|torch SIZE, started by `measure` (participant.py).
"""

import contextlib
import os
import statistics
from typing import Any

import jax

from benchmarks import participant, plans, sizes
from experiments.engine import cost

SIZE = 2048  # rows and columns
ROUNDS, PRODUCTS = 7, 4  # turns, and products of a turn


def measure(rounds: int | None = None, *, size: int = SIZE, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """FLOP/s of float32 products of size x size matrices, {"xla": {"median", "best"}, ...}; "missing": {who: why}.

    "step_flops" is what the products of a training step of our workloads (names; None: all) take: three times those of
    its forward pass. Divided by the step's time and by the rate here it is the share of the rate that a step reaches.
    """
    found: dict[str, list[float]] = {}
    missing = {}
    with contextlib.ExitStack() as stack:
        started = {}
        for who in ("xla", "torch"):
            try:
                one = participant.Participant(who, "benchmarks.product", who, str(size))
            except participant.Unavailable as reason:
                missing[who] = str(reason)
                continue
            started[who] = stack.enter_context(contextlib.closing(one))
        for _ in range(rounds or ROUNDS):
            for who, one in started.items():
                seconds = one.take(PRODUCTS, lead=1)["seconds"] / PRODUCTS
                found.setdefault(who, []).append(2 * size**3 / seconds)
    rates = {who: {"median": statistics.median(all_), "best": max(all_)} for who, all_ in found.items()}
    names = [name for name, w in sizes.WORKLOADS.items() if w.kind != "generation"] if names is None else names
    return {"size": size, **rates, "missing": missing, "step_flops": {name: step_flops(name) for name in names}}


def show(found: dict[str, Any]) -> str:
    """A line for each."""
    n = found["size"]
    names = {"xla": "XLA", "torch": "PyTorch"}
    lines = [
        f"{names[who]:8} {found[who]['median'] / 1e9:8,.0f} GFLOP/s (best {found[who]['best'] / 1e9:,.0f}), "
        f"float32, {n} x {n} x {n}"
        for who in names
        if who in found
    ]
    lines += [f"{names[who]:8} not measured: {why}" for who, why in found["missing"].items()]
    lines += [
        f"{name}: {flops / 1e9:.2f} GFLOP of a step, {1e3 * flops / found['xla']['median']:.2f} ms at XLA's rate"
        for name, flops in found["step_flops"].items()
    ]
    return "\n".join(lines)


def step_flops(name: str, **changes: Any) -> int:
    """Floating-point operations of the matrix products of a training step of this workload: 3 x its forward pass."""
    made = plans.made(name, **changes)
    params = jax.eval_shape(made.task.init, jax.random.key(0))
    return 3 * cost.flops(made.task.measure, params, made.task.train[0], None)


def build(arguments: list[str]) -> participant.Built:
    """Products of square matrices of ones, one after the other."""
    who, size = arguments[0], int(arguments[1])
    if who == "xla":
        import jax.numpy as jnp

        a, product = jnp.ones((size, size)), jax.jit(jnp.matmul)

        def steps(n: int) -> float:
            for _ in range(n):
                jax.block_until_ready(product(a, a))
            return 0.0
    else:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        t = torch.ones(size, size)

        def steps(n: int) -> float:
            for _ in range(n):
                torch.mm(t, t)
            return 0.0

    steps(3)
    return participant.Built(steps, 0, {})


if __name__ == "__main__":
    participant.serve(build)
