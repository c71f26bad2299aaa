"""The token ids of a large text are written once, to a file."""

import numpy as np
import pytest
from small_files import KING, elsewhere, write  # noqa: F401
from tokenizers import AddedToken

from experiments.data import bpe, pretrained_tokenizer, text, tokenizer, tokens

pytestmark = pytest.mark.usefixtures("elsewhere")


SPACES = "a king's  two\n\n  kings,\n who  are\t\t worth 22 é漢  \n   \n\n\n\t \xa0 \xa0\x1c\x1c"
SPECIALS = ["<|endoftext|>", AddedToken("[MASK]", lstrip=True, rstrip=True)]
LIBRARY = bpe.learn([SPACES, KING.decode()] * 3, W=400, specials=SPECIALS)
PUBLISHED = pretrained_tokenizer.Published(LIBRARY, {}, {"tokenizer.json": LIBRARY.to_str().encode()})


@pytest.mark.parametrize("kind", ["bytes", "characters", "published", "of another run"])
def test_a_large_text_is_encoded_once_to_a_file(tmp_path, monkeypatch, kind):
    """The same ids as in memory; an interruption leaves no file."""
    contents = {f"{name}.txt": b"%d " % seed * 3 + KING * (1 + seed % 5) for seed, name in enumerate("abcdefghij")}
    part = text.load(str(write(tmp_path / "texts", **contents))).train
    chosen = PUBLISHED
    if kind != "published":
        chosen = pretrained_tokenizer.make("bytes" if kind == "bytes" else "characters", part)
    if kind == "of another run":
        chosen = pretrained_tokenizer.OfRun("characters", chosen.characters, ())
    joined = chosen.join(part)
    for module, name in ((pretrained_tokenizer, "BATCH"), (tokenizer, "PIECE"), (tokenizer, "LONGEST")):
        monkeypatch.setattr(module, name, 700)
    assert tokens.encode(chosen, part).tolist() == joined.tolist() and not list(tmp_path.rglob("*.ids"))
    monkeypatch.setattr(text, "LARGE", 1)
    encode_text = type(chosen).encode_text

    def interrupted(self, text):
        yield next(encode_text(self, text))
        raise KeyboardInterrupt

    monkeypatch.setattr(type(chosen), "encode_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens.encode(chosen, part)
    monkeypatch.setattr(type(chosen), "encode_text", encode_text)
    for _ in range(2):
        mapped = tokens.encode(chosen, part)
        assert mapped.dtype == joined.dtype and len(mapped) == len(joined)
        places = np.array([[0, 7], [len(joined) - 1, 3]])
        assert np.array_equal(mapped[places], joined[places]) and np.array_equal(mapped[:], joined)
        monkeypatch.setattr(type(chosen), "encode_text", None)  # the second time, the file is read
    assert {file.suffix for file in (tmp_path / "cache/tfm/tokens").iterdir()} == {".ids", ".lock"}
