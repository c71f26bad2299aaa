"""Texts: find their files, and split them into training and held-out data by the files' names or contents."""

import ast
import functools
import hashlib
import io
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments.config import by_name, errors
from experiments.data import download, files as data_files, tables, tokenization

STDLIB, DOCSTRINGS = "stdlib", "docstrings"
NAMED = (STDLIB, DOCSTRINGS, *sorted(download.NAMED))
EVALUATION_SHARE, MOST_EVALUATED = 0.1, 2**22  # bytes; a tenth of 10 GB would take hours to evaluate
LARGE = 2**26  # bytes: the token ids of a text of at least this size are kept in a file
SEPARATOR = tokenization.SEPARATOR.encode()
Read = Callable[[], Iterator[bytes]]  # yields the bytes of a document in pieces, from its beginning


class Source(NamedTuple):
    """A document, or a table with a document in each row, that was read once for its size and digest.

    Its content is not kept, but read again.
    """

    file: data_files.File
    read: Read
    size: int  # bytes, unpacked; an estimate for a data set of the hub
    digest: bytes  # identifies the documents
    rows: Read | None = None  # the documents of a table, one by one


class Part:
    """Documents: the training or the held-out part of a text. digest: identifies the documents.

    Iteration yields their bytes in pieces that end anywhere, with NUL between two documents. It reads the documents
    again each time, and never holds all of them in memory.
    """

    def __init__(self, sources: Sequence[Source], digest: str):
        self.sources, self.digest = sources, digest
        self.size, self.names = sum(source.size for source in sources), [source.file.name for source in sources]

    def __iter__(self) -> Iterator[bytes]:
        is_first = True
        for source in self.sources:
            separator = b"" if is_first else SEPARATOR
            for piece in source.read():
                yield separator + piece
                separator, is_first = b"", False


class Text(NamedTuple):
    """A text, split into two parts."""

    name: str
    train: Part
    evaluation: Part
    description: str  # how the files were split; '': nothing to print

    @property
    def sha256(self) -> str:
        """The digest of the training and the held-out part together."""
        return data_files.sha256(self.train.digest, self.evaluation.digest)


def load_all(sources: str, field: str = "") -> tuple[Text, list[tuple[Text, float]]]:
    """Return the text of text.source, and for several sources ("a.txt:0.7, b.txt:0.3") each text and its share.

    The text of several sources has the documents of all. For a single source the list is empty. field: the column with
    the text in tables. Raises UserError as `load` does.
    """
    shares = by_name.split_sources(sources)
    if len(shares) == 1:
        return load(sources, field), []
    shared = [(load(source, field), share) for source, share in shares]
    texts = [text for text, _ in shared]
    train, evaluation = (
        Part([source for part in parts for source in part.sources], data_files.sha256(*(part.digest for part in parts)))
        for parts in ([text.train for text in texts], [text.evaluation for text in texts])
    )
    counts = ", ".join(f"{text.name} {text.evaluation.size:,}" for text in texts)
    lines = [text.description for text in texts] + [f"held out of all sources, one after another, bytes: {counts}"]
    return Text(sources, train, evaluation, "\n".join(filter(None, lines))), shared


def load(source: str, field: str = "") -> Text:
    """Return the documents to train on and to evaluate.

    source: 'stdlib' (Python's source files), 'docstrings' (the English in them), a named set, a path, or a function of
    the user's (`load_users`). field: the column with the text in tables (`tables.KINDS`) or in a data set 'hub:NAME'.
    Hidden files and folders, links to folders and empty files are skipped. File names may define the splits, of any
    size (`data_files.split_by_names`). Otherwise a single text is cut in two, the first 90 % for training. Of several
    texts, or of rows, about 10 % are held out by a hash of their content. The held-out share is smaller if the text is
    large: about MOST_EVALUATED bytes, but at least one whole file of several. Raises UserError if the source is missing
    or fails, if `field` does not suit it, or if there is not enough text.
    """
    if by_name.is_reader(source):
        errors.refuse((field, f"text.field = {field!r} is for tables, and {source} is your function. Leave it empty."))
        return load_users(source)
    files, used = find(source, field)
    parts = data_files.split_by_names("text", used)  # files that are not in a folder have no such names
    text = divide_by_names(source, parts, field) if parts else divide(source, read_once(source, used, field))
    empty = sum(not file.size for file in used)
    lines = [] if source in NAMED else data_files.describe_skipped(source, files, used)
    lines += [f"empty files left out: {empty:,}"] * bool(empty)
    return text._replace(description=data_files.join_lines(source, text.description, lines))


