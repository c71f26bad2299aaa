"""Open a trained model, of a run or published, from its path."""

import contextlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.config import by_name, disk, errors, files as config_files, settings as configs
from experiments.data import synthetic
from experiments.devices import mesh as meshes
from experiments.folder import checkpoint, records, workdir as workdirs
from experiments.model import losses
from experiments.pretrained import adapters, hub, trained
from tfm import models

Trained = trained.Trained
RUNS = {"vision": "image", "text_classification": "classes"}  # experiment -> kind, if their names differ
# Experiment -> {name in Trained.facts: setting}
TEXT = {"N": "text.N", "output": "text.head"}
FACTS = {
    "language": TEXT,
    "text_classification": TEXT,
    "vision": {"patch": "image.patch", "output": "image.head"},
    "masked_image": {"patch": "image.patch"},
    "translation": {"N": "pairs.N"},
    "synthetic": {"task": "synthetic.task"},
}
PEFT = "adapter_config.json"
MERGE_PEFT = "Merge them (merge_and_unload of peft), save the result with save_pretrained, and give its folder."


def open(path: str | os.PathLike, trust: Sequence[str] = ()) -> Trained:
    """Return the model at the path: a run's folder, a checkpoint (RUN/checkpoints/40), or a published model.

        model = open_model.open("runs/x")
        logits_BNW = model(np.array([model.tokenizer.encode("Once upon a time")]))

    Of a run's folder, open the best checkpoint if the run has train.keep_best, else the newest. A published model is a
    folder with config.json and model.safetensors, or one of these files. trust: the user's code in a run's config that
    may be executed, such as "my_file:my_score". Raises UserError if there is no model, or if it cannot be opened.
    """
    example = "a model is a run's folder, or the folder or file of a published one"
    errors.refuse(
        (not str(path), f"--checkpoint is missing. Add --checkpoint=PATH: {example}"),
        (not os.path.exists(os.path.expanduser(path)), f"{path} does not exist; {example}"),  # or its name is too long
    )
    place, step = workdirs.locate(path)
    if not (file := place / records.CONFIG).exists():
        is_peft, base = (place / PEFT).is_file(), records.read_object(place / PEFT, {}).get("base_model_name_or_path")
        errors.refuse(
            (list(place.glob("*/config.json")), f"{path} is not a run{workdirs.suggest_newest(place, '--checkpoint')}"),
            (is_peft, f"{path} holds only adapters of peft, for the model {base}. {MERGE_PEFT}"),
        )
    if "config" not in records.read_object(file, {}):
        return hub.read(place)
    trust = (trust,) if isinstance(trust, str) else tuple(trust)
    with disk.reading(file, TypeError, AttributeError):
        return _open_run(place, records.read_config(place)["config"], trust, step)


def _open_run(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str], step: int | None) -> Trained:
    """Return the model of a run after `step` steps; None: its best checkpoint with train.keep_best, else the newest."""
    if module := config["model"].get("flax"):
        raise errors.UserError(
            f"{folder} has the Flax module model.flax = {module}, which the tools cannot open. Use the result of "
            "launch.run(config, workdir), which has params and apply"
        )
    keep_best, better = config["train"]["keep_best"], records.read_summary(folder).get("better", {})
    if keep_best and not better:  # the run has no metrics of the user's, or is not finished
        metrics = {"train.metrics": config["train"].get("metrics", [])}
        trained.check_trust(folder, metrics, trust)
        better = {name: metric.better for name, metric in losses.choose_metrics(*metrics.values()).items()}
    step = checkpoint.choose_step(folder, checkpoint.choose_best(keep_best, better), step)
    params = checkpoint.parameters(folder / records.CHECKPOINTS, step)
    params = adapters.merge(params, config["optim"]["lora"])
    data = records.read_data(folder)
    own = _prepare_own(folder, config, trust) if data.get("kind") else None
    kind, facts = _find_facts(config, params, data.get("kind") or config["experiment"])
    facts |= {"class_names": data["classes"]} if "C" in facts and data.get("classes") else {}
    facts |= {"documents": config.get("text", {}).get("documents", False)} if kind == "causal" else {}
    return Trained(folder, kind, params, config["model"], facts, trust=trust, own=own)


def _prepare_own(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str]) -> models.Model:
    """Return the model that the user's experiment prepares (runs.Work.model) from its data, as in the training.

    Raises UserError unless `trust` has the experiment and all other code of the config, or if there is no such model.
    """
    name, values = config["experiment"], configs.flat(config)
    trained.check_trust(folder, config, trust)
    changes = {key: values[key] for key, _ in configs.find_code("", config)}
    changes |= {"experiment": name} | {f"mesh.{axis}": 1 for axis in config["mesh"]}
    with contextlib.redirect_stdout(None):
        settings = config_files.load_settings(str(folder / "config.json"), changes)
        model = by_name.load_experiment(name).prepare(settings, meshes.make(data=1)).model
    missing = f"{folder}: the tools need Work.model, which prepare of the experiment {name} does not return"
    errors.refuse((model is None, missing))
    return model


def _find_facts(config: dict[str, Any], params: dict, experiment: str) -> tuple[str, dict[str, Any]]:
    """Return Trained.kind and .facts of a run. experiment: the built-in one that defines the model (Work.kind)."""
    kind, values, head = RUNS.get(experiment, experiment), configs.flat(config), params.get("head", {})
    if experiment not in FACTS and kind in trained.DOES:
        kind = f"{experiment} (a file of yours)"  # for example image.py, which is not our vision.py
    facts = {fact: values[field] for fact, field in FACTS.get(experiment, {}).items()}
    kind = values["text.objective"] if kind == "language" else kind
    if kind == "synthetic":
        task = synthetic.parse(facts["task"])
        facts |= {"N": task.N, "output": "linear", "causal": task.causal}
        kind = "causal" if task.name == "induction" else kind  # the others do not ask for the next token
    if kind in trained.IMAGES:
        facts["Z"] = params["embed"]["W_DP"].shape[1] // facts["patch"] ** 2
    elif facts:
        facts |= {"W": params["embed"]["E_WD"].shape[0], "tied_output": "G_WD" not in head}
    return kind, facts | ({"C": head["G_CD"].shape[0]} if kind in RUNS.values() else {})
