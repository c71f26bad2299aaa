"""Patch activations: where does a language model keep what distinguishes two texts? (Activation patching.)

python -m experiments.tools.patch --checkpoint=RUN --clean="Anna met Ben. Ben smiled at" --corrupted="..." \
    --answer=" Anna" --other=" Ben" --output=patch.csv --figure=patch.png
python -m experiments.tools.patch --checkpoint=RUN --file=pairs.jsonl
patch.run("RUN", clean="...", corrupted="...", answer=" Anna", other=" Ben")

The model reads the corrupted text, with the activation of one place replaced by that of the clean text: the tokens
after a layer at one position, or the output of one head. The tables show the share of the logit difference between
`answer` and `other` that this restores: 0 as in the corrupted text, 1 as in the clean one. Each line of the file is
{"clean": ..., "corrupted": ..., "answer": ..., "other": ...}; all texts have the same number of tokens, and the shares
are those of the mean logit difference over pairs. A .csv file with the columns clean, corrupted, answer
and other works too. Without a tokenizer (a synthetic task), texts are token ids.
"""

import pathlib
from typing import NamedTuple

import jax
import numpy as np

from experiments import command as commands
from experiments.config import disk, errors
from experiments.data import files as data_files, tables as data_tables
from experiments.figures import inside as figures
from experiments.pretrained import trained
from experiments.studies import tables
from experiments.tools import prompts
from tfm import inside

FIELDS = ("clean", "corrupted", "answer", "other")
PLACES = 5  # of each table: the most effective ones
BATCH = 2**12  # tokens that are computed together
HELP = {
    "clean": "The text after which the model should say --answer.",
    "corrupted": "A text of as many tokens, after which it should say --other.",
    "answer": "One token, such as ' Anna'.",
    "other": "One token, such as ' Ben'.",
    "file": "A .jsonl or .csv file with a pair in each row, in place of the four flags.",
    "output": "A new .csv file with a row for each place: layer, index, logit difference, restored share.",
    "figure": "A new figure (.png, .svg or .pdf) of both grids.",
}


class Pairs(NamedTuple):
    """P pairs of texts with N tokens, and the two tokens whose logits are compared."""

    clean_PN: np.ndarray
    corrupted_PN: np.ndarray
    answer_P: np.ndarray
    other_P: np.ndarray
    tokens: list[str]  # of the first clean text


class Grid(NamedTuple):
    """The mean logit difference when the activation `name` is patched at a layer and index."""

    name: str
    value_MI: np.ndarray
    labels: list[str]  # of the index: tokens or heads