def load_users(source: str) -> Text:
    """Return the text of the user's function 'my_file:read': () -> (training documents, held-out documents).

    Both are iterables of str or bytes, which this function holds in memory. Raises UserError if the function fails, for
    a result of another form, for NUL in a document, and if a part has no text.
    """
    read, label = by_name.choose("reader", source, {STDLIB: load}, "text.source"), f"text.source = {source}"
    with by_name.user_errors(label):  # a single str would be read letter by letter
        train, evaluation = ([*part] if not isinstance(part, str | bytes) else [None] for part in read())
        contents = [[item.encode() if isinstance(item, str) else item for item in part] for part in (train, evaluation)]
    is_valid = all(isinstance(item, bytes) and SEPARATOR not in item for part in contents for item in part)
    form = "two iterables, training and held-out documents, each a str or bytes without NUL"
    errors.refuse(
        (not is_valid, f"{label} must return {form}"),
        (not all(map(any, contents)), f"{label} must return {form}, but one of them has no text"),
    )
    train, evaluation = ([hold(source, item) for item in part if item] for part in contents)
    remark = data_files.describe_repeated(digests(train), digests(evaluation))
    description = f"{source}: {len(train):,} documents to train on; {len(evaluation):,} to evaluate{remark}"
    return Text(source, make_part(train), make_part(evaluation), description)


def hold(name: str, content: bytes) -> Source:
    """Return a document in memory as a Source."""
    file = data_files.File(pathlib.PurePath(), name, len(content), functools.partial(io.BytesIO, content))
    return Source(file, functools.partial(iter, [content]), len(content), hashlib.sha256(content).digest())


def load_whole(source: str, field: str = "") -> Part:
    """Return all documents as one part, whatever their file names.

    source, field: as in `load`, but no function of the user's. Raises UserError if the source is missing or has no
    text, or if `field` does not suit it.
    """
    return make_part(read_once(source, find(source, field)[1], field))


