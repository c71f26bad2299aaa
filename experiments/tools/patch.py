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

import functools
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
PLACES = {"hidden": "token after the layer", "y": "output of head"}  # what is patched, by the name of the activation
COLUMNS = ["activation", "layer", "index", "label", "logit_difference", "restored"]  # of the CSV file
MOST = 5  # places in each table: the most effective ones
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


class Grid(NamedTuple):
    """The mean logit difference when the activation `name` is patched at a layer and index, and the restored share.

    value_MI: the difference. share_MI: the restored share; 0 is the value of the corrupted texts, 1 of the clean texts.
    """

    name: str
    labels: list[str]  # of the index: tokens or heads
    value_MI: np.ndarray
    share_MI: np.ndarray


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
    """Print and return the places whose patches restore most of the answer; write all into `output` and `figure`.

    HELP explains the arguments. Give `file`, or the four texts. A place is a token after a layer, or a head's output.
    """
    texts = dict(zip(FIELDS, (clean, corrupted, answer, other), strict=True))
    given = [f"--{name}" for name, text in texts.items() if text]
    errors.refuse((given and str(file), f"{', '.join(given)} and --file = {file} are set. Give a file or four texts."))
    files = commands.check_files(workdir, "patch.txt", output, figure)
    model = commands.load(checkpoint, trust, device, "causal", "synthetic")
    pairs = read_pairs(model, read_rows(pathlib.Path(file)) if str(file) else [("--", texts)])
    grids, ends = compute(model, pairs)
    rows = list_places(grids)
    lines = [describe(pairs, *ends), *(f"\n{tables.align(tabulate(rows, name))}" for name in PLACES)]
    panels = [figures.Panel(PLACES[grid.name], grid.share_MI, grid.labels, is_signed=True) for grid in grids]
    title = "How much of the clean text's answer does one patch restore?"
    draw = functools.partial(figures.grids, panels=panels, title=title)
    return commands.finish(files, lines, lambda: (COLUMNS, rows), draw)


def read_rows(file: pathlib.Path) -> list[tuple[str, dict]]:
    """Return (beginning of messages, {field: text}) for each row of a table.

    Raises UserError if the file is no table, is damaged or has no rows.
    """
    table = data_files.on_disk(file.expanduser())
    errors.refuse((not data_tables.kind(table), f"--file = {file} is not a table. Give a .jsonl file or a .csv file"))
    with disk.reading(file):
        rows = [(f"{file}, {place}, ", row) for place, row in data_tables.kind(table)(table, *FIELDS)]
    errors.refuse((not rows, f"{file} contains no pairs. Write one in each row, with {', '.join(FIELDS)}"))
    return rows


def read_pairs(model: trained.Trained, rows: list[tuple[str, dict]]) -> dict[str, np.ndarray]:
    """Return {"clean", "corrupted": ids (P, N), "answer", "other": ids (P,)} of P rows. rows: result of `read_rows`.

    Raises UserError if a text is missing or invalid, or if "answer" or "other" is not a single token. All clean and
    corrupted texts, also of different rows, must have the same number of tokens.
    """
    pairs: list[tuple] = []
    for place, row in rows:
        texts = [(f"{place}{field}", row.get(field)) for field in FIELDS]
        for name, text in texts:
            missing = f"{name} is missing or empty. A pair has {', '.join(FIELDS)}"
            errors.refuse((text is None or text == "", missing), (not isinstance(text, str), f"{name} must be text"))
        ids = [prompts.read_prompt(model, text, name)[0] for name, text in texts[:2]]
        pairs.append((*ids, *(read_token(model, text, name) for name, text in texts[2:])))
        for (name, _), id_N in zip(texts, ids, strict=False):
            sizes = f"{rows[0][0]}clean has {len(pairs[0][0])} tokens and {name} has {len(id_N)} tokens"
            rule = "A patch replaces the token at the same position: give texts with the same number of tokens"
            errors.refuse((len(id_N) != len(pairs[0][0]), f"{sizes}. {rule}"))
    return {field: np.array(ids) for field, ids in zip(FIELDS, zip(*pairs, strict=True), strict=True)}


