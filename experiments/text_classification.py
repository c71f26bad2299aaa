"""Classify texts: by the first token [CLS], through one more layer as in BERT, or by the mean of all tokens (E25)."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.config import disk, errors, settings as configs
from experiments.data import classes as class_names, files as data_files, labelled, pretrained_tokenizer
from experiments.engine import batches, run as runs, train_step
from experiments.model import baselines, build, losses, sharding, splits, task as tasks
from tfm import head as heads, layout as layouts, models
from tfm.attention import mask as masks

SHOWN, LETTERS = 12, 200  # number of texts in sample.txt, and of characters of each


def config() -> dict[str, dict]:
    """Return {"text": {setting: (default, help)}}, the settings of the texts, their classes and the head."""
    return {
        "text": {
            "source": ("docstrings", "docstrings (by package of Python), DIR with DIR/class/*.txt, a table, hub:NAME"),
            "field": ("text,label", "columns of a table with the texts and with their classes"),
            "tokenizer": ("bytes", "bytes, characters, or the path of a trained tokenizer: a file or a folder"),
            "N": (128, "tokens of a text; longer texts are truncated"),
            "head": (
                "tanh",
                "activation of the layer between the first token and the class logits: tanh (BERT), relu (DistilBERT), "
                "...; linear: no such layer; pooled: no layer, and the mean of all tokens in place of the first",
            ),
        }
    }


def prepare(
    settings: configs.Settings,
    mesh: Mesh,
    *,
    read: Callable[..., data_files.Rows] = labelled.load,
    change: Callable[[models.Model], models.Model] = models.unchanged,
    loss: Callable[..., Callable[..., train_step.Ratios]] = losses.choose_class_loss,
) -> runs.Work:
    """Prepare the texts, a model of their tokens, its loss and the figures. read, change, loss: see language.prepare.

    read(source, field) -> data_files.Rows. loss(settings, model, predict) as in losses.choose_class_loss.
    """
    t, m = settings.text, settings.model
    configs.at_least(2, {"text.N": t.N})
    data = read(t.source, t.field)
    both_splits = data.train, data.evaluation
    texts = [[text.encode() for text, _ in split] for split in both_splits]
    tokenizer = pretrained_tokenizer.make(t.tokenizer, texts[0], specials=(labelled.CLS,), evaluation=texts[1])
    rows = [labelled.encode(tokenizer, [text for text, _ in split], N=t.N) for split in both_splits]
    labels = [label_texts(split, data.classes) for split in both_splits]
    examples = [make_examples(*row[:2], label_B) for row, label_B in zip(rows, labels, strict=True)]
    model = change(make_model(settings, mesh, W=tokenizer.size, C=len(data.classes)))

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        if m.flax:
            return {"inputs": batch["w_BN"], "valid": batch["valid_BS"]}
        return {"inputs": batch["w_BN"], "mask": build.add_window(m, masks.padding(batch["valid_BS"], at_end=True))}

    def average(params: Any, x_BND: jax.Array, batch: dict, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        return build.average_tokens(model.logits(params, x_BND, layout=layout), batch["valid_BS"])

    predict = average if not m.flax and t.head == "pooled" else None
    return tasks.make_work(
        settings,
        model,
        inputs,
        loss(settings, model, predict),
        splits.make_splits(settings, *examples, tokens=t.N),
        baseline=functools.partial(baselines.guess_class, train_label_B=labels[0], classes=data.classes),
        predict=predict,
        figures=functools.partial(figures, settings, data, labels[1]),
        files=tokenizer.files | {runs.DATA: disk.as_json({"classes": data.classes})},
        lines=describe(data, W=tokenizer.size, N=t.N, truncated=[cut for *_, cut in rows]),
        data_sha256=data.sha256,
    )


def make_model(settings: configs.Settings, mesh: Mesh, *, W: int, C: int) -> models.Model:
    """Return the model of the settings, or the user's Flax module. Raises UserError if devices would share a text."""
    t, m = settings.text, settings.model
    sizes = {"W": W, "N": t.N, "C": C}
    if m.flax:
        from experiments.model import flax_model  # imports flax.nnx, which takes 0.1 s

        return flax_model.build(m, mesh, jax.ShapeDtypeStruct((2, t.N), np.int32), (2, C), padded=True, **sizes)
    layout = sharding.choose_layout(settings, mesh, W=W)
    if layout.sequence:
        raise errors.UserError(f"mesh.sequence = {mesh.shape[layout.sequence]} must be 1: devices cannot share a text")
    head_options = {"head": heads.each_word} if t.head == "pooled" else {"output": t.head}
    padding = build.add_window(m, masks.padding(np.ones((1, t.N), bool), at_end=True))
    return build.language_model(m, **head_options, **sizes, layout=layout, mask=padding)


