"""Whatever stands in a file, it is read or refused in one sentence: truncated, changed, crafted, of every kind."""

import functools
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
import tiny
from hypothesis import strategies as st
from PIL import Image

from configs import base
from experiments.data import image_file, image_files, images, pairs, pretrained_tokenizer, subwords, text, tokenizer
from experiments.engine import config as configs
from experiments.engine import config_file, disk, errors, log, workdir
from experiments.pretrained import llama2c, safetensors
from experiments.pretrained import open_model as trained

CASES = 40  # of each kind of file
LIKE = {"image": [4, 4, 1], "values": [0.0, 255.0], "mean": [0.5], "std": [0.5], "classes": ["a", "b"]}
SAID = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": [4, 4], "resample": 3}
SAID |= {"do_rescale": True, "rescale_factor": 0.01, "do_normalize": True, "image_mean": [0.5], "image_std": [0.5]}
SAID |= {"do_center_crop": True, "crop_size": 4, "do_convert_rgb": False, "default_to_square": True}
RNG = np.random.default_rng(0)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(members, **options):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as out:
        for name, content in members:
            out.writestr(name, content)
    return file.getvalue()


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def picture_bytes(kind):
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (7, 5, 3), np.uint8)).save(file, kind)
    return file.getvalue()


def pieces_bytes():
    known = [b"<unk>", b"\n<s>\n", b"\n</s>\n", b" ", b"a", b"b", b"ab", b" a", b"<0x41>"]
    return struct.pack("<i", 8) + b"".join(struct.pack("<fi", -i, len(one)) + one for i, one in enumerate(known))


def llama_bytes():
    header = [8, 12, 1, 2, 1, 9, 5]  # D F M H G W N, and the values in the order of llama2c
    D, F, M, H, G, W, N = header
    count = W * D + M * (2 * D + 2 * D * D + 2 * D * D * G // H + 3 * D * F) + D + N * D // H
    return struct.pack("<7i", *header) + np.zeros(count, "<f4").tobytes()


def safetensors_bytes(folder):
    safetensors.write(folder / "x.safetensors", {"a": np.ones((3, 5), np.float32), "b": np.arange(7)})
    return (folder / "x.safetensors").read_bytes()


def library_json():
    made = subwords.train(["a king who reads"] * 3, W=280)
    return json.loads(made._model.to_str())


IMAGES, LABELS = RNG.integers(0, 256, (20, 3, 3), np.uint8), np.arange(20, dtype=np.uint8) % 3
TSV = "".join(f"Go {i}.\tVe {i}.\n" for i in range(25)).encode()


def read_picture(file):
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
    contents = [idx_bytes(array) for array in (IMAGES, LABELS, IMAGES, LABELS)]
    for name, content in zip(images.image_files.FILES, contents, strict=True):
        (file.parent / name).write_bytes(content)
    (file.parent / images.image_files.FILES[0]).unlink()
    (file.parent / images.image_files.FILES[0]).hardlink_to(file)
    images.load(str(file.parent))


def read_log(file):
    rows = log.read(file.parent)
    [row["step"] + 1 for row in rows]
    log.Log(file.parent, start=2).close()


def resume(file):
    workdir.enter(file.parent, base.get_config("language").to_dict())


def resume_from_summary(file):
    (file.parent / "config.json").write_text(json.dumps({"config": base.get_config("language").to_dict()}))
    resume(file)


def open_model(file):
    found = trained.open(str(file.parent))
    trained.check(found.path, found.params, found.params)


MODEL = ("config.json", "model.safetensors")


def beside(family, i, folder):
    """One of the two files of a published model."""
    return (published.save(folder, family) / MODEL[i]).read_bytes()


def open_with(family, i):
    """Opens the folder with this file and the other of the two, which is whole."""
    other = []

    def read(file):
        if not other:
            other.append(beside(family, i, file.parent / "made"))
        (file.parent / MODEL[i]).write_bytes(other[0])
        open_model(file)

    return read


def index_bytes():
    return json.dumps({"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}).encode()


# name of the file -> (content that is right, how it is read)
FILES = {
    "images.idx": (lambda _: idx_bytes(IMAGES), lambda file: image_files.read_idx(file, axes=3)),
    "images.gz": (lambda _: gzip.compress(idx_bytes(IMAGES)), lambda file: image_files.read_idx(file, axes=3)),
    "folder.idx": (lambda _: idx_bytes(IMAGES), read_folder),
    "images.npz": (lambda _: npz(x=IMAGES, y=LABELS), lambda file: images.load(str(file))),
    "arrays.npz": (
        lambda _: npz(x=np.ones(5), y=np.ones((2, 3), "<i2")),
        lambda file: disk.read_npz(file, [("x", "y")]),
    ),
    **{f"picture.{kind}": (lambda _, kind=kind: picture_bytes(kind), read_picture) for kind in image_file.FORMATS},
    "data.json": (lambda _: json.dumps(LIKE).encode(), lambda file: image_file.expected(file.parent, {}, Z=1, C=2)),
    "preprocessor_config.json": (lambda _: json.dumps(SAID).encode(), read_processor),
    "text.txt": (lambda _: tiny.TEXT[:300], lambda file: tokenizer.make("characters", text.load(str(file)).train)),
    "pairs.tsv": (lambda _: TSV, lambda file: pairs.load(str(file))),
    "pairs.zip": (lambda _: zipped([("a/pairs.txt", TSV), ("b.tsv", TSV)]), lambda file: pairs.load(str(file))),
    "tokenizer.json": (lambda _: tokenizer.make("characters", [b"a king"]).files["tokenizer.json"], read_words),
    "library/tokenizer.json": (lambda _: json.dumps(library_json()).encode(), read_words),
    "tok9.bin": (lambda _: pieces_bytes(), read_words),
    "x.safetensors": (safetensors_bytes, safetensors.read),
    "model.safetensors.index.json": (lambda _: index_bytes(), safetensors.read),
    "model.bin": (lambda _: llama_bytes(), llama2c.read),
    "metrics.jsonl": (lambda _: b"".join(b'{"step": %d, "train/loss": 1.5}\n' % i for i in range(1, 5)), read_log),
    "run.json": (lambda _: json.dumps({"config": base.get_config("language").to_dict()}).encode(), read_config),
    "run/config.json": (lambda _: json.dumps({"config": base.get_config("language").to_dict()}).encode(), resume),
    "run/summary.json": (lambda _: json.dumps({"steps": 1000, "params_sha256": "0"}).encode(), resume_from_summary),
    **{
        f"{family}/config.json": (functools.partial(beside, family, 0), open_with(family, 1))
        for family in published.BODIES
    },
    **{
        f"{family}/model.safetensors": (functools.partial(beside, family, 1), open_with(family, 0))
        for family in ("llama", "vit")
    },
}


@pytest.fixture(scope="module", autouse=True)
def told():
    yield
    fuzz.tell()


@st.composite
def damaged(draw, content):
    """The content with a few changes: cut off, bytes changed, added, taken out, repeated; or anything at all."""
    for _ in range(draw(st.integers(1, 3))):
        way, at = (
            draw(st.sampled_from("cut change insert remove repeat new".split())),
            draw(st.integers(0, len(content))),
        )
        some = draw(
            st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 4, b"\xff" * 8, b"\0" * 8]))
        )
        if way == "new":
            content = some
        elif way == "cut":
            content = content[:at]
        elif way == "repeat":
            content = content[:at] + content[max(at - 20, 0) :]
        else:
            content = content[:at] + some * (way != "remove") + content[at + len(some) * (way != "insert") :]
    return content


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.sampled_from([10**9, 2**63, 10**30, -(10**12)]),
    st.floats(),
    fuzz.TEXTS,
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(fuzz.TEXTS, inner, max_size=3)),
    max_leaves=5,
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


