"""What the models are given: random words and pixels. No step's time depends on their values, and nothing is learned.

All participants get batches of NumPy arrays that are ready before the clock starts; each puts them where it computes.
"""

import pathlib
import string

import numpy as np

from benchmarks import sizes

WINDOWS = 200  # windows of text; ours holds a tenth of it out
IMAGES = 2048  # of each part


def words(size: sizes.Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches (w_BN, target_BN), int64 as PyTorch wants them: the target is the next word."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, size.W, (sizes.KEPT, size.B, size.N + 1))
    return [(batch[:, :-1].copy(), batch[:, 1:].copy()) for batch in text]


def images(size: sizes.Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches (image_BYXZ, label_B), float32 with mean 0 and deviation 1, and int64."""
    rng = np.random.default_rng(0)
    shape = (size.B, size.Y, size.Y, 1)
    return [(rng.standard_normal(shape, np.float32), rng.integers(0, size.C, size.B)) for _ in range(sizes.KEPT)]


def prompt(size: sizes.Workload) -> np.ndarray:
    """Prompts of one word each, (B, 1)."""
    return np.zeros((size.B, 1), np.int64)


def write_text(file: pathlib.Path, size: sizes.Workload) -> str:
    """A text of as many different characters as the vocabulary has words; each comes often enough to be trained on."""
    alphabet = "\n" + string.printable
    if size.W > len(alphabet):
        alphabet = "".join(map(chr, range(0x10000, 0x10000 + size.W)))  # behind the last surrogate
    words = np.random.default_rng(0).integers(0, size.W, max(WINDOWS * size.N, 20 * size.W))
    words[: size.W] = np.arange(size.W)  # none is missing
    file.write_bytes("".join(np.array(list(alphabet[: size.W]))[words]).encode())
    return str(file)


def write_images(file: pathlib.Path, size: sizes.Workload) -> str:
    """Images and labels as the arrays x_train, y_train, x_test, y_test of an .npz."""
    rng, arrays = np.random.default_rng(0), {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = rng.integers(0, 256, (IMAGES, size.Y, size.Y), np.uint8)
        arrays[f"y_{part}"] = (np.arange(IMAGES) % size.C).astype(np.int64)
    np.savez(file, **arrays)
    return str(file)
