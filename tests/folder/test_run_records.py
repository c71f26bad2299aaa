"""The files of a run's folder: wrong types, damage and what is no file end in one sentence, and nothing is guessed."""

import json
import os

import pytest
import tiny
from errors import raises

from experiments import command as commands
from experiments.config import disk, errors, settings as configs
from experiments.folder import records

CONFIG, SUMMARY, METRICS, DATA = "config.json", "summary.json", "metrics.jsonl", "data.json"
READERS = {CONFIG: records.read_config, SUMMARY: records.read_summary, DATA: records.read_data}
READERS[METRICS] = records.read_metrics
VALID = {
    CONFIG: b'{"config": {"train": {"steps": 3}, "model": {"cap": 0}}, "data": null, "devices": null}',
    SUMMARY: b'{"steps": 3, "eval/loss": NaN, "diverged_at": null, "initial": {"a": [1, 2, 3, 4]}}',
    METRICS: b'{"step": 1, "train/loss": null}\n{"step": 2, "tr',
    DATA: b'{"classes": ["a"], "values": [0, 1]}',
}
DAMAGED = [
    *(
        (name, content, "")
        for name in VALID
        for content in (b"[]\n", b"3\n", b"caf\xe9\n", b"\0\n", b"[" * 10**5 + b"\n")
    ),
    *((name, b"", "") for name in (CONFIG, SUMMARY, DATA)),
    (CONFIG, b"{}", "config is missing"),
    (CONFIG, b'{"config": []}', "config = [] must be an object"),
    (CONFIG, b'{"config": {"train": [1]}}', "train = [1] must be an object"),
    (CONFIG, b'{"config": {"train": {"steps": true}}}', "steps = True must be a whole number from 0 on"),
    (CONFIG, b'{"config": {"text": {"N": 0}}}', "N = 0 must be a whole number from 1 on"),
    (CONFIG, b'{"config": {"model": {"cap": null}}}', "cap = None must be a number"),
    (CONFIG, b'{"config": {"train": {"metrics": [3]}}}', "metrics[0] = 3 must be a text"),
    (CONFIG, b'{"config": {"x": "\\ud800"}}', "surrogates"),
    (SUMMARY, b"{}", "steps is missing"),
    (SUMMARY, b'{"steps": 1.5}', "steps = 1.5 must be a whole number"),
    (SUMMARY, b'{"steps": 3, "eval/loss": "0.5"}', "eval/loss = '0.5' must be a number"),
    (SUMMARY, b'{"steps": 3, "eval/loss": 1e999}', "eval/loss = inf must be a number"),
    (SUMMARY, b'{"steps": 3, "guess": [1]}', "guess = [1] must be an object"),
    (SUMMARY, b'{"steps": 3, "initial": {"a": [1]}}', "a = [1] must be a list of 4"),
    *((METRICS, b'{"step": 1}\n' + line + b'\n{"step": 2}\n', "line 2 ") for line in (b'{"st', b"\0", b"[]")),
    (METRICS, b'{"step": "1"}\n', "line 1 is damaged: step = '1' must be a whole number"),
    (METRICS, b'{"step": 1}\n{"step": 2, "eval/loss": {}}\n', "line 2 is damaged: eval/loss = {} must be a number"),
    (DATA, b'{"values": [0]}', "values = [0] must be a list of 2"),
]


@pytest.mark.parametrize("name", VALID)
def test_a_missing_file_is_empty_and_a_valid_one_is_read(tmp_path, name):
    assert not READERS[name](tmp_path)
    (tmp_path / name).write_bytes(VALID[name])
    content = READERS[name](tmp_path)
    assert content == ([{"step": 1, "train/loss": None}] if name == METRICS else json.loads(VALID[name]) | content)
    assert name != SUMMARY or content["eval/loss"] is None


@pytest.mark.parametrize(("name", "content", "fault"), DAMAGED)
def test_a_damaged_file_is_one_sentence_with_its_path(tmp_path, name, content, fault):
    (tmp_path / name).write_bytes(content)
    with raises(errors.UserError, tmp_path / name, fault):
        READERS[name](tmp_path)


@pytest.mark.parametrize("name", VALID)
def test_what_is_not_a_file_is_refused_without_waiting(tmp_path, name):
    file = tmp_path / name
    for make in (
        file.mkdir,
        lambda: os.mkfifo(file),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to(name),
    ):
        make()
        with raises(errors.UserError, file):
            READERS[name](tmp_path)
        file.rmdir() if file.is_dir() else file.unlink()


def test_a_section_or_list_that_contains_itself_is_refused():
    config = tiny.base.get_config("language")
    with config.unlocked():
        config.model.inner = config.model
    items = []
    items.append(items)
    for values, name in ((config.to_dict(), "model"), ({"train": {"metrics": items}}, "train")):
        with raises(errors.UserError, f"{name}, ", "contains itself"):
            configs.flat(values)


def test_a_new_file_is_checked_before_the_work(tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "old.csv").touch()
    for name in ("link.csv", "folder.csv", "old.csv", "old.csv/new.csv", f"{'a' * 240}.csv", f"{'a' * 300}/b.csv"):
        with raises(errors.UserError, tmp_path / name, "--output"):
            commands.new_file(tmp_path / name, "--output", ".csv")
    file = commands.new_file(tmp_path / "new" / f"{'a' * (disk.LONGEST_NAME - 4)}.csv", "--output", ".csv")
    assert not file.exists()
    with raises(errors.UserError, "cannot be written"):
        disk.write_new(tmp_path / "old.csv" / "d", b"")
    cells = ["=1+1", "+a", "-a", "@a", "-1.5", "+2", "a=", -1.5, "\t=a"]
    commands.save_table(file, ["=text"] * len(cells), [cells])
    assert file.read_text().splitlines()[1] == "'=1+1,'+a,'-a,'@a,-1.5,+2,a=,-1.5,'\t=a"
