"""Find text and divide it into a training and an evaluation part, which depend on the contents of its files alone."""

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
LARGE = 2**26  # bytes of a text from which on its token ids are in a file
SEPARATOR = tokenizer.SEPARATOR.encode()
Read = Callable[[], Iterator[bytes]]  # the bytes of a document in pieces, from the beginning at each call


class Source(NamedTuple):
    """A text, or a table of many, that was read once."""

    file: files.File
    read: Read
    size: int  # bytes, unpacked
    digest: bytes  # the same for the same documents
    rows: Read | None = None  # the documents of a table, one by one


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents. Iteration yields their bytes in pieces that end anywhere, with NUL between two documents; they are
    read anew each time, and never held as a whole."""

    reads: tuple[Read, ...]
    size: int  # bytes; for rows of tables, about
    digest: str  # the same for the same documents
    names: tuple[str, ...]  # the file of each

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
    said: str  # the part that each file became, '' if there is nothing to print

    @property
    def sha256(self) -> str:
        return files.sha256(self.train.digest, self.evaluation.digest)


def load(source: str, field: str = "") -> Text:
    """Return text from 'stdlib' (Python's own source files), 'docstrings' (the English in them), a named set, or a
    path; with a field, the field's text in each row of tables (`tables.KINDS`) or of a data set 'hub:NAME'
    (`tables.load_hub`).

    Hidden files and folders, links to folders and empty files are left out. Names of files may tell the parts
    (`files.split_by_names`). Else one text is cut in two, its first 90 % for training; of several texts, or of rows,
    about 10 % are held out, chosen by their contents; never more than MOST_EVALUATED bytes. Raises UserError if there
    is no text, or too little to divide."""
    every, found = find(source, field)
    if named := files.split_by_names("text", found):  # files that are not in a folder have no such names
        text = divide_by_names(source, named, field)
    else:
        text = divide_by_contents(source, scan(source, found, field))
    path, lines, empty = pathlib.Path(source).expanduser(), [], sum(not file.size for file in found)
    if source not in NAMED and path.is_dir():
        lines += files.describe_skipped(path, every, found)
    lines += [f"empty files left out: {empty:,}"] * bool(empty)
    return text._replace(said="\n".join(filter(None, [text.said, *(f"{source}: {line}" for line in lines)])))


def whole(source: str, field: str = "") -> Part:
    """Return all documents in one part, whatever the names of files tell. Raises UserError as `load`."""
    return part_of(scan(source, find(source, field)[1], field))


def find(source: str, field: str) -> tuple[list[files.File], list[files.File]]:
    """Return all files of a source, and those of which the text is made."""
    if source in (STDLIB, DOCSTRINGS):
        found = [files.on_disk(file) for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    elif source in download.NAMED:
        found = [files.on_disk(download.fetch(*download.NAMED[source]))]
    else:
        named = f"a named text ({', '.join(NAMED)}) or data set ({tables.HUB}NAME)"
        found = tables.find(source, field, named=named)
    of_tables = tables.select(found)
    if found and found == of_tables and not field:  # a model does not learn commas
        next(tables.rows(found[0], field), None)  # its error lists the fields
        raise errors.UserError(f"{found[0].name} is a table without rows: text.field = {field!r} has no text there")
    if field and not of_tables:
        ends = ", ".join(tables.KINDS)
        raise errors.UserError(f"text.field = {field!r} is for tables ({ends}), and {source} has none: leave it empty")
    return found, of_tables if field else found


def scan(name: str, found: Sequence[files.File], field: str) -> list[Source]:
    """Read each file once. Return those that have text. Raises UserError if there is none."""
    texts = []
    for file in (file for file in found if file.size):
        if tables.is_table(file, field):
            rows = functools.partial(tables.rows, file, field)
            next(rows(), None)  # refuses at once what is wrong with all rows
            read, content, digest = functools.partial(join, rows), tables.content(file), hashlib.sha256(field.encode())
        else:
            rows, read = None, functools.partial(read_docstrings if name == DOCSTRINGS else read_text, file)
            content, digest = read(), hashlib.sha256()
        size = 0
        for piece in content:
            digest.update(piece)
            size += len(piece)
        if size:
            texts.append(Source(file, read, max(file.size, LARGE) if file.version else size, digest.digest(), rows))
    if not texts:
        raise errors.UserError(f"{name} holds no text: a file or folder with text is needed")
    return texts


def divide_by_names(name: str, named: Mapping[str, Sequence[files.File]], field: str) -> Text:
    """Return the parts that names tell, and count the texts that are in both."""
    used = {part: named[part] for part in (files.TRAIN, files.evaluation_part(named))}
    sides = [scan(f"{name}: the part {part} ({files.join_names(used[part])})", used[part], field) for part in used]
    said = files.describe_parts(name, "by their names,", named)
    evaluation = [*digests(sides[1])]
    held = {*evaluation}
    trained = {digest for digest in digests(sides[0]) if digest in held}
    if both := sum(digest in trained for digest in evaluation):
        said += f" ({both:,} of {len(evaluation):,} texts to evaluate are trained on, too)"
    return Text(name, *map(part_of, sides), said)


def digests(texts: Sequence[Source]) -> Iterator[bytes]:
    """Yield the digests of documents; for a data set of the hub, which is not loaded once more, a single one."""
    for text in texts:
        yield from map(files.digest, text.rows()) if text.rows and not text.file.version else [text.digest[:8]]


def divide_by_contents(name: str, texts: Sequence[Source]) -> Text:
    """Return a single text cut in two, or several, or rows, of which some are held out."""
    rows = any(text.rows for text in texts)
    if len({text.digest for text in texts}) == 1 and not rows:
        return cut(name, texts[0])
    share = min(EVALUATION_SHARE, MOST_EVALUATED / sum(text.size for text in texts))
    bound = int(share * 2**64).to_bytes(8, "big")  # for rows, which are many
    if not rows:
        bound = files.held_out_below([text.digest[:8] for text in texts], share=share)
    train, evaluation = ([side for text in texts if (side := side_of(text, bound, held))] for held in (False, True))
    shown = {files.TRAIN: [text.file for text in train], files.TEST: [text.file for text in evaluation]}
    said = "" if name in NAMED else files.describe_parts(name, "by their contents,", shown)
    if rows:
        listed = files.join_names([text.file for text in texts])
        said = f"{name}: by their contents, about {share:.2%} of the rows of {listed} to evaluate"
    return Text(name, part_of(train), part_of(evaluation), said)


def side_of(text: Source, bound: bytes, held: bool) -> Source | None:
    """Return what is held out of a source, or what is not; of a text all or nothing."""
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
    near = b"".join(slice_of(text.read, first, at + 1))
    while at > first and near[at - first] & 0b1100_0000 == 0b1000_0000:  # inside a UTF-8 character
        at -= 1
    if not 0 < at < text.size:
        raise errors.UserError(f"{name} holds too little text to keep a part of it for evaluation")
    ends = (0, at), (at, text.size)
    parts = (part_of([text._replace(read=functools.partial(slice_of, text.read, *end))], end) for end in ends)
    share = f"{name}: its first {100 * at / text.size:.4g} % to train on, the rest to evaluate"
    return Text(name, *parts, "" if name in NAMED else share)


def slice_of(read: Read, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes from start to stop."""
    n = 0
    for piece in read():
        if inside := piece[max(start - n, 0) : max(stop - n, 0)]:
            yield inside
        n += len(piece)
        if n >= stop:
            return


def part_of(texts: Sequence[Source], ends: tuple[int, int] | None = None) -> Part:
    """Return a part of these texts. ends: the first byte of a single document, and the byte after its last."""
    size = ends[1] - ends[0] if ends else sum(text.size for text in texts)
    digest = hashlib.sha256(repr([*(text.digest.hex() for text in texts), ends]).encode())
    return Part(tuple(text.read for text in texts), size, digest.hexdigest(), tuple(text.file.name for text in texts))


def read_text(file: files.File) -> Iterator[bytes]:
    return files.pieces(file, utf8=False)


def read_docstrings(file: files.File) -> Iterator[bytes]:
    yield "\n\n".join(docstrings(file, ast.Module)).encode()


def docstrings(file: files.File, *more: type) -> Iterator[str]:
    """Yield the docstrings of a program's classes and functions, and of nodes of `more` types."""
    described = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, *more)
    nodes = (node for node in ast.walk(ast.parse(files.read(file))) if isinstance(node, described))
    return filter(None, map(ast.get_docstring, nodes))
