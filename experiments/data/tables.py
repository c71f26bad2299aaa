"""Read documents from a field of tables: JSON lines, CSV, Parquet, and data sets of Hugging Face's `datasets`."""

import csv
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.data import files
from experiments.engine import disk, errors

HUB = "hub:"  # begins the name of a data set
SAVED = ("dataset_dict.json", "state.json")  # `save_to_disk` writes one of these
LONGEST_CELL = 2**30  # characters of a cell in CSV
OTHERS = (";", "\t", "|", ",")  # separators of columns in other tables
Row = tuple[str, Mapping[str, Any]]  # its place, and its fields


def read_json(file: files.File, field: str, *others: str) -> Iterator[Row]:
    """Yield the rows of JSON lines, or of one list of objects, if a .json file begins with a bracket."""
    for number, line in enumerate(files.lines(files.pieces(file)), 1):
        where = f"{file.name}, line {number:,}"
        is_list = number == 1 and line.lstrip().startswith(b"[") and ending(file) == ".json"
        with disk.reading(where):
            rows = json.loads(files.read(file)) if is_list else [json.loads(line)] if line.strip() else []
        for row in rows:
            if not isinstance(row, dict):
                raise errors.UserError(f"{where} must be an object with the field {field!r}")
            yield where, row
        if is_list:
            return


def read_cells(file: files.File, *fields: str) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv table. Between tabs a quotation mark is a character like any other.

    Raises UserError for a wrong header, a row of another length, and a wrong quotation mark."""
    separator, quoting = ("\t", csv.QUOTE_NONE) if ending(file) == ".tsv" else (",", csv.QUOTE_MINIMAL)
    csv.field_size_limit(LONGEST_CELL)
    lines = (line.decode() + "\n" for line in files.lines(files.pieces(file)))
    rows, names, last = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True), [], 0
    try:
        for cells in rows:
            where, last = f"{file.name}, line {rows.line_num:,}", rows.line_num
            if not any(cells):  # an empty line
                continue
            if not names:
                check_header(where, names := cells, separator)
            elif len(cells) != len(names):
                wrong = f"{where} has {len(cells)} cells, and the header {len(names)} ({', '.join(names)})"
                raise errors.UserError(f"{wrong}: with {separator!r} between them they must be as many")
            else:
                yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        right = 'put a cell with quotation marks or line ends in quotation marks, with "" inside'
        raise errors.UserError(f"{file.name}, the row that begins in line {last + 1:,}: {error}. {right}") from error


def check_header(where: str, names: Sequence[str], separator: str) -> None:
    """Raise UserError for names that repeat, or that another separator stands between."""
    repeated = [name for i, name in enumerate(names) if name in names[:i]]
    wrong = [f"the column {name!r} is there twice: rename one of them" for name in repeated]
    for other in (other for other in OTHERS if len(names) == 1 and other in names[0]):
        wrong.append(f"{other!r} separates its columns: it must be {separator!r}")
    if wrong:
        raise errors.UserError(f"{where}: {wrong[0]}")


def read_parquet(file: files.File, *fields: str) -> Iterator[Row]:
    with files.extra(f"the Parquet table {file.name}"):
        from pyarrow import parquet
    with file.open() as content:
        table = parquet.ParquetFile(content)
        names = table.schema_arrow.names
        if not {*fields} <= {*names}:
            yield file.name, dict.fromkeys(names)  # `pairs` reports the missing field
        for batch in table.iter_batches(columns=[*fields], batch_size=1024):
            yield from ((file.name, row) for row in batch.to_pylist())


def read_hub(file: files.File, *fields: str) -> Iterator[Row]:
    with disk.reading(file.name, Exception):  # of `datasets` and whatever it downloads with
        yield from ((file.name, row) for row in file.open())


KINDS: dict[str, Callable[..., Iterator[Row]]] = {".jsonl": read_json, ".ndjson": read_json, ".json": read_json}
KINDS |= {".csv": read_cells, ".tsv": read_cells, ".parquet": read_parquet}


def ending(file: files.File) -> str:
    """Return the end of its name, before .gz or .zst."""
    return pathlib.PurePath(file.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def kind(file: files.File) -> Callable[..., Iterator[Row]] | None:
    """Return the function that reads the rows of a file, by the end of its name; None if it is not a table."""
    return read_hub if file.version else KINDS.get(ending(file))


def among(found: Sequence[files.File], others: Sequence[files.File] = ()) -> list[files.File]:
    """Return the tables, or else the others; a .json, which may describe the rest, if there is nothing else."""
    of_tables = [file for file in found if kind(file)]
    return [file for file in of_tables if ending(file) != ".json" or file.version] or [*others] or of_tables


def applies(file: files.File, field: str) -> bool:
    """Return True if the file is read as a table: without a field, only if it cannot be text itself."""
    return kind(file) is not None and (bool(field) or kind(file) in (read_parquet, read_hub))


def content(file: files.File) -> Iterable[bytes]:
    """Return bytes that are the same for the same table."""
    return [file.version.encode()] if file.version else files.pieces(file, text=kind(file) is not read_parquet)


def rows(file: files.File, field: str) -> Iterator[bytes]:
    """Yield the documents in a field of a table, without empty ones, in UTF-8. Raises UserError as `pairs`."""
    return (text.encode() for text, _ in pairs(file, field))


def pairs(file: files.File, field: str, label: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a field of a table, without empty ones; each with the field `label` of its row, '' without
    one.

    Raises UserError if a field is missing, holds no text, or names no class."""
    names = [field, label] if label else [field]
    with disk.reading(file.name):
        for where, row in kind(file)(file, *names):
            for name in names:
                if not name or name not in row:
                    raise errors.UserError(f"{where}: text.field = {name!r} is none of its fields: {', '.join(row)}")
            if row[field] or not isinstance(row[field], str | None):
                check_row(where, row, field, label)
                yield row[field], str(row[label]) if label else ""


