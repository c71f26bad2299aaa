"""Compile every training config for one v5e chip, and sharded examples for eight: a table, and failure where one fails.

python .ci/topologies.py [v5e-1] [v5e-8] [--configs vit,llama] [--quick]

--quick has the compiler optimise little, which takes a third of the time: its memory and times are then larger than
those of a run. What does not fit so is compiled as a run is.

Needs the extras `aot` and `text`; nothing is downloaded: where a data set is not in $TFM_DATA, a small stand-in of its
format is made, and the table says so. What is compiled does not depend on what the data says.
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
AT_ONCE = 2  # processes
LINE = "{:<22} {:<9} {:>8} {:>7} {:>12} {:>12}  {}"
SHARDED = {  # on v5e-8: config -> what is changed
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
    ("image.source", "hub:uoft-cs/cifar10"): "nowhere",  # it would be asked of the hub
}


def main() -> int:
    """The table; 1 where a config was not compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topologies", nargs="*", default=["v5e-1", "v5e-8"])
    parser.add_argument("--configs", default="", help="only these, by their names with commas")
    parser.add_argument("--quick", action="store_true", help="optimise little")
    asked, began = parser.parse_args(), time.monotonic()
    only = set(asked.configs.split(",")) - {""}
    names = [path.stem for path in sorted((ROOT / "configs").glob("*.py")) if path.stem not in ("__init__", "base")]
    tasks = [
        (name, topology, SHARDED[name] if topology == "v5e-8" else {})
        for topology in asked.topologies
        for name in names
        if (name in SHARDED or topology != "v5e-8") and (not only or name in only)
    ]
    failed = 0
    print(LINE.format("config", "chips", "compiled", "seconds", "temporaries", "of a chip", ""))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, futures.ProcessPoolExecutor(AT_ONCE, context) as pool:
        one = functools.partial(row, folder=folder, quick=asked.quick)
        for line, right in pool.map(one, *zip(*tasks, strict=True)):
            failed += not right
            print(line, flush=True)
    print(f"{failed} failed, in {time.monotonic() - began:.0f} s")
    return int(failed > 0)


def row(name: str, topology: str, changes: dict, *, folder: str, quick: bool) -> tuple[str, bool]:
    """The line of a config, and whether all is right."""
    import jax

    import launch
    from configs import base
    from experiments.engine import config_file, errors

    config = str(ROOT / "configs" / f"{name}.py")
    own = stand_ins(config_file.load(config, base=base.get_config), pathlib.Path(folder))
    file, began, said = pathlib.Path(folder) / f"{name}_{topology}.json", time.monotonic(), io.StringIO()
    jax.config.update("jax_optimization_level", "O0" if quick else "UNKNOWN")  # the latter is JAX's default
    try:
        with contextlib.redirect_stdout(said):
            launch.train(config, None, changes | own, dry_run=True, topology=topology, json=str(file))
    except (errors.UserError, errors.RunError) as error:
        if quick:
            return row(name, topology, changes, folder=folder, quick=False)
        return LINE.format(name, topology, "no", *[""] * 3, error), False
    found = json.loads(file.read_text(encoding="utf-8"))
    peak = max(one["needed_bytes"] for one in found["programs"])
    temporaries = max(one["temp_bytes"] for one in found["programs"])
    facts = [f"{temporaries / 2**20:,.1f} MiB", f"{peak / found['hbm_bytes']:.2%}"]
    more = ", ".join([*(f"{key}={value}" for key, value in changes.items()), *(["stand-in data"] if own else [])])
    right = peak <= found["hbm_bytes"]
    return LINE.format(name, topology, "yes", f"{time.monotonic() - began:.0f}", *facts, more).rstrip(), right


def stand_ins(given, folder: pathlib.Path) -> dict[str, str]:
    """Settings that name a stand-in, made here, for data that are not there: a text of 65 characters, as many as
    tinyshakespeare's; GPT-2's 50,257 words; pairs of short sentences, of thousands of words; images of ten classes, of
    28 x 28 pixels, or as CIFAR-10's. What starts from a model that only a user has starts from nothing."""
    import numpy as np

    letters = itertools.product("bcdfgklmnprst", "aeiou", "bcdfgklmnprst", "aeiou")
    words = ["".join(some) for some in itertools.islice(letters, 4000)]
    alphabet = (string.ascii_letters + string.digits + " \n.")[:65]
    changes, there = {}, pathlib.Path(os.environ.get("TFM_DATA") or folder / "none")
    if given.init_fresh and not given.init_from:
        changes["init_fresh"] = ""
    for (key, value), file in DATA.items():
        section, field = key.split(".")
        if section not in given or given[section][field] != value or (there / file).exists():
            continue
        path = folder / f"{os.getpid()}_{section}_{field}.{'npz' if section == 'image' else 'txt'}"
        changes[key] = str(path)
        if field == "tokenizer":
            model = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(50257)}, "merges": []}
            bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            path.write_text(json.dumps({"model": model, "pre_tokenizer": bytes_of}), encoding="utf-8")
        elif section == "text":
            path.write_text((alphabet + " ".join(words[:3000]) + "\n") * 20, encoding="utf-8")
        elif section == "pairs":
            lines = (f"{one} {words[-i]}.\t{one[::-1]} {words[i // 2][::-1]}.\n" for i, one in enumerate(words))
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
