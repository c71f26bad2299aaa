"""Time a record of docs/records.md: each seed trains twice, from the shell to the result, in processes of their own.

python -m benchmarks.records TRACK [--config=FILE] [--seeds N] [--config.KEY=VALUE ...]

The first training of a seed (cold) compiles every program; the second (warm) finds them on the disk. --config is your
entry; the default is ours.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks import __main__ as benchmarks

ROOT = pathlib.Path(__file__).parents[1]
TRACKS = {  # name -> the config of our entry, the metric in summary.json
    "shakespeare": ("configs/shakespeare_record.py", "eval/loss"),
    "shakespeare_minute": ("configs/shakespeare_minute.py", "eval/loss"),
    "digits": ("configs/digits_record.py", "eval/accuracy"),
    "cifar": ("configs/vit_cifar.py", "eval/accuracy"),
}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Return the arguments, and the other flags, which are launch.py's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.records", description=__doc__.partition("\n")[0])
    parser.add_argument("track", choices=TRACKS)
    parser.add_argument("--config", help="the config of your entry")
    parser.add_argument("--seeds", type=int, default=5, help="train the seeds 0, 1, ..., N - 1")
    arguments, others = parser.parse_known_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds} must be at least 1")
    return arguments, others


def train(config: str, metric: str, changes: list[str], *, cache: str) -> tuple[float, float]:
    """Train in a new process. Return the metric and the seconds of the command. cache: of compiled programs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launch.py"), f"--config={config}", f"--workdir={folder}/run", *changes]
        began = time.perf_counter()
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        process = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
        if process.returncode:  # the reason is on stderr
            sys.exit(process.returncode)
        seconds = time.perf_counter() - began
        return json.loads(pathlib.Path(folder, "run", "summary.json").read_text(encoding="utf-8"))[metric], seconds


def main(argv: list[str]) -> None:
    """Train every seed cold and warm. Print a line for each, and the worst values."""
    arguments, changes = parse(argv)
    entry, metric = TRACKS[arguments.track]
    print(benchmarks.machine(), f"seed    {metric:>14}    cold (s)    warm (s)", sep="\n", flush=True)
    rows = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as cache:
            options = [*changes, f"--config.seed={seed}"]
            config = arguments.config or str(ROOT / entry)
            (value, cold), (_, warm) = (train(config, metric, options, cache=cache) for _ in range(2))
        rows.append((value, cold, warm))
        print(f"{seed:<4}    {value:14.4f}    {cold:8.2f}    {warm:8.2f}", flush=True)
    values, colds, warms = zip(*rows, strict=True)
    worst = (max if metric == "eval/loss" else min)(values)
    print(f"worst   {worst:14.4f}    {max(colds):8.2f}    {max(warms):8.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
