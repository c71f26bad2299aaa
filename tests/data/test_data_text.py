"""Text is found or downloaded whole or not at all, split by its content, and turned into ids and back."""

import argparse
import contextlib
import hashlib
import http.server
import inspect
import json
import os
import socket
import sysconfig
import textwrap
import threading

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.data import download, parts, text, tokenizer
from experiments.engine import errors

# Split.

CONTENTS = st.lists(st.binary(max_size=3), min_size=2, max_size=31).filter(lambda contents: len(set(contents)) > 1)


@hypothesis.given(CONTENTS, st.sampled_from([0.001, 0.1, 0.5, 0.999]))
@hypothesis.settings(deadline=None)
def test_held_out_follows_content_and_leaves_neither_side_empty(contents, share):
    out = parts.held_out(contents, share=share)
    held, kept = ({c for c, o in zip(contents, out, strict=True) if o == side} for side in (True, False))
    assert held and kept and not held & kept
    assert np.array_equal(parts.held_out(contents[::-1], share=share), out[::-1])


def test_held_out_is_the_share_and_the_smallest_digests():
    contents = [str(number).encode() for number in range(10_007)]
    out = parts.held_out(contents, share=0.1)
    assert abs(out.mean() - 0.1) < 5 * np.sqrt(0.09 / len(contents))
    more = parts.held_out(contents + [b"another"], share=0.1)
    assert np.array_equal(more[:-1], out)  # what is added moves nothing else
    few = contents[:3]
    smallest = min(few, key=lambda content: hashlib.sha256(content).digest())
    assert [content for content, o in zip(few, parts.held_out(few, share=1e-9), strict=True) if o] == [smallest]
    with pytest.raises(errors.UserError, match="differ"):
        parts.held_out([b"a", b"a"], share=0.1)


# Text.


def write(folder, **contents):
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def test_one_file_is_cut_after_nine_tenths(tmp_path):
    write(tmp_path, a=bytes(range(1, 98)))
    found = text.load(str(tmp_path / "a"))
    assert found.train == [bytes(range(1, 88))] and found.evaluation == [bytes(range(88, 98))]
    assert found.name == str(tmp_path / "a")


@hypothesis.given(st.text(st.sampled_from("aé€😀"), min_size=11, max_size=61))
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_one_file_is_never_cut_inside_a_character(tmp_path, characters):
    content = characters.encode()
    write(tmp_path, a=content)
    found = text.load(str(tmp_path / "a"))
    train, evaluation = map(bytes, found.train + found.evaluation)
    assert train.decode() + evaluation.decode() == characters
    assert 0 <= len(content) * 9 // 10 - len(train) < 4