def tried(kind, read, file):
    """Count the case, and check that the file was read or refused in a sentence, in time and within memory."""
    try:
        with fuzz.bounded(seconds=30, gigabytes=2):
            read(file)
    except errors.UserError as error:
        fuzz.check_sentence(errors.line(error))
        return fuzz.count(kind, "refused")
    return fuzz.count(kind, "read")


@pytest.fixture
def all_kinds(tmp_path):
    """(kind, content, file, read) of every kind that can be made here."""

    def made(kind):
        name = kind.split("/")[-1]
        (tmp_path / "made").mkdir()
        (tmp_path / "case").mkdir()
        return FILES[kind][0](tmp_path / "made"), tmp_path / "case" / name, FILES[kind][1]

    return made


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(all_kinds, tmp_path_factory, kind):
    content, file, read = all_kinds(kind)
    file.write_bytes(content)
    if kind != "model.safetensors.index.json":
        read(file)  # what is whole is read

    @hypothesis.given(damaged(content))
    @fuzz.settings(CASES)
    def one(content):
        case = tmp_path_factory.mktemp("case") / file.name
        case.write_bytes(content)
        tried(kind, read, case)

    one()


@pytest.mark.parametrize("kind", [kind for kind in FILES if "json" in kind and "jsonl" not in kind])
def test_json_with_other_things_in_it_is_read_or_refused_in_a_sentence(all_kinds, tmp_path_factory, kind):
    content, file, read = all_kinds(kind)

    @hypothesis.given(rearranged(json.loads(content)))
    @fuzz.settings(CASES)
    def one(value):
        case = tmp_path_factory.mktemp("case") / file.name
        case.write_text(json.dumps(value))
        tried(f"{kind}, rearranged", read, case)

    one()


# What announces or hides far more than it holds


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_a_terabyte_of_nothing_is_refused_before_it_is_read(all_kinds, kind):
    content, file, read = all_kinds(kind)
    file.write_bytes(content)
    try:
        with file.open("r+b") as grown:
            grown.truncate(2**40)  # a hole: the disk keeps none of it
    except OSError:
        pytest.skip("this file system has no files of that size")
    if kind.startswith("run/"):  # the run's own, which are small or were damaged by the disk
        pytest.skip("reads what the run itself has written")
    within_memory(lambda: read(file), refused=not kind.startswith("picture"))