def check_row(where: str, row: Mapping[str, Any], field: str, label: str) -> None:
    """Raise UserError unless the field holds text, and the label names a class."""
    wrong = [] if isinstance(row[field], str) else [f"the field {field!r} is not text: {str(row[field])[:40]!r}"]
    if label and (row[label] in (None, "") or isinstance(row[label], list | dict | bytes)):
        wrong += [f"the field {label!r} names no class: {str(row[label])[:40]!r}"]
    for name in (name for name in (field, label) if name):
        strange = re.search("[\0\ud800-\udfff]", str(row[name]))  # UTF-8 has no half a character
        wrong += [f"the field {name!r} holds {strange[0]!r}: correct or leave out that row"] if strange else []
    if wrong:
        raise errors.UserError(f"{where}: {wrong[0]}")


def found(source: str, *fields: str, named: str, hint: str = "") -> list[files.File]:
    """Return the file at a path, the files of a folder, or the splits of a data set (`hub`). Raises UserError, with the
    other names that there are (`named`), if there is nothing."""
    path = pathlib.Path(os.path.expanduser(source))
    if source.startswith(HUB):
        return hub(source, *fields)
    if not source or not os.path.exists(path):
        raise errors.UserError(f"{source!r} is neither {named} nor a path that exists ({path.absolute()}){hint}")
    return files.folder(path, hidden=(".",)) if os.path.isdir(path) else [files.on_disk(path)]


def hub(source: str, *fields: str, stream: bool = True) -> list[files.File]:
    """Return the splits of 'hub:NAME' or 'hub:NAME:CONFIG', as files with their names.

    NAME is a data set of the Hugging Face hub, streamed or downloaded, a folder of data files, or a folder that
    `save_to_disk` has written. Raises UserError if there is none."""
    name, _, config = source.removeprefix(HUB).partition(":")
    folder = os.path.expanduser(name)
    with files.extra(source):
        import datasets
    with disk.reading(source, Exception):  # as in `read_hub`
        if any(os.path.isfile(os.path.join(folder, saved)) for saved in SAVED):
            found, version = datasets.load_from_disk(folder), ""
            found = found if isinstance(found, dict) else {files.TRAIN: found}
        else:
            builder = datasets.load_dataset_builder(folder if os.path.isdir(folder) else name, config or None)
            version = f"{builder.config_id} {builder.hash}"
            if not stream:
                builder.download_and_prepare()
            found = builder.as_streaming_dataset() if stream else builder.as_dataset()
        return [split_of(source, *split, fields=fields, version=version) for split in found.items()]


def split_of(source: str, name: str, rows: Any, *, fields: tuple[str, ...], version: str) -> files.File:
    """Return a split as a file; of these columns only, if it has them."""
    selected = rows.select_columns([*fields]) if fields and {*fields} <= {*(rows.column_names or ())} else rows
    known = getattr((rows.info.splits or {}).get(name), "num_bytes", 0)
    made_of = f"{source} {name} {version or rows._fingerprint}"
    return files.File(pathlib.PurePath(name), f"{source} ({name})", known or 1, lambda: selected, version=made_of)
