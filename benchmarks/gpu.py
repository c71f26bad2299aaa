"""On a GPU: GPT-2's 124M shape in bfloat16 beside PyTorch, both attention paths, several seeds in one program.

python -m benchmarks.gpu [--json FILE] [--batch 16] [--rounds 5] [--try]   (gpu.sh looks first what is there)
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import gpu_sizes, machine, participant

PRODUCT, SEEDS = "product", "seeds"
OURS, TORCH = "benchmarks.gpu_ours", "benchmarks.gpu_torch"
PRODUCTS = {"XLA's product": (OURS, "product"), "PyTorch's product": (TORCH, "product")}
STEPS = {
    "ours, fused": (OURS, "step", "fused"),
    "ours, explicit": (OURS, "step", "explicit"),
    "transformers compiled": (TORCH, "compile"),
    "transformers": (TORCH, "eager"),
}
RUNS = {"one program": (OURS, "together"), "one after the other": (OURS, "apart")}
ROUNDS = 5


def measure(
    rounds: int | None = None,
    *,
    size: gpu_sizes.Size = gpu_sizes.GPT2,
    small: gpu_sizes.Size = gpu_sizes.SMALL,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """{"size", "small", "product": times, "step": times, "seeds": times}, each a dict as `timed` makes it."""
    # Participants share the GPU: none may take its whole memory for itself.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    found: dict[str, Any] = {"size": dataclasses.asdict(size), "small": dataclasses.asdict(small)}
    for what, who, of in ((PRODUCT, PRODUCTS, size), ("step", STEPS, size), (SEEDS, RUNS, small)):
        found[what] = timed(who, of, rounds or ROUNDS, say)
    return found


def timed(who: dict[str, tuple], size: gpu_sizes.Size, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The seconds of a step of each, measured in turns: {name: {"seconds": [...], **facts}, "missing": {name: why}}."""
    found: dict[str, Any] = {"missing": {}}
    with contextlib.ExitStack() as stack:
        started = {}
        for name, (module, kind, *attention) in who.items():
            say(f"{name} is built and warmed up")
            of = dataclasses.replace(size, attention=attention[0]) if attention else size
            try:
                one = participant.Participant(name, module, kind, of.text())
            except (participant.Unavailable, RuntimeError) as reason:  # a GPU without memory for it, for one
                found["missing"][name] = str(reason).strip().splitlines()[-1]
                say(f"without {name}: {reason}")
                continue
            started[name] = stack.enter_context(contextlib.closing(one))
            found[name] = {"seconds": [], "parameters": one.facts["parameters"], **one.facts}
        for _ in range(rounds):
            for name, one in started.items():
                answer = one.take(size.steps, lead=2)
                found[name]["seconds"].append(answer["seconds"] / size.steps)
                found[name]["loss"] = answer["loss"]
    return found


def show(found: dict[str, Any]) -> str:
    """The tables."""
    size, small, lines = found["size"], found["small"], []
    rates = {}
    for name in PRODUCTS:
        if name in found["product"]:
            rates[name] = 2 * size["product"] ** 3 / _median(found["product"][name])
            lines.append(
                f"{name:24}{rates[name] / 1e12:12,.1f} TFLOP/s, bfloat16, {size['product']:,} rows and columns"
            )
    lines += ["", f"{size['M']} layers, {size['H']} heads, {size['D']} wide, N {size['N']:,}, W {size['W']:,}, "]
    lines[-1] += f"B {size['B']}, bfloat16, float32 parameters"
    lines.append(f"{'':24}{'ms':>10}{'tokens/s':>14}{'of the product':>16}{'our fused is faster by':>26}")
    lines += step_rows(found["step"], size, max(rates.values(), default=0.0))
    lines += ["", f"{small['seeds']} seeds of {small['M']} layers x {small['D']}, N {small['N']}, B {small['B']}"]
    for name in RUNS:
        if name in found["seeds"]:
            one = found["seeds"][name]
            tokens = small["seeds"] * small["B"] * small["N"] / _median(one)
            lines.append(
                f"{name:24}{1e3 * _median(one):10.2f}{tokens:14,.0f} tokens/s, {one['parameters']:,} parameters"
            )
    if all(name in found["seeds"] for name in RUNS):
        lines.append(f"one program is faster by {compared(found['seeds'], *reversed(RUNS))}")
    missing = [pair for what in ("product", "step", "seeds") for pair in found[what]["missing"].items()]
    return "\n".join(lines + [f"not measured: {name}: {why}" for name, why in missing])


def step_rows(steps: dict[str, Any], size: dict[str, Any], rate: float) -> list[str]:
    """A row for each participant; shares are of what the fastest of the products reaches."""
    flops = next((steps[name]["step_flops"] for name in STEPS if "step_flops" in steps.get(name, {})), 0)
    rows = []
    for name in STEPS:
        if name in steps:
            seconds = _median(steps[name])
            share = f"{flops / seconds / rate:.0%}" if rate and flops else "?"
            ratio = compared(steps, name, "ours, fused") if "ours, fused" in steps else ""
            tokens = size["B"] * size["N"] / seconds
            rows.append(f"{name:24}{1e3 * seconds:10.2f}{tokens:14,.0f}{share:>16}{ratio:>26}")
    return rows


def compared(found: dict[str, Any], slow: str, fast: str) -> str:
    """How many times as long the one takes as the other, turn by turn: median, and from where to where."""
    ratios = [a / b for a, b in zip(found[slow]["seconds"], found[fast]["seconds"], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _median(one: dict[str, Any]) -> float:
    return statistics.median(one["seconds"])


def main(words: list[str]) -> int:
    """Measure, print, and write the file. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where to write the numbers")
    parser.add_argument("--batch", type=int, default=gpu_sizes.GPT2.B, help="examples of a step")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="turns of each participant")
    parser.add_argument("--try", action="store_true", dest="toy", help="at a toy's size, on the CPU")
    asked = parser.parse_args(words)
    size, small = dataclasses.replace(gpu_sizes.GPT2, B=asked.batch), gpu_sizes.SMALL
    if asked.toy:
        size, small = gpu_sizes.TOY_GPT2, gpu_sizes.TOY_SMALL
    told = {"machine": machine.machine(), "versions": machine.versions()}
    print(", ".join(f"{name} {value}" for part in told.values() for name, value in part.items()), flush=True)
    found = measure(asked.rounds, size=size, small=small, say=lambda line: print(line, file=sys.stderr, flush=True))
    devices = {one["device"] for one in found["step"].values() if "device" in one}
    print(f"on {', '.join(sorted(devices)) or 'no device'}\n{show(found)}")
    if asked.json:
        asked.json.write_text(json.dumps(told | found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
