"""Write the features of images or texts, as a trained model represents them, into an .npz file.

python -m experiments.tools.features --checkpoint=DIR --file=photographs --output=features.npz
python -m experiments.tools.features --checkpoint=DIR --file=reviews.csv --field=text,label --output=features.npz
features.run("DIR", file="photographs", output="features.npz")

Arrays of the file: `features` (n, D), float32 (open_model.Trained.look explains them), and `names` (n,): image files,
the beginnings of texts, or numbers. With classes also `labels` (n,), `classes` (C,), their names, and `held_out` (n,),
True for what a run with this source holds out; it comes last. --names=hidden,q adds the activations of every layer,
(M, n, ...).
"""

import functools
import pathlib
import sys
from collections.abc import Callable

import jax
import numpy as np

from experiments.config import disk, errors
from experiments.data import inputs as tool_inputs, labelled
from experiments.folder import log
from experiments.pretrained import open_model
from experiments.tools import command as commands

BATCH = 32  # inputs of a batch
LETTERS = 80  # of a text, in `names`
Fetch = Callable[[np.ndarray], tuple]  # index_B -> (normalised images, None) or (token ids, valid) of these inputs
HELP = {
    "file": "Images in the formats of image.source, or one image; or texts: a text per line, a table, class folders.",
    "field": "The column of a table with the texts, or two columns, also with the classes: text,label.",
    "names": f"Activations to add, separated by commas: {', '.join(open_model.ACTIVATIONS)}.",
    "output": "The new file, such as features.npz.",
}


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
    if model.kind in open_model.IMAGES:
        errors.refuse((field, f"--field={field} is for tables of texts, and this model reads images. Leave it out"))
        data, lines = tool_inputs.read_image_set(str(file)), []
        fetch = tool_inputs.prepare_images(data.items, model.image_format)
    else:
        data = tool_inputs.read_text_set(str(file), field)
        data = data._replace(names=[" ".join(content.split())[:LETTERS] for content in data.items])
        fetch, lines = encode_texts(data, model)
    log.say("".join(f"{line}\n" for line in (*data.lines, *lines)))
    arrays = compute(look, fetch, len(data.names), new)
    with disk.writing(new):
        new.parent.mkdir(parents=True, exist_ok=True)
        with disk.draft(new) as content:
            np.savez(content, **arrays, **list_labels(data), names=np.array(data.names))
    return new


def encode_texts(data: tool_inputs.Inputs, model: open_model.Trained) -> tuple[Fetch, list[str]]:
    """Return the function index_B -> (token ids, valid) of the texts, padded to the longest, and lines about them."""
    tokenizer, N, classifies = open_model.load_tokenizer(model), model.facts["N"], model.kind == "classes"
    id_BN, valid_BN, truncated = labelled.encode(tokenizer, data.items, N=N, classifies=classifies)
    longest = valid_BN.sum(1).max()
    id_BN, valid_BN = id_BN[:, :longest], valid_BN[:, :longest]
    lines = [f"{truncated:,} texts have more than {N} tokens and are truncated"] * bool(truncated)
    return lambda index_B: (id_BN[index_B], valid_BN[index_B]), lines


def list_labels(data: tool_inputs.Inputs) -> dict[str, np.ndarray]:
    """Return labels, classes and held_out of the file; {} without classes."""
    number, n = {name: c for c, name in enumerate(data.classes)}, len(data.labels)
    labels = np.array([number.get(name) for name in data.labels])
    held_out = np.arange(n) >= n - data.held_out
    return {"labels": labels, "classes": np.array(data.classes), "held_out": held_out} if number else {}


def compute(look: Callable[..., dict], fetch: Fetch, n: int, file: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the results of Trained.activations for all n inputs, and print their size before.

    The last batch is filled up with the last input, so that one program is compiled. Raises UserError if the results do
    not fit into memory.
    """
    sizes = jax.eval_shape(look, *fetch(np.zeros(1, int)))
    n_bytes = 4 * n * sum(x.size for x in sizes.values())
    print(f"{file}: {n:,} inputs, {', '.join(sizes)}: {disk.size(n_bytes)}", flush=True)
    disk.check_memory(f"{file}", 2 * n_bytes, remedy=". Choose fewer --names, or a smaller --file")
    B = min(n, BATCH)
    batches = [jax.device_get(look(*fetch(np.minimum(np.arange(b, b + B), n - 1)))) for b in range(0, n, B)]
    features = np.concatenate([batch.pop("features") for batch in batches])[:n]
    return {"features": features} | {
        name: np.concatenate([batch[name] for batch in batches], axis=1)[:, :n] for name in batches[0]
    }


if __name__ == "__main__":
    sys.exit(commands.main(run, HELP, sys.argv))
