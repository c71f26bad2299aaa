"""A model trained here, written in the form of a published family, so that the transformers library opens it."""

import pathlib
from typing import Any

from experiments.engine import config, errors, pretrained, trained, workdir
from experiments.engine.data import picture

WRITES = False  # without --workdir it is not known where to
WORDS = {"transform": ("text.transform", False)}
FACTS = {  # fact -> the field of a config that says it, and what the family has
    "gpt2": WORDS,
    "llama": WORDS,
    "bert": {"transform": ("text.transform", True)},
    "vit": {"answer": ("image.head", "class_token")},
}


def run(settings: config.Settings, folder: pathlib.Path | None) -> None:
    """Write model.safetensors and config.json into the folder, which must be new."""
    family = config.choose("family", settings.family, {name: name for name in pretrained.FAMILIES})
    made = trained.open(settings.checkpoint)
    trained.expect(made, trained.KINDS[family])
    fields = {**settings.model.to_dict(), **made.model}
    refuse(family, made.facts, fields)
    like = picture.expected(made.path, made.extras) if made.kind == "image" else None
    settings.refuse_unused()
    if folder is None:
        raise errors.UserError("say where to write it: --workdir=FOLDER")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise errors.UserError(f"{folder} is there already: choose another --workdir")
    extras = made.facts | made.extras | ({"image": like["image"][:2], "class_names": like["classes"]} if like else {})
    pretrained.write(folder, family=family, params=made.params, model=fields, extras=extras)
    files = ["model.safetensors", "config.json"]
    if like and like["values"][0] == 0:  # theirs have no other black
        workdir.write_json(folder / "preprocessor_config.json", preprocessor(like))
        files.append("preprocessor_config.json")
    print(f"{made.path} is written as {family}: {', '.join(str(folder / file) for file in files)}")


def refuse(family: str, facts: dict[str, Any], fields: dict[str, Any]) -> None:
    """UserError for a field of the config that the family does not have (those of `model`: pretrained.write)."""
    wrong = [
        f"{field} is {facts[fact]!r} and not {right!r}"
        for fact, (field, right) in FACTS[family].items()
        if facts[fact] != right
    ]
    if family == "bert" and not fields["segments"]:
        wrong.append("model.segments is 0 and not 1 or more")
    if wrong:
        raise errors.UserError(f"this model cannot be written as {family}: {'; '.join(wrong)}")


def preprocessor(like: dict[str, Any]) -> dict[str, Any]:
    """How transformers makes an image file like those of the model."""
    Y, X, _ = like["image"]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": Y, "width": X},
        "resample": 2,  # bilinear, in Pillow's numbers
        "do_rescale": True,
        "rescale_factor": like["values"][1] / 255,
        "do_normalize": True,
        "image_mean": like["mean"],
        "image_std": like["std"],
    }
