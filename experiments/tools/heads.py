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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command as commands
from experiments.config import disk, errors, settings as configs
from experiments.data import image_folder, inputs as tool_inputs
from experiments.figures import inside as figures
from experiments.model import variants
from experiments.pretrained import trained
from experiments.studies import tables
from tfm import inside, symmetry

SCORES = ("previous", "duplicate", "induction", "entropy")
FORM = ("s", "d", "skew")
PLACES = 12  # rows of the printed table; the CSV file has all heads
TOKENS = 50  # of a sequence, by default
MOST_IMAGES = 32
BATCH, LOGITS = 256, 2**27  # sequences, and logits, that are computed together
KINDS = ("causal", "masked", "classes", "tokens", "synthetic", "image")
HELP = {
    "file": "Images for a classifier: an image, or a folder of images.",
    "sequences": "The number of sequences of random token ids.",
    "tokens": "The number of tokens of each, even; the second half repeats the first. 0: 50, or fewer if need be.",
    "seed": "The seed of the random token ids.",
    "output": "A new .csv file with a row for each head.",
    "figure": "A new figure (.png, .svg or .pdf) with a panel for each column.",
}


class Heads(NamedTuple):
    """The columns by name, (M, H) each, and a line that says on which inputs they were measured."""

    columns: dict[str, np.ndarray]
    line: str


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
    """Print and return the table of the heads that are worth most; write all heads into `output` and `figure`."""
    text_file, csv_file = commands.output(workdir, "heads.txt"), commands.output_table(output)
    picture = figures.check_output(figure)
    model = commands.load(checkpoint, trust, device, *KINDS)
    check_probabilities(model)
    if model.kind == "image":
        heads = measure_images(model, str(file))
    else:
        errors.refuse(
            (str(file), f"--file = {file} is for images, and this model reads random token ids. Leave it out")
        )
        heads = measure_texts(model, sequences=sequences, tokens=tokens, seed=seed)
    worth_MH = heads.columns["worth"]
    lines = [heads.line, tables.align(tabulate(heads.columns))]
    if worth_MH.size > PLACES:
        lines.append(f"the {PLACES} heads of {worth_MH.size} that are worth most; --output writes all of them")
    if csv_file:
        rows = [
            [m + 1, h + 1, *(float(x[m, h]) for x in heads.columns.values())] for m, h in np.ndindex(worth_MH.shape)
        ]
        lines.append(commands.save_table(csv_file, ["layer", "head", *heads.columns], rows))
    if picture:
        with disk.writing(picture):
            lines.append(f"wrote {figures.heads(picture, heads.columns)}")
    return commands.report("\n".join(lines), text_file)


