"""Read the inputs of a tool: texts in the formats of text.source, one or many, and images."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.config import errors
from experiments.data import classes as class_names, files as data_files, image_folder, tables, text


class Inputs(NamedTuple):
    """Inputs with their names, such as "a.csv, line 3", and their labels (names of classes, '' if there is none)."""

    names: Sequence[str]
    items: Sequence  # texts, or image files
    labels: Sequence[str]
    lines: Sequence[str] = ()  # about files that are skipped
    is_single: bool = False  # whether there can be only one


def read_texts(source: str, field: str, prompt: str = "") -> Inputs:
    """Return the lines of a text file, the rows of tables, or the text files of a folder, also empty texts.

    Without a source, return the prompt. field: the column of a table with the texts, or also the column with their
    labels: "text,label". The label of a file is the name of its folder. Raises UserError for a missing column, an
    invalid row, and a source without texts.
    """
    if not source:
        return Inputs(["the prompt"], [prompt], [""], is_single=True)
    column, _, label_column = (name.strip() for name in field.partition(","))
    files, used = text.find(source, column)
    rows = [row for file in used for row in read_file(file, column, label_column)]
    if not any(content.strip() for _, content, _ in rows):
        raise errors.UserError(f"{source} contains no text. Give a file or folder with text.")
    names, texts, labels = zip(*rows, strict=True)
    if label_column and (label_names := class_names.read_names(used, label_column)):  # labels are numbers, -1: none
        labels = [label_names[int(label)] if label.isdecimal() else "" for label in labels]
    path = pathlib.Path(source).expanduser()
    return Inputs(names, texts, labels, data_files.describe_skipped(path, files, used) if path.is_dir() else [])


def read_file(file: data_files.File, column: str, label_column: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, text and label of each row of a table or line of a file; a file in a folder is one text."""
    if tables.kind(file) and column:
        rows = tables.read(file, column, label_column)
        yield from ((f"{file}, {place}", content, label) for place, content, label in rows)
    elif file.inside.parts:
        yield str(file), data_files.read(file).decode(), file.inside.parent.name
    else:
        for number, line in enumerate(data_files.lines(file), 1):
            yield f"{file}, line {number:,}", line.decode().removesuffix("\r"), ""


def read_images(source: str) -> Inputs:
    """Return an image file, or those of a folder and the folders in it, with the names of their folders as labels.

    Raises UserError if there is none.
    """
    path = pathlib.Path(source).expanduser()
    if not path.is_dir():
        return Inputs([str(path)], [data_files.on_disk(path)], [""], is_single=True)
    files = data_files.folder(path)
    images = [file for file in files if file.inside.suffix.lower() in image_folder.ENDS]
    if not images:
        raise errors.UserError(f"{path} contains no images ({', '.join(image_folder.ENDS)}).")
    labels = [file.inside.parent.name for file in images]
    return Inputs([*map(str, images)], images, labels, data_files.describe_skipped(path, files, images))
