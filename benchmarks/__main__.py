"""Ours and the peers on this machine, in turns; the names and what they measure are listed by --help.

python -m benchmarks [--only NAME ...] [--gpu] [--json FILE] [--png FILE] [--rounds N] [--try]
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import growth, limit, machine, session, sizes, table


class Beside(NamedTuple):
    """What is measured beside the workloads: measure(toy=...) -> numbers, show(numbers) -> text."""

    title: str
    measure: Callable[..., Any]
    show: Callable[[Any], str]


BESIDE = {
    "start": Beside("seconds from the shell to the first step", growth.start, growth.show_start),
    "growth": Beside("our step against M and N: compilation, memory, time", growth.measure, growth.show),
}
WORKLOADS = sizes.WORKLOADS | sizes.GPU


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line. Ends the process, with one sentence and code 2, where it is wrong."""
    titles = {name: what.title for name, what in {**WORKLOADS, **BESIDE}.items()}
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
    unknown = [name for name in given.only if name not in titles]
    if unknown:
        refuse(f'there is no measurement "{unknown[0]}"; the right names are: {", ".join(titles)}')
    if given.rounds is not None and given.rounds < 1:
        refuse(f"--rounds must be at least 1, and {given.rounds} is not")
    for file in filter(None, (given.json, given.png)):
        if not file.absolute().parent.is_dir():
            refuse(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    return given


def refuse(sentence: str) -> None:
    """Say what is wrong with the command, and end with code 2."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def main(words: list[str]) -> int:
    """Measure what is asked for, print it as it comes, and write the files. Returns the exit code."""
    given = arguments(words)
    report: dict[str, Any] = {"machine": machine.machine(), "versions": machine.versions()}
    print(table.heading(report["machine"], report["versions"]) + "\n", flush=True)
    for name in dict.fromkeys(given.only):
        report[name], text = measured(name, rounds=given.rounds, toy=given.toy)
        print(f"{text}\n", flush=True)
        if given.json:  # after each, so that nothing is lost where the session is stopped
            write(given.json, report)
    limit.add(report, WORKLOADS)
    workloads = {name: result for name, result in report.items() if name in WORKLOADS}
    print(table.overview(workloads))
    if given.json:
        write(given.json, report)
    if given.png and workloads:
        from benchmarks import figure  # matplotlib, only where something is drawn

        figure.draw(given.png, workloads, machine=report["machine"])
    return 0


def write(file: pathlib.Path, report: dict[str, Any]) -> None:
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measured(name: str, *, rounds: int | None, toy: bool) -> tuple[Any, str]:
    """The numbers of a measurement, and how they read."""
    if name in BESIDE:
        result = BESIDE[name].measure(toy=toy)
        return result, f"{name}: {BESIDE[name].title}\n{BESIDE[name].show(result)}"
    size = WORKLOADS[name].toy() if toy else WORKLOADS[name]
    size = size.changed(rounds=rounds) if rounds else size
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    result = session.measure(name, size, session.peers(size), say=say)
    return result, table.workload(name, result, dtype=size.dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
