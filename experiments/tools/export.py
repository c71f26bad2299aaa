"""Write a trained model in the format of a published family (gpt2, bert, vit, ...), which transformers opens.

python -m experiments.tools.export --checkpoint=DIR --family=gpt2 --workdir=OUT
export.run("DIR", family="gpt2", workdir="OUT")

OUT gets model.safetensors, config.json and the tokenizer's files (only this project reads a tokenizer of bytes or
characters). A setting of the run that the family does not have is an error. Adapters (optim.lora) are merged into the
weights, and also written to OUT/adapters, for the peft library. --family=npz writes OUT/model.npz instead: the
parameters of any run as plain arrays with our names, such as blocks/score/Uq_HKD.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

from experiments import command as commands
from experiments.config import by_name, disk, errors
from experiments.data import pretrained_tokenizer
from experiments.folder import log, records
from experiments.pretrained import adapters, hub, rope, trained
from tfm import shapes

NPZ = "npz"
# The rule by which each tokenizer of a Qwen2 cuts a text (Qwen2Tokenizer of transformers).
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HELP = {"family": f"The published family: {', '.join(hub.FAMILIES)}; or npz.", "workdir": "A new folder for the files."}
TOKEN_IDS = {"causal": "eos_token_id", "masked": "pad_token_id", "classes": "pad_token_id"}  # kind -> required id


def run(
    checkpoint: commands.Path, *, family: str = "", trust: tuple[str, ...] = (), workdir: commands.Path = ""
) -> list[pathlib.Path]:
    """Write a trained model into the new folder `workdir`. Return the paths of the files.

    family: the published family whose format is written, such as gpt2, or npz for the parameters as plain arrays.
    Raises UserError without a family or workdir, and for a model that the family cannot express.
    """
    by_name.choose("family", family, {name: name for name in (*hub.FAMILIES, NPZ)})
    commands.require("--workdir=FOLDER", workdir)
    folder = disk.check_new(pathlib.Path(workdir), "--workdir")
    model = commands.load(checkpoint, trust, "any")
    if family == NPZ:
        arrays = shapes.flat(model.params)
        file = commands.save_arrays(folder / "model.npz", arrays)
        log.say(f"{model.path}, {len(arrays)} arrays: {file}", "\n")
        return [file]
    own = f"{model.path}: an experiment of yours made this model, and may have changed it. Use --family={NPZ}"
    errors.refuse((model.own is not None, own))
    trained.check_kind(model, *hub.FAMILIES[family].heads, needs_head=False)
    trained.check_finite(model.path, shapes.flat(model.params))
    facts = model.facts | {"ids": token_ids(model)}
    if model.kind == "image":
        facts |= {"image": model.image_format["image"][:2], "class_names": model.image_format["classes"]}
    written = dataclasses.replace(model, model=vars(model.fields), facts=facts)
    if family in hub.LLAMAS:
        written = rope.in_halves(written)
    names = hub.write(folder, written, family)
    if model.kind != "image":
        names += write_tokenizer(model, folder, family)
    elif not model.image_format["assumed"]:
        disk.write_json(folder / "preprocessor_config.json", preprocessor(model.image_format))
        names.append("preprocessor_config.json")
    if (model.path / adapters.FILE).is_file() and written.params is model.params:
        names += write_adapters(model, hub.list_lines(written, family), folder)
    files = [folder / name for name in names]
    log.say(f"{model.path}, written as {family}: {', '.join(map(str, files))}", "\n")
    return files


def token_ids(model: trained.Trained) -> dict[str, int | list[int] | None]:
    """Return {"bos_token_id", "eos_token_id", "pad_token_id": ids}, the ids that begin, end and pad a text.

    They come from a published model's files, of which some may be missing, or else from the tokenizer, with None for an
    id that it lacks. Without both, the result is {}.
    """
    ids = model.facts.get("ids", {})
    if model.kind not in TOKEN_IDS or TOKEN_IDS[model.kind] in ids or not pretrained_tokenizer.find(model.path):
        return ids
    ends = trained.list_end_ids(model, model.tokenizer)
    end = ends if len(ends) > 1 else (ends or [None])[0]
    return {"bos_token_id": model.tokenizer.bos, "eos_token_id": end, "pad_token_id": model.tokenizer.pad} | ids


def write_tokenizer(model: trained.Trained, folder: pathlib.Path, family: str) -> list[str]:
    """Write the files of the model's tokenizer into the folder. Return their names, [] if it has no tokenizer.

    Print a warning if `family` is qwen2 but the tokenizer is not.
    """
    source = pretrained_tokenizer.find(model.path)
    files = pretrained_tokenizer.read_files(source) if source else {}
    with disk.writing(folder):
        for name, content in files.items():
            disk.write(folder / name, content)
    library = files.get(pretrained_tokenizer.JSON, b"")
    if family == "qwen2" and pretrained_tokenizer.CONFIG in files and json.dumps(QWEN).encode() not in library:
        print("warning: transformers may read other ids from this tokenizer, which is not a qwen2's", file=sys.stderr)
    return [*files]


def write_adapters(model: trained.Trained, lines: Any, folder: pathlib.Path) -> list[str]:
    """Write the run's adapters for the peft library. Return the names of the files.

    If the family's tensors do not allow it, print why, and return []. lines: the result of hub.list_lines, by which the
    weights were written.
    """
    settings = records.read_config(model.path)["config"]
    target = disk.folder(folder, "adapters")
    if reason := adapters.write_peft(model.path, target, settings=settings, lines=lines):
        print(f"the adapters are not written separately: {reason}")
        return []
    return [f"adapters/{file.name}" for file in sorted(target.iterdir())]


def preprocessor(image_format: dict[str, Any]) -> dict[str, Any]:
    """Return the content of preprocessor_config.json: transformers prepares image files like the model's images.

    With x from 0 to 255, black is x = 0 in transformers and `low` in our image format:
    (low + x (high - low) / 255 - mean) / std = (x rescale_factor - image_mean) / image_std.
    """
    low, high = image_format["values"]
    return image_format["processor"] | {
        "do_rescale": True,
        "rescale_factor": (high - low) / 255,
        "do_normalize": True,
        "image_mean": [mean - low for mean in image_format["mean"]],
        "image_std": image_format["std"],
        "do_convert_rgb": image_format["image"][2] == 3,  # our reader turns grey files into colours too
    }


if __name__ == "__main__":
    commands.main(run, HELP)
