"""Whatever stands in a file, it is read or refused in one sentence: truncated, changed, crafted, of every kind."""

import gzip
import io
import json
import stat
import struct
import tracemalloc
import zipfile

import fuzz
import hypothesis
import numpy as np
import published
import pytest
import small_files
import test_tables
import tiny
from hypothesis import strategies as st
from PIL import Image
from small_files import idx, npy, npz, zipped

from configs import base
from experiments.data import image_file, images, pairs, pretrained_tokenizer, text, tokenizer
from experiments.engine import config as configs, config_file, disk, errors, log, workdir
from experiments.pretrained import llama2c, open_model as trained, safetensors

CASES = 8  # of each kind of file and of damage
LIKE = {"image": [4, 4, 1], "values": [0.0, 255.0], "mean": [0.5], "std": [0.5], "classes": ["a", "b"]}
SAID = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": [4, 4], "resample": 3}
SAID |= {"do_rescale": True, "rescale_factor": 0.01, "do_normalize": True, "image_mean": [0.5], "image_std": [0.5]}
SAID |= {"do_center_crop": True, "crop_size": 4, "do_convert_rgb": False, "default_to_square": True}
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (20, 3, 3), np.uint8), np.arange(20, dtype=np.uint8) % 3
TSV = "".join(f"Go {i}.\tVe {i}.\n" for i in range(25)).encode()
ROWS = [f"row {i} é" for i in range(40)]
TABLES = test_tables.FORMATS.keys() - {".ndjson.gz", ".json.gz"}  # behind its end gzip itself reads zeros, however many
MODEL = ("config.json", "model.safetensors")


def picture_bytes(kind):
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (7, 5, 3), np.uint8)).save(file, kind)
    return file.getvalue()


def read_rows(file):
    for part in text.load(str(file), "said")[1:3]:
        tokenizer.make("bytes", []).join(part)


