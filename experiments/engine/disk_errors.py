"""What Orbax, tensorstore and the system raise for a disk, as a few words instead of pages."""

import asyncio
import errno
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
# What a mounted drive (Colab's, NFS) says while it, or the way to it, is gone; it may be there again in a moment.
GONE = (errno.ENOTCONN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNABORTED, errno.ENODEV, errno.EHOSTDOWN)
REMEDY = "mount that drive again (on Colab: drive.mount('/content/drive', force_remount=True))"


def number(error: BaseException) -> int | None:
    """The system's number of the error, also where tensorstore tells it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else getattr(error, "errno", None)


def reason(error: BaseException) -> str:
    """Why, in the words of the system where it has any, with a remedy where a mounted drive is gone."""
    code = number(error)
    said = getattr(error, "strerror", None) or (os.strerror(code) if code else str(error))
    said = (said.splitlines() or [type(error).__name__])[0][:200]
    return f"{said}: {REMEDY}" if code == errno.ENOTCONN else said


def gone(error: BaseException | None, folder: pathlib.Path = pathlib.Path("/")) -> bool:
    """Whether this error, or one that it was raised for, says that a drive is gone: of a file in `folder`, where it
    names one."""
    if error is None:
        return False
    file = getattr(error, "filename", None)
    known = isinstance(file, str | os.PathLike)
    elsewhere = known and not pathlib.Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))
    return (number(error) in GONE and not elsewhere) or gone(error.__cause__ or error.__context__, folder)


def quiet() -> None:
    """Leave Orbax's and tensorstore's tracebacks out: what went wrong is raised, and told in a sentence."""
    logging.getLogger("absl").addFilter(_not_orbax)
    if not isinstance(sys.unraisablehook, functools.partial):
        sys.unraisablehook = functools.partial(_unless_late, sys.unraisablehook)


def _unless_late(usual: Callable[[Any], Any], told: Any) -> None:
    """Show what could not be raised; not that the loop is closed which awaited many writes until the first failed, nor
    that a file of a drive which is gone cannot be closed."""
    called = told.exc_traceback and told.exc_traceback.tb_frame.f_code
    if called is not asyncio.BaseEventLoop.call_soon_threadsafe.__code__ and not gone(told.exc_value):
        usual(told)


def _not_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in pathlib.Path(record.pathname).parts)
