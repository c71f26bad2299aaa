"""Open a trained model, of a run or published, from its path."""

import contextlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.config import by_name, disk, errors, files as config_files, settings as configs
from experiments.devices import mesh as meshes
from experiments.folder import checkpoint, records, workdir as workdirs
from experiments.model import losses
from experiments.pretrained import adapters, hub, trained
from tfm import models

Trained, load_tokenizer = trained.Trained, trained.load_tokenizer  # notebooks use them
RUNS = {"vision": "image", "text_classification": "classes"}  # experiment -> kind, if their names differ
PEFT = "adapter_config.json"
MERGE_PEFT = "Merge them (merge_and_unload of peft), save the result with save_pretrained, and give its folder."


def open(path: str | os.PathLike, trust: Sequence[str] = ()) -> Trained:
    """Return the model at the path: a run's folder, a checkpoint (RUN/checkpoints/40), or a published model.

        model = open_model.open("runs/x")
        logits_BNW = model(np.array([model.tokenizer.encode("Once upon a time")]))

    Of a run's folder, open the best checkpoint if the run has train.keep_best, else the newest. A published model is a
    folder with config.json and model.safetensors, or one of these files. Raises UserError if there is no model.
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
        return _open_published(place, hub.read(place))
    trust = (trust,) if isinstance(trust, str) else tuple(trust)
    with disk.reading(file, TypeError, AttributeError):
        return _open_run(place, records.read_config(place)["config"], trust, step)


def _open_run(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str], step: int | None) -> Trained:
    """Return the model of a run after `step` steps. None: of its best checkpoint, if it is kept, or of its newest."""
    if module := config["model"].get("flax"):
        raise errors.UserError(
            f"{folder} has the Flax module model.flax = {module}, which the tools cannot open. Use the result of "
            "launch.run(config, workdir), which has params and apply"
        )
    train, checkpoints = config["train"], folder / records.CHECKPOINTS
    metrics = losses.choose_metrics(train.get("metrics", [])) if train["keep_best"] else {}
    best = checkpoint.choose_best(train["keep_best"], {name: metrics[name].better for name in metrics})
    params = checkpoint.parameters(checkpoints, checkpoint.choose_step(folder, best, step))
    params = adapters.merge(params, config["optim"]["lora"])
    data = records.read_data(folder)
    own = _prepare_own(folder, config, trust) if data.get("kind") else None
    kind, facts = _find_facts(config, params, data.get("kind") or config["experiment"])
    extras = {"class_names": data["classes"]} if "C" in facts and data.get("classes") else {}
    extras |= {"documents": config["text"].get("documents", False)} if kind == "causal" else {}
    return Trained(folder, kind, params, config["model"], facts, extras, trust=trust, own=own)


def _prepare_own(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str]) -> models.Model:
    """Return the model that the user's experiment prepares (runs.Work.model). It reads its data, as in the training.

    Raises UserError unless `trust` has the experiment and all other code of the config, or if there is no such model.
    """
    name, values = config["experiment"], configs.flat(config)
    code = [("experiment", name), *configs.find_code("", config)]
    for key, text in code:
        refused = f'{folder} has {key} = "{text}", code that would be executed. Add --trust={text} if you trust it.'
        errors.refuse((text not in trust, refused))
    changes = {key: values[key] for key, _ in code} | {f"mesh.{axis}": 1 for axis in config["mesh"]}
    with contextlib.redirect_stdout(None):
        settings = config_files.load_settings(str(folder / "config.json"), changes)
        model = by_name.load_experiment(name).prepare(settings, meshes.make(data=1)).model
    errors.refuse((model is None, f"{folder}: the experiment {name} prepares no Work.model, which the tools would use"))
    return model


def _find_facts(config: dict[str, Any], params: dict, experiment: str) -> tuple[str, dict[str, Any]]:
    """Return a run's kind of model, and the arguments of its function in model/build.py.

    experiment: the built-in one that defines the model (runs.Work.kind).
    """
    kind, head = RUNS.get(experiment, experiment), params.get("head", {})
    if kind == experiment and kind in trained.DOES and kind not in ("masked_image", "translation"):
        kind = f"{experiment} (a file of yours)"  # for example image.py, which is not our vision.py
    facts: dict[str, Any] = {}
    if kind in ("language", "classes"):
        facts = {"N": config["text"]["N"], "output": config["text"]["head"]}
        kind = config["text"]["objective"] if kind == "language" else kind
    elif kind == "translation":
        facts = {"N": config["pairs"]["N"], "tied_output": "G_WD" not in head}
    elif kind in trained.IMAGES:
        patch = config["image"]["patch"]
        facts = {"patch": patch, "Z": params["embed"]["W_DP"].shape[1] // patch**2}
    if kind == "image":
        facts["output"] = config["image"]["head"]
    if kind in ("image", "classes"):
        facts["C"] = head["G_CD"].shape[0]
    if kind in (*trained.HEADS, "translation"):
        facts["W"] = params["embed"]["E_WD"].shape[0]
    return kind, facts


def _open_published(path: pathlib.Path, published: hub.Published) -> Trained:
    """Return a published model. Missing biases of queries, keys and values are zero, as ours have all or none."""
    extras, params = published.extras, published.params
    names = ("patch", "C", "Z", "output") if extras["kind"] == "image" else ("W", "N", "output", "C")
    facts = {name: extras[name] for name in names if name in extras}
    if not extras.get("query_bias", True):
        score, value = params["blocks"]["score"], params["blocks"]["value"]
        zeros_MHK = np.zeros(score["Uq_HKD"].shape[:3], np.float32)
        biases = {"score": {**score, "bq_HK": zeros_MHK, "bk_HK": zeros_MHK}, "value": {**value, "bv_HK": zeros_MHK}}
        params = {**params, "blocks": params["blocks"] | biases}
    return Trained(path, extras["kind"], params, published.model, facts, extras, published.table)
