"""Import a parameter tree from other code as a run, so that classify, sample, export, symmetry and init_from work."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np
from flax import traverse_util

from experiments.engine import (
    by_name,
    checkpoint,
    config as configs,
    disk,
    errors,
    mesh as meshes,
    run as runs,
    workdir as workdirs,
)
from experiments.pretrained import open_model, tensors
from tfm import shapes

BIAS = "head/b_W"  # the path of the bias of the output


def import_tree(
    mapping: Mapping[str, tuple[str, ...]], arrays: Any, config: ml_collections.ConfigDict, folder: str | os.PathLike
) -> pathlib.Path:
    """Write a run with these parameters into the folder. Return the folder.

        config = base.get_config("language")
        config.model.update(M=2, D=32, H=4, K=16)
        import_tree({"h.{m}.qkv": ("D 3HK", *paths)}, arrays, config, "runs/theirs")

    arrays: a dictionary by name, or a tree, whose names are joined by slashes. mapping: name of an array -> (axes, our
    path, ...), in the letters of our names (tensors.py). {m} in a name numbers the layers, or the first axis, M, counts
    them. An array that is named by our path needs no entry. config: as for training; its text or images define tokens
    and classes. Raises UserError, before anything is written, if the folder is not empty, and for arrays that are
    missing, left over, or of another shape than in the config's model.
    """
    folder, settings = pathlib.Path(folder), configs.Settings(config, config)
    disk.check_new(folder, "folder")
    work = by_name.load_experiment(settings.experiment).prepare(settings, runs.make_mesh(settings))
    expected = jax.eval_shape(work.task.init, jax.random.key(0))
    theirs = traverse_util.flatten_dict(dict(arrays), sep="/")
    ours = {*theirs, *(path for _, *paths in mapping.values() for path in paths)}
    if BIAS in ours and settings.experiment == "translation":  # models of other projects have this bias
        b_W = jax.ShapeDtypeStruct((shapes.check(expected)["W"],), np.float32)
        expected = expected | {"head": expected["head"] | {"b_W": b_W}}
    label = f"{folder} cannot be a run of this config"
    flat = _translate(mapping, theirs, _find_sizes(settings.to_dict(), expected), label)
    tensors.complain(label, tensors.differences(flat, shapes.flat(expected)))
    open_model.check_finite(folder, flat)
    params = jax.tree_util.tree_map_with_path(lambda path, leaf: flat["/".join(shapes.names(path))], expected)
    _save(folder, settings, params, work.files)
    return folder


def _find_sizes(config: dict[str, Any], expected: Any) -> dict[str, int]:
    """Return the sizes by letter, from the config and the expected tree."""
    sizes = {letter: n for letter, n in config["model"].items() if len(letter) == 1} | shapes.check(expected)
    patch = config["image"]["patch"] if "P" in sizes and "image" in config else 0
    return {"G": sizes["H"], **sizes} | ({"Y": patch, "X": patch, "Z": sizes["P"] // patch**2} if patch else {})


def _translate(
    mapping: Mapping[str, tuple[str, ...]], theirs: Mapping[str, Any], sizes: Mapping[str, int], label: str
) -> dict[str, np.ndarray]:
    """Return our arrays by path. label: the beginning of error messages."""
    lines, unmapped = [], {name: array for name, array in theirs.items() if name not in mapping}
    for name, (axes, *paths) in mapping.items():
        if axes.split()[0] == "M":
            unmapped |= {f"{name}/{m}": array for m, array in enumerate(theirs.get(name, ()))}
            name, axes = name + "/{m}", axes.partition("M")[2]
        lines.append(tensors.Line(name, axes, tuple(paths)))
    names = {name for line in lines for name in tensors.names(line.theirs, sizes["M"])}
    try:
        arrays = {name: np.asarray(array, np.float32) for name, array in unmapped.items()}
        arrays |= {name: np.asarray(theirs[name], np.float32) for name in names & theirs.keys()}
        translated = tensors.read(lines, {name: arrays[name] for name in names & arrays.keys()}, sizes, label)
    except (KeyError, TypeError, ValueError) as error:
        raise errors.UserError(f"{label}: the axes do not fit its sizes {dict(sizes)} ({error})") from error
    return {name: array for name, array in arrays.items() if name not in names} | translated


def _save(folder: pathlib.Path, settings: configs.Settings, params: Any, files: Mapping[str, bytes]) -> None:
    """Write the files of a finished run of 0 steps."""
    workdirs.open_run(folder, settings.to_dict())
    for name, content in files.items():
        disk.write(folder / name, content)
    saves = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
    saves.save(0, {"params": params})
    saves.close()
    summary = {"experiment": settings.experiment, "steps": 0, "params": shapes.total(params)}
    summary |= {"params_sha256": checkpoint.digest(params), "versions": meshes.versions()}
    summary["commit"] = workdirs.describe_commit()
    disk.write_json(folder / "summary.json", summary)
