"""Texts with classes: files in folders named after the classes, tables with a column of classes, or docstrings."""

import os
import pathlib
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.config import errors
from experiments.data import classes as class_names, files as data_files, tables, text, tokenization

DOCSTRINGS = "docstrings"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "urllib", "xml")  # of Python
EVALUATION_SHARE = 0.1  # of the texts, unless file names define the splits
CLS = "[CLS]"  # begins every text; its output predicts the class
HINT = f"a folder DIR/class/*.txt, a table or a folder of tables ({', '.join(tables.KINDS)}), or {tables.HUB}NAME"

Row = tuple[str, str]  # a text, and the name of its class


def load(source: str, field: str = "text,label") -> data_files.Rows:
    """Return texts with classes from 'docstrings' (Python's own; the class is the package), a path, or 'hub:NAME'.

    The class of a text file is the name of a folder, and folders may define the splits, as for images
    (`classes.divide`). If they do not, file names define the splits (`data_files.split_by_names`), or about 10 % of the
    texts are held out by content. field: the columns of texts and of classes in tables. Raises UserError if `field`
    does not name two columns, or if there are no such texts. Fewer than two classes, classes that are numbers with
    decimals, and a class that is evaluated but not trained on raise it too.
    """
    names = [name.strip() for name in field.split(",")]
    if len(names) != 2 or not all(names):
        raise errors.UserError(f'text.field = {field!r} must name two columns, texts and classes: "text,label".')
    files, lines = find(source, names)
    by_name = {}
    if source != DOCSTRINGS and files and not tables.kind(files[0]):
        files, by_name, more = divide(source, files)
        lines += more
    if source != DOCSTRINGS:
        by_name = by_name or data_files.split_by_names("text", files)
    classes, missing = class_names.read_names(files, names[1]), Counter()

    def rows(file: data_files.File) -> Iterator[Row]:
        """Yield the texts of a file that are not empty and have a class, each with its class."""
        if tables.kind(file):
            texts = (row for _, *row in tables.read(file, *names) if row[0])
        else:
            contents = text.list_docstrings(file) if source == DOCSTRINGS else [data_files.load_text(file)]
            texts = ((content, file.label) for content in contents)
        for content, label in texts:
            missing.update(["missing"] * (not label))
            if label and content.strip():
                yield content, label

    form = f"texts with classes. Give {HINT}."
    data = data_files.split_rows(source, by_name, files, rows, form=form, share=EVALUATION_SHARE)
    data = data if classes or files[0].label else check_numbers(data, names[1], missing)
    trained, evaluated = ({name for _, name in part} for part in (data.train, data.evaluation))
    class_names.check_trained(source, trained, evaluated)
    errors.refuse((len(trained) < 2, f"{source}: only {len(trained)} class. Give texts of at least two classes."))
    if missing:
        counts = ", ".join(f"{n:,} {name}" for name, n in missing.most_common())
        lines.append(f"texts left out, because they have no class: {missing.total():,} ({counts})")
    description = data_files.join_lines(source, data.description, lines)
    return data._replace(description=description, classes=classes or class_names.sort_names(trained))


def check_numbers(data: data_files.Rows, column: str, missing: Counter[str]) -> data_files.Rows:
    """Return the data without rows of the class "nan" or "<na>". If the others are numbers, omit words such as "none".

    Count the omitted rows in `missing`, by the repr of the class. Raises UserError if the classes are numbers with
    decimals, or if no row is left to evaluate.
    """
    names = {name for part in (data.train, data.evaluation) for _, name in part}
    numbers = {*filter(class_names.NUMBER.fullmatch, names)}
    are_numbers = numbers and class_names.MISSING.issuperset(map(str.lower, names - numbers))
    kept = numbers if are_numbers else {name for name in names if name.lower() not in class_names.NEVER_NAMES}
    if kept == names and not are_numbers:
        return data
    if are_numbers and (decimals := sorted(name for name in numbers if not class_names.INTEGER.fullmatch(name))):
        problem = f"the column {column!r} has numbers with decimals: {data_files.join_names(decimals)}"
        raise errors.UserError(f"{data.name}: {problem}. To predict them is regression. Give a column of class names.")
    missing.update(repr(name) for part in (data.train, data.evaluation) for _, name in part if name not in kept)
    train, evaluation = ([row for row in part if row[1] in kept] for part in (data.train, data.evaluation))
    errors.refuse((not evaluation, f"{data.name}: no text to evaluate has a class in the column {column!r}."))
    return data._replace(train=train, evaluation=evaluation)


