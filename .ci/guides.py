"""Run the commands of README.md and of the guides with few steps, each page in a separate folder.

python .ci/guides.py [PAGE ...]

PAGE: README, or the name of a guide. Default: README and all guides whose libraries are installed.

For each page: the function with its name makes the user's files. Every Python block that begins with `# my_file.py`
becomes this file. Every line `python ...` of the shell blocks is run. At the end, every path in backquotes that begins
with runs/ must exist.
"""

import contextlib
import importlib.util
import itertools
import os
import pathlib
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent import futures

import numpy as np
from PIL import Image
from sklearn import datasets

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {"README": ROOT / "README.md", **{file.stem: file for file in sorted((ROOT / "docs/guides").glob("*.md"))}}
FEW = ("--config.train.steps=12", "--config.train.evaluate_every=6")
WARM = ("--config.train.steps=60", "--config.train.evaluate_every=30")  # of a config with 50 steps of warm-up
FEWER = ("--config.train.steps=6", "--config.train.evaluate_every=6")  # of a search, which trains tens of runs
PAGES_AT_ONCE = 2
# A name in the code of a page -> libraries that it needs.
OPTIONAL = {"transformers": ("torch", "transformers"), "transformer_lens": ("transformer_lens", "nnsight")}


def README(folder: pathlib.Path) -> None:
    """Write a text and images."""
    (folder / "my_text.txt").write_text(PAGES["README"].read_text(encoding="utf-8") * 3, encoding="utf-8")
    draw = np.random.default_rng(0)
    images = {f"x_{part}": draw.integers(0, 256, (300, 12, 12), np.uint8) for part in ("train", "test")}
    np.savez(folder / "my_images.npz", **images, **{f"y_{part}": np.arange(300) % 3 for part in ("train", "test")})


def translation(folder: pathlib.Path) -> None:
    """Write parallel files of English and Spanish: every hundredth pair of spa-eng.zip if it exists, else numbers."""
    numbers = zip("one two three four five six".split(), "uno dos tres cuatro cinco seis".split(), strict=True)
    pairs = [[" ".join(side) for side in zip(*group, strict=True)] for group in itertools.product(numbers, repeat=4)]
    file = pathlib.Path(os.environ.get("TFM_DATA", ""), "spa-eng.zip")
    if file.is_file():
        with zipfile.ZipFile(file) as zipped:
            pairs = [line.split("\t") for line in zipped.read("spa-eng/spa.txt").decode().splitlines()[::100]]
    (folder / "corpus").mkdir()
    for split, lines in {"test": pairs[::20], "valid": pairs[1::20], "train": pairs[2::20] + pairs[3::4]}.items():
        for i, language in enumerate(("en", "es")):
            (folder / "corpus" / f"{split}.{language}").write_text("".join(f"{pair[i]}\n" for pair in lines), "utf-8")


def photographs(folder: pathlib.Path) -> None:
    """Write crops of scikit-learn's two photographs, in two classes, and a new one."""
    draw, photographs = np.random.default_rng(0), datasets.load_sample_images().images
    for name, image_YX3 in zip(("temple", "flower"), photographs, strict=True):
        (folder / "photographs" / name).mkdir(parents=True)
        for i in range(150):
            rows, columns = draw.integers(24, 64, 2)
            top, left = draw.integers(0, image_YX3.shape[0] - rows), draw.integers(0, image_YX3.shape[1] - columns)
            part = Image.fromarray(image_YX3[top : top + rows, left : left + columns])
            part.save(folder / ("new.jpg" if (i, name) == (149, "flower") else f"photographs/{name}/{i}.jpg"))


