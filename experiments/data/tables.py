"""Documents in a field of tables: JSON lines, CSV, Parquet, and data sets of Hugging Face's `datasets`."""

import contextlib
import csv
import errno
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from experiments.data import files
from experiments.engine import errors

HUB = "hub:"  # begins the name of a data set
SAVED = ("dataset_dict.json", "state.json")  # one of these is in a folder that `save_to_disk` has written
LONGEST_CELL = 2**30  # characters of a cell in CSV
Row = tuple[str, Mapping[str, Any]]  # where it stands, and what is in it


def _json(file: files.File, field: str, *others: str) -> Iterator[Row]:
    for number, line in enumerate(files.lines(files.pieces(file)), 1):
        if line.strip():
            where = f"{file.name}, line {number:,}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise errors.UserError(f"{where} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise errors.UserError(f"{where} must be an object with the field {field!r}")
            yield where, row


def _csv(file: files.File, *fields: str, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL)
    lines = (line.decode("utf-8-sig") + "\n" for line in files.lines(files.pieces(file)))
    rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
    for row in rows:
        yield f"{file.name}, line {rows.line_num:,}", {name: cell for name, cell in row.items() if name is not None}


def _parquet(file: files.File, *fields: str) -> Iterator[Row]:
    with files.extra(f"the Parquet table {file.name}"):
        from pyarrow import parquet
    with file.open() as content:
        table = parquet.ParquetFile(content)
        names = table.schema_arrow.names
        if not {*fields} <= {*names}:
            yield file.name, dict.fromkeys(names)
        for batch in table.iter_batches(columns=[*fields], batch_size=1024):
            yield from ((file.name, row) for row in batch.to_pylist())


def _hub(file: files.File, *fields: str) -> Iterator[Row]:
    return ((file.name, row) for row in file.open())


KINDS: dict[str, Callable[..., Iterator[Row]]] = {".jsonl": _json, ".ndjson": _json, ".csv": _csv}
KINDS |= {".tsv": functools.partial(_csv, delimiter="\t"), ".parquet": _parquet}


def kind(file: files.File) -> Callable[..., Iterator[Row]] | None:
    """What reads the rows of a file, by the end of its name (before .gz or .zst); None: it is no table."""
    if file.version:
        return _hub
    return KINDS.get(pathlib.PurePath(file.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix)


def applies(file: files.File, field: str) -> bool:
    """Whether it is read as a table: without a field, among other files, only what cannot be text itself."""
    return kind(file) is not None and (bool(field) or kind(file) in (_parquet, _hub))


def content(file: files.File) -> Iterable[bytes]:
    """Bytes that are the same for the same table."""
    return [file.version.encode()] if file.version else files.pieces(file, text=kind(file) is not _parquet)


def rows(file: files.File, field: str) -> Iterator[bytes]:
    """The documents in a field of a table, without empty ones, in UTF-8. UserError where the field is missing (with the
    names that are there) or holds no text, for a damaged file, and for what needs an extra."""
    return (text.encode("utf-8", "replace") for text, _ in pairs(file, field))


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
            if label and row[label] in (None, ""):
                raise errors.UserError(f"{where}: the field {label!r} is empty")
            if text:
                yield text, str(row[label]) if label else ""


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
