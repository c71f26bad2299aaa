"""A byte-level BPE learned from a run's text: its tokens, the separator of documents, and its cache."""

import random
import time

import hypothesis
import numpy as np
import pytest
import small_files
import tiny
import tokenizers
from errors import raises
from hypothesis import strategies as st
from small_files import KING, hide_local_data  # noqa: F401

from experiments.config import errors
from experiments.data import bpe, corpus as corpora, perplexity, pretrained_tokenizer, text, tokenization

DOCUMENTS = st.lists(st.text(st.sampled_from("ab c\n<é€😀"), max_size=13), min_size=1, max_size=4)


def make(folder, name: str = "bpe:300", **contents: bytes):
    """Return the tokenizer of a folder's text, and the text."""
    small_files.write(folder, **{"train.txt": KING, "valid.txt": KING[:99]} | contents)
    _, train, evaluation, _ = text.load(str(folder))
    return pretrained_tokenizer.make(name, train, specials=("[MASK]",), evaluation=evaluation), train


def test_tokens_are_learned_once_for_equal_texts(tmp_path, monkeypatch, capsys):
    tokenizer, part = make(tmp_path / "a")
    ids = tokenizer.join(part)
    assert 258 < tokenizer.size <= 300 and len(ids) < len(KING) / 4 and tokenizer.decode(ids) == KING.decode()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.mask) == (0, 0, 1) and tokenizer.decode([0]) == ""
    assert tokenizer.encode("A [MASK] who").tolist()[1:2] == [1]  # [MASK] includes the space before it
    files = bpe.train([KING[:7], KING[7:]], W=300, specials=("[MASK]",))
    assert files == tokenizer.files
    assert make(tmp_path / "c", "bpe:9000")[0].size < 400  # there are no more pairs to merge
    monkeypatch.setattr(bpe, "LONG", 1)
    monkeypatch.setattr(bpe, "LEARNED", 2 * len(KING))
    contents = {"train/1.txt": KING, "train/2.txt": KING[::-1], "train/3.txt": KING[::-1] + b" ", "train.txt": b""}
    sampled, _ = make(tmp_path / "d", **contents)  # learned from the first and third of three equally long documents
    assert "2 documents" in capsys.readouterr().out
    assert sampled.files == bpe.train([KING, b"\0", KING[::-1] + b" "], W=300, specials=("[MASK]",))
    monkeypatch.setattr(bpe, "train", None)
    same, _ = make(tmp_path / "b")  # the same text in another folder
    assert same.files == tokenizer.files


def test_the_files_of_a_tokenizer_keep_its_separator_of_documents(tmp_path):
    files = bpe.train([KING.replace(b". ", b".\n\n")], W=300, specials=())
    tokenizer = pretrained_tokenizer.read(small_files.write(tmp_path, **files))
    ids = tokenizer.join([b"A king\n\n\0", b"  who"]).tolist()
    assert ids == [*tokenizer.encode("A king\n\n"), 0, *tokenizer.encode("  who")]
    assert "ĊĊ" in map(tokenizer.name, ids)  # no token spans two documents


def test_the_name_of_the_separator_in_a_text_is_counted(tmp_path):
    contents = {f"{part}/{i}.txt": KING + b"<|endoftext|> " * i for part in ("train", "valid") for i in range(3)}
    source = small_files.write(tmp_path / "texts", **contents)
    settings = tiny.settings("language", text__source=str(source), text__tokenizer="bpe:300")
    lines = "\n".join(corpora.read_corpus(settings.text, ()).lines)
    assert "<|endoftext|> separates documents" in lines and "contains <|endoftext|> 3 times" in lines


@pytest.mark.parametrize(
    ("name", "part"), [("bpe:257", 258), ("bpe:2000000", "1,048,576"), ("bpe", "bpe:8192"), ("bpe:8k", "bpe:8192")]
)
def test_an_invalid_number_of_tokens_is_refused(tmp_path, name, part):
    with raises(errors.UserError, name, part):
        make(tmp_path, name)


