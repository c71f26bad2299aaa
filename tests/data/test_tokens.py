"""The token ids of a large text are made once, in a file."""

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
def test_a_large_text_becomes_ids_once_in_a_file(tmp_path, monkeypatch, kind):
    """The same ids as in memory; an interruption leaves no file."""
    contents = {f"{name}.txt": b"%d " % seed * 3 + KING * (1 + seed % 5) for seed, name in enumerate("abcdefghij")}
    part = text.load(str(write(tmp_path / "texts", **contents))).train
    words = WORDS if kind == "library" else pretrained_tokenizer.make("characters" if kind == "others" else kind, part)
    if kind == "others":
        words = pretrained_tokenizer.OfRun("characters", words.characters, ())
    joined = words.join(part)
    for room, name in ((pretrained_tokenizer, "BATCH"), (tokenizer, "PIECE"), (tokenizer, "LONGEST")):
        monkeypatch.setattr(room, name, 700)
    assert tokens.encode(words, part).tolist() == joined.tolist() and not list(tmp_path.rglob("*.ids"))
    monkeypatch.setattr(text, "LARGE", 1)
    encode_text = type(words).encode_text

    def interrupted(self, text):
        yield next(encode_text(self, text))
        raise KeyboardInterrupt

    monkeypatch.setattr(type(words), "encode_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens.encode(words, part)
    monkeypatch.setattr(type(words), "encode_text", encode_text)
    for _ in range(2):
        found = tokens.encode(words, part)
        assert found.dtype == joined.dtype and len(found) == len(joined)
        places = np.array([[0, 7], [len(joined) - 1, 3]])
        assert np.array_equal(found[places], joined[places]) and np.array_equal(found[:], joined)
        monkeypatch.setattr(type(words), "encode_text", None)  # not asked again
    assert {file.suffix for file in (tmp_path / "cache/tfm/tokens").iterdir()} == {".ids", ".lock"}
