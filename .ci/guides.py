"""Run what README.md and the guides say to do, each page in a folder of its own, but with few steps.

python .ci/guides.py [PAGE ...]

PAGE: README, or the name of a guide. Without one: README and all guides that need nothing which is not installed.

In order: the user's files that a page speaks of are made here, by the function of its name; every Python block that
begins with `# my_file.py` becomes that file; every line `python ...` of the blocks for a shell is run; and what stands
in backquotes and begins with runs/ must be there then.
"""

import importlib.util
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
from PIL import Image
from sklearn import datasets

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {"README": ROOT / "README.md", **{file.stem: file for file in sorted((ROOT / "docs/guides").glob("*.md"))}}
FEW = ("--config.train.steps=80", "--config.train.evaluate_every=40")
NEEDED = ("transformers",)  # of what is not installed everywhere


def README(folder: pathlib.Path) -> None:
    """Text, images, and the two lines for a notebook, which are no command."""
    page = PAGES["README"].read_text(encoding="utf-8")
    (notebook,) = re.findall(r"^```python\n(import launch\n.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (folder / "notebook.py").write_text(notebook.replace("configs/", f"{ROOT}/configs/"), encoding="utf-8")
    (folder / "my_text.txt").write_text(page * 3, encoding="utf-8")
    draw = np.random.default_rng(0)
    images = {f"x_{part}": draw.integers(0, 256, (300, 12, 12), np.uint8) for part in ("train", "test")}
    np.savez(folder / "my_images.npz", **images, **{f"y_{part}": np.arange(300) % 3 for part in ("train", "test")})


def translation(folder: pathlib.Path) -> None:
    """Parallel files of English and Spanish: every hundredth pair of spa-eng.zip; where it is not there, numbers."""
    numbers = zip("one two three four five six".split(), "uno dos tres cuatro cinco seis".split(), strict=True)
    pairs = [[" ".join(side) for side in zip(*some, strict=True)] for some in itertools.product(numbers, repeat=4)]
    file = pathlib.Path(os.environ.get("TFM_DATA", ""), "spa-eng.zip")
    if file.is_file():
        with zipfile.ZipFile(file) as zipped:
            pairs = [line.split("\t") for line in zipped.read("spa-eng/spa.txt").decode().splitlines()[::100]]
    (folder / "corpus").mkdir()
    for part, some in {"test": pairs[::20], "valid": pairs[1::20], "train": pairs[2::20] + pairs[3::4]}.items():
        for i, language in enumerate(("en", "es")):
            (folder / "corpus" / f"{part}.{language}").write_text("".join(f"{pair[i]}\n" for pair in some), "utf-8")


def photographs(folder: pathlib.Path) -> None:
    """Parts of the two photographs that scikit-learn has, in two classes; and a new one."""
    draw, photographs = np.random.default_rng(0), datasets.load_sample_images().images
    for name, image_YX3 in zip(("temple", "flower"), photographs, strict=True):
        (folder / "photographs" / name).mkdir(parents=True)
        for i in range(150):
            rows, columns = draw.integers(24, 64, 2)
            top, left = draw.integers(0, image_YX3.shape[0] - rows), draw.integers(0, image_YX3.shape[1] - columns)
            part = Image.fromarray(image_YX3[top : top + rows, left : left + columns])
            part.save(folder / ("new.jpg" if (i, name) == (149, "flower") else f"photographs/{name}/{i}.jpg"))


def finetune_bert(folder: pathlib.Path) -> None:
    """A small BERT with random weights, as the library saves one, and sentences of two classes."""
    import transformers  # what the page needs

    good, bad = "good great fine warm bright".split(), "bad dull poor slow cold".split()
    things = "film story actor scene ending song".split()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "is", "was", "and", *things, *good, *bad]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "bert")
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder / "bert")
    rows = ["text,label"]
    for kind, adjectives in (("praise", good), ("blame", bad)):
        said = itertools.product(things, ("is", "was"), adjectives, adjectives)
        rows += [f"the {thing} {tense} {one} and {other},{kind}" for thing, tense, one, other in said]
    (folder / "reviews.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def gpt_on_your_text(folder: pathlib.Path) -> None:
    """A folder of forty texts."""
    text = shakespeare()
    (folder / "my_texts").mkdir()
    for i in range(40):
        (folder / f"my_texts/{i}.txt").write_text(text[len(text) * i // 40 : len(text) * (i + 1) // 40], "utf-8")


def corpus(folder: pathlib.Path) -> None:
    """A text in three parts."""
    text, ends = shakespeare(), {"train": (0, 8), "valid": (8, 9), "test": (9, 10)}
    (folder / "corpus").mkdir()
    for part, (a, b) in ends.items():
        (folder / f"corpus/{part}.txt").write_text(text[len(text) * a // 10 : len(text) * b // 10], "utf-8")


def shakespeare() -> str:
    """Where it is not there, the pages, without letters that are in one of three parts alone."""
    file = pathlib.Path(os.environ.get("TFM_DATA", ""), "tinyshakespeare.txt")
    files = [file] if file.is_file() else [*PAGES.values(), *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files).encode("ascii", "ignore").decode()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def follow(name: str) -> None:
    """All that the page says. Exits with the output of what fails."""
    page = PAGES[name].read_text(encoding="utf-8")
    shell = "".join(blocks(page, "bash")[1 if name == "README" else 0 :])  # its first is run as it stands, by .ci/run
    commands = [line for line in shell.replace("\\\n", " ").splitlines() if line.startswith("python ")]
    if name == "README":
        commands.append("python notebook.py")
    if not commands:
        sys.exit(f"{PAGES[name]} has no command")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for block in blocks(page, "python"):
            if file := re.match(r"# ([\w/]+\.py)\n", block):
                (folder / file[1]).write_text(block, encoding="utf-8")
        if make := globals().get(name):
            make(folder)
        for command in commands:
            run(command, folder)
        for path in re.findall(r"`(runs/[^`\s]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)):
            if name != "README" and not list(folder.glob(path)):
                sys.exit(f"{PAGES[name]} speaks of {path}, and it is not there")


def run(command: str, folder: pathlib.Path) -> None:
    """The command with the project's files and this Python, a training with few steps."""
    print(f"  {command}", flush=True)
    trains = "launch.py" in command and "--config" in command
    command = command.replace("launch.py", str(ROOT / "launch.py"))
    command = re.sub(r"(?<![\w/])configs/(\w+\.py)", rf"{ROOT}/configs/\1", command)
    here = pathlib.Path(sys.executable).parent  # whose `python` it is
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{here}:{os.environ['PATH']}"}
    words = " ".join([command, *(FEW if trains else ())])
    ended = subprocess.run(words, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"exit code {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in PAGES]:
        sys.exit(f"there is no page {unknown[0]}: the pages are {', '.join(PAGES)}")
    for name in names or PAGES:
        code = "".join(blocks(PAGES[name].read_text(encoding="utf-8"), r"\w+"))
        if missing := [one for one in NEEDED if one in code and not importlib.util.find_spec(one)]:
            if names:
                sys.exit(f"{name} needs {missing[0]}")
            print(f"{name}: left out, it needs {missing[0]}")
            continue
        print(f"{name}:", flush=True)
        follow(name)


if __name__ == "__main__":
    main(sys.argv[1:])
