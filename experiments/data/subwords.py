"""Between sentences and ids: byte-level byte-pair encoding (Sennrich et al. 2016), trained here on the training part.

Ids 0, 1, 2 are [PAD], [BOS], [EOS]; the 256 bytes and what they are merged into come after them. No text is a special:
a sentence that contains the letters "[EOS]" is encoded as these letters.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from experiments.data import tokenizer
from experiments.engine import errors

SPECIALS = ("[PAD]", "[BOS]", "[EOS]")
PAD, BOS, EOS = range(len(SPECIALS))
BYTES = 256


@dataclasses.dataclass(frozen=True)
class Subwords:
    """Ids 0 .. W-1: specials, bytes, merges. A merge is a pair of strings in which a letter stands for a byte."""

    merges: tuple[tuple[str, str], ...]

    @property
    def size(self) -> int:
        """W, the number of all ids."""
        return len(SPECIALS) + self._model.get_vocab_size()

    def encode(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each sentence, without specials. Raises UserError for what is not Unicode text."""
        encoded = self._model.encode_batch([tokenizer.checked(sentence) for sentence in sentences])
        return [np.array(sentence.ids, np.int32) + len(SPECIALS) for sentence in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text up to the first [EOS], other specials left out; what is not UTF-8 as U+FFFD.

        ValueError for ids outside 0 .. W-1.
        """
        id_T = np.asarray(ids, np.int64).reshape(-1)
        if id_T.size and not 0 <= id_T.min() <= id_T.max() < self.size:
            raise ValueError(f"ids must lie between 0 and {self.size - 1}")
        id_T = id_T[: np.append(np.flatnonzero(id_T == EOS), len(id_T))[0]]
        return self._model.decode((id_T[id_T >= len(SPECIALS)] - len(SPECIALS)).tolist())

    def names(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Each id by itself, for a figure: its text, or the name of the special."""
        return [SPECIALS[i] if i < len(SPECIALS) else self.decode([i]) for i in np.asarray(ids).tolist()]

    def to_json(self) -> dict:
        """What `from_json` needs."""
        return {"kind": "subwords", "specials": list(SPECIALS), "merges": [list(pair) for pair in self.merges]}

    @functools.cached_property
    def _model(self) -> Any:
        pieces = dict.fromkeys(_bytes() + ["".join(pair) for pair in self.merges])  # two merges may make the same piece
        model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(self.merges))
        return _byte_level(model)


def train(sentences: Iterable[str], *, W: int) -> Subwords:
    """W ids or fewer (where the text has no more pairs to merge), the same for the same sentences in any order.

    Raises:
      UserError: a W without room for the specials and the bytes; a sentence that is not Unicode text; no `tokenizers`.
    """
    least = len(SPECIALS) + BYTES
    if W < least:
        raise errors.UserError(f"a vocabulary of subwords needs at least {least} ids (bytes, specials), not {W}")
    library = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=W - len(SPECIALS), initial_alphabet=_bytes(), special_tokens=[], show_progress=False
    )
    library.train_from_iterator(map(tokenizer.checked, sentences), trainer)
    merges = json.loads(library.to_str())["model"]["merges"]  # before tokenizers 0.20: "a b"
    return Subwords(tuple(tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges))


def from_json(saved: dict) -> Subwords:
    """The subwords that `to_json` described. Raises UserError where the description does not hold together."""
    if set(saved) != {"kind", "specials", "merges"} or saved["kind"] != "subwords":
        raise errors.UserError("saved subwords have the entries kind (subwords), specials and merges, and no others")
    if saved["specials"] != list(SPECIALS):
        raise errors.UserError(f"saved subwords have the specials {', '.join(SPECIALS)}, not {saved['specials']}")
    known = set(_bytes())
    for pair in saved["merges"] if isinstance(saved["merges"], list) else [None]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise errors.UserError(f"the merges of saved subwords are a list of pairs of strings, not {pair!r}")
        if not known.issuperset(pair):
            raise errors.UserError(f"a merge of saved subwords has a part that no merge before it makes: {pair!r}")
        known.add("".join(pair))
    return Subwords(tuple((first, second) for first, second in saved["merges"]))


def _byte_level(model: Any) -> Any:
    """The model between text and the letters that stand for bytes."""
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _bytes() -> list[str]:
    """The letters that stand for the 256 bytes, in the order in which training numbers them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())
