"""Fill in masked tokens with a trained model: a masked run, or a published BERT.

python -m experiments.tools.fill --checkpoint=DIR --prompt='The [MASK] sat on the mat.'
fill.run("DIR", prompt="The [MASK] sat on the mat.")

Prints and returns the text with the most likely tokens, and for each [MASK] the five most likely tokens with their
probabilities.
"""

import sys

import jax
import numpy as np

from experiments.data import tokenizer as tokenizers
from experiments.engine import errors
from experiments.pretrained import open_model
from experiments.tools import command

MASK = "[MASK]"
TOP = 5  # most likely tokens for each mask
HELP = {"prompt": "The text, with a [MASK] for each token to fill in."}


def run(
    checkpoint: command.Path,
    *,
    prompt: str = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: command.Path = "",
) -> str:
    """Print and return the text with its masks filled in, and a line for each mask. With workdir, write filled.txt."""
    model, file = command.load(checkpoint, trust, device, "masked"), command.output(workdir, "filled.txt")
    tokenizer, N = open_model.load_tokenizer(model), model.facts["N"]
    id_N = encode(tokenizer, prompt, N)
    p_NW = np.asarray(jax.nn.softmax(model(id_N[None])[0]))
    p_NW = p_NW[id_N == tokenizer.mask, : tokenizer.size]  # a model may have more rows than tokens
    return command.report(table(tokenizer, id_N, p_NW), file)


def encode(tokenizer: tokenizers.Tokenizer, text: str, N: int) -> np.ndarray:
    """Return the token ids of the text, with the mask token for each [MASK].

    Raises UserError for a text without a [MASK], or of more than N tokens.
    """
    if tokenizer.mask is None:
        raise errors.UserError("the tokenizer of this model has no mask token ([MASK] or <mask>): choose another model")
    parts, name = text.split(MASK), tokenizer.name(tokenizer.mask)
    if tokenizer.mask in tokenizer.encode(name):
        id_N = tokenizer.encode(text.replace(MASK, name))
    else:  # a tokenizer of this project, which reads [MASK] as six letters
        pieces = [tokenizer.encode(parts[0], specials=False)]
        for part in parts[1:]:
            pieces += [[tokenizer.mask], tokenizer.encode(part, specials=False)]
        id_N = np.concatenate(pieces).astype(np.int32)
    masks, n = len(parts) - 1, len(id_N)
    unmarked = masks == 0 or np.sum(id_N == tokenizer.mask) != masks
    errors.refuse(
        (
            unmarked,
            f"write {MASK} for each token to fill in, whatever the model calls its mask: --prompt='The {MASK} sat'",
        ),
        (n > N, f"the prompt has {n} tokens, and the model reads {N}. Shorten the prompt."),
    )
    return id_N


def table(tokenizer: tokenizers.Tokenizer, id_N: np.ndarray, p_NW: np.ndarray) -> str:
    """Return the text with its masks filled in, and a line with the most likely tokens of each mask.

    p_NW: the probabilities of the tokens, one row for each mask in id_N.
    """
    filled_N = id_N.copy()
    filled_N[id_N == tokenizer.mask] = p_NW.argmax(-1)
    lines = [tokenizer.decode(filled_N.tolist())]
    for number, p_W in enumerate(p_NW, 1):
        likely = np.argsort(-p_W, kind="stable")[:TOP].tolist()
        tokens = ", ".join(f"{tokenizer.decode([w]) or tokenizer.name(w)!r} {p_W[w]:.3f}" for w in likely)
        lines.append(f"  {MASK} {number}: {tokens}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(command.main(run, HELP, sys.argv))
