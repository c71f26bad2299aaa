"""Every file of configs/ can be trained: the shapes and dtypes of its plan and loss are right. Nothing is computed."""

import pathlib

import numpy as np
import pytest
import small_files
import tiny

from experiments.config import by_name, files as config_files, settings as configs
from experiments.data import download
from experiments.devices import mesh as meshes
from experiments.engine import run_plan
from experiments.studies import study as studies

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "base"))


def make_settings(file: pathlib.Path, folder: pathlib.Path) -> configs.Settings:
    """Return the settings of the file's run, or of the first run of its study, with small data and one layer."""
    values = config_files.load(str(file))
    if values.experiment != "convolution":  # it has no layers
        values.model.M = 1
    if "/" in values.get("text", {}).get("tokenizer", ""):
        values.text.tokenizer = "bytes"
    if "pairs" in values:
        pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')
    sections = [name for name in ("text", "pairs", "image") if name in values and values[name].source != "digits"]
    sections = ["texts" if values.experiment == "text_classification" else name for name in sections]
    sections = [name for name in sections if not by_name.is_reader(values[name.replace("texts", "text")].source)]
    values.update_from_flattened_dict(small_files.sources(folder, sections, side=28))
    settings = configs.Settings(values)
    if values.experiment != "ablation":
        return settings
    design = studies.read(settings)  # test_ablation.py checks the other runs
    first = design._replace(conditions=design.conditions[:1], arms=design.arms[:1], seeds=design.seeds[:1])
    return studies.runs(settings, first)[0].settings


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_file_can_be_trained_and_says_how_to_run_it(file, tmp_path, monkeypatch):
    speeches = small_files.write(tmp_path, speeches=b"A king:\nI read.\n\n" * 300) / "speeches"
    monkeypatch.setattr(download, "fetch", lambda *_: speeches)  # for a config with a reader of its own
    assert f"python launch.py --config configs/{file.name}" in file.read_text(encoding="utf-8").split('"""')[1]
    settings, devices = make_settings(file, tmp_path), meshes.make(data=1)
    work = tiny.work_of(settings, devices)
    assert (work.data_sha256 is None) == (settings.experiment == "synthetic")  # it has no data
    traced = []

    def loss(params, batch, **keys):
        result = work.task.loss(params, batch, **keys)
        traced.extend((x.shape, x.dtype) for x in result[0]["loss"])
        return result

    # The plan traces an evaluation. Here it has a training batch, which has everything that an evaluation needs.
    run_plan.make_plan(settings, work.task._replace(loss=loss, evaluation=[work.task.train[0]]), devices)
    assert {shape for shape, _ in traced} == {()} and traced[0][1] == np.float32
    for key in ("init_from", "init_fresh"):  # the launcher reads these two
        getattr(settings, key)
    settings.refuse_unused()
