"""Errors that end a command with one sentence instead of a traceback, and its exit code."""

from typing import Any


class _Sentence(BaseException):
    """An error that a notebook shows as one sentence."""

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython shows in place of a traceback."""
        return [line(self)]


class UserError(_Sentence, Exception):
    """A mistake in a config, a path or a data file: one sentence with the setting and its allowed values."""


class RunError(_Sentence, Exception):
    """A run with a valid config cannot continue (a loss that is not finite, a full disk): one sentence. Exit code 1."""


class Interrupted(_Sentence, KeyboardInterrupt):
    """A signal ends the command. Like KeyboardInterrupt, it is not caught by `except Exception`.

    code: the exit code, 128 + the signal's number.
    """

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code


def refuse(*faults: tuple[Any, str]) -> None:
    """Raise UserError with the message of the first true condition, if there is one. faults: (condition, message)."""
    for condition, message in faults:
        if condition:
            raise UserError(message)


def line(error: BaseException) -> str:
    """Return the message of an error on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(error))