def label_texts(split: Sequence[labelled.Row], classes: Sequence[str]) -> np.ndarray:
    """Return label_B, the index in `classes` of each text's class."""
    number = {name: c for c, name in enumerate(classes)}
    return np.array([number[name] for _, name in split], np.int32)


def make_examples(id_BN: np.ndarray, valid_BN: np.ndarray, label_B: np.ndarray) -> splits.Examples:
    """Return `(fetch, n)` for `splits`: a batch has w_BN, valid_BS (False: padding), label_B, and weight_B = 1."""

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        batch = {"w_BN": id_BN[index_B], "valid_BS": valid_BN[index_B], "label_B": label_B[index_B]}
        return batch | {"weight_B": np.ones(len(index_B), np.float32)}

    return fetch, len(id_BN)


def describe(data: data_files.Rows, *, W: int, N: int, truncated: list[int]) -> list[str]:
    """Return lines about the data. truncated: the number of texts with more than N tokens in each split."""
    train, evaluation, C = len(data.train), len(data.evaluation), len(data.classes)
    lines = [f"{train:,} texts to train on, {evaluation:,} to evaluate, {C} classes, vocabulary {W}"]
    lines += class_names.describe(data.classes)
    if any(truncated):
        counts = f"{truncated[0]:,} of {train:,} and {truncated[1]:,} of {evaluation:,}"
        lines.append(f"{counts} texts have more than text.N = {N} tokens and are truncated")
    return [*data.description.splitlines(), *(f"{data.name}: {line}" for line in lines)]


def figures(
    settings: configs.Settings,
    data: data_files.Rows,
    label_B: np.ndarray,
    work: runs.Work,
    params: Any,
    folder: pathlib.Path,
    rows: list[dict],
) -> Iterator[pathlib.Path | dict]:
    """Yield the calibration error and recalls; then the files.

    Files: loss curves, the confusion matrix, and held-out texts with their predictions, errors first. label_B: the true
    classes of the held-out texts.
    """
    from experiments.figures import plots  # imports matplotlib, which takes a second

    predicted_B, probability_B = tasks.predict_classes(work, params, len(label_B))
    yield tasks.measure_calibration(label_B, predicted_B, probability_B)
    yield tasks.measure_recalls(label_B, predicted_B, data.classes)
    lines = []
    for b in np.argsort(label_B == predicted_B, kind="stable")[:SHOWN]:
        text, name = data.evaluation[b]
        lines += [f"{data.classes[predicted_B[b]]} ({probability_B[b]:.2f}); truth: {name}"]
        lines += [" ".join(text.split())[:LETTERS], ""]
    disk.write(folder / "sample.txt", "\n".join(lines).encode())
    title, drawings = f"{settings.experiment}: {data.name}", folder / "figures"
    yield plots.loss_curves(drawings / "loss.png", rows, unit="nats per text", title=title)
    yield from plots.confusion(
        drawings / "confusion.png", label_B=label_B, predicted_B=predicted_B, classes=data.classes
    )
    yield folder / "sample.txt"
