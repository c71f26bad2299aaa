"""How near translations come to those that people wrote. Needs the extra `[text]`."""

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.engine import errors


def scores(found: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """chrF (Popovic 2015: 2-fold weighted recall, 6-grams of characters) and BLEU (Papineni et al. 2002), 0 .. 100.
    Both over all sentences together, by sacrebleu's defaults; a sentence may have several references."""
    return {
        name: metric.corpus_score(list(found), _translators(references)).score for name, metric in metrics().items()
    }


def signed(found: Sequence[str], references: Sequence[Sequence[str]]) -> str:
    """The same for a person, a line for each, behind the signature by which others can repeat it (Post 2018)."""
    told = [(metric, metric.corpus_score(list(found), _translators(references))) for metric in metrics().values()]
    return "\n".join(score.format(signature=str(metric.get_signature())) for metric, score in told)


def _translators(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """As the library wants them: one list of sentences per translator, None where he has none."""
    return [list(some) for some in itertools.zip_longest(*references)]


def metrics() -> dict[str, Any]:
    """The metrics by name. Raises UserError where `sacrebleu` is missing."""
    try:
        from sacrebleu import metrics as found  # an extra: only here, where it is needed
    except ImportError as error:
        raise errors.UserError('chrF and BLEU need the library sacrebleu: pip install -e ".[text]"') from error
    # force: text that is not tokenised may end in " ."; without it, 100 such sentences print a warning
    return {"chrf": found.CHRF(), "bleu": found.BLEU(force=True)}
