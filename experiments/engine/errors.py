"""What ends a command with one sentence instead of a traceback; the exit code says which it was."""


class _Sentence(BaseException):
    """In a notebook, an error of which only the sentence is shown."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [line(self)]


class UserError(_Sentence, Exception):
    """A mistake in a config, a path or a data file: one clear sentence that says what is wrong and what is right."""


class RunError(_Sentence, Exception):
    """A run that was good cannot go on (numbers that are not finite, a full disk): one sentence. Exit code 1."""


class Interrupted(_Sentence, KeyboardInterrupt):
    """A signal ends the command; like Ctrl-C, it is no mistake that code on the way could mend.

    code: the exit code, 128 + the signal's number.
    """

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code


def line(error: BaseException) -> str:
    """The sentence on one line; what a terminal would act on, as a damaged name may hold it, is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(error))
