"""Write the features of images or texts, as a trained model represents them, into an .npz file.

python -m experiments.tools.features --checkpoint=DIR --file=photographs --output=features.npz
python -m experiments.tools.features --checkpoint=DIR --file=reviews.csv --field=text,label --output=features.npz
features.run("DIR", file="photographs", output="features.npz")

Arrays of the file: `features` (n, D), float32 (trained.Trained.look explains them), and `names` (n,): image files,
the beginnings of texts, or numbers. With classes also `labels` (n,), `classes` (C,), their names, and `held_out` (n,),
True for what a run with this source holds out; it comes last. --names=hidden,q adds the activations of every layer,
(M, n, ...).
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import command as commands
from experiments.config import disk, errors
from experiments.data import files as data_files, image_file, image_folder, images, inputs as tool_inputs, labelled
from experiments.folder import log
from experiments.pretrained import trained

LETTERS = 80  # of a text, in `names`
HELP = {
    "file": "Images in the formats of image.source, or one image; or texts: a text per line, a table, class folders.",
    "field": "The column of a table with the texts, or two columns, also with the classes: text,label.",
    "names": f"Activations to add, separated by commas: {', '.join(trained.ACTIVATIONS)}.",
    "output": "The new file, such as features.npz.",
}


class Inputs(NamedTuple):
    """The inputs of a model: their names; a function that returns some of them; labels, if any; and lines to print."""

    names: Sequence[str]
    fetch: trained.Fetch
    labels: dict[str, np.ndarray]
    lines: Sequence[str]


def run(
    checkpoint: commands.Path,
    *,
    file: commands.Path = "",
    field: str = "",
    names: str = "",
    output: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
) -> pathlib.Path:
    """Write the file, and return its path."""
    commands.require("--file=PATH", file)
    new, activations = pathlib.Path(output), tuple(filter(None, names.split(",")))
    errors.refuse((new.suffix != ".npz", f"--output={output} must be the name of an .npz file, such as features.npz"))
    disk.check_new(new, "--output", is_file=True)
    model = commands.load(checkpoint, trust, device)
    look = functools.partial(model.activations, jax.device_put(model.params), names=activations)
    if model.kind in trained.IMAGES:
        errors.refuse((field, f"--field={field} is for tables of texts, and this model reads images. Leave it out"))
        inputs = read_images(str(file), model.image_format)
    else:
        inputs = read_texts(str(file), field, model)
    log.say("".join(f"{line}\n" for line in inputs.lines))
    arrays = compute(look, inputs, new) | inputs.labels | {"names": np.array(inputs.names)}
    return commands.save_arrays(new, arrays)


def read_images(source: str, form: dict[str, Any]) -> Inputs:
    """Return the images of a source, normalised like those of a model. form: Trained.image_format."""
    path = pathlib.Path(source).expanduser()
    if path.is_file() and path.suffix.lower() in image_folder.ENDS:
        both, classes, lines = ([(data_files.on_disk(path), "")], []), (), []
    elif splits := images.read_arrays(source):
        data = images.combine(source, splits, 0)
        image_BYXZ = np.concatenate([data.train_image_BYXZ, data.evaluation_image_BYXZ])
        image_BYXZ, names = image_file.prepare(image_BYXZ, form), [*map(str, range(len(image_BYXZ)))]
        both = [[("", data.classes[c]) for c in label_B] for label_B in (data.train_label_B, data.evaluation_label_B)]
        return Inputs(names, lambda index_B: (image_BYXZ[index_B], None), label(both, data.classes), [])
    else:
        both, _, classes, lines = image_folder.find_parts(source)
    files = [file for part in both for file, _ in part]
    return Inputs([*map(str, files)], trained.fetch_images(files, form), label(both, classes), lines)


def read_texts(source: str, field: str, model: trained.Trained) -> Inputs:
    """Return the texts of a source as token ids. Raises UserError if there is no text."""
    if "," in field or not field and pathlib.Path(source).expanduser().is_dir():
        data = labelled.load(source, field or "text,label")
        both, classes, lines = (data.train, data.evaluation), data.classes, data.description.splitlines()
    else:
        rows = tool_inputs.read_texts(source, field)
        both, classes, lines = ([(row, "") for row in rows.items if row.strip()], []), (), [*rows.lines]
        empty = len(rows.items) - len(both[0])
        lines += [f"{source}: empty lines left out: {empty:,}"] * bool(empty)
    texts, N = [content for part in both for content, _ in part], model.facts["N"]
    id_BN, valid_BN, truncated = labelled.encode(model.tokenizer, texts, N=N, classifies=model.kind == "classes")
    lines += [f"{source}: {truncated:,} texts have more than {N} tokens and are truncated"] * bool(truncated)
    names = [" ".join(content.split())[:LETTERS] for content in texts]
    longest = valid_BN.sum(1).max()
    id_BN, valid_BN = id_BN[:, :longest], valid_BN[:, :longest]
    return Inputs(names, lambda index_B: (id_BN[index_B], valid_BN[index_B]), label(both, classes), lines)


def label(parts: Sequence[Sequence[tuple[Any, str]]], classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return labels, classes and held_out of the file from pairs (input, class) of both parts; {} without classes."""
    number = {name: c for c, name in enumerate(classes)}
    labels = np.array([number.get(name) for part in parts for _, name in part])
    held_out = np.arange(len(labels)) >= len(parts[0])
    return {"labels": labels, "classes": np.array(classes), "held_out": held_out} if number else {}


def compute(look: Callable[..., dict], inputs: Inputs, file: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the results of Trained.activations for all inputs, and print their size before.

    Raises UserError if the results do not fit into memory.
    """
    n, sizes = len(inputs.names), jax.eval_shape(look, *inputs.fetch(np.zeros(1, int)))
    n_bytes = 4 * n * sum(x.size for x in sizes.values())
    print(f"{file}: {n:,} inputs, {', '.join(sizes)}: {disk.size(n_bytes)}", flush=True)
    disk.check_memory(f"{file}", 2 * n_bytes, remedy=". Choose fewer --names, or a smaller --file")
    batches, features = [*trained.in_batches(look, inputs.fetch, n=n)], "features"
    arrays = {name: np.concatenate([x[name] for x in batches], axis=int(name != features)) for name in sizes}
    return {name: x[:n] if name == features else x[:, :n] for name, x in arrays.items()}


if __name__ == "__main__":
    sys.exit(commands.main(run, HELP, sys.argv))