def npy_header(shape, dtype="<f8"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def safetensors_header(**entry):
    text = json.dumps({"a": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]} | entry}).encode()
    return len(text).to_bytes(8, "little") + text


def zip_that_lies():
    """A member of a megabyte, said to be of one byte."""
    content = bytearray(zipped([("a.tsv", b"a\tb\n" * 2**18)], compression=zipfile.ZIP_DEFLATED))
    at = content.rindex(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 1)
    return bytes(content)


def bomb(size):
    return gzip.compress(bytes(size))


ANNOUNCED = {
    "sizes": ("images.idx", lambda: bytes([0, 0, 8, 3]) + b"\xff" * 12),
    "sizes that may be": ("images.idx", lambda: bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**10, 2**12, 2**11)),
    "sizes, packed": (
        "images.gz",
        lambda: gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**10, 2**12, 2**11)),
    ),
    "a bomb of zeros": ("images.gz", lambda: bomb(2**25)),
    "a bomb behind a header": ("images.gz", lambda: gzip.compress(idx_bytes(IMAGES) + bytes(2**25))),
    "an array": ("images.npz", lambda: zipped([("x.npy", npy_header((2**40,))), ("y.npy", npy(LABELS))])),
    "a large array": ("images.npz", lambda: zipped([("x.npy", npy_header((2**28,))), ("y.npy", npy(LABELS))])),
    "an array of no size": ("images.npz", lambda: zipped([("x.npy", npy_header((2**40, 0))), ("y.npy", npy(LABELS))])),
    "a pickle": ("images.npz", lambda: zipped([("x.npy", npy_header((2**40,), "|O")), ("y.npy", npy(LABELS))])),
    "a header": ("x.safetensors", lambda: (2**40).to_bytes(8, "little")),
    "values": ("x.safetensors", lambda: safetensors_header()),
    "an axis of none": ("x.safetensors", lambda: safetensors_header(shape=[2**62, 0], data_offsets=[0, 0])),
    "values before": ("x.safetensors", lambda: safetensors_header(data_offsets=[-(2**43), 0])),
    "a model": ("model.bin", lambda: struct.pack("<7i", *[2**30] * 7)),
    "pieces": ("tok9.bin", lambda: struct.pack("<ifi", 2**31 - 1, 0.0, 2**31 - 1)),
    "pixels": (
        "picture.BMP",
        lambda: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, 2**30, 2**30, 1, 24, *[0] * 6),
    ),
    "a zip that lies": ("pairs.zip", zip_that_lies),
    "nesting": ("run.json", lambda: b"[" * 10**6),
    "nested values": ("data.json", lambda: b'{"a":' * 10**5),
    "nested vocabulary": ("tokenizer.json", lambda: b"[" * 10**6),
    "digits": ("data.json", lambda: b'{"image": [' + b"9" * 10**6 + b"]}"),
}


@pytest.mark.parametrize("case", ANNOUNCED)
def test_what_announces_more_than_it_holds_takes_no_memory(tmp_path, case):
    kind, make = ANNOUNCED[case]
    file = tmp_path / kind
    file.write_bytes(make())
    within_memory(lambda: FILES[kind][1](file))


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


NAMES = [
    "../a.tsv",
    "/etc/a.tsv",
    "a/../../b.tsv",
    "C:\\a.tsv",
    "c:a.tsv",
    "..\\a.tsv",
    "a\\..\\..\\b.tsv",
    "\\\\host\\a.tsv",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_zip_that_leads_out_of_itself_is_refused(tmp_path, name):
    file = tmp_path / "pairs.zip"
    file.write_bytes(zipped([("whole.tsv", TSV), (name, TSV)]))
    with pytest.raises(errors.UserError, match="leads out of it"):
        pairs.load(str(file))
    assert [found.name for found in tmp_path.rglob("*")] == ["pairs.zip"]


def test_a_link_in_a_zip_is_no_way_out(tmp_path):
    (tmp_path / "secret.tsv").write_bytes(b"secret\tgeheim\n")
    link = zipfile.ZipInfo("link.tsv")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    (tmp_path / "pairs.zip").write_bytes(zipped([("whole.tsv", TSV), (link, b"secret.tsv")]))
    with pytest.raises(errors.UserError, match="link.tsv, line 1: no second column"):  # the name of the target is text
        pairs.load(str(tmp_path / "pairs.zip"))


@pytest.mark.parametrize("name", ["../x.npy", "/x.npy", "a/../../x.npy"])
def test_an_array_whose_name_leads_out_is_written_nowhere(tmp_path, name):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "images.npz"
    file.write_bytes(zipped([("x.npy", npy(IMAGES)), ("y.npy", npy(LABELS)), (name, npy(LABELS))]))
    assert len(disk.read_npz(file, [("x", "y")])) == 2
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["images.npz", "in"]
