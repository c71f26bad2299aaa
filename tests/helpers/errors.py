"""Check errors by type, setting and value only, so that their wording can change."""

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def raises(kind: type[BaseException], *parts: object) -> Iterator[pytest.ExceptionInfo]:
    """Expect an exception of this type whose message contains each part (a setting's or file's name, a value)."""
    with pytest.raises(kind) as caught:
        yield caught
    missing = [str(part) for part in parts if str(part) not in str(caught.value)]
    assert not missing, f"{missing} missing in: {caught.value}"
