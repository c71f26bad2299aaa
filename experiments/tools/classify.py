"""The class of an image file, told by a trained model: a vision run made here, or a published ViT.

python -m experiments.tools.classify --checkpoint=DIR --file=digit.png
classify.run("DIR", file="digit.png")

DIR is a run's folder, or a folder with config.json and model.safetensors. The image is made as many rows, columns and
channels as the model's own images have (a line says so; MNIST's digits are white on black). Prints the five likeliest
classes with their probabilities, and returns this text. Nothing is written unless a workdir is given.
"""

import os
import pathlib
import sys

import jax
import numpy as np

from experiments.data import image_file
from experiments.engine import distributed, errors
from experiments.pretrained import open_model
from experiments.tools import command

SHOWN = 5  # likeliest classes


@command.tool(file="The image: a PNG, JPEG, GIF, BMP, TIFF, WebP or PPM file.")
def run(
    checkpoint: str | os.PathLike,
    *,
    file: str | os.PathLike = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> str:
    """The likeliest classes of an image file, and how it was made like the model's own."""
    model = open_model.open(checkpoint, trust=trust)
    open_model.expect(model, "image")
    if not file:
        raise errors.UserError("say which image: --file=PATH")
    like = image_file.expected(model.path, model.extras, Z=model.facts["Z"], C=model.facts["C"])
    image_1YXZ, steps = image_file.read(pathlib.Path(os.path.expanduser(file)), like)
    p_C = np.asarray(jax.nn.softmax(model(image_1YXZ)[0]))
    likeliest = np.argsort(-p_C, kind="stable")[:SHOWN]
    lines = [steps, *(f"  {p_C[c]:.3f}  {like['classes'][c]}" for c in likeliest)]
    return command.tell("\n".join(lines), workdir, "classes.txt")


if __name__ == "__main__":
    distributed.leave(run.main(sys.argv))
