"""Small studies whose programs compile in a second, for tests that stop, kill and read them."""

import json
import pathlib
from collections.abc import Iterable

import pytest
import tiny

from experiments.folder import records
from experiments.studies import figures as study_figures

STEPS = 6
TRAIN = {
    "optim__warmup_steps": 2,
    "train__steps": STEPS,
    "train__batch_size": 4,
    "train__log_every": 2,
    "train__evaluate_every": 3,
    "mesh__data": 1,
}
# Two programs: the second trains two arms as rows of one batch.
ARMS = [["lean", {"dots.bias": False}], ["fast", {"optim.learning_rate": 1e-2}], ["base", {}]]
ALL = [f"all/{arm}/seed_{seed}" for arm, _ in ARMS for seed in (3, 5)]
STUDY = {"study__experiment": "dots", "study__arms": ARMS, "study__seeds": [3, 5], "log": []}
LANGUAGE = {"text__N": 7, "model__M": 2, "model__D": 4, "model__H": 2, "model__remat": "products"}
LANGUAGE |= {"model__bias": "none", "model__mlp": "relu", "model__norm": "rms"}  # compiles twice as fast


def config_file(folder: pathlib.Path, **changes) -> str:
    """Write the config of a study of dots.py, or of language with a text file. Return its path."""
    folder.mkdir(exist_ok=True)
    if changes.get("study__experiment") == "language":
        (folder / "text.txt").write_bytes(tiny.TEXT)
        changes = LANGUAGE | {"text__source": str(folder / "text.txt")} | changes
    return tiny.config_file(folder, "ablation", **(TRAIN | STUDY | changes))


def command(folder: pathlib.Path, *flags: str, **changes) -> list[str]:
    """Return the arguments for launch.py that train the study in folder / "study"."""
    return ["--config", config_file(folder, **changes), "--workdir", str(folder / "study"), *flags]


def run(folder: pathlib.Path, *flags: str, draws: bool = False, **changes) -> tiny.Outcome:
    """Run the study. Draw figures only if `draws`, and these only as PNG files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_figures, "ALSO", ())
        if not draws:
            patch.setattr(study_figures, "draw", lambda *arguments, **options: [])
        return tiny.run(*command(folder, *flags, **changes))


def summaries(folder: pathlib.Path) -> dict[str, dict]:
    """Return {"condition/arm/seed_N": summary} of the finished runs."""
    study = folder / "study"
    files = sorted(study.glob("*/*/seed_*/summary.json"))
    return {str(file.parent.relative_to(study)): json.loads(file.read_text(encoding="utf-8")) for file in files}


def assert_equal_runs(folder: pathlib.Path, reference: pathlib.Path, names: Iterable[str]) -> None:
    """Assert that these runs of two studies have exactly the same results and logged numbers."""
    results, expected = summaries(folder), summaries(reference)
    for name in names:
        for key in ("params_sha256", "diverged_at", "eval/loss", "eval/accuracy", "steps"):
            assert results[name][key] == expected[name][key], f"{key} of {name}"
        rows, expected_rows = (records.read_metrics(folder / "study" / name) for folder in (folder, reference))
        assert rows == expected_rows and len(rows) > 2, name
