"""The token ids of a large text are written once to a file, and then read from it."""

import numpy as np
import pytest
from small_files import KING, hide_local_data, write  # noqa: F401
from tokenizers import AddedToken

from experiments.data import bpe, pretrained_tokenizer, text, tokenization, tokens

pytestmark = pytest.mark.usefixtures("hide_local_data")


SPACES = "a king's  two\n\n  kings,\n who  are\t\t worth 22 é漢  \n   \n\n\n\t \xa0 \xa0\x1c\x1c"
SPECIALS = ["<|endoftext|>", AddedToken("[MASK]", lstrip=True, rstrip=True)]
LIBRARY = bpe.learn([SPACES, KING.decode()] * 3, W=400, specials=SPECIALS)
PUBLISHED = pretrained_tokenizer.Published(LIBRARY, {}, {"tokenizer.json": LIBRARY.to_str().encode()})


@pytest.mark.parametrize("kind", ["bytes", "characters", "published", "of another run"])
def test_a_large_text_is_encoded_once_to_a_file(tmp_path, monkeypatch, kind):
    """The ids equal those in memory, and an interruption leaves no file."""
    contents = {f"{name}.txt": b"%d " % seed * 3 + KING * (1 + seed % 5) for seed, name in enumerate("abcdefghij")}
    part = text.load(str(write(tmp_path / "texts", **contents))).train
    tokenizer = PUBLISHED
    if kind != "published":
        tokenizer = pretrained_tokenizer.make("bytes" if kind == "bytes" else "characters", part)
    if kind == "of another run":
        tokenizer = pretrained_tokenizer.OfRun("characters", tokenizer.characters, ())
    expected = tokenizer.join(part)
    for module, name in ((tokenization, "BATCH"), (tokenization, "PIECE"), (tokenization, "LONGEST")):
        monkeypatch.setattr(module, name, 700)
    assert tokens.encode(tokenizer, part).tolist() == expected.tolist() and not list(tmp_path.rglob("*.ids"))
    monkeypatch.setattr(text, "LARGE", 1)
    encode_text = type(tokenizer).encode_text

    def encode_and_interrupt(self, text):
        yield next(encode_text(self, text))
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tokenizer), "encode_text", encode_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokens.encode(tokenizer, part)
    monkeypatch.setattr(type(tokenizer), "encode_text", encode_text)
    for _ in range(2):
        ids = tokens.encode(tokenizer, part)
        assert ids.dtype == expected.dtype and len(ids) == len(expected)
        indices = np.array([[0, 7], [len(expected) - 1, 3]])
        assert np.array_equal(ids[indices], expected[indices]) and np.array_equal(ids[:], expected)
        monkeypatch.setattr(type(tokenizer), "encode_text", None)  # the second time, the file is read
    assert {file.suffix for file in (tmp_path / "cache/tfm/tokens").iterdir()} == {".ids", ".lock"}