def llama_bytes(folder):
    D, F, M, H, G, W, N = header = [8, 12, 1, 2, 1, 9, 5]  # and the values in the order of llama2c
    count = W * D + M * (2 * D + 2 * D * D + 2 * D * D * G // H + 3 * D * F) + D + N * D // H
    return struct.pack("<7i", *header) + np.zeros(count, "<f4").tobytes()


def safetensors_bytes(folder):
    safetensors.write(folder / "x.safetensors", {"a": np.ones((3, 5), np.float32), "b": np.arange(7)})
    return (folder / "x.safetensors").read_bytes()


def config_bytes(folder):
    return json.dumps({"config": base.get_config("language").to_dict()}).encode()


def read_image(file):
    (file.parent / "data.json").write_text(json.dumps(LIKE))
    image_file.read(file, image_file.expected(file.parent, {}, Z=1, C=2))


def read_processor(file):
    like = image_file.expected(file.parent, {"image": [4, 4], "class_names": ["a", "b"]}, Z=1, C=2)
    (file.parent / "picture.png").write_bytes(picture_bytes("PNG"))
    image_file.read(file.parent / "picture.png", like)


def read_words(file):
    words = pretrained_tokenizer.read(file)
    words.decode(words.encode("a king", specials=True))
    [words.name(i) for i in range(min(words.size, 50))]


def read_config(file):
    made = config_file.load(str(file), base=base.get_config)
    configs.Settings(made, config_file.defaults(made, base.get_config))


def read_folder(file):
    """A folder of IDX files, of which this is one."""
    first, *others = images.FILES
    small_files.write(file.parent, **dict(zip(others, map(idx, (LABELS, IMAGES, LABELS)), strict=True)))
    (file.parent / first).unlink(missing_ok=True)
    (file.parent / first).hardlink_to(file)
    images.load(str(file.parent))


def read_log(file):
    [row["step"] + 1 for row in log.read(file.parent)]
    log.Log(file.parent, start=2).close()


def resume(file):
    if file.name != "config.json":
        (file.parent / "config.json").write_bytes(config_bytes(file.parent))
    workdir.enter(file.parent, base.get_config("language").to_dict())


def of_model(family, i):
    """One of the two files of a published model, and how it is opened with the other one."""
    contents = []

    def make(folder):
        contents[:] = [(published.save(folder, family) / name).read_bytes() for name in MODEL]
        return contents[i]

    def read(file):
        (file.parent / MODEL[1 - i]).write_bytes(contents[1 - i])
        found = trained.open(str(file.parent))
        trained.check(found.path, found.params, found.params)

    return make, read


INDEX = {"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
# name of the file -> (the content that is right, given an empty folder; how it is read)
FILES = {
    "images.idx": (lambda _: idx(IMAGES), lambda file: images.read_idx(file, axes=3)),
    "images.gz": (lambda _: gzip.compress(idx(IMAGES)), lambda file: images.read_idx(file, axes=3)),
    "folder.idx": (lambda _: idx(IMAGES), read_folder),
    "images.npz": (lambda _: npz(x=IMAGES, y=LABELS), lambda file: images.load(str(file))),
    "arrays.npz": (
        lambda _: npz(x=np.ones(5), y=np.ones((2, 3), "<i2")),
        lambda file: disk.read_npz(file, [("x", "y")]),
    ),
    **{f"picture.{kind}": (lambda _, kind=kind: picture_bytes(kind), read_image) for kind in image_file.FORMATS},
    "data.json": (lambda _: json.dumps(LIKE).encode(), lambda file: image_file.expected(file.parent, {}, Z=1, C=2)),
    "preprocessor_config.json": (lambda _: json.dumps(SAID).encode(), read_processor),
    "text.txt": (lambda _: tiny.TEXT[:300], lambda file: tokenizer.make("characters", text.load(str(file)).train)),
    **{f"rows{end}": (lambda _, end=end: test_tables.FORMATS[end](ROWS), read_rows) for end in sorted(TABLES)},
    "pairs.tsv": (lambda _: TSV, lambda file: pairs.load(str(file))),
    "pairs.zip": (lambda _: zipped([("a/pairs.txt", TSV), ("b.tsv", TSV)]), lambda file: pairs.load(str(file))),
    "tokenizer.json": (lambda _: tokenizer.make("characters", [b"a king"]).files["tokenizer.json"], read_words),
    "library/tokenizer.json": (lambda _: pairs.train(["a king"] * 3, W=280).library.to_str().encode(), read_words),
    "tok9.bin": (lambda _: small_files.pieces([*small_files.SPECIALS, (b" ", 0), (b"a", 1), (b" a", 2)]), read_words),
    "x.safetensors": (safetensors_bytes, safetensors.read),
    "model.safetensors.index.json": (lambda _: json.dumps(INDEX).encode(), safetensors.read),
    "model.bin": (llama_bytes, llama2c.read),
    "metrics.jsonl": (lambda _: b"".join(b'{"step": %d, "train/loss": 1.5}\n' % i for i in range(1, 5)), read_log),
    "run.json": (config_bytes, read_config),
    "run/config.json": (config_bytes, resume),
    "run/summary.json": (lambda _: b'{"steps": 1000, "params_sha256": "0"}', resume),
    **{f"{family}/{MODEL[0]}": of_model(family, 0) for family in published.BODIES},
    **{f"{family}/{MODEL[1]}": of_model(family, 1) for family in ("llama", "vit")},
}


@st.composite
def damaged(draw, content):
    """The content with a few changes: cut off, bytes changed, put in, taken out, repeated; or anything at all."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        some = draw(st.binary(min_size=1, max_size=9) | st.sampled_from([b"\xff" * 4, b"\xff" * 8, b"\0" * 8]))
        before, behind, later = content[:at], content[at:], content[at + len(some) :]
        ways = [before, before + some + later, before + some + behind, before + later, before + content[-20:], some]
        content = draw(st.sampled_from(ways))
    return content


LARGE = st.sampled_from([10**9, 2**63, 10**30, -(10**12)])
LEAVES = st.none() | st.booleans() | st.integers(-2, 20) | LARGE | st.floats() | fuzz.TEXTS
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fuzz.TEXTS, inner, max_size=3), max_leaves=5
)


@st.composite
def rearranged(draw, value):
    """A JSON value in which one part is replaced, left out or added."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 4)):
        inner = dict(value) if isinstance(value, dict) else list(value)
        key = draw(st.sampled_from(sorted(inner))) if isinstance(inner, dict) else draw(st.integers(0, len(inner) - 1))
        if draw(st.integers(0, 5)):
            inner[key] = draw(rearranged(inner[key]))
        else:
            del inner[key]
        return inner
    return draw(JSON)


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(tmp_path, kind):
    """In time and within memory. Also a JSON with other things in it, and a terabyte of nothing before it is read."""
    make, read = FILES[kind]
    content = make(tmp_path)
    file = tmp_path / "whole" / kind.split("/")[-1]
    small_files.write(file.parent, **{file.name: content})
    if kind != "model.safetensors.index.json":
        read(file)  # what is whole is read
    number = 0

    def tried(content):
        nonlocal number
        number += 1
        small_files.write(tmp_path / str(number), **{file.name: content})
        try:
            with fuzz.bounded(seconds=30, gigabytes=2):
                read(tmp_path / str(number) / file.name)
        except errors.UserError as error:
            fuzz.check_sentence(errors.line(error))

    fuzz.settings(CASES)(hypothesis.given(damaged(content))(tried))()
    if kind.endswith(".json"):
        others = rearranged(json.loads(content)).map(lambda value: json.dumps(value).encode())
        fuzz.settings(CASES)(hypothesis.given(others)(tried))()
    if not kind.startswith("run/"):  # the run's own, which are small or were damaged by the disk
        with file.open("r+b") as grown:
            grown.truncate(2**40)  # a hole: the disk keeps none of it
        within_memory(lambda: read(file), refused=not kind.startswith("picture"))


# What announces or hides far more than it holds


def npy_header(shape, dtype="<f8"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return zipped([("x.npy", file.getvalue()), ("y.npy", npy(LABELS))])


def safetensors_header(**entry):
    text = json.dumps({"a": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]} | entry}).encode()
    return len(text).to_bytes(8, "little") + text


def zip_that_lies():
    """A member of a megabyte, said to be of one byte."""
    content = bytearray(zipped([("a.tsv", b"a\tb\n" * 2**18)], compression=zipfile.ZIP_DEFLATED))
    at = content.rindex(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 1)
    return bytes(content)


POSSIBLE = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**10, 2**12, 2**11)
BMP = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, 2**30, 2**30, 1, 24, *[0] * 6)
ANNOUNCED = {
    "sizes": ("images.idx", bytes([0, 0, 8, 3]) + b"\xff" * 12),
    "sizes that may be": ("images.idx", POSSIBLE),
    "sizes, packed": ("images.gz", gzip.compress(POSSIBLE)),
    "a bomb of zeros": ("images.gz", gzip.compress(bytes(2**25), 1)),
    "a bomb behind a header": ("images.gz", gzip.compress(idx(IMAGES) + bytes(2**25), 1)),
    "an array": ("images.npz", npy_header((2**40,))),
    "a large array": ("images.npz", npy_header((2**28,))),
    "an array of no size": ("images.npz", npy_header((2**40, 0))),
    "a pickle": ("images.npz", npy_header((2**40,), "|O")),
    "a header": ("x.safetensors", (2**40).to_bytes(8, "little")),
    "values": ("x.safetensors", safetensors_header()),
    "an axis of none": ("x.safetensors", safetensors_header(shape=[2**62, 0], data_offsets=[0, 0])),
    "values before": ("x.safetensors", safetensors_header(data_offsets=[-(2**43), 0])),
    "a model": ("model.bin", struct.pack("<7i", *[2**30] * 7)),
    "pieces": ("tok9.bin", struct.pack("<ifi", 2**31 - 1, 0.0, 2**31 - 1)),
    "pixels": ("picture.BMP", BMP),
    "a zip that lies": ("pairs.zip", zip_that_lies()),
    "nesting": ("run.json", b"[" * 10**6),
    "nested values": ("data.json", b'{"a":' * 10**5),
    "nested vocabulary": ("tokenizer.json", b"[" * 10**6),
    "digits": ("data.json", b'{"image": [' + b"9" * 10**6 + b"]}"),
}


