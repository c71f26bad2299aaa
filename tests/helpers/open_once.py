"""Fixture for modules whose tests open the same models: they share the compiled programs."""

import functools

import pytest

from experiments.pretrained import open_model


@pytest.fixture(scope="module", autouse=True)
def open_once():
    """Open each folder once. Its files must not change afterwards."""
    opened = functools.cache(open_model.open)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_model, "open", lambda path, trust=(): opened(str(path), tuple(trust)))
        yield