def finetune_bert(folder: pathlib.Path) -> None:
    """Write a small BERT with random weights, as transformers saves it, and sentences of two classes."""
    import transformers

    good, bad = "good great fine warm bright".split(), "bad dull poor slow cold".split()
    things = "film story actor scene ending song".split()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "is", "was", "and", *things, *good, *bad]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "bert")
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder / "bert")
    rows = ["text,label"]
    for kind, adjectives in (("praise", good), ("blame", bad)):
        sentences = itertools.product(things, ("is", "was"), adjectives, adjectives)
        rows += [f"the {thing} {verb} {first} and {second},{kind}" for thing, verb, first, second in sentences]
    (folder / "reviews.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def gpt_on_your_text(folder: pathlib.Path) -> None:
    """Write a folder of forty texts."""
    text = shakespeare()
    (folder / "my_texts").mkdir()
    for i in range(40):
        (folder / f"my_texts/{i}.txt").write_text(text[len(text) * i // 40 : len(text) * (i + 1) // 40], "utf-8")


def their_tools(folder: pathlib.Path) -> None:
    """Write a text."""
    (folder / "my_text.txt").write_text(shakespeare()[:200_000], "utf-8")


def search(folder: pathlib.Path) -> None:
    """Write a text, because tinyshakespeare may be neither in $TFM_DATA nor within reach."""
    (folder / "my_text.txt").write_text(shakespeare(), "utf-8")


def corpus(folder: pathlib.Path) -> None:
    """Write a text in three splits."""
    text, ends = shakespeare(), {"train": (0, 8), "valid": (8, 9), "test": (9, 10)}
    (folder / "corpus").mkdir()
    for part, (a, b) in ends.items():
        (folder / f"corpus/{part}.txt").write_text(text[len(text) * a // 10 : len(text) * b // 10], "utf-8")


def your_data(folder: pathlib.Path) -> None:
    """Write notes into a SQLite file, and a text."""
    text = shakespeare()
    with contextlib.closing(sqlite3.connect(folder / "notes.db")) as data, data:
        data.execute("CREATE TABLE notes (id, body)")
        data.executemany("INSERT INTO notes VALUES (?, ?)", enumerate(text[:200_000].split("\n\n")))
    (folder / "letters.txt").write_text(text[-50_000:], "utf-8")


def shakespeare() -> str:
    """Return Shakespeare's text, or the ASCII text of all pages if it is not in $TFM_DATA."""
    file = pathlib.Path(os.environ.get("TFM_DATA", ""), "tinyshakespeare.txt")
    files = [file] if file.is_file() else [*PAGES.values(), *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files).encode("ascii", "ignore").decode()


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def follow(name: str) -> str:
    """Follow the page, and return its commands with their seconds. Exit with the output of the first that fails."""
    page = PAGES[name].read_text(encoding="utf-8")
    shell = "".join(
        blocks(page, "bash")[1 if name == "README" else 0 :]
    )  # .ci/run runs the first block without changes
    commands = [line for line in shell.replace("\\\n", " ").splitlines() if line.startswith("python ")]
    if not commands:
        sys.exit(f"{PAGES[name]} has no command")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for block in blocks(page, "python"):
            if file := re.match(r"# ([\w/]+\.py)\n", block):
                (folder / file[1]).write_text(block, encoding="utf-8")
        if make := globals().get(name):
            make(folder)
        lines = [f"{name}:", *(run(command, folder) for command in commands)]
        for path in re.findall(r"`(runs/[^`\s]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)):
            if name != "README" and not list(folder.glob(path)):
                sys.exit(f"{PAGES[name]} mentions {path}, which does not exist after its commands")
    return "\n".join(lines)


def run(command: str, folder: pathlib.Path) -> str:
    """Run the command with the project's files and this Python, and return it with its seconds.

    A training run takes few steps, and its programs are compiled without optimisation.
    """
    line_of_page, start = command, time.monotonic()
    trains = "launch.py" in command and "--config" in command
    few = (
        WARM
        if "induction" in command and trains
        else FEW
        if trains
        else (*FEWER, "--config.text.source=my_text.txt")
        if "my_search.py" in command
        else ()
    )
    command = command.partition(" #")[0].replace("launch.py", str(ROOT / "launch.py"))  # flags after # would not count
    command = re.sub(r"(?<![\w/])configs/(\w+\.py)", rf"{ROOT}/configs/\1", command)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "XLA_FLAGS": xla}
    line = " ".join([command, *few])
    process = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{line_of_page}\nexit code {process.returncode}:\n{process.stdout[-2000:]}{process.stderr[-2000:]}")
    return f"  {time.monotonic() - start:5.1f} s  {line_of_page}"


def main(names: list[str]) -> None:
    """Follow the named pages, or all."""
    if unknown := [name for name in names if name not in PAGES]:
        sys.exit(f"unknown page {unknown[0]}. Choose from {', '.join(PAGES)}.")
    pages = []
    for page in names or PAGES:
        code = "".join(blocks(PAGES[page].read_text(encoding="utf-8"), r"\w+"))
        needed = [library for name, libraries in OPTIONAL.items() if name in code for library in libraries]
        if missing := [library for library in needed if not importlib.util.find_spec(library)]:
            if names:
                sys.exit(f"{page} needs {missing[0]}")
            print(f"{page}: skipped, because it needs {missing[0]}")
        else:
            pages.append(page)
    with futures.ThreadPoolExecutor(PAGES_AT_ONCE) as pool:
        for lines in pool.map(follow, pages):
            print(lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
