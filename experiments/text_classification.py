"""Texts to classes: the first word, which belongs to no text, answers through one more layer, as BERT has it, or the
mean of all does (E25)."""

import functools
import pathlib
from typing import Any

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models, task as tasks
from experiments.data import classes as class_names, labelled, pretrained_tokenizer
from experiments.engine import batches, config as configs, disk, errors, run, train_step
from tfm import head
from tfm.attention import mask as masks

SHOWN, LETTERS = 12, 200  # texts in sample.txt, and characters of each


def config() -> dict[str, ConfigDict]:
    """The texts and their classes."""
    text = ConfigDict()
    text.source = "docstrings"  # docstrings (of packages of Python), DIR with DIR/class/*.txt, a table, hub:NAME
    text.field = "text,label"  # of a table, the columns with the texts and with their classes
    text.tokenizer = "bytes"  # bytes, characters, or the path of a trained model's: a file, or its folder
    text.N = 128  # tokens of a text: of a longer one the beginning
    text.head = "tanh"  # activation of the layer between the first word and the classes: tanh as in BERT, relu as
    # in DistilBERT, linear for no such layer; pooled: the mean of all words in place of the first
    return {"text": text}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The texts, the model, what is measured."""
    t, m = settings.text, settings.model
    configs.at_least(2, {"text.N": t.N})
    data = labelled.load(t.source, t.field)
    parts, classes = (data.train, data.evaluation), data.classes
    both = [[text.encode() for text, _ in part] for part in parts]
    words = pretrained_tokenizer.make(t.tokenizer, both[0], specials=(labelled.CLS,), evaluation=both[1])
    layout = models.layout(m, devices, W=words.size)
    if layout.sequence:
        raise errors.UserError("one answer is for a whole text: mesh.sequence must be 1")
    sizes = {"W": words.size, "N": t.N, "C": len(classes)}
    pooled = t.head == "pooled"
    asked = {"answer": head.each_word} if pooled else {"answer": head.first_word, "output": t.head}
    model = models.language(m, **asked, **sizes)
    number = {name: c for c, name in enumerate(classes)}
    labels = [np.array([number[name] for _, name in part], np.int32) for part in parts]
    rows = [labelled.ids(words, [text for text, _ in part], N=t.N) for part in parts]
    examples = [inputs(*row[:2], label_B) for row, label_B in zip(rows, labels, strict=True)]

    def logits(params: Any, batch: dict, **options: Any) -> Any:
        mask = models.masked(m, masks.padding(batch["valid_BS"]))
        answer, seen = model.apply(params, batch["w_BN"], mask=mask, **options)
        return models.mean_of_words(answer, batch["valid_BS"]) if pooled else answer, seen

    more = {"layout": layout, **tasks.parts(settings, *examples, tokens=t.N)}
    task = tasks.of_classes(settings, model, logits, labels, **more)
    counts = f"{len(data.train):,} texts to train on, {len(data.evaluation):,} to evaluate"
    lines = [*data.said.splitlines(), f"{data.name}: {counts}, {len(classes)} classes, vocabulary {words.size}"]
    lines += [f"{data.name}: {line}" for line in class_names.describe(classes)]
    if any(cut for *_, cut in rows):
        cuts = " and ".join(f"{cut:,} of {len(part):,}" for (*_, cut), part in zip(rows, parts, strict=True))
        lines.append(
            f"{data.name}: {cuts} texts have more than text.N = {t.N} tokens: of these only the beginning is read"
        )
    files = words.files | {"data.json": disk.as_json({"classes": classes})}
    show = functools.partial(figures, settings, data, task, logits, labels[1])
    return run.Work(task, show, lambda *inputs: logits(*inputs)[0], files, lines=lines, data_sha256=data.sha256)


def inputs(id_BN: np.ndarray, valid_BN: np.ndarray, label_B: np.ndarray) -> tasks.Examples:
    """`(fetch, n)` for `batches`: w_BN, valid_BS (False: padding), label_B and weight_B."""

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        batch = {"w_BN": id_BN[index_B], "valid_BS": valid_BN[index_B], "label_B": label_B[index_B]}
        return batch | {"weight_B": np.ones(len(index_B), np.float32)}

    return fetch, len(id_BN)


def figures(
    settings, data: labelled.Labelled, task: train_step.Task, logits, label_B, params, folder: pathlib.Path, rows
):
    """Loss curves, the confusion matrix, and held-out texts with their classes, the wrong ones first."""
    from experiments.figures import plots  # matplotlib, only where something is drawn

    predicted_B, probability_B = tasks.told(task, logits, params, len(label_B))
    lines, classes = [], data.classes
    yield tasks.recalls(label_B, predicted_B, classes)
    for b in np.argsort(label_B == predicted_B, kind="stable")[:SHOWN]:
        text, name = data.evaluation[b]
        said = f"{classes[predicted_B[b]]} ({probability_B[b]:.2f}); truth: {name}"
        lines += [said, " ".join(text.split())[:LETTERS], ""]
    disk.write(folder / "sample.txt", "\n".join(lines).encode())
    title = f"{settings.experiment}: {data.name}"
    yield plots.loss_curves(folder / "figures" / "loss.png", rows, unit="nats per text", title=title)
    where = folder / "figures" / "confusion.png"
    yield from plots.confusion_of(where, label_B=label_B, predicted_B=predicted_B, classes=classes)
    yield folder / "sample.txt"
