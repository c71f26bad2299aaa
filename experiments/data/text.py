"""Text as the contents of files, in a training and an evaluation part that depend on these files alone."""

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
EVALUATION_SHARE, MOST_EVALUATED = 0.1, 2**22  # bytes: of 10 GB a tenth would take hours
LARGE = 2**26  # bytes of a text from which on its ids are kept in a file
HINT = "; leave it out"
SEPARATOR = tokenizer.SEPARATOR.encode()
Read = Callable[[], Iterator[bytes]]  # the bytes of a document in pieces, from the beginning each time


class Source(NamedTuple):
    """A text, or a table of many, that was read once."""

    file: files.File
    read: Read
    size: int  # bytes, unpacked
    digest: bytes  # the same for the same documents
    rows: Read | None = None  # the documents of a table, one by one


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents. Iterated, it gives their bytes in pieces that may end anywhere, the NUL character between two
    documents; they are read anew each time, and never held as a whole."""

    reads: tuple[Read, ...]
    size: int  # bytes; of what is held out of tables, about
    digest: str  # the same for the same documents
    names: tuple[tuple[str, int], ...]  # of each: its file, and the byte of that with which it begins here

    def __iter__(self) -> Iterator[bytes]:
        begun = False
        for read in self.reads:
            between = SEPARATOR if begun else b""
            for piece in read():
                yield between + piece
                between, begun = b"", True


class Text(NamedTuple):
    name: str
    train: Part
    evaluation: Part
    said: str  # which file became what, '' where there is nothing to tell

    @property
    def sha256(self) -> str:
        return files.sha256(self.train.digest, self.evaluation.digest)


def load(source: str, field: str = "") -> Text:
    """Text from 'stdlib' (Python's own source files), 'docstrings' (the English in them), a named set, or a path; with
    a field, that of each row of the tables there (`tables.KINDS`), or of a data set 'hub:NAME' (`tables.hub`).

    Hidden files and folders, links to folders and empty files are left out. One text is cut in two, its first 90 % for
    training; of several, or of rows, about 10 % are held out, chosen by their contents, where names do not tell it
    (`files.by_names`); of a large text no more than MOST_EVALUATED bytes. UserError for what is not there, cannot be
    read, is no text, or too little to split.
    """
    every, found = _found(source, field)
    text, path = _divided(source, found, field), pathlib.Path(source).expanduser()
    lines = files.skipped(path, every, found) if source not in NAMED and path.is_dir() else []
    empty = sum(not file.size for file in found)
    lines += [f"empty files left out: {empty:,}"] * bool(empty)
    return text._replace(said="\n".join(filter(None, [text.said, *(f"{source}: {line}" for line in lines)])))


def _divided(source: str, found: list[files.File], field: str) -> Text:
    if named := files.by_names("text", found):  # neither a file alone nor those of a named text are inside a folder
        return _as_named(source, named, field)
    texts = _scanned(source, found, field)
    rows = any(text.rows for text in texts)
    if len({text.digest for text in texts}) == 1 and not rows:
        return _cut(source, texts[0])
    share = min(EVALUATION_SHARE, MOST_EVALUATED / sum(text.size for text in texts))
    bound = int(share * 2**64).to_bytes(8, "big")  # of rows, which are many
    if not rows:
        bound = files.held_out_below([text.digest[:8] for text in texts], share=share)
    train, evaluation = ([side for text in texts if (side := _side(text, bound, held))] for held in (False, True))
    shown = {files.TRAIN: [text.file for text in train], files.TEST: [text.file for text in evaluation]}
    said = "" if source in NAMED else files.told(source, "by their contents,", shown)
    if rows:
        said = f"{source}: by their contents, about {share:.2%} of the rows of {files.listed(found)} to evaluate"
    return Text(source, _part(train), _part(evaluation), said)


def whole(source: str, field: str = "") -> Part:
    """All documents there, whatever the names of files say. UserError as `load`."""
    return _part(_scanned(source, _found(source, field)[1], field))


def _found(source: str, field: str) -> tuple[list[files.File], list[files.File]]:
    """Return all files there, and those of which the text is made."""
    if source in (STDLIB, DOCSTRINGS):
        found = [files.on_disk(file) for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    elif source in download.NAMED:
        found = [files.on_disk(download.fetch(source))]
    else:
        named = f"a named text ({', '.join(NAMED)}) or data set ({tables.HUB}NAME)"
        found = tables.found(source, field, named=named)
    of_tables = tables.among(found)
    for file in found if of_tables == found and not field else []:  # no model learns commas: the fields are told
        next(tables.rows(file, field), None)
    if field and not of_tables:
        ends = ", ".join(tables.KINDS)
        raise errors.UserError(f"text.field = {field!r} is for tables ({ends}), and {source} has none: leave it empty")
    return found, of_tables if field else found


def _side(text: Source, bound: bytes, held: bool) -> Source | None:
    """What is held out of it, or what is not: of a text all or nothing."""
    if not text.rows:
        return text if (text.digest[:8] < bound) == held else None
    digest = hashlib.sha256(text.digest + bound + bytes([held])).digest()
    return text._replace(read=functools.partial(_joined, text.rows, bound, held), digest=digest)


def _joined(rows: Read, bound: bytes = b"", held: bool = False) -> Iterator[bytes]:
    """Pieces of the rows on one side of the bound."""
    some, n = [], 0
    for row in (row for row in rows() if (files.digest(row) < bound) == held):
        some.append(row)
        n += len(row)
        if n >= files.CHUNK:
            yield SEPARATOR.join(some)
            some, n = [b""], 0
    if any(some):
        yield SEPARATOR.join(some)


def _cut(name: str, text: Source) -> Text:
    """The first of one document, and the rest, cut between two characters."""
    at = max(text.size * 9 // 10, text.size - MOST_EVALUATED)
    first = max(at - 3, 0)
    near = b"".join(_piece(text.read, first, at + 1))
    while at > first and near[at - first] & 0b1100_0000 == 0b1000_0000:  # inside a UTF-8 character
        at -= 1
    if not 0 < at < text.size:
        raise errors.UserError(f"{name} holds too little text to keep a part of it for evaluation")
    ends = (0, at), (at, text.size)
    parts = (_part([text._replace(read=functools.partial(_piece, text.read, *e))], e) for e in ends)
    share = f"{name}: its first {100 * at / text.size:.4g} % to train on, the rest to evaluate"
    return Text(name, *parts, "" if name in NAMED else share)


def _piece(read: Read, start: int, stop: int) -> Iterator[bytes]:
    n = 0
    for piece in read():
        if some := piece[max(start - n, 0) : max(stop - n, 0)]:
            yield some
        n += len(piece)
        if n >= stop:
            return


def _part(texts: Sequence[Source], ends: tuple[int, int] | None = None) -> Part:
    """ends: where the part of a single document begins and ends."""
    size = ends[1] - ends[0] if ends else sum(text.size for text in texts)
    digest = hashlib.sha256(repr([*(text.digest.hex() for text in texts), ends]).encode())
    names = tuple((text.file.name, ends[0] if ends else 0) for text in texts)
    return Part(tuple(text.read for text in texts), size, digest.hexdigest(), names)


def _as_named(name: str, named: Mapping[str, Sequence[files.File]], field: str) -> Text:
    """The parts as names tell them."""
    used = {part: named[part] for part in (files.TRAIN, files.evaluated(named))}
    sides = [_scanned(f"{name}: the part {part} ({files.listed(used[part])})", used[part], field) for part in used]
    said = files.told(name, "by their names,", named)
    evaluation = [*_digests(sides[1])]
    held = {*evaluation}
    trained = {digest for digest in _digests(sides[0]) if digest in held}
    if both := sum(digest in trained for digest in evaluation):
        said += f" ({both:,} of {len(evaluation):,} texts to evaluate are trained on, too)"
    return Text(name, *map(_part, sides), said)


def _digests(texts: Sequence[Source]) -> Iterator[bytes]:
    """Those of documents; of a data set of the hub, which is not loaded once more for this, as a whole."""
    for one in texts:
        yield from map(files.digest, one.rows()) if one.rows and not one.file.version else [one.digest[:8]]


def _scanned(name: str, found: Sequence[files.File], field: str) -> list[Source]:
    """The files that have text in them, each read once. UserError where none has, and where one is no text, before
    much is read."""
    found = [file for file in found if file.size]
    of_text = [file for file in found if not tables.applies(file, field)]
    faults = [f"{file.name} {fault}" for file in of_text if (fault := files.glance(file))]
    if faults:
        others = f" (it is one of {len(faults):,} such files among {len(found):,})" if len(faults) > 1 else ""
        raise errors.UserError(f"{faults[0]}{others}{HINT}")
    texts = []
    for file in found:
        table, size = tables.applies(file, field), 0
        rows = functools.partial(tables.rows, file, field) if table else None
        of_file = functools.partial(_docstrings if name == DOCSTRINGS else _text, file)
        read = functools.partial(_joined, rows) if table else of_file
        digest = hashlib.sha256(field.encode() if table else b"")
        if rows:
            next(rows(), None)  # what is wrong with all of them is refused at once
        for piece in tables.content(file) if table else read():
            digest.update(piece)
            size += len(piece)
        if size:
            texts.append(Source(file, read, max(file.size, LARGE) if file.version else size, digest.digest(), rows))
    if not texts:
        raise errors.UserError(f"{name} holds no text: a file or folder with text is needed")
    return texts


def _text(file: files.File) -> Iterator[bytes]:
    return files.pieces(file, utf8=False, hint=HINT)


def _docstrings(file: files.File) -> Iterator[bytes]:
    yield "\n\n".join(docstrings(file, ast.Module)).encode()


def docstrings(file: files.File, *more: type) -> Iterator[str]:
    """Those of a program's classes and functions, and of nodes of `more` types."""
    described = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, *more)
    nodes = (node for node in ast.walk(ast.parse(b"".join(_text(file)))) if isinstance(node, described))
    return filter(None, map(ast.get_docstring, nodes))
