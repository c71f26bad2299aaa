"""Sentence pairs are read, split by their sources, and made arrays."""

import gzip
import os
import struct
import unicodedata
import zipfile

import numpy as np
import pytest

from experiments.data import download, pair_files, pairs, subwords
from experiments.engine import batches, disk, errors

WORDS = "a king who reads is worth two kings who fight".split()
SAID = [(f"{a} {b} {c}.", f"{c} {b} {a}!") for a in WORDS for b in WORDS for c in WORDS]


def text(some) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in some).encode()


def both(loaded):
    return sorted(loaded.train + loaded.evaluation)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "said.tsv"
    path.write_bytes(text(SAID))
    return path


# Reading.


def test_lines_become_pairs_in_unicode_nfc_and_further_columns_are_ignored(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffGo.\tVe\u0301te.\r\n\nStop!  \t Para. \tby a person\nA\u2028b\tc".encode())
    assert both(pairs.load(str(tmp_path / "a.txt"))) == [("A\u2028b", "c"), ("Go.", "V\u00e9te."), ("Stop!", "Para.")]
    reverse = pairs.load(str(tmp_path / "a.txt"), reverse=True)
    assert both(reverse) == [("Para.", "Stop!"), ("V\u00e9te.", "Go."), ("c", "A\u2028b")]


def test_a_folder_and_a_zip_are_read_without_what_is_hidden_or_no_pairs(tmp_path):
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    contents = {
        "a.tsv": "a\tb",
        "sub/c.TXT": "c\td",
        "_about.txt": "no pair",
        ".x.tsv": "no",
        ".git/x.tsv": "no",
        "r": "no",
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as made:
        for name, content in contents.items():
            made.writestr(f"set/{name}", content)
    assert both(pairs.load(str(folder))) == both(pairs.load(str(tmp_path / "set.zip"))) == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a\tb\nno tab here\nc\td", "said.tsv, line 2: no second column"),
        (b"a\tb\n \n", "said.tsv, line 2: no second column"),
        (b"a\tb\nc\td\n\t\n", "line 3: the first column is empty"),
        (b"a\tb\n \tc", "line 2: the first column is empty"),
        (b"a\t\xc2\xa0\n", "line 1: the second column is empty"),
        (b"a\tb\n\xff\tc", "line 2: not UTF-8"),
        (b"\n\n", "no sentence pairs"),
        (b"a\tb\na.\tc", "not two examples that differ"),
    ],
)
def test_a_wrong_line_is_refused_by_file_and_number(tmp_path, content, words):
    (tmp_path / "said.tsv").write_bytes(content)
    with pytest.raises(errors.UserError, match=words):
        pairs.load(str(tmp_path / "said.tsv"))


@pytest.mark.parametrize(
    "name", ["../a.tsv", "/a.tsv", "x/../../a.tsv", "..\\a.tsv", "\\a.tsv", "c:/a.tsv", "../a.png"]
)
def test_a_zip_with_a_path_that_leads_out_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("good.tsv", text(SAID))
        made.writestr(name, "a\tb\nc\td")
    with pytest.raises(errors.UserError, match="leads out of it"):
        pairs.load(str(tmp_path / "a.zip"))


def test_what_unpacks_into_too_much_is_refused(tmp_path, file, monkeypatch):
    monkeypatch.setattr(pair_files, "LARGEST", 10**6)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a.tsv", b"a\tb\n" * 300_000)
    assert os.path.getsize(tmp_path / "a.zip") < 10**4
    with pytest.raises(errors.UserError, match="1200000 bytes of text, and 1000000 are allowed"):
        pairs.load(str(tmp_path / "a.zip"))
    monkeypatch.setattr(pair_files, "LARGEST", 100)
    for source in (file, file.parent):
        with pytest.raises(errors.UserError, match="100 are allowed"):
            pairs.load(str(source))


