"""Read files in folders and zips, compressed or not, and split a data set into a training, evaluation and test part.

File names decide which part a file is. Without such names its content decides, so that no run, seed or file order
changes the parts. The test part is not used if there is a validation part.
"""

import codecs
import contextlib
import functools
import gzip
import hashlib
import json
import os
import pathlib
import re
import stat
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from experiments.config import disk, errors

CHUNK = 2**20  # bytes read at a time
LONGEST = 2**26  # bytes of a line, and characters of a cell of a table: longer ones are damaged files
# A compressed file that unpacks to more than both is no data: text becomes 3 to 20 times larger, zeros 1,000 times.
BOMB, BOMB_RATIO = 2**28, 200  # bytes, and a multiple of the size of the packed file
# Names of files and folders that programs put next to data; names that begin with a full stop belong to them too.
NOT_DATA = {"__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found"}
NOT_DATA |= {"__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

TRAIN, VALID, TEST = "train", "valid", "test"
PARTS = {  # usual spelling -> part
    **dict.fromkeys(("train", "training", "trainset"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devset", "newsdev", "eval"), VALID),
    **dict.fromkeys(("test", "testing", "testset", "newstest", "tst", "heldout"), TEST),
}
LEAST = 0.01  # share of all bytes in an evaluation part: requirements/dev.txt among programs is not one
OTHER = ""  # no part
DIGITS = "0123456789"
LISTED = 3  # names in a line


class File(NamedTuple):
    """A file on the disk or in a zip, or a split or row of a data set. It is printed as its path inside its source."""

    inside: pathlib.PurePath  # path inside the folder or zip; empty if the source is this file itself
    name: str  # in messages
    size: int  # bytes, unpacked from a zip; 0 if it is not a regular file
    open: Callable[[], BinaryIO]
    translation: "File | None" = None  # the file whose lines are the translations of this file's lines
    version: str = ""  # identifies the rows of a data set, which `open` then returns; "" for a file
    label: str = ""  # the class of what it contains; "" if it is not known

    def __str__(self) -> str:
        name = str(self.inside) if self.inside.parts else self.name
        return f"{name} -> {self.translation}" if self.translation else name


class Rows(NamedTuple):
    """Pairs of texts, or texts with the names of their classes, in two parts."""

    name: str
    train: list[tuple[str, str]]
    evaluation: list[tuple[str, str]]
    description: str  # a line on the part that each file became, '' if there is nothing to print
    classes: tuple[str, ...] = ()  # all names of classes, in order

    @property
    def sha256(self) -> str:
        return sha256(json.dumps([self.train, self.evaluation]))


def on_disk(path: pathlib.Path, inside: str | pathlib.PurePath = "") -> File:
    """Return the file at a path. inside: its path inside the folder of the source; "": the file is the source."""
    with disk.reading(path):
        status = path.stat()
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return File(pathlib.PurePath(inside), str(path), size, functools.partial(disk.open_regular, path))


def is_data(inside: pathlib.PurePath) -> bool:
    """Return False if a name in the path `inside` is in NOT_DATA, or begins with a full stop (hidden)."""
    return not any(step.startswith(".") or step.lower() in NOT_DATA for step in inside.parts)


def find(source: str, alternatives: str, hint: str = "") -> list[File]:
    """Return the file at a path, or the files of a folder. Raises UserError if the path does not exist.

    alternatives: the other values that are allowed for `source`. hint: the end of the message.
    """
    path = pathlib.Path(os.path.expanduser(source))
    if not source or not os.path.exists(path):
        raise errors.UserError(f"{source!r} is neither {alternatives} nor a path that exists ({path.absolute()}){hint}")
    return folder(path) if os.path.isdir(path) else [on_disk(path)]


def folder(path: pathlib.Path) -> list[File]:
    """Return the files in a folder and below, sorted, except links to folders and what is not data (`is_data`).

    Their paths inside the folder are in Unicode's form NFC: folders of macOS may have the form NFD.
    """

    def fail(error: OSError) -> None:
        raise error

    paths = []
    with disk.reading(path):
        for parent, folders, names in os.walk(path, onerror=fail):
            folders[:] = [name for name in folders if is_data(pathlib.PurePath(name))]
            paths += [pathlib.Path(parent, name) for name in names if is_data(pathlib.PurePath(name))]
    files = [on_disk(file, unicodedata.normalize("NFC", str(file.relative_to(path)))) for file in sorted(paths)]
    return sorted(files, key=lambda file: file.inside)


def members(path: pathlib.Path, zips: contextlib.ExitStack) -> list[File]:
    """Return the members of a zip that are data (`is_data`), in the zip's order. `zips` keeps the zip open.

    Members are read without unpacking. Raises UserError if the zip cannot be read, or if a member is too large.
    """
    with disk.reading(path):
        file = zips.enter_context(zipfile.ZipFile(zips.enter_context(disk.open_regular(path))))
    visible = []
    for member in file.infolist():
        inside, name = pathlib.PurePosixPath(member.filename), f"{path}:{member.filename}"
        if not member.is_dir() and is_data(inside):
            check_size(name, member.file_size, member.compress_size)
            visible.append(File(inside, name, member.file_size, functools.partial(file.open, member)))
    return visible


def describe_skipped(source: str | pathlib.Path, files: Sequence[File], used: Sequence[File]) -> list[str]:
    """Return lines about the unused files of a source, by their suffixes, and about its links to folders."""
    paths, lines, top = {file.inside for file in used}, [], os.path.expanduser(source)
    suffixes = Counter(file.inside.suffix.lower() or "no ending" for file in files if file.inside not in paths)
    if suffixes:
        counts = ", ".join(f"{n:,} {suffix}" for suffix, n in suffixes.most_common(LISTED))
        lines.append(f"files skipped: {counts}" + ", ..." * (len(suffixes) > LISTED))
    folders = [os.path.join(parent, name) for parent, names, _ in os.walk(top) for name in names]
    if links := [os.path.relpath(folder, top) for folder in folders if os.path.islink(folder)]:
        lines.append(f"links to folders not followed: {len(links):,}, {join_names(links)}")
    return lines


def pieces(file: File, *, text: bool = True) -> Iterator[bytes]:
    """Yield the content of a file in chunks, decompressed if it begins like gzip or zstd, whatever its name.

    text: remove the byte order mark, and refuse NUL. Raises UserError also for a file that unpacks to too much.
    """
    with disk.reading(file.name, RuntimeError), file.open() as content:  # RuntimeError: a zip that needs a password
        begin, n = content.peek(len(ZSTD)), 0
        if begin.startswith(GZIP):
            content = gzip.GzipFile(fileobj=content)
        elif begin.startswith(ZSTD):
            with require_extra(f"{file.name}, compressed with zstd,"):
                import pyarrow
            content = pyarrow.input_stream(content, compression="zstd")
        for chunk in iter(lambda: content.read(CHUNK), b""):
            if text and b"\0" in chunk:
                nul = f"it has a NUL at byte {n + chunk.index(0)}, as binary files and text in UTF-16 do"
                raise ValueError(f"not text in UTF-8: {nul}. Convert or remove it.")
            yield chunk.removeprefix(codecs.BOM_UTF8) if text and n == 0 else chunk
            n += len(chunk)
            if file.size and begin.startswith((GZIP, ZSTD)):
                check_size(file.name, n, file.size)


def check_size(name: str, unpacked: int, packed: int) -> None:
    """Raise UserError if a packed file has more than BOMB bytes unpacked, and more than BOMB_RATIO times its size."""
    sizes = f"{disk.size(packed)} unpack to at least {disk.size(unpacked)}, more than {BOMB_RATIO} times as much"
    errors.refuse((unpacked > max(BOMB, BOMB_RATIO * packed), f"{name}: {sizes}. Remove or unpack the file."))


def lines(file: File) -> Iterator[str]:
    """Yield the lines of a text, without line ends (\\n, or \\r in a file without \\n).

    A \\r before \\n stays. Raises UserError for a file that cannot be read or unpacks to too much. NUL, bytes
    that are not UTF-8, and a line of more than LONGEST bytes raise it too.
    """
    rest, size, number = [], 0, 1  # the pieces of the line that has not ended yet, and their bytes
    for piece in pieces(file):
        *complete, last = piece.split(b"\n")
        for end in complete:
            yield decode(file, b"".join([*rest, end]), number)
            rest, size, number = [], 0, number + 1
        rest.append(last)
        size += len(last)
        if size > LONGEST:
            raise errors.UserError(f"{file.name}: line {number:,} has more than {disk.size(LONGEST)}. Shorten it.")
    if size:
        line = decode(file, b"".join(rest), number)
        yield from line.removesuffix("\r").split("\r") if number == 1 else [line]


def decode(file: File, content: bytes, line: int = 1) -> str:
    """Return UTF-8 bytes of a file as text. line: the number of their first line. Raises UserError if not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        problem = f"not text in UTF-8 in line {line:,} ({content[error.start : error.end]!r})"
        raise errors.UserError(f"{file.name}: {problem}. Convert it to UTF-8.") from error


def read(file: File) -> bytes:
    """Return the bytes of a file, decompressed."""
    return b"".join(pieces(file, text=False))


def load_text(file: File) -> str:
    """Return the content of a text. Raises UserError if it is not UTF-8, or has a NUL."""
    return decode(file, b"".join(pieces(file)))


@contextlib.contextmanager
def require_extra(feature: str, extra: str = "hub") -> Iterator[None]:
    """Context manager: raise UserError if an import in the block fails.

    feature: what needs the package, for the message. extra: the optional dependencies that contain the package.
    """
    try:
        yield
    except ImportError as error:
        raise errors.UserError(f'{feature} needs the package {error.name}. Run: pip install -e ".[{extra}]"') from error


def part_of_name(path: pathlib.PurePath) -> str:
    """Return the part of a file: its outermost folder or file name that has a part decides. OTHER if no name has one.

    A name has a part if a spelling in PARTS, perhaps followed by digits, stands between . - _ and the ends of the name:
    wiki.valid.tokens, test2016.en, train-0-of-2.txt. A name with two different parts counts as one without.
    """
    for name in path.parts:
        stems = [piece.rstrip(DIGITS) for piece in re.split(r"[._-]", name.lower())]
        kinds = {PARTS[stem] for stem in stems if stem in PARTS}
        if len(kinds) == 1:
            return kinds.pop()
    return OTHER


def split_by_names(section: str, files: Sequence[File]) -> dict[str, list[File]]:
    """Return part -> its files if names decide the parts, else {}. Raises UserError if no file is left to train on.

    Names decide if some files are named valid or test, and files named train have more bytes than files of no part.
    Names also decide if one is just valid or test (test.txt, val/), and at least 1 % of all bytes are evaluated.
    Files of no part are trained on, unless files named train have more bytes: then they are OTHER, like a README.
    section: the section of the config, for the message.
    """
    kinds = [part_of_name(file.inside) for file in files]
    size, bare = dict.fromkeys(kinds, 0), set()
    for file, kind in zip(files, kinds, strict=True):
        size[kind] += file.size
        if kind in (VALID, TEST):
            bare |= {name.lower().split(".")[0].rstrip(DIGITS) for name in file.inside.parts}
    mostly = size.get(TRAIN, 0) > size.get(OTHER, 0)
    large = bare & PARTS.keys() and (size.get(VALID) or size.get(TEST, 0)) >= LEAST * sum(size.values())
    if not bare or not (mostly or large):
        return {}
    if not mostly:
        kinds = [part or TRAIN for part in kinds]
    problem = f"every file is named as one to evaluate ({join_names(files)})"
    errors.refuse((TRAIN not in kinds, f"{problem}. {section}.source needs files to train on."))
    return {part: [file for file, kind in zip(files, kinds, strict=True) if kind == part] for part in kinds}


def used_parts(parts: Mapping[str, Any]) -> list[Any]:
    """Return [the training part, the part to evaluate (valid, or else test)], without a part that is missing."""
    return [parts[part] for part in (TRAIN, VALID if VALID in parts else TEST) if part in parts]


def split_rows(
    name: str, by_name: Mapping, files: list[File], rows: Callable, *, form: str, share: float, key: Callable = str
) -> Rows:
    """Return the rows of the files in two parts: those of `by_name` (`split_by_names`), or if it is empty, by content.

    rows(file) yields pairs of texts. By content, about this share of the rows is held out; rows whose first texts have
    the same `key` stay together. form: what the rows are, for messages. Raises UserError if a part has no row, or if
    rows that are split by content all have the same key.
    """
    used = used_parts(by_name) if by_name else [files]
    parts = [[row for file in group for row in rows(file)] for group in used]
    for group, part in zip(used, parts, strict=True):
        files_of_part = f" ({join_names(group)})" if by_name else ""
        errors.refuse((not part, f"{name}{files_of_part} has no {form}"))
    keys = [[key(first) for first, _ in part] for part in parts]
    if by_name:
        return Rows(name, *parts, describe_parts(name, "by their names,", by_name) + describe_repeated(*keys))
    return Rows(name, *divide(parts[0], [digest(key.encode()) for key in keys[0]], share=share), "")


def describe_repeated(trained: Iterable, held_out: Iterable) -> str:
    """Return such as " (3 of 20 held-out texts are also in the training data)", or "" if no held-out text is.

    trained, held_out: a key for each text, equal for equal texts.
    """
    keys, held_out = {*trained}, [*held_out]
    n = sum(key in keys for key in held_out)
    return f" ({n:,} of {len(held_out):,} held-out texts are also in the training data)" if n else ""


def describe_parts(name: str, decision: str, parts: Mapping[str, Sequence]) -> str:
    """Return a line such as "wiki: by their names, a.txt to train on; b.txt to evaluate". parts: part -> its files."""
    test = "not used" if VALID in parts else "to evaluate"
    uses = {TRAIN: "to train on", VALID: "to evaluate", TEST: test, OTHER: "left out"}
    phrases = (f"{join_names(parts[part])} {uses[part]}" for part in uses if part in parts)
    return f"{name}: {decision} " + "; ".join(phrases)


def join_names(names: Sequence) -> str:
    """Return 'a.txt, b.txt', or 'a.txt and 7 more' for more than LISTED names."""
    return ", ".join(map(str, names)) if len(names) <= LISTED else f"{names[0]} and {len(names) - 1:,} more"


def join_lines(name: str, description: str, lines: Iterable[str]) -> str:
    """Return the description of a data set if it has one, and then each of the lines with "name: " in front."""
    return "\n".join(filter(None, [description, *(f"{name}: {line}" for line in lines)]))


def divide(rows: Sequence, digests: Iterable[bytes], *, share: float) -> list[list]:
    """Return the rows to train on, and those that are held out: about `share` of the different contents.

    digests: of the rows' contents (`digest`). Rows with the smallest ones are held out, so that equal contents fall on
    the same side. Neither side is empty. Raises UserError if all contents are equal.
    """
    digests = [*digests]
    different = sorted({*digests})
    errors.refuse((len(different) < 2, "the data needs two examples that differ, so that one can be held out"))
    bound = min(max(int(share * 2**64).to_bytes(8, "big"), different[1]), different[-1])
    sides = [[b for b, digest in enumerate(digests) if (digest < bound) == is_out] for is_out in (False, True)]
    return [[rows[b] for b in side] for side in sides]


def digest(content: bytes) -> bytes:
    """Return the first eight bytes of the sha256."""
    return hashlib.sha256(content).digest()[:8]


def sha256(*pieces: str | np.ndarray) -> str:
    """Return the sha256 of texts and arrays. It also depends on their order, types and shapes."""
    total = hashlib.sha256()
    for piece in pieces:
        array = np.frombuffer(piece.encode(), np.uint8) if isinstance(piece, str) else np.ascontiguousarray(piece)
        total.update(f"{array.dtype.str} {array.shape}".encode())
        total.update(array)
    return total.hexdigest()
