"""A parameter tree from elsewhere becomes a run: classify, sample, export, symmetry and init_from then work on it."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np
from flax import traverse_util

from experiments.engine import by_name, checkpoint, config as configs, disk, errors, mesh, run as runs, workdir
from experiments.pretrained import open_model, tensors
from tfm import shapes

BIAS = "head/b_W"  # of the output


def import_tree(
    mapping: Mapping[str, tuple[str, ...]], arrays: Any, config: ml_collections.ConfigDict, folder: str | os.PathLike
) -> pathlib.Path:
    """The folder, with a run whose parameters are these arrays.

        config = base.get_config("language")
        config.model.update(M=2, D=32, H=4, K=16)
        import_tree({"h.{m}.qkv": ("D 3HK", *paths)}, arrays, config, "runs/theirs")

    arrays: theirs by name, or a tree, whose names are then joined by slashes; whatever NumPy can read. mapping: their
    name -> (axes, our path, ...), in the letters of our names (tensors.py). Layers are numbered, {m} in the name, or
    the first axis, M. An array that has our path for its name needs no entry. config: of a run that could be trained;
    its text or its images say what words and classes are. UserError, with nothing written: a folder that is not empty,
    a path that the model of the config does not have, arrays that are missing, left over, or of another shape.
    """
    folder, settings = pathlib.Path(folder), configs.Settings(config, config)
    disk.check_new(folder, "folder")
    work = by_name.experiment(settings.experiment).prepare(settings, runs.devices(settings))
    expected = jax.eval_shape(work.task.init, jax.random.key(0))
    what = f"{folder} cannot be a run of this config"
    named = {
        *traverse_util.flatten_dict(dict(arrays), sep="/"),
        *(path for _, *ours in mapping.values() for path in ours),
    }
    if BIAS in named and settings.experiment == "translation":  # ours has none, and others do
        W = shapes.check(expected)["W"]
        expected = expected | {"head": expected["head"] | {"b_W": jax.ShapeDtypeStruct((W,), np.float32)}}
    flat = translated(mapping, arrays, shapes.flat(expected), sizes(settings, expected), what)
    tensors.complain(what, tensors.differences(flat, shapes.flat(expected)))
    open_model.finite(folder, flat)
    params = jax.tree_util.tree_map_with_path(lambda path, leaf: flat["/".join(shapes.names(path))], expected)
    workdir.enter(folder, settings.to_dict())
    for name, content in work.files.items():
        disk.write(folder / name, content)
    saves = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
    saves.save(0, {"params": params})
    saves.close()
    summary = {"experiment": settings.experiment, "steps": 0, "params": shapes.total(params)}
    summary |= {"params_sha256": checkpoint.digest(params), "versions": mesh.versions(), "commit": workdir.commit()}
    disk.write_json(folder / "summary.json", summary)
    return folder


def sizes(settings: configs.Settings, expected: Any) -> dict[str, int]:
    """By letter, those that the config or the tree tells."""
    config = settings.to_dict()
    found = {letter: n for letter, n in config["model"].items() if len(letter) == 1} | shapes.check(expected)
    if "P" in found and "image" in config:
        patch = config["image"]["patch"]
        found |= {"Y": patch, "X": patch, "Z": found["P"] // patch**2}
    return {"G": found["H"], **found}


def translated(
    mapping: Mapping[str, tuple[str, ...]], arrays: Any, expected: Mapping, facts: Mapping, what: str
) -> dict[str, np.ndarray]:
    """Our arrays by path, of theirs. what: begins an error."""
    theirs = traverse_util.flatten_dict(dict(arrays), sep="/")
    for name, array in theirs.items():
        try:
            theirs[name] = np.asarray(array, np.float32)
        except (TypeError, ValueError) as error:
            raise errors.UserError(f"{what}: {name} is no array of numbers ({error})") from error
    flat = {path: theirs.pop(path) for path in expected.keys() & theirs.keys() - mapping.keys()}
    lines = []
    for name, (axes, *ours) in mapping.items():
        if axes.split()[:1] == ["M"]:
            numbered = {f"{name}/{m}": one for m, one in enumerate(theirs.pop(name, ()))}
            theirs, name, axes = theirs | numbered, name + "/{m}", axes.partition("M")[2]
        line = tensors.own_keys(tensors.Line(name, axes, tuple(ours)), facts)
        for path in (path for path in line.ours if path not in expected):
            raise errors.UserError(f"{what}: its model has no {path}{by_name.nearest(path, expected)}")
        lines.append(line)
    try:
        read, _ = tensors.read(lines, (), theirs, facts, what)
    except (KeyError, ValueError) as error:
        raise errors.UserError(f"{what}: its sizes are {dict(facts)}, and axes do not fit them ({error})") from error
    return flat | read