@pytest.mark.parametrize("case", ANNOUNCED)
def test_what_announces_more_than_it_holds_takes_no_memory(tmp_path, case):
    kind, content = ANNOUNCED[case]
    small_files.write(tmp_path, **{kind: content})
    within_memory(lambda: FILES[kind][1](tmp_path / kind))


def within_memory(read, *, refused=True):
    """It is refused in a sentence, and no more memory than 80 MiB was ever taken for it."""
    tracemalloc.start()
    try:
        with fuzz.bounded(seconds=60, gigabytes=1):
            read()
        assert not refused
    except errors.UserError as error:
        fuzz.check_sentence(errors.line(error))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 80 * 2**20, f"{peak:,} bytes"


OUT = r"../a.tsv /a.tsv a/../../b.tsv C:\a.tsv c:a.tsv ..\a.tsv a\..\..\b.tsv \\host\a.tsv ../a.png".split()


def test_what_leads_out_of_a_zip_is_refused_and_nothing_is_unpacked(tmp_path):
    link = zipfile.ZipInfo("link.tsv")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    file = tmp_path / "in" / "pairs.zip"
    small_files.write(tmp_path, **{"secret.tsv": b"secret\tgeheim\n", "in/pairs.zip": b""})
    for name in (*OUT, link):
        file.write_bytes(zipped([("whole.tsv", TSV), (name, b"../secret.tsv")]))
        # of a link the name of the target is its text
        with pytest.raises(errors.UserError, match="leads out of it|link.tsv, line 1: no second column"):
            pairs.load(str(file))
    for name in ("../x.npy", "/x.npy", "a/../../x.npy"):
        file.write_bytes(zipped([("x.npy", npy(IMAGES)), ("y.npy", npy(LABELS)), (name, npy(LABELS))]))
        assert len(disk.read_npz(file, [("x", "y")])) == 2
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["in", "pairs.zip", "secret.tsv"]
