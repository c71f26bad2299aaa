"""The class of an image file, told by a trained model (E25)."""

import pathlib

import jax
import numpy as np

from experiments import model as models
from experiments.data import image_file
from experiments.engine import config, errors, mesh, terminal, workdir
from experiments.engine import run as runs
from experiments.pretrained import open_model
from tfm import embed

WRITES = False  # nothing, unless --workdir is given
SHOWN = 5  # likeliest classes


def run(settings: config.Settings, folder: pathlib.Path | None) -> runs.Result:
    """Print the likeliest classes of the config's image file, and how it was made like the model's own images."""
    mesh.start(settings.device)
    made = open_model.open(settings.checkpoint)
    open_model.expect(made, "image")
    if not settings.file:
        raise errors.UserError("say which image: --config.file=PATH")
    like = image_file.expected(made.path, made.extras, Z=made.facts["Z"], C=made.facts["C"])
    image_1YXZ, done = image_file.read(pathlib.Path(settings.file).expanduser(), like)
    fields = open_model.fields(made, config.beside(settings.model, made.model, made.path))
    config.beside(settings.image, {"head": made.facts["answer"]}, made.path, "image")
    Y, X, Z = like["image"]
    model = models.vision(fields, Y=Y, X=X, **made.facts)
    params = open_model.checked(made, model.init)
    settings.refuse_unused()
    file = workdir.new_file(folder, "classes.txt") if folder is not None else None
    mask, patch = models.masked(fields, None), made.facts["patch"]
    apply = jax.jit(lambda params, image_BYXZ: model.apply(params, embed.cut(image_BYXZ, size=patch), mask=mask)[0])
    p_C = np.asarray(jax.nn.softmax(apply(params, image_1YXZ)[0]))
    told = f"{done}\n{likeliest(p_C, like['classes'])}"
    terminal.say(told, "\n")
    if file is not None:
        workdir.write_new(file, (told + "\n").encode())
    return runs.Result(folder, {"text": told})


def likeliest(p_C: np.ndarray, classes: list[str]) -> str:
    """A line for each of the likeliest classes, with its probability."""
    return "\n".join(f"  {p_C[c]:.3f}  {classes[c]}" for c in np.argsort(-p_C, kind="stable")[:SHOWN])
