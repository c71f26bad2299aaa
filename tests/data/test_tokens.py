"""The ids of a large text are made once, in a file; an interruption and damage leave the same ids in the end."""

import numpy as np
import pytest
import tokenizers
from small_files import KING, elsewhere, write  # noqa: F401
from tokenizers import models, pre_tokenizers, trainers

from experiments.data import pretrained_tokenizer, text, tokenizer, tokens

pytestmark = pytest.mark.usefixtures("elsewhere")


def trained():
    """A byte-level BPE of a few words."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    mask = tokenizers.AddedToken("[MASK]", lstrip=True, rstrip=True)
    begin = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<|endoftext|>", mask]}
    said = [
        "a king's  two\n\n  kings,\n who  are\t\t worth 22 é漢  \n",
        KING.decode(),
        "   \n\n\n\t \xa0 \xa0\x1c\x1c",
    ] * 3
    library.train_from_iterator(said, trainers.BpeTrainer(vocab_size=400, show_progress=False, **begin))
    return library


LIBRARY = trained()
WORDS = pretrained_tokenizer.Published(LIBRARY, {}, {"tokenizer.json": LIBRARY.to_str().encode()})


@pytest.mark.parametrize("kind", ["bytes", "characters", "library", "others"])
def test_a_large_text_is_made_ids_once_and_gone_on_with_where_it_was_interrupted(tmp_path, monkeypatch, kind):
    """The same ids as in memory. A file of them that is damaged is made anew."""
    contents = {f"{name}.txt": b"%d " % seed * 3 + KING * (1 + seed % 5) for seed, name in enumerate("abcdefghij")}
    part = text.load(str(write(tmp_path / "texts", **contents))).train
    words = WORDS if kind == "library" else pretrained_tokenizer.make("characters" if kind == "others" else kind, part)
    if kind == "others":
        words = pretrained_tokenizer.OfRun("characters", words.characters, ())
    for name in ("PART", "PIECE", "LONGEST"):
        monkeypatch.setattr(tokenizer, name, 700)
    whole, n, made = words.join(part), len(list(words.parts(part))), []
    assert tokens.of(words, part).tolist() == whole.tolist() and not list(tmp_path.rglob("*.ids"))
    monkeypatch.setattr(text, "LARGE", 1)
    monkeypatch.setattr(tokens, "SAVED", 1)
    each = type(words).each

    def interrupted(self, parts):
        for ids in each(self, parts):
            made.append(ids)
            if len(made) == 5:
                raise KeyboardInterrupt
            yield ids

    monkeypatch.setattr(type(words), "each", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens.of(words, part)
    assert not list(tmp_path.rglob("*.ids"))
    for times, damage in enumerate([bytes, bytes, lambda b: b"!" + b[1:], lambda b: b[:-1], lambda b: b + b"!"], 1):
        for file in tmp_path.rglob("*.ids"):
            file.write_bytes(damage(file.read_bytes()))
        found = tokens.of(words, part)
        assert len(made) == n * max(times - 1, 1) + 1 and found.dtype == whole.dtype and len(found) == len(whole)
        places = np.array([[0, 7], [len(whole) - 1, 3]])
        assert np.array_equal(found[places], whole[places]) and np.array_equal(found[:], whole)
    assert {file.suffix for file in (tmp_path / "cache/tfm/tokens").iterdir()} == {".ids", ".json", ".lock"}
