"""The class of an image file or of a text, predicted by a trained model: a run made here, or a published one, as a ViT.

python -m experiments.tools.classify --checkpoint=DIR --file=digit.png
python -m experiments.tools.classify --checkpoint=DIR --prompt="What a pleasant film"
classify.run("DIR", file="digit.png")

The image is resized to the rows, columns and channels of the model's own images; a line says so (MNIST's digits are
white on black). Prints the five most likely classes with their probabilities, or the numbers of a regression.
"""

import pathlib
import sys

import jax
import numpy as np

from experiments.data import image_file, labelled
from experiments.engine import errors
from experiments.pretrained import open_model
from experiments.tools import command

SHOWN = 5  # most likely classes
HELP = {
    "file": "The image: a PNG, JPEG, GIF, BMP, TIFF, WebP or PPM file.",
    "prompt": "The text, for a model of texts.",
}


def run(
    checkpoint: command.Path,
    *,
    file: command.Path = "",
    prompt: str = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: command.Path = "",
) -> str:
    """Return the most likely classes of a text, of each of its tokens or of an image, and how the image was resized."""
    model = command.load(checkpoint, trust, device, "image", "classes", "tokens")
    out = command.output(workdir, "classes.txt")
    needed, given = ("--file=PATH", file) if model.kind == "image" else ("--prompt='...'", prompt)
    if not given or (file and prompt):
        raise errors.UserError(f"this model classifies {'images' if model.kind == 'image' else 'texts'}: give {needed}")
    if model.kind == "image":
        inputs, line = image_file.read(pathlib.Path(file).expanduser(), model.like)
        classes, lines = model.like["classes"], [line]
    else:
        N, tokenizer = model.facts["N"], open_model.load_tokenizer(model)
        id_1N, valid_1N, cut = labelled.encode(tokenizer, [prompt], N=N)
        inputs, classes = id_1N[:, valid_1N[0]], model.extras["class_names"]
        lines = [f"  the model reads the first {N} tokens of the text: it has more"] * cut
    problem = model.extras.get("problem_type")
    score_C = np.asarray(model.logits(inputs)[0])
    if problem == "regression" or not problem and len(classes) == 1:  # as transformers has it
        lines += [f"  {x}  {name}" for name, x in zip(classes, np.atleast_1d(score_C).T.tolist(), strict=True)]
        return command.report("\n".join(lines), out)
    each_by_itself = problem == "multi_label_classification"
    p_C = np.asarray(jax.nn.sigmoid(score_C) if each_by_itself else jax.nn.softmax(score_C))
    if model.kind == "tokens":
        names = [tokenizer.decode([id]) or tokenizer.name(id) for id in inputs[0].tolist()]
        lines += [f"  {p.max():.3f}  {classes[p.argmax()]}  {name}" for name, p in zip(names, p_C, strict=True)]
    else:
        lines += [f"  {p_C[c]:.3f}  {classes[c]}" for c in np.argsort(-p_C, kind="stable")[:SHOWN]]
    return command.report("\n".join(lines), out)


if __name__ == "__main__":
    sys.exit(command.main(run, HELP, sys.argv))
