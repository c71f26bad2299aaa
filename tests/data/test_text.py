"""Files that are not text are refused, gzip is read, and a text fits into memory."""

import gzip
import tracemalloc

import numpy as np
import pytest
import tiny
from errors import raises
from small_files import KING, documents, write

from experiments import language
from experiments.config import errors
from experiments.data import corpus as corpora, files as data_files, text, tokenization

STRANGE = {
    "a.png": (b"\x89PNG\r\n\x1a\n\0", 8),
    "utf16.txt": (KING.decode().encode("utf-16"), 3),
    "late.txt": (KING + b"\0" + KING, len(KING)),
    "late.txt.gz": (gzip.compress(KING + b"\0"), len(KING)),
    "very_late.txt": (b"a" * (2 * data_files.CHUNK + 5) + b"\0", 2 * data_files.CHUNK + 5),
}


@pytest.mark.parametrize("name", STRANGE)
def test_files_with_nul_are_refused(tmp_path, name):
    """All other bytes are accepted: latin-1, a form feed, an escape."""
    write(tmp_path, a="\ufeffnaïve\f\x1b[1m漢".encode() + bytes(range(1, 256)), b="naïve".encode("latin-1") * 9)
    assert len(documents(text.load_whole(str(tmp_path)))) == 2
    content, at = STRANGE[name]
    write(tmp_path, **{name: content})
    with raises(errors.UserError, name, f"byte {at},"):
        text.load(str(tmp_path))


def test_gzip_is_read_and_a_truncated_file_is_refused(tmp_path):
    write(tmp_path, **{"a.txt": KING, "a.txt.gz": gzip.compress(KING), "gzip": gzip.compress(KING[:99]) * 2})
    packed, plain = (text.load(str(tmp_path / name))[1:3] for name in ("a.txt.gz", "a.txt"))
    facts = [[(documents(part), part.size, part.digest) for part in parts] for parts in (packed, plain)]
    assert facts[0] == facts[1]
    assert b"".join(map(b"".join, text.load(str(tmp_path / "gzip"))[1:3])) == KING[:99] * 2
    with raises(errors.UserError, "b.gz"):
        text.load(str(write(tmp_path, **{"b.gz": gzip.compress(KING)[:-1]}) / "b.gz"))


@pytest.mark.parametrize("kind", ["bytes", "characters", "bytes of one file"])
def test_a_text_takes_the_memory_of_its_ids(tmp_path, monkeypatch, kind):
    """It takes 1 or 2 bytes for each id, not 4, and not 8 while ids are counted."""
    kind, *of_one_file = kind.split(" ", 1)
    names = ["a.txt"] if of_one_file else ["train.txt", "train2.txt", "valid.txt"]
    rng, total = np.random.default_rng(0), 2**22
    # So many characters need ids of two bytes.
    letters = "".join(map(chr, range(97, 97 + 26))) * 40 + "".join(map(chr, range(0x100, 0x200)))
    for name in names:
        content = "".join(letters[i] for i in rng.integers(0, len(letters), 2**12)).encode() + "😀".encode()
        (tmp_path / name).write_bytes(content * (total // len(names) // len(content)) + name[:1].encode())
    settings = tiny.settings("language", text__source=str(tmp_path), text__tokenizer=kind)
    monkeypatch.setattr(corpora, "PIECE", 2**16)
    monkeypatch.setattr(data_files, "CHUNK", 2**16)
    tracemalloc.start()
    corpus = corpora.read_corpus(settings.text, language.OBJECTIVES["causal"])
    corpora.count_tokens(corpus.train_T, W=corpus.tokenizer.size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.train_T.dtype == (np.uint8 if kind == "bytes" else np.uint16)
    ids = corpus.train_T.nbytes + corpus.evaluation_T.nbytes
    assert ids <= 2 * total and peak < 1.2 * ids + 2**20  # a growing buffer is up to an eighth larger than its content
    assert of_one_file or "train.txt, train2.txt to train on; valid.txt to evaluate" in corpus.lines[0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 12])
def test_pieces_may_end_inside_a_character(chunk):
    def cut(document):
        return [document[first : first + chunk] for first in range(0, len(document), chunk)]

    document = "aé漢😀 b".encode() * 7
    expected = tokenization.make("characters", [document])
    assert tokenization.make("characters", cut(document)) == expected
    assert np.array_equal(expected.join(cut(document)), expected.encode(document.decode()))
    for before in (b"", b"a" * 7, b"a" * 11, "a😀".encode()):
        with raises(errors.UserError, "a document", "\\xb6"):
            tokenization.make("characters", cut(b"\0" + before + b"\xb6" + document))


def test_bytes_of_another_encoding_are_named_with_their_line(tmp_path, monkeypatch):
    """A character may be cut by the end of a chunk."""
    monkeypatch.setattr(data_files, "CHUNK", 11)
    (file,) = data_files.folder(write(tmp_path, a="one\ntwo\nthre\u00e9\n".encode() + b"\xff"))
    for read in (data_files.load_text, lambda file: [*data_files.lines(file)]):
        with raises(errors.UserError, file.name, "line 4 ", r"b'\xff'"):
            read(file)


def test_text_that_is_not_utf8_is_named_by_its_file(tmp_path):
    write(tmp_path, a=KING, b="é".encode() + b"\xff", c=KING * 99 + b"\xff")
    for part, name in ((text.load_whole(str(tmp_path)), "b"), (text.load(str(tmp_path / "c")).evaluation, "c")):
        with raises(errors.UserError, tmp_path / name, "\\xff"):
            list(tokenization.decode_pieces(part))


def test_files_that_are_not_part_of_a_text_are_counted(tmp_path):
    contents = {"a.jsonl": b'{"said": "a king"}\n{"said": "two kings"}\n' * 30, "empty.jsonl": b""}
    write(tmp_path / "set", **contents, **{"README.md": b"#", "b/notes.md": b"", "c.html": b"<p>"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    description = text.load(str(tmp_path / "set"), "said").description
    assert "files skipped: 2 .md, 1 .html" in description and "links to folders not followed: 1, link" in description
    assert "empty files left out: 1" in description
    write(tmp_path / "texts", **{"a.txt": KING, "b.txt": KING[:99], "c.md": b""})
    assert text.load(str(tmp_path / "texts")).description.endswith("empty files left out: 1")
    # A .json next to a text is not read: it may describe the text.
    assert text.load(str(write(tmp_path / "list", **{"b.json": b"[]", "b.txt": KING}))).train
    with raises(errors.UserError, "b.json", "text.field"):
        text.load(str(tmp_path / "list" / "b.json"))
    write(tmp_path / "many", **{f"{c}.{c}": b"x" for c in "abcdefg"}, **{"z.csv": b"said\n" + b"x\ny\n" * 30})
    assert "files skipped: 1 .a, 1 .b, 1 .c, ..." in text.load(str(tmp_path / "many"), "said").description
