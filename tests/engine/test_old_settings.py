"""A setting of an earlier version is refused with what it is called now, or with what one does instead."""

import json
import re

import pytest
import tiny

from experiments.engine import by_name

OLD = {name: f"{name} is now {new}" for name, new in by_name.RENAMED.items()}
OLD |= {name: f"{name} is no setting any more: {instead}" for name, instead in by_name.REMOVED.items()}
OF = {"study": "ablation", "text": "language", "sample": "language", "image": "masked_image", "pairs": "translation"}


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_is_refused_wherever_it_stands(tmp_path, name):
    key, _, value = name.partition(" = ")
    section, value = key.partition(".")[0], value or "3"
    experiment = OF.get(section, section if section in tiny.EXPERIMENTS else "vision")
    own = experiment if key != "experiment" else value
    study = experiment == "ablation"
    file, saved = tmp_path / "mine.py", tmp_path / "saved.json"
    head = "from configs import base\n\ndef get_config():\n"
    begin = f'{head}    config = base.get_config("{own}", of="{"vision" if study else ""}")\n'
    file.write_text(f"{begin}    config.{key} = {value!r}\n    return config\n")
    runs = {"study.experiment": "vision"} if study else {}
    saved.write_text(json.dumps({"experiment": experiment, key: value} | runs))
    plain = tiny.config_file(tmp_path, experiment, **runs)
    for arguments in ([str(file)], [str(saved)], [plain, f"--config.{key}={value}"]):
        told = tiny.run("--config", *arguments, "--dry_run")
        assert told.code == 2 and re.fullmatch(rf"error: (\S*mine.py, line 5: )?{re.escape(OLD[name])}\n", told.err)


def test_what_is_new_exists():
    keys = tiny.fields()
    assert {name.partition(" = ")[0] for name in by_name.RENAMED.values()} <= keys.keys() and len(keys) < 90
    assert not {name for name in OLD if " = " not in name} & keys.keys()
