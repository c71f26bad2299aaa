"""How a model is shared over the devices of a mesh, or why it cannot be."""

from typing import Any

from experiments.build import checks, model as models, variants
from experiments.engine import config, errors, mesh
from tfm import layout as layouts


def choose_layout(m: config.Settings, devices: Any, *, W: int = 0, N: int = 0, head: str = "") -> layouts.Layout:
    """Return how the model of the section `m` is shared over the mesh `devices`.

    W: size of the vocabulary. N, head: number of patches and class head of an image model. Raises UserError if the
    model cannot be shared over this mesh.
    """
    layout, spec = mesh.layout(devices, W=W), models.block_spec(m)
    sequence, tensor = devices.shape.get(layout.sequence, 1), devices.shape.get(layout.tensor, 1)
    parts = {"mlp": spec.mlp, "value": spec.attention.value}
    whole = [f"model.{name} = {getattr(m, name)}" for name, part in parts.items() if not part.takes_layout]
    per_position = variants.split("norm", m.norm)[0] == "batch_features"
    for wrong, says in (
        (layout.sequence and head in models.FIRST, f"image.head = {head} has a class token, which cannot be shared"),
        (layout.sequence and per_position, "model.norm = batch_features keeps statistics of each position"),
        (N % sequence, f"{N} patches do not divide evenly over mesh.sequence = {sequence}"),
    ):
        if wrong:
            raise errors.UserError(f"{says}: mesh.sequence must be 1")
    for wrong, says in (
        (m.H % tensor, f"model.H = {m.H} heads do not divide evenly over mesh.tensor = {tensor}"),
        (m.G % tensor, f"model.G = {m.G} heads of keys and values do not divide evenly over mesh.tensor = {tensor}"),
        (layout.tensor and checks.cuts_tokens(m), f"model.score = {m.score} cuts whole tokens into heads"),
        (layout.tensor and whole, f"{(*whole, '')[0]} does not take the layout of the devices (takes_layout)"),
    ):
        if wrong:
            raise errors.UserError(f"{says}: mesh.tensor must be 1")
    return layout
