"""JSON files that somebody else may have written."""

import json
import pathlib
from typing import Any

from experiments.engine import disk, errors

LARGEST = 2**23  # bytes; names of 20,000 classes are 2**21


def read(file: pathlib.Path, *, says: str) -> dict[str, Any]:
    """The object in the file. UserError where it is not there (`says`: what it would tell), not JSON, or no object."""
    try:
        saved = json.loads(text(file))
    except FileNotFoundError:
        raise errors.UserError(f"there is no {file}, which says {says}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise errors.UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(saved, dict):
        raise errors.UserError(f"{file} must hold an object")
    return saved


def text(file: pathlib.Path) -> str:
    """The content of the file. OSError of the system; ValueError where it is too large, or not UTF-8."""
    return disk.read(file, LARGEST).decode()
