"""Fixtures of several test files: one small study, trained once, and a signal."""

import os
import shutil
import signal

import pytest
import tiny_study


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a study that nothing disturbed: tiny_study's arms and seeds."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = tiny_study.run(folder)
    assert (outcome.code, outcome.err) == (0, "")
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of it, for a test to do with as it likes."""
    shutil.copytree(whole / "study", tmp_path / "study")
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
