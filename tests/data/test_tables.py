"""Rows of tables are documents, and every format holds out the same rows; data sets of the hub."""

import csv
import gzip
import hashlib
import io
import json
import sys

import pytest
from errors import raises
from small_files import documents, hide_local_data, write  # noqa: F401

from experiments.config import errors
from experiments.data import corpus as corpora, files as data_files, tables, text, tokenization

pytestmark = pytest.mark.usefixtures("hide_local_data")
TEXTS = [f'{i} kings, "who"\nread é漢\t;' * (1 + i % 3) for i in range(70)] + ["", None, "7 "]
LINES = [content and content.translate({9: " ", 10: " "}) for content in TEXTS]  # without tabs and line ends


def jsonl(texts) -> bytes:
    return b"\n\n".join(json.dumps({"n": 1, "said": content}).encode() for content in texts)


def make_table(texts, delimiter) -> bytes:
    file = io.StringIO()
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting, quotechar=None if quoting else '"')
    writer.writerows([["n", "said"], *([1, content] for content in texts)])
    return file.getvalue().encode("utf-8-sig")


def parquet(texts) -> bytes:
    pyarrow, parquets = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquets.write_table(pyarrow.table({"n": [1] * len(texts), "said": texts}), file, row_group_size=7)
    return file.getvalue()


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("pyarrow").Codec("zstd").compress(content, asbytes=True)


FORMATS = {
    ".jsonl": jsonl,
    ".ndjson.gz": lambda texts: gzip.compress(jsonl(texts)),
    ".json": lambda texts: json.dumps([{"n": 1, "said": content} for content in texts], indent=1).encode(),
    ".json.gz": lambda texts: gzip.compress(jsonl(texts)),  # JSON lines under the name of one document
    ".csv": lambda texts: make_table(texts, ","),
    ".tsv": lambda texts: make_table(texts, "\t"),
    ".csv.zst": lambda texts: zstd(make_table(texts, ",")),
    ".parquet": parquet,
}


@pytest.mark.parametrize("end", FORMATS)
def test_rows_are_documents_and_every_format_holds_out_the_same(tmp_path, end, monkeypatch):
    monkeypatch.setattr(data_files, "CHUNK", 99)
    texts = LINES if end == ".tsv" else TEXTS
    write(tmp_path, **{f"one{end}": FORMATS[end](texts), "two/README.md": b"no table"})
    expected = [(content or "").encode() for content in texts]
    data = text.load(str(tmp_path / f"one{end}"), "said")
    train, evaluation = map(documents, data[1:3])
    limit = text.EVALUATION_SHARE * 2**64
    held_out = [row for row in expected if row and int.from_bytes(hashlib.sha256(row).digest()[:8]) < limit]
    assert evaluation == held_out and train == [row for row in expected if row and row not in held_out]
    assert data.train.digest != data.evaluation.digest and "about 10.00% of the rows" in data.description
    write(tmp_path / "two", **{f"{part}{end}": FORMATS[end]([part, "more"]) for part in ("train", "valid", "test")})
    data = text.load(str(tmp_path / "two"), "said")
    assert [documents(part) for part in data[1:3]] == [[b"train", b"more"], [b"valid", b"more"]]
    assert f"test{end} not used" in data.description


NAMES, X = ["n", "said"], b"n,said\n1,x\n"
REFUSED = [  # (file, content, text.field, parts of the message)
    ("a.jsonl", jsonl(["x"]), "text", ["line 1", "'text'", *NAMES]),
    ("a.jsonl", jsonl(["x"]) + b"\n[]", "said", ["line 2", "'said'"]),
    ("a.jsonl", jsonl(["x"]) + b"\n{", "said", ["line 2"]),
    ("a.jsonl", jsonl(["x"]), "n", ["line 1", "'n'", "'1'"]),
    ("a.json", b'{"data": [{"said": "x"}]}', "said", ["'said'", "data"]),
    ("a.csv", b'n,said\n1,x\n2,"y"z\n3,w\n', "said", ["line 3"]),
    ("a.csv", b"n,said\n1,\xff\n", "said", ["line 2", "\\xff"]),
    ("a.tsv", "n\tsaid\n1\té\n".encode("utf-16"), "said", ["UTF-16"]),
    ("a.csv", X + b"2,y,z\n", "said", ["line 3", "3 cells", "2"]),
    ("a.csv", b'n,said\n1,"x\ny"\n2\n', "said", ["line 4", "1 cells"]),
    ("a.csv", b"said,n,said\nx,1,y\n", "said", ["line 1", "'said'"]),
    ("a.csv", b"n;said\n1;x\n", "said", ["';'", "','"]),
    ("a.tsv", b"n,said\n1,x\n", "said", ["','", repr("\t")]),
    ("a.jsonl", jsonl(["x", "\ud800"]), "said", ["line 3", repr("\ud800")]),
    ("a.jsonl", jsonl(["x\0y"]), "said", ["line 1", repr("\0")]),
    ("a.csv.zst", zstd(make_table(TEXTS, ","))[:-9], "said", []),
    ("a.csv", make_table(["x"], ","), "", ["text.field", *NAMES]),
    ("a.parquet", b"PAR1" * 9, "said", []),
    ("a.txt", b"said", "said", ["text.field", ".jsonl"]),
    ("a.csv.gz", gzip.compress(X + b"2," + b"a" * 3000), "said", ["line 3 has more than 1,"]),
    ("a.csv.gz", gzip.compress(X + b'2,"' + b"a\n" * 600 + b'"\n'), "said", ["line 3", "1000"]),
    ("a.jsonl.gz", gzip.compress(jsonl(["x"] * 5000)), "said", ["unpack"]),
]


