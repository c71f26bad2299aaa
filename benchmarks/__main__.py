"""Ours and the peers on this machine, in turns; the names and what they measure are listed by --help.

python -m benchmarks [--only NAME ...] [--gpu] [--json FILE] [--png FILE] [--rounds N] [--try]
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from benchmarks import growth, report, session, sizes

WORKLOADS = sizes.WORKLOADS | sizes.GPU
BESIDE = {  # what is measured beside the workloads: its title, measure(toy=...) -> numbers, show(numbers) -> text
    "start": ("seconds from the shell to the first step", growth.start, growth.show_start),
    "growth": ("our step against M and N: compilation, memory, time", growth.measure, growth.show),
}


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line. Ends the process, with one sentence and code 2, where it is wrong."""
    titles = {name: size.title for name, size in WORKLOADS.items()} | {name: one[0] for name, one in BESIDE.items()}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__.partition("\n")[0],
        epilog="names:\n" + "\n".join(f"  {name:12} {title}" for name, title in titles.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--gpu", action="store_true", help="those of a GPU in place of those of a CPU")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where to write the numbers")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="where to draw the workloads' times")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each participant (default: by workload)")
    parser.add_argument("--try", action="store_true", dest="toy", help="at a toy's size, on the CPU")
    given = parser.parse_args(words)
    given.only = given.only or list(sizes.GPU if given.gpu else sizes.WORKLOADS)
    wrong = [
        f'there is no measurement "{name}"; the right names are: {", ".join(titles)}'
        for name in given.only
        if name not in titles
    ]
    if given.rounds is not None and given.rounds < 1:
        wrong.append(f"--rounds must be at least 1, and {given.rounds} is not")
    for file in filter(None, (given.json, given.png)):
        if not file.absolute().parent.is_dir():
            wrong.append(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    if wrong:
        print(f"error: {wrong[0]}", file=sys.stderr)
        raise SystemExit(2)
    return given


def main(words: list[str]) -> int:
    """Measure what is asked for, print it as it comes, and write the files. Returns the exit code."""
    given = arguments(words)
    results: dict[str, Any] = {"machine": report.machine(), "versions": report.versions()}
    print(report.heading(results["machine"], results["versions"]) + "\n", flush=True)

    def write() -> None:
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    for name in dict.fromkeys(given.only):
        if name in BESIDE:
            title, measure, show = BESIDE[name]
            results[name] = measure(toy=given.toy)
            text = f"{name}: {title}\n{show(results[name])}"
        else:
            size = WORKLOADS[name].toy() if given.toy else WORKLOADS[name]
            size = size.changed(rounds=given.rounds or size.rounds)
            results[name] = session.measure(name, size, session.peers(size))
            text = report.workload(name, results[name], dtype=size.dtype)
        print(f"{text}\n", flush=True)
        write()  # after each, so that nothing is lost where the session is stopped
    report.add_limits(results, WORKLOADS)
    workloads = {name: result for name, result in results.items() if name in WORKLOADS}
    print(report.overview(workloads))
    write()
    if given.png and workloads:
        report.draw(given.png, workloads, machine=results["machine"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
