"""Texts that belong to classes: files in folders named after these, tables with a column of them, or docstrings."""

import ast
import json
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import files, tables, tokenizer
from experiments.engine import disk, errors

DOCSTRINGS = "docstrings"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "urllib", "xml")  # with many of them
EVALUATION_SHARE = 0.1
COPIES = 8  # bytes in memory for each of a text
CLS = "[CLS]"  # begins every text, and is asked for its class
HINT = f"a folder DIR/class/*.txt, a table or a folder of such ({', '.join(tables.KINDS)}), or {tables.HUB}NAME"

Row = tuple[str, str]  # a text, and the name of its class


class Labelled(NamedTuple):
    name: str
    train: list[Row]
    evaluation: list[Row]
    classes: list[str]
    said: str  # which file became what, '' where there is nothing to tell

    @property
    def sha256(self) -> str:
        return files.sha256(json.dumps([self.train, self.evaluation]))


def load(source: str, field: str = "text,label") -> Labelled:
    """Texts of 'docstrings' (Python's own, by their package) or a path; of tables these two columns.

    Names of files and folders tell what is held out (`files.by_names`); else about 10 % of the texts are, by their
    contents. UserError for what is not there or holds no such texts, a column that is missing (with those that are
    there), a class that is evaluated and not trained on.
    """
    names = [name.strip() for name in field.split(",")]
    if len(names) != 2 or not all(names):
        raise errors.UserError(f'text.field names the columns of texts and of classes, "text,label": not {field!r}')
    if source == DOCSTRINGS:
        named, rows = {}, list(_docstrings())
    else:
        found = tables.found(source, *names, named=DOCSTRINGS, hint=f": {HINT}")
        some = [file for file in found if tables.kind(file)]
        some = some or [file for file in found if ".txt" in file.inside.suffixes[-2:] and len(file.inside.parts) > 1]
        if not some:
            raise errors.UserError(f"{source} holds no texts with classes: {HINT} is needed")
        named = files.by_names("text", some)
        used = [named[part] for part in (files.TRAIN, files.evaluated(named))] if named else [some]
        disk.check_memory(f"the text in {source}", COPIES * sum(file.size for one in used for file in one))
        rows, *held_out = [[row for file in one for row in _rows(file, *names)] for one in used]
    if named:
        train, evaluation, said = rows, held_out[0], files.told(source, "by their names,", named)
    else:
        out_B = files.held_out([text.encode() for text, _ in rows], share=EVALUATION_SHARE)
        train, evaluation = ([rows[b] for b in np.flatnonzero(out_B == side).tolist()] for side in (False, True))
        said = ""
    classes = sorted({name for _, name in train})
    if len(classes) < 2 or not evaluation:
        raise errors.UserError(
            f"{source} has {len(classes)} class to train on: at least two are needed, and texts to evaluate"
        )
    if new := sorted({name for _, name in evaluation} - {*classes}):
        raise errors.UserError(f'{source}: the class "{new[0]}" is to be evaluated, and no text to train on has it')
    return Labelled(source, train, evaluation, classes, said)


def _rows(file: files.File, field: str, label: str) -> Iterator[Row]:
    """The texts of a file that are not empty, and their classes."""
    if tables.kind(file):
        yield from (row for row in tables.pairs(file, field, label) if row[0].strip())
    else:
        text = files.read(file, copies=COPIES).decode("utf-8-sig", "replace")
        yield from [(text, file.inside.parts[-2])] if text.strip() else []


def _docstrings() -> Iterator[Row]:
    """Those of Python's own functions and classes, with the package they are of."""
    for package in PACKAGES:
        for file in sorted(pathlib.Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from ((text, package) for text in [ast.get_docstring(node)] if text)


def ids(of: tokenizer.Tokenizer, texts: Sequence[str], *, N: int) -> tuple[np.ndarray, np.ndarray]:
    """(id_BN, valid_BN): each text behind the word that answers for it, and what is real; of a longer one the beginning
    (and the special that ends it). UserError where the tokenizer has no such word."""
    around = of.encode("").tolist()  # [CLS] and [SEP] of BERT's
    own = [] if around else [id for id in reversed(range(of.size)) if of.name(id) == CLS][:1]
    if not around and not own:
        raise errors.UserError(f"this tokenizer puts no special before a text, such as {CLS}, that could answer for it")
    id_BN, valid_BN = np.zeros((len(texts), N), np.int32), np.zeros((len(texts), N), bool)
    for b, text in enumerate(texts):
        id_T, end = [*own, *of.encode(text).tolist()], around[1:][-1:]
        id_T = id_T if len(id_T) <= N else id_T[: N - len(end)] + end
        id_BN[b, : len(id_T)], valid_BN[b, : len(id_T)] = id_T, True
    return id_BN, valid_BN
