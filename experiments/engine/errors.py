"""The one exception that means "the user can mend this": the launcher prints it as a sentence and exits with code 2."""


class UserError(Exception):
    """A mistake in a config, a path or a data file: one clear sentence that says what is wrong and what is right."""
