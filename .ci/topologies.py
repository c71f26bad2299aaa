"""Compile every training config for one v5e chip, and sharded examples for eight. Print a table; fail if one fails.

python .ci/topologies.py [v5e-1] [v5e-8] [--configs vit,llama] [--quick]

With --quick the compiler optimises less, in a third of the time. The programs then need more memory than in a run, so a
config that does not fit is compiled again with all optimisations.

Needs the extras `aot` and `text`. Nothing is downloaded: a small stand-in replaces each data set that is not in
$TFM_DATA, and the table marks it. The compiled programs do not depend on the data.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import string
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
DATA = {  # setting and its value -> the file or folder in $TFM_DATA
    ("text.source", "tinyshakespeare"): "tinyshakespeare.txt",
    ("text.tokenizer", "gpt2/tokenizer.json"): ROOT / "gpt2/tokenizer.json",
    ("pairs.source", "spa-eng"): "spa-eng.zip",
    ("image.source", "fashion_mnist"): "fashion-mnist",
    ("image.source", "mnist"): "mnist",
    ("image.source", "hub:uoft-cs/cifar10"): "not downloaded",
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
    from experiments.config import errors, files as config_files

    config = str(ROOT / "configs" / f"{name}.py")
    data = stand_ins(config_files.load(config), pathlib.Path(folder))
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


def stand_ins(settings, folder: pathlib.Path) -> dict[str, str]:
    """Write stand-ins for missing data sets, and return the settings that name them.

    A text has 65 characters, as many as tinyshakespeare; a tokenizer has GPT-2's 50,257 tokens; pairs are short
    sentences of thousands of words; images have ten classes and the size of the data set. A config that starts from a
    user's model starts from random weights.
    """
    import numpy as np

    letters = itertools.product("bcdfgklmnprst", "aeiou", "bcdfgklmnprst", "aeiou")
    words = ["".join(word) for word in itertools.islice(letters, 4000)]
    alphabet = (string.ascii_letters + string.digits + " \n.")[:65]
    changes, data = {}, pathlib.Path(os.environ.get("TFM_DATA") or folder / "none")
    if settings.init_fresh and not settings.init_from:
        changes["init_fresh"] = ""
    for (key, value), file in DATA.items():
        section, field = key.split(".")
        if section not in settings or settings[section][field] != value or (data / file).exists():
            continue
        path = folder / f"{os.getpid()}_{section}_{field}.{'npz' if section == 'image' else 'txt'}"
        changes[key] = str(path)
        if field == "tokenizer":
            model = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(50257)}, "merges": []}
            byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            path.write_text(json.dumps({"model": model, "pre_tokenizer": byte_level}), encoding="utf-8")
        elif section == "text":
            path.write_text((alphabet + " ".join(words[:3000]) + "\n") * 20, encoding="utf-8")
        elif section == "pairs":
            lines = (f"{word} {words[-i]}.\t{word[::-1]} {words[i // 2][::-1]}.\n" for i, word in enumerate(words))
            path.write_text("".join(lines), encoding="utf-8")
        else:
            arrays, shape = {}, (32, 32, 3) if "cifar" in value else (28, 28)
            for part, n in (("train", 640), ("test", 320)):
                arrays[f"x_{part}"] = np.resize(np.arange(251, dtype=np.uint8), (n, *shape))
                arrays[f"y_{part}"] = np.arange(n) % 10
            np.savez(path, **arrays)
    return changes


if __name__ == "__main__":
    sys.exit(main())
