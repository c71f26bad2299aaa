"""The class of an image file or of a text, told by a trained model: a run made here, or a published one, as a ViT.

python -m experiments.tools.classify --checkpoint=DIR --file=digit.png
python -m experiments.tools.classify --checkpoint=DIR --prompt="What a pleasant film"
classify.run("DIR", file="digit.png")

The image is made as many rows, columns and channels as the model's own images have (a line says so; MNIST's digits are
white on black). Prints the five likeliest classes with their probabilities, or the numbers of a regression.
"""

import os
import pathlib
import sys

import jax
import numpy as np

from experiments.data import image_file, labelled
from experiments.engine import errors
from experiments.pretrained import open_model
from experiments.tools import command

SHOWN, FILE = 5, "classes.txt"  # likeliest classes
MULTI = "multi_label_classification"  # each class by itself


@command.tool(
    file="The image: a PNG, JPEG, GIF, BMP, TIFF, WebP or PPM file.", prompt="Or the text, for a model of texts."
)
def run(
    checkpoint: str | os.PathLike,
    *,
    file: str | os.PathLike = "",
    prompt: str = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> str:
    """The likeliest classes of a text, of its words or of an image file, and how this was made like the model's."""
    model = open_model.open(checkpoint, trust=trust)
    open_model.expect(model, "image", "classes", "tokens")
    if model.kind != "image":
        if not prompt or file:
            raise errors.UserError("this model tells the classes of texts: say which one with --prompt='...'")
        words = open_model.words(model)
        id_1N, valid_1N, cut = labelled.ids(words, [prompt], N=model.facts["N"])
        inputs, classes = id_1N[:, valid_1N[0]], model.extras["class_names"]
        steps = [f"  of the text the first {model.facts['N']} tokens are read: it has more"] * cut
    else:
        if not file or prompt:
            raise errors.UserError("this model tells the classes of images: say which one with --file=PATH")
        inputs, said = image_file.read(pathlib.Path(os.path.expanduser(file)), model.like)
        classes, steps = model.like["classes"], [said]
    problem = model.extras.get("problem_type")
    number = problem == "regression" or not problem and len(classes) == 1  # as transformers takes it: no probabilities
    probability = np.asarray if number else jax.nn.sigmoid if problem == MULTI else jax.nn.softmax
    p_C = np.asarray(probability(model.logits(inputs)[0]))
    if number:
        lines = [*steps, *(f"  {x}  {name}" for name, x in zip(classes, np.atleast_1d(p_C).T.tolist(), strict=True))]
        return command.tell("\n".join(lines), workdir, FILE)
    if model.kind == "tokens":  # N of these, each word's own
        each = [(words.decode([id]) or words.name(id), p_C[n]) for n, id in enumerate(inputs[0].tolist())]
        return command.tell("\n".join(f"  {p.max():.3f}  {classes[p.argmax()]}  {a}" for a, p in each), workdir, FILE)
    likeliest = np.argsort(-p_C, kind="stable")[:SHOWN]
    lines = [*steps, *(f"  {p_C[c]:.3f}  {classes[c]}" for c in likeliest)]
    return command.tell("\n".join(lines), workdir, FILE)


if __name__ == "__main__":
    sys.exit(run.main(sys.argv))