def divide(source: str, files: Sequence[data_files.File]) -> tuple[list, dict[str, list], list[str]]:
    """Return (text files in folders of classes, {part: its files}, lines to print); {} if no folder is held out.

    Files next to folders of parts or of classes, such as train/urls.txt in aclImdb, are left out. Raises UserError if
    folders may be parts or classes.
    """
    above = {folder for file in files for folder in file.inside.parents[1:]}
    top = pathlib.PurePath(os.path.commonpath([file.inside.parent for file in files]))
    above = {folder for folder in above if folder == top or class_names.part_of(folder.name)}
    beside = [file for file in files if file.inside.parent in above]
    lines = [f"texts left out, because they are in no folder of a class: {len(beside):,}"] * bool(beside)
    files = [file for file in files if file.inside.parent not in above]
    parts, _, more = class_names.divide(pathlib.Path(source).expanduser(), files)
    used, all_files = parts[data_files.TRAIN], [file for part in parts.values() for file in part]
    if {data_files.VALID, data_files.TEST} & parts.keys():
        return all_files, parts, lines + more
    if unused := len(all_files) - len(used):
        more.append(f"texts left out, because they are in other folders: {unused:,}")
    return used, {}, lines + more


def find(source: str, names: Sequence[str]) -> tuple[list[data_files.File], list[str]]:
    """Return the files with texts, and lines about the files that are left out.

    names: the columns of texts and of classes, if the source is a data set 'hub:NAME'. Raises UserError if the source
    is missing.
    """
    if source == DOCSTRINGS:
        top = pathlib.Path(sysconfig.get_path("stdlib"))
        programs = ((package, file) for package in PACKAGES for file in sorted((top / package).rglob("*.py")))
        return [data_files.on_disk(file)._replace(label=package) for package, file in programs], []
    files = tables.find(source, *names, alternatives=DOCSTRINGS, hint=f". Give {HINT}.")
    in_folders = [file for file in files if ".txt" in file.inside.suffixes[-2:] and len(file.inside.parts) > 1]
    selected = tables.select(files, in_folders)
    return selected, data_files.describe_skipped(source, files, selected)


def encode(
    encoder: tokenization.Tokenizer, texts: Sequence[str], *, N: int, classifies: bool = True
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (id_BN, valid_BN, the number of truncated texts). The first token, such as [CLS], predicts the class.

    A text of more than N tokens keeps its special tokens ([CLS], [SEP]) and its beginning, or its end if the side of
    truncation is left. classifies: False if no class is predicted. If one is, and the tokenizer begins no text with a
    special token, its [CLS] is put first. Raises UserError if it has no [CLS] either.
    """
    specials = encoder.encode("").tolist()  # such as [CLS] and [SEP] of BERT
    before = len(os.path.commonprefix([specials, encoder.encode("a").tolist()])) if specials else 0
    after = len(specials) - before
    first = [id for id in reversed(range(encoder.size)) if encoder.name(id) == CLS][:1] if classifies else []
    first = [] if before else first
    problem = f"the tokenizer has no special token before a text, such as {CLS}, which predicts the class"
    errors.refuse((classifies and not before and not first, f"{problem}. Choose a tokenizer that has one."))
    before, cuts_left = before + len(first), encoder.truncation_side == "left"
    id_BN, valid_BN, truncated = np.zeros((len(texts), N), np.int32), np.zeros((len(texts), N), bool), 0
    for b, content in enumerate(texts):
        id_T = [*first, *encoder.encode(content).tolist()]
        if (extra := len(id_T) - N) > 0:
            truncated += 1
            start = before if cuts_left else max(len(id_T) - after - extra, 0)
            del id_T[start : start + extra]
        id_BN[b, : len(id_T)], valid_BN[b, : len(id_T)] = id_T, True
    return id_BN, valid_BN, truncated