def measure_texts(model: trained.Trained, *, sequences: int, tokens: int, seed: int) -> Heads:
    """Return the columns of a model of texts, on random token ids that are repeated once."""
    N = model.facts["N"]
    errors.refuse((N < 4, f"{model.path} reads {N} tokens, and a text that repeats needs at least 4"))
    tokens = tokens or min(TOKENS, N // 2 * 2)
    rule = f"Choose an even number from 4 to {N}, the tokens that the model reads"
    errors.refuse((not 4 <= tokens <= N or tokens % 2, f"--tokens = {tokens} is wrong. {rule}"))
    configs.at_least(1, {"--sequences": sequences})
    period = tokens // 2
    w_BN = inside.draw_repeated(jax.random.key(seed), W=model.facts["W"], B=sequences, period=period)
    causal = model.kind == "causal"

    def measure(logits_BNW: jax.Array, plain_BNW: jax.Array) -> jax.Array:
        if not causal:
            return divergence(logits_BNW, plain_BNW)
        log_p_BNW = jax.nn.log_softmax(logits_BNW[:, period:-1])  # the first token that repeats cannot be known
        return -jnp.take_along_axis(log_p_BNW, w_BN[:, period + 1 :, None], axis=-1).mean()

    columns, A_MBHNN = measure_heads(model, np.asarray(w_BN), measure)
    scores = inside.head_scores(A_MBHNN, period=period)
    loss = f", loss {columns.pop('plain'):.3f} on the tokens that repeat" if causal else ""
    columns.pop("plain", None)
    line = f"{sequences} sequences of {tokens} random token ids, the second half repeats the first{loss}"
    return Heads({name: np.asarray(scores[name]) for name in SCORES} | columns, line)


def measure_images(model: trained.Trained, source: str) -> Heads:
    """Return the columns of an image classifier, on at most MOST_IMAGES images."""
    commands.require("--file=photographs", source)
    data = tool_inputs.read_images(source)
    image_BYXZ = image_folder.read_batch(data.items[:MOST_IMAGES], model.image_format)
    columns, A_MBHNN = measure_heads(model, image_BYXZ, divergence)
    columns.pop("plain")
    entropy_MH = inside.head_scores(A_MBHNN, period=1)["entropy"]
    n, total = len(image_BYXZ), len(data.items)
    line = f"{n} image{'s' * (n > 1)}" + (f", the first of {total:,}" if total > n else "")
    return Heads({"entropy": np.asarray(entropy_MH)} | columns, line)


def check_probabilities(model: trained.Trained) -> None:
    """Raise UserError if the logits of a classifier are not those of classes of which one is right."""
    is_classifier = model.kind in ("classes", "image")
    several = model.facts.get("problem_type") == "multi_label_classification"
    rule = "This command needs a model that chooses one of several classes"
    other = "predicts numbers" if not several else "gives an input several classes"
    refused = is_classifier and (several or trained.is_regression(model))
    errors.refuse((refused, f"the model in {model.path} {other}. {rule}"))


def divergence(logits_BC: jax.Array, plain_BC: jax.Array) -> jax.Array:
    """Return KL(p || p') = sum_c p_c ln(p_c / p'_c), the mean over inputs (and tokens); p: of the plain logits."""
    log_p_BC = jax.nn.log_softmax(plain_BC)
    return jnp.sum(jnp.exp(log_p_BC) * (log_p_BC - jax.nn.log_softmax(logits_BC)), axis=-1).mean()


def measure_heads(model: trained.Trained, inputs: np.ndarray, measure: Any) -> tuple[dict[str, Any], jax.Array]:
    """Return the columns of the form and the worth, "plain": the measure without edits, and the weights A.

    measure(logits, logits without edits) -> a number that is smaller for better predictions.
    """
    run = functools.partial(model.runs, model.params, inputs, None, None)
    plain, activations = run({}, names=("A", "y"))
    y_MBHNV = activations["y"]
    mean_M1H1V = jnp.mean(y_MBHNV, axis=(1, 3), keepdims=True)
    batch = max(1, min(BATCH // len(inputs), LOGITS // plain.size))
    edited_MH = inside.patch(lambda edit: measure(run(edit, names=())[0], plain), "y", mean_M1H1V, batch=batch)
    unedited = float(measure(plain, plain))
    return measure_forms(model) | {"worth": np.asarray(edited_MH) - unedited, "plain": unedited}, activations["A"]


def measure_forms(model: trained.Trained) -> dict[str, np.ndarray]:
    """Return s, d and the rank of the skew part of each head; {} if the score has no matrix U_q^T U_k."""
    m = model.fields
    factors = variants.choose(m, "score").factors
    if factors is None:
        return {}

    def measure_layer(params: Any) -> tuple[jax.Array, ...]:
        pair = factors(params, D=m.D)
        return symmetry.symmetry(*pair), symmetry.directionality(*pair), symmetry.skew_rank(*pair)

    measures = jax.jit(jax.vmap(measure_layer, axis_size=m.M))(model.params["blocks"]["score"])
    return {name: np.broadcast_to(x_MH, (m.M, m.H)) for name, x_MH in zip(FORM, jax.device_get(measures), strict=True)}


def tabulate(columns: dict[str, np.ndarray]) -> tables.Table:
    """Return the rows of the heads that are worth most."""
    worth_MH = columns["worth"]
    order = np.argsort(-worth_MH, axis=None, kind="stable")[:PLACES]
    rows = []
    for m, h in np.stack(np.unravel_index(order, worth_MH.shape), axis=1):
        cells = [f"{x[m, h]:.0f}" if name == "skew" else f"{x[m, h]:.3f}" for name, x in columns.items()]
        rows.append([f"{m + 1}.{h + 1}", *cells])
    return tables.Table(["layer.head", *columns], rows)


if __name__ == "__main__":
    commands.main(run, HELP)
