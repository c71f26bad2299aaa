"""Text as the contents of files, in a training and an evaluation part that depend on those contents alone."""

import ast
import os
import pathlib
import stat
import sysconfig
from typing import NamedTuple

from experiments.engine import errors, room
from experiments.engine.data import download, split

STDLIB = "stdlib"
DOCSTRINGS = "docstrings"
EVALUATION_SHARE = 0.1
COPIES = 6  # bytes in memory for each of a text: itself, its parts, and a number of 4 bytes


class Text(NamedTuple):
    """The contents of files, as bytes."""

    name: str
    train: list[bytes]
    evaluation: list[bytes]


def load(source: str, *, data_dir: str = "") -> Text:
    """Text from 'stdlib' (Python's own source files), 'docstrings' (the English in them), a named set, or a path.

    A folder is read recursively; hidden files and folders, links to folders and empty files are left out. One file is
    cut in two, its first 90 % for training; of several files about 10 % are held out, chosen by their contents.

    Raises:
      UserError: neither a name nor a path that exists; something that cannot be read; too little text to split.
    """
    if source in (STDLIB, DOCSTRINGS):
        paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif source in download.NAMED:
        paths = [download.fetch(source, data_dir=data_dir)]
    else:
        paths = _paths(source)
    read = _docstrings if source == DOCSTRINGS else _read
    contents = [content for content in map(read, paths) if content]
    if not contents:
        raise errors.UserError(f"{source} holds no text: a file or folder with text is needed")
    train, evaluation = _cut(contents[0]) if len(set(contents)) == 1 else _choose(contents)
    if not train[0] or not evaluation[0]:
        raise errors.UserError(f"{source} holds too little text to keep a part of it for evaluation")
    return Text(name=source, train=train, evaluation=evaluation)


def _cut(content: bytes) -> tuple[list[bytes], list[bytes]]:
    """The first 90 % of the bytes and the rest, never cut inside a UTF-8 character (whose later bytes are 10xxxxxx)."""
    at = len(content) * 9 // 10
    first = max(at - 3, 0)
    while at > first and content[at] & 0b1100_0000 == 0b1000_0000:
        at -= 1
    return [content[:at]], [content[at:]]


def _choose(contents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    held_out = split.held_out(contents, share=EVALUATION_SHARE)
    train = [content for content, out in zip(contents, held_out, strict=True) if not out]
    evaluation = [content for content, out in zip(contents, held_out, strict=True) if out]
    return train, evaluation


def _paths(source: str) -> list[pathlib.Path]:
    """The file itself, or the folder's visible files in sorted order."""
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

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [pathlib.Path(parent) / name for name in files if not name.startswith(".")]
    return sorted(found)


def _docstrings(path: pathlib.Path) -> bytes:
    """What a Python file says about itself in English: the docstrings of its modules, classes and functions."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(_read(path))) if isinstance(node, described)]
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes))).encode()


def _read(path: pathlib.Path) -> bytes:
    """The file's content; nothing for what is no regular file: reading a pipe or a device could wait forever."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return b""
        room.check(f"the text {path}", COPIES * found.st_size)
        return path.read_bytes()
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror}") from error
