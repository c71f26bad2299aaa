"""Texts: find them and split them into training and held-out data, by the contents of their files alone."""

import ast
import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments.data import download, files, tables, tokenizer
from experiments.engine import errors

STDLIB, DOCSTRINGS = "stdlib", "docstrings"
NAMED = (STDLIB, DOCSTRINGS, *sorted(download.NAMED))
EVALUATION_SHARE, MOST_EVALUATED = 0.1, 2**22  # bytes; a tenth of 10 GB would take hours to evaluate
LARGE = 2**26  # bytes of a text from which on its token ids are kept in a file
SEPARATOR = tokenizer.SEPARATOR.encode()
Read = Callable[[], Iterator[bytes]]  # yields the bytes of a document in pieces, from its beginning


class Source(NamedTuple):
    """A document, or a table of many, after it was read once."""

    file: files.File
    read: Read
    size: int  # bytes, unpacked
    digest: bytes  # the same for the same documents
    rows: Read | None = None  # the documents of a table, one by one


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents. Iteration yields their bytes in pieces that end anywhere, with NUL between two documents.

    They are read again each time, and never held in memory as a whole.
    """

    reads: tuple[Read, ...]
    size: int  # bytes; for rows of tables, about
    digest: str  # the same for the same documents
    names: tuple[str, ...]  # the file of each

    def __iter__(self) -> Iterator[bytes]:
        is_first = True
        for read in self.reads:
            separator = b"" if is_first else SEPARATOR
            for piece in read():
                yield separator + piece
                separator, is_first = b"", False


class Text(NamedTuple):
    """A text and its two parts."""

    name: str
    train: Part
    evaluation: Part
    description: str  # how the files were split; '': nothing to print

    @property
    def sha256(self) -> str:
        """The digest of both parts."""
        return files.sha256(self.train.digest, self.evaluation.digest)


def load(source: str, field: str = "") -> Text:
    """Return text from 'stdlib' (Python's own source files), 'docstrings' (the English in them), a named set, or a
    path.

    With a field it is the field's text in each row of tables (`tables.KINDS`) or of a data set 'hub:NAME'. Hidden files
    and folders, links to folders and empty files are skipped. File names may define the parts (`files.split_by_names`).
    Otherwise a single text is cut in two, the first 90 % for training. About 10 % of several texts, or of rows, are
    held out by their contents, but never more than MOST_EVALUATED bytes. Raises UserError without enough text.
    """
    every, used = find(source, field)
    if by_name := files.split_by_names("text", used):  # files that are not in a folder have no such names
        text = divide_by_names(source, by_name, field)
    else:
        text = divide_by_contents(source, read_once(source, used, field))
    path, empty = pathlib.Path(source).expanduser(), sum(not file.size for file in used)
    lines = files.describe_skipped(path, every, used) if source not in NAMED and path.is_dir() else []
    lines += [f"empty files left out: {empty:,}"] * bool(empty)
    return text._replace(description=files.join_lines(source, text.description, lines))


def load_whole(source: str, field: str = "") -> Part:
    """Return all documents as one part, whatever their file names. Raises UserError as `load` does."""
    return make_part(read_once(source, find(source, field)[1], field))


def find(source: str, field: str) -> tuple[list[files.File], list[files.File]]:
    """Return all files of a source, and those that contain its text. Raises UserError if the field does not suit."""
    if source in (STDLIB, DOCSTRINGS):
        every = [files.on_disk(file) for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    elif source in download.NAMED:
        every = [files.on_disk(download.fetch(*download.NAMED[source]))]
    else:
        alternatives = f"a named text ({', '.join(NAMED)}) or data set ({tables.HUB}NAME)"
        every = tables.find(source, field, alternatives=alternatives)
    selected, problem = tables.select(every), ""
    if every and every == selected and not field:  # a model does not learn commas
        next(tables.rows(every[0], field), None)  # its error lists the fields
        problem = f"has no text in {every[0].name}, a table without rows"
    elif field and not selected:
        problem = f"is for tables ({', '.join(tables.KINDS)}), and {source} has none: leave it empty"
    if problem:
        raise errors.UserError(f"text.field = {field!r} {problem}")
    return every, selected if field else every


def read_once(name: str, candidates: Sequence[files.File], field: str) -> list[Source]:
    """Read each file once for its size and digest. Return a Source, which can read it again, for each file with text.

    field: the column of a table that holds the text. Raises UserError if no file has text.
    """
    texts = []
    for file in (file for file in candidates if file.size):
        kind, rows, digest = tables.kind(file), None, hashlib.sha256()
        if kind and (field or kind in (tables.read_parquet, tables.read_hub)):
            rows, digest = functools.partial(tables.rows, file, field), hashlib.sha256(field.encode())
            next(rows(), None)  # raises at once for errors that all rows share
            read = functools.partial(join, rows)
        elif name == DOCSTRINGS:
            read = functools.partial(read_docstrings, file)
        else:
            read = functools.partial(files.pieces, file, utf8=False)
        content = tables.content(file) if rows else read()
        size = 0
        for piece in content:
            digest.update(piece)
            size += len(piece)
        if size:
            texts.append(Source(file, read, max(file.size, LARGE) if file.version else size, digest.digest(), rows))
    if not texts:
        raise errors.UserError(f"{name} contains no text: give a file or folder with text")
    return texts


def divide_by_names(name: str, by_name: Mapping[str, Sequence[files.File]], field: str) -> Text:
    """Return the parts that file names define, and count the texts that are in both."""
    train, evaluation = (
        read_once(f"{name}: the part {part} ({files.join_names(by_name[part])})", by_name[part], field)
        for part in (files.TRAIN, files.evaluation_part(by_name))
    )
    description = files.describe_named(name, by_name, digests(train), [*digests(evaluation)])
    return Text(name, make_part(train), make_part(evaluation), description)


def digests(texts: Sequence[Source]) -> Iterator[bytes]:
    """Yield the digests of documents; a single one for a data set of the hub, which is not loaded a second time."""
    for text in texts:
        yield from map(files.digest, text.rows()) if text.rows and not text.file.version else [text.digest[:8]]


def divide_by_contents(name: str, texts: Sequence[Source]) -> Text:
    """Return a single text cut in two; of several texts, or of rows, hold out some."""
    rows = any(text.rows for text in texts)
    if len({text.digest for text in texts}) == 1 and not rows:
        return cut(name, texts[0])
    share = min(EVALUATION_SHARE, MOST_EVALUATED / sum(text.size for text in texts))
    bound = int(share * 2**64).to_bytes(8, "big")  # of rows
    if not rows:
        bound = files.held_out_below([text.digest[:8] for text in texts], share=share)
    train, evaluation = ([side for text in texts if (side := select_side(text, bound, held))] for held in (False, True))
    if rows:
        names = files.join_names([text.file for text in texts])
        description = f"{name}: about {share:.2%} of the rows of {names} are held out, by their contents"
    else:
        by_part = {files.TRAIN: [text.file for text in train], files.TEST: [text.file for text in evaluation]}
        description = "" if name in NAMED else files.describe_parts(name, "by their contents,", by_part)
    return Text(name, make_part(train), make_part(evaluation), description)


def select_side(text: Source, bound: bytes, held: bool) -> Source | None:
    """Return the held-out rows of a source, or the other rows; a document is held out as a whole."""
    if not text.rows:
        return text if (text.digest[:8] < bound) == held else None
    digest = hashlib.sha256(text.digest + bound + bytes([held])).digest()
    return text._replace(read=functools.partial(join, text.rows, bound, held), digest=digest)


def join(rows: Read, bound: bytes = b"", held: bool = False) -> Iterator[bytes]:
    """Yield the rows on one side of the bound, joined to pieces, with NUL between two rows."""
    batch, n = [], 0
    for row in (row for row in rows() if (files.digest(row) < bound) == held):
        batch.append(row)
        n += len(row)
        if n >= files.CHUNK:
            yield SEPARATOR.join(batch)
            batch, n = [b""], 0
    if any(batch):
        yield SEPARATOR.join(batch)


def cut(name: str, text: Source) -> Text:
    """Return the first part of a document, and the rest, cut between two characters."""
    at = max(text.size * 9 // 10, text.size - MOST_EVALUATED)
    first = max(at - 3, 0)
    near = b"".join(slice_bytes(text.read, first, at + 1))
    while at > first and near[at - first] & 0b1100_0000 == 0b1000_0000:  # inside a UTF-8 character
        at -= 1
    if not 0 < at < text.size:
        raise errors.UserError(f"{name} has too little text to hold out a part of it: give more text")
    ends = (0, at), (at, text.size)
    parts = (make_part([text._replace(read=functools.partial(slice_bytes, text.read, *end))], end) for end in ends)
    description = f"{name}: the first {100 * at / text.size:.4g} % are for training, the rest is held out"
    return Text(name, *parts, "" if name in NAMED else description)


def slice_bytes(read: Read, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes from start to stop."""
    n = 0
    for piece in read():
        if inside := piece[max(start - n, 0) : max(stop - n, 0)]:
            yield inside
        n += len(piece)
        if n >= stop:
            return


def make_part(texts: Sequence[Source], ends: tuple[int, int] | None = None) -> Part:
    """Return a part of these texts. ends: the first byte of a single document, and the byte after its last."""
    size = ends[1] - ends[0] if ends else sum(text.size for text in texts)
    digest = hashlib.sha256(repr([*(text.digest.hex() for text in texts), ends]).encode())
    return Part(tuple(text.read for text in texts), size, digest.hexdigest(), tuple(text.file.name for text in texts))


def read_docstrings(file: files.File) -> Iterator[bytes]:
    """Yield the docstrings of a Python file."""
    yield "\n\n".join(list_docstrings(file, ast.Module)).encode()


def list_docstrings(file: files.File, *extra: type) -> Iterator[str]:
    """Yield the docstrings of a program's classes and functions, and of nodes of the types `extra`."""
    described = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, *extra)
    nodes = (node for node in ast.walk(ast.parse(files.read(file))) if isinstance(node, described))
    return filter(None, map(ast.get_docstring, nodes))
