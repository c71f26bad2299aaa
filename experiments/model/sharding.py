"""Choose the layout of a model: how the devices of a mesh share it."""

import math
from typing import Any

from experiments.config import errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.model import build
from tfm import layout as layouts


def choose_layout(settings: configs.Settings, mesh: Any, *, W: int = 0, N: int = 0, head: str = "") -> layouts.Layout:
    """Return the layout of the model of the section `model` over this mesh.

    W: size of the vocabulary (0: none). N, head: for images, the number of patches and the setting image.head. Raises
    UserError if the devices of the mesh cannot share the model.
    """
    m = settings.model
    layout, spec = meshes.layout(mesh, W=W), build.make_block_spec(m)
    sequence, tensor = mesh.shape.get(layout.sequence, 1), mesh.shape.get(layout.tensor, 1)
    unsharded = [] if spec.mlp.takes_layout else [f"model.mlp = {m.mlp}"]
    unsharded += [] if spec.attention.value.takes_layout else [f"model.value = {m.value}"]
    per_position, cuts_tokens = spec.norm.per_position, spec.attention.score.cuts_tokens
    no_sequence, no_tensor = f"mesh.sequence = {sequence} must be 1", f"mesh.tensor = {tensor} must be 1"
    errors.refuse(
        (layout.sequence and head == "class_token", f"image.head = {head} has a class token: {no_sequence}"),
        (layout.sequence and per_position, f"model.norm = {m.norm} has statistics of each position: {no_sequence}"),
        (N % sequence, f"mesh.sequence = {sequence} does not divide the number of patches, {N}. Choose a divisor"),
        (m.H % tensor, f"mesh.tensor = {tensor} does not divide model.H = {m.H}. Choose a divisor of {m.H}"),
        (m.G % tensor, f"mesh.tensor = {tensor} does not divide model.G = {m.G}. Choose a divisor of {m.G}"),
        (
            layout.sequence and spec.attention.weigh,
            f"model.weights = {m.weights} needs all keys of a query on one device: {no_sequence}",
        ),
        (layout.tensor and cuts_tokens, f"model.score = {m.score} cuts tokens into heads: {no_tensor}"),
        (layout.tensor and unsharded, f"{(*unsharded, '')[0]} does not declare takes_layout: {no_tensor}"),
    )
    devices = math.prod(mesh.shape.get(axis, 1) for axis in layout.batch)
    return layout._replace(sequences=settings.train.steps * settings.train.batch_size // devices)
