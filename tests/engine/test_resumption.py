"""What a run that goes on is told about what has changed since."""

import json

import pytest

from experiments.engine import mesh, workdir

HERE = mesh.make(data=2)


@pytest.fixture
def changes(tmp_path):
    """The lines for a run that has `steps` to take by this schedule, in a folder of one with 1000 steps."""

    def changes(*, steps=1000, schedule="cosine", versions=None, devices=None, content=None):
        saved = {"config": {"train": {"steps": 1000}}, "versions": mesh.versions() | (versions or {})}
        saved |= {"devices": devices} if devices else {}  # which an older version did not tell
        (tmp_path / "config.json").write_text(json.dumps(saved) if content is None else content)
        return workdir.changes(tmp_path, {"train": {"steps": steps}, "optim": {"schedule": schedule}}, HERE)

    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    return changes


def test_a_schedule_that_becomes_another_one_is_told(changes, tmp_path):
    assert changes() == changes(steps=2000, schedule="constant") == []
    told = "train.steps was 1000 and is 2000: the rest of the learning rate's schedule is another one"
    assert changes(steps=2000) == [told]
    (tmp_path / "checkpoints" / "3").rmdir()  # nothing has been trained by the other one
    assert changes(steps=2000) == []


def test_another_jax_is_told(changes):
    assert changes(versions={"flax": "0.0.1"}) == changes(versions={"jax": None}) == []
    (told,) = changes(versions={"jax": "0.0.1", "jaxlib": "0.0.2"})
    now = mesh.versions()
    assert told.startswith(f"it was trained with jax 0.0.1, now {now['jax']}; with jaxlib 0.0.2, now {now['jaxlib']}:")


def test_another_number_of_devices_is_told(changes):
    assert changes(devices="2 x cpu") == []
    told = "it was trained on 8 x TPU v5 lite, now 2 x cpu: numbers may differ in the last bits from here on"
    assert changes(devices="8 x TPU v5 lite") == [told]


@pytest.mark.parametrize("content", ["", "{", "{}", '{"config": 3, "versions": {}}', '{"config": {}, "versions": []}'])
def test_of_a_damaged_config_nothing_is_told(changes, content):
    assert changes(content=content) == []
