"""Text as the contents of files, in a training and an evaluation part that depend on these files alone."""

import ast
import os
import pathlib
import stat
import sysconfig
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import download, parts, plain
from experiments.engine import disk, errors

STDLIB = "stdlib"
DOCSTRINGS = "docstrings"
EVALUATION_SHARE = 0.1
HINT = "; leave it out"
COPIES = 3  # bytes in memory for each of a text: itself and its ids, of one byte or two each


class Text(NamedTuple):
    """The contents of files, as bytes; `said`: which file became what, '' where there is nothing to tell."""

    name: str
    train: list[bytes | memoryview]
    evaluation: list[bytes | memoryview]
    said: str


def load(source: str, *, data_dir: str = "") -> Text:
    """Text from 'stdlib' (Python's own source files), 'docstrings' (the English in them), a named set, or a path.

    A folder is read recursively; hidden files and folders, links to folders and empty files are left out; what is
    gzipped is unpacked. One file is cut in two, its first 90 % for training; of several their names tell what is held
    out, as train.txt and valid.txt do (`parts.by_names`), or else about 10 % are, chosen by their contents.

    Raises:
      UserError: neither a name nor a path that exists; something that cannot be read; what is no text; too
      little text to split; more than the memory has room for; parts that do not fit together.
    """
    paths = _paths(source, data_dir)
    files = {} if _named(source) else _by_names(source, paths)
    return _as_named(source, files) if files else _by_contents(source, paths)


def _by_names(source: str, paths: Sequence[pathlib.Path]) -> dict[str, list[pathlib.Path]]:
    """The files of each part in a folder whose files' names tell it; {} for a single file, too."""
    if paths == [pathlib.Path(os.path.expanduser(source))]:
        return {}
    inside = [pathlib.PurePath(_inside(source, path)) for path in paths]
    numbers = parts.by_names("text", inside, [_size(path) for path in paths])
    return {part: [paths[i] for i in of] for part, of in numbers.items()}


def _as_named(name: str, files: Mapping[str, Sequence[pathlib.Path]]) -> Text:
    """The parts as names tell them."""
    part_evaluated = parts.evaluated(files)
    contents = _contents(name, [*files[parts.TRAIN], *files[part_evaluated]])
    n = len(files[parts.TRAIN])
    train, evaluation = (list(filter(None, some)) for some in (contents[:n], contents[n:]))
    for part, some in ((parts.TRAIN, train), (part_evaluated, evaluation)):
        if not some:
            raise errors.UserError(f"{name}: the part {part} holds no text ({parts.listed(files[part])})")
    inside = {part: [_inside(name, path) for path in of] for part, of in files.items()}
    said = parts.told(name, "by their names,", inside)
    if both := len({*train} & {*evaluation}):
        said += f" ({both:,} of {len(evaluation):,} texts to evaluate are trained on, too)"
    return Text(name, train, evaluation, said)


def _by_contents(name: str, paths: Sequence[pathlib.Path]) -> Text:
    contents = _contents(name, paths)
    paths = [path for path, content in zip(paths, contents, strict=True) if content]
    contents = list(filter(None, contents))
    if not contents:
        raise errors.UserError(f"{name} holds no text: a file or folder with text is needed")
    if len(set(contents)) == 1:
        train, evaluation = _cut(contents[0])
        if not train[0] or not evaluation[0]:
            raise errors.UserError(f"{name} holds too little text to keep a part of it for evaluation")
        return Text(name, train, evaluation, "")
    out_B = parts.held_out(contents, share=EVALUATION_SHARE)
    sides = {parts.TRAIN: np.flatnonzero(~out_B).tolist(), parts.TEST: np.flatnonzero(out_B).tolist()}
    train, evaluation = ([contents[i] for i in of] for of in sides.values())
    shown = {part: [_inside(name, paths[i]) for i in of] for part, of in sides.items()}
    return Text(name, train, evaluation, "" if _named(name) else parts.told(name, "by their contents,", shown))


def _cut(content: bytes) -> tuple[list[memoryview], list[memoryview]]:
    """The first 90 % of the bytes and the rest, never cut inside a UTF-8 character (whose later bytes are 10xxxxxx)."""
    at = len(content) * 9 // 10
    first = max(at - 3, 0)
    while at > first and content[at] & 0b1100_0000 == 0b1000_0000:
        at -= 1
    whole = memoryview(content)  # a slice of it is no copy
    return [whole[:at]], [whole[at:]]


def _named(source: str) -> bool:
    return source in (STDLIB, DOCSTRINGS, *download.NAMED)


def _inside(source: str, path: pathlib.Path) -> str:
    """The path as it is called inside the folder of the source."""
    folder = pathlib.Path(os.path.expanduser(source))
    return str(path.relative_to(folder)) if folder in path.parents else str(path)


def _paths(source: str, data_dir: str) -> list[pathlib.Path]:
    """The files of the name, the file itself, or the folder's visible files in sorted order."""
    if source in (STDLIB, DOCSTRINGS):
        return sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if source in download.NAMED:
        return [download.fetch(source, data_dir=data_dir)]
    path = pathlib.Path(os.path.expanduser(source))
    try:
        mode = path.stat().st_mode if source else None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        mode = None
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror}") from error
    if mode is None:
        names = ", ".join([STDLIB, DOCSTRINGS, *sorted(download.NAMED)])
        raise errors.UserError(
            f"{source!r} is neither a named text ({names}) nor a path that exists ({path.absolute()})"
        )
    return _walk(path) if stat.S_ISDIR(mode) else [path]


def _walk(folder: pathlib.Path) -> list[pathlib.Path]:
    def refuse(error: OSError) -> None:
        raise errors.UserError(f"the folder {error.filename} cannot be read: {error.strerror}") from error

    paths = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [pathlib.Path(parent) / name for name in files if not name.startswith(".")]
    return sorted(paths)


def _contents(name: str, paths: Sequence[pathlib.Path]) -> list[bytes]:
    """What is in the files, b'' for those that are empty or no files. UserError before much is read or taken."""
    sizes = [_size(path) for path in paths]
    disk.check_memory(f"the text {name}", COPIES * sum(sizes))
    begun = [(path, plain.glance(path)) for path, size in zip(paths, sizes, strict=True) if size]
    faults = [f"{path} {fault}" for path, fault in begun if fault]
    if faults:
        others = f" (it is one of {len(faults):,} such files among {len(paths):,})" if len(faults) > 1 else ""
        raise errors.UserError(f"{faults[0]}{others}{HINT}")
    contents = (
        plain.read(path, copies=COPIES, hint=HINT) if size else b"" for path, size in zip(paths, sizes, strict=True)
    )
    return [_docstrings(content) if name == DOCSTRINGS else content for content in contents]


def _size(path: pathlib.Path) -> int:
    """In bytes; 0 for what is no regular file: reading a pipe or a device could wait forever."""
    try:
        status = path.stat()
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror}") from error
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _docstrings(content: bytes) -> bytes:
    """What a Python file says about itself in English: the docstrings of its modules, classes and functions."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(content)) if isinstance(node, described)]
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes))).encode()
