"""What Orbax and tensorstore raise for a disk, as a few words instead of pages."""

import asyncio
import functools
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

NOT_WRITTEN = (OSError, ValueError, RuntimeError)
NOT_READ = (*NOT_WRITTEN, KeyError, TypeError)  # also for what they cannot make sense of


def reason(error: BaseException) -> str:
    """Why, in the words of the system where it has any."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    said = os.strerror(int(found[1])) if found else getattr(error, "strerror", None) or str(error)
    return (said.splitlines() or [type(error).__name__])[0][:200]


def quiet() -> None:
    """Leave Orbax's and tensorstore's tracebacks out: what went wrong is raised, and told in a sentence."""
    logging.getLogger("absl").addFilter(_not_orbax)
    if not isinstance(sys.unraisablehook, functools.partial):
        sys.unraisablehook = functools.partial(_unless_late, sys.unraisablehook)


def _unless_late(usual: Callable[[Any], Any], told: Any) -> None:
    """Show what could not be raised; not that the loop is closed which awaited many writes until the first failed."""
    called = told.exc_traceback and told.exc_traceback.tb_frame.f_code
    if called is not asyncio.BaseEventLoop.call_soon_threadsafe.__code__:
        usual(told)


def _not_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in pathlib.Path(record.pathname).parts)
