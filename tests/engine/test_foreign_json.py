"""Code that a config in JSON names is not run, wherever in a value it is named."""

import pytest
import tiny
from errors import raises

from experiments.engine import errors


@pytest.mark.parametrize(
    ("saved", "inside"),
    [
        ({"study": {"tune": [["model.score", ["tied", "evil:x"]]]}}, "study.tune"),
        ({"study.tune": [["model.score", [[["evil:x"]]]]]}, "study.tune"),
        ({"study": {"arms": [["a", {"study.tune": [["model.norm", ["evil:x"]]]}]]}}, "study.arms"),
        (
            {"study": {"conditions": [["a", {"study": {"arms": [["b", {"optim.name": "evil:x"}]]}}]]}},
            "study.conditions",
        ),
        ({"study": {"arms": [["source", [["evil:x"]]]]}}, "study.arms"),
        ({"study": {"arms": [["a", {"model.resource": "evil:x"}]]}}, "study.arms"),
        ({"log": ["evil:x"]}, "log"),
    ],
)
def test_code_deep_in_a_value_is_not_run(tmp_path, saved, inside):
    saved = {"study": {}} | saved
    saved["study"] |= {"experiment": "vision"}
    file = tiny.saved_in(tmp_path, {"config": {"experiment": "ablation"} | saved})
    with raises(errors.UserError, '"evil:x"', f"--config.{inside}="):
        tiny.loaded(file, explicit={"optim.name": ""})
