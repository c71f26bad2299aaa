"""What is no text is refused, gzip is read, and a text fits into memory."""

import gzip
import io
import lzma
import tarfile
import tracemalloc

import numpy as np
import pytest
import tiny
from small_files import KING, documents, npy, npz, write, zipped

from experiments import language
from experiments.data import files, text, tokenizer
from experiments.engine import errors


def tarred():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        made.addfile(tarfile.TarInfo("a" * 99), io.BytesIO())
    return file.getvalue()


STRANGE = {
    "a.pq": (b"PAR1\x15\x04\x15" + KING, "a Parquet table"),
    "a.png": (b"\x89PNG\r\n\x1a\n" + KING, "a PNG image"),
    "a.npz": (npz(x=np.arange(99)), "a zip archive"),
    "a.zip": (zipped([("a.txt", KING)]), "a zip archive .*unpack it"),
    "a.pkl": (b"\x80\x04\x95" + KING, "a pickle"),
    "a.tgz": (gzip.compress(tarred()), "a tar archive"),
    "a.xz": (lzma.compress(KING), "packed with xz.*unpack it"),
    "twice.gz": (gzip.compress(gzip.compress(KING)), "packed with gzip twice"),
    "utf16.txt": (KING.decode().encode("utf-16"), "text in UTF-16, not text in UTF-8: convert it"),
    "utf32.txt": (KING.decode().encode("utf-32"), "text in UTF-32, not text in UTF-8: convert it"),
    "utf16-without-mark.txt": (KING.decode().encode("utf-16-le"), "holds a NUL at byte 1,"),
    "late.txt": (KING + b"\0" + KING, f"holds a NUL at byte {len(KING)},"),
    "late.txt.gz": (gzip.compress(KING + b"\0"), f"holds a NUL at byte {len(KING)},"),
    "very_late.txt": (b"a" * (2 * files.CHUNK + 5) + b"\0", f"holds a NUL at byte {2 * files.CHUNK + 5},"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_text_is_refused(tmp_path, name):
    content, kind = STRANGE[name]
    with pytest.raises(errors.UserError, match=rf"{name} .*({kind}).*; leave it out"):
        text.load(str(write(tmp_path, **{name: content}) / name))


def test_a_folder_with_some_files_that_are_no_text_tells_the_first_and_how_many(tmp_path):
    """No byte but NUL is strange: latin-1, a form feed, an escape, a mark at the beginning."""
    write(tmp_path, a="\ufeffnaïve\f\x1b[1m漢".encode() + bytes(range(1, 256)), b="naïve".encode("latin-1") * 9)
    found = text.load(str(tmp_path))
    assert len(documents(found.train) + documents(found.evaluation)) == 2
    write(tmp_path, **{"c/c.png": b"\x89PNG\r\n"})
    with pytest.raises(errors.UserError, match="c/c.png is a PNG image, not text in UTF-8; leave it out"):
        text.load(str(tmp_path))
    write(tmp_path, **{"d.npy": npy(np.arange(9)), "e.png": b"\x89PNG\r\n"})
    with pytest.raises(errors.UserError, match=r"c.png is a PNG .* \(it is one of 3 such files among 5\); leave"):
        text.load(str(tmp_path))


def test_gzip_is_read_and_what_is_damaged_is_refused(tmp_path):
    write(tmp_path, **{"a.txt": KING, "a.txt.gz": gzip.compress(KING), "gzip": gzip.compress(KING[:99]) * 2})
    both = [text.load(str(tmp_path / name)) for name in ("a.txt.gz", "a.txt")]
    for packed, plain in zip(*(found[1:3] for found in both), strict=True):
        assert (documents(packed), packed.size, packed.digest) == (documents(plain), plain.size, plain.digest)
    assert b"".join(map(b"".join, text.load(str(tmp_path / "gzip"))[1:3])) == KING[:99] * 2
    whole = gzip.compress(KING)
    wrong = whole[:-8] + bytes(b ^ 1 for b in whole[-8:-4]) + whole[-4:]
    for content in (whole[:-1], whole[:-9], whole[:5], wrong, whole + b"more", b"\x1f\x8b\x08\0" + KING):
        write(tmp_path, **{"b.gz": content})
        with pytest.raises(errors.UserError, match=r"b.gz is a damaged gzip file"):
            text.load(str(tmp_path / "b.gz"))


def test_a_text_of_holes_is_refused_where_they_begin_and_not_held(tmp_path):
    """2 GB of them took 10 GB and half a minute."""
    write(tmp_path, **{"zeros.gz": gzip.compress(bytes(2**23), 1)}, sparse=KING)
    with (tmp_path / "sparse").open("r+b") as file:
        file.truncate(2**31)
    tracemalloc.start()
    for name, at in {"sparse": len(KING), "zeros.gz": 0}.items():
        with pytest.raises(errors.UserError, match=f"{name} holds a NUL at byte {at}"):
            text.load(str(tmp_path / name))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20


@pytest.mark.parametrize("kind", ["bytes", "characters", "bytes of one file"])
def test_a_text_takes_the_memory_of_its_ids(tmp_path, monkeypatch, kind):
    """Not 4 bytes an id, and not 8 where they are counted; as large a part as a run may take is what is asked for."""
    kind, *one = kind.split(" ", 1)
    names = ["a.txt"] if one else ["train.txt", "train2.txt", "valid.txt"]
    rng, whole = np.random.default_rng(0), 2**22
    letters = "".join(map(chr, range(97, 97 + 26))) * 40 + "".join(map(chr, range(0x100, 0x200)))  # ids of two bytes
    for name in names:
        content = "".join(letters[i] for i in rng.integers(0, len(letters), 2**12)) + "😀"  # 4 bytes a letter as str
        content = content.encode()
        (tmp_path / name).write_bytes(content * (whole // len(names) // len(content)) + name[:1].encode())
    settings = tiny.settings("language", text__source=str(tmp_path), text__tokenizer=kind)
    monkeypatch.setattr(language, "PIECE", 2**16)
    monkeypatch.setattr(files, "CHUNK", 2**16)
    tracemalloc.start()
    found = language.read(settings, language.OBJECTIVES["causal"])
    language.token_counts(found.train_T, W=found.tokenizer.size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.train_T.dtype == (np.uint8 if kind == "bytes" else np.uint16)
    ids = found.train_T.nbytes + found.evaluation_T.nbytes
    assert ids <= 2 * whole and peak < 1.2 * ids + 2**20  # what grows has an eighth more than it needs
    said = f"{tmp_path}: by their names, train.txt, train2.txt to train on; valid.txt to evaluate"
    assert one or found.lines[0] == said


def test_characters_are_made_piece_by_piece_and_none_is_cut():
    document = "aé漢😀 b".encode() * 7
    whole = tokenizer.make("characters", [document])
    ids = whole.encode(document.decode())
    for chunk in (1, 2, 3, 4, 5, 7, 12):
        text = [document[first : first + chunk] for first in range(0, len(document), chunk)]
        assert tokenizer.make("characters", text) == whole and np.array_equal(whole.join(text), ids)
        for before in (b"", b"a" * 7, b"a" * 11, "a\N{GRINNING FACE}".encode()):
            with pytest.raises(errors.UserError, match=rf"not UTF-8 text .byte {len(before)}, near"):
                wrong = b"\0" + before + b"\xb6" + document
                tokenizer.make("characters", [wrong[at : at + chunk] for at in range(0, len(wrong), chunk)])


def test_what_is_not_utf8_is_told_by_its_file_and_byte(tmp_path):
    write(tmp_path, a=KING, b="é".encode() + b"\xff", c=KING * 99 + b"\xff")
    for part, told in (
        (text.whole(str(tmp_path)), "/b is not UTF-8 text .byte 2,"),
        (text.load(str(tmp_path / "c")).evaluation, f"/c is not UTF-8 text .byte {99 * len(KING)},"),
    ):
        with pytest.raises(errors.UserError, match=told):
            list(tokenizer.decoded(part))


def test_files_that_are_no_part_of_a_text_are_counted(tmp_path):
    lines = b'{"said": "a king"}\n{"said": "two kings"}\n{"said": "three"}\n' * 30
    write(
        tmp_path / "set",
        **{"a.jsonl": lines, "README.md": b"#", "b/notes.md": b"", "c.html": b"<p>", "empty.jsonl": b""},
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    said = text.load(str(tmp_path / "set"), "said").said
    assert "files skipped: 2 .md, 1 .html" in said and "links to folders not followed: 1, link" in said
    assert "empty files left out: 1" in said
    write(tmp_path / "texts", **{"a.txt": KING, "b.txt": KING[:99], "c.md": b""})
    assert text.load(str(tmp_path / "texts")).said.endswith("empty files left out: 1")
    many = {f"{c}.{c}": b"x" for c in "abcdefg"} | {"z.csv": b"said\n" + b"x\ny\n" * 30}
    assert (
        "files skipped: 1 .a, 1 .b, 1 .c and 4 others" in text.load(str(write(tmp_path / "many", **many)), "said").said
    )
