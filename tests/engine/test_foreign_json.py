"""Code that a config in JSON names is not run, wherever in a value it is named."""

import pytest
from test_config import loaded, saved_in

from experiments.engine import errors


@pytest.mark.parametrize(
    ("saved", "where"),
    [
        ({"study": {"tune": [["model.score", ["tied", "evil:x"]]]}}, " in study.tune"),
        ({"study.tune": [["model.score", [[["evil:x"]]]]]}, " in study.tune"),
        ({"study": {"arms": [["a", {"study.tune": [["model.norm", ["evil:x"]]]}]]}}, " in study.arms"),
        ({"study": {"conditions": [["a", {"study": {"arms": [["b", {"optim.name": "evil:x"}]]}}]]}}, " in study.cond"),
        ({"study": {"arms": [["source", [["evil:x"]]]]}}, " in study.arms"),
        ({"study": {"arms": [["a", {"model.resource": "evil:x"}]]}}, " in study.arms"),
        ({"log": ["evil:x"]}, " in log"),
    ],
)
def test_code_deep_in_a_value_is_not_run(tmp_path, saved, where):
    saved = {"study": {}} | saved
    saved["study"] |= {"experiment": "vision"}
    file = saved_in(tmp_path, {"config": {"experiment": "ablation"} | saved})
    with pytest.raises(errors.UserError) as caught:
        loaded(file, given={"optim.name": ""})
    assert '"evil:x"' in str(caught.value) and f"--config.{where.removeprefix(' in ')}" in str(caught.value)