def read_token(model: trained.Trained, text: str, name: str) -> int:
    """Return the id of a text of one token. Raises UserError for another number of tokens.

    If the model has no tokenizer, the text is the id itself. Also raises it for an id outside the vocabulary.
    name: what messages call the text.
    """
    if not prompts.has_tokenizer(model):
        ids = prompts.parse_ids(model, text, name, f"{name}='3'")
    else:
        ids = model.tokenizer.encode(text, specials=False)
    shown = f"{name} = {text!r} has {len(ids)} tokens, and only the logits of single tokens are compared"
    errors.refuse((len(ids) != 1, f"{shown}. In many vocabularies a space belongs to the token: ' a'"))
    return int(ids[0])


def compute(model: trained.Trained, pairs: dict[str, np.ndarray]) -> tuple[list[Grid], tuple[float, float]]:
    """Return a grid (layers, positions), a grid (layers, heads), and the mean logit differences (corrupted, clean).

    pairs: result of `read_pairs`. A logit difference is the logit of "answer" minus that of "other". A cell is the
    share of the difference between the two means that is restored if the corrupted texts get this activation of the
    clean ones. Raises UserError if the means are equal.
    """
    clean_PN, corrupted_PN, answer_P, other_P = pairs.values()
    index_P = np.arange(len(clean_PN))

    def measure(edit: dict, inputs_PN: np.ndarray = corrupted_PN) -> jax.Array:
        logits_PW, _ = model.run(inputs_PN, edit=edit, at=-1)
        return (logits_PW[index_P, answer_P] - logits_PW[index_P, other_P]).mean()

    corrupted, clean = float(measure({})), float(measure({}, clean_PN))
    same = "The clean and the corrupted text have the same logit difference, so a patch has nothing to restore"
    errors.refuse((clean == corrupted, f"{same}. Give two different texts and two different tokens"))
    _, look = model.run(clean_PN, look=tuple(PLACES), at=-1)
    grids = []
    for name in PLACES:
        value_MI = np.asarray(inside.patch(measure, name, look[name], batch=max(1, BATCH // clean_PN.size)))
        labels = [f"{i + 1}" for i in range(value_MI.shape[1])]
        if name == "hidden":  # with the tokens that all clean texts have in common
            for n in np.flatnonzero((clean_PN == clean_PN[0]).all(0)):
                labels[n] += f" {prompts.spell(model, int(clean_PN[0, n]))}"
        grids.append(Grid(name, labels, value_MI, (value_MI - corrupted) / (clean - corrupted)))
    return grids, (corrupted, clean)


def describe(pairs: dict[str, np.ndarray], corrupted: float, clean: float) -> str:
    """Return a line with the mean logit differences at which the restored share is 0 (corrupted texts) and 1 (clean).

    pairs: result of `read_pairs`.
    """
    n, N = pairs["clean"].shape
    text = f"{n:,} pair{'s' * (n > 1)} of {N} tokens. Logit difference answer - other: clean {clean:.3f}, corrupted "
    weak = ". The clean text does not favour the answer more than the corrupted one, so the shares mean nothing"
    return f"{text}{corrupted:.3f}{weak * (clean < corrupted)}"


def list_places(grids: list[Grid]) -> list[list]:
    """Return a row for each layer and index of each grid: [activation, layer, index, label, value, share].

    Layers and indices count from 1. value: the logit difference. share: the restored share (see Grid).
    """
    rows = []
    for name, labels, value_MI, share_MI in grids:
        for (m, i), value in np.ndenumerate(value_MI):
            rows.append([name, m + 1, i + 1, labels[i], float(value), float(share_MI[m, i])])
    return rows


def tabulate(rows: list[list], name: str) -> tables.Table:
    """Return a table of the MOST rows of the activation `name` with the largest |restored share|.

    rows: the result of `list_places`, one for each layer and token or head.
    """
    rows = sorted((row for row in rows if row[0] == name), key=lambda row: -abs(row[-1]))[:MOST]
    cells = [[f"{m}", label, f"{value:.3f}", f"{share:z.2f}"] for _, m, _, label, value, share in rows]
    return tables.Table(["layer", PLACES[name], "logit difference", "restored"], cells)


if __name__ == "__main__":
    commands.main(run, HELP)
