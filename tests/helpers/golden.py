"""The golden table tests/golden.json: recorded numbers of fixed runs, which tests/test_golden.py compares.

`python -m tests.record_golden` records all entries for the installed JAX and libtpu and this CPU;
`python -m tests.record_golden smoke-1 vit-1` records two. All runs use the CPU and the XLA flags of tests/conftest.py.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import subprocess
import sys

import jax
import numpy as np
import pytest

import launch
from experiments.devices import compilation
from experiments.engine import summary as summaries
from experiments.studies import figures as study_figures

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "tests" / "golden.json"
TIMES = ("seconds", "wall", "versions", "commit", "device", "compile", "per_s")  # such numbers differ between runs
STUDY = "from configs import base\n\n\ndef get_config():\n    return base.get_config('ablation', of={!r})\n"


def load_table() -> dict:
    """Return the content of tests/golden.json."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def entries(table: dict) -> list[str]:
    """Return the names of all entries: "smoke-1" is the config `smoke` on one device."""
    runs = [f"{name}-{n}" for name, run in table["runs"].items() for n in run["devices"]]
    return [*runs, *(f"study-{name}" for name in table["studies"]), *(f"memory-{name}" for name in table["memory"])]


def versions(name: str) -> str:
    """Return the versions of the libraries that an entry's numbers depend on."""
    libraries = ["jax", "libtpu"] if name.startswith("memory-") else ["jax"]
    return ", ".join(f"{library} {importlib.metadata.version(library)}" for library in libraries)


def machine(name: str) -> str:
    """Return what the last bits depend on besides JAX: the CPU, the number of its cores, and XLA_FLAGS."""
    if name.startswith("memory-"):
        return "any"
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    cpu_fields = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    cpu = f"{cpu_fields.get('model name', '?')}, family {cpu_fields.get('cpu family')}, model {cpu_fields.get('model')}"
    vectors = "AVX-512" if "avx512f" in cpu_fields.get("flags", "") else "no AVX-512"
    return f"{cpu}, {vectors}, {os.cpu_count()} cores; {' '.join(os.environ.get('XLA_FLAGS', '').split())}"


def compute(table: dict, name: str, folder: pathlib.Path) -> dict:
    """Compute an entry in this empty folder: {"numbers": {name: number}, "digests": {name: sha256}}."""
    kind, _, rest = name.rpartition("-")
    if kind == "memory":
        return {"numbers": memory(table["memory"][rest], folder), "digests": {}}
    if kind == "study":
        return study(table["studies"][rest], folder)
    return run(table["runs"][kind], folder, devices=int(rest))


def run(entry: dict, folder: pathlib.Path, *, devices: int) -> dict:
    """Train a config on simulated devices. Numbers: the losses of the logged steps and of the evaluation split.
    Digests: `params_sha256`, and the sha256 of all arrays without their names."""
    config, changes = ROOT / "configs" / f"{entry['config']}.py", fill_in(entry["overrides"], folder)
    with without_output(folder, draws="pairs.source" in changes):  # evaluating translations also writes samples
        result = launch.run(config, folder / "run", device="cpu", **{"mesh.data": devices}, **changes)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = {f"train/loss of step {row['step']}": row["train/loss"] for row in rows if "train/loss" in row}
    numbers |= {key: value for key, value in result.summary.items() if key.startswith("eval/")}
    arrays = sorted(hashlib.sha256(np.ascontiguousarray(leaf)).hexdigest() for leaf in jax.tree.leaves(result.params))
    nameless = hashlib.sha256("".join(arrays).encode()).hexdigest()
    return {"numbers": numbers, "digests": {"params_sha256": result.summary["params_sha256"], "arrays": nameless}}


def study(entry: dict, folder: pathlib.Path) -> dict:
    """Run a study. Return the numbers in report.json except times, and their digest."""
    (folder / "study.py").write_text(STUDY.format(entry["experiment"]), encoding="utf-8")
    with without_output(folder):
        launch.run(folder / "study.py", folder / "run", device="cpu", **fill_in(entry["overrides"], folder))
    numbers = dict(flat(json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))))
    return {"numbers": numbers, "digests": {"numbers": hashlib.sha256(json.dumps(numbers).encode()).hexdigest()}}


def memory(entry: dict, folder: pathlib.Path) -> dict[str, int]:
    """Return the bytes per chip of a config's programs. A new process compiles them with libtpu."""
    file, changes = folder / "memory.json", fill_in(entry["overrides"], folder)
    flags = [f"--config.{key}={value}" for key, value in changes.items()]
    command = [sys.executable, "launch.py", f"--config=configs/{entry['config']}.py", "--dry_run", f"--json={file}"]
    command += [f"--topology={entry['topology']}", *flags]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # they are for XLA:CPU
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    programs = json.loads(file.read_text(encoding="utf-8"))["programs"]
    return {f"{one['name']}: {key}": one[key] for one in programs for key in ("needed_bytes", "temp_bytes")}


def fill_in(overrides: dict, folder: pathlib.Path) -> dict:
    """Replace {text}, {pairs} and {tokenizer} in the overrides by the paths of files that are written here."""
    makers = {"{text}": text, "{pairs}": pairs, "{tokenizer}": tokenizer}
    return {key: str(makers[value](folder)) if value in list(makers) else value for key, value in overrides.items()}


def sentences(n: int) -> list[str]:
    """Draw sentences in which a rule selects the next word, so that a model can learn it. `random()` returns the same
    numbers in every version of Python."""
    draw = random.Random(33).random
    words = [f"{a}{b}{c}" for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "st", "ra")]
    result, word = [], 0
    for _ in range(n):
        sentence = []
        for _ in range(3 + int(6 * draw())):
            word = (7 * word + 3 + int(5 * draw() ** 2)) % len(words)
            sentence.append(words[word])
        result.append(" ".join(sentence).capitalize() + ".?!\n"[int(3 * draw())])
    return result


def text(folder: pathlib.Path) -> pathlib.Path:
    """Write about 80 kB of text."""
    path = folder / "text.txt"
    path.write_text("\n".join(sentences(2500)), encoding="utf-8")
    return path


def pairs(folder: pathlib.Path) -> pathlib.Path:
    """Write pairs, separated by tabs. The translation of a sentence has its words in reverse order."""
    path = folder / "pairs.txt"
    lines = (f"{one}\t{' '.join(reversed(one[:-1].lower().split()))}{one[-1]}\n" for one in sentences(1500))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def tokenizer(folder: pathlib.Path) -> pathlib.Path:
    """Write a tokenizer with as many tokens as GPT-2's: bytes and 50,001 tokens that no text contains."""
    path = folder / "tokenizer.json"
    model = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(50257)}, "merges": []}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    path.write_text(json.dumps({"model": model, "pre_tokenizer": split}), encoding="utf-8")
    return path


def flat(tree, path: str = ""):
    """Yield (path, number) for all numbers in a JSON tree, except times, versions and devices."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            if key != "config" and not any(word in str(key) for word in TIMES):
                yield from flat(value, f"{path}/{key}")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, tree


@contextlib.contextmanager
def without_output(folder: pathlib.Path, *, draws: bool = False):
    """Context manager: redirect stdout to a file. Unless `draws`, runs and studies make no figures and no samples."""
    with (folder / "printed.txt").open("w", encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "measure_peak", lambda *, devices: 1e9)  # takes a second
        if not draws:
            patch.setattr(summaries, "draw", lambda *arguments: ([], {}))
            patch.setattr(study_figures, "draw", lambda *arguments, **options: [])
        with contextlib.redirect_stdout(file):
            yield