def test_a_folder_is_read_in_order_without_what_is_hidden_or_empty(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    names = [f"f{number:02}" for number in range(37)]
    write(tmp_path, **{name: name.encode() for name in names})
    write(tmp_path, empty=b"", **{".hidden": b"hidden"})
    write(tmp_path / ".git", config=b"config")
    write(tmp_path / "sub", copy=b"f07", twin=b"f30")
    os.mkfifo(tmp_path / "pipe")
    found = text.load(str(tmp_path))
    expected = [*sorted(names), "f07", "f30"]
    assert sorted(found.train + found.evaluation) == sorted(name.encode() for name in expected)
    assert found.train == [name.encode() for name in expected if name.encode() in found.train]
    assert not set(found.train) & set(found.evaluation) and found.evaluation


def test_a_folder_with_a_single_text_is_cut_like_a_file(tmp_path):
    write(tmp_path, a=b"0123456789", b=b"0123456789")
    found = text.load(str(tmp_path))
    assert (found.train, found.evaluation, found.said) == ([b"012345678"], [b"9"], "")


def test_the_standard_library_is_text():
    found = text.load("stdlib")
    with open(os.path.join(sysconfig.get_path("stdlib"), "argparse.py"), "rb") as file:
        assert file.read() in found.train + found.evaluation
    sizes = [sum(map(len, part)) for part in (found.train, found.evaluation)]
    assert len(found.train) + len(found.evaluation) > 100
    assert 0.02 < sizes[1] / sum(sizes) < 0.3
    assert text.load("stdlib") == found


def test_docstrings_are_the_english_of_the_standard_library():
    found = text.load("docstrings")
    everything = b"".join(found.train + found.evaluation)
    assert inspect.getdoc(argparse).encode() in everything and inspect.getdoc(textwrap.dedent).encode() in everything
    code = b"".join(text.load("stdlib").train + text.load("stdlib").evaluation)
    assert 0.1 * len(code) < len(everything) < 0.5 * len(code)
    share = [content.count(b"self.") / len(content) for content in (everything, code)]
    assert share[0] < 0.1 * share[1]  # words about code, not the code


@pytest.mark.parametrize("source", ["", "nothing/here", "a\0b", "tinyshakespear"])
def test_an_unknown_source_lists_the_named_ones(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UserError, match=r"stdlib, docstrings, tinyshakespeare.*" + str(tmp_path)):
        text.load(source)


def test_text_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    write(tmp_path, empty=b"", short=b"x", accent="é".encode())
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", empty=b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "link").symlink_to(tmp_path / "nowhere")
    for source, complaint in (
        ("empty", "holds no text"),
        ("folder", "holds no text"),
        ("short", "too little text"),
        ("accent", "too little text"),
        ("loop", "cannot be read"),
        ("broken", "link cannot be read"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(errors.UserError, match=complaint):
            text.load(str(tmp_path / source))


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)  # the suite may run as one who may read everything
    with pytest.raises(errors.UserError, match="Permission denied"):
        text.load(str(tmp_path))


HERE = os.path.isfile(os.path.join(os.environ.get("TFM_DATA", ""), "tinyshakespeare.txt"))


@pytest.mark.skipif(not HERE, reason="$TFM_DATA names no folder with tinyshakespeare.txt")
def test_tinyshakespeare_is_the_usual_one():
    found = text.load("tinyshakespeare")
    made = tokenizer.make("characters", found.train, evaluation=found.evaluation)
    assert made.size == 65 and made.specials == ()
    assert len(made.join(found.train)) == 1_003_854
    assert len(made.join(found.evaluation)) == 111_540


# Download.

GOOD = b"To be, or not to be: that is the question.\n" * 3001
SHA256 = hashlib.sha256(GOOD).hexdigest()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", str(len(GOOD)))
        self.end_headers()
        body = {"/good": GOOD, "/wrong": GOOD[::-1], "/broken": GOOD[:-1000], "/missing": GOOD}[self.path]
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def web():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def play(web, tmp_path, monkeypatch):
    """`play(path)` names a set 'play' at this path of the server; all folders lie in tmp_path."""
    monkeypatch.delenv("TFM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "TIMEOUT", 5.0)

    def name(path):
        monkeypatch.setitem(download.NAMED, "play", ("play.txt", f"http://127.0.0.1:{web.server_port}{path}", SHA256))

    return name


def left(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_file_is_downloaded_once(play, web, tmp_path):
    play("/good")
    path = download.fetch("play")
    assert path == tmp_path / "cache" / "tfm" / "play.txt" and path.read_bytes() == GOOD
    assert download.fetch("play") == path and web.asked == ["/good"]
    assert left(tmp_path) == [path]
    assert b"".join(text.load("play").train + text.load("play").evaluation) == GOOD


def test_a_file_at_hand_is_used_in_order(play, web, tmp_path, monkeypatch):
    play("/good")
    folders = [tmp_path / name for name in ("env", "data", "cache/tfm")]
    for folder in folders:
        folder.mkdir(parents=True)
    for at in (2, 1, 0):
        write(folders[at], **{"play.txt": GOOD})
        monkeypatch.setenv("TFM_DATA", str(folders[0]))
        assert download.fetch("play", data_dir=str(folders[1])) == folders[at] / "play.txt"
    assert web.asked == []


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/wrong", f"sent another file for .*{SHA256}.*{hashlib.sha256(GOOD[::-1]).hexdigest()}"),
        ("/missing", "404.*by hand at .*play.txt"),
        ("/broken", "1000 more expected.*by hand"),
    ],
)
def test_a_bad_answer_leaves_nothing_behind(play, tmp_path, path, complaint):
    play(path)
    with pytest.raises(errors.UserError, match=complaint):
        download.fetch("play")
    assert left(tmp_path) == []


def test_no_connection_says_what_to_do_by_hand(play, tmp_path, monkeypatch):
    play("/good")
    with contextlib.closing(socket.socket()) as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}/"
        monkeypatch.setitem(download.NAMED, "play", ("play.txt", url, SHA256))
        with pytest.raises(errors.UserError, match=r"refused.*by hand at .*play.txt, .*TFM_DATA"):
            download.fetch("play")
    assert left(tmp_path) == []


def test_a_silent_server_is_not_waited_for(play, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setitem(download.NAMED, "play", ("play.txt", url, SHA256))
        with pytest.raises(errors.UserError, match="timed out"):
            download.fetch("play")
    assert left(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(play, tmp_path):
    play("/good")
    write(tmp_path, cache=b"a file where a folder should be")
    with pytest.raises(errors.UserError, match="by hand"):
        download.fetch("play")


def test_a_changed_file_at_hand_is_refused(play, tmp_path):
    play("/good")
    write(tmp_path, **{"play.txt": GOOD[:-1]})
    found = hashlib.sha256(GOOD[:-1]).hexdigest()
    with pytest.raises(errors.UserError, match=f"play.txt has sha256 {found}.*{SHA256}"):
        download.fetch("play", data_dir=str(tmp_path))
    with pytest.raises(errors.UserError, match="'poem'.*play, tinyshakespeare"):
        download.fetch("poem")


# Tokenizer.

DOCUMENTS = st.lists(st.text(max_size=11).map(str.encode), min_size=1, max_size=5)


@hypothesis.given(DOCUMENTS, st.sampled_from(tokenizer.KINDS))
@hypothesis.settings(deadline=None)
def test_what_is_encoded_decodes_to_itself(documents, kind):
    made = tokenizer.make(kind, documents, specials=("[MASK]",))
    ids = made.join(documents)
    assert ids.dtype == np.uint8 and made.decode(ids) == "\0".join(document.decode() for document in documents)
    for document in documents:
        assert made.decode(made.encode(document.decode())) == document.decode()
    assert tokenizer.from_json(json.loads(made.files["tokenizer.json"])) == made


@hypothesis.given(st.binary(max_size=31))
def test_bytes_are_their_own_ids(document):
    made = tokenizer.make("bytes", [])
    assert made.size == made.ordinary == 256
    assert made.join([document]).tolist() == list(document)
    assert made.decode(list(document)) == document.decode("utf-8", "replace")


def test_characters_are_numbered_in_order_and_specials_follow():
    made = tokenizer.make("characters", ["béa😀b".encode()], specials=("[MASK]", "[SEP]"))
    assert made.characters == "abé😀" and made.ordinary == 4 and made.size == 6
    assert made.encode("😀ab").tolist() == [3, 0, 1]
    assert made.special("[MASK]") == made.mask == 4
    assert made.decode([0, 4, 3, 5]) == "a[MASK]😀[SEP]"
    for each, name in ((made, "[CLS]"), (tokenizer.make("characters", [b"a"]), "[MASK]")):
        with pytest.raises(errors.UserError, match="no special"):
            each.special(name)
    assert made.decode([0, -1, 6, 1]) == "ab"  # rows of a model that no word has


def test_the_separator_is_known_only_where_documents_are_joined():
    assert tokenizer.make("characters", [b"ab"]).characters == "ab"
    two = tokenizer.make("characters", [b"ab", b"ca"])
    assert two.characters == "\0abc" and two.join([b"ab", b"ca"]).tolist() == [1, 2, 0, 3, 1]
    assert two.join([b"ab"]).tolist() == [1, 2]
    one = tokenizer.make("characters", [b"ab"], evaluation=[b"a", b"b"])
    assert one.join([b"a", b"b"]).tolist() == [1, 0, 2] and one.specials == ()
    plain = tokenizer.make("bytes", [])
    assert plain.join([b"a", b"b"]).tolist() == [97, 0, 98]


@pytest.mark.parametrize("unseen", ["c", " ", "é", "😀"])  # between, below and above the known code points
def test_unseen_characters_are_unknown(unseen):
    documents, strange = [b"abd"], [f"a{unseen}d".encode()]
    made = tokenizer.make("characters", documents, specials=("[MASK]",), evaluation=strange)
    assert made.specials == ("[MASK]", "[UNK]") and made.characters == "abd"
    assert made.join(strange).tolist() == [0, 4, 2] and made.decode([0, 4, 2]) == "a[UNK]d"
    given = tokenizer.make("characters", documents, specials=("[UNK]", "[MASK]"), evaluation=strange)
    assert given.specials == ("[UNK]", "[MASK]") and given.join(strange).tolist() == [0, 3, 2]
    without = tokenizer.make("characters", documents, evaluation=[b"da"])
    assert without.specials == ()
    with pytest.raises(errors.UserError, match=f"{unseen!r} is unknown"):
        without.join(strange)


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(errors.UserError, match="'charcters'.*did you mean 'characters'.*bytes, characters"):
        tokenizer.make("charcters", [])
    with pytest.raises(errors.UserError, match="'words'.*bytes, characters"):
        tokenizer.make("words", [])


@pytest.mark.parametrize("chunk", range(1, 9))
def test_the_first_byte_that_is_no_utf8_is_named_wherever_a_piece_ends(monkeypatch, chunk):
    monkeypatch.setattr(tokenizer, "CHUNK", chunk)
    with pytest.raises(errors.UserError, match="byte 5, near"):
        tokenizer.make("characters", ["a\N{GRINNING FACE}".encode() + b"\xb6b"])


def test_characters_need_utf8():
    latin = "naïve".encode("latin-1")
    for documents, evaluation in (([b"a", latin], []), ([b"a"], [latin])):
        with pytest.raises(errors.UserError, match="not UTF-8 text .byte 2.*'bytes'"):
            tokenizer.make("characters", documents, evaluation=evaluation)
    with pytest.raises(errors.UserError, match="not UTF-8"):
        tokenizer.make("characters", [b"a"]).join([latin])
    assert tokenizer.make("bytes", [latin]).join([latin]).tolist() == list(latin)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "words"},
        {"kind": "bytes"},
        {"characters": "ba"},
        {"characters": "aa"},
        {"characters": 3},
        {"specials": "[UNK]"},
        {"specials": [1]},
        {"more": 1},
    ],
)
def test_a_saved_tokenizer_must_hold_together(wrong):
    saved = {"kind": "characters", "characters": "ab", "specials": ["[UNK]"]}
    assert tokenizer.from_json(saved).size == 3
    with pytest.raises(errors.UserError):
        tokenizer.from_json({**saved, **wrong})
