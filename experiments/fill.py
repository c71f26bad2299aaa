"""Hidden words of a text, filled in by a trained model that sees both sides (E27)."""

import pathlib

import jax
import numpy as np

from experiments import model as models
from experiments.engine import config, errors, mesh, trained, workdir
from experiments.engine.data import vocabulary
from tfm import head

WRITES = False  # nothing, unless --workdir is given
MASK = "[MASK]"
SHOWN = 5  # likeliest words for each hidden one


def run(settings: config.Settings, folder: pathlib.Path | None) -> None:
    """Print the text of the config with each [MASK] filled in, and the likeliest words for each."""
    mesh.start(settings.device)
    made = trained.open(settings.checkpoint)
    trained.expect(made, "masked")
    words = trained.words(made)
    id_N = hidden(words, settings.prompt)
    if len(id_N) > made.facts["N"]:
        raise errors.UserError(
            f"the prompt has {len(id_N)} tokens, and the context of the model holds {made.facts['N']} in all"
        )
    fields = trained.fields(made, settings.model.to_dict())
    model = models.language(fields, answer=head.masked_word, **made.facts)
    params = trained.checked(made, model.init)
    settings.refuse_unused()
    file = workdir.new_file(folder, "filled.txt") if folder is not None else None
    logits = jax.jit(lambda params, w_BN: model.apply(params, w_BN, mask=models.masked(fields, None))[0])
    p_NW = np.asarray(jax.nn.softmax(logits(params, id_N[None])[0]))
    told = table(words, id_N, p_NW)
    print(told)
    if file is not None:
        workdir.write(file, (told + "\n").encode())


def hidden(words: vocabulary.Vocabulary, text: str) -> np.ndarray:
    """The ids of the text, with that of a hidden word for each [MASK]."""
    parts = text.split(MASK)
    if len(parts) == 1:
        raise errors.UserError(f"the prompt must have a {MASK} for each hidden word: --config.prompt='The {MASK} sat'")
    if words.mask is None:
        raise errors.UserError("the tokenizer of this model has no word that stands for a hidden one")
    id_N = words.encode(text)
    if np.sum(id_N == words.mask) == len(parts) - 1:
        return id_N
    found = [words.encode(parts[0], specials=False)]  # a tokenizer to which [MASK] is six letters
    for part in parts[1:]:
        found += [[words.mask], words.encode(part, specials=False)]
    return np.concatenate(found).astype(np.int32)


def table(words: vocabulary.Vocabulary, id_N: np.ndarray, p_NW: np.ndarray) -> str:
    """The text filled in, and for each hidden word a line of the likeliest ones and their probabilities."""
    p_NW = p_NW[:, : words.size]  # rows beyond the words stand for none
    lines = [words.decode(np.where(id_N == words.mask, p_NW.argmax(-1), id_N))]
    for number, n in enumerate(np.flatnonzero(id_N == words.mask), 1):
        likeliest = np.argsort(-p_NW[n], kind="stable")[:SHOWN]
        shown = ", ".join(f"{words.decode([w])!r} {p_NW[n, w]:.3f}" for w in likeliest)
        lines.append(f"  {MASK} {number}: {shown}")
    return "\n".join(lines)
