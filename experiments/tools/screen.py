"""Search in two stages: train every arm of a study once, then those that beat the reference with fresh seeds.

python -m experiments.tools.screen --config=configs/my_study.py --workdir=runs/search
screen.run("configs/my_study.py", "runs/search", set=("train.steps=500",))

The screen is cheap, and passes about half of the arms that change nothing. The second stage decides, with study.seeds.
The screen has used none of these, so the intervals are corrected for the arms that passed, not for all. The folders
WORKDIR/screen and WORKDIR/confirm hold the two studies. The same command resumes them. Arms that are added after the
verdict are another search, in another folder.
"""

import json
import pathlib
from typing import Any

import launch
from experiments import command as commands
from experiments.config import disk, errors, files as config_files
from experiments.folder import log
from experiments.studies import sentences, statistics, study as studies

HELP = {
    "config": "The config of a study with one condition. Its last arm is the reference.",
    "seed": "The seed of the screen, which must not be in study.seeds.",
    "workdir": "The folder of both studies, new or to resume.",
}


def run(
    config: commands.Path, workdir: commands.Path, *, seed: int = 999, set: tuple[str, ...] = (), device: str = "any"
) -> list[str]:
    """Train all arms with one seed, and those that beat the reference again with the study's seeds.

    Print how often such a search calls an arm better if no arm changes anything. Return the names of the arms that are
    better in the second training. Raises UserError if `config` is no study with one condition, `seed` is among its
    seeds, or `workdir` has a verdict on other arms.
    """
    commands.require("--config=FILE", config)
    commands.require("--workdir=DIR", workdir)
    changes, folder = commands.parse_changes(set), pathlib.Path(workdir)
    settings = config_files.load_settings(str(config), changes)
    errors.refuse((settings.experiment != "ablation", f"{config} is not the config of a study: it has no study.arms"))
    study = studies.read(settings)
    seeds = f"--seed={seed} is in study.seeds or study.tune_seeds. Choose another seed for the screen"
    single = f"{config} has {len(study.conditions)} conditions, and a screen needs one"
    errors.refuse((seed in [*study.seeds, *study.tune_seeds], seeds), (len(study.conditions) > 1, single))
    if (folder / "confirm" / "report.json").exists():
        report = json.loads(disk.read_bytes(folder / "screen" / "report.json"))
        judged = {arm["name"] for arm in report["conditions"][0]["arms"]}
        other = f"{folder} has a verdict on other arms than {config}. A second search needs another --workdir"
        errors.refuse((judged != {arm.name for arm in study.arms}, other))

    def train(stage: str, changes: dict[str, Any]) -> dict[str, Any]:
        return launch.run(config, folder / stage, device=device, **changes).summary["conditions"][0]

    first, sign = train("screen", changes | {"study.seeds": [seed]}), {"less": -1, "more": 1}
    gains = {arm["name"]: arm["difference"]["mean"] for arm in first["arms"] if arm["difference"]}
    passed = [name for name, gain in gains.items() if gain is not None and sign[first["better"]] * gain > 0]
    arms = [[*arm] for arm in study.arms if arm.name in [*passed, study.reference]]
    second = train("confirm", changes | {"study.arms": arms})["arms"] if passed else []
    better = [arm["name"] for arm in second if arm["difference"] and arm["difference"]["kind"] == statistics.BETTER]
    text = f"""
screened: {len(gains)} arms, one run each; passed: {len(passed)} ({sentences.quote(*passed) or "none"})
better with {len(study.seeds)} fresh seeds: {len(better)} ({sentences.quote(*better) or "none"})
If no arm changes anything, at most 2.5 % of such searches call an arm better, because the intervals hold at 95 % for
the arms that passed together. An arm that did not pass was not tested: this says nothing about it."""
    log.say(text, "\n")
    return better


if __name__ == "__main__":
    commands.main(run, HELP)
