"""Text for the person who watches, some of which others have written: a prompt, a model's words, names in a file."""

import sys

CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def say(text: str, end: str = "") -> None:
    """Print at once; control characters, which may be commands to a terminal, as U+FFFD, what it cannot show as ?."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.translate(CONTROL).encode(encoding, "replace").decode(encoding), end=end, flush=True)
