"""Hidden words of a text, filled in by a trained model that sees both sides (E27)."""

import pathlib

import jax
import numpy as np

from experiments import model as models
from experiments.data import vocabulary
from experiments.engine import config, errors, mesh, terminal, workdir
from experiments.engine import run as runs
from experiments.pretrained import open_model
from tfm import head

WRITES = False  # nothing, unless --workdir is given
MASK = "[MASK]"
SHOWN = 5  # likeliest words for each hidden one


def run(settings: config.Settings, folder: pathlib.Path | None) -> runs.Result:
    """Print the text of the config with each [MASK] filled in, and the likeliest words for each."""
    if settings.prompts:
        raise errors.UserError("prompts is not used here: give one text, as --config.prompt='The [MASK] sat'")
    mesh.start(settings.device)
    made = open_model.open(settings.checkpoint)
    open_model.expect(made, "masked")
    words = open_model.words(made)
    id_N = hidden(words, settings.prompt)
    if len(id_N) > made.facts["N"]:
        raise errors.UserError(
            f"the prompt has {len(id_N)} tokens, and the context of the model holds {made.facts['N']} in all"
        )
    fields = open_model.fields(made, config.beside(settings.model, made.model, made.path))
    model = models.language(fields, answer=head.masked_word, **made.facts)
    params = open_model.checked(made, model.init)
    settings.refuse_unused()
    file = workdir.new_file(folder, "filled.txt") if folder is not None else None
    logits = jax.jit(lambda params, w_BN: model.apply(params, w_BN, mask=models.masked(fields, None))[0])
    p_NW = np.asarray(jax.nn.softmax(logits(params, id_N[None])[0]))
    told = table(words, settings.prompt, p_NW[id_N == words.mask, : words.size])  # rows beyond the words stand for none
    terminal.say(told, "\n")
    if file is not None:
        workdir.write_new(file, (told + "\n").encode())
    return runs.Result(folder, {"text": told})


def hidden(words: vocabulary.Vocabulary, text: str) -> np.ndarray:
    """The ids of the text, with that of a hidden word for each [MASK]."""
    parts = text.split(MASK)
    if len(parts) == 1:
        raise errors.UserError(f"the prompt must have a {MASK} for each hidden word: --config.prompt='The {MASK} sat'")
    if words.mask is None:
        raise errors.UserError("the tokenizer of this model has no word that stands for a hidden one")
    name = words.name(words.mask)
    if words.mask in words.encode(name):
        id_N = words.encode(text.replace(MASK, name))
    else:  # a tokenizer of ours, to which [MASK] is six letters
        found = [words.encode(parts[0], specials=False)]
        for part in parts[1:]:
            found += [[words.mask], words.encode(part, specials=False)]
        id_N = np.concatenate(found).astype(np.int32)
    if np.sum(id_N == words.mask) != len(parts) - 1:
        raise errors.UserError(f"the prompt has another word for a hidden one than {MASK}: write {MASK} for each")
    return id_N


def table(words: vocabulary.Vocabulary, text: str, p_NW: np.ndarray) -> str:
    """The text with its N hidden words filled in, and for each a line of the likeliest ones and their probabilities."""
    lines = [filled(words, text.split(MASK), p_NW.argmax(-1).tolist())]
    for number, p_W in enumerate(p_NW, 1):
        likeliest = np.argsort(-p_W, kind="stable")[:SHOWN]
        shown = ", ".join(f"{words.decode([w]) or words.name(w)!r} {p_W[w]:.3f}" for w in likeliest.tolist())
        lines.append(f"  {MASK} {number}: {shown}")
    return "\n".join(lines)


def filled(words: vocabulary.Vocabulary, parts: list[str], ids: list[int]) -> str:
    """The parts of the text as they are, with the word of an id between two of them."""
    text, run = parts[0], []  # words without text between them may be the bytes of one character
    for id, part in zip(ids, parts[1:], strict=True):
        run.append(id)
        if part:
            text, run = text + between(words, run, text) + part, []
    return text + between(words, run, text) if run else text


def between(words: vocabulary.Vocabulary, ids: list[int], before: str) -> str:
    """The text of the ids after this one, without a space that it has already and the ## of a word that goes on."""
    alone = [words.decode([id]) for id in ids]
    found = words.decode(ids) if all(alone) else "".join(a or words.name(id) for a, id in zip(alone, ids, strict=True))
    found = found.removeprefix("##") or found
    return (found.lstrip() or found) if not before or before[-1].isspace() else found
