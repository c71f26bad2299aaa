"""The file of a named data set is found locally, or downloaded completely or not at all."""

import contextlib
import gc
import hashlib
import http.server
import socket
import threading

import pytest
from errors import raises
from small_files import write

from experiments.config import errors
from experiments.data import download, text

GOOD = b"To be, or not to be: that is the question.\n" * 3001
SHA256 = hashlib.sha256(GOOD).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
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
def web_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def play(web_server, tmp_path, monkeypatch):
    """Return a function (path, port) that defines a data set 'play' with this URL. All folders are in tmp_path."""
    monkeypatch.delenv("TFM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "TIMEOUT", 5.0)

    def name_data_set(path, port=web_server.server_port):
        monkeypatch.setitem(download.NAMED, "play", ("play.txt", f"http://127.0.0.1:{port}{path}", SHA256))

    return name_data_set


def check_refusal(tmp_path, *words):
    with raises(errors.RunError, *words):
        download.fetch(*download.NAMED["play"])
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_file_is_downloaded_once_and_a_local_file_comes_first(play, web_server, tmp_path, monkeypatch):
    play("/good")
    path = download.fetch(*download.NAMED["play"])
    assert path == tmp_path / "cache" / "tfm" / "play.txt" and path.read_bytes() == GOOD
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == [path]
    assert b"".join(b"".join(part) for part in text.load("play")[1:3]) == GOOD
    monkeypatch.setenv("TFM_DATA", str(tmp_path))
    assert download.fetch(*download.NAMED["play"]) == path and web_server.asked == ["/good"]
    write(tmp_path, **{"play.txt": GOOD})
    assert download.fetch(*download.NAMED["play"]) == tmp_path / "play.txt" and web_server.asked == ["/good"]
    write(tmp_path, **{"play.txt": GOOD[:-1]})  # a file with other content is refused, not skipped
    with raises(errors.UserError, hashlib.sha256(GOOD[:-1]).hexdigest(), SHA256):
        download.fetch(*download.NAMED["play"])


@pytest.mark.parametrize(
    ("path", "word"), [("/wrong", hashlib.sha256(GOOD[::-1]).hexdigest()), ("/missing", 404), ("/broken", 1000)]
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # requests does not close the socket of a broken response
def test_a_bad_response_writes_no_file(play, tmp_path, path, word):
    play(path)
    check_refusal(tmp_path, path, word, "cache/tfm/play.txt")
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # requests does not close the socket of a silent server
def test_a_refused_connection_and_a_silent_server_are_errors_with_a_remedy(play, tmp_path, monkeypatch):
    with contextlib.closing(socket.socket()) as closed_socket:
        closed_socket.bind(("127.0.0.1", 0))
        play("/", closed_socket.getsockname()[1])
        check_refusal(tmp_path, "refused", "play.txt", "TFM_DATA")
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent_server:
        play("/", silent_server.getsockname()[1])
        check_refusal(tmp_path, "timed out")
    gc.collect()