def test_a_zip_whose_header_lies_about_the_size_or_that_is_cut_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a.tsv", b"a\tb\nc\td\n" * 1000)
    whole = (tmp_path / "a.zip").read_bytes()
    lies = whole.replace(struct.pack("<L", 8000), struct.pack("<L", 8))
    assert lies != whole
    damaged = whole[:40] + bytes(b ^ 255 for b in whole[40:50]) + whole[50:]
    for content in (lies, damaged, whole[:-10], whole[:30]):
        (tmp_path / "b.zip").write_bytes(content)
        with pytest.raises(errors.UserError, match="b.zip"):
            pairs.load(str(tmp_path / "b.zip"))


def test_a_wrong_source_or_share_is_one_sentence(tmp_path, file, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TFM_DATA", raising=False)
    with pytest.raises(errors.UserError, match=r"neither a named set of pairs \(spa-eng\) nor a path"):
        pairs.load("spa_eng")
    with pytest.raises(errors.UserError, match="was not found in .*download http"):
        pairs.load("spa-eng")
    (tmp_path / "spa-eng.zip").write_bytes(b"another")
    with pytest.raises(errors.UserError, match="spa-eng.zip has sha256 .*: replace or remove it"):
        pairs.load("spa-eng", data_dir=str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.UserError, match="neither a file nor a folder"):
        pairs.load(str(tmp_path / "pipe"))
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(errors.UserError, match="above 0 and at most 1"):
            pairs.load(str(file), share=share)


def test_what_is_no_text_is_refused_and_gzip_is_read(tmp_path, file):
    (tmp_path / "said.tsv.gz").write_bytes(gzip.compress(text(SAID)))
    assert pairs.load(str(tmp_path / "said.tsv.gz"))[1:] == pairs.load(str(file))[1:]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "said.tsv.gz").write_bytes(gzip.compress(text(SAID)))
    assert pairs.load(str(tmp_path / "set"))[1:] == pairs.load(str(file))[1:]
    for name, content, words in (
        ("a.tsv", b"PAR1\x15\x04" + text(SAID), "a.tsv is a Parquet table"),
        ("b.tsv", text(SAID) + b"a\0\tb\n", f"b.tsv holds a NUL at byte {len(text(SAID)) + 1}"),
        ("c.tsv", text(SAID).decode().encode("utf-16"), "c.tsv is text in UTF-16.*convert it to UTF-8"),
        ("d.tsv.gz", gzip.compress(text(SAID))[:-1], "d.tsv.gz is a damaged gzip file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(errors.UserError, match=words):
            pairs.load(str(tmp_path / name))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.write(tmp_path / "b.tsv", "b.tsv")
    with pytest.raises(errors.UserError, match="a.zip:b.tsv holds a NUL"):
        pairs.load(str(tmp_path / "a.zip"))


# Two files side by side.


def side_by_side(folder, stem, some, *, ends=(".en", ".es"), between="\n"):
    folder.mkdir(exist_ok=True)
    for end, side in zip(ends, zip(*some, strict=True), strict=True):
        content = "".join(line + between for line in side).encode()
        (folder / f"{stem}{end}").write_bytes(gzip.compress(content) if end.endswith(".gz") else content)
    return folder


def test_parallel_files_are_pairs_line_by_line(tmp_path, file):
    one = side_by_side(tmp_path / "one", "europarl-v7.es-en", SAID)
    whole = pairs.load(str(file))
    assert pairs.load(str(one))[1:3] == whole[1:3]  # the same pairs on the same sides
    assert pairs.load(str(one)).said.endswith("the lines of europarl-v7.es-en.en -> europarl-v7.es-en.es are pairs")
    reverse = pairs.load(str(one), reverse=True)
    assert reverse[1:3] == pairs.load(str(file), reverse=True)[1:3] and "es-en.es -> europarl" in reverse.said
    assert pairs.load(str(one / "europarl-v7.es-en"))[1:3] == whole[1:3]  # what their names share
    packed = side_by_side(tmp_path / "packed", "said", SAID, ends=(".pt_BR.gz", ".zh-CN"), between="\r\n")
    assert pairs.load(str(packed))[1:3] == whole[1:3]
    named = side_by_side(tmp_path / "named", "said", SAID, ends=(".eng", ".spa.gz"))
    assert pairs.load(str(named / "said"))[1:3] == whole[1:3]
    with zipfile.ZipFile(tmp_path / "moses.zip", "w") as made:
        made.writestr("README", "about")
        made.writestr("LICENSE", "free")
        for found in one.iterdir():
            made.write(found, found.name)
    assert pairs.load(str(tmp_path / "moses.zip"))[1:3] == whole[1:3]
    (one / "more.tsv").write_bytes(text(SAID[:100]))
    assert len(both(pairs.load(str(one)))) == 100  # where there are tab-separated files, nothing else is read, as ever


def test_a_line_that_one_side_lacks_is_no_pair_and_a_file_that_ends_early_is_refused(tmp_path):
    some = side_by_side(tmp_path / "some", "a", [("a", "x"), ("", "y"), ("c", " "), ("d", "z")])
    assert both(pairs.load(str(some))) == [("a", "x"), ("d", "z")]
    (some / "a.es").write_text("x\ny\nz")
    with pytest.raises(errors.UserError, match=r"a.en has 4 lines and .*a.es has 3 lines: a line of one must"):
        pairs.load(str(some))
    (some / "a.de").write_text("x")
    with pytest.raises(errors.UserError, match=r"more than two languages \(.de, .en, .es\): put those of two into"):
        pairs.load(str(some))


# Parts that names tell.


def test_names_tell_train_valid_and_test(tmp_path):
    folder = tmp_path / "set"
    sides = {"train": SAID[:900], "valid": SAID[900:950], "test": SAID[950:]}
    for part, some in sides.items():
        side_by_side(folder, part, some)
    found = pairs.load(str(folder))
    assert (found.train, found.evaluation) == (sides["train"], sides["valid"])
    assert "by their names, train.en -> train.es to train on; valid.en -> valid.es to evaluate; " in found.said
    assert "test.en -> test.es left alone" in found.said and "trained on, too" not in found.said
    part = pairs.load(str(folder), share=0.5, reverse=True)
    assert part.evaluation == [(b, a) for a, b in sides["valid"]] and 350 < len(part.train) < 550
    (tmp_path / "tsv").mkdir()
    for name, some in (("said.train.tsv", SAID[:900]), ("said.dev.tsv", SAID[890:920])):
        (tmp_path / "tsv" / name).write_bytes(text(some))
    found = pairs.load(str(tmp_path / "tsv"))
    assert len(found.train) == 900 and found.evaluation == SAID[890:920] and "(10 of 30 sources" in found.said


# Splitting.


def test_no_source_sentence_stands_on_both_sides(tmp_path, file):
    alike = [(source.upper().replace(".", "?!").replace(" ", " , "), target) for source, target in SAID]
    (tmp_path / "more.tsv").write_bytes(text(SAID + alike))
    one, two = pairs.load(str(file)), pairs.load(str(tmp_path / "more.tsv"))
    keys = [{pairs.sentence_key(source) for source, _ in side} for side in (two.train, two.evaluation)]
    assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == len({source for source, _ in SAID})
    assert set(one.train) < set(two.train) and set(one.evaluation) < set(two.evaluation)  # an addition moves nothing
    assert len(two.evaluation) == 2 * len(one.evaluation) and 10 < len(one.evaluation) < 100  # of 1,000
    reverse = pairs.load(str(file), reverse=True)
    held, kept = ({source for source, _ in side} for side in (reverse.evaluation, reverse.train))
    assert not held & kept and both(reverse) == sorted((target, source) for source, target in SAID)


def test_a_share_leaves_the_held_out_pairs_alone(file):
    whole, half, tenth = (pairs.load(str(file), share=share) for share in (1.0, 0.5, 0.1))
    assert whole.evaluation == half.evaluation == tenth.evaluation
    assert set(tenth.train) < set(half.train) < set(whole.train)
    for some, share in ((half, 0.5), (tenth, 0.1)):  # of those that are left, though the held-out ones are chosen alike
        assert abs(len(some.train) / len(whole.train) - share) < 0.035


def test_keys_tell_words_apart_in_any_script():
    assert pairs.sentence_key("Go  ON!") == pairs.sentence_key("go on") != pairs.sentence_key("goon")
    assert pairs.sentence_key("किताब") != pairs.sentence_key("कीताब")  # they differ in a vowel sign, which is no letter
    assert pairs.sentence_key("?!") != pairs.sentence_key("...")


@pytest.fixture(scope="module")
def made():
    return subwords.train([side for pair in SAID for side in pair], W=277)


# Rows.


def test_rows_hold_whole_sentences_behind_each_other(made):
    some = [("a", "two kings"), ("a king who reads is worth", "b"), ("b", "a king who reads is worth"), ("c", "d")]
    rows = pairs.rows(made, some, N=7)
    assert rows.longer == 2 and rows.source_BS.shape == rows.target_BN.shape == (2, 7)
    assert [made.decode(row) for row in rows.target_BN] == ["two kings", "d"]
    fetch, n = pairs.examples(rows)
    batch = batches.evaluation(fetch, n=n, batch=3)[0]
    (two, kings) = batch["target_BN"][0], made.encode(["two kings"])[0]
    length = len(kings)
    assert np.array_equal(two, [*kings, subwords.EOS, *[subwords.PAD] * (6 - length)])
    assert np.array_equal(batch["w_BN"][0], [subwords.BOS, *two[:-1]])
    assert np.array_equal(batch["weight_BN"][0], np.arange(7) <= length)  # [EOS] is asked for, padding is not
    assert np.array_equal(batch["weight_BN"].sum(1), [length + 1, 2, 0])  # the third row fills the batch up
    assert np.array_equal(batch["valid_BS"], batch["source_BS"] != subwords.PAD)
    assert batch["valid_BS"].sum(1).tolist() == [2, 2, 2] and batch["weight_BN"].dtype == np.float32


def test_rows_are_made_piece_by_piece_and_never_more_than_fit(made, monkeypatch):
    whole = pairs.rows(made, SAID, N=20)
    monkeypatch.setattr(pairs, "PIECE", 13)
    pieces = pairs.rows(made, SAID, N=20)
    assert np.array_equal(whole.source_BS, pieces.source_BS) and np.array_equal(whole.target_BN, pieces.target_BN)
    monkeypatch.setattr(disk, "host_memory", lambda: 16 * 20 * len(SAID) - 1)
    with pytest.raises(errors.UserError, match="1,000 pairs of 2 x 20 tokens needs 312 KiB"):
        pairs.rows(made, SAID, N=20)


def test_a_row_is_full_to_its_last_place_and_never_cut(made):
    (id_T,) = made.encode(["a king who reads is worth"])
    full, fits = pairs.padded(made, ["a king who reads is worth"], N=len(id_T) + 1)
    assert fits.all() and np.array_equal(full[0], [*id_T, subwords.EOS])
    short, fits = pairs.padded(made, ["a king who reads is worth"], N=len(id_T))
    assert not fits.any() and not short.any()
    with pytest.raises(errors.UserError, match="not one of 1000 pairs has at most N = 2"):
        pairs.rows(made, SAID, N=2)


# The real set.


def test_the_real_pairs():
    if not os.environ.get("TFM_DATA") or not (download.places()[0] / "spa-eng.zip").exists():
        pytest.skip("spa-eng.zip is not in the folder that TFM_DATA names")
    loaded = pairs.load("spa-eng")
    assert len(loaded.train) + len(loaded.evaluation) == 118_964
    assert 0.04 < len(loaded.evaluation) / 118_964 < 0.06
    assert ("Ask Tom.", "Pregúntale a Tom.") in both(loaded)
    assert all(unicodedata.is_normalized("NFC", side) for pair in loaded.evaluation for side in pair)
