"""python -m benchmarks [--only NAME ...] [--json FILE] [--png FILE] [--rounds N]

Ours and the peers on this machine, in turns; the names and what they measure are listed by --help.
"""

import argparse
import importlib
import json
import pathlib
import sys
from typing import Any

from benchmarks import machine, session, sizes, table

# What is measured beside the workloads: a name, its module (measure(rounds) -> dict, show(dict) -> str), what it is.
BESIDE = {
    "product": ("product", "what this machine can do: rates of large matrix products and of reading memory"),
    "start": ("start", "seconds from the shell to the first step, cold and with a warm compilation cache"),
    "compile": ("depth", "seconds of compilation against the number of layers"),
    "memory": ("memory", "peak memory of the long-context step against N"),
    "cost": ("cost", "time of a step against N and against M"),
    "profile": ("profile", "where the time of our step goes, by named scope"),
}
DEFAULT = [*sizes.WORKLOADS, "product"]


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line. Ends the process, with one sentence and code 2, where it is wrong."""
    names = {name: size.title for name, size in sizes.WORKLOADS.items()}
    names |= {name: what for name, (_, what) in BESIDE.items()}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Ours and the peers on this machine, in turns.",
        epilog="names:\n" + "\n".join(f"  {name:12} {what}" for name, what in names.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=DEFAULT, help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where to write the numbers")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="where to draw the workloads' times")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each participant (default: by workload)")
    asked = parser.parse_args(words)
    unknown = [name for name in asked.only if name not in names]
    if unknown:
        refuse(f'there is no measurement "{unknown[0]}"; the right names are: {", ".join(names)}')
    if asked.rounds is not None and asked.rounds < 1:
        refuse(f"--rounds must be at least 1, and {asked.rounds} is not")
    for file in filter(None, (asked.json, asked.png)):
        if not file.absolute().parent.is_dir():
            refuse(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    return asked


def refuse(sentence: str) -> None:
    """Say what is wrong with the command, and end with code 2."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def main(words: list[str]) -> int:
    """Measure what is asked for, print it as it comes, and write the files. Returns the exit code."""
    asked = arguments(words)
    report: dict[str, Any] = {"machine": machine.machine(), "versions": machine.versions()}
    print(table.heading(report["machine"], report["versions"]) + "\n", flush=True)
    for name in dict.fromkeys(asked.only):
        report[name], shown = measured(name, asked.rounds)
        print(f"{shown}\n", flush=True)
        if asked.json:  # after each, so that nothing is lost where the session is stopped
            write(asked.json, report)
    workloads = {name: result for name, result in report.items() if name in sizes.WORKLOADS}
    limits(report)
    print(table.overview(workloads))
    if asked.json:
        write(asked.json, report)
    if asked.png and workloads:
        from benchmarks import figure  # matplotlib, only where something is drawn

        figure.draw(asked.png, workloads, machine=report["machine"])
    return 0


def write(file: pathlib.Path, report: dict[str, Any]) -> None:
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def limits(report: dict[str, Any]) -> None:
    """Into each workload that stands beside the machine's rates: our share of the product rate (training steps), and
    about the largest ratio to the fastest peer that there could be (limit.py)."""
    product = report.get("product", {})
    for name in product.get("least_seconds", {}).keys() & report.keys():
        result = report[name]
        if name in product["step_flops"]:
            rate = product["step_flops"][name] / result["ours"]["median_seconds"]
            result["ours"]["share_of_product_rate"] = rate / product["xla"]["median"]
        if "fastest_peer" in result:
            peer = result["peers"][result["fastest_peer"]]["median_seconds"]
            result["ratio_at_most"] = peer / product["least_seconds"][name]


def measured(name: str, rounds: int | None) -> tuple[dict[str, Any], str]:
    """The numbers of a measurement, and how they read."""
    if name in sizes.WORKLOADS:
        result = session.measure(name, rounds=rounds, say=lambda line: print(line, file=sys.stderr, flush=True))
        return result, table.workload(name, result)
    module = importlib.import_module(f"benchmarks.{BESIDE[name][0]}")
    result = module.measure(rounds)
    return result, f"{name}: {BESIDE[name][1]}\n{module.show(result)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
