"""A setting of an earlier version is refused with what it is called now, or with what one does instead."""

import json
import re

import pytest
import tiny

from experiments.engine import old_settings

OLD = {name: f"{name} is now {new}" for name, new in old_settings.RENAMED.items()}
OLD |= {name: f"{name} is no setting any more: {instead}" for name, instead in old_settings.REMOVED.items()}
EXPERIMENTS = {
    "study": "ablation",
    "text": "language",
    "sample": "language",
    "image": "masked_image",
    "pairs": "translation",
}


def of(name: str) -> tuple[str, str, str]:
    """(the experiment that had the setting, its key, a value)."""
    key, _, value = name.partition(" = ")
    section = key.partition(".")[0]
    return EXPERIMENTS.get(section, section if section in tiny.EXPERIMENTS else "vision"), key, value or "3"


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_is_refused_wherever_it_stands(tmp_path, name):
    experiment, key, value = of(name)
    own = experiment if key != "experiment" else value
    of_study = ', of="vision"' if experiment == "ablation" else ""
    file, saved = tmp_path / "mine.py", tmp_path / "saved.json"
    begin = f'from configs import base\n\ndef get_config():\n    config = base.get_config("{own}"{of_study})\n'
    file.write_text(f"{begin}    config.{key} = {value!r}\n    return config\n")
    runs = {"study.experiment": "vision"} if of_study else {}
    saved.write_text(json.dumps({"experiment": experiment, key: value} | runs))
    plain = tiny.config_file(tmp_path, experiment, **runs)
    for arguments in ([str(file)], [str(saved)], [plain, f"--config.{key}={value}"]):
        told = tiny.run("--config", *arguments, "--dry_run")
        assert told.code == 2 and told.err.endswith(f"{OLD[name]}\n"), told.err
        assert re.match(rf"error: ({re.escape(str(file))}, line \d+: )?{re.escape(OLD[name])}\n$", told.err)


def test_what_is_new_exists():
    keys = tiny.fields()
    assert {name.partition(" = ")[0] for name in old_settings.RENAMED.values()} <= keys.keys()
    assert not {name for name in OLD if " = " not in name} & keys.keys()
