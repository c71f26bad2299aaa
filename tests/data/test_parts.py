"""What a file's name says of its part is taken at its word, what is no text is refused, and a text fits into memory."""

import bz2
import gzip
import io
import lzma
import pathlib
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
import tiny

from experiments import language
from experiments.data import parts, plain, text, tokenizer
from experiments.engine import disk, errors

KING = b"A king who reads is worth two kings who fight. " * 20


def write(folder, **contents):
    """Files of these contents; a name's __ stands for a folder, and each content differs from the others."""
    for name, content in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def corpus(folder, *names, **larger):
    write(folder, **{name: name.encode() * 50 for name in names}, **{n: n.encode() * k for n, k in larger.items()})
    return str(folder)


def became(found):
    """The files (which hold their own names) of the training and the evaluation part."""
    return [sorted({bytes(content).decode()[: len(content) // 50] for content in part}) for part in found[1:3]]


# Names.


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("train.txt", "train"),
        ("wiki.train.tokens", "train"),
        ("ptb.valid.txt", "valid"),
        ("TinyStories-V2-valid.txt", "valid"),
        ("Train-00000-of-00002.txt.gz", "train"),
        ("dev.en", "valid"),
        ("validation/a.txt", "valid"),
        ("data/val/train_a.txt", "valid"),  # the outermost
        ("test_2016_flickr.en", "test"),
        ("test2016.en", "test"),
        ("TEST", "test"),
        ("training.txt", "train"),
        ("testset.txt", "test"),
        ("newstest2014.de", "test"),
        ("tst2012.en", "test"),
        ("retraining.txt", ""),
        ("latest.txt", ""),
        ("contest/attest.txt", ""),
        ("tests/evaluate.txt", ""),
        ("train-test.txt", ""),  # two at once
        ("train_test/dev.txt", "valid"),
    ],
)
def test_the_part_that_a_name_tells(path, part):
    assert parts.of_name(pathlib.PurePath(path)) == part


@pytest.mark.parametrize(
    ("names", "train", "evaluation", "words"),
    [
        # the folder of the issue, of which train.txt was held out, and test.txt trained on
        (["train.txt", "valid.txt", "test.txt"], ["train.txt"], ["valid.txt"], "test.txt left alone"),
        (["wiki.train.tokens", "wiki.test.tokens"], ["wiki.train.tokens"], ["wiki.test.tokens"], "to evaluate"),
        (["train/a", "train/b", "dev/a", "test/a"], ["train/a", "train/b"], ["dev/a"], "test/a left alone"),
        (["train.txt", "valid.txt", "README"], ["train.txt"], ["valid.txt"], "README left out"),
        (["corpus.txt", "more.txt", "test.txt"], ["corpus.txt", "more.txt"], ["test.txt"], "test.txt to evaluate"),
        # those of IWSLT, and of one whose test set has a number
        (
            ["train.en", "tst2012.en", "tst2013.en"],
            ["train.en"],
            ["tst2012.en", "tst2013.en"],
            "tst2013.en to evaluate",
        ),
        (["europarl.en", "test2016.en"], ["europarl.en"], ["test2016.en"], "test2016.en to evaluate"),
        (["training.txt", "validation.txt", "testing.txt"], ["training.txt"], ["validation.txt"], "testing.txt left"),
        (["train-0", "train-1", "train-2", "train-3", "val"], None, ["val"], "train-0 and 3 more to train on"),
    ],
)
def test_names_tell_what_a_file_becomes(tmp_path, names, train, evaluation, words):
    found = text.load(corpus(tmp_path, *names))
    assert became(found) == [train or names[:-1], evaluation]
    assert f"{tmp_path}: by their names, " in found.said and words in found.said
    assert text.load(str(tmp_path)) == found


def test_a_program_named_train_is_not_all_that_a_folder_of_programs_has_to_train_on(tmp_path):
    """What is named train is smaller than the rest, so the rest is no README."""
    found = text.load(corpus(tmp_path, "train.py", "test.py", "a.py", "b.py", "c.py"))
    assert became(found) == [["a.py", "b.py", "c.py", "train.py"], ["test.py"]]


def test_a_small_file_is_not_all_that_a_folder_of_programs_is_evaluated_on(tmp_path):
    write(tmp_path, **{"requirements/dev.txt": b"pytest\n", "test.sh": b"pytest\n"})
    found = text.load(corpus(tmp_path, **{f"{name}.py": 500 for name in "abcdefgh"}))
    assert "by their contents" in found.said
    write(tmp_path, **{"requirements/dev.txt": b"pytest\n" * 50})
    assert "requirements/dev.txt to evaluate" in text.load(str(tmp_path)).said


@pytest.mark.parametrize(
    "names",
    [
        ["a.txt", "b.txt", "c.txt"],
        ["train-1", "train-2"],
        ["a.py", "b.py", "test_a.py"],
        ["a.py", "b.py", "c.py", "train.py", "test_a.py"],
    ],
)
def test_where_names_tell_no_parts_contents_do_and_it_is_said(tmp_path, names):
    found = text.load(corpus(tmp_path, *names))
    (held,) = became(found)[1]
    assert set(held) != set(names) and f"by their contents, {parts.listed(sorted({*names} - {held}))}" in found.said
    assert f"{held} to evaluate" in found.said


def test_named_parts_that_cannot_be_used_are_refused(tmp_path):
    for names, complaint in (
        (["valid.txt", "test.txt"], "every file is named as one to evaluate .*text.source must have some to train on"),
        (["test/a.txt"], "every file is named"),
    ):
        with pytest.raises(errors.UserError, match=complaint):
            text.load(corpus(tmp_path / names[0].replace("/", "_"), *names))
    write(tmp_path / "empty", **{"train.txt": KING, "valid.txt": b""})
    with pytest.raises(errors.UserError, match=r"the part valid holds no text \(.*valid.txt\)"):
        text.load(str(tmp_path / "empty"))
    write(tmp_path / "test", **{"a.txt": KING})
    assert text.load(str(tmp_path / "test" / "a.txt")).said == ""  # a file alone is what it is, wherever it lies


def test_what_is_evaluated_and_trained_on_is_counted(tmp_path):
    write(tmp_path, **{"train/a": b"a" * 90, "train/b": b"b" * 90, "valid/a": b"a" * 90, "valid/c": b"c" * 90})
    found = text.load(str(tmp_path))
    assert "(1 of 2 texts to evaluate are trained on, too)" in found.said and len(found.evaluation) == 2


def test_a_run_says_which_file_became_what(tmp_path):
    write(tmp_path, **{"train.txt": KING * 2, "valid.txt": KING[:99], "test.txt": KING})
    settings = tiny.settings("language", text__source=str(tmp_path))
    found = language.read(settings, language.OBJECTIVES["causal"])
    assert len(found.train_T) == 2 * len(KING) and len(found.evaluation_T) == 99
    said = f"{tmp_path}: by their names, train.txt to train on; valid.txt to evaluate; test.txt left alone"
    assert found.lines[0] == said


# What is no text.


def npz():
    file = io.BytesIO()
    np.savez(file, x=np.arange(99))
    return file.getvalue()


def npy():
    file = io.BytesIO()
    np.save(file, np.arange(99))
    return file.getvalue()


def tarred():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        made.addfile(tarfile.TarInfo("a" * 99), io.BytesIO())
    return file.getvalue()


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a.txt", KING)
    return file.getvalue()


STRANGE = {
    "a.parquet": (b"PAR1\x15\x04\x15" + KING, "a Parquet table"),
    "a.png": (b"\x89PNG\r\n\x1a\n" + KING, "a PNG image"),
    "a.jpg": (b"\xff\xd8\xff\xe0" + KING, "a JPEG image"),
    "a.pdf": (b"%PDF-1.7\n" + KING, "a PDF document"),
    "a.npz": (npz(), "a zip archive"),
    "a.npy": (npy(), "a NumPy array"),
    "a.zip": (zipped(), "a zip archive .*unpack it"),
    "a.pkl": (b"\x80\x04\x95" + KING, "a pickle"),
    "a.tar": (tarred(), "a tar archive"),
    "a.tgz": (gzip.compress(tarred()), "a tar archive"),
    "a.xz": (lzma.compress(KING), "packed with xz: unpack it|packed with xz, .*unpack it"),
    "a.bz2": (bz2.compress(KING), "packed with bzip2"),
    "twice.gz": (gzip.compress(gzip.compress(KING)), "packed with gzip twice"),
    "utf16.txt": (KING.decode().encode("utf-16"), "text in UTF-16, not text in UTF-8: convert it"),
    "utf32.txt": (KING.decode().encode("utf-32"), "text in UTF-32, not text in UTF-8: convert it"),
    "utf16-without-mark.txt": (KING.decode().encode("utf-16-le"), "holds a NUL at byte 1,"),
    "late.txt": (KING + b"\0" + KING, f"holds a NUL at byte {len(KING)},"),
    "late.txt.gz": (gzip.compress(KING + b"\0"), f"holds a NUL at byte {len(KING)},"),
    "very_late.txt": (b"a" * (2 * plain.CHUNK + 5) + b"\0", f"holds a NUL at byte {2 * plain.CHUNK + 5},"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_text_is_refused(tmp_path, name):
    content, kind = STRANGE[name]
    write(tmp_path, **{name: content})
    with pytest.raises(errors.UserError, match=rf"{name} .*({kind}).*; leave it out"):
        text.load(str(tmp_path / name))


def test_a_folder_with_some_files_that_are_no_text_tells_the_first_and_how_many(tmp_path):
    write(tmp_path, **{name: KING[n:] for n, name in enumerate(["a.md", "z.md"])}, **{"b/b.png": b"\x89PNG\r\n"})
    with pytest.raises(errors.UserError, match="b/b.png is a PNG image, not text in UTF-8; leave it out"):
        text.load(str(tmp_path))
    write(tmp_path, **{"c.npy": npy(), "d.png": b"\x89PNG\r\n"})
    with pytest.raises(errors.UserError, match=r"b.png is a PNG .* \(it is one of 3 such files among 5\); leave"):
        text.load(str(tmp_path))


def test_text_in_utf8_and_its_relatives_is_text(tmp_path):
    """No byte but NUL is strange: latin-1, a form feed, an escape, a mark at the beginning."""
    write(tmp_path, a="\ufeffnaïve\f\x1b[1m漢".encode() + bytes(range(1, 256)), b="naïve".encode("latin-1") * 9)
    found = text.load(str(tmp_path))
    assert len(found.train + found.evaluation) == 2


def test_gzip_is_read_and_what_is_damaged_is_refused(tmp_path):
    write(tmp_path, **{"a.txt": KING, "a.txt.gz": gzip.compress(KING), "gzip": gzip.compress(KING[:99]) * 2})
    assert text.load(str(tmp_path / "a.txt.gz"))[1:] == text.load(str(tmp_path / "a.txt"))[1:]
    assert b"".join(sum(text.load(str(tmp_path / "gzip"))[1:3], [])) == KING[:99] * 2
    whole = gzip.compress(KING)
    wrong = whole[:-8] + bytes(b ^ 1 for b in whole[-8:-4]) + whole[-4:]
    for content in (whole[:-1], whole[:-9], whole[:5], wrong, whole + b"more", b"\x1f\x8b\x08\0" + KING):
        write(tmp_path, **{"b.gz": content})
        with pytest.raises(errors.UserError, match=r"b.gz is a damaged gzip file"):
            text.load(str(tmp_path / "b.gz"))


# Memory.


def test_a_small_gzip_file_is_not_unpacked_into_more_than_there_is(tmp_path, monkeypatch):
    write(tmp_path, **{"a.gz": gzip.compress(b"a" * 2**26, 1), "zeros.gz": gzip.compress(bytes(2**26), 1)})
    monkeypatch.setattr(disk, "host_memory", lambda: 10 * 2**20)
    tracemalloc.start()
    with pytest.raises(errors.UserError, match=r"the text in .*a.gz needs 12 MiB of memory, and there are 10 MiB"):
        text.load(str(tmp_path / "a.gz"))
    with pytest.raises(errors.UserError, match=r"zeros.gz holds a NUL at byte 0"):
        text.load(str(tmp_path / "zeros.gz"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20


def test_a_text_of_holes_is_not_read_to_its_end(tmp_path):
    """2 GB of them took 10 GB and half a minute."""
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.write(KING)
        file.truncate(2**31)
    tracemalloc.start()
    with pytest.raises(errors.UserError, match=rf"sparse.txt holds a NUL at byte {len(KING)}|needs 6 GiB of memory"):
        text.load(str(tmp_path / "sparse.txt"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20


def test_a_folder_is_measured_as_a_whole_before_it_is_read(tmp_path, monkeypatch):
    corpus(tmp_path, "a", "b", "c")
    monkeypatch.setattr(disk, "host_memory", lambda: 3 * 150)
    assert text.load(str(tmp_path)).train
    monkeypatch.setattr(disk, "host_memory", lambda: 3 * 150 - 1)
    monkeypatch.setattr(plain, "read", None)
    with pytest.raises(errors.UserError, match="the text .* needs 450 bytes of memory, and there are 449"):
        text.load(str(tmp_path))


@pytest.mark.parametrize(("kind", "copies"), [("bytes", 1), ("characters", text.COPIES)])
@pytest.mark.parametrize("names", [["a.txt"], ["train.txt", "train2.txt", "valid.txt"]])
def test_a_text_takes_its_own_size_and_that_of_its_ids(tmp_path, monkeypatch, kind, copies, names):
    """Not 4 bytes an id, and not 8 where they are counted; as large a part as a run may take is what is asked for."""
    rng, size = np.random.default_rng(0), 2**23 // len(names)
    letters = "".join(map(chr, range(97, 97 + 26))) * 40 + "".join(map(chr, range(0x100, 0x200)))  # ids of two bytes
    for name in names:
        content = "".join(letters[i] for i in rng.integers(0, len(letters), 2**12)) + "😀"  # 4 bytes a letter as str
        (tmp_path / name).write_bytes((content.encode() * (size // 2**12))[: size - 1] + name[:1].encode())
    settings = tiny.settings("language", text__source=str(tmp_path), text__tokenizer=kind)
    monkeypatch.setattr(language, "PIECE", 2**16)
    monkeypatch.setattr(tokenizer, "CHUNK", 2**16)
    tracemalloc.start()
    found = language.read(settings, language.OBJECTIVES["causal"])
    language.token_counts(found.train_T, W=found.tokenizer.size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    joined = len(names) > 2 and kind == "bytes"  # once more where texts are joined
    assert found.train_T.dtype == (np.uint8 if kind == "bytes" else np.uint16)
    assert peak < (copies + joined) * 2**23 + 4 * 2**20


def test_counts_are_those_of_the_whole(monkeypatch):
    token_T = np.random.default_rng(0).integers(0, 7, 1000).astype(np.uint8)
    monkeypatch.setattr(language, "PIECE", 13)
    assert np.array_equal(language.token_counts(token_T, W=9), np.bincount(token_T, minlength=9))


def test_characters_are_made_piece_by_piece_and_none_is_cut(monkeypatch):
    document = "aé漢😀 b".encode() * 7
    whole = tokenizer.make("characters", [document])
    ids = whole.encode(document.decode())
    for chunk in range(4, 12):
        monkeypatch.setattr(tokenizer, "CHUNK", chunk)
        assert tokenizer.make("characters", [document]) == whole
        assert np.array_equal(whole.encode(document.decode()), ids) and np.array_equal(whole.join([document]), ids)
        for at in range(20):
            with pytest.raises(errors.UserError, match=rf"not UTF-8 text .byte {at}, near"):
                tokenizer.make("characters", [b"a" * at + b"\xff" + document])
