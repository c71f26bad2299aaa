"""Find named files in the user's data folder, or download them once. Verify the checksum of every file."""

import hashlib
import os
import pathlib

from experiments.config import disk, errors

# name -> (file name, address, sha256)
NAMED = {
    "tinyshakespeare": (
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}
TIMEOUT = 30.0  # seconds without a byte, after which a download fails


def places() -> list[pathlib.Path]:
    """Return the folders where data may be, in order: $TFM_DATA, if it is set, and the cache folder."""
    folder = os.environ.get("TFM_DATA")
    return [pathlib.Path(os.path.expanduser(folder)), disk.cache_folder()] if folder else [disk.cache_folder()]


def fetch(file_name: str, url: str, sha256: str) -> pathlib.Path:
    """Return the path of a file in the first of `places()` that has it, or else downloaded to the cache folder.

    Raises UserError if the existing file has another checksum. Raises RunError if the download fails or what it
    returns has another checksum.
    """
    for path in (folder / file_name for folder in places()):
        if path.is_file():
            with disk.reading(path), disk.open_regular(path) as file:
                if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != sha256:
                    raise ValueError(f"its sha256 is {digest}, not {sha256}. Replace or remove the file.")
            return path
    import pooch  # imported only here, because it takes a third of a second
    import requests

    path = disk.cache_folder() / file_name
    pooch.get_logger().setLevel("ERROR")  # this function reports errors itself
    try:
        load = pooch.HTTPDownloader(timeout=TIMEOUT)
        pooch.retrieve(url, f"sha256:{sha256}", fname=file_name, path=path.parent, downloader=load)
    except (ValueError, OSError, requests.RequestException) as error:  # ValueError: another checksum
        remedy = f"Put the file at {path} or into the folder $TFM_DATA."
        raise errors.RunError(f"{file_name} could not be downloaded from {url} ({error}). {remedy}") from error
    return path
