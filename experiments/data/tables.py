"""Documents in a field of tables: JSON lines, CSV, Parquet, and data sets of Hugging Face's `datasets`."""

import contextlib
import csv
import errno
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.data import files
from experiments.engine import errors

HUB = "hub:"  # begins the name of a data set
SAVED = ("dataset_dict.json", "state.json")  # one of these is in a folder that `save_to_disk` has written
LONGEST_CELL = 2**30  # characters of a cell in CSV
OTHERS = (";", "\t", "|", ",")  # what may stand between columns elsewhere
COPIES = 8  # bytes of memory for each of a list in JSON
LARGE, EXPANDS = 2**28, 1000  # bytes of a table that nobody minds; how much a text is packed at most
Row = tuple[str, Mapping[str, Any]]  # where it stands, and what is in it


def _json(file: files.File, field: str, *others: str) -> Iterator[Row]:
    """The rows of JSON lines; or of one list of objects, if the file begins with a bracket."""
    lines = enumerate(files.lines(files.pieces(file)), 1)
    for number, line in lines:
        where = f"{file.name}, line {number:,}"
        listed = number == 1 and line.lstrip().startswith(b"[") and _ending(file) == ".json"
        try:
            found = json.loads(
                files.read(file, copies=COPIES) if listed else line or b"null", object_pairs_hook=_object
            )
        except (ValueError, RecursionError) as error:
            raise errors.UserError(f"{where} is no JSON: {error}") from error
        for row in found if listed else [found] if line.strip() else []:
            if not isinstance(row, dict):
                raise errors.UserError(f"{where} must be an object with the field {field!r}")
            yield where, row
        if listed:
            return


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON. Raises ValueError if a name in it is repeated."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"it repeats {_repeated([name for name, _ in pairs])!r}")
    return found


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for i, name in enumerate(names) if name in names[:i]), None)


def _csv(file: files.File, *fields: str) -> Iterator[Row]:
    """The rows of a table with commas between its cells, which may be quoted."""
    csv.field_size_limit(LONGEST_CELL)
    lines, first = (line.decode() + "\n" for line in files.lines(files.pieces(file))), 1

    def rows() -> Iterator[tuple[int, list[str]]]:
        nonlocal first
        for row in (reader := csv.reader(lines, strict=True)):
            yield reader.line_num, row
            first = reader.line_num + 1

    try:
        yield from _of_cells(file, rows(), ",")
    except csv.Error as error:
        wrong = (
            f'{file.name}, the row that begins in line {first:,}: {error} (a cell in quotation marks, with "" inside)'
        )
        raise errors.UserError(wrong) from error


def _tsv(file: files.File, *fields: str) -> Iterator[Row]:
    """The rows of a table with tabs between its cells, in which a quotation mark is a character as others are."""
    lines = enumerate(files.lines(files.pieces(file)), 1)
    yield from _of_cells(file, ((n, line.decode().removesuffix("\r").split("\t")) for n, line in lines), "\t")


def _of_cells(file: files.File, rows: Iterable[tuple[int, list[str]]], separator: str) -> Iterator[Row]:
    """Each row as an object. Raises UserError for names that are repeated, and for a row of another length."""
    names: list[str] = []
    for number, cells in ((number, cells) for number, cells in rows if any(cells)):  # without empty lines
        where = f"{file.name}, line {number:,}"
        if not names:
            names = cells
            if (name := _repeated(names)) is not None:
                raise errors.UserError(f"{where}: the column {name!r} is there twice: rename one of the two")
            if len(names) == 1 and (other := next((one for one in OTHERS if one in names[0]), "")):
                raise errors.UserError(f"{where} has {other!r} between its columns: {separator!r} must be there")
        elif len(cells) != len(names):
            wrong = f"{where} has {len(cells)} cells, and the header {len(names)}"
            raise errors.UserError(
                f"{wrong} ({', '.join(names)}): with {separator!r} between them they must be as many"
            )
        else:
            yield where, dict(zip(names, cells, strict=True))


def _parquet(file: files.File, *fields: str) -> Iterator[Row]:
    with files.extra(f"the Parquet table {file.name}"):
        from pyarrow import parquet
    with file.open() as content:
        table = parquet.ParquetFile(content)
        names = table.schema_arrow.names
        if not {*fields} <= {*names}:
            yield file.name, dict.fromkeys(names)
        for group in range(table.num_row_groups):
            columns = map(table.metadata.row_group(group).column, range(table.metadata.num_columns))
            _check_unpacked(file, sum(column.total_uncompressed_size for column in columns))
        n = 0
        for batch in table.iter_batches(columns=[*fields], batch_size=1024):
            n += batch.nbytes
            _check_unpacked(file, n)
            yield from ((file.name, row) for row in batch.to_pylist())


def _check_unpacked(file: files.File, size: int) -> None:
    """Raise UserError for a file that becomes more than EXPANDS times as large, and large."""
    if size > max(LARGE, EXPANDS * file.size):
        raise errors.UserError(
            f"{file.name} has {file.size:,} bytes and would become more than {size:,}: no table of text is packed so"
        )


def _hub(file: files.File, *fields: str) -> Iterator[Row]:
    return ((file.name, row) for row in file.open())


KINDS: dict[str, Callable[..., Iterator[Row]]] = {".jsonl": _json, ".ndjson": _json, ".json": _json}
KINDS |= {".csv": _csv, ".tsv": _tsv, ".parquet": _parquet}


