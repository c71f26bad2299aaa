"""A named file is at hand, or downloaded whole or not at all."""

import contextlib
import hashlib
import http.server
import socket
import threading

import pytest

from experiments.data import download, text
from experiments.engine import errors

# Text.


def write(folder, **contents):
    for name, content in contents.items():
        (folder / name).write_bytes(content)


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


def test_a_download_that_does_not_end_is_cut_off(play, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 3)
    play("/good")
    with pytest.raises(errors.UserError, match="it sends more than 3 bytes.*by hand"):
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
