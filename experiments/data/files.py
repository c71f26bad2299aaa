"""Files of text, in folders and zips, gzipped or not; and which part of a corpus each is: to train on, to evaluate, or
a test that is left alone. Where no name says it, the content decides: no run, seed or file order can change it.
"""

import codecs
import contextlib
import functools
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import pathlib
import re
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from experiments.engine import disk, errors

DAMAGED = (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError)
LONGEST_LINE = 2**26  # bytes
CHUNK = 2**20  # bytes read at a time: a file of nothing but zeros is never read to its end
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
EXTRA = 'pip install -e ".[hub]"'
TAR_AT, TAR = 257, b"ustar"
# What a file is that begins with these bytes, and what to do. Most others that are no text hold a NUL.
KINDS = {
    b"\x89PNG": ("a PNG image", ""),
    b"\xff\xd8\xff": ("a JPEG image", ""),
    b"GIF8": ("a GIF image", ""),
    b"PAR1\x15": ("a Parquet table", ": write its text into .txt files"),
    b"%PDF-": ("a PDF document", ": write its text into .txt files"),
    b"\x93NUMPY": ("a NumPy array", ""),
    **{bytes([0x80, protocol]): ("a pickle", "") for protocol in range(2, 6)},
    b"PK\3\4": ("a zip archive (.npz, .docx, .xlsx are such, too)", ": unpack it"),
    b"BZh91AY&SY": ("packed with bzip2", ": unpack it"),
    b"\xfd7zXZ": ("packed with xz", ": unpack it"),
    ZSTD: ("packed with zstd twice", ": unpack it"),
    GZIP: ("packed with gzip twice", ": unpack it"),
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), ("text in UTF-32", ": convert it to UTF-8")),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), ("text in UTF-16", ": convert it to UTF-8")),
}

