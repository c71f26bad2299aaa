"""Read the documents in a field of tables: JSON lines, CSV, Parquet, and data sets of Hugging Face's `datasets`."""

import csv
import itertools
import json
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.config import by_name, disk
from experiments.data import classes as class_names, files as data_files

HUB = by_name.HUB
SAVED = ("dataset_dict.json", "state.json")  # `save_to_disk` writes one of these
OTHERS = (";", "\t", "|", ",")  # separators that a header may have by mistake
Row = tuple[str, Mapping[str, Any]]  # the place of a row in its file, such as "line 3", and its fields


def read_json(file: data_files.File, *fields: str) -> Iterator[Row]:
    """Yield ("line 3", object) for each line of JSON, or ("line 1", object) for each object of a list in a .json file.

    A .json file without a bracket at its start has JSON lines. Empty lines are skipped. Objects keep all their fields.
    fields: those that the caller needs, at least one; errors name the first one. Raises UserError for invalid JSON, and
    ValueError if a row is no object.
    """
    is_list = ending(file) == ".json" and next(data_files.pieces(file), b"").lstrip().startswith(b"[")
    for number, line in enumerate([data_files.load_text(file)] if is_list else data_files.lines(file), 1):
        place = f"line {number:,}"
        with disk.reading(f"{file.name}, {place}"):
            rows = json.loads(line) if is_list else [json.loads(line)] if line.strip() else []
        for row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"{place} must be an object with the field {fields[0]!r}")
            yield place, row


def read_cells(file: data_files.File, *fields: str) -> Iterator[Row]:
    """Yield ("line 3", {column: cell}) for each row of a .csv or .tsv table, whatever `fields` are.

    Empty rows are skipped. In a .tsv a quotation mark is an ordinary character. Raises ValueError for two columns of
    one name, another separator, a row of another length, and a misplaced quotation mark.
    """
    separator, quoting = ("\t", csv.QUOTE_NONE) if ending(file) == ".tsv" else (",", csv.QUOTE_MINIMAL)
    csv.field_size_limit(data_files.LONGEST)
    form, header = {"delimiter": separator, "quoting": quoting}, next(filter(str.strip, data_files.lines(file)), "")
    # If the header has spaces after its separators, as in "text, label", all rows may have them.
    form["skipinitialspace"] = any(name.startswith(" ") for name in next(csv.reader([header], **form), [])[1:])
    rows = csv.reader((line + "\n" for line in data_files.lines(file)), strict=True, **form)
    names, last = [], 0
    try:
        for cells in filter(any, rows):  # not the empty lines
            place, last = f"line {rows.line_num:,}", rows.line_num
            if not names:
                names = [cell.strip() for cell in cells]
                others = [other for other in OTHERS if len(names) == 1 and other in names[0]]
                if len({*names}) < len(names):
                    repeated = next(name for i, name in enumerate(names) if name in names[:i])
                    raise ValueError(f"{place}: two columns have the name {repeated!r}. Rename one of them.")
                if others:
                    raise ValueError(f"{place}: the columns are separated by {others[0]!r}. Use {separator!r}.")
            elif len(cells) != len(names):
                problem = f"has {len(cells)} cells, but the header has {len(names)} (separator {separator!r})"
                raise ValueError(f"{place} {problem}")
            else:
                yield place, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        remedy = 'Put quotation marks around a cell that has quotation marks or line ends, and write "" inside.'
        raise ValueError(f"the row that begins in line {last + 1:,}: {error}. {remedy}") from error


def read_parquet(file: data_files.File, *fields: str) -> Iterator[Row]:
    """Yield ("row 1", {column: value}), ... of a Parquet table, with only the columns `fields`.

    If one is missing, first yield ("row 1", {each column of the table: None}), in which `read` finds the fault.
    """
    with data_files.require_extra(f"the Parquet table {file.name}"):
        from pyarrow import parquet
    with file.open() as content:
        table = parquet.ParquetFile(content)
        names = table.schema_arrow.names
        if not {*fields} <= {*names}:
            yield "row 1", dict.fromkeys(names)  # `read` reports the missing field
        batches = table.iter_batches(columns=[*fields], batch_size=1024)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"row {number:,}", row) for number, row in enumerate(rows, 1))


def read_hub(file: data_files.File, *fields: str) -> Iterator[Row]:
    """Yield ("row 1", {column: value}), ... of a split of a data set. `find` chose the columns, not `fields`."""
    with disk.reading(file.name, Exception):  # `datasets` and its libraries for downloads raise errors of many types
        yield from ((f"row {number:,}", row) for number, row in enumerate(file.open(), 1))


KINDS: dict[str, Callable[..., Iterator[Row]]] = {".jsonl": read_json, ".ndjson": read_json, ".json": read_json}
KINDS |= {".csv": read_cells, ".tsv": read_cells, ".parquet": read_parquet}


