"""Choose how a model is shared over the devices of a mesh, or refuse it with the reason."""

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
    by_sequence, by_tensor = f"mesh.sequence = {sequence} must be 1", f"mesh.tensor = {tensor} must be 1"
    errors.refuse(
        (layout.sequence and head in models.CLASS_TOKENS, f"image.head = {head} has class tokens: {by_sequence}"),
        (layout.sequence and per_position, f"model.norm = {m.norm} has statistics of each position: {by_sequence}"),
        (N % sequence, f"mesh.sequence = {sequence} must divide the {N} patches, or be 1"),
        (m.H % tensor, f"mesh.tensor = {tensor} must divide model.H = {m.H} heads, or be 1"),
        (m.G % tensor, f"mesh.tensor = {tensor} must divide model.G = {m.G} heads of keys and values, or be 1"),
        (layout.tensor and checks.cuts_tokens(m), f"model.score = {m.score} cuts tokens into heads: {by_tensor}"),
        (layout.tensor and unsharded, f"{(*unsharded, '')[0]} cannot be sharded (takes_layout): {by_tensor}"),
    )
    return layout
