"""Fixtures of several test files: one small study, trained once, and a signal."""

import os
import shutil
import signal

import pytest
import tiny_study


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    """Return the folder of an undisturbed study with tiny_study's arms and seeds."""
    folder = tmp_path_factory.mktemp("complete")
    outcome = tiny_study.run(folder)
    assert (outcome.code, outcome.err) == (0, "")
    return folder


@pytest.fixture
def copy(complete, tmp_path):
    """Return a folder with a copy of the complete study, which the test may change."""
    shutil.copytree(complete / "study", tmp_path / "study")
    return tmp_path


@pytest.fixture
def signalled():
    """Return a function (owner, name, due): SIGTERM comes at the end of the first call of owner.name that is due."""
    with pytest.MonkeyPatch.context() as patch:

        def when(owner, name, due=lambda *_: True):
            original, sent = getattr(owner, name), []

            def and_signal(*arguments, **options):
                result = original(*arguments, **options)
                if not sent and due(*arguments):
                    sent.append(True)
                    os.kill(os.getpid(), signal.SIGTERM)
                return result

            patch.setattr(owner, name, and_signal)

        yield when