TRAIN, VALID, TEST = "train", "valid", "test"
PARTS = {  # and their usual spellings
    **dict.fromkeys(("train", "training", "trainset"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devset", "newsdev", "eval"), VALID),
    **dict.fromkeys(("test", "testing", "testset", "newstest", "tst", "heldout"), TEST),
}
LEAST = 0.01  # share of all bytes: a requirements/dev.txt among programs is not what they are evaluated on
OTHER = ""  # of no part
DIGITS = "0123456789"
LISTED = 3  # names in a line; of more files their number is told


class File(NamedTuple):
    """A file on the disk or in a zip; shown by its path inside the folder or zip, which one alone has not."""

    inside: pathlib.PurePath
    name: str  # in messages
    size: int  # bytes, unpacked from a zip; 0 for what is no regular file
    open: Callable[[], BinaryIO]
    beside: "File | None" = None  # the file whose lines are the translations of this one's
    version: str = ""  # of no file but rows that are opened one by one: the same for the same rows

    def __str__(self) -> str:
        return (str(self.inside) if self.inside.parts else self.name) + (f" -> {self.beside}" if self.beside else "")


class Rows(NamedTuple):
    """Pairs of texts, in two parts."""

    name: str
    train: list[tuple[str, str]]
    evaluation: list[tuple[str, str]]
    said: str  # which file became what, '' where there is nothing to tell

    @property
    def sha256(self) -> str:
        return sha256(json.dumps([self.train, self.evaluation]))


def on_disk(path: pathlib.Path, inside: str | pathlib.PurePath = "") -> File:
    """The file at the path. UserError where it cannot be looked at."""
    with _refusing(path):
        status = path.stat()
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return File(pathlib.PurePath(inside), str(path), size, functools.partial(open, path, "rb"))


def folder(path: pathlib.Path, hidden: tuple[str, ...]) -> list[File]:
    """The files in a folder and all below, sorted; no links to folders, no names that begin with one of `hidden`."""

    def refuse(error: OSError) -> None:
        raise errors.UserError(f"the folder {error.filename} cannot be read: {error.strerror}") from error

    paths = []
    for parent, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(hidden)]
        paths += [pathlib.Path(parent, name) for name in names if not name.startswith(hidden)]
    return [on_disk(file, file.relative_to(path)) for file in sorted(paths)]


def skipped(path: pathlib.Path, every: Sequence[File], used: Sequence[File]) -> list[str]:
    """Return lines about what a folder holds that is not used: files, by the ends of their names, and links to folders,
    which are not followed."""
    there = {file.inside for file in used}
    ends = Counter(file.inside.suffix.lower() or "no ending" for file in every if file.inside not in there)
    folders = [pathlib.Path(parent, name) for parent, some, _ in os.walk(path) for name in some]
    links = [folder.relative_to(path) for folder in folders if folder.is_symlink()]
    more = f" and {sum(ends.values()) - sum(n for _, n in ends.most_common(LISTED)):,} others" * (len(ends) > LISTED)
    lines = [f"files skipped: {', '.join(f'{n:,} {end}' for end, n in ends.most_common(LISTED))}{more}"] * bool(ends)
    return lines + [f"links to folders not followed: {len(links):,}, {listed(links)}"] * bool(links)


def members(path: pathlib.Path, zips: contextlib.ExitStack, hidden: tuple[str, ...]) -> list[File]:
    """The members of a zip, as `folder`; nothing is unpacked to the disk. zips: where it stays open. UserError for a
    damaged one, and for a member whose path leads out of it."""
    with _refusing(path):
        file = zips.enter_context(zipfile.ZipFile(path))
    found = []
    for member in file.infolist():
        steps = member.filename.replace("\\", "/").split("/")  # ZipFile has cut it at a NUL
        if not steps[0] or ".." in steps or ":" in steps[0]:
            what = f"a member that leads out of it, {member.filename!r}"
            raise errors.UserError(f"{path} has {what}: make a zip without such a path")
        inside, name = pathlib.PurePosixPath(member.filename), f"{path}:{member.filename}"
        if not member.is_dir() and not any(step.startswith(hidden) for step in inside.parts):
            found.append(File(inside, name, member.file_size, functools.partial(file.open, member)))
    return found


def fault(chunk: bytes, at: int = 0) -> str:
    """What shows that these bytes, from `at` on in their file, are no text in UTF-8 or a relative; '' for nothing."""
    kind, remedy = next((KINDS[start] for start in KINDS if at == 0 and chunk.startswith(start)), ("", ""))
    if at == 0 and not kind and chunk.startswith(TAR, TAR_AT):
        kind, remedy = "a tar archive", ": unpack it"
    if kind:
        return f"is {kind}, not text in UTF-8{remedy}"
    null = chunk.find(b"\0")
    return f"holds a NUL at byte {at + null}, and no text in UTF-8 does (in UTF-16 it may)" if null >= 0 else ""


def glance(file: File) -> str:
    """The `fault` of the beginning of a file; '' also where it cannot be read: who reads it will say so."""
    with contextlib.suppress(errors.UserError):
        return fault(read(file, copies=1, text=False, most=TAR_AT + len(TAR)))
    return ""


def pieces(
    file: File, *, text: bool = True, utf8: bool = True, most: float = math.inf, hint: str = ""
) -> Iterator[bytes]:
    """What is in the file, a CHUNK or less at a time; unpacked if it begins as gzip or zstd does, whatever its name. Of
    text the byte order mark is left out.

    text = False: whatever it holds. utf8 = False: text of any bytes but NUL. most: bytes after which it is enough (one
    more shows that there are more). hint: the end of the sentence about what is no text. UserError for that, damaged
    gzip or zip, an unreadable file."""
    n, lines, decoder = 0, 0, codecs.getincrementaldecoder("utf-8")()
    with _refusing(file.name), file.open() as packed:
        source = _unpacked(file.name, packed)
        while chunk := source.read(int(min(CHUNK, most + 1 - n))) if n <= most else b"":
            wrong = fault(chunk, n) if text else ""
            if text and utf8 and not wrong:
                try:
                    decoder.decode(chunk)
                except UnicodeDecodeError as error:
                    line = lines + error.object[: error.start].count(b"\n") + 1
                    wrong = (
                        f"is not UTF-8 text in line {line:,} ({error.object[error.start : error.end]!r}): convert it"
                    )
                lines += chunk.count(b"\n")
            if wrong:
                raise errors.UserError(f"{file.name} {wrong}{hint}")
            yield chunk.removeprefix(codecs.BOM_UTF8) if text and n == 0 else chunk
            n += len(chunk)
        if n <= most and decoder.getstate()[0]:
            raise errors.UserError(f"{file.name} ends within a character of UTF-8{hint}")


def _unpacked(name: str, packed: BinaryIO) -> BinaryIO:
    begin = packed.peek(len(ZSTD))
    if begin.startswith(ZSTD):
        with extra(f"{name}, packed with zstd,"):
            import pyarrow
        return pyarrow.input_stream(packed, compression="zstd")
    return gzip.GzipFile(fileobj=packed) if begin.startswith(GZIP) else packed


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of what comes in pieces, without their ends. ValueError for one of more than LONGEST_LINE bytes."""
    rest = b""
    for piece in pieces:
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"a line has more than {disk.size(LONGEST_LINE)}")
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def read(file: File, *, copies: int, text: bool = True, most: float = math.inf) -> bytes:
    """All `pieces` of the file. copies: bytes of memory that each of its bytes will take. UserError as there, and for
    more than the memory has room for."""
    content, room = io.BytesIO(), disk.host_memory()
    for chunk in pieces(file, text=text, most=most):
        content.write(chunk)
        if copies * content.tell() > room:  # packed, it was small
            disk.check_memory(f"the text in {file.name}", copies * content.tell(), room)
    return content.getvalue()


@contextlib.contextmanager
def extra(what: str) -> Iterator[None]:
    """UserError where what is imported within this is not installed."""
    try:
        yield
    except ImportError as error:
        raise errors.UserError(f"{what} needs the package {error.name}: {EXTRA}") from error


@contextlib.contextmanager
def _refusing(name: str | pathlib.Path) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        raise errors.UserError(f"{name} is a damaged gzip file or zip: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{name} cannot be read: {error.strerror or error}") from error


def of_name(path: pathlib.PurePath) -> str:
    """The part that the names in a path tell, the outermost first; OTHER where none tells one, or two at once. One of
    PARTS stands between . - _ and the ends of a name: wiki.valid.tokens, test2016.en, train-0-of-2.txt."""
    for name in path.parts:
        words = [word.rstrip(DIGITS) for word in re.split(r"[._-]", name.lower())]
        kinds = {PARTS[word] for word in words if word in PARTS}
        if len(kinds) == 1:
            return kinds.pop()
    return OTHER


def by_names(section: str, found: Sequence[File]) -> dict[str, list[File]]:
    """Part -> its files, where names tell; else {}, and contents decide. UserError where none is left to train on.

    Names tell where files are named valid or test, and the larger part of the rest train; or where one is valid or test
    and nothing else (test.txt, val/), and what is evaluated is not too small (LEAST). Files named neither are trained
    on, unless those named train are larger: then they are OTHER, as a README.
    """
    kinds = [of_name(file.inside) for file in found]
    size, bare = dict.fromkeys(kinds, 0), set()
    for file, kind in zip(found, kinds, strict=True):
        size[kind] += file.size
        if kind in (VALID, TEST):
            bare |= {name.lower().split(".")[0].rstrip(DIGITS) for name in file.inside.parts}
    mostly = size.get(TRAIN, 0) > size.get(OTHER, 0)
    whole = bare & PARTS.keys() and size[evaluated(size)] >= LEAST * sum(size.values())
    if not bare or not (mostly or whole):
        return {}
    if not mostly:
        kinds = [part or TRAIN for part in kinds]
    if TRAIN not in kinds:
        wrong = f"every file is named as one to evaluate ({listed(found)})"
        raise errors.UserError(f"{wrong}: {section}.source must have some to train on")
    return {part: [file for file, kind in zip(found, kinds, strict=True) if kind == part] for part in kinds}


def evaluated(parts: Mapping[str, object]) -> str:
    return VALID if VALID in parts else TEST


def divided(
    name: str, section: str, found: list[File], rows: Callable, *, of: str, key: Callable, share: float, copies: int
) -> Rows:
    """All `rows(file)`, in the parts that the names of files tell (`by_names`, if there is a section); else about that
    share of them is held out, by their keys. copies: as of `read`. UserError of both, and where a part has no row."""
    named = by_names(section, found) if section else {}
    used = [named[part] for part in (TRAIN, evaluated(named))] if named else [found]
    disk.check_memory(f"the text in {name}", copies * sum(file.size for some in used for file in some))
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
    """A line for the person: which file became what, and how it was decided."""
    alone = "left alone" if evaluated(parts) == VALID else "to evaluate"
    what = {TRAIN: "to train on", VALID: "to evaluate", TEST: alone, OTHER: "left out"}
    return f"{name}: {how} " + "; ".join(f"{listed(parts[part])} {what[part]}" for part in what if part in parts)


def listed(names: Sequence) -> str:
    """'a.txt, b.txt', or 'a.txt and 7 more'."""
    return ", ".join(map(str, names)) if len(names) <= LISTED else f"{names[0]} and {len(names) - 1:,} more"


def held_out(contents: Iterable[bytes], *, share: float) -> np.ndarray:
    """A boolean per content: True for about `share` of the different contents, those with the smallest `digest`. Equal
    contents fall on the same side. Neither side is empty: at least the smallest digest is held out, and never the
    largest. UserError for fewer than two different contents."""
    digest_B = [digest(content) for content in contents]
    bound = held_out_below(digest_B, share=share)
    return np.array([one < bound for one in digest_B])


def digest(content: bytes) -> bytes:
    """The first eight bytes of its sha256."""
    return hashlib.sha256(content).digest()[:8]


def sha256(*pieces: str | np.ndarray) -> str:
    """Of texts and arrays, of which the order, the types and the shapes count too."""
    total = hashlib.sha256()
    for piece in pieces:
        array = np.frombuffer(piece.encode(), np.uint8) if isinstance(piece, str) else np.ascontiguousarray(piece)
        total.update(f"{array.dtype.str} {array.shape}".encode())
        total.update(array)
    return total.hexdigest()


def held_out_below(digests: Sequence[bytes], *, share: float) -> bytes:
    """The digest below which `held_out` holds out."""
    different = sorted({*digests})
    if len(different) < 2:
        raise errors.UserError("there are not two examples that differ, so none can be held out for evaluation")
    return min(max(int(share * 2**64).to_bytes(8, "big"), different[1]), different[-1])
