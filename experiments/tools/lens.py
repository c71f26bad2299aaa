"""Read the tokens that a model predicts after each layer (logit lens): a language model, causal or masked.

python -m experiments.tools.lens --checkpoint=DIR --prompt='The king is in the' --figure=lens.png
python -m experiments.tools.lens --checkpoint=DIR --prompt='The king is in the' --jacobian --output=lens.csv
lens.run("DIR", prompt="The king is in the")

The model's last norm and head read the tokens after each layer (inside.logit_lens). With --jacobian they read the
first-order effect of these tokens on the last ones (inside.jacobian_lens). The right token is the next one of the
prompt; in a masked model it is the token itself, and that of a [MASK] is unknown. Rank 1 is the most likely token.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command as commands
from experiments.config import disk
from experiments.figures import inside as figures
from experiments.pretrained import trained
from experiments.studies import tables
from experiments.tools import prompts
from tfm import inside

TOP = 5  # most likely tokens
UNKNOWN = -1  # the right token, if there is none
HELP = {
    "prompt": "The text, or token ids such as '0 1 2' if the model has no tokenizer.",
    "jacobian": "Read the first-order effect of the tokens on those after the last layer.",
    "output": "A new .csv file with a row for each layer and position.",
    "figure": "A new .png, .svg or .pdf file: the most likely token of each layer and position.",
}


class Reading(NamedTuple):
    """The tokens that a lens reads after each of M layers at each of N positions."""

    token_MNR: np.ndarray  # the R most likely tokens
    p_MNR: np.ndarray  # their probabilities
    rank_MN: np.ndarray  # of the right token (`find_right`), from 1
    right_MN: np.ndarray  # the probability of the right token


def run(
    checkpoint: commands.Path,
    *,
    prompt: str = "",
    jacobian: bool = False,
    output: commands.Path = "",
    figure: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> str:
    """Print and return the rank and probability of the right tokens after each layer; write `output` and `figure`.

    The right token is the next one of the prompt, or in a masked model the token itself. jacobian: use the Jacobian
    lens, not the logit lens. workdir: a folder, which gets the result as lens.txt. HELP explains other arguments.
    """
    files = commands.check_files(workdir, "lens.txt", output, figure)
    model = commands.load(checkpoint, trust, device, "causal", "masked")
    id_N, names = prompts.read_prompt(model, prompt)
    right_N = find_right(model, id_N)
    n_bytes = 3 * 4 * model.fields.M * len(id_N) * model.facts["W"]
    disk.check_memory("the logits of all layers", n_bytes, remedy=". Shorten the --prompt")
    reading = read(functools.partial(model.run, id_N[None]), right_N, jacobian=jacobian)
    spell = functools.cache(functools.partial(prompts.spell, model))
    top_MNR = np.vectorize(spell, otypes=[object])(reading.token_MNR)
    right = ["" if id == UNKNOWN else spell(id) for id in right_N.tolist()]
    lens = "Jacobian lens" if jacobian else "logit lens"
    kind = "the next token" if model.kind == "causal" else "the token itself"
    lines = [f"{lens}: rank and probability of {kind}", tables.align(tabulate(reading, top_MNR, names, right_N))]
    draw = functools.partial(
        figures.lens,
        p_MN=np.where(right_N == UNKNOWN, np.nan, reading.right_MN),
        top_MN=top_MNR[..., 0],
        is_right_MN=reading.token_MNR[..., 0] == right_N,
        tokens=names,
        right=right,
        title=f"most likely token after each layer ({lens}), and the probability of the right one: {kind}",
    )
    return commands.finish(files, lines, lambda: list_rows(reading, top_MNR, names, right), draw)


def find_right(model: trained.Trained, id_N: np.ndarray) -> np.ndarray:
    """Return right_N: in a causal model the next id (UNKNOWN at the end), else the id itself ([MASK]: UNKNOWN)."""
    if model.kind == "causal":
        return np.append(id_N[1:], UNKNOWN)
    mask = model.tokenizer.mask if prompts.has_tokenizer(model) else None
    return np.where(id_N == mask, UNKNOWN, id_N)


def read(run: inside.Run, right_N: np.ndarray, *, jacobian: bool) -> Reading:
    """Return what a lens reads in one text: the Jacobian lens if `jacobian`, otherwise the logit lens.

    run: run(look=...) -> (logits, activations) of this text (inside.Run). right_N: the right id at each
    position (`find_right`). Where it is UNKNOWN, ignore rank_MN and right_MN of the result.
    """
    lens = inside.jacobian_lens if jacobian else inside.logit_lens
    logits_MBNW = lens(run, run(look=("hidden",))[1]["hidden"])

    def summarise(logits_NW: jax.Array) -> Reading:
        logits_NW = logits_NW.astype(jnp.float32)
        p_NW, right_N1 = jax.nn.softmax(logits_NW), jnp.maximum(right_N, 0)[:, None]
        p_NR, token_NR = jax.lax.top_k(p_NW, min(TOP, p_NW.shape[1]))
        rank_N = 1 + jnp.sum(logits_NW > jnp.take_along_axis(logits_NW, right_N1, axis=1), axis=1)
        return Reading(token_NR, p_NR, rank_N, jnp.take_along_axis(p_NW, right_N1, axis=1)[:, 0])

    return jax.device_get(jax.lax.map(summarise, logits_MBNW[:, 0]))


def tabulate(reading: Reading, top_MNR: np.ndarray, names: list[str], right_N: np.ndarray) -> tables.Table:
    """Return a row for each layer: the mean rank and probability of the right tokens, and the top tokens at a position.

    The means are over positions whose right token is known, not UNKNOWN in right_N. The position of the top tokens is
    the last one whose right token is not known, or else the last one. names: the text of each token of the prompt.
    top_MNR: the texts of the R most likely tokens.
    """
    known_N = right_N != UNKNOWN
    n = len(names) - 1 if known_N.all() else int(np.flatnonzero(~known_N)[-1])
    head = ["layer", "mean rank", "mean p", f"top at {n + 1}, {names[n]!r}", *["" for _ in top_MNR[0, 0, 1:]]]
    rows = []
    for m, texts_R in enumerate(top_MNR[:, n]):
        means = [tables.NONE] * 2
        if known_N.any():
            means = [f"{reading.rank_MN[m, known_N].mean():.1f}", f"{reading.right_MN[m, known_N].mean():.4f}"]
        tops = [f"{text!r} {p:.3f}" for text, p in zip(texts_R, reading.p_MNR[m, n], strict=True)]
        rows.append([f"{m + 1}", *means, *tops])
    return tables.Table(head, rows)


def list_rows(
    reading: Reading, top_MNR: np.ndarray, names: list[str], right: list[str]
) -> tuple[list[str], list[list]]:
    """Return the header and the rows of the CSV file: layers and positions from 1.

    top_MNR: texts of the most likely tokens. names, right: the text of each token, and of the right one ("": unknown).
    """
    M, N, R = top_MNR.shape
    header = ["layer", "position", "token", "right_token", "rank", "probability"]
    header += [f"{name}_{r}" for r in range(1, R + 1) for name in ("top", "p")]
    rows = []
    for m, n in np.ndindex(M, N):
        numbers = [reading.rank_MN[m, n], reading.right_MN[m, n]] if right[n] else ["", ""]
        tops = zip(top_MNR[m, n], reading.p_MNR[m, n], strict=True)
        rows.append([m + 1, n + 1, names[n], right[n], *numbers, *itertools.chain.from_iterable(tops)])
    return header, rows


if __name__ == "__main__":
    commands.main(run, HELP)
