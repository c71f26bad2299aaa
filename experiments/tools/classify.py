"""Classify an image file or a text with a trained model: a run's folder, or a published model such as a ViT.

python -m experiments.tools.classify --checkpoint=DIR --file=digit.png
python -m experiments.tools.classify --checkpoint=DIR --prompt="What a pleasant film"
classify.run("DIR", file="digit.png")

The image is resized to the rows, columns and channels of the model's images, and a line describes the change. (MNIST's
digits are white on black.) Prints the five most likely classes with probabilities, or the outputs of a regression.
"""

import pathlib
import sys

import jax
import numpy as np

from experiments.data import image_file, labelled
from experiments.engine import errors
from experiments.pretrained import open_model
from experiments.tools import command

TOP = 5  # most likely classes
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
    """Return the most likely classes of an image, of a text or of each of its tokens, one on each line."""
    model = command.load(checkpoint, trust, device, "image", "classes", "tokens")
    out = command.output(workdir, "classes.txt")
    is_image = model.kind == "image"
    if bool(file) != is_image or bool(prompt) == is_image:
        flag = "--file=PATH" if is_image else "--prompt='...'"
        raise errors.UserError(f"this model classifies {'images' if is_image else 'texts'}. Give only {flag}.")
    if is_image:
        inputs, line = image_file.read(pathlib.Path(file).expanduser(), model.like)
        classes, lines = model.like["classes"], [line]
    else:
        N, tokenizer = model.facts["N"], open_model.load_tokenizer(model)
        id_1N, valid_1N, cut = labelled.encode(tokenizer, [prompt], N=N)
        inputs, classes = id_1N[:, valid_1N[0]], model.extras["class_names"]
        lines = [f"  the model reads only the first {N} tokens of this text"] if cut else []
    problem = model.extras.get("problem_type")
    score_C = np.asarray(model.logits(inputs)[0])
    if problem == "regression" or not problem and len(classes) == 1:  # as in transformers
        lines += [f"  {x}  {name}" for name, x in zip(classes, np.atleast_1d(score_C).T.tolist(), strict=True)]
        return command.report("\n".join(lines), out)
    probabilities = jax.nn.sigmoid if problem == "multi_label_classification" else jax.nn.softmax
    p_C = np.asarray(probabilities(score_C))
    if model.kind == "tokens":
        names = [tokenizer.decode([id]) or tokenizer.name(id) for id in inputs[0].tolist()]
        lines += [f"  {p.max():.3f}  {classes[p.argmax()]}  {name}" for name, p in zip(names, p_C, strict=True)]
    else:
        lines += [f"  {p_C[c]:.3f}  {classes[c]}" for c in np.argsort(-p_C, kind="stable")[:TOP]]
    return command.report("\n".join(lines), out)


if __name__ == "__main__":
    sys.exit(command.main(run, HELP, sys.argv))
