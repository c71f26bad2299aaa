"""Texts that belong to classes: files in folders named after these, tables with a column of them, or docstrings."""

import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import classes, files, tables, text, tokenizer
from experiments.engine import errors

DOCSTRINGS = "docstrings"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "urllib", "xml")  # with many of them
EVALUATION_SHARE = 0.1
CLS = "[CLS]"  # begins every text; its output tells the class
HINT = f"a folder DIR/class/*.txt, a table or a folder of such ({', '.join(tables.KINDS)}), or {tables.HUB}NAME"

Row = tuple[str, str]  # a text, and the name of its class


class Labelled(NamedTuple):
    """Texts with the names of their classes, and these in their order."""

    name: str
    train: list[Row]
    evaluation: list[Row]
    said: str
    classes: tuple[str, ...]
    sha256 = files.Rows.sha256


def load(source: str, field: str = "text,label") -> Labelled:
    """Return the texts of 'docstrings' (Python's own, by their package) or of a path; of tables these two columns.

    Unless names of files tell it (`files.by_names`), about 10 % of the texts are held out, by their contents. Raises
    UserError if there are no such texts, fewer than two classes, or a class that is evaluated and not trained on."""
    names = [name.strip() for name in field.split(",")]
    if len(names) != 2 or not all(names):
        raise errors.UserError(f'text.field names the columns of texts and of classes, "text,label": not {field!r}')
    found, skipped = find(source, names)
    declared, unlabelled = classes.declared(found, names[1]), []

    def rows(file: files.File) -> Iterator[Row]:
        """Yield the texts of a file that are not empty, and their classes."""
        if source == DOCSTRINGS:
            yield from ((one, file.inside.parts[0]) for one in text.docstrings(file))
        elif tables.kind(file):
            for one, name in tables.pairs(file, *names):
                if declared and int(name) < 0:
                    unlabelled.append(file)
                elif one.strip():
                    yield one, declared[int(name)] if declared else name
        else:
            content = files.read(file).decode()
            yield from [(content, file.inside.parts[-2])] if content.strip() else []

    section, of = "" if source == DOCSTRINGS else "text", f"texts with classes: {HINT} is needed"
    data = files.divided(source, section, found, rows, of=of, key=lambda row: row[0].encode(), share=EVALUATION_SHARE)
    trained = {name for _, name in data.train}
    if len(trained) < 2:
        raise errors.UserError(f"{source} has {len(trained)} class to train on: at least two are needed")
    if new := sorted({name for _, name in data.evaluation} - trained):
        raise errors.UserError(f'{source}: the class "{new[0]}" is to be evaluated, and no text to train on has it')
    skipped += [f"texts left out, of no class: {len(unlabelled):,}"] * bool(unlabelled)
    said = "\n".join(filter(None, [data.said, *(f"{source}: {line}" for line in skipped)]))
    return Labelled(*data._replace(said=said), declared or classes.ordered(trained))


def find(source: str, names: Sequence[str]) -> tuple[list[files.File], list[str]]:
    """Return the files with texts, and lines about those that are left out."""
    if source == DOCSTRINGS:
        top = pathlib.Path(sysconfig.get_path("stdlib"))
        programs = (file for package in PACKAGES for file in sorted((top / package).rglob("*.py")))
        return [files.on_disk(file, file.relative_to(top)) for file in programs], []
    every = tables.found(source, *names, named=DOCSTRINGS, hint=f": {HINT}")
    of_folders = [file for file in every if ".txt" in file.inside.suffixes[-2:] and len(file.inside.parts) > 1]
    found = tables.among(every, of_folders)
    return found, files.skipped(pathlib.Path(source).expanduser(), every, found)


def ids(of: tokenizer.Tokenizer, texts: Sequence[str], *, N: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (id_BN, valid_BN, how many texts were cut): each text after the special that tells its class.

    A longer text keeps its beginning, and the special at its end. Raises UserError without such a special."""
    around = of.encode("").tolist()  # [CLS] and [SEP] of BERT's
    begin = [] if around else [id for id in reversed(range(of.size)) if of.name(id) == CLS][:1]
    if not around and not begin:
        raise errors.UserError(
            f"this tokenizer puts no special before a text, such as {CLS}, that could tell its class"
        )
    id_BN, valid_BN = np.zeros((len(texts), N), np.int32), np.zeros((len(texts), N), bool)
    cut = 0
    for b, one in enumerate(texts):
        id_T, end = [*begin, *of.encode(one).tolist()], around[1:][-1:]
        cut += len(id_T) > N
        id_T = id_T if len(id_T) <= N else id_T[: N - len(end)] + end
        id_BN[b, : len(id_T)], valid_BN[b, : len(id_T)] = id_T, True
    return id_BN, valid_BN, cut
