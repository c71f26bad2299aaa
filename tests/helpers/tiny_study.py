"""The smallest studies, whose programs compile in a second, for tests that stop, kill and read them."""

import json
import pathlib
from collections.abc import Iterable

import pytest
import tiny

from experiments.engine import log
from experiments.studies import figures as drawings

STEPS = 6
TRAIN = {
    "optim__warmup_steps": 2,
    "train__steps": STEPS,
    "train__batch_size": 4,
    "train__log_every": 2,
    "train__evaluate_every": 3,
    "mesh__data": 1,
}
# Two programs: the second has the rows of two arms.
ARMS = [["lean", {"dots.bias": False}], ["fast", {"optim.learning_rate": 1e-2}], ["base", {}]]
ALL = [f"all/{arm}/seed_{seed}" for arm, _ in ARMS for seed in (3, 5)]
STUDY = {"study__experiment": "dots", "study__arms": ARMS, "study__seeds": [3, 5], "log": []}
LANGUAGE = {"text__N": 7, "model__M": 2, "model__D": 4, "model__H": 2, "model__remat": "products"}
LANGUAGE |= {"model__bias": "none", "model__mlp": "relu", "model__norm": "rms"}  # compiled twice as fast


def config_file(folder: pathlib.Path, **changes) -> str:
    """Return the path of a new config of a study in this folder, of dots.py, or of language with a text."""
    folder.mkdir(exist_ok=True)
    if changes.get("study__experiment") == "language":
        (folder / "text.txt").write_bytes(tiny.TEXT)
        changes = LANGUAGE | {"text__source": str(folder / "text.txt")} | changes
    return tiny.config_file(folder, "ablation", **(TRAIN | STUDY | changes))


def command(folder: pathlib.Path, *more: str, **changes) -> list[str]:
    """Return the arguments with which launch.py trains the study in folder / "study"."""
    return ["--config", config_file(folder, **changes), "--workdir", str(folder / "study"), *more]


def run(folder: pathlib.Path, *more: str, draws: bool = False, **changes) -> tiny.Outcome:
    """Run the study without figures, or with `draws` with PNG files only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawings, "ALSO", ())
        if not draws:
            patch.setattr(drawings, "draw", lambda *arguments, **options: [])
        return tiny.run(*command(folder, *more, **changes))


def summaries(folder: pathlib.Path) -> dict[str, dict]:
    """Return the summaries of the finished runs by their names."""
    study = folder / "study"
    files = sorted(study.glob("*/*/seed_*/summary.json"))
    return {str(file.parent.relative_to(study)): json.loads(file.read_text(encoding="utf-8")) for file in files}


def assert_alike(ours: pathlib.Path, reference: pathlib.Path, names: Iterable[str]) -> None:
    """Assert that these runs of two studies have exactly the same results and logged numbers."""
    results, expected = summaries(ours), summaries(reference)
    for name in names:
        for key in ("params_sha256", "diverged_at", "eval/loss", "eval/accuracy", "steps"):
            assert results[name][key] == expected[name][key], f"{key} of {name}"
        rows, wanted_rows = (log.read(folder / "study" / name) for folder in (ours, reference))
        assert rows == wanted_rows and len(rows) > 2, name
