"""Compile every training config for one v5e chip, and sharded examples for eight. Print a table; fail if one fails.

python .ci/topologies.py [v5e-1] [v5e-8] [--configs vit,llama] [--quick]

With --quick the compiler optimises less, in a third of the time. The programs then need more memory than in a run, so a
config that does not fit is compiled again with all optimisations.

Needs the extras `aot` and `text`. Nothing is downloaded: stand-ins replace the data sets, and the table marks them.
"""

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import pathlib
import sys
import tempfile
import time
from concurrent import futures

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PROCESSES = 2
LINE = "{:<22} {:<9} {:>8} {:>7} {:>12} {:>12}  {}"
SHARDED = {  # on v5e-8: config -> changes
    "vit": {"mesh.data": 8},
    "llama": {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2},
    "long_context": {"mesh.data": 1, "mesh.sequence": 8},
}


def main() -> int:
    """Print the table. Return 1 if a config was not compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topologies", nargs="*", default=["v5e-1", "v5e-8"])
    parser.add_argument("--configs", default="", help="only these names, separated by commas")
    parser.add_argument("--quick", action="store_true", help="optimise less")
    flags, start = parser.parse_args(), time.monotonic()
    only = set(flags.configs.split(",")) - {""}
    files = [path for path in sorted((ROOT / "configs").glob("*.py")) if path.stem not in ("__init__", "base")]
    names = [path.stem for path in files]
    tasks = [
        (name, topology, SHARDED[name] if topology == "v5e-8" else {})
        for topology in flags.topologies
        for name in names
        if (name in SHARDED or topology != "v5e-8") and (not only or name in only)
    ]
    failed = 0
    print(LINE.format("config", "chips", "compiled", "seconds", "temporaries", "of a chip", ""))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, futures.ProcessPoolExecutor(PROCESSES, context) as pool:
        compile_row = functools.partial(row, folder=folder, quick=flags.quick)
        for line, fits in pool.map(compile_row, *zip(*tasks, strict=True)):
            failed += not fits
            print(line, flush=True)
    print(f"{failed} failed, in {time.monotonic() - start:.0f} s")
    return int(failed > 0)


def row(name: str, topology: str, changes: dict, *, folder: str, quick: bool) -> tuple[str, bool]:
    """Return the line of a config, and whether it compiles and fits."""
    import jax

    import launch
    from benchmarks import stand_ins
    from experiments.config import errors, files as config_files

    config = str(ROOT / "configs" / f"{name}.py")
    data = stand_ins.write(config_files.load(config), pathlib.Path(folder))
    file, start = pathlib.Path(folder) / f"{name}_{topology}.json", time.monotonic()
    jax.config.update("jax_optimization_level", "O0" if quick else "UNKNOWN")  # UNKNOWN is JAX's default
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            launch.train(config, None, changes | data, dry_run=True, topology=topology, json=str(file))
    except (errors.UserError, errors.RunError) as error:
        if quick:
            return row(name, topology, changes, folder=folder, quick=False)
        return LINE.format(name, topology, "no", *[""] * 3, error), False
    report = json.loads(file.read_text(encoding="utf-8"))
    peak = max(program["needed_bytes"] for program in report["programs"])
    temporaries = max(program["temp_bytes"] for program in report["programs"])
    sizes = [f"{temporaries / 2**20:,.1f} MiB", f"{peak / report['hbm_bytes']:.2%}"]
    notes = [f"{key}={value}" for key, value in changes.items()] + ["stand-in data"] * bool(data)
    line = LINE.format(name, topology, "yes", f"{time.monotonic() - start:.0f}", *sizes, ", ".join(notes))
    return line.rstrip(), peak <= report["hbm_bytes"]


if __name__ == "__main__":
    sys.exit(main())
