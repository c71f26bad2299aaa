"""IDX files are read whole, and refused where they are damaged or lie."""

import gzip

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from image_sets import CODES, elsewhere, idx_bytes  # noqa: F401  a fixture too

from experiments.data import image_files
from experiments.engine import errors

# IDX files.


@pytest.mark.parametrize("dtype", sorted(CODES))
@pytest.mark.parametrize("pack", [False, True])
def test_idx_files_are_read_back(tmp_path, dtype, pack):
    array = (np.random.default_rng(0).normal(size=(7, 5, 3)) * 50).astype(dtype)
    content = idx_bytes(array)
    (tmp_path / "a").write_bytes(gzip.compress(content) if pack else content)  # the name says nothing about gzip
    found = image_files.read_idx(tmp_path / "a", axes=3)
    assert np.array_equal(found, array) and found.dtype == array.dtype and found.dtype.isnative


WHOLE = idx_bytes(np.arange(7 * 5 * 3, dtype=np.int16).reshape(7, 5, 3))
BODY = 7 * 5 * 3 * 2


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not an IDX file.*none"),
        (b"\x89PNG", "not an IDX file.*89 50 4e 47"),
        (b"\0\0\x0a\x03" + WHOLE[4:], "not an IDX file"),
        (idx_bytes(np.arange(7, dtype=np.int16)), "1 axes where 3"),
        (WHOLE[:13], "is empty: "),
        (WHOLE[:-1], r"is cut off: it announces values of shape \(7, 5, 3\)"),
        (WHOLE[:16], "is cut off: "),
        (WHOLE + b"\0", "is too long: "),
        (WHOLE[:4] + b"\0\0\0\0" + WHOLE[8:], r"is empty: .*shape \(0, 5, 3\)"),
        (WHOLE[:4] + b"\xff" * 12 + WHOLE[16:], "announces needs .* of memory"),
        (WHOLE[:4] + b"\x04\0\0\0" + WHOLE[8:], "is cut off: |announces needs"),
    ],
)
def test_idx_files_with_other_bytes_than_announced_are_refused(tmp_path, pack, content, complaint):
    (tmp_path / "a").write_bytes(gzip.compress(content) if pack else content)
    with pytest.raises(errors.UserError, match=f"{tmp_path}/a .*{complaint}"):
        image_files.read_idx(tmp_path / "a", axes=3)


def test_damaged_gzip_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (307, 31, 37), np.uint8)  # nothing that gzip can shorten
    packed = gzip.compress(idx_bytes(noise))
    half = len(packed) // 2
    for content, complaint in (
        (packed[:half] + bytes([packed[half] ^ 0xFF]) + packed[half + 1 :], "damaged gzip"),
        (packed[:-8] + bytes(4) + packed[-4:], "damaged gzip"),  # the checksum
        (b"\x1f\x8b" + packed[2:][::-1], "damaged gzip"),
        (packed[:half], "damaged gzip"),
    ):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(errors.UserError, match=complaint):
            image_files.read_idx(tmp_path / "a.gz", axes=3)
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(errors.UserError, match="cannot be read"):
            image_files.read_idx(missing, axes=3)


@pytest.mark.parametrize("missing", range(1, 9))
def test_a_gzip_file_cut_inside_its_checksum_is_refused(tmp_path, missing):
    """All values are there. Also where the cut is in the second of two members, of which one may be empty."""
    for packed in (
        gzip.compress(WHOLE),
        gzip.compress(WHOLE[:50]) + gzip.compress(WHOLE[50:]),
        gzip.compress(WHOLE) + gzip.compress(b""),
    ):
        (tmp_path / "a.gz").write_bytes(packed)
        assert image_files.read_idx(tmp_path / "a.gz", axes=3).size == BODY // 2
        (tmp_path / "a.gz").write_bytes(packed[:-missing])
        with pytest.raises(errors.UserError, match="a.gz is a damaged gzip file"):
            image_files.read_idx(tmp_path / "a.gz", axes=3)


def test_what_follows_a_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(WHOLE)
    for more, complaint in (
        (b"garbage", "damaged gzip"),
        (gzip.compress(b"\0"), "is too long"),
        (packed[:-8], "is too long"),
    ):
        (tmp_path / "a.gz").write_bytes(packed + more)
        with pytest.raises(errors.UserError, match=complaint):
            image_files.read_idx(tmp_path / "a.gz", axes=3)
    for at in (-8, -4):  # the checksum, and the length
        (tmp_path / "a.gz").write_bytes(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
        with pytest.raises(errors.UserError, match="damaged gzip"):
            image_files.read_idx(tmp_path / "a.gz", axes=3)


@hypothesis.given(st.booleans(), st.data())
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_no_damage_to_a_file_gets_past_as_anything_else(tmp_path, pack, data):
    """Whatever one byte becomes, an IDX file is read or refused with a sentence."""
    content = bytearray(gzip.compress(WHOLE) if pack else WHOLE)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "a").write_bytes(content)
    try:
        assert image_files.read_idx(tmp_path / "a", axes=3).size == BODY // 2
    except errors.UserError as error:
        assert str(tmp_path) in str(error)
