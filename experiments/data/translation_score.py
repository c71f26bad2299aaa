"""Scores of translations against references that people wrote. Needs the extra `[text]`."""

import importlib.util
import itertools
import re
from collections.abc import Sequence
from typing import Any

from experiments.data import files as data_files

SCRIPTS = {  # of languages without spaces between words
    "kana": re.compile("[\u3040-\u30ff]"),
    "han": re.compile("[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"),
    "unspaced": re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]"),
}


def scores(translations: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return {"chrf": chrF, "bleu": BLEU}, from 0 to 100 (Popovic 2015, Papineni et al. 2002).

    chrF has 2-fold weighted recall and character 6-grams. Both are computed over all sentences together, with
    sacrebleu's defaults except for the tokenizer of BLEU (`choose_tokenizer`). references: one or more for each
    translation. Raises UserError if sacrebleu is missing.
    """
    return {name: score.score for name, (score, _) in compute(translations, references).items()}


def choose_tokenizer(references: Sequence[Sequence[str]]) -> str:
    """Return the name of sacrebleu's tokenizer for the language of the references.

    13a if spaces separate words; zh for Chinese; ja-mecab for Japanese, or char if it is not installed; char for Thai,
    Lao, Khmer and Burmese.
    """
    letters = [c for sentences in references for sentence in sentences for c in sentence if c.isalpha()]
    count = {name: sum(map(bool, map(script.match, letters))) for name, script in SCRIPTS.items()}
    share = {name: n / max(len(letters), 1) for name, n in count.items()}
    if share["kana"] > 0.1:
        return "ja-mecab" if all(map(importlib.util.find_spec, ("MeCab", "ipadic"))) else "char"
    return "zh" if share["han"] > 0.3 else "char" if share["unspaced"] > 0.3 else "13a"


def format_scores(translations: Sequence[str], references: Sequence[Sequence[str]]) -> str:
    """Return a line for chrF and one for BLEU, each with the signature by which others can repeat it (Post 2018).

    references[i]: the references of translations[i]. Raises UserError if sacrebleu is missing.
    """
    scores = compute(translations, references).values()
    return "\n".join(score.format(signature=str(metric.get_signature())) for score, metric in scores)


def compute(translations: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, tuple[Any, Any]]:
    """Return {name: (score of sacrebleu, the metric that computed it)}. references[i]: those of translations[i]."""
    inputs = list(translations), [list(sentences) for sentences in itertools.zip_longest(*references)]
    chosen = metrics(choose_tokenizer(references))
    return {name: (metric.corpus_score(*inputs), metric) for name, metric in chosen.items()}


def metrics(tokenizer: str = "13a") -> dict[str, Any]:
    """Return sacrebleu's metrics {"chrf": CHRF, "bleu": BLEU}. Raises UserError if sacrebleu is missing.

    tokenizer: the name of sacrebleu's tokenizer for BLEU.
    """
    with data_files.require_extra("a score (chrF, BLEU)", extra="text"):
        from sacrebleu import metrics as library
    # force: without it, 100 sentences that end in " ." print a warning
    return {"chrf": library.CHRF(), "bleu": library.BLEU(force=True, tokenize=tokenizer)}