def test_text_that_is_not_utf8_is_refused_and_nothing_is_cached(tmp_path):
    with raises(errors.UserError, "train.txt", "= bytes"):
        make(tmp_path, **{"train.txt": KING + b"\xff"})
    assert not list((tmp_path / "cache").rglob("tokenizer*.json"))


@hypothesis.given(documents=DOCUMENTS, cuts=st.lists(st.integers(0, 40), max_size=5))
@hypothesis.settings(deadline=None, max_examples=60)
def test_the_size_of_a_text_does_not_depend_on_its_pieces(documents, cuts):
    content = "\0".join(documents).encode()
    ends = [0, *sorted(cuts), len(content)]
    pieces = [content[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    words = sum(len(document.encode().split()) for document in documents)
    assert perplexity.size(pieces) == (sum(len(document.encode()) for document in documents), words)
    assert perplexity.size(pieces, first="é").bytes == perplexity.size(pieces).bytes - 2


def test_perplexities_follow_their_definitions():
    p_T = np.array([0.5, 0.1, 0.25, 0.9])
    metrics = perplexity.measure(-np.log(p_T).sum(), tokens=4, text=perplexity.Size(11, 2))
    np.testing.assert_allclose(metrics["token_perplexity"], np.prod(1 / p_T) ** (1 / 4))
    np.testing.assert_allclose(metrics["word_perplexity"], np.prod(1 / p_T) ** (1 / 2))
    np.testing.assert_allclose(metrics["bits_per_byte"], -np.log2(p_T).sum() / 11)
    assert np.isfinite(perplexity.measure(1e5, tokens=4, text=perplexity.Size(4, 1))["word_perplexity"])
    for size, has_words in (((50, 1), True), ((51, 1), False), ((9, 0), False)):  # text without spaces has no words
        metrics = perplexity.measure(9.0, tokens=9, text=perplexity.Size(*size))
        assert ("word_perplexity" in metrics) == has_words and {"bits_per_byte", "token_perplexity"} <= metrics.keys()


def test_a_difference_between_text_and_decoded_ids_is_described(tmp_path):
    tokenizer, part = make(tmp_path / "a")
    for same in (part, [" ⏎ café 漢\0\n\n".encode()]):
        assert perplexity.find_difference(tokenizer, same) == ""
    assert "<|endo" in perplexity.find_difference(tokenizer, [b"one <|endoftext|> more"])
    letters = tokenization.make("characters", [b"a king"], evaluation=[b"a queen"])
    assert perplexity.find_difference(letters, [b"a king\0king"]) == ""
    assert perplexity.find_difference(letters, [b"a king\0a queen"]) == "'a queen' becomes 'a [UNK][UNK]'"
    assert perplexity.find_difference(tokenization.make("bytes", []), [b"\xff"]) == ""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "king": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.Lowercase()
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    published = pretrained_tokenizer.Published(library, {})
    assert published.unknown == 2 and "'A king'" in perplexity.find_difference(published, [b"A king"])


def test_a_long_document_has_its_special_tokens_once(monkeypatch):
    """The pieces of a document do not repeat the special tokens."""
    monkeypatch.setattr(tokenization, "LONGEST", 40)
    monkeypatch.setattr(tokenization, "PIECE", 10)
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2}, unk_token="a"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["[CLS]", "[SEP]"])
    library.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    published = pretrained_tokenizer.Published(library, {})
    for lengths in ((3,), (100,), (3, 100, 2), (100, 50), (20, 20, 21), (7, 200)):
        text = "\0".join("a\n" * n for n in lengths).encode()
        expected = [id for n in lengths for id in [0, *[2] * n, 1]]
        for step in (1, 7, 33, 1000):
            pieces = [text[at : at + step] for at in range(0, len(text), step)]
            assert published.join(pieces).tolist() == expected, (lengths, step)


