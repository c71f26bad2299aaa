"""What several files of tests compare with: one small study, trained once."""

import pytest
import tiny_study


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a study that nothing disturbed: tiny_study's arms and seeds."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = tiny_study.run(folder)
    assert (outcome.code, outcome.err) == (0, "")
    return folder
