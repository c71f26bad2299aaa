"""Write the features of images or texts, as a trained model represents them, into an .npz file.

python -m experiments.tools.features --checkpoint=DIR --file=photographs --output=features.npz
python -m experiments.tools.features --checkpoint=DIR --file=reviews.csv --field=text,label --output=features.npz
features.run("DIR", file="photographs", output="features.npz")

Arrays of the file: `features` (n, D), float32 (trained.Trained.look), and `names` (n,): image files, the beginnings of
texts, or numbers. With classes also `labels` (n,), `classes` (C,), and `held_out` (n,): True for what a run with this
source holds out, which are the last rows. --names=hidden,q adds the activations of every layer, (M, n, ...).
"""

import functools
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from experiments import command as commands
from experiments.config import disk, errors
from experiments.data import inputs as tool_inputs, labelled
from experiments.folder import log
from experiments.pretrained import trained

LETTERS = 80  # of a text, in `names`
HELP = {
    "names": f"Activations to add, separated by commas: {', '.join(trained.ACTIVATIONS)}.",
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
    """Write the features of the images or texts in `file` into the new .npz file `output`, and return its path.

    field: the columns of a table with the texts and, if there are any, their classes, such as "text,label". names:
    activations to add, separated by commas.
    """
    commands.require("--file=PATH", file)
    commands.require("--output=features.npz", output)
    new, activations = commands.new_file(output, "--output", ".npz"), tuple(filter(None, names.split(",")))
    model = commands.load(checkpoint, trust, device)
    compute = functools.partial(model.compute, jax.device_put(model.params), names=activations, output="features")
    if model.kind in trained.IMAGES:
        errors.refuse((field, f"--field={field} is for tables of texts, and this model reads images. Leave it out"))
        data, lines = tool_inputs.read_image_set(str(file)), []
        names, fetch = data.names, trained.fetch_images(data.items, model.image_format)
    else:
        data = tool_inputs.read_text_set(str(file), field)
        names = [" ".join(content.split())[:LETTERS] for content in data.items]
        N, classifies = model.facts["N"], model.kind == "classes"
        id_BN, valid_BN, truncated = labelled.encode(model.tokenizer, data.items, N=N, classifies=classifies)
        lines = [f"{truncated:,} texts have more than {N} tokens and are truncated"] * bool(truncated)
        fetch = trained.fetch_texts(id_BN, valid_BN)
    log.say("".join(f"{line}\n" for line in (*data.lines, *lines)))
    arrays = look(compute, fetch, len(names), new) | list_labels(data) | {"names": np.array(names)}
    return commands.save_arrays(new, arrays)


def list_labels(data: tool_inputs.Inputs) -> dict[str, np.ndarray]:
    """Return the arrays of the output file about classes; {} if the data has none.

    "labels": the index of each input's class. "classes": their names. "held_out": True for inputs that a run holds out.
    """
    number, n = {name: c for c, name in enumerate(data.classes)}, len(data.labels)
    labels, held_out = np.array([number.get(name) for name in data.labels]), np.arange(n) >= n - data.held_out
    return {"labels": labels, "classes": np.array(data.classes), "held_out": held_out} if number else {}


def look(compute: Callable[..., tuple], fetch: trained.Fetch, n: int, file: pathlib.Path) -> dict[str, np.ndarray]:
    """Return {"features": (n, D), name: activations (M, n, ...)} of all n inputs, and print their size.

    compute(*fetch(indices)) -> (features, {name: activations}) of these inputs. file: the output, for messages.
    Raises UserError if the arrays do not fit into memory.
    """
    features, activations = jax.eval_shape(compute, *fetch(np.zeros(1, int)))
    n_bytes = 4 * n * (features.size + sum(x.size for x in activations.values()))
    print(f"{file}: {n:,} inputs, {', '.join(['features', *activations])}: {disk.size(n_bytes)}", flush=True)
    disk.check_memory(f"{file}", 2 * n_bytes, remedy=". Choose fewer --names, or a smaller --file")
    batches, looks = zip(*trained.in_batches(compute, fetch, n=n), strict=True)
    arrays = {name: np.concatenate([look[name] for look in looks], axis=1)[:, :n] for name in activations}
    return {"features": np.concatenate(batches)[:n]} | arrays


if __name__ == "__main__":
    commands.main(run, HELP)
