"""A damaged file is read, or refused in one sentence with its path."""

import gzip
import io
import json

import fuzz
import hypothesis
import numpy as np
import pytest
import small_files
import tiny
from hypothesis import strategies as st
from PIL import Image

from experiments.config import errors
from experiments.data import image_file, images, pairs, pretrained_tokenizer, text, tokenization

FORMAT = {"image": [4, 4, 1], "values": [0.0, 255.0], "mean": [0.5], "std": [0.5], "classes": ["a", "b"]}
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (20, 3, 3), np.uint8), np.arange(20, dtype=np.uint8) % 3
TSV = "".join(f"Go {i}.\tVe {i}.\n" for i in range(25)).encode()
JSONL = b"".join(b'{"said": "row %d"}\n' % i for i in range(40))


def encode_picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (7, 5, 3), np.uint8)).save(file, kind)
    return file.getvalue()


def read_image(file):
    (file.parent / "data.json").write_text(json.dumps(FORMAT))
    image_file.read(file, image_file.load_format(file.parent, {}, Z=1, C=2))


def read_tokens(file):
    tokenizer = pretrained_tokenizer.read(file)
    tokenizer.decode(tokenizer.encode("a king", specials=True))


FILES = {  # {file name: (valid content, function that reads it)}
    "images.idx": (small_files.idx(IMAGES), images.read_idx),
    "images.gz": (gzip.compress(small_files.idx(IMAGES)), images.read_idx),
    "images.npz": (small_files.npz(x=IMAGES, y=LABELS), lambda file: images.load(str(file))),
    "picture.png": (encode_picture("PNG"), read_image),
    "picture.jpg": (encode_picture("JPEG"), read_image),
    "data.json": (json.dumps(FORMAT).encode(), lambda file: image_file.load_format(file.parent, {}, Z=1, C=2)),
    "text.txt": (tiny.TEXT[:300], lambda file: tokenization.make("characters", text.load(str(file)).train)),
    "rows.jsonl": (JSONL, lambda file: text.load(str(file), "said")),
    "rows.csv": (b"n,said\n" + b'1,"a ""b"""\n2,c\n' * 20, lambda file: text.load(str(file), "said")),
    "pairs.zip": (small_files.make_zip([("a/b.txt", TSV), ("b.tsv", TSV)]), lambda file: pairs.load(str(file))),
    "tokenizer.json": (tokenization.make("characters", [b"a king"]).files["tokenizer.json"], read_tokens),
}


@st.composite
def damage(draw, content):
    """Draw a damaged copy of the content: truncated, or with bytes changed, added, removed or repeated."""
    position = draw(st.integers(0, len(content)))
    noise = draw(st.binary(min_size=1, max_size=9) | st.sampled_from([b"\xff" * 4, b"\0" * 8]))
    start, end, rest = content[:position], content[position:], content[position + len(noise) :]
    return draw(st.sampled_from([start, start + noise + rest, start + noise + end, start + rest, start + end[-20:]]))


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(tmp_path, kind):
    content, read = FILES[kind]
    read(small_files.write(tmp_path, **{kind: content}) / kind)
    number = 0

    @fuzz.settings(12)
    @hypothesis.given(damage(content))
    def read_case(content):
        nonlocal number
        number += 1
        try:
            read(small_files.write(tmp_path / str(number), **{kind: content}) / kind)
        except errors.UserError as error:
            fuzz.check_sentence(errors.line(error))

    read_case()