def run(
    checkpoint: commands.Path,
    *,
    clean: str = "",
    corrupted: str = "",
    answer: str = "",
    other: str = "",
    file: commands.Path = "",
    output: commands.Path = "",
    figure: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> str:
    """Print and return the most effective places of each grid; write all of them into `output` and `figure`."""
    values = dict(zip(FIELDS, (clean, corrupted, answer, other), strict=True))
    given = [f"--{name}" for name, value in values.items() if value]
    errors.refuse((given and str(file), f"{', '.join(given)} and --file = {file} are both set. Give only one."))
    text_file, csv_file = commands.output(workdir, "patch.txt"), commands.output_table(output)
    picture = figures.check_output(figure)
    model = commands.load(checkpoint, trust, device, "causal", "synthetic")
    pairs = read_pairs(model, pathlib.Path(file)) if str(file) else read_pair(model, values)
    grids, ends = compute(model, pairs)
    lines = [tables.align(tabulate(grid, *ends)) for grid in grids]
    lines = [describe(pairs, *ends), *lines]
    if csv_file:
        lines.append(commands.save_table(csv_file, *list_places(grids, *ends)))
    if picture:
        with disk.writing(picture):
            lines.append(f"wrote {figures.patching(picture, grids, *ends)}")
    return commands.report("\n\n".join(lines), text_file)


def read_pair(model: trained.Trained, values: dict[str, str], place: str = "") -> Pairs:
    """Return one pair from its four texts. place: the row of a table, for messages. Raises UserError for bad texts."""
    names = {field: f"{place}, {field}" if place else f"--{field}" for field in FIELDS}
    for field in FIELDS:
        errors.refuse((not values[field], f"{names[field]} is missing or empty. A pair has {', '.join(FIELDS)}"))
    (clean_N, tokens), (corrupted_N, _) = (prompts.read_prompt(model, values[f], names[f]) for f in FIELDS[:2])
    counts = f"{names['clean']} has {len(clean_N)} tokens and {names['corrupted']} has {len(corrupted_N)}"
    rule = "A patch replaces the token at the same position: give two texts with the same number of tokens"
    errors.refuse((len(clean_N) != len(corrupted_N), f"{counts}. {rule}"))
    answer, other = (np.array([read_token(model, values[field], names[field])]) for field in FIELDS[2:])
    return Pairs(clean_N[None], corrupted_N[None], answer, other, tokens)


def read_token(model: trained.Trained, text: str, name: str) -> int:
    """Return the id of a text of one token. Raises UserError for several tokens."""
    if not prompts.has_tokenizer(model):
        ids = prompts.parse_ids(model, text, name, f"{name}='3'")
    else:
        ids = model.tokenizer.encode(text, specials=False)
    shown = f"{name} = {text!r} has {len(ids)} tokens, and only the logits of single tokens are compared"
    errors.refuse((len(ids) != 1, f"{shown}. In many vocabularies a space belongs to the token: ' a'"))
    return int(ids[0])


def read_pairs(model: trained.Trained, file: pathlib.Path) -> Pairs:
    """Return the pairs of a table. Raises UserError for rows without the four texts, and for unequal lengths."""
    pairs, table = [], data_files.on_disk(file.expanduser())
    errors.refuse((not data_tables.kind(table), f"--file = {file} is not a table. Give a .jsonl file or a .csv file"))
    with disk.reading(file):
        for place, row in data_tables.kind(table)(table, *FIELDS):
            texts = {field: "" if row.get(field) is None else row[field] for field in FIELDS}
            wrong = [field for field, text in texts.items() if not isinstance(text, str)]
            errors.refuse((wrong, f"{file}, {place}: {', '.join(wrong)} must be text"))
            pairs.append(read_pair(model, texts, f"{file}, {place}"))
            N, first = pairs[-1].clean_PN.shape[1], pairs[0].clean_PN.shape[1]
            rule = "All pairs must have the same number"
            errors.refuse((N != first, f"{file}, {place} has {N} tokens, and the first pair {first}. {rule}"))
    errors.refuse((not pairs, f"{file} contains no pairs: each row has {', '.join(FIELDS)}"))
    columns = [np.concatenate(arrays) for arrays in list(zip(*pairs, strict=True))[:4]]
    same_N = (columns[0] == columns[0][:1]).all(0)
    tokens = [token if same else "" for token, same in zip(pairs[0].tokens, same_N, strict=True)]
    return Pairs(*columns, tokens)


def compute(model: trained.Trained, pairs: Pairs) -> tuple[list[Grid], tuple[float, float]]:
    """Return the grids of tokens and of heads, and the mean logit difference of the corrupted and the clean texts."""
    index_P = np.arange(len(pairs.clean_PN))

    def measure(edit: dict, inputs_PN: np.ndarray = pairs.corrupted_PN) -> jax.Array:
        logits_PW, _ = model.run(inputs_PN, edit=edit, at=-1)
        return (logits_PW[index_P, pairs.answer_P] - logits_PW[index_P, pairs.other_P]).mean()

    ends = float(measure({})), float(measure({}, pairs.clean_PN))
    _, clean = model.run(pairs.clean_PN, look=("hidden", "y"), at=-1)
    same = "The clean and the corrupted text have the same logit difference, so a patch has nothing to restore"
    errors.refuse((ends[0] == ends[1], f"{same}. Give texts that differ, and two tokens"))
    batch = max(1, BATCH // pairs.clean_PN.size)
    grids = []
    for name in ("hidden", "y"):
        value_MI = np.asarray(inside.patch(measure, name, clean[name], batch=batch))
        numbers = range(1, value_MI.shape[1] + 1)
        labels = [f"{n} {pairs.tokens[n - 1]}" if name == "hidden" else f"{n}" for n in numbers]
        grids.append(Grid(name, value_MI, labels))
    return grids, ends


def describe(pairs: Pairs, corrupted: float, clean: float) -> str:
    """Return a line with the logit differences between which the shares are measured."""
    n, N = pairs.clean_PN.shape
    text = f"{n:,} pair{'s' * (n > 1)} of {N} tokens. Logit difference answer - other: clean {clean:.3f}, corrupted "
    weak = ". The clean text does not favour the answer more than the corrupted one, so the shares mean nothing"
    return f"{text}{corrupted:.3f}{'' if clean > corrupted else weak}"


def share(value: np.ndarray, corrupted: float, clean: float) -> np.ndarray:
    """Return the restored share of a logit difference."""
    return (value - corrupted) / (clean - corrupted)


def tabulate(grid: Grid, corrupted: float, clean: float) -> tables.Table:
    """Return the most effective places of a grid."""
    kind = "token after the layer" if grid.name == "hidden" else "output of head"
    order = np.argsort(-np.abs(grid.value_MI - corrupted), axis=None, kind="stable")[:PLACES]
    rows = []
    for m, i in np.stack(np.unravel_index(order, grid.value_MI.shape), axis=1):
        value = grid.value_MI[m, i]
        restored = f"{float(share(value, corrupted, clean)):z.2f}"
        rows.append([f"{m + 1}", grid.labels[i], f"{value:.3f}", restored])
    return tables.Table(["layer", kind, "logit difference", "restored"], rows)


def list_places(grids: list[Grid], corrupted: float, clean: float) -> tuple[list[str], list[list]]:
    """Return the header and the rows of the CSV file."""
    rows = []
    for grid in grids:
        for (m, i), value in np.ndenumerate(grid.value_MI):
            rows.append([grid.name, m + 1, i + 1, grid.labels[i], value, share(value, corrupted, clean)])
    return ["activation", "layer", "index", "label", "logit_difference", "restored"], rows


if __name__ == "__main__":
    commands.main(run, HELP)
