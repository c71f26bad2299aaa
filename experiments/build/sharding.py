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
    layout, spec = mesh.layout(devices, W=W), models.make_block_spec(m)
    sequence, tensor = devices.shape.get(layout.sequence, 1), devices.shape.get(layout.tensor, 1)
    unsharded = [] if spec.mlp.takes_layout else [f"model.mlp = {m.mlp}"]
    unsharded += [] if spec.attention.value.takes_layout else [f"model.value = {m.value}"]
    per_position = variants.split("norm", m.norm)[0] == "batch_features"
    for wrong, reason in (
        (layout.sequence and head in models.CLASS_TOKENS, f"image.head = {head} has class tokens"),
        (layout.sequence and per_position, "model.norm = batch_features keeps statistics of each position"),
        (N % sequence, f"{N} patches do not divide evenly over mesh.sequence = {sequence}"),
    ):
        if wrong:
            raise errors.UserError(f"{reason}: mesh.sequence must be 1")
    for wrong, reason in (
        (m.H % tensor, f"model.H = {m.H} heads do not divide evenly over mesh.tensor = {tensor}"),
        (m.G % tensor, f"model.G = {m.G} heads of keys and values do not divide evenly over mesh.tensor = {tensor}"),
        (layout.tensor and checks.cuts_tokens(m), f"model.score = {m.score} cuts whole tokens into heads"),
        (layout.tensor and unsharded, f"{(*unsharded, '')[0]} cannot be sharded (takes_layout)"),
    ):
        if wrong:
            raise errors.UserError(f"{reason}: mesh.tensor must be 1")
    return layout
