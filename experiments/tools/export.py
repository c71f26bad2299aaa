"""A model trained here as a published one (gpt2, bert, vit, ...): files that transformers opens.

python -m experiments.tools.export --checkpoint=DIR --family=gpt2 --workdir=OUT
export.run("DIR", family="gpt2", workdir="OUT")

DIR is a run's folder, or that of a published model. OUT gets model.safetensors, config.json and the files of its words
(those of bytes or characters only this project reads). A field of the run's config that the family does not have is
refused by its name; rotary positions are written in Llama's order of the features. The adapters of a run that has
some (optim.lora) are merged, and also written apart, into OUT/adapters, for the peft library.
"""

import os
import pathlib
import shutil
import sys
from typing import Any

from experiments.data import image_file, pretrained_tokenizer, tokenizer_config, vocabulary_files
from experiments.engine import by_name, disk, errors, log
from experiments.pretrained import adapters, hub, llama, open_model
from experiments.tools import command
from tfm import shapes


@command.tool(family=f"In whose form it is written: {', '.join(hub.FAMILIES)}.", workdir="A new folder to write into.")
def run(
    checkpoint: str | os.PathLike,
    *,
    family: str = "",
    trust: tuple[str, ...] = (),
    workdir: str | os.PathLike = "",
) -> list[pathlib.Path]:
    """Write the model into the folder, which must be new; the files that it is in now."""
    spec = hub.FAMILIES[by_name.choose("family", family, {name: name for name in hub.FAMILIES})]
    model, folder = open_model.open(checkpoint, trust=trust), pathlib.Path(workdir)
    open_model.expect(model, *spec.kinds, whole=False)
    open_model.finite(model.path, shapes.flat(model.params))
    params, fields, extras = model.params, vars(model.fields), model.facts | model.extras
    if not str(workdir):
        raise errors.UserError("say where to write it: --workdir=FOLDER")
    disk.check_new(folder, "--workdir")
    like = None
    if model.kind == "image":
        like = image_file.expected(model.path, model.extras, Z=model.facts["Z"], C=model.facts["C"])
        extras |= {"image": like["image"][:2], "class_names": like["classes"]}
    extras |= {"ids": token_ids(model), "kind": model.kind}
    if family in llama.FAMILIES and fields["relative_position"].split(":")[0] == "rotary":
        params, fields = llama.in_halves(params, fields)
    files = hub.write(folder, family=family, params=params, model=fields, extras=extras)
    if like is None:
        files += copied(model, folder)
    elif not like["assumed"]:
        disk.write_json(folder / "preprocessor_config.json", preprocessor(like))
        files.append("preprocessor_config.json")
    if (model.path / adapters.FILE).is_file() and params is model.params:
        config, beside = open_model.saved(model.path / "config.json")["config"], disk.folder(folder, "adapters")
        rules = hub.rules(family, params, fields, extras)
        if wrong := adapters.as_peft(model.path, beside, settings=config, rules=rules):
            print(f"its adapters alone are not written: {wrong}")
        else:
            files += [f"adapters/{file.name}" for file in sorted(beside.iterdir())]
    paths = [folder / file for file in files]
    log.say(f"{model.path} is written as {family}: {', '.join(map(str, paths))}", "\n")
    return paths


def token_ids(model: open_model.Trained) -> dict[str, int | list[int] | None]:
    """The ids that begin, end and pad a text: as the files of a published model say, else as its words do."""
    needed = {"causal": "eos_token_id", "masked": "pad_token_id", "classes": "pad_token_id"}.get(model.kind)
    said = model.extras.get("ids", {})
    if needed is None or needed in said or not open_model.tokenizers(model):
        return said
    words = open_model.words(model)
    ends = open_model.ends(model, words)
    end = ends if ends[1:] else (ends or [None])[0]
    return {"bos_token_id": words.bos, "eos_token_id": end, "pad_token_id": words.pad} | said


def copied(model: open_model.Trained, folder: pathlib.Path) -> list[str]:
    """The names of the files that say what the model's words are, which are copied into the folder."""
    beside, own = open_model.folder_of(model), f"tok{model.facts['W']}.bin"  # as open_model.words looks for it
    one = model.path.is_file() and (beside / own).is_file()
    names = [own] if one else ["tokenizer.json", *pretrained_tokenizer.ROLE_FILES, *vocabulary_files.FILES]
    names = [name for name in names if (beside / name).is_file()]
    try:
        for name in names:
            shutil.copyfile(beside / name, folder / name)
    except OSError as error:
        raise errors.UserError(f"{beside / name} cannot be copied to {folder}: {error.strerror or error}") from error
    saved = open_model.saved(folder / tokenizer_config.CONFIG)
    if "model" in open_model.saved(folder / "tokenizer.json") and "tokenizer_class" not in saved:
        saved["tokenizer_class"] = tokenizer_config.read(beside)["tokenizer_class"]  # else the model's type decides
        disk.write_json(folder / tokenizer_config.CONFIG, saved)
        names = [*dict.fromkeys([*names, tokenizer_config.CONFIG])]
    return names


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


if __name__ == "__main__":
    sys.exit(run.main(sys.argv))
