"""Hidden words filled in by a trained model: a masked run made here, or a published BERT.

python -m experiments.tools.fill --checkpoint=DIR --prompt='The [MASK] sat on the mat.'
fill.run("DIR", prompt="The [MASK] sat on the mat.")

Prints the text with the likeliest words in it, and for each [MASK] the five likeliest with their probabilities, and
returns this text.
"""

import os
import sys

import jax
import numpy as np

from experiments.data import tokenizer
from experiments.engine import errors
from experiments.pretrained import open_model
from experiments.tools import command

MASK = "[MASK]"
SHOWN = 5  # likeliest words for each hidden one


@command.tool(prompt="The text, with a [MASK] for each hidden word.")
def run(
    checkpoint: str | os.PathLike,
    *,
    prompt: str = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> str:
    """The prompt with each [MASK] filled in, and the likeliest words for each."""
    model = open_model.open(checkpoint, trust=trust)
    open_model.expect(model, "masked")
    words = open_model.words(model)
    id_N, N = hidden(words, prompt), model.facts["N"]
    if len(id_N) > N:
        raise errors.UserError(f"the prompt has {len(id_N)} tokens, and the context of the model holds {N} in all")
    p_NW = np.asarray(jax.nn.softmax(model(id_N[None])[0]))
    shown = table(words, prompt, p_NW[id_N == words.mask, : words.size])  # further rows are no words
    return command.tell(shown, workdir, "filled.txt")


def hidden(words: tokenizer.Tokenizer, text: str) -> np.ndarray:
    """The ids of the text, with that of a hidden word for each [MASK]."""
    parts = text.split(MASK)
    if len(parts) == 1:
        raise errors.UserError(f"the prompt must have a {MASK} for each hidden word: --prompt='The {MASK} sat'")
    if words.mask is None:
        raise errors.UserError("the tokenizer of this model has no word that stands for a hidden one")
    name = words.name(words.mask)
    if words.mask in words.encode(name):
        id_N = words.encode(text.replace(MASK, name))
    else:  # a tokenizer of ours, to which [MASK] is six letters
        pieces = [words.encode(parts[0], specials=False)]
        for part in parts[1:]:
            pieces += [[words.mask], words.encode(part, specials=False)]
        id_N = np.concatenate(pieces).astype(np.int32)
    if np.sum(id_N == words.mask) != len(parts) - 1:
        raise errors.UserError(f"the prompt has another word for a hidden one than {MASK}: write {MASK} for each")
    return id_N


def table(words: tokenizer.Tokenizer, text: str, p_NW: np.ndarray) -> str:
    """The text with its N hidden words filled in, and for each a line of the likeliest ones and their probabilities."""
    lines = [filled(words, text.split(MASK), p_NW.argmax(-1).tolist())]
    for number, p_W in enumerate(p_NW, 1):
        likeliest = np.argsort(-p_W, kind="stable")[:SHOWN]
        shown = ", ".join(f"{words.decode([w]) or words.name(w)!r} {p_W[w]:.3f}" for w in likeliest.tolist())
        lines.append(f"  {MASK} {number}: {shown}")
    return "\n".join(lines)


def filled(words: tokenizer.Tokenizer, parts: list[str], ids: list[int]) -> str:
    """The parts of the text as they are, with the word of an id between two of them."""
    text, together = parts[0], []  # words without text between them may be the bytes of one character
    for id, part in zip(ids, parts[1:], strict=True):
        together.append(id)
        if part:
            text, together = text + between(words, together, text) + part, []
    return text + between(words, together, text) if together else text


def between(words: tokenizer.Tokenizer, ids: list[int], before: str) -> str:
    """The text of the ids after this one, without a space that it has already and the ## of a word that goes on."""
    alone = [words.decode([id]) for id in ids]
    text = words.decode(ids) if all(alone) else "".join(a or words.name(id) for a, id in zip(alone, ids, strict=True))
    text = text.removeprefix("##") or text
    return (text.lstrip() or text) if not before or before[-1].isspace() else text


if __name__ == "__main__":
    sys.exit(run.main(sys.argv))
