"""Read files of text in folders and zips, packed or not, and divide a corpus into parts: to train on, to evaluate, or a
test that is left alone. If no name tells the part, the content decides: no run, seed or file order can change it.
"""

import codecs
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from experiments.engine import disk, errors

CHUNK = 2**20  # bytes read at a time
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
EXTRA = 'pip install -e ".[hub]"'

TRAIN, VALID, TEST = "train", "valid", "test"
PARTS = {  # with their usual spellings
    **dict.fromkeys(("train", "training", "trainset"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devset", "newsdev", "eval"), VALID),
    **dict.fromkeys(("test", "testing", "testset", "newstest", "tst", "heldout"), TEST),
}
LEAST = 0.01  # share of all bytes: a requirements/dev.txt among programs is not what they are evaluated on
OTHER = ""  # not a part
DIGITS = "0123456789"
LISTED = 3  # names in a line


class File(NamedTuple):
    """A file on the disk or in a zip; shown by its path inside the folder or zip, if it is in one."""

    inside: pathlib.PurePath
    name: str  # in messages
    size: int  # bytes, unpacked from a zip; 0 if it is not a regular file
    open: Callable[[], BinaryIO]
    beside: "File | None" = None  # the file whose lines are the translations of this one's
    version: str = ""  # of a data set's rows, which `open` gives: the same for the same rows

    def __str__(self) -> str:
        return (str(self.inside) if self.inside.parts else self.name) + (f" -> {self.beside}" if self.beside else "")


class Rows(NamedTuple):
    """Pairs of texts, in two parts."""

    name: str
    train: list[tuple[str, str]]
    evaluation: list[tuple[str, str]]
    said: str  # the part that each file became, '' if there is nothing to print

    @property
    def sha256(self) -> str:
        return sha256(json.dumps([self.train, self.evaluation]))


def on_disk(path: pathlib.Path, inside: str | pathlib.PurePath = "") -> File:
    """Return the file at a path."""
    with disk.reading(path):
        status = path.stat()
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return File(pathlib.PurePath(inside), str(path), size, functools.partial(open, path, "rb"))


def folder(path: pathlib.Path, hidden: tuple[str, ...]) -> list[File]:
    """Return the files in a folder and all below, sorted, except links to folders, and names that begin with
    `hidden`."""

    def fail(error: OSError) -> None:
        raise error

    paths = []
    with disk.reading(path):
        for parent, folders, names in os.walk(path, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(hidden)]
            paths += [pathlib.Path(parent, name) for name in names if not name.startswith(hidden)]
    return [on_disk(file, file.relative_to(path)) for file in sorted(paths)]


def members(path: pathlib.Path, zips: contextlib.ExitStack, hidden: tuple[str, ...]) -> list[File]:
    """Return the members of a zip, like `folder`. Nothing is unpacked to the disk. zips: keeps the zip open."""
    with disk.reading(path):
        file = zips.enter_context(zipfile.ZipFile(path))
    found = []
    for member in file.infolist():
        inside, name = pathlib.PurePosixPath(member.filename), f"{path}:{member.filename}"
        if not member.is_dir() and not any(step.startswith(hidden) for step in inside.parts):
            found.append(File(inside, name, member.file_size, functools.partial(file.open, member)))
    return found


def skipped(path: pathlib.Path, every: Sequence[File], used: Sequence[File]) -> list[str]:
    """Return lines about the files of a folder that are not used, by the ends of their names, and about links to
    folders, which are not followed."""
    there = {file.inside for file in used}
    ends = Counter(file.inside.suffix.lower() or "no ending" for file in every if file.inside not in there)
    folders = [pathlib.Path(parent, name) for parent, names, _ in os.walk(path) for name in names]
    links = [folder.relative_to(path) for folder in folders if folder.is_symlink()]
    shown = ", ".join(f"{n:,} {end}" for end, n in ends.most_common(LISTED)) + ", ..." * (len(ends) > LISTED)
    lines = [f"files skipped: {shown}"] * bool(ends)
    return lines + [f"links to folders not followed: {len(links):,}, {listed(links)}"] * bool(links)


def pieces(file: File, *, text: bool = True, utf8: bool = True) -> Iterator[bytes]:
    """Yield the content of a file in chunks; unpacked if it begins like gzip or zstd, whatever its name.

    text: leave out the byte order mark, and refuse content that is not text. utf8: refuse other encodings."""
    with disk.reading(file.name, RuntimeError), file.open() as packed:  # RuntimeError: a zip that needs a password
        content = unpack(file.name, packed)
        chunks = iter(lambda: content.read(CHUNK), b"")
        yield from check_text(file.name, chunks, utf8=utf8) if text else chunks


def unpack(name: str, packed: BinaryIO) -> BinaryIO:
    """Return the file, or the unpacked content of a gzip or zstd file."""
    begin = packed.peek(len(ZSTD))
    if begin.startswith(ZSTD):
        with extra(f"{name}, packed with zstd,"):
            import pyarrow
        return pyarrow.input_stream(packed, compression="zstd")
    return gzip.GzipFile(fileobj=packed) if begin.startswith(GZIP) else packed


def check_text(name: str, chunks: Iterable[bytes], *, utf8: bool) -> Iterator[bytes]:
    """Yield the chunks of a text, without the byte order mark. Raises UserError for NUL, and if utf8 for other
    bytes."""
    n, line, decoder = 0, 1, codecs.getincrementaldecoder("utf-8")()
    for chunk in itertools.chain(chunks, [b""]):
        if b"\0" in chunk:
            wrong = f"it holds a NUL at byte {n + chunk.index(0)}, as binary files and text in UTF-16 do"
            raise errors.UserError(f"{name} is not text in UTF-8: {wrong}. Convert it or leave it out")
        try:
            decoder.decode(chunk if utf8 else b"", final=not chunk)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            wrong = f"not UTF-8 text in line {line:,} ({error.object[error.start : error.end]!r})"
            raise errors.UserError(f"{name} is {wrong}: convert it") from error
        if chunk:
            yield chunk.removeprefix(codecs.BOM_UTF8) if n == 0 else chunk
        n, line = n + len(chunk), line + chunk.count(b"\n")


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text in pieces, without their ends."""
    rest = b""
    for piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        yield from complete
    if rest:
        yield rest


def read(file: File, *, text: bool = True) -> bytes:
    """Return all `pieces` of a file."""
    return b"".join(pieces(file, text=text))


@contextlib.contextmanager
def extra(what: str) -> Iterator[None]:
    """Raise UserError if an import in the block fails."""
    try:
        yield
    except ImportError as error:
        raise errors.UserError(f"{what} needs the package {error.name}: {EXTRA}") from error


def of_name(path: pathlib.PurePath) -> str:
    """Return the part that a path tells, from its outermost name that tells one; OTHER if none does, or two at once.

    One of PARTS stands between . - _ and the ends of a name: wiki.valid.tokens, test2016.en, train-0-of-2.txt."""
    for name in path.parts:
        words = [word.rstrip(DIGITS) for word in re.split(r"[._-]", name.lower())]
        kinds = {PARTS[word] for word in words if word in PARTS}
        if len(kinds) == 1:
            return kinds.pop()
    return OTHER


def by_names(section: str, found: Sequence[File]) -> dict[str, list[File]]:
    """Return part -> its files if names tell the parts, else {}. Raises UserError if no file is left to train on.

    Names tell if files are named valid or test, and most bytes of the rest train; or if one is named valid or test and
    nothing else (test.txt, val/), and the part to evaluate is not too small (LEAST). Files with neither name are
    trained on, unless those named train are larger: then they are OTHER, like a README.
    """
    kinds = [of_name(file.inside) for file in found]
    size, bare = dict.fromkeys(kinds, 0), set()
    for file, kind in zip(found, kinds, strict=True):
        size[kind] += file.size
        if kind in (VALID, TEST):
            bare |= {name.lower().split(".")[0].rstrip(DIGITS) for name in file.inside.parts}
    mostly = size.get(TRAIN, 0) > size.get(OTHER, 0)
    large = bare & PARTS.keys() and size[evaluated(size)] >= LEAST * sum(size.values())
    if not bare or not (mostly or large):
        return {}
    if not mostly:
        kinds = [part or TRAIN for part in kinds]
    if TRAIN not in kinds:
        wrong = f"every file is named as one to evaluate ({listed(found)})"
        raise errors.UserError(f"{wrong}: {section}.source must have some to train on")
    return {part: [file for file, kind in zip(found, kinds, strict=True) if kind == part] for part in kinds}


def evaluated(parts: Mapping[str, object]) -> str:
    """Return the part to evaluate: the validation part, or else the test part."""
    return VALID if VALID in parts else TEST


def divided(
    name: str, section: str, found: list[File], rows: Callable, *, of: str, key: Callable, share: float
) -> Rows:
    """Return all `rows(file)` in two parts: as the names of files tell (`by_names`, if there is a section), or with
    about this share held out, by their keys. Raises UserError if a part has no row; of: what the rows are."""
    named = by_names(section, found) if section else {}
    used = [named[part] for part in (TRAIN, evaluated(named))] if named else [found]
    parts = [[row for file in some for row in rows(file)] for some in used]
    if empty := [some for some, part in zip(used, parts, strict=True) if not part]:
        raise errors.UserError(f"{name}{f' ({listed(empty[0])})' if named else ''} holds no {of}")
    if named:
        keys, said = {*map(key, parts[0])}, told(name, "by their names,", named)
        if both := sum(key(row) in keys for row in parts[1]):
            said += f" ({both:,} of {len(parts[1]):,} to evaluate are trained on, too)"
        return Rows(name, *parts, said)
    out_B = held_out([key(row) for row in parts[0]], share=share)
    return Rows(name, *([parts[0][b] for b in np.flatnonzero(out_B == side).tolist()] for side in (False, True)), "")


def told(name: str, how: str, parts: Mapping[str, Sequence]) -> str:
    """Return a line about the part that each file became, and how it was decided."""
    alone = "left alone" if evaluated(parts) == VALID else "to evaluate"
    uses = {TRAIN: "to train on", VALID: "to evaluate", TEST: alone, OTHER: "left out"}
    return f"{name}: {how} " + "; ".join(f"{listed(parts[part])} {uses[part]}" for part in uses if part in parts)


def listed(names: Sequence) -> str:
    """Return 'a.txt, b.txt', or 'a.txt and 7 more'."""
    return ", ".join(map(str, names)) if len(names) <= LISTED else f"{names[0]} and {len(names) - 1:,} more"


def held_out(contents: Iterable[bytes], *, share: float) -> np.ndarray:
    """Return True for about `share` of the different contents, those with the smallest `digest`; one boolean for each.

    Equal contents fall on the same side. Neither side is empty: the smallest digest is held out, the largest is not.
    Raises UserError for fewer than two different contents."""
    digest_B = [digest(content) for content in contents]
    bound = held_out_below(digest_B, share=share)
    return np.array([one < bound for one in digest_B])


def held_out_below(digests: Sequence[bytes], *, share: float) -> bytes:
    """Return the digest below which `held_out` holds out."""
    different = sorted({*digests})
    if len(different) < 2:
        raise errors.UserError("there are not two examples that differ, so none can be held out for evaluation")
    return min(max(int(share * 2**64).to_bytes(8, "big"), different[1]), different[-1])


def digest(content: bytes) -> bytes:
    """Return the first eight bytes of the sha256."""
    return hashlib.sha256(content).digest()[:8]


def sha256(*pieces: str | np.ndarray) -> str:
    """Return the sha256 of texts and arrays, including their order, types and shapes."""
    total = hashlib.sha256()
    for piece in pieces:
        array = np.frombuffer(piece.encode(), np.uint8) if isinstance(piece, str) else np.ascontiguousarray(piece)
        total.update(f"{array.dtype.str} {array.shape}".encode())
        total.update(array)
    return total.hexdigest()
