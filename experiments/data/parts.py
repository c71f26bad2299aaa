"""Which part of a corpus a file is, where its name says so: to train on, to evaluate, or a test that is left alone.

Where no name does, the content decides, so that no run, seed or file order can change it.
"""

import hashlib
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.data import files
from experiments.engine import errors

TRAIN, VALID, TEST = "train", "valid", "test"
WORDS = {  # and their usual spellings
    **dict.fromkeys(("train", "training", "trainset"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devset", "newsdev", "eval"), VALID),
    **dict.fromkeys(("test", "testing", "testset", "newstest", "tst", "heldout"), TEST),
}
LEAST = 0.01  # share of all bytes: a requirements/dev.txt among programs is not what they are evaluated on
OTHER = ""  # of no part
DIGITS = "0123456789"
LISTED = 3  # names in a line; of more files their number is told


def of_name(path: pathlib.PurePath) -> str:
    """The part that the names in a path tell, the outermost first; OTHER where none tells one, or two at once.

    One of WORDS, also with a number behind it, stands between . - _ and the ends of a name: train/a.txt,
    wiki.valid.tokens, test2016.en, train-00000-of-00002.txt.
    """
    for name in path.parts:
        words = [word.rstrip(DIGITS) for word in re.split(r"[._-]", name.lower())]
        kinds = {WORDS[word] for word in words if word in WORDS}
        if len(kinds) == 1:
            return kinds.pop()
    return OTHER


def by_names(section: str, found: Sequence[files.File]) -> dict[str, list[files.File]]:
    """Part -> its files, where names tell; else {}, and contents decide.

    Names tell where files are named valid or test, and the larger part of the rest train; or where one is valid or test
    and nothing else (test.txt, val/), and what is evaluated is not too small (LEAST). Files named neither are trained
    on, unless those named train are larger: then they are OTHER, as a README.

    Raises:
      UserError: no file is left to train on. section: of the settings, as text, that can name the parts.
    """
    kinds = [of_name(file.inside) for file in found]
    size, bare = dict.fromkeys(kinds, 0), set()
    for file, kind in zip(found, kinds, strict=True):
        size[kind] += file.size
        if kind in (VALID, TEST):
            bare |= {name.lower().split(".")[0].rstrip(DIGITS) for name in file.inside.parts}
    mostly = size.get(TRAIN, 0) > size.get(OTHER, 0)
    whole = bare & WORDS.keys() and size[evaluated(size)] >= LEAST * sum(size.values())
    if not bare or not (mostly or whole):
        return {}
    if not mostly:
        kinds = [part or TRAIN for part in kinds]
    if TRAIN not in kinds:
        raise errors.UserError(
            f"every file is named as one to evaluate ({listed(found)}): {section}.source must have some to train on"
        )
    return {part: [file for file, kind in zip(found, kinds, strict=True) if kind == part] for part in kinds}


def evaluated(parts: Mapping[str, object]) -> str:
    """The part that is evaluated: valid, where there is one."""
    return VALID if VALID in parts else TEST


def told(name: str, how: str, parts: Mapping[str, Sequence]) -> str:
    """A line for the person: which file became what, and how it was decided."""
    alone = "left alone" if evaluated(parts) == VALID else "to evaluate"
    what = {TRAIN: "to train on", VALID: "to evaluate", TEST: alone, OTHER: "left out"}
    return f"{name}: {how} " + "; ".join(f"{listed(parts[part])} {what[part]}" for part in what if part in parts)


def listed(names: Sequence) -> str:
    """'a.txt, b.txt', or 'a.txt and 7 more'."""
    return ", ".join(map(str, names)) if len(names) <= LISTED else f"{names[0]} and {len(names) - 1:,} more"


def held_out(contents: Sequence[bytes], *, share: float) -> np.ndarray:
    """A boolean per content: True for about `share` of the different contents, those with the smallest sha256.

    Equal contents fall on the same side. Neither side is empty: at least the smallest digest is held out, and never
    the largest. UserError for fewer than two different contents.
    """
    digest_B = [hashlib.sha256(content).digest()[:8] for content in contents]
    different = sorted(set(digest_B))
    if len(different) < 2:
        raise errors.UserError("there are not two examples that differ, so none can be held out for evaluation")
    bound = min(max(int(share * 2**64).to_bytes(8, "big"), different[1]), different[-1])
    return np.array([digest < bound for digest in digest_B])
