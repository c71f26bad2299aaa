"""Classify images or texts with a trained model: a run's folder, or a published model such as a ViT.

python -m experiments.tools.classify --checkpoint=DIR --file=digit.png
python -m experiments.tools.classify --checkpoint=DIR --prompt="What a pleasant film"
python -m experiments.tools.classify --checkpoint=DIR --file=reviews.csv --field=text --output=predictions.csv
classify.run("DIR", file="digit.png")

An image is resized to the model's images, and a line describes the change. (MNIST's digits are white on black.) The
tool prints the five most likely classes with probabilities, the most likely class of each token, or the outputs of a
regression; with labels, also the accuracy. The labels are a column, or the names of the folders if all are classes. Of
many inputs, each has a row in the file --output (docs/using_models.md).
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import command as commands
from experiments.config import errors
from experiments.data import image_file, inputs as tool_inputs, labelled
from experiments.pretrained import trained

TOP = 5  # most likely classes
MOST_COLUMNS = 100  # the most classes with a column in the output
SHOWN = 12  # classes in a line
HELP = {"prompt": "The text, for a model of texts."}


def run(
    checkpoint: commands.Path,
    *,
    file: commands.Path = "",
    prompt: str = "",
    field: str = "",
    output: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> str:
    """Print and return the most likely classes of each input, or write the file `output` and return a summary."""
    files = commands.check_files(workdir, "classes.txt", output)
    model = commands.load(checkpoint, trust, device, "image", "classes", "tokens")
    is_image = model.kind == "image"
    if bool(file) == bool(prompt) or is_image and (prompt or field):
        flag = "--file=PATH" if is_image else "--prompt='...' or --file=PATH"
        raise errors.UserError(f"this model classifies {'images' if is_image else 'texts'}. Give only {flag}.")
    data = tool_inputs.read_images(str(file)) if is_image else tool_inputs.read_texts(str(file), field, prompt)
    labels = check_labels(data.labels, model, field)
    predictions, lines = predict(model, data)
    lines = [*data.lines, *lines]
    for name, item, p in zip(data.names, data.items, predictions, strict=True):
        if data.is_single or files.table is None:
            lines += [name] * (not data.is_single) + describe(model, item, p)
    if n := sum(map(bool, labels)):
        correct = sum(model.classes[p_C.argmax()] == label for p_C, label in zip(predictions, labels, strict=True))
        lines.append(f"accuracy {correct / n:.4f} ({correct:,} of {n:,})")
    inputs = data.names if is_image else data.items
    return commands.finish(files, lines, lambda: tabulate(model, inputs, labels, predictions))


def check_labels(labels: Sequence[str], model: trained.Trained, field: str) -> Sequence[str]:
    """Return the labels, or [] if all are "", or if one is neither "" nor a class of the model.

    Return [] also for a regression and for classes of tokens. For other models, raise UserError if --field =
    "text,label" names the column of labels, and one is not a class of the model.
    """
    unknown = sorted({*labels} - {"", *model.classes})
    if trained.is_regression(model) or model.kind == "tokens" or not any(labels) or unknown and "," not in field:
        return []
    remedy = f"Choose another column; the classes are {', '.join(model.classes[:SHOWN])}"
    errors.refuse((unknown, f"--field = {field}: label {''.join(unknown[:1])!r} is not a class of the model. {remedy}"))
    return labels


def predict(model: trained.Trained, data: tool_inputs.Inputs) -> tuple[Sequence[np.ndarray], list[str]]:
    """Return p_C (classes), p_TC (classes of tokens) or a regression's numbers for each input, and lines to print.

    The lines are about the first image, or about truncated texts.
    """
    if model.kind == "image":
        line = image_file.read(pathlib.Path(data.items[0].name), model.image_format)[1]
        fetch = trained.fetch_images(data.items, model.image_format)
        return trained.predict(model, fetch, n=len(data.items)), [line]
    predictions, truncated = trained.predict_texts(model, data.items)
    texts = "this text" if data.is_single else f"{truncated:,} texts"
    line = f"  the model reads only the first {model.facts['N']} tokens of {texts}"
    return predictions, [line] * bool(truncated)


def name_tokens(model: trained.Trained, text: str) -> list[str]:
    """Return the tokens of a text, with the special tokens around it, truncated to the model's context."""
    id_1N, valid_1N, _ = labelled.encode(model.tokenizer, [text], N=model.facts["N"])
    return [model.tokenizer.show(id) for id in id_1N[valid_1N].tolist()]


def describe(model: trained.Trained, item: Any, p: np.ndarray) -> list[str]:
    """Return the lines about an input. p: its prediction, p_C of classes, p_TC of tokens, or a regression's outputs."""
    classes = model.classes
    if trained.is_regression(model):
        return [f"  {x}  {name}" for name, x in zip(classes, np.atleast_1d(p).T.tolist(), strict=True)]
    if model.kind == "tokens":
        names = name_tokens(model, item)
        return [f"  {p_C.max():.3f}  {classes[p_C.argmax()]}  {name}" for name, p_C in zip(names, p, strict=True)]
    return [f"  {p[c]:.3f}  {classes[c]}" for c in np.argsort(-p, kind="stable")[:TOP]]


def tabulate(
    model: trained.Trained, inputs: Sequence[str], labels: Sequence[str], predictions: Sequence[np.ndarray]
) -> tuple[list[str], list[list]]:
    """Return the header and the rows of the CSV file: of each input, or of each token if the model classifies tokens.

    predictions: probabilities, or numbers of a regression, (C,) for an input or (N, C) for its tokens. labels: [] for
    inputs without labels.
    """
    classes, header = model.classes, ["file" if model.kind == "image" else "text", *["label"] * bool(labels)]
    cells = [[*row] for row in (zip(inputs, labels, strict=True) if labels else zip(inputs))]
    if model.kind == "tokens":
        header.append("token")
        cells = [[*row, token] for row in cells for token in name_tokens(model, row[0])]
        predictions = np.concatenate(predictions)
    if trained.is_regression(model):
        return [*header, *classes], [[*row, *p_C] for row, p_C in zip(cells, predictions, strict=True)]
    shown = classes if len(classes) <= MOST_COLUMNS else []
    for row, p_C in zip(cells, predictions, strict=True):
        row += [classes[p_C.argmax()], p_C.max(), *p_C[: len(shown)]]
    return [*header, "class", "probability", *(f"p_{name}" for name in shown)], cells


if __name__ == "__main__":
    commands.main(run, HELP)
