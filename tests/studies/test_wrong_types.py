"""Values of a wrong type in the files of a study end in one sentence that names the file and the field."""

import copy as copies
import json
import math

import pytest

from experiments.engine import errors
from experiments.studies import figures, report

WRONG = {"null": None, "text": "x", "negative": -1, "list": [], "object": {}, "huge": 10**400, "nan": math.nan}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *_: [])


def leaves(tree, path=()):
    """The paths of all leaves of a JSON value, of a list those of its first entry."""
    pairs = tree.items() if isinstance(tree, dict) else [*enumerate(tree)][:1] if isinstance(tree, list) else ()
    found = [path] if path else []
    for key, value in pairs:
        found += leaves(value, (*path, key))
    return found


def faults(folder, name, read, paths=None, wrong=WRONG):
    """The (path, value) for which the reader raises something else than a UserError."""
    file = folder / name
    before, found = json.loads(file.read_text()), []
    for path in paths or leaves(before):
        for kind, value in wrong.items():
            changed = copies.deepcopy(before)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            file.write_text(json.dumps(changed))
            try:
                read(folder)
            except errors.UserError as error:
                assert len(str(error)) < 2000
            except Exception as error:
                found.append((path, kind, f"{type(error).__name__}: {error}"[:80]))
    file.write_text(json.dumps(before))
    return found


def test_no_value_in_a_summary_is_a_traceback_of_the_report(copy):
    folder = copy / "study"
    file = sorted(folder.glob("all/*/seed_*/summary.json"))[0].relative_to(folder)
    found = faults(folder, file, report.again)
    assert not found, f"{len(found)}: {found}"


def test_no_value_in_the_config_of_a_study_is_a_traceback_of_the_report(copy):
    found = faults(copy / "study", "config.json", report.again)
    assert not found, f"{len(found)}: {found}"
