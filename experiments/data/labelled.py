"""Texts with classes: files in folders named after the classes, tables with a column of classes, or docstrings."""

import pathlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import classes, files, tables, text, tokenizer
from experiments.engine import errors

DOCSTRINGS = "docstrings"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "urllib", "xml")  # have many
EVALUATION_SHARE = 0.1
CLS = "[CLS]"  # begins every text; its output predicts the class
HINT = f"a folder DIR/class/*.txt, a table or a folder of tables ({', '.join(tables.KINDS)}), or {tables.HUB}NAME"

Row = tuple[str, str]  # a text, and the name of its class


class Labelled(NamedTuple):
    """Texts with the names of their classes, and these names in order."""

    name: str
    train: list[Row]
    evaluation: list[Row]
    description: str
    classes: tuple[str, ...]
    sha256 = files.Rows.sha256


def load(source: str, field: str = "text,label") -> Labelled:
    """Return the texts of 'docstrings' (Python's own, by their package) or of a path. field: two columns of tables.

    Names of files decide the parts (`files.split_by_names`), or about 10 % of the texts are held out by content. Raises
    UserError without such texts, with fewer than two classes, or with an evaluated class that is not trained on.
    """
    names = [name.strip() for name in field.split(",")]
    if len(names) != 2 or not all(names):
        raise errors.UserError(f'text.field names the columns of texts and of classes, "text,label": not {field!r}')
    every, lines = find(source, names)
    class_names, unlabelled = classes.read_names(every, names[1]), []

    def rows(file: files.File) -> Iterator[Row]:
        """Yield the texts of a file that are not empty, and their classes."""
        for content, label in read_rows(file, source, names):
            if class_names and int(label) < 0:
                unlabelled.append(file)
            elif content.strip():
                yield content, class_names[int(label)] if class_names else label

    section, form = "" if source == DOCSTRINGS else "text", f"texts with classes: {HINT} is needed"
    data = files.split_rows(source, section, every, rows, form=form, share=EVALUATION_SHARE)
    trained = {name for _, name in data.train}
    new = sorted({name for _, name in data.evaluation} - trained)
    if new or len(trained) < 2:
        problem = f'the class "{new[0]}" is evaluated but not trained on' if new else f"{len(trained)} class"
        raise errors.UserError(f"{source}: {problem}. Give texts of at least two classes, each in the training data")
    if unlabelled:
        lines.append(f"texts left out, of no class: {len(unlabelled):,}")
    data = data._replace(description=files.join_lines(source, data.description, lines))
    return Labelled(*data, class_names or classes.sort_names(trained))


def read_rows(file: files.File, source: str, names: Sequence[str]) -> Iterable[Row]:
    """Return the texts of a file, each with its class as the file has it."""
    if source == DOCSTRINGS:
        return ((docstring, file.inside.parts[0]) for docstring in text.list_docstrings(file))
    return tables.pairs(file, *names) if tables.kind(file) else [(files.read(file).decode(), file.inside.parts[-2])]


def find(source: str, names: Sequence[str]) -> tuple[list[files.File], list[str]]:
    """Return the files with texts, and lines about those that are left out."""
    if source == DOCSTRINGS:
        top = pathlib.Path(sysconfig.get_path("stdlib"))
        programs = (file for package in PACKAGES for file in sorted((top / package).rglob("*.py")))
        return [files.on_disk(file, file.relative_to(top)) for file in programs], []
    every = tables.find(source, *names, alternatives=DOCSTRINGS, hint=f": {HINT}")
    in_folders = [file for file in every if ".txt" in file.inside.suffixes[-2:] and len(file.inside.parts) > 1]
    selected = tables.select(every, in_folders)
    return selected, files.describe_skipped(pathlib.Path(source).expanduser(), every, selected)


def encode(encoder: tokenizer.Tokenizer, texts: Sequence[str], *, N: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (id_BN, valid_BN, the number of truncated texts): each text after the special token of its class.

    A longer text keeps its beginning, and the special token at its end. Raises UserError without a special token.
    """
    specials = encoder.encode("").tolist()  # [CLS] and [SEP] of BERT's
    begin = [] if specials else [id for id in reversed(range(encoder.size)) if encoder.name(id) == CLS][:1]
    if not specials and not begin:
        raise errors.UserError(f"the tokenizer has no special token before a text, such as {CLS}, to predict the class")
    id_BN, valid_BN = np.zeros((len(texts), N), np.int32), np.zeros((len(texts), N), bool)
    truncated, end = 0, specials[1:2]
    for b, content in enumerate(texts):
        id_T = [*begin, *encoder.encode(content).tolist()]
        if len(id_T) > N:
            truncated += 1
            id_T = id_T[: N - len(end)] + end
        id_BN[b, : len(id_T)], valid_BN[b, : len(id_T)] = id_T, True
    return id_BN, valid_BN, truncated