def test_learning_text_without_spaces_takes_linear_time(capsys):
    """Without cuts, these 200,000 letters took 24 seconds of processor time, and half as many 6 seconds."""
    latin = "".join(random.Random(0).choices("abcdefghijklmnop", k=100_000))
    chinese = latin.translate({code: code + 0x4E00 for code in b"abcdefghijklmnop"})
    began = time.process_time()
    library = bpe.learn([latin + chinese], W=600, specials=["<|endoftext|>"])
    assert time.process_time() - began < 2
    assert f"{200_000 // bpe.RUN:,} places" in capsys.readouterr().out
    for letters in (latin[:1000], chinese[:1000]):
        ids = library.encode(letters).ids
        assert library.decode(ids) == letters and len(ids) < 0.7 * len(letters.encode())


def test_text_with_spaces_is_not_cut(capsys):
    for content in (KING.decode() * 9, "x" * (bpe.RUN - 1) + " " + "1." * bpe.RUN + "\n" * (bpe.RUN - 1)):
        assert [*bpe.cut([content, content])] == [content, content]
    assert capsys.readouterr().out == ""
    content = "a " + "x" * (2 * bpe.RUN + 3) + " " * bpe.RUN + "b"
    assert [len(piece) for piece in bpe.cut([content])] == [2 + bpe.RUN, bpe.RUN, 3 + bpe.RUN, 1]


# Token ids

SPACES = "a king's  two\n\n  kings,\n who  are\t\t worth 22 é漢  \n   \n\n\n\t \xa0 \xa0\x1c\x1c"
SPECIALS = ["<|endoftext|>", tokenizers.AddedToken("[MASK]", lstrip=True, rstrip=True)]
LIBRARY = bpe.learn([SPACES, KING.decode()] * 3, W=400, specials=SPECIALS)
PUBLISHED = pretrained_tokenizer.Published(LIBRARY, {}, {"tokenizer.json": LIBRARY.to_str().encode()})


@pytest.mark.parametrize("kind", ["bytes", "characters", "published", "of another run"])
def test_a_large_text_is_encoded_once_to_a_file(tmp_path, monkeypatch, kind):
    """The ids equal those in memory, and an interruption leaves no file."""
    contents = {f"{name}.txt": b"%d " % seed * 3 + KING * (1 + seed % 5) for seed, name in enumerate("abcdefghij")}
    part = text.load(str(small_files.write(tmp_path / "texts", **contents))).train
    tokenizer = PUBLISHED
    if kind != "published":
        tokenizer = pretrained_tokenizer.make("bytes" if kind == "bytes" else "characters", part)
    if kind == "of another run":
        tokenizer = pretrained_tokenizer.OfRun("characters", tokenizer.characters, ())
    expected = tokenizer.join(part)
    for module, name in ((tokenization, "BATCH"), (tokenization, "PIECE"), (tokenization, "LONGEST")):
        monkeypatch.setattr(module, name, 700)
    assert corpora.encode(tokenizer, part).tolist() == expected.tolist() and not list(tmp_path.rglob("*.ids"))
    monkeypatch.setattr(text, "LARGE", 1)
    encode_text = type(tokenizer).encode_text

    def encode_and_interrupt(self, text):
        yield next(encode_text(self, text))
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tokenizer), "encode_text", encode_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        corpora.encode(tokenizer, part)
    monkeypatch.setattr(type(tokenizer), "encode_text", encode_text)
    for _ in range(2):
        ids = corpora.encode(tokenizer, part)
        assert ids.dtype == expected.dtype and len(ids) == len(expected)
        indices = np.array([[0, 7], [len(expected) - 1, 3]])
        assert np.array_equal(ids[indices], expected[indices]) and np.array_equal(ids[:], expected)
        monkeypatch.setattr(type(tokenizer), "encode_text", None)  # the second time, the file is read
    assert {file.suffix for file in (tmp_path / "cache/tfm/tokens").iterdir()} == {".ids", ".lock"}
