"""Named files: found where the user keeps data, or downloaded once. Nothing is accepted without its checksum."""

import hashlib
import http.client
import os
import pathlib
import urllib.request
from typing import BinaryIO

from experiments.engine import disk, errors

# name -> (file name, address, sha256)
NAMED = {
    "tinyshakespeare": (
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
}
TIMEOUT = 30.0  # seconds without a byte
LARGEST = 2**28  # bytes; no named file comes near, so a longer answer is not the file
CHUNK = 2**20  # bytes read at a time


def fetch(name: str, *, data_dir: str = "") -> pathlib.Path:
    """The path of the named file, checked: in the first of `places(data_dir)` that has it, else downloaded to the last.

    Raises:
      UserError: an unknown name; a file whose checksum is wrong; a download that fails.
    """
    if name not in NAMED:
        raise errors.UserError(f"there is no named file {name!r}: the names are {', '.join(sorted(NAMED))}")
    file_name, url, sha256 = NAMED[name]
    return here(file_name, sha256, data_dir=data_dir) or _download(url, path=cache_folder() / file_name, sha256=sha256)


def here(file_name: str, sha256: str, *, data_dir: str = "") -> pathlib.Path | None:
    """The file in the first of `places(data_dir)` that has it, None where none has. UserError for a wrong checksum."""
    path = next((folder / file_name for folder in places(data_dir) if os.path.isfile(folder / file_name)), None)
    if path is not None:
        _check(path, sha256)
    return path


def places(data_dir: str = "") -> list[pathlib.Path]:
    """The folders where data is looked for, in order: $TFM_DATA and `data_dir`, where given, and the cache folder."""
    given = [os.environ.get("TFM_DATA", ""), data_dir]
    return [pathlib.Path(os.path.expanduser(folder)) for folder in given if folder] + [cache_folder()]


def cache_folder() -> pathlib.Path:
    """Where downloads are kept: $XDG_CACHE_HOME/tfm, or ~/.cache/tfm."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tfm"


def _check(path: pathlib.Path, sha256: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror}") from error
    if found != sha256:
        raise errors.UserError(f"{path} has sha256 {found}, and the right file has {sha256}: replace or remove it")


def _download(url: str, *, path: pathlib.Path, sha256: str) -> pathlib.Path:
    """Into a temporary file beside `path`, which takes its name only once the checksum is right."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk.draft(path) as file:
            found = _receive(url, file)
            if found != sha256:
                raise errors.UserError(
                    f"{url} sent a file for {path} with sha256 {found}, and the right file has {sha256}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise errors.UserError(
            f"{path.name} could not be downloaded from {url} ({error}): put the file by hand at {path}, "
            f"or into the folder that $TFM_DATA names"
        ) from error
    return path


def _receive(url: str, file: BinaryIO) -> str:
    """Write what `url` sends to `file`; its sha256. Raises OSError where the answer is too long or breaks off."""
    digest, size = hashlib.sha256(), 0
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        while chunk := answer.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            if size > LARGEST:
                raise OSError(f"more than {LARGEST} bytes")
        announced = answer.headers.get("Content-Length")
    if announced is not None and announced != str(size):
        raise OSError(f"it broke off after {size} of {announced} bytes")
    return digest.hexdigest()