def find(source: str, field: str, *labels: str) -> tuple[list[data_files.File], list[data_files.File]]:
    """Return all files of a source, and those with its text: with a field its tables, without one all files.

    source: a path, the name of a text (NAMED) or hub:NAME. labels: further columns to load. Raises UserError if the
    source is missing, if `field` is set and there is no table, or if `field` is "" and all files are tables.
    """
    if source in (STDLIB, DOCSTRINGS):
        files = [data_files.on_disk(file) for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    elif source in download.NAMED:
        files = [data_files.on_disk(download.fetch(*download.NAMED[source]))]
    else:
        alternatives = f"a named text ({', '.join(NAMED)}) or data set ({tables.HUB}NAME)"
        hint = ". Several sources need a share each: a.txt:0.7, b.txt:0.3" if by_name.SHARED.search(source) else ""
        files = tables.find(source, field, *labels, alternatives=alternatives, hint=hint)
    selected, problem = tables.select(files), ""
    if files and files == selected and not field:  # without a field, a model would learn commas
        next(tables.rows(files[0], field), None)  # its error lists the fields
        problem = f"finds no text in {files[0].name}, a table without rows. Give a table with rows."
    elif field and not selected:
        problem = f"is for tables ({', '.join(tables.KINDS)}), and {source} has none. Leave it empty."
    if problem:
        raise errors.UserError(f"text.field = {field!r} {problem}")
    return files, selected if field else files


def read_once(name: str, candidates: Sequence[data_files.File], field: str) -> list[Source]:
    """Read each file once for its size and digest. Return a Source, which can read it again, for each file with text.

    name: of the source, for messages; with 'docstrings', a file's text is its docstrings. field: the column of a table
    that holds the text. Raises UserError if a table lacks this column, or if no file has text.
    """
    texts = []
    for file in (file for file in candidates if file.size):
        kind, rows, digest, size = tables.kind(file), None, hashlib.sha256(), 0
        if kind and (field or kind in (tables.read_parquet, tables.read_hub)):
            rows, digest = functools.partial(tables.rows, file, field), hashlib.sha256(field.encode())
            next(rows(), None)  # raises UserError now if the table lacks the field
            read = functools.partial(join, rows)
        else:
            read = functools.partial(read_docstrings if name == DOCSTRINGS else data_files.pieces, file)
        content = data_files.pieces(file, text=kind is not tables.read_parquet) if rows else read()
        for piece in [file.version.encode()] if file.version else content:
            digest.update(piece)
            size += len(piece)
        if size:
            texts.append(Source(file, read, max(file.size, LARGE) if file.version else size, digest.digest(), rows))
    errors.refuse((not texts, f"{name} contains no text. Give a file or folder with text."))
    return texts


def documents(source: str, field: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each document: the path of a file, or the file and place of a table's row.

    field: the column of a table with the text. Rows without text are left out.
    """
    for text in read_once(source, find(source, field)[1], field):
        if text.rows:
            rows = tables.read(text.file, field)
            yield from ((f"{text.file}, {place}", content.encode()) for place, content, _ in rows if content)
        else:
            yield str(text.file), b"".join(text.read())


def divide_by_names(name: str, by_name: Mapping[str, Sequence[data_files.File]], field: str) -> Text:
    """Return the parts that file names define. The description counts the held-out texts that are also trained on.

    by_name: part -> its files. field: the column of a table that holds the text. Raises UserError for a part without
    text.
    """
    used = data_files.used_parts(by_name)
    train, evaluation = (read_once(f"{name} ({data_files.join_names(part)})", part, field) for part in used)
    description = data_files.describe_parts(name, "by their names,", by_name)
    description += data_files.describe_repeated(digests(train), digests(evaluation))
    return Text(name, make_part(train), make_part(evaluation), description)


def digests(texts: Sequence[Source]) -> Iterator[bytes]:
    """Yield the digest of each document, 8 bytes. A data set of the hub has a single one: it is not loaded again."""
    for text in texts:
        yield from map(data_files.digest, text.rows()) if text.rows and not text.file.version else [text.digest[:8]]


def divide(name: str, texts: Sequence[Source]) -> Text:
    """Return the texts as a training and a held-out part, called `name`.

    A single text is cut in two. Several texts, or the rows of tables, are divided by digests of their contents.
    """
    share = min(EVALUATION_SHARE, MOST_EVALUATED / sum(text.size for text in texts))
    if texts[0].rows:  # rows with smaller digests are held out
        bound = int(share * 2**64).to_bytes(8, "big")
        parts = [[select_rows(text, bound, low) for text in texts] for low in (False, True)]
        names = data_files.join_names([text.file for text in texts])
        description = f"{name}: about {share:.2%} of the rows of {names} are held out, by their contents"
        return Text(name, *map(make_part, parts), description)
    if len({text.digest for text in texts}) == 1:
        return cut(name, texts[0])
    parts = data_files.divide(texts, [text.digest[:8] for text in texts], share=share)
    train, evaluation = ([text.file for text in part] for part in parts)
    by_part = {data_files.TRAIN: train, data_files.TEST: evaluation}
    description = "" if name in NAMED else data_files.describe_parts(name, "by their contents,", by_part)
    return Text(name, *map(make_part, parts), description)


def select_rows(text: Source, bound: bytes, low: bool) -> Source:
    """Return a table with the rows whose digests are below the bound (low), or the rows with the other digests."""
    digest = hashlib.sha256(text.digest + bound + bytes([low])).digest()
    return text._replace(read=functools.partial(join, text.rows, bound, low), digest=digest)


def join(rows: Read, bound: bytes = b"", low: bool = False) -> Iterator[bytes]:
    """Yield the rows with digests below the bound (low) or the others, in larger pieces, with NUL between two rows."""
    selected = (row for row in rows() if (data_files.digest(row) < bound) == low)
    for number, batch in enumerate(tokenization.gather(selected, data_files.CHUNK)):
        yield SEPARATOR * (number > 0) + SEPARATOR.join(batch)


def cut(name: str, text: Source) -> Text:
    """Return a document as two parts: its end, a tenth but at most about MOST_EVALUATED bytes, is held out.

    The cut is between two UTF-8 characters. Raises UserError if the document is too short.
    """
    at = max(text.size * 9 // 10, text.size - MOST_EVALUATED)
    first = max(at - 3, 0)
    near = b"".join(slice_bytes(text.read, first, at + 1))
    while at > first and near[at - first] & 0b1100_0000 == 0b1000_0000:  # inside a UTF-8 character
        at -= 1
    errors.refuse((not 0 < at < text.size, f"{name} has too little text to hold out a part of it. Give more text."))
    parts = []
    for ends in ((0, at), (at, text.size)):
        piece = text._replace(read=functools.partial(slice_bytes, text.read, *ends), size=ends[1] - ends[0])
        parts.append(make_part([piece], ends))
    description = f"{name}: the first {100 * at / text.size:.4g} % are for training, the rest is held out"
    return Text(name, *parts, "" if name in NAMED else description)


def slice_bytes(read: Read, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes from `start` to before `stop` of a document, in pieces. read: yields the document's pieces."""
    n = 0
    for piece in read():
        if inside := piece[max(start - n, 0) : max(stop - n, 0)]:
            yield inside
        n += len(piece)
        if n >= stop:
            return


def make_part(sources: Sequence[Source], ends: tuple[int, int] | None = None) -> Part:
    """Return these sources as a part. ends only enters the part's digest, and cuts nothing.

    For a source that is a piece of a document, it is the piece's first byte and the byte after its last.
    """
    return Part(sources, hashlib.sha256(repr([*(text.digest.hex() for text in sources), ends]).encode()).hexdigest())


def read_docstrings(file: data_files.File) -> Iterator[bytes]:
    """Yield one document: the docstrings of a Python file, with empty lines between them, or b"" if it has none.

    Raises SyntaxError if the file is not valid Python.
    """
    yield "\n\n".join(list_docstrings(file, ast.Module)).encode()


def list_docstrings(file: data_files.File, *extra: type) -> Iterator[str]:
    """Return an iterator of the docstrings of a Python file's classes and functions, and of AST nodes of types `extra`.

    Raises SyntaxError if the file is not valid Python, already at the call.
    """
    described = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, *extra)
    nodes = (node for node in ast.walk(ast.parse(data_files.load_text(file))) if isinstance(node, described))
    return filter(None, map(ast.get_docstring, nodes))
