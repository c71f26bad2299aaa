"""Score the heads of a model: what each attends to, how directional it is, and what its output is worth.

python -m experiments.tools.heads --checkpoint=RUN --output=heads.csv --figure=heads.png
python -m experiments.tools.heads --checkpoint=VIT --file=photographs
heads.run("RUN")

RUN is a run's folder or a published model: GPT-2, Llama, BERT, ViT, ... A model of texts reads random token ids that
are repeated once, an image classifier the images of --file. The columns:

* previous, duplicate, induction: mean attention weight on the token before, on the same token earlier, and on the token
  after that one (Olsson et al. 2022). entropy: of the weights, in nats
* s: symmetry of U_q^T U_k, from -1 (skew) to 1 (symmetric); d: its directionality, negative if the key's side dominates
  (Saponati et al. 2025). skew: how many singular values hold 90 % of the squared norm of its skew part (Jamil and
  Kapadia 2026)
* worth: how much worse the predictions become if the output of this head is replaced by its mean over all tokens, in
  nats. For a model that predicts the next token it is the increase of its loss on the tokens that repeat, for others
  the divergence KL(p || p') of its predictions
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command as commands
from experiments.config import errors, settings as configs
from experiments.data import image_folder, inputs as tool_inputs
from experiments.figures import inside as figures
from experiments.model import variants
from experiments.pretrained import trained
from experiments.studies import tables
from tfm import inside, symmetry

# Columns, and how the figure shows them.
COLUMNS: dict[str, dict[str, Any]] = {
    "previous": {"title": "attends to the token before"},
    "duplicate": {"title": "to the same token, earlier"},
    "induction": {"title": "to the token after that"},
    "entropy": {"title": "entropy of the weights, nats", "limit": 0},
    "s": {"title": "symmetry of U_q^T U_k", "is_signed": True},
    "d": {"title": "directionality of U_q^T U_k", "is_signed": True},
    "skew": {"title": "rank of its skew part", "limit": 0},
    "worth": {"title": "worse without the head, nats", "limit": 0, "is_signed": True},
}
TOKEN_SCORES = ("previous", "duplicate", "induction")  # columns that need texts
PLACES = 12  # rows of the printed table; the CSV file has all heads
TOKENS = 50  # of a sequence, by default
MOST_IMAGES = 32
BATCH, LOGITS = 256, 2**27  # sequences, and logits, that are computed together
KINDS = ("causal", "masked", "classes", "tokens", "synthetic", "image")
Columns = dict[str, np.ndarray]  # {column: values (M, H)}, in the order of COLUMNS
HELP = {
    "file": "Images for a classifier: an image, or a folder of images.",
    "sequences": "The number of sequences of random token ids.",
    "tokens": "The number of tokens of each, even; the second half repeats the first. 0: 50, or fewer if need be.",
    "seed": "The seed of the random token ids.",
    "output": "A new .csv file with a row for each head.",
    "figure": "A new figure (.png, .svg or .pdf) with a panel for each column.",
}


def run(
    checkpoint: commands.Path,
    *,
    file: commands.Path = "",
    sequences: int = 4,
    tokens: int = 0,
    seed: int = 0,
    output: commands.Path = "",
    figure: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> str:
    """Print and return the table of the heads without which the predictions worsen most.

    output, figure: new files with all heads. sequences, tokens, seed: of the random inputs of a model of texts. file:
    the images for an image classifier.
    """
    files = commands.check_files(workdir, "heads.txt", output, figure)
    model = commands.load(checkpoint, trust, device, *KINDS)
    check_probabilities(model)
    if model.kind == "image":
        columns, line = measure_images(model, str(file))
    else:
        unused = f"--file = {file} is for images, and this model reads random token ids. Leave it out"
        errors.refuse((str(file), unused))
        columns, line = measure_texts(model, sequences=sequences, tokens=tokens, seed=seed)
    M, H = columns["worth"].shape
    header = ["layer", "head", *columns]
    rows = [[m + 1, h + 1, *(float(x_MH[m, h]) for x_MH in columns.values())] for m, h in np.ndindex(M, H)]
    lines = [line, tables.align(tabulate(header, rows))]
    lines += [f"the {PLACES} heads of {M * H} that are worth most; --output writes all of them"] * (M * H > PLACES)
    labels = [f"{h + 1}" for h in range(H)]
    panels = [figures.Panel(value_MI=x_MH, labels=labels, **COLUMNS[name]) for name, x_MH in columns.items()]
    draw = functools.partial(figures.grids, panels=panels, title="scores of the heads (columns) of each layer (row)")
    return commands.finish(files, lines, lambda: (header, rows), draw)


def measure_texts(model: trained.Trained, *, sequences: int, tokens: int, seed: int) -> tuple[Columns, str]:
    """Return the heads' scores, {column: values (M, H)}, on random token ids repeated once, and a line about them.

    tokens: of a sequence; 0: TOKENS, or the context if shorter. Raises UserError unless `tokens` is even, at least 4
    and within the context, and `sequences` at least 1.
    """
    N = model.facts["N"]
    errors.refuse((N < 4, f"{model.path} reads {N} tokens, and a repeated text needs at least 4. Use another model"))
    tokens = tokens or min(TOKENS, N // 2 * 2)
    rule = f"Choose an even number from 4 to {N}, the tokens that the model reads"
    errors.refuse((not 4 <= tokens <= N or tokens % 2, f"--tokens = {tokens} is wrong. {rule}"))
    configs.at_least(1, {"--sequences": sequences})
    period = tokens // 2
    w_BN = inside.draw_repeated(jax.random.key(seed), W=model.facts["W"], B=sequences, period=period)

    def measure_loss(logits_BNW: jax.Array, plain_BNW: jax.Array) -> jax.Array:
        log_p_BNW = jax.nn.log_softmax(logits_BNW[:, period:-1])  # the first token that repeats cannot be known
        return -jnp.take_along_axis(log_p_BNW, w_BN[:, period + 1 :, None], axis=-1).mean()

    is_causal = model.kind == "causal"
    columns, loss = measure_heads(model, np.asarray(w_BN), measure_loss if is_causal else divergence, period=period)
    line = f"{sequences} sequences of {tokens} random token ids, the second half repeats the first"
    return columns, line + f", loss {loss:.3f} on the tokens that repeat" * is_causal


def measure_images(model: trained.Trained, source: str) -> tuple[Columns, str]:
    """Return the heads' scores, {column: values (M, H)}, on at most MOST_IMAGES images, and a line about the images.

    source: an image, or a folder of images.
    """
    commands.require("--file=photographs", source)
    data = tool_inputs.read_images(source)
    image_BYXZ = image_folder.read_batch(data.items[:MOST_IMAGES], model.image_format)
    columns, _ = measure_heads(model, image_BYXZ, divergence, period=1)
    columns = {name: x_MH for name, x_MH in columns.items() if name not in TOKEN_SCORES}
    n, total = len(image_BYXZ), len(data.items)
    return columns, f"{n} image{'s' * (n > 1)}" + (f", the first of {total:,}" if total > n else "")


def check_probabilities(model: trained.Trained) -> None:
    """Raise UserError for a multi-label classifier, and for a regression."""
    is_classifier = model.kind in ("classes", "image")
    several = model.facts.get("problem_type") == "multi_label_classification"
    rule = "This command needs a model that chooses one of several classes"
    other = "predicts numbers" if not several else "gives an input several classes"
    refused = is_classifier and (several or trained.is_regression(model))
    errors.refuse((refused, f"the model in {model.path} {other}. {rule}"))


def divergence(logits_BC: jax.Array, plain_BC: jax.Array) -> jax.Array:
    """Return KL(p || p') = sum_c p_c ln(p_c / p'_c), the mean over inputs (and tokens).

    p: softmax of plain_BC. p': softmax of logits_BC.
    """
    log_p_BC = jax.nn.log_softmax(plain_BC)
    return jnp.sum(jnp.exp(log_p_BC) * (log_p_BC - jax.nn.log_softmax(logits_BC)), axis=-1).mean()


def measure_heads(
    model: trained.Trained, inputs: np.ndarray, measure: Callable, *, period: int
) -> tuple[Columns, float]:
    """Return {column: values (M, H)}, in the order of COLUMNS, and the measure without edits.

    The column worth is the measure with an edit, minus the measure without it. An edit replaces the output of one head
    by its mean over inputs and tokens. Without a matrix U_q^T U_k in the score, s, d and skew are missing.
    measure(logits, logits without edits) -> a number that is smaller for better predictions. period: the number of
    tokens after which the inputs repeat.
    """
    compute = functools.partial(model.compute, model.params, inputs, None, None, output="logits")
    plain, look = compute(names=("A", "y"))
    mean_M1H1V = jnp.mean(look["y"], axis=(1, 3), keepdims=True)
    batch = max(1, min(BATCH // len(inputs), LOGITS // plain.size))
    edited_MH = inside.patch(lambda edit: measure(compute(edit)[0], plain), "y", mean_M1H1V, batch=batch)
    unedited = float(measure(plain, plain))
    scores = inside.head_scores(look["A"], period=period) | measure_forms(model) | {"worth": edited_MH - unedited}
    return {name: np.asarray(scores[name]) for name in COLUMNS if name in scores}, unedited


def measure_forms(model: trained.Trained) -> dict[str, jax.Array]:
    """Return {"s": symmetry, "d": directionality, "skew": rank of the skew part} of U_q^T U_k, each of shape (M, H).

    Without such a matrix in the score, return {}.
    """
    m = model.fields
    factors = variants.choose(m, "score").factors
    if factors is None:
        return {}

    def measure_layer(params: Any) -> dict[str, jax.Array]:
        pair = factors(params, D=m.D)
        functions = {"s": symmetry.symmetry, "d": symmetry.directionality, "skew": symmetry.skew_rank}
        return {name: jnp.broadcast_to(function(*pair), m.H) for name, function in functions.items()}

    return jax.jit(jax.vmap(measure_layer, axis_size=m.M))(model.params["blocks"]["score"])


def tabulate(header: list[str], rows: list[list]) -> tables.Table:
    """Return a table of the PLACES heads of largest `worth`, the last column. header, rows: those of the CSV file."""
    head, cells = ["layer.head", *header[2:]], []
    for m, h, *numbers in sorted(rows, key=lambda row: -row[-1])[:PLACES]:
        texts = [f"{x:.0f}" if name == "skew" else f"{x:.3f}" for name, x in zip(head[1:], numbers, strict=True)]
        cells.append([f"{m}.{h}", *texts])
    return tables.Table(head, cells)


if __name__ == "__main__":
    commands.main(run, HELP)
