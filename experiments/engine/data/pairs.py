"""Sentence pairs, source and target, in a training and an evaluation part that depend on the sentences alone."""

import hashlib
import os
import pathlib
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.engine import errors, room
from experiments.engine.data import download, split

# name -> (file name, where a person finds it, sha256)
NAMED = {
    "spa-eng": (
        "spa-eng.zip",
        "https://storage.googleapis.com/download.tensorflow.org/data/spa-eng.zip",
        "0c4fd7825d3d872488d38c157f784e035edab4f2ff0df25a2a208790ecb5b58f",
    ),
}
ENDINGS = (".tsv", ".txt")  # of the files of a folder or zip that hold pairs
LARGEST = 2**30  # bytes of text, unpacked
COPIES = 8  # bytes in memory for each of them: strings, of which each has some 50 bytes beside its letters
EVALUATION_SHARE = 0.05
BOM = "\ufeff"

Pair = tuple[str, str]


class Pairs(NamedTuple):
    """Sentences and their translations."""

    name: str
    train: list[Pair]
    evaluation: list[Pair]


def load(source: str, *, data_dir: str = "", reverse: bool = False, share: float = 1.0) -> Pairs:
    """Pairs from a named set or a path: tab-separated UTF-8 lines, in a file, or in a folder's or zip's .tsv and .txt.

    The first column is the source and the second the target (`reverse`: the other way round); further columns are
    ignored, so are empty lines, and files and folders whose names begin with a dot or an underscore. Sentences are in
    Unicode's form NFC. About 5 % of the source sentences are held out, with all their translations; sources that differ
    only in case, punctuation and spaces fall on the same side. `share` of the others is for training.

    Raises:
      UserError: neither a name nor a path that exists; a damaged or dangerous zip, or too large a file; a line that is
      not UTF-8, has no second column or an empty side; a share outside (0, 1]; too few sentences to split.
    """
    if not 0 < share <= 1:
        raise errors.UserError(f"the share of the pairs must be above 0 and at most 1, and {share} is not")
    pairs = [pair for name, content in _contents(_path(source, data_dir)) for pair in _pairs(name, content)]
    if not pairs:
        raise errors.UserError(f"{source} holds no sentence pairs: a line is a sentence, a tab, and its translation")
    if reverse:
        pairs = [(target, source) for source, target in pairs]
    train, evaluation = _apart(pairs, share=EVALUATION_SHARE)
    if share < 1:  # by other digests: by the same ones, those held out would be missing from the smallest
        _, train = _apart(train, share=share, salt="share")
    return Pairs(name=source, train=train, evaluation=evaluation)


def sentence_key(sentence: str) -> str:
    """What two sentences share that differ only in case, punctuation and spaces; without a word, the sentence itself.

    Split by it, for 'Go on!' is no test of a model that was trained on 'Go on.'.
    """
    # Marks (category M) count as letters: without them, words of many scripts would fall together.
    kept = (c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in sentence.casefold())
    return " ".join("".join(kept).split()) or sentence


def _apart(pairs: list[Pair], *, share: float, salt: str = "") -> tuple[list[Pair], list[Pair]]:
    """The pairs but those of about `share` of the sources, and these; another salt makes another choice."""
    out_B = split.held_out([f"{salt}{sentence_key(source)}".encode() for source, _ in pairs], share=share)
    sides = (np.flatnonzero(out_B == side).tolist() for side in (False, True))
    kept, held = ([pairs[b] for b in side] for side in sides)
    return kept, held


def _path(source: str, data_dir: str) -> pathlib.Path:
    """The file of the named set, checked, or the user's own path."""
    if source not in NAMED:
        path = pathlib.Path(os.path.expanduser(source))
        if not source or not os.path.exists(path):
            names = ", ".join(NAMED)
            raise errors.UserError(f"{source!r} is neither a named set of pairs ({names}) nor a path that exists")
        return path
    file_name, url, sha256 = NAMED[source]
    folders = download.places(data_dir)
    path = next((folder / file_name for folder in folders if os.path.isfile(folder / file_name)), None)
    if path is None:
        where = ", ".join(map(str, folders))
        raise errors.UserError(f"{source} was not found in {where}: download {url} into one of these folders")
    found = hashlib.sha256(_read(path)).hexdigest()
    if found != sha256:
        raise errors.UserError(
            f"{path} has sha256 {found}, and {source} has {sha256}: replace it, or name it by its path"
        )
    return path


def _contents(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file with pairs."""
    if os.path.isdir(path):
        try:
            files = [file for file in sorted(path.rglob("*")) if _wanted(file.relative_to(path)) and file.is_file()]
            _check_size(path, sum(file.stat().st_size for file in files))
        except OSError as error:
            raise errors.UserError(f"the folder {path} cannot be read: {error.strerror}") from error
        yield from ((str(file), _read(file)) for file in files)
    elif not os.path.isfile(path):  # reading a pipe or a device could wait forever
        raise errors.UserError(f"{path} is neither a file nor a folder")
    elif zipfile.is_zipfile(path):
        yield from _members(path)
    else:
        _check_size(path, path.stat().st_size)
        yield str(path), _read(path)


def _members(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of a zip's members with pairs; nothing is unpacked to the disk."""
    try:
        with zipfile.ZipFile(path) as file:
            members = [member for member in file.infolist() if not member.is_dir()]
            for member in members:
                _check_member(path, member.filename)
            _check_size(path, sum(member.file_size for member in members))
            for member in members:
                if _wanted(pathlib.PurePosixPath(member.filename)):
                    yield f"{path}:{member.filename}", file.read(member)  # never more than file_size bytes
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise errors.UserError(f"{path} is damaged or not a zip that can be read: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_member(path: pathlib.Path, name: str) -> None:
    """UserError for a member whose path leads out of the zip. (ZipFile has cut names at a NUL.)"""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
        raise errors.UserError(f"{path} has a member that leads out of it, {name!r}: make a zip without such a path")


def _check_size(path: pathlib.Path, size: int) -> None:
    if size > LARGEST:
        raise errors.UserError(f"{path} holds {size} bytes of text, and {LARGEST} are allowed")
    room.check(f"the text in {path}", COPIES * size)


def _wanted(path: pathlib.PurePath) -> bool:
    return path.suffix.lower() in ENDINGS and not any(part.startswith((".", "_")) for part in path.parts)


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror}") from error


def _pairs(name: str, content: bytes) -> Iterator[Pair]:
    """The pairs of a file's lines. Raises UserError that names file and line."""
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise errors.UserError(f"{name}, line {number}: not UTF-8 text: {line[:40]!r}") from error
        columns = unicodedata.normalize("NFC", text.removeprefix(BOM) if number == 1 else text).split("\t")
        if columns == [""]:
            continue
        if len(columns) < 2:
            raise errors.UserError(
                f"{name}, line {number}: no second column (a tab must follow the first): {text[:40]!r}"
            )
        source, target = (column.strip() for column in columns[:2])
        if not source or not target:
            side = "second" if source else "first"
            raise errors.UserError(f"{name}, line {number}: the {side} column is empty")
        yield source, target
