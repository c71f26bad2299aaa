"""Captions of images: the model reads an image and writes the name of its class, letter by letter.

A sequence has the patches, which attend to each other, and then the letters. A letter attends to the patches and to
earlier letters (equations E1, E2, E22 and E24 of docs/mathematics.md).
"""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.config import disk, errors, settings as configs
from experiments.data import images
from experiments.engine import batches, run as runs
from experiments.model import baselines, build, checks, losses, sharding, splits, task as tasks
from tfm import embed as embeds, head as heads, layout as layouts, models
from tfm.attention import mask as masks

DIGITS = "zero one two three four five six seven eight nine".split()
SHOWN = 20  # number of captions in captions.txt


def config() -> dict[str, dict]:
    """Return {"image": {setting: (default, help)}}. The names of the images' classes are the captions."""
    return {"image": images.FIELDS}


def spell_name(name: str) -> str:
    """Return the caption of a class: its name, or the word for a digit."""
    return DIGITS[int(name)] if name in map(str, range(10)) else name


def spell(classes: Sequence[str]) -> tuple[str, np.ndarray]:
    """Return all different letters as one text, and the captions of the classes as ids of letters, w_CL (int32).

    The id of a letter is its index in the text. Id 0 is the newline, which ends each caption and pads it to L letters.
    """
    names = [spell_name(name) for name in classes]
    letters, L = "\n" + "".join(sorted({*"".join(names)} - {"\n"})), max(map(len, names)) + 1
    return letters, np.array([[letters.index(letter) for letter in name.ljust(L, "\n")] for name in names], np.int32)


def prepare(
    settings: configs.Settings,
    mesh: Mesh,
    *,
    read: Callable[..., images.Images] = images.load_described,
    change: Callable[[models.Model], models.Model] = models.unchanged,
) -> runs.Work:
    """Prepare the images with their captions, the model, its loss, and the figures.

    read(source, size) returns the images. change(model) returns the model to train. Raises UserError for a model.norm
    that needs all tokens of a sequence, and for mesh.sequence > 1.
    """
    i, m, data = settings.image, settings.model, read(settings.image.source, settings.image.size)
    letters, w_CL = spell(data.classes)
    W, L = len(letters), w_CL.shape[1]
    patches, P = build.count_patches(*data.train_image_BYXZ.shape[1:], patch=i.patch)
    N = patches - 1 + L  # the last patch predicts the first letter
    (train, n_train), (evaluation, n_evaluation), _ = images.make_examples(data, i.augment, patch=i.patch)
    data_splits = splits.make_splits(
        settings,
        (add_captions(train, w_CL, patches), n_train),
        (add_captions(evaluation, w_CL, patches), n_evaluation),
        tokens=N,
    )

    checks.check_causal(m)
    layout = sharding.choose_layout(settings, mesh, W=W)
    if layout.sequence:
        raise errors.UserError(f"mesh.sequence = {mesh.shape[layout.sequence]} must be 1 for images with captions")
    embedding, output = build.bind_sizes(embeds.mixed, P=P, W=W), build.bind_sizes(heads.next_word, W=W)
    mask = build.add_window(m, masks.prefix(patches))
    model = change(build.model(m, embed=embedding, head=output, N=N, layout=layout, mask=mask))

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        return {"inputs": {"v_BNP": batch["v_BSP"], "w_BN": batch["w_BL"]}, "mask": mask}

    return tasks.make_work(
        settings,
        model,
        inputs,
        losses.choose_token_loss(settings, model, sparse=True, layout=layout),
        data_splits,
        baseline=functools.partial(baselines.guess_token, W=W),
        causal=("w_BL", patches),
        figures=functools.partial(figures, settings, data, letters, patches, L),
        lines=[*data.lines, f"captions of {patches} patches and up to {L} letters"],
        data_sha256=data.sha256,
    )


def add_captions(fetch: batches.Fetch, w_CL: np.ndarray, patches: int) -> batches.Fetch:
    """Return a `fetch` whose batches have the patches v_BSP, the letter ids w_BL that the model reads, and its targets.

    w_CL: the caption of each class. patches: S. w_BL lacks the last letter. target_BN has all letters, the first at the
    last patch. weight_BN is 1 up to the first newline, which is included, and 0 before the last patch. The returned
    `fetch` raises UserError if image.augment mixes images.
    """

    def fetch_captions(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        batch = fetch(index_B, rng)
        if "other_label_B" in batch:
            raise errors.UserError("image.augment must not mix images with captions. Leave out mixup and cutmix")
        w_BL = w_CL[batch["label_B"]]
        # 1 up to the first newline (0), which ends the name.
        weight_BL = (np.cumsum(w_BL == 0, axis=1) - (w_BL == 0) == 0).astype(np.float32)
        before = [(0, 0), (patches - 1, 0)]
        targets = {"target_BN": np.pad(w_BL, before), "weight_BN": np.pad(weight_BL, before)}
        return {"v_BSP": batch["v_BNP"], "w_BL": w_BL[:, :-1], **targets}  # S patches, N tokens

    return fetch_captions


def make_writer(logits: Callable, patches: int, L: int) -> Callable[[Any, jax.Array], jax.Array]:
    """Return a function (params, v_BSP) -> w_BL that writes captions, each time the most likely letter.

    logits: (params, batch) -> l_BNW, at patches, then letters. patches: of an image. L: letters of a caption.
    """

    @jax.jit
    def write(params: Any, v_BSP: jax.Array) -> jax.Array:
        w_BL = jnp.zeros((len(v_BSP), L), jnp.int32)
        for n in range(L):
            l_BNW = logits(params, {"v_BSP": v_BSP, "w_BL": w_BL[:, :-1]})
            w_BL = w_BL.at[:, n].set(l_BNW[:, patches - 1 + n].argmax(-1))
        return w_BL

    return write


def figures(
    settings: configs.Settings,
    data: images.Images,
    letters: str,
    patches: int,
    L: int,
    work: runs.Work,
    params: Any,
    folder: pathlib.Path,
    rows: list[dict],
) -> Iterator[pathlib.Path | dict]:
    """Yield {"eval/names_right": share of names without a wrong letter}; then files: loss curves, sample captions.

    letters: letter number w has the id w. patches: patches of an image. L: letters that a caption may have. rows: the
    logged metrics.
    """
    from experiments.figures import plots  # imports matplotlib, which takes a second

    write, held_out = make_writer(work.apply, patches, L), work.task.evaluation
    w_BL = np.concatenate([write(params, held_out[i]["v_BSP"]) for i in range(len(held_out))])
    names = ["".join(letters[w] for w in w_L).partition("\n")[0] for w_L in w_BL]
    truths = [spell_name(data.classes[c]) for c in data.evaluation_label_B]
    pairs = list(zip(truths, names, strict=False))  # the last batch is padded
    correct = sum(truth == name for truth, name in pairs) / len(pairs)
    yield {"eval/names_right": correct}
    title = f"{settings.experiment}: {data.name}, {correct:.1%} of the names right"
    yield plots.loss_curves(folder / "figures" / "loss.png", rows, unit="nats per letter", title=title)
    examples = sorted(pairs[:SHOWN], key=lambda pair: pair[0] == pair[1])
    lines = ["class: what the model wrote", *(f"{truth}: {name}" for truth, name in examples), ""]
    disk.write(folder / "captions.txt", "\n".join(lines).encode())
    yield folder / "captions.txt"
