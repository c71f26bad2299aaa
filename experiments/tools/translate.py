"""Translate sentences with a run of the experiment `translation`, and score the translations.

python -m experiments.tools.translate --checkpoint=DIR --file=test.en --reference=test.es --workdir=OUT
translate.run("DIR", file="test.en", reference=("test.es",), workdir="OUT")

Each line of a file is a sentence. With a reference, the tool prints chrF and BLEU for greedy decoding and for a beam of
4, with the signatures of sacrebleu. Without one, it prints the translations. OUT/translations.txt is from the beam.
"""

import pathlib
import sys

import numpy as np

from experiments import command as commands, translation
from experiments.config import errors
from experiments.data import files as data_files, pairs, translation_score
from experiments.folder import log, records
from experiments.pretrained import trained

BATCH = 64  # sentences that are translated together
MIN_SHARE = 0.2  # the least share of common words of a language among the words of a text in this language
HELP = {"file": "The sentences, one per line.", "reference": "Their translations; repeat the flag for more files."}


def run(
    checkpoint: commands.Path,
    *,
    file: commands.Path = "",
    reference: tuple[str, ...] = (),
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> list[str]:
    """Print and return the beam search's translation of each line of `file`; '' for a line that is empty or too long.

    With `reference`, files of reference translations, print scores instead.
    """
    commands.require("--file=test.en", file)
    if reference:
        translation_score.metrics()  # raises UserError for a missing library before decoding begins
    out, model = commands.output(workdir, "translations.txt"), commands.load(checkpoint, trust, device, "translation")
    paths = [file, *([reference] if isinstance(reference, str) else reference)]
    sources, *references = pairs.align_lines([data_files.on_disk(pathlib.Path(path)) for path in paths])
    if not any(sources):
        raise errors.UserError(f"{file} is empty. It needs a sentence on each line.")
    tokenizer, N, B = pairs.Subwords(model.tokenizer.library), model.facts["N"], len(sources)
    if is_target_language(model, sources):
        print(f"warning: {file} looks like the model's target language, not its source language", file=sys.stderr)
    translate = translation.make_translator(model.network(), tokenizer, N=N, batch=min(BATCH, B))
    translations = translate(model.params, sources)
    if references:
        n_long = B - int(np.sum(pairs.pad(tokenizer, sources, N=N)[1]))
        lines = [f"{B:,} sentences; {n_long:,} of more than {N - 1} tokens, scored as empty translations"]
        for name, texts in translations.items():
            lines += [f"{name}:", translation_score.format_scores(texts, list(zip(*references, strict=True)))]
    log.say("\n".join(lines if references else translations["beam"]), "\n")
    commands.save("\n".join(translations["beam"]), out)
    return translations["beam"]


def is_target_language(model: trained.Trained, sources: list[str]) -> bool:
    """Return True if the sentences seem to be in the model's target language instead of its source language.

    The share of their words among its most common words then exceeds MIN_SHARE, and twice the share of the source.
    False for a model without such words, which runs save.
    """
    common = records.read_data(model.path)
    if not set(translation.SIDES) <= common.keys():
        return False
    source, target = (pairs.share_of_words(sources, common[side]) for side in translation.SIDES)
    return target > max(2 * source, MIN_SHARE)


if __name__ == "__main__":
    commands.main(run, HELP)