@pytest.mark.parametrize(("name", "content", "field", "words"), REFUSED)
def test_damaged_tables_and_tables_without_the_field_are_refused(tmp_path, name, content, field, words, monkeypatch):
    for limit, value in (("LONGEST", 1000), ("BOMB", 2**13), ("BOMB_RATIO", 9), ("CHUNK", 99)):
        monkeypatch.setattr(data_files, limit, value)
    with raises(errors.UserError, name, *words):
        [*text.load(str(write(tmp_path, **{name: content}) / name), field).train]


def test_without_a_field_a_table_among_texts_is_a_text(tmp_path):
    write(tmp_path, **{"a.jsonl": jsonl(["x"] * 20), "a.txt.zst": zstd(b"x" * 20)})
    assert {*map(b"".join, text.load(str(tmp_path))[1:3])} == {jsonl(["x"] * 20), b"x" * 20}
    assert b"".join(map(b"".join, text.load(str(tmp_path / "a.txt.zst"))[1:3])) == b"x" * 20
    with raises(errors.UserError, "hub:"):
        text.load("hub:", "said")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    write(tmp_path, **{"a.txt.zst": zstd(b"x" * 20)})
    for package, source in {"pyarrow": str(tmp_path / "a.txt.zst"), "datasets": "hub:me/play"}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with raises(errors.UserError, package, 'pip install -e ".[hub]"'):
            text.load(source)


def test_a_quotation_mark_in_a_table_of_tabs_is_a_character(tmp_path):
    cells = ['5" pipe', '"', '"to be', 'or not"', '""', 'a "b" c']
    write(tmp_path, **{"a.tsv": b"\xef\xbb\xbfsaid\tn\r\n" + "".join(f"{cell}\t1\r\n" for cell in cells).encode()})
    (file,) = tables.find(str(tmp_path / "a.tsv"), alternatives="")
    assert [text for _, text, _ in tables.read(file, "said") if text] == cells


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_lines_have_three_ends_and_any_pieces(tmp_path, end, monkeypatch):
    rows = ["text,label", "a b,1", "", "c" * 40]
    write(tmp_path, **{"a.csv": end.join(rows).encode(), "b.csv": end.join([*rows, ""]).encode()})
    for chunk in (1, 7, 2**20):
        monkeypatch.setattr(data_files, "CHUNK", chunk)
        for file in tables.find(str(tmp_path), alternatives=""):
            assert [line.removesuffix("\r") for line in data_files.lines(file)] == rows


def test_rows_that_are_trained_on_and_evaluated_are_counted_and_a_json_next_to_tables_is_no_table(tmp_path):
    write(tmp_path, **{"train.jsonl": jsonl(["a", "b", "b", "c"]), "valid.csv": make_table(["b", "d", "b", "e"], ",")})
    write(tmp_path, **{"dataset_info.json": b"{}"})
    files = tables.select(tables.find(str(tmp_path), alternatives=""))
    assert [file.inside.name for file in files] == ["train.jsonl", "valid.csv"]
    assert "(2 of 4 held-out texts are also in the training data)" in text.load(str(tmp_path), "said").description
    write(tmp_path, **{"valid.csv": make_table(["d", "e"], ",")})
    assert "in the training data" not in text.load(str(tmp_path), "said").description


def test_a_data_set_of_a_folder_and_a_saved_one_are_text(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(text, "LARGE", 1)
    parts = {part: [f"{part} é", "more"] for part in ("train", "test")}
    write(tmp_path / "folder", **{f"{part}.jsonl": jsonl(texts) for part, texts in parts.items()})
    dataset_parts = {part: datasets.Dataset.from_dict({"n": [1, 2], "said": texts}) for part, texts in parts.items()}
    datasets.DatasetDict(dataset_parts).save_to_disk(tmp_path / "saved")
    for name in ("folder", "saved"):
        data = text.load(f"hub:{tmp_path / name}", "said")
        ids = [corpora.encode(tokenization.make("bytes", []), part)[:] for part in data[1:3] for times in range(2)]
        assert [bytes(row).decode() for row in ids] == ["train é\0more"] * 2 + ["test é\0more"] * 2
    with raises(errors.UserError, "'n'", "'1'"):
        text.load(f"hub:{tmp_path / 'saved'}", "n")
    with raises(errors.UserError, "no column 'text'. Set text.field", "n, said"):
        text.load(f"hub:{tmp_path / 'folder'}", "text")
    with raises(errors.UserError, f"hub:{tmp_path / 'folder'}:more", "'more'"):
        text.load(f"hub:{tmp_path / 'folder'}:more", "said")
