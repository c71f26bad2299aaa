"""Sentences translated by a trained model, a run of the experiment translation, and how good a test's translations are.

python -m experiments.tools.translate --checkpoint=DIR --file=test.en --reference=test.es --workdir=OUT
translate.run("DIR", file="test.en", reference=("test.es",), workdir="OUT")

DIR is the run's folder; a line of each file is a sentence, and of several references each has a translation of all.
Prints chrF and BLEU of the whole file, greedily and with a beam of 4, each behind the signature of sacrebleu; without a
reference the translations. OUT gets those of the beam, line by line, as translations.txt.
"""

import os
import pathlib
import sys

import numpy as np

from experiments import translation
from experiments.data import files, pairs, translation_score
from experiments.engine import errors, log
from experiments.pretrained import open_model
from experiments.tools import command

BATCH = 64  # sentences that are translated together
LEAST = 0.2  # share of a text's words that are common ones of a language, from which on it looks like it


@command.tool(file="The sentences, one a line.", reference="Their translations; several files may be given.")
def run(
    checkpoint: str | os.PathLike,
    *,
    file: str | os.PathLike = "",
    reference: tuple[str, ...] = (),
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> list[str]:
    """The translations of the file's lines, of an empty one and of one that is too long for the model ''."""
    if not str(file):
        raise errors.UserError("say what to translate: --file=test.en")
    given = [file, *([reference] if isinstance(reference, str) else reference)]
    translation_score.metrics() if given[1:] else None  # a missing library is said before the work, not after it
    model = open_model.open(checkpoint, trust=trust)
    open_model.expect(model, "translation")
    sources, *translators = pairs.parallel([files.on_disk(pathlib.Path(name)) for name in given])
    write = command.output(workdir, "translations.txt")
    if not any(sources):
        raise errors.UserError(f"{file} holds no sentence")
    words = pairs.Subwords(open_model.words(model).library)
    N, B = model.facts["N"], len(sources)
    ways = translation.translator(model.network(), words, N=N, batch=min(BATCH, B))(model.params, sources)
    text, long = "\n".join(ways["beam"]), B - int(np.sum(pairs.padded(words, sources, N=N)[1]))
    told = [f"{B:,} sentences; {long:,} of more than {N - 1} tokens, which are translated by nothing"]
    said = open_model.saved(model.path / "data.json")
    alike = {side: pairs.looks_like(sources, said[side]) for side in translation.SIDES if side in said}
    if len(alike) == 2 and alike["target"] > max(2 * alike["source"], LEAST):
        told[0] = f"warning: {file} looks like what this model translates into, not from (pairs.reverse)\n{told[0]}"
        print(told[0].partition("\n")[0], file=sys.stderr, flush=True) if not translators else None
    for way, some in ways.items() if translators else ():
        told += [f"{way}:", translation_score.signed(some, list(zip(*translators, strict=True)))]
    log.say("\n".join(told if translators else [text]), "\n")
    write(text)
    return ways["beam"]


if __name__ == "__main__":
    sys.exit(run.main(sys.argv))
