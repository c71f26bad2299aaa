"""Fixtures of several test files: a small study that is trained once, and a function that sends SIGTERM."""

import os
import shutil
import signal

import pytest
import tiny_study


@pytest.fixture(scope="session")
def complete_study(make_once):
    """Return the folder of an uninterrupted study with tiny_study's arms and seeds. Tests change only copies of it."""

    def train(folder):
        outcome = tiny_study.run(folder)
        assert (outcome.code, outcome.err) == (0, "")

    return make_once("complete_study", train)


@pytest.fixture
def study_copy(complete_study, tmp_path):
    """Return a folder with a copy of the complete study, which the test may change."""
    shutil.copytree(complete_study / "study", tmp_path / "study")
    return tmp_path


@pytest.fixture
def signal_after():
    """Return a function (owner, name, due). It sends SIGTERM at the end of the first call of owner.name for which
    due(*arguments) is true."""
    with pytest.MonkeyPatch.context() as patch:

        def patch_function(owner, name, due=lambda *_: True):
            original, has_signalled = getattr(owner, name), []

            def call_and_signal(*arguments, **options):
                result = original(*arguments, **options)
                if not has_signalled and due(*arguments):
                    has_signalled.append(True)
                    os.kill(os.getpid(), signal.SIGTERM)
                return result

            patch.setattr(owner, name, call_and_signal)

        yield patch_function
