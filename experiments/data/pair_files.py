"""The files that hold sentence pairs, alone or by twos, in a folder, in a zip, or where a path begins their names."""

import contextlib
import functools
import glob
import os
import pathlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from experiments.data import plain
from experiments.engine import disk, errors

ENDINGS = (".tsv", ".txt")  # of the files of a folder or zip that hold pairs
LARGEST = 2**30  # bytes of text, unpacked
COPIES = 8  # bytes in memory for each of them: strings have some 50 bytes beside their letters (measured: 6.5)
LANGUAGE = r"\.[a-z]{2}|\.[a-z]{2,3}[-_][A-Za-z]{2,4}"  # .en, .pt_BR, .zho_Hans: the ends of parallel files' names


class File(NamedTuple):
    """A file: its path inside the folder or zip (nothing for one alone), its name in messages, its bytes on disk."""

    inside: pathlib.PurePath
    name: str
    size: int
    read: Callable[[], bytes]


Text = tuple[File, ...]  # one file of tab-separated lines, or two parallel ones


def texts(path: pathlib.Path, zips: contextlib.ExitStack) -> list[Text]:
    """What a path stands for. zips: where a zip stays open while its members are read.

    Raises:
      UserError: a damaged or dangerous zip, or what cannot be read; parallel files of more than two languages.
    """
    if os.path.isdir(path):
        try:
            some = [(file.relative_to(path), file) for file in sorted(path.rglob("*")) if file.is_file()]
            return _by_twos([_on_disk(inside, file) for inside, file in some if not _hidden(inside)])
        except OSError as error:
            raise errors.UserError(f"the folder {path} cannot be read: {error.strerror}") from error
    if two := beginning(path):
        return [tuple(_on_disk(pathlib.PurePath(), file) for file in two)]
    if not os.path.isfile(path):  # reading a pipe or a device could wait forever
        raise errors.UserError(f"{path} is neither a file nor a folder")
    return _by_twos(_members(path, zips)) if zipfile.is_zipfile(path) else [(_on_disk(pathlib.PurePath(), path),)]


def beginning(path: pathlib.Path) -> list[pathlib.Path]:
    """Where nothing is, the two files whose names are this one's and a language: said.en, said.es.gz for said."""
    try:
        matches = sorted(path.parent.glob(f"{glob.escape(path.name)}.*")) if path.name and not path.exists() else []
    except (OSError, ValueError):
        return []
    named = [file for file in matches if file.is_file() and "." not in _bare(file).name[len(path.name) + 1 :]]
    return named if len(named) == 2 else []


def called(text: Text, *, reverse: bool) -> str:
    """The name for the person; of two, in the direction of the translation."""
    names = [str(file.inside) if file.inside.parts else file.name for file in text]
    return " -> ".join(reversed(names) if reverse else names)


def check_size(path: str, size: int) -> None:
    """UserError for more bytes of text than are allowed, or than the memory has room for."""
    if size > LARGEST:
        raise errors.UserError(f"{path} holds {size} bytes of text, and {LARGEST} are allowed")
    disk.check_memory(f"the text in {path}", COPIES * size)


def _by_twos(files: Sequence[File]) -> list[Text]:
    """The files with tab-separated pairs; where there are none, those that are parallel.

    UserError where it is not clear which two.
    """
    alone = [(file,) for file in files if _bare(file.inside).suffix.lower() in ENDINGS]
    if alone:
        return alone
    couples: dict[pathlib.PurePath, list[File]] = {}
    for file in files:
        if re.fullmatch(LANGUAGE, _bare(file.inside).suffix):
            couples.setdefault(_bare(file.inside).with_suffix(""), []).append(file)
    pairs = [tuple(some) for some in couples.values() if len(some) > 1]
    languages = [[_bare(file.inside).suffix for file in some] for some in pairs]
    if any(len(some) > 2 or some != languages[0] for some in languages):
        every = sorted({language for some in languages for language in some})
        raise errors.UserError(
            f"{pairs[0][0].name} and others are parallel in more than two languages ({', '.join(every)}): "
            "put those of two into a folder of their own"
        )
    return pairs


def _on_disk(inside: pathlib.PurePath, file: pathlib.Path) -> File:
    return File(inside, str(file), file.stat().st_size, functools.partial(plain.read, file, copies=COPIES))


def _members(path: pathlib.Path, zips: contextlib.ExitStack) -> list[File]:
    """The members of a zip that may hold pairs; nothing is unpacked to the disk."""
    with _zip_errors(path):
        file = zips.enter_context(zipfile.ZipFile(path))
        members = [member for member in file.infolist() if not member.is_dir()]
        for member in members:
            _check_member(path, member.filename)

    def read(member: zipfile.ZipInfo, name: str) -> bytes:
        with _zip_errors(path):
            content = file.read(member)  # never more than file_size bytes
        if wrong := plain.fault(content):
            raise errors.UserError(f"{name} {wrong}")
        return content

    files = []
    for member in members:
        inside, name = pathlib.PurePosixPath(member.filename), f"{path}:{member.filename}"
        files.append(File(inside, name, member.file_size, functools.partial(read, member, name)))
    return [one for one in files if not _hidden(one.inside)]


@contextlib.contextmanager
def _zip_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise errors.UserError(f"{path} is damaged or not a zip that can be read: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _bare(path: pathlib.PurePath) -> pathlib.PurePath:
    """The path without the .gz behind it."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


def _check_member(path: pathlib.Path, name: str) -> None:
    """UserError for a member whose path leads out of the zip. (ZipFile has cut names at a NUL.)"""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
        raise errors.UserError(f"{path} has a member that leads out of it, {name!r}: make a zip without such a path")


def _hidden(path: pathlib.PurePath) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
