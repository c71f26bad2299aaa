"""The user's own code that a run was made of, kept beside its results: the config file, and the variants' modules."""

import itertools
import pathlib
from collections.abc import Mapping

from experiments.engine import disk

FOLDER = "source"
LARGEST = 2**20  # bytes of a file


def keep(folder: pathlib.Path, files: Mapping[pathlib.Path, str]) -> None:
    """Copies of these files in the run's folder, under the name beside each.

    What is there stays: where a run goes on with another file than it began with, that one is my_file.2.py, and it is
    said. OSError where the folder cannot be written, or leads elsewhere.
    """
    place = folder / FOLDER
    for file, name in files.items():
        content = _content(file)
        if content is None:
            print(f"{file} is not kept in {place}: it cannot be read, or is larger than {LARGEST:,} bytes", flush=True)
            continue
        disk.folder(folder, FOLDER)
        numbered = (f"{name.removesuffix('.py')}.{n}.py" for n in itertools.count(2))
        kept = (place / one for one in itertools.chain([name], numbered))
        kept = next(one for one in kept if not one.is_file() or _content(one) == content)
        if not kept.is_file():
            disk.write(kept, content)
            if kept.name != name:
                print(f"{file} is not what this began with, {place / name}: it is kept as {kept}", flush=True)


def _content(file: pathlib.Path) -> bytes | None:
    try:
        return disk.read(file, LARGEST)
    except (OSError, ValueError):
        return None
