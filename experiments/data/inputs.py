"""Read the inputs of tools: texts and images, one or many, or a data set in the order of a run that trains on it."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.config import errors
from experiments.data import files as data_files, image_folder, images, labelled, tables, text


class Inputs(NamedTuple):
    """Inputs with their names, such as "a.csv, line 3", and their labels (names of classes, '' if there is none)."""

    names: Sequence[str]
    items: Sequence  # texts, image files, or raw images (an array)
    labels: Sequence[str]
    lines: Sequence[str] = ()  # about files that are skipped
    is_single: bool = False  # whether the source is one prompt or one image file, not a table, folder or data set
    classes: Sequence[str] = ()  # of a data set: the names of all classes, in order
    held_out: int = 0  # of a data set: the number of inputs, at the end, that a run holds out


def read_texts(source: str, field: str, prompt: str = "") -> Inputs:
    """Return the lines of a text file, the rows of tables, or the text files of a folder, also empty texts.

    Without a source, return the prompt. field: the column of a table with the texts, or also the column with their
    labels: "text,label". The label of a file is the name of its folder. Raises UserError for a missing column, an
    invalid row, and a source without texts.
    """
    if not source:
        return Inputs(["the prompt"], [prompt], [""], is_single=True)
    column, _, label_column = (name.strip() for name in field.partition(","))
    files, used = text.find(source, column, *filter(None, [label_column]))
    rows = [row for file in used for row in read_file(file, column, label_column)]
    has_text = any(content.strip() for _, content, _ in rows)
    errors.refuse((not has_text, f"{source} contains no text. Give a file or folder with text."))
    names, texts, labels = zip(*rows, strict=True)
    return Inputs(names, texts, labels, data_files.describe_skipped(source, files, used))


def read_file(file: data_files.File, column: str, label_column: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, text and label of each row of a table or line of a file; a file in a folder is one text.

    The label of a row is its class in `label_column`, or "" if `label_column` is "". The label of a line is "", and of
    a file in a folder the name of its folder. If `column`, of the texts, is "", a table is read like any other file.
    """
    if tables.kind(file) and column:
        rows = tables.read(file, column, label_column)
        yield from ((f"{file}, {place}", content, label) for place, content, label in rows)
    elif file.inside.parts:
        yield str(file), data_files.load_text(file), file.inside.parent.name
    else:
        for number, line in enumerate(data_files.lines(file), 1):
            yield f"{file}, line {number:,}", line.removesuffix("\r"), ""


def read_text_set(source: str, field: str) -> Inputs:
    """Return the texts that are not empty, with classes, of a table or of a folder of classes.

    field: the two columns of the table, such as "text,label"; '' for a folder. Of other sources, return the texts of
    `read_texts` that are not empty, without classes. Raises UserError as `read_texts` and `labelled.load` do.
    """
    if "," in field or not field and pathlib.Path(source).expanduser().is_dir():
        data = labelled.load(source, field or "text,label")
        texts, labels = zip(*data.train, *data.evaluation, strict=True)
        return Inputs(texts, texts, labels, data.description.splitlines(), False, data.classes, len(data.evaluation))
    data = read_texts(source, field)
    texts = [content for content in data.items if content.strip()]
    lines = [f"{source}: empty lines left out: {len(data.items) - len(texts):,}"] * (len(texts) < len(data.items))
    return Inputs(texts, texts, [""] * len(texts), lines)


def read_images(source: str) -> Inputs:
    """Return an image file, or those of a folder and the folders in it, with the names of their folders as labels.

    Raises UserError if there is none.
    """
    path = pathlib.Path(source).expanduser()
    if not path.is_dir():
        return Inputs([str(path)], [data_files.on_disk(path)], [""], is_single=True)
    files = data_files.folder(path)
    image_files = [file for file in files if file.inside.suffix.lower() in image_folder.ENDS]
    errors.refuse((not image_files, f"{path} contains no images ({', '.join(image_folder.ENDS)})."))
    labels = [file.inside.parent.name for file in image_files]
    return Inputs([*map(str, image_files)], image_files, labels, data_files.describe_skipped(path, files, image_files))


def read_image_set(source: str) -> Inputs:
    """Return one image file, or the images of a source in the formats of image.source.

    Raises UserError as `read_images`, images.read_arrays, images.combine and image_folder.find_parts do.
    """
    path = pathlib.Path(source).expanduser()
    if path.is_file() and path.suffix.lower() in image_folder.ENDS:
        return read_images(source)
    if splits := images.read_arrays(source):
        data = images.combine(source, splits, 0)
        image_BYXZ = np.concatenate([data.train_image_BYXZ, data.evaluation_image_BYXZ])
        labels = [data.classes[c] for c in (*data.train_label_B, *data.evaluation_label_B)]
        names, n = [*map(str, range(len(image_BYXZ)))], len(data.evaluation_label_B)
        return Inputs(names, image_BYXZ, labels, [], False, data.classes, n)
    (train, evaluation), _, classes, lines = image_folder.find_parts(source)
    files = [*train, *evaluation]
    return Inputs([*map(str, files)], files, [file.label for file in files], lines, False, classes, len(evaluation))
