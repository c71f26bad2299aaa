"""Small stand-ins for the data of configs. The compiled programs, and the time of a step, do not depend on the data.

A text has 65 characters, as many as tinyshakespeare; a tokenizer has GPT-2's 50,257 tokens; pairs are short sentences
of thousands of words; images have ten classes.
"""

import itertools
import json
import os
import pathlib
import string
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.config import settings as configs

IMAGES = {  # image.source -> number and shape of the images
    "mnist": (640, 28, 28),
    "fashion_mnist": (640, 28, 28),
    "hub:uoft-cs/cifar10": (640, 32, 32, 3),
    "photographs": (128, 224, 224, 3),  # no data set: for estimates of models of such images
}


def write(config: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write stand-ins for the data sets that the config names. Return the settings that name the stand-ins.

    A config that starts from a user's model starts from random weights.
    """
    values = configs.flat(config)
    writers = {("text.source", "tinyshakespeare"): write_text, ("pairs.source", "spa-eng"): write_pairs}
    writers |= {("image.source", source): write_images for source in IMAGES}
    writers["text.tokenizer", "gpt2/tokenizer.json"] = write_tokenizer
    changes = {"init_fresh": ""} if values["init_fresh"] and not values["init_from"] else {}
    for (key, value), write_file in writers.items():
        if values.get(key) == value:
            changes[key] = str(folder / f"{os.getpid()}_{key}{'.npz' if value in IMAGES else '.txt'}")
            write_file(pathlib.Path(changes[key]), value)
    if values.get("text.source") == "configs.arms.padded:read_speeches":
        changes["text.source"] = "benchmarks.stand_ins:read_speeches"
    return changes


def read_speeches() -> tuple[list[str], list[str]]:
    """Return documents to train on and to evaluate."""
    return [make_text()] * 90, [make_text()] * 10


def make_words() -> list[str]:
    """Return 4,000 words of four letters."""
    letters = itertools.product("bcdfgklmnprst", "aeiou", "bcdfgklmnprst", "aeiou")
    return ["".join(word) for word in itertools.islice(letters, 4000)]


def make_text() -> str:
    """Return 15,000 of 65 characters."""
    return (string.ascii_letters + string.digits + " \n.")[:65] + " ".join(make_words()[:3000]) + "\n"


def write_text(path: pathlib.Path, source: str) -> None:
    path.write_text(make_text() * 20, encoding="utf-8")


def write_tokenizer(path: pathlib.Path, source: str) -> None:
    model = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(50257)}, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    path.write_text(json.dumps({"model": model, "pre_tokenizer": byte_level}), encoding="utf-8")


def write_pairs(path: pathlib.Path, source: str) -> None:
    words = make_words()
    lines = (f"{word} {words[-i]}.\t{word[::-1]} {words[i // 2][::-1]}.\n" for i, word in enumerate(words))
    path.write_text("".join(lines), encoding="utf-8")


def write_images(path: pathlib.Path, source: str) -> None:
    arrays, (n, *shape) = {}, IMAGES[source]
    for part, size in (("train", n), ("test", n // 2)):
        arrays[f"x_{part}"] = np.resize(np.arange(251, dtype=np.uint8), (size, *shape))
        arrays[f"y_{part}"] = np.arange(size) % 10
    np.savez(path, **arrays)
