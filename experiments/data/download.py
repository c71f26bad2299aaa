"""Named files: found where the user keeps data, or downloaded once. Nothing is accepted without its checksum."""

import hashlib
import os
import pathlib

from experiments.engine import disk, errors

# name -> (file name, address, sha256)
NAMED = {
    "tinyshakespeare": (
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}
TIMEOUT = 30.0  # seconds without a byte


def places() -> list[pathlib.Path]:
    """The folders where data is looked for, in order: $TFM_DATA, where given, and the cache folder."""
    given = os.environ.get("TFM_DATA")
    return ([pathlib.Path(os.path.expanduser(given))] if given else []) + [disk.cache_folder()]


def here(file_name: str, sha256: str) -> pathlib.Path | None:
    """The file in the first of `places()` that has it, None where none has. UserError for a wrong checksum."""
    path = next((folder / file_name for folder in places() if os.path.isfile(folder / file_name)), None)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror}") from error
    if digest != sha256:
        raise errors.UserError(f"{path} has sha256 {digest}, and the right file has {sha256}: replace or remove it")
    return path


def fetch(name: str) -> pathlib.Path:
    """The path of the file of this name in NAMED: found `here`, else downloaded, and there only once it is right.
    UserError for a file whose checksum is wrong, and a download that fails."""
    file_name, url, sha256 = NAMED[name]
    if path := here(file_name, sha256):
        return path
    import pooch  # takes a third of a second, and most runs need no file of a name
    import requests

    path = disk.cache_folder() / file_name
    pooch.get_logger().setLevel("ERROR")  # what goes wrong is said here
    try:
        load = pooch.HTTPDownloader(timeout=TIMEOUT)
        pooch.retrieve(url, f"sha256:{sha256}", fname=file_name, path=path.parent, downloader=load)
    except ValueError as error:  # another checksum
        raise errors.UserError(f"{url} sent another file for {path}: {error}") from error
    except (OSError, requests.RequestException) as error:
        by_hand = f"put the file by hand at {path}, or into the folder that $TFM_DATA names"
        raise errors.UserError(f"{file_name} could not be downloaded from {url} ({error}): {by_hand}") from error
    return path