def _ending(file: files.File) -> str:
    """The end of its name, before .gz or .zst."""
    return pathlib.PurePath(file.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def kind(file: files.File) -> Callable[..., Iterator[Row]] | None:
    """What reads the rows of a file, by the end of its name (before .gz or .zst); None: it is no table."""
    return _hub if file.version else KINDS.get(_ending(file))


def among(found: Sequence[files.File], others: Sequence[files.File] = ()) -> list[files.File]:
    """The tables, or the others; a .json is a table if there is nothing else, as it may also describe the rest."""
    of_tables = [file for file in found if kind(file)]
    return [file for file in of_tables if _ending(file) != ".json" or file.version] or [*others] or of_tables


def applies(file: files.File, field: str) -> bool:
    """Whether it is read as a table: without a field, among other files, only what cannot be text itself."""
    return kind(file) is not None and (bool(field) or kind(file) in (_parquet, _hub))


def content(file: files.File) -> Iterable[bytes]:
    """Bytes that are the same for the same table."""
    return [file.version.encode()] if file.version else files.pieces(file, text=kind(file) is not _parquet)


def rows(file: files.File, field: str) -> Iterator[bytes]:
    """The documents in a field of a table, without empty ones, in UTF-8. UserError where the field is missing (with the
    names that are there) or holds no text, for a damaged file, and for what needs an extra."""
    return (text.encode() for text, _ in pairs(file, field))


def pairs(file: files.File, field: str, label: str = "") -> Iterator[tuple[str, str]]:
    """The same as text, and what is in the field `label` of the same row, '' without one. UserError as `rows`."""
    names = [field, label] if label else [field]
    with _refusing(file.name):
        for where, row in kind(file)(file, *names):
            for name in names:
                if not name or name not in row:
                    raise errors.UserError(f"{where}: text.field = {name!r} is none of its fields: {', '.join(row)}")
            text = row[field]
            if not isinstance(text, str | None):
                raise errors.UserError(f"{where}: the field {field!r} is no text but {str(text)[:40]!r}")
            for name in names if text else ():
                _check_text(f"{where}: the field {name!r}", str(row[name]))
            if label and isinstance(row[label], list | dict | bytes):
                raise errors.UserError(f"{where}: the field {label!r} names no class: {str(row[label])[:40]}")
            if label and row[label] in (None, ""):
                raise errors.UserError(f"{where}: the field {label!r} is empty")
            if text:
                yield text, str(row[label]) if label else ""


def _check_text(what: str, text: str) -> None:
    """Raise UserError for text that UTF-8 does not have, or that no document holds."""
    if (wrong := re.search("[\0\ud800-\udfff]", text)) is not None:
        raise errors.UserError(
            f"{what} holds {wrong[0]!r}, which is no character of a text: mend or leave out that row"
        )


def found(source: str, *fields: str, named: str, hint: str = "") -> list[files.File]:
    """The file at a path, those of a folder, or the splits of a data set (`hub`). UserError, with what else there is a
    name for (`named`), where there is none."""
    path = pathlib.Path(os.path.expanduser(source))
    if source.startswith(HUB):
        return hub(source, *fields)
    if not source or _absent(path):
        raise errors.UserError(f"{source!r} is neither {named} nor a path that exists ({path.absolute()}){hint}")
    return files.folder(path, hidden=(".",)) if os.path.isdir(path) else [files.on_disk(path)]


def _absent(path: pathlib.Path) -> bool:
    """Whether nothing is there. Not so where the way to it is closed, or its drive gone: who reads it says that."""
    try:
        path.lstat()
    except ValueError:
        return True
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
    return False


def hub(source: str, *fields: str, stream: bool = True) -> list[files.File]:
    """The splits of 'hub:NAME' or 'hub:NAME:CONFIG', as files of their names: of a data set of the Hugging Face hub,
    read as a stream or kept by `datasets`, of a folder of data files, or of one that `save_to_disk` has written.
    UserError where there is none."""
    name, _, config = source.removeprefix(HUB).partition(":")
    folder = os.path.expanduser(name)
    if not name:
        raise errors.UserError(f"{source!r} needs the name of a data set: hub:NAME, hub:NAME:CONFIG or hub:FOLDER")
    with files.extra(source), _refusing(source):
        import datasets

        if any(os.path.isfile(os.path.join(folder, saved)) for saved in SAVED):
            found, version = datasets.load_from_disk(folder), ""
            found = found if isinstance(found, dict) else {files.TRAIN: found}
        else:
            builder = datasets.load_dataset_builder(folder if os.path.isdir(folder) else name, config or None)
            version = f"{builder.config_id} {builder.hash}"
            if not stream:
                builder.download_and_prepare()
            found = builder.as_streaming_dataset() if stream else builder.as_dataset()
        return [_split(source, *split, fields=fields, version=version) for split in found.items()]


def _split(source: str, name: str, rows: Any, *, fields: tuple[str, ...], version: str) -> files.File:
    one = rows.select_columns([*fields]) if fields and {*fields} <= {*(rows.column_names or ())} else rows
    known = getattr((rows.info.splits or {}).get(name), "num_bytes", 0)
    made_of = f"{source} {name} {version or rows._fingerprint}"
    return files.File(pathlib.PurePath(name), f"{source} ({name})", known or 1, lambda: one, version=made_of)


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except (errors.UserError, ImportError):
        raise
    except Exception as error:  # of csv, pyarrow, datasets, and whatever these download with
        said = (str(error).splitlines() or [type(error).__name__])[0]
        said = "one of its splits is empty" if isinstance(error, IndexError) else said  # of `datasets`
        raise errors.UserError(f"{name} cannot be read: {said}") from error
