"""Text as the contents of files, in a training and an evaluation part that depend on these files alone."""

import ast
import errno
import os
import pathlib
import sysconfig
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import download, files
from experiments.engine import disk, errors

STDLIB, DOCSTRINGS = "stdlib", "docstrings"
NAMED = (STDLIB, DOCSTRINGS, *sorted(download.NAMED))
EVALUATION_SHARE = 0.1
HINT = "; leave it out"
COPIES = 3  # bytes in memory for each of a text: itself and its ids, of one byte or two each


class Text(NamedTuple):
    name: str
    train: list[bytes | memoryview]  # the contents of files
    evaluation: list[bytes | memoryview]
    said: str  # which file became what, '' where there is nothing to tell


def load(source: str) -> Text:
    """Text from 'stdlib' (Python's own source files), 'docstrings' (the English in them), a named set, or a path.

    A folder is read recursively; hidden files and folders, links to folders and empty files are left out; what is
    gzipped is unpacked. One file is cut in two, its first 90 % for training; of several about 10 % are held out, chosen
    by their contents, where names do not tell it (`files.by_names`). UserError for what is not there, cannot be read,
    is no text, too little to split, or more than the memory has room for.
    """
    path = pathlib.Path(os.path.expanduser(source))
    if source in (STDLIB, DOCSTRINGS):
        found = [files.on_disk(file) for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    elif source in download.NAMED:
        found = [files.on_disk(download.fetch(source))]
    elif not source or _absent(path):
        named = f"a named text ({', '.join(NAMED)})"
        raise errors.UserError(f"{source!r} is neither {named} nor a path that exists ({path.absolute()})")
    else:
        found = files.folder(path, hidden=(".",)) if os.path.isdir(path) else [files.on_disk(path)]
    if named := files.by_names("text", found):  # neither a file alone nor those of a named text are inside a folder
        return _as_named(source, named)
    both = zip(found, _contents(source, found), strict=True)
    texts = [(file, content) for file, content in both if content]
    if not texts:
        raise errors.UserError(f"{source} holds no text: a file or folder with text is needed")
    contents = [content for _, content in texts]
    if len(set(contents)) == 1:
        whole, at = memoryview(contents[0]), len(contents[0]) * 9 // 10  # a slice of it is no copy
        first = max(at - 3, 0)
        while at > first and whole[at] & 0b1100_0000 == 0b1000_0000:  # inside a UTF-8 character
            at -= 1
        if not 0 < at < len(whole):
            raise errors.UserError(f"{source} holds too little text to keep a part of it for evaluation")
        return Text(source, [whole[:at]], [whole[at:]], "")
    out_B = files.held_out(contents, share=EVALUATION_SHARE)
    train, evaluation = ([texts[i] for i in np.flatnonzero(out_B == side)] for side in (False, True))
    shown = {files.TRAIN: [file for file, _ in train], files.TEST: [file for file, _ in evaluation]}
    said = "" if source in NAMED else files.told(source, "by their contents,", shown)
    return Text(source, *([content for _, content in side] for side in (train, evaluation)), said)


def _absent(path: pathlib.Path) -> bool:
    """Whether nothing is there. Not so where the way to it is closed, or its drive gone: who reads it says that."""
    try:
        path.lstat()
    except ValueError:
        return True
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
    return False


def _as_named(name: str, named: Mapping[str, Sequence[files.File]]) -> Text:
    """The parts as names tell them."""
    used = files.TRAIN, files.evaluated(named)
    contents, sides = iter(_contents(name, [file for part in used for file in named[part]])), []
    for part in used:
        sides.append([content for content in (next(contents) for _ in named[part]) if content])
        if not sides[-1]:
            raise errors.UserError(f"{name}: the part {part} holds no text ({files.listed(named[part])})")
    train, evaluation = sides
    said = files.told(name, "by their names,", named)
    if both := len({*train} & {*evaluation}):
        said += f" ({both:,} of {len(evaluation):,} texts to evaluate are trained on, too)"
    return Text(name, train, evaluation, said)


def _contents(name: str, found: Sequence[files.File]) -> list[bytes]:
    """What is in the files, b'' for those that are empty or no files. UserError before much is read or taken."""
    disk.check_memory(f"the text {name}", COPIES * sum(file.size for file in found))
    faults = [f"{file.name} {fault}" for file in found if file.size and (fault := files.glance(file))]
    if faults:
        others = f" (it is one of {len(faults):,} such files among {len(found):,})" if len(faults) > 1 else ""
        raise errors.UserError(f"{faults[0]}{others}{HINT}")
    contents = (files.read(file, copies=COPIES, hint=HINT) if file.size else b"" for file in found)
    return [_docstrings(content) if name == DOCSTRINGS else content for content in contents]


def _docstrings(content: bytes) -> bytes:
    """The docstrings of a program's modules, classes and functions."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(content)) if isinstance(node, described)]
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes))).encode()