def ending(file: data_files.File) -> str:
    """Return the last suffix of the file's name in lower case, without .gz or .zst: '.csv' for A.CSV.gz."""
    return pathlib.PurePath(file.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def kind(file: data_files.File) -> Callable[..., Iterator[Row]] | None:
    """Return the function that reads the rows of a file; None if the file is not a table.

    The end of the file's name decides. For a split of a data set on the Hugging Face Hub, return `read_hub`.
    """
    return read_hub if file.version else KINDS.get(ending(file))


def select(files: Sequence[data_files.File], in_folders: Sequence[data_files.File] = ()) -> list[data_files.File]:
    """Return the tables that are not .json. If there are none, return `in_folders`, or if it is empty the .json files.

    A .json file may only describe other files. in_folders: the text files in folders that are named after classes.
    """
    tables = [file for file in files if kind(file)]
    return [file for file in tables if ending(file) != ".json" or file.version] or [*in_folders] or tables


def rows(file: data_files.File, field: str) -> Iterator[bytes]:
    """Yield the non-empty texts in the column `field` of a table, in UTF-8. Raises UserError as tables.read does."""
    return (text.encode() for _, text, _ in read(file, field) if text)


def read(file: data_files.File, field: str, label: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the place of each row of a table, its text in a field, and its class in the field `label`.

    A missing text or class is ''; without `label`, so is every class. Raises UserError if the table lacks a field, if
    a text is not a string, or if a label is not the name of a class.
    """
    names, classes = [field, label] if label else [field], class_names.read_names([file], label)
    with disk.reading(file.name):
        for place, row in kind(file)(file, *names):
            if missing := [name for name in names if name not in row]:
                rule = f"Set text.field (in a tool: --field) to one of {', '.join(row)}."
                raise ValueError(f"{place}: no column {missing[0]!r}. {rule}")
            if row[field] or not isinstance(row[field], str | None):
                check_row(place, row, field, label)
            yield place, row[field] or "", name_class(row[label], classes) if label else ""


def name_class(value: Any, classes: Sequence[str] = ()) -> str:
    """Return a cell as the name of a class: '' if it is missing (None or NaN), '2' for 2, 2.0 and ' 2.0 '; in NFC.

    classes: the names of the numbers 0, 1, ... in a column ClassLabel, in which -1 means that the class is missing.
    """
    if value is None or value != value:
        return ""
    if classes:
        return classes[value] if value >= 0 else ""
    name = unicodedata.normalize("NFC", str(value)).strip()
    return name.partition(".")[0] if class_names.INTEGER.fullmatch(name) else name


def check_row(place: str, row: Mapping[str, Any], field: str, label: str) -> None:
    """Raise ValueError unless row[field] is text and row[label] can name a class, both valid Unicode without NUL.

    label: the column of classes, '' for none. place: the place of the row, for the message.
    """
    problems = [] if isinstance(row[field], str) else [f"the field {field!r} is not text: {str(row[field])[:40]!r}"]
    if label and isinstance(row[label], list | dict | bytes):
        problems.append(f"the field {label!r} is not the name of a class: {str(row[label])[:40]!r}")
    for name in (field, label) if label else (field,):
        if character := re.search("[\0\ud800-\udfff]", str(row[name])):  # NUL, half a character
            problems.append(f"the field {name!r} has the character {character[0]!r}. Correct or remove the row.")
    if problems:
        raise ValueError(f"{place}: {problems[0]}")


def find(
    source: str, *fields: str, alternatives: str = "", hint: str = "", stream: bool = True
) -> list[data_files.File]:
    """Return the file at a path, the files of a folder (`data_files.find`), or the splits of a data set as `File`s.

    A data set is 'hub:NAME' or 'hub:NAME:CONFIG'. NAME is one of the Hugging Face hub, streamed or downloaded, a folder
    of data files, or a folder that `save_to_disk` has written. fields: the columns to load, () for all. alternatives,
    hint: as in `data_files.find`. stream: False to download the data set first. Raises UserError if the source is
    missing.
    """
    if not source.startswith(HUB):
        return data_files.find(source, alternatives, hint)
    name, _, config = source.removeprefix(HUB).partition(":")
    folder = os.path.expanduser(name)
    with data_files.require_extra(source):
        import datasets
    with disk.reading(source, Exception):  # for the reason in `read_hub`
        if any(os.path.isfile(os.path.join(folder, saved)) for saved in SAVED):
            loaded, version = datasets.load_from_disk(folder), ""
            splits = loaded if isinstance(loaded, dict) else {data_files.TRAIN: loaded}
        else:
            builder = datasets.load_dataset_builder(folder if os.path.isdir(folder) else name, config or None)
            version = f"{builder.config_id} {builder.hash}"
            if not stream:
                builder.download_and_prepare()
            splits = builder.as_streaming_dataset() if stream else builder.as_dataset()
        return [as_file(source, name, rows, fields, version) for name, rows in splits.items()]


def as_file(source: str, name: str, rows: Any, fields: tuple[str, ...], version: str) -> data_files.File:
    """Return the split `name` of a data set as a `File`; with these fields only, if it has all of them.

    source: such as 'hub:NAME'. rows: the split. fields: () for all. version: identifies the content of the data set;
    '': the fingerprint of the rows does.
    """
    selected = rows.select_columns([*fields]) if fields and {*fields} <= {*(rows.column_names or ())} else rows
    info = (rows.info.splits or {}).get(name)
    size = (info and info.num_bytes) or 1
    version = f"{source} {name} {version or rows._fingerprint}"
    return data_files.File(pathlib.PurePath(name), f"{source} ({name})", size, lambda: selected, version=version)
