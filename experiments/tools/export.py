"""A model trained here, written in the form of a published family, so that the transformers library opens it."""

import pathlib
import shutil
from typing import Any

from experiments import pretrained
from experiments.data import image_file, vocabulary
from experiments.engine import config, errors, terminal, workdir
from experiments.engine import run as runs
from experiments.pretrained import llama, open_model

WRITES = False  # without --workdir it is not known where to
WORDS = {"transform": ("text.transform", False)}
FACTS = {  # fact -> the field of a config that says it, and what the family has
    "gpt2": WORDS,
    "llama": WORDS,
    "bert": {"transform": ("text.transform", True)},
    "vit": {"answer": ("image.head", "class_token")},
}


def run(settings: config.Settings, folder: pathlib.Path | None) -> runs.Result:
    """Write model.safetensors and config.json into the folder, which must be new, and what else belongs to a model."""
    family = config.choose("family", settings.family, {name: name for name in pretrained.FAMILIES})
    made = open_model.open(settings.checkpoint)
    open_model.expect(made, open_model.KINDS[family])
    open_model.finite(made.path, open_model.flat(made.params))
    fields = {**settings.model.to_dict(), **made.model}
    refuse(family, made.facts, fields)
    like = (
        image_file.expected(made.path, made.extras, Z=made.facts["Z"], C=made.facts["C"])
        if made.kind == "image"
        else None
    )
    settings.refuse_unused()
    if folder is None:
        raise errors.UserError("say where to write it: --workdir=FOLDER")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise errors.UserError(f"{folder} is there already: choose another --workdir")
    extras = made.facts | made.extras | ({"image": like["image"][:2], "class_names": like["classes"]} if like else {})
    extras["ids"] = token_ids(made)
    params = made.params
    if family == "llama" and fields["relative_position"] == "rotary":  # theirs is rotary_halves
        params, fields = llama.in_halves(params, fields)
    files = pretrained.write(folder, family=family, params=params, model=fields, extras=extras)
    if like and not like["assumed"]:
        workdir.write_json(folder / "preprocessor_config.json", preprocessor(like))
        files.append("preprocessor_config.json")
    files += copied(made, folder) if not like else []
    terminal.say(f"{made.path} is written as {family}: {', '.join(str(folder / file) for file in files)}", "\n")
    return runs.Result(folder, {"files": files})


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


def token_ids(made: open_model.Trained) -> dict[str, int | list[int] | None]:
    """The ids that begin, end and pad a text: as the files of a published model say, else as its words do."""
    said, needed = made.extras.get("ids", {}), {"causal": "eos_token_id", "masked": "pad_token_id"}.get(made.kind)
    if needed is None or needed in said or not open_model.tokenizers(made):
        return said
    words = open_model.words(made)
    ends = open_model.ends(made, words)
    found = {"bos_token_id": words.bos, "eos_token_id": ends if ends[1:] else (ends or [None])[0]}
    return found | {"pad_token_id": words.pad} | said


def copied(made: open_model.Trained, folder: pathlib.Path) -> list[str]:
    """The names of the files that say what the model's words are, which are copied into the folder.

    tokenizer.json of the `tokenizers` library is one that transformers reads; a run's own kind, and llama2.c's, only we
    do, and opening the model without a tokenizer is no worse for it.
    """
    beside = made.path if made.path.is_dir() else made.path.parent
    own = [beside / f"tok{made.facts['W']}.bin"] if made.path.is_file() else []  # as trained.words looks for it
    names = ("tokenizer.json", *vocabulary.ROLE_FILES)
    found = [file for file in own if file.is_file()] or [beside / name for name in names if (beside / name).is_file()]
    try:
        for file in found:
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise errors.UserError(f"{file} cannot be copied to {folder}: {error.strerror or error}") from error
    return [file.name for file in found]


def preprocessor(like: dict[str, Any]) -> dict[str, Any]:
    """How transformers makes an image file like those of the model.

    Its black is 0, ours `low`: (low + x (high - low) / 255 - mean) / std = (x rescale_factor - image_mean) / image_std.
    """
    low, high = like["values"]
    return like["processor"] | {
        "do_rescale": True,
        "rescale_factor": (high - low) / 255,
        "do_normalize": True,
        "image_mean": [mean - low for mean in like["mean"]],
        "image_std": like["std"],
    }
