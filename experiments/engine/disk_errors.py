"""What Orbax and tensorstore raise for a disk, as a few words instead of pages."""

import logging
import os
import pathlib
import re

NOT_WRITTEN = (OSError, ValueError, RuntimeError)
NOT_READ = (*NOT_WRITTEN, KeyError, TypeError)  # also for what they cannot make sense of


def reason(error: BaseException) -> str:
    """Why, in the words of the system where it has any."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    said = os.strerror(int(found[1])) if found else getattr(error, "strerror", None) or str(error)
    return (said.splitlines() or [type(error).__name__])[0][:200]


def quiet() -> None:
    """Leave Orbax's tracebacks out of the log: what went wrong is raised, and told in a sentence."""
    logging.getLogger("absl").addFilter(_not_orbax)


def _not_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in pathlib.Path(record.pathname).parts)
