"""Between sentences and ids: byte-level byte-pair encoding (Sennrich et al. 2016), trained here on the training part.

Ids 0, 1, 2 are [PAD], [BOS], [EOS]; the 256 bytes and what they are merged into come after them. No text is a special:
a sentence that contains the letters "[EOS]" is encoded as these letters.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from experiments.data import tokenizer
from experiments.engine import errors

SPECIALS = ("[PAD]", "[BOS]", "[EOS]")
PAD, BOS, EOS = range(len(SPECIALS))
LEAST = len(SPECIALS) + 256  # ids: specials and bytes


class Subwords(NamedTuple):
    """Ids 0 .. W-1: specials, bytes, merges."""

    library: tokenizers.Tokenizer

    @property
    def size(self) -> int:
        """W, the number of all ids."""
        return self.library.get_vocab_size()

    def encode(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each sentence, without specials. Raises UserError for what is not Unicode text."""
        encoded = self.library.encode_batch([tokenizer.checked(sentence) for sentence in sentences])
        return [np.array(sentence.ids, np.int32) for sentence in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text up to the first [EOS], other specials left out; what is not UTF-8 as U+FFFD."""
        known = tokenizer.listed(ids)
        return self.library.decode(known[: known.index(EOS)] if EOS in known else known)

    def names(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Each id by itself, for a figure: its text, or the name of the special."""
        return [SPECIALS[i] if i < len(SPECIALS) else self.decode([i]) for i in tokenizer.listed(ids)]


def train(sentences: Iterable[str], *, W: int) -> Subwords:
    """W ids or fewer (where the text has no more pairs to merge), the same for the same sentences in any order.

    UserError for a W without room for the specials and the bytes, and a sentence that is not Unicode text.
    """
    if W < LEAST:
        raise errors.UserError(f"a vocabulary of subwords needs at least {LEAST} ids (bytes, specials), not {W}")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=W, initial_alphabet=alphabet, special_tokens=[*SPECIALS], show_progress=False
    )
    library.train_from_iterator(map(tokenizer.checked, sentences), trainer)
    library.encode_special_tokens = True  # as the letters that they are in a text
    return Subwords(library)
