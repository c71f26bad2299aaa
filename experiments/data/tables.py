"""Read documents from a field of tables: JSON lines, CSV, Parquet, and data sets of Hugging Face's `datasets`."""

import csv
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.data import files
from experiments.engine import disk

HUB = "hub:"  # prefix of the name of a data set
SAVED = ("dataset_dict.json", "state.json")  # `save_to_disk` writes one of these
MAX_CELL = 2**30  # characters of a cell in CSV
OTHERS = (";", "\t", "|", ",")  # separators of columns in other tables
Row = tuple[str, Mapping[str, Any]]  # its place in the file, and its fields


def read_json(file: files.File, *fields: str) -> Iterator[Row]:
    """Yield the rows of JSON lines, or of one list of objects, if a .json file begins with a bracket."""
    for number, line in enumerate(files.lines(files.pieces(file)), 1):
        place = f"line {number:,}"
        is_list = number == 1 and line.lstrip().startswith(b"[") and ending(file) == ".json"
        with disk.reading(f"{file.name}, {place}"):
            rows = json.loads(files.read(file)) if is_list else [json.loads(line)] if line.strip() else []
        for row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"{place} must be an object with the field {fields[0]!r}")
            yield place, row
        if is_list:
            return


def read_cells(file: files.File, *fields: str) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv table. In a .tsv a quotation mark is a character like any other.

    Raises ValueError for a wrong header, a row of another length, and a wrong quotation mark.
    """
    separator, quoting = ("\t", csv.QUOTE_NONE) if ending(file) == ".tsv" else (",", csv.QUOTE_MINIMAL)
    csv.field_size_limit(MAX_CELL)
    lines = (line.decode() + "\n" for line in files.lines(files.pieces(file)))
    rows, names, last = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True), [], 0
    try:
        for cells in rows:
            place, last = f"line {rows.line_num:,}", rows.line_num
            if not any(cells):  # an empty line
                continue
            if not names:
                names = cells
                check_header(place, names, separator)
            elif len(cells) != len(names):
                raise ValueError(f"{place} has {len(cells)} cells, and the header {len(names)} (by {separator!r})")
            else:
                yield place, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        remedy = 'put a cell with quotation marks or line ends in quotation marks, with "" inside'
        raise ValueError(f"the row that begins in line {last + 1:,}: {error}. {remedy}") from error


def check_header(place: str, names: Sequence[str], separator: str) -> None:
    """Raise ValueError for names that repeat, or that have another separator between them."""
    if len({*names}) < len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"{place}: the column {repeated!r} is there twice: rename one of them")
    separators = [character for character in OTHERS if character in names[0]]
    if len(names) == 1 and separators:
        raise ValueError(f"{place}: {separators[0]!r} separates its columns: it must be {separator!r}")


def read_parquet(file: files.File, *fields: str) -> Iterator[Row]:
    """Yield the rows of a Parquet table."""
    with files.require_extra(f"the Parquet table {file.name}"):
        from pyarrow import parquet
    with file.open() as content:
        table = parquet.ParquetFile(content)
        names = table.schema_arrow.names
        if not {*fields} <= {*names}:
            yield "row 1", dict.fromkeys(names)  # `pairs` reports the missing field
        batches = table.iter_batches(columns=[*fields], batch_size=1024)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"row {number:,}", row) for number, row in enumerate(rows, 1))


def read_hub(file: files.File, *fields: str) -> Iterator[Row]:
    """Yield the rows of a split of a data set."""
    with disk.reading(file.name, Exception):  # of `datasets` and whatever it downloads with
        yield from ((f"row {number:,}", row) for number, row in enumerate(file.open(), 1))


KINDS: dict[str, Callable[..., Iterator[Row]]] = {".jsonl": read_json, ".ndjson": read_json, ".json": read_json}
KINDS |= {".csv": read_cells, ".tsv": read_cells, ".parquet": read_parquet}


def ending(file: files.File) -> str:
    """Return the end of the file's name, without .gz or .zst."""
    return pathlib.PurePath(file.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def kind(file: files.File) -> Callable[..., Iterator[Row]] | None:
    """Return the function that reads the rows of a file; None if it is not a table.

    It follows from the end of the file's name; `read_hub` reads a data set of the hub.
    """
    return read_hub if file.version else KINDS.get(ending(file))


def select(every: Sequence[files.File], in_folders: Sequence[files.File] = ()) -> list[files.File]:
    """Return the tables, or else `in_folders`. A .json may describe other files: it is a table if it is alone."""
    tables = [file for file in every if kind(file)]
    return [file for file in tables if ending(file) != ".json" or file.version] or [*in_folders] or tables


def content(file: files.File) -> Iterable[bytes]:
    """Return bytes that are the same for the same table."""
    return [file.version.encode()] if file.version else files.pieces(file, text=kind(file) is not read_parquet)


def rows(file: files.File, field: str) -> Iterator[bytes]:
    """Yield the documents in a field of a table, without empty ones, in UTF-8. Raises UserError as `pairs`."""
    return (text.encode() for text, _ in pairs(file, field))


def pairs(file: files.File, field: str, label: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a field of a table, without empty ones, and the field `label` of their rows, or ''.

    Raises UserError if a field is missing, is not text, or names no class.
    """
    names = [field, label] if label else [field]
    with disk.reading(file.name):
        for place, row in kind(file)(file, *names):
            if missing := [name for name in names if name not in row]:
                raise ValueError(f"{place}: no field text.field = {missing[0]!r}; its fields: {', '.join(row)}")
            if row[field] or not isinstance(row[field], str | None):
                check_row(place, row, field, label)
                yield row[field], str(row[label]) if label else ""


def check_row(place: str, row: Mapping[str, Any], field: str, label: str) -> None:
    """Raise ValueError unless the field holds text, and the label names a class."""
    problems = [] if isinstance(row[field], str) else [f"the field {field!r} is not text: {str(row[field])[:40]!r}"]
    if label and (row[label] in (None, "") or isinstance(row[label], list | dict | bytes)):
        problems.append(f"the field {label!r} names no class: {str(row[label])[:40]!r}")
    for name in (field, label) if label else (field,):
        if character := re.search("[\0\ud800-\udfff]", str(row[name])):  # UTF-8 has no half a character
            problems.append(f"the field {name!r} holds {character[0]!r}: correct or leave out that row")
    if problems:
        raise ValueError(f"{place}: {problems[0]}")


def find(source: str, *fields: str, alternatives: str, hint: str = "") -> list[files.File]:
    """Return the file at a path, the files of a folder (`files.find`), or the splits of a data set (`load_hub`)."""
    return load_hub(source, *fields) if source.startswith(HUB) else files.find(source, alternatives, hint=hint)


def load_hub(source: str, *fields: str, stream: bool = True) -> list[files.File]:
    """Return the splits of 'hub:NAME' or 'hub:NAME:CONFIG', as files with their names.

    NAME is a data set of the Hugging Face hub, streamed or downloaded, a folder of data files, or a folder that
    `save_to_disk` has written. Raises UserError if it is missing.
    """
    name, _, config = source.removeprefix(HUB).partition(":")
    folder = os.path.expanduser(name)
    with files.require_extra(source):
        import datasets
    with disk.reading(source, Exception):  # as in `read_hub`
        if any(os.path.isfile(os.path.join(folder, saved)) for saved in SAVED):
            loaded, version = datasets.load_from_disk(folder), ""
            splits = loaded if isinstance(loaded, dict) else {files.TRAIN: loaded}
        else:
            builder = datasets.load_dataset_builder(folder if os.path.isdir(folder) else name, config or None)
            version = f"{builder.config_id} {builder.hash}"
            if not stream:
                builder.download_and_prepare()
            splits = builder.as_streaming_dataset() if stream else builder.as_dataset()
        return [as_file(source, name, rows, fields, version) for name, rows in splits.items()]


def as_file(source: str, name: str, rows: Any, fields: tuple[str, ...], version: str) -> files.File:
    """Return a split of a data set as a file, with these columns only, if it has them."""
    selected = rows.select_columns([*fields]) if fields and {*fields} <= {*(rows.column_names or ())} else rows
    info = (rows.info.splits or {}).get(name)
    size = (info and info.num_bytes) or 1
    version = f"{source} {name} {version or rows._fingerprint}"
    return files.File(pathlib.PurePath(name), f"{source} ({name})", size, lambda: selected, version=version)
