"""JSON files that somebody else may have written."""

import json
import pathlib
from typing import Any

from experiments.engine import errors


def read(file: pathlib.Path, *, says: str) -> dict[str, Any]:
    """The object in the file. UserError where it is not there (`says`: what it would tell), not JSON, or no object."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.UserError(f"there is no {file}, which says {says}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise errors.UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(saved, dict):
        raise errors.UserError(f"{file} must hold an object")
    return saved
