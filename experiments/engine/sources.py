"""The user's own code that a run was made of, kept beside its results: the config file, and the variants' modules."""

import itertools
import pathlib
from collections.abc import Mapping

from experiments.engine import errors, workdir

FOLDER = "source"
LARGEST = 2**20  # bytes of a file


def keep(folder: pathlib.Path, files: Mapping[pathlib.Path, str]) -> None:
    """Copies of these files in the run's folder, under the name beside each.

    What is there stays: where a run goes on with another file than it began with, that one is my_file.2.py, and it is
    said. UserError where the folder cannot be written.
    """
    place = folder / FOLDER
    if place.is_symlink():
        raise errors.UserError(f"{place} is a link to somewhere else: remove it, or choose another --workdir")
    for file, name in files.items():
        content = _content(file)
        if content is None:
            print(f"{file} is not kept in {place}: it cannot be read, or is larger than {LARGEST:,} bytes", flush=True)
            continue
        for n in itertools.count(1):
            kept = place / (name if n == 1 else f"{name.removesuffix('.py')}.{n}.py")
            if not kept.is_file():
                workdir.write_new(kept, content)
                if n > 1:
                    print(f"{file} is not what this began with, {place / name}: it is kept as {kept}", flush=True)
                break
            if _content(kept) == content:
                break


def _content(file: pathlib.Path) -> bytes | None:
    try:
        return file.read_bytes() if file.stat().st_size <= LARGEST else None
    except OSError:
        return None
