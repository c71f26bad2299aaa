"""Fill in masked tokens with a trained model: a masked run, or a published BERT.

python -m experiments.tools.fill --checkpoint=DIR --prompt='The [MASK] sat on the mat.'
python -m experiments.tools.fill --checkpoint=DIR --file=prompts.txt --output=filled.csv
fill.run("DIR", prompt="The [MASK] sat on the mat.")

The tool prints and returns the text with the most likely tokens, and for each [MASK] the five most likely tokens with
their probabilities. Of many texts, each has a row in the file --output (docs/using_models.md).
"""

import functools
import itertools

import jax
import numpy as np

from experiments import command as commands
from experiments.config import errors
from experiments.data import inputs as tool_inputs, tokenization
from experiments.pretrained import trained
from experiments.tools import prompts

MASK = tokenization.MASK
TOP = 5  # most likely tokens for each mask
BATCH = 2**11  # tokens of a batch, each with the logits of the whole vocabulary
HELP = {"prompt": "The text, with a [MASK] for each token to fill in."}


def run(
    checkpoint: commands.Path,
    *,
    prompt: str = "",
    file: commands.Path = "",
    field: str = "",
    output: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> str:
    """Print and return each text filled in, with a line of likely tokens for each mask.

    With `output`, write the filled texts and the most likely tokens into this CSV file, and return a summary.
    """
    errors.refuse((prompt and str(file), f"--prompt and --file = {file} are both set. Give only one."))
    files = commands.check_files(workdir, "filled.txt", output)
    model = commands.load(checkpoint, trust, device, "masked")
    tokenizer, N = model.tokenizer, model.facts["N"]
    data = tool_inputs.read_texts(str(file), field, prompt)
    ids = [encode(tokenizer, text, N, name) for text, name in zip(data.items, data.names, strict=True)]
    id_BN, valid_BN = np.zeros((len(ids), N), np.int32), np.arange(N) < np.array([*map(len, ids)])[:, None]
    id_BN[valid_BN] = np.concatenate(ids)
    batch, rows, lines = max(1, BATCH // max(map(len, ids))), [], list(data.lines)
    compute = functools.partial(model.compute, jax.device_put(model.params), output="logits")
    batches = trained.in_batches(compute, trained.fetch_texts(id_BN, valid_BN), n=len(ids), batch=batch)
    logits_BNW = itertools.chain.from_iterable(logits_BNW for logits_BNW, _ in batches)
    for text, id_N, logits_NW in zip(data.items, ids, logits_BNW, strict=False):
        p_RW = np.asarray(jax.nn.softmax(logits_NW[: len(id_N)][id_N == tokenizer.mask]))
        p_RW = p_RW[:, : tokenizer.size]  # a model may have more ids than its tokenizer
        likely = ((tokenizer.show(int(p_W.argmax())), p_W.max()) for p_W in p_RW)
        rows.append([text, fill_in(tokenizer, id_N, p_RW), *itertools.chain.from_iterable(likely)])
        lines += [] if files.table else [table(tokenizer, id_N, p_RW)]
    columns = [f"{name}_{r}" for r in range(1, max(map(len, rows)) // 2) for name in ("token", "probability")]
    return commands.finish(files, lines, lambda: (["text", "filled", *columns], rows))


def encode(tokenizer: tokenization.Tokenizer, text: str, N: int, name: str = "the prompt") -> np.ndarray:
    """Return the token ids of a text, which messages call `name`.

    Raises UserError for a text without a [MASK], with another mask token such as <mask>, or of more than N tokens, and
    for a tokenizer without a mask token.
    """
    if tokenizer.mask is None:
        raise errors.UserError("this model's tokenizer has no mask token ([MASK] or <mask>). Choose another model.")
    id_N = prompts.encode(tokenizer, text)
    masks, n = text.count(MASK), len(id_N)
    rule = f"{name} needs a {MASK} for each token to fill in, whatever the model calls its mask token. "
    unmarked = (masks == 0 or np.sum(id_N == tokenizer.mask) != masks, f"{rule}Example: --prompt='The {MASK} sat'.")
    errors.refuse(unmarked, (n > N, f"{name} has {n} tokens, and the model reads at most {N}. Shorten it."))
    return id_N


def fill_in(tokenizer: tokenization.Tokenizer, id_N: np.ndarray, p_RW: np.ndarray) -> str:
    """Return the text with the most likely token for each of the R masks in id_N. p_RW: probabilities of W tokens."""
    filled_N = id_N.copy()
    filled_N[id_N == tokenizer.mask] = p_RW.argmax(-1)
    return tokenizer.decode(filled_N.tolist())


def table(tokenizer: tokenization.Tokenizer, id_N: np.ndarray, p_RW: np.ndarray) -> str:
    """Return the text with its masks filled in. For each of the R masks, a line with its most likely tokens follows.

    p_RW: the probabilities of W tokens at each mask.
    """
    lines = [fill_in(tokenizer, id_N, p_RW)]
    for number, p_W in enumerate(p_RW, 1):
        likely = np.argsort(-p_W, kind="stable")[:TOP].tolist()
        tokens = ", ".join(f"{tokenizer.show(w)!r} {p_W[w]:.3f}" for w in likely)
        lines.append(f"  {MASK} {number}: {tokens}")
    return "\n".join(lines)


if __name__ == "__main__":
    commands.main(run, HELP)
