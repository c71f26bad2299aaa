"""How near translations come to those that people wrote. Needs the extra `[text]`."""

import importlib.util
import itertools
import re
from collections.abc import Sequence
from typing import Any

from experiments.engine import errors

SCRIPTS = {  # of languages without spaces between words
    "kana": re.compile("[\u3040-\u30ff]"),
    "han": re.compile("[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"),
    "unspaced": re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]"),
}


def scores(found: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """chrF (Popovic 2015: 2-fold weighted recall, 6-grams of characters) and BLEU (Papineni et al. 2002), 0 .. 100.
    Both over all sentences together, by sacrebleu's defaults, but for the words of BLEU (`words_by`); a sentence may
    have several references."""
    every = metrics(words_by(references)).items()
    return {name: metric.corpus_score(list(found), _translators(references)).score for name, metric in every}


def words_by(references: Sequence[Sequence[str]]) -> str:
    """Return the name of sacrebleu's tokenizer for the language of the references: 13a if spaces stand between words;
    zh for Chinese; ja-mecab for Japanese, or char if it is not installed; char for Thai, Lao, Khmer and Burmese."""
    letters = [c for some in references for one in some for c in one if c.isalpha()]
    share = {
        name: sum(map(bool, map(script.match, letters))) / max(len(letters), 1) for name, script in SCRIPTS.items()
    }
    if share["kana"] > 0.1:
        return "ja-mecab" if all(map(importlib.util.find_spec, ("MeCab", "ipadic"))) else "char"
    return "zh" if share["han"] > 0.3 else "char" if share["unspaced"] > 0.3 else "13a"


def signed(found: Sequence[str], references: Sequence[Sequence[str]]) -> str:
    """The same for a person, a line for each, behind the signature by which others can repeat it (Post 2018)."""
    told = [
        (metric, metric.corpus_score(list(found), _translators(references)))
        for metric in metrics(words_by(references)).values()
    ]
    return "\n".join(score.format(signature=str(metric.get_signature())) for metric, score in told)


def _translators(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """As the library wants them: one list of sentences per translator, None where he has none."""
    return [list(some) for some in itertools.zip_longest(*references)]


def metrics(tokenizer: str = "13a") -> dict[str, Any]:
    """The metrics by name; tokenizer: what makes the words of BLEU. Raises UserError where `sacrebleu` is missing."""
    try:
        from sacrebleu import metrics as found  # an extra: only here, where it is needed
    except ImportError as error:
        raise errors.UserError('chrF and BLEU need the library sacrebleu: pip install -e ".[text]"') from error
    # force: text that is not tokenised may end in " ."; without it, 100 such sentences print a warning
    return {"chrf": found.CHRF(), "bleu": found.BLEU(force=True, tokenize=tokenizer)}
